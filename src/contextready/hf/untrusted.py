"""Model folders from elsewhere: what they say is checked before transformers reads it.

transformers loads more than weights: Python code that a configuration names, pickles and files outside the folder that
an index of weights names, attention kernels and adapters from the Hub. All of that is refused here.
"""

import re
from collections.abc import Iterator
from copy import deepcopy
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from contextready.errors import ContextReadyError
from contextready.formats.gguf_file import read_gguf_file
from contextready.formats.json_file import read_json
from contextready.formats.limits import check_memory
from contextready.formats.safetensors_file import read_header
from contextready.hf.trust import OPTION, is_trusting

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
READ_FILES = (
    CONFIG,
    INDEX,
    "generation_config.json",
    "tokenizer_config.json",
    "adapter_config.json",
    "custom_generate/generate.py",
)
"""Files that decide what transformers loads."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
TOKENIZER_CLASS = re.compile(r"(?!Auto)\w*(Tokenizer|Backend)(Fast)?")
MOST_LAYERS = 10_000
MOST_PARTS = 1_000_000
"""Largest value of a setting named num_… or n_…; transformers creates lists of such lengths."""
LARGEST_VALUE = 1 << 40
SLACK = 1 << 22
"""Parameters that a model may have beyond four times those in its files; tied ones are not stored."""


def check_model_files(source: str, weights: bool = True) -> None:
    """Check everything in a folder, or under a name on the Hub, that decides what transformers loads."""
    folder = Path(source)
    if folder.is_dir():
        _check_kinds(folder)
    parts = {name: path for name in READ_FILES if (path := _find(source, name)) is not None}
    values = {name: read_json(path) for name, path in parts.items() if path.suffix == ".json"}
    for name, value in values.items():
        if not isinstance(value, dict):
            raise ContextReadyError(f"{parts[name]} must contain a JSON object; save the model again.")
    _check_code(source, values, has_generate="custom_generate/generate.py" in parts)
    for name in ("tokenizer_config.json", CONFIG):
        _check_tokenizer_class(source, name, values.get(name, {}).get("tokenizer_class"))
    if not weights:
        return
    config = values.get(CONFIG, {})
    check_settings(source, config)
    if "adapter_config.json" in values:
        raise ContextReadyError(
            f"{source} contains a PEFT adapter, which would load another model; merge the adapter into its model first "
            "with model.merge_and_unload()."
        )
    names = [str(name) for name in (config.get("transformers_weights"),) if name is not None]
    for name in names:
        _check_shard_name(source, CONFIG, name)
    if INDEX in values:
        _check_index(source, INDEX, values[INDEX])
    for name in names:
        if name.endswith(".json") and (path := _find(source, name)) is not None:
            _check_index(source, name, read_json(path))
    if folder.is_dir():
        _check_weights(folder)


def check_gguf(path: Path) -> None:
    """Check the structure of a GGUF file, and the sizes that it states."""
    for key, value in read_gguf_file(path).fields.items():
        most = MOST_LAYERS if key.endswith(("block_count", "expert_count")) else LARGEST_VALUE
        if isinstance(value, int) and abs(value) > most and not key.startswith(("general.", "tokenizer.")):
            raise ContextReadyError(f"{path} is damaged: {key[:80]} must be at most {most:,}. Download it again.")


def check_size(source: str, config: Any) -> None:
    """Refuse a configuration that describes a much larger model than the weights on disk, before it is allocated."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(deepcopy(config), trust_remote_code=False)
    except Exception:  # whatever is wrong, loading reports it
        return
    parameters = sum(p.numel() for p in lm.parameters())
    path = Path(source)
    stored = sum(_stored_sizes(path))
    if parameters > 4 * stored + SLACK:
        raise ContextReadyError(
            f"The weights of {source} do not match its {CONFIG if path.is_dir() else 'metadata'}, which describes "
            f"{parameters:,} parameters; the weights have only {stored:,}. Download or save the model again."
        )
    size = sum(t.numel() * t.element_size() for t in (*lm.parameters(), *lm.buffers()))
    check_memory(size, f"The model in {source}", "use a smaller model.")


def _stored_sizes(folder: Path) -> Iterator[int]:
    """The number of values in every tensor of a folder's weights, or of a GGUF file."""
    if not folder.is_dir():
        yield from (prod(tensor.shape) for tensor in read_gguf_file(folder).tensors.values())
        return
    for file in sorted(folder.glob("*.safetensors")):
        yield from (prod(tensor.shape) for tensor in read_header(file).tensors.values())


def _find(source: str, name: str) -> Path | None:
    """The file of this name in a folder or on the Hub, if it exists."""
    folder = Path(source)
    if folder.is_dir():
        return folder / name if (folder / name).exists() else None
    from transformers.utils import cached_file

    try:
        found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    except Exception as error:  # of the network, of the Hub or of its cache
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ContextReadyError(f"{source} cannot be loaded as a model: {lines[0].rstrip('.')}.") from None
    return None if found is None else Path(found)


def _check_kinds(folder: Path) -> None:
    for entry in sorted(folder.iterdir()):
        if entry.exists() and not entry.is_file() and not entry.is_dir():
            raise ContextReadyError(f"{entry} is not a regular file; remove it.")


