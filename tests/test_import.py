"""`import contextready` brings in torch and numpy and nothing else that has to be installed."""

import json
import subprocess
import sys

SCRIPT = """
import json, sys
import torch, numpy
before = set(sys.modules)
import contextready
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps(sorted(name for name in new if name not in sys.stdlib_module_names)))
"""


def test_import_needs_torch_and_numpy_only():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["contextready"]


def test_every_module_of_the_library_imports_without_the_other_packages():
    """The command's printing and the files of a state import theirs where they are used."""
    script = """
import sys, pkgutil, importlib
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in (
            *("rich", "safetensors", "tokenizers", "yaml", "matplotlib", "tensorboard", "wandb", "datasets", "pyarrow"),
            *("zstandard", "pandas", "pytest", "hypothesis", "ggml", "gguf", "transformers", "llama_cpp", "peft"),
            *("lm_eval", "accelerate"),
        ):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import contextready
names = [m.name for m in pkgutil.walk_packages(contextready.__path__, "contextready.")]
# Classes of Hugging Face can only be defined where it is: these modules are imported after it was asked for.
at_home_there = ("backbone", "base", "cache", "configuration", "convert", "families", "finetune")
at_home_there += ("folder", "modeling", "native", "proof", "provider", "trainer")
for name in names:
    if name not in [f"contextready.hf.{module}" for module in at_home_there]:
        importlib.import_module(name)
print(len(names))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 15


def test_version_is_the_packages():
    from importlib.metadata import version

    import contextready

    assert contextready.__version__ == version("contextready")
