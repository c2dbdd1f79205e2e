"""Ways to plant code, pickles and other models in a Hugging Face folder. Whatever is run creates a file named `ran`."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CODE = """
open({marker!r}, "w").close()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig):
    model_type = "unheard_of"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokens(PreTrainedTokenizerFast):
    pass
def generate(model, **arguments):
    raise SystemExit(9)
"""
AUTO_MAP = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{{ ().__class__.__base__ }}{% endfor %}{% endfor %}"
ESCAPE = """{% for one in ().__class__.__base__.__subclasses__() if one.__name__ == "catch_warnings" %}
{{ one.__init__.__globals__["__builtins__"]["open"]("MARKER", "w") }}{% endfor %}"""


def hostile_copy(base: Path, folder: Path, marker: Path) -> Path:
    """A copy of a model folder with code that nothing names yet."""
    shutil.copytree(base, folder)
    (folder / "code.py").write_text(CODE.format(marker=str(marker)))
    return folder


def change(folder: Path, name: str, **changes: Any) -> None:
    """Change a JSON file of the folder, or create it."""
    path = folder / name
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values | changes))


def own_model(folder: Path) -> None:
    """A model that only the folder's code defines."""
    change(folder, "config.json", model_type="unheard_of", auto_map=AUTO_MAP)


def own_model_elsewhere(folder: Path) -> None:
    """A model that only code on the Hub defines."""
    elsewhere = {name: f"someone/code--{target}" for name, target in AUTO_MAP.items()}
    change(folder, "config.json", model_type="unheard_of", auto_map=elsewhere)


def own_model_of_a_known_kind(folder: Path) -> None:
    """A kind of model that transformers knows, but not as a language model."""
    (folder / "config.json").write_text(
        json.dumps({"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "code.Model"}})
    )


def own_model_inside(folder: Path) -> None:
    """A context-ready model around a model that only the folder's code defines."""
    inner = {"model_type": "vit", "auto_map": {"AutoModelForCausalLM": f"{folder}--code.Model"}}
    structure = {"blocks": "a", "head": [], "finish": "none", "factor": 1.0}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "contextready", "base_config": inner, "structure": structure})
    )


def own_code_for_a_known_model(folder: Path) -> None:
    """Code for a model and a tokenizer that transformers has itself."""
    change(folder, "config.json", auto_map=AUTO_MAP)
    change(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "code.Tokens"]})


def own_tokenizer(folder: Path) -> None:
    """A tokenizer that only the folder's code defines."""
    change(folder, "tokenizer_config.json", tokenizer_class="Tokens", auto_map={"AutoTokenizer": [None, "code.Tokens"]})


def own_tokenizer_in_a_list(folder: Path) -> None:
    """The same, as older versions of transformers wrote it."""
    change(folder, "tokenizer_config.json", tokenizer_class=None, auto_map=["code.Tokens", "code.Tokens"])


def class_that_is_no_tokenizer(folder: Path) -> None:
    """A class of transformers that is loaded as a tokenizer, and then loads the folder's code."""
    change(folder, "tokenizer_config.json", tokenizer_class="AutoProcessor")
    change(folder, "preprocessor_config.json", auto_map={"AutoProcessor": "code.Model"}, processor_class="Own")


def own_generate(folder: Path) -> None:
    """A function that replaces `generate`."""
    (folder / "custom_generate").mkdir()
    shutil.copy(folder / "code.py", folder / "custom_generate" / "generate.py")


def own_generate_in_settings(folder: Path) -> None:
    """A setting of generation that names a function."""
    change(folder, "generation_config.json", custom_generate=str(folder))


def own_generation_config(folder: Path) -> None:
    """Code that the settings of generation name."""
    change(folder, "generation_config.json", auto_map={"GenerationConfig": "code.Config"})


def own_pipeline(folder: Path) -> None:
    """A pipeline that only the folder's code defines."""
    change(folder, "config.json", custom_pipelines={"text-generation": {"impl": "code.Model", "pt": ["AutoModel"]}})


def hostile_templates(folder: Path) -> None:
    """Chat templates that would never end, or leave their sandbox."""
    escape = ESCAPE.replace("MARKER", str(folder.parent / "ran"))
    change(folder, "tokenizer_config.json", chat_template=FOREVER)
    (folder / "chat_template.jinja").write_text(escape)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text(FOREVER)


def python_files(folder: Path) -> None:
    """Files with the names of modules that are imported anyway."""
    for name in ("__init__", "sitecustomize", "torch", "transformers", "modeling_llama", "tokenization_llama"):
        shutil.copy(folder / "code.py", folder / f"{name}.py")


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return open, (str(self.marker), "w")


def pickled(folder: Path, name: str = "weights.bin") -> None:
    """A file of pickled weights beside the others."""
    torch.save(Evil(folder.parent / "ran"), folder / name)


def pickled_only(folder: Path) -> None:
    """Pickled weights and no others."""
    (folder / "model.safetensors").unlink()
    pickled(folder, "pytorch_model.bin")


def pickled_by_another_name(folder: Path) -> None:
    """Pickled weights that pretend to be safetensors."""
    pickled(folder, "model.safetensors")


def pickled_in_the_index(folder: Path) -> None:
    """Pickled weights that an index of safetensors names."""
    pickled(folder)
    index(folder, "weights.bin")


def pickled_in_the_settings(folder: Path) -> None:
    """Pickled weights that config.json names."""
    pickled(folder, "adapter_model.bin")
    change(folder, "config.json", transformers_weights="adapter_model.bin")


def index(folder: Path, name: str) -> None:
    """An index according to which all weights are in one file."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file({"x": torch.zeros(1)}, folder / "other.safetensors")
    change(folder, "model.safetensors.index.json", metadata={}, weight_map=dict.fromkeys(weights, name))


def adapter(folder: Path) -> None:
    """An adapter of another model, with pickled weights."""
    change(
        folder,
        "adapter_config.json",
        base_model_name_or_path="someone/model",
        peft_type="LORA",
        target_modules=["q_proj"],
    )
    pickled(folder, "adapter_model.bin")


def kernel(folder: Path) -> None:
    """Attention that would be downloaded and run."""
    change(folder, "config.json", _attn_implementation="someone/attention")