def _check_code(source: str, values: dict[str, dict[str, Any]], has_generate: bool) -> None:
    """Refuse a folder that needs its own code, unless the user trusts it."""
    if is_trusting():
        return
    import transformers

    config, generation = values.get(CONFIG, {}), values.get("generation_config.json", {})
    tokenizer = values.get("tokenizer_config.json", {})
    own = None
    # transformers prefers its own classes, if it has them.
    if config.get("auto_map") and str(config.get("model_type")) not in transformers.CONFIG_MAPPING:
        own = f"{CONFIG}, auto_map"
    elif tokenizer.get("auto_map") and str(tokenizer.get("tokenizer_class")) not in dir(transformers):
        own = "tokenizer_config.json, auto_map"
    elif config.get("custom_pipelines"):
        own = f"{CONFIG}, custom_pipelines"
    elif generation.get("auto_map") or generation.get("custom_generate"):
        own = "generation_config.json"
    elif has_generate:
        own = "custom_generate/generate.py"
    if own is not None:
        raise needs_code(source, own)


def needs_code(source: str, where: str) -> ContextReadyError:
    """The error for a folder whose code would have to be run."""
    return ContextReadyError(
        f"{source} comes with Python code of its own ({where}), which was not run; if you trust its authors, give "
        f"{OPTION} to crt convert, crt eval or crt generate."
    )


def _check_tokenizer_class(source: str, file: str, name: Any) -> None:
    """transformers would call any of its own classes by this name, for example one that loads a model."""
    import transformers

    if name is not None and not TOKENIZER_CLASS.fullmatch(str(name)) and str(name) in dir(transformers):
        raise ContextReadyError(
            f"The tokenizer of {source} cannot be loaded: {file} names the class '{str(name)[:80]}', which is not a "
            "tokenizer."
        )


def check_settings(source: str, config: dict[str, Any]) -> None:
    """Refuse settings of a model that make transformers download something, run it or fill the memory."""
    for key, value in _settings(config):
        if ("attn_implementation" in key or "experts_implementation" in key) and "/" in str(value):
            raise ContextReadyError(
                f"{source} asks for a kernel from the Hub ({CONFIG}, {key}), which would be downloaded and run; remove "
                "that setting."
            )
        if key == "quantization_config" and value:
            raise ContextReadyError(
                f"The weights of {source} are quantised ({CONFIG}, {key}), so they can be neither converted nor "
                "trained; use the original model."
            )
        if not isinstance(value, int):
            continue
        most = LARGEST_VALUE
        if key.startswith(("num_", "n_")) and "position" not in key:
            most = MOST_PARTS
        if key.endswith(("layers", "n_layer")):
            most = MOST_LAYERS
        if abs(value) > most:
            raise ContextReadyError(
                f"{source} cannot be loaded as a model: in {CONFIG}, {key} must be at most {most:,}. Download or save "
                "the model again."
            )


def _settings(values: Any) -> Iterator[tuple[str, Any]]:
    """All keys with their values, at any depth."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield str(key), value
            yield from _settings(value)
    elif isinstance(values, list):
        for value in values:
            yield from _settings(value)


def _check_index(source: str, file: str, index: Any) -> None:
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not shards or not isinstance(index.get("metadata", {}), dict):
        raise ContextReadyError(f"{file} of {source} is not an index of weights; download or save the model again.")
    for name in set(map(str, shards.values())):
        if name.endswith(".json"):
            raise ContextReadyError(f"{file} of {source} names {name}, which is not a file of weights.")
        _check_shard_name(source, file, name)
    if Path(source).is_dir():
        for name in set(map(str, shards.values())):
            if not (Path(source) / name).is_file():
                raise ContextReadyError(
                    f"{file} of {source} names {name}, which is missing; download or save the model again."
                )


def _check_shard_name(source: str, file: str, name: str) -> None:
    """Weights must be safetensors in the same folder; everything else would be read from elsewhere, or by pickle."""
    if name.endswith(PICKLED):
        raise ContextReadyError(
            f"The weights of {source} are pickled ({file} names {name}), and reading them could run code; save them as "
            "safetensors first with model.save_pretrained(FOLDER)."
        )
    if (
        PurePosixPath(name).name != name
        or "\\" in name
        or not name.endswith((".safetensors", ".safetensors.index.json"))
    ):
        raise ContextReadyError(
            f"{file} of {source} names the weights '{name[:80]}', but weights must be .safetensors files in the same "
            "folder."
        )


def _check_weights(folder: Path) -> None:
    files = sorted(file.name for file in folder.iterdir())
    if any(DISTRIBUTED.fullmatch(name) for name in files):
        raise ContextReadyError(
            f"The weights of {folder} are in transformers' distributed format; save them again from one process with "
            "model.save_pretrained(FOLDER)."
        )
    if any(name.endswith(".safetensors") for name in files):
        return
    pickled = [name for name in files if name.endswith(PICKLED)]
    if pickled:
        raise ContextReadyError(
            f"The weights of {folder} are pickled ({pickled[0]}), and reading them could run code; save them as "
            "safetensors first with model.save_pretrained(FOLDER)."
        )
    raise ContextReadyError(f"{folder} contains no weights: it has no .safetensors file. Save the model again.")
