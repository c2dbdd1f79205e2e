"""Writes the code beside saved weights, so that `trust_remote_code` loads them when this package is not installed.

Hugging Face copies the files of a model's folder into one directory and follows relative imports. So every module that
`hf/modeling.py` needs is written as one file, named after its path, with relative imports.
"""

import ast
import re
from pathlib import Path

PACKAGE = "contextready"
ENTRY = f"{PACKAGE}.hf.modeling"
ROOT = Path(__file__).parent.parent


def file_stem(module: str) -> str:
    """contextready.hf.modeling → contextready_hf_modeling."""
    return module.replace(".", "_")


HEADER = "# Part of contextready, the context-ready transformer. Apache License 2.0. Written by save_pretrained.\n"


def write_code(folder: str | Path) -> None:
    """Write the modules that a saved model needs into its folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for module, source in needed_modules().items():
        (folder / f"{file_stem(module)}.py").write_text(HEADER + made_relative(source), encoding="utf-8")


def needed_modules() -> dict[str, str]:
    """Source code, by module name, of every contextready module that the model imports, directly or indirectly."""
    sources: dict[str, str] = {}
    waiting = [ENTRY]
    while waiting:
        module = waiting.pop()
        if module in sources:
            continue
        source = (ROOT / Path(*module.split(".")[1:])).with_suffix(".py").read_text(encoding="utf-8")
        sources[module] = source
        waiting += _imported(source)
    return dict(sorted(sources.items()))


def made_relative(source: str) -> str:
    """Turn imports of this package into relative imports of the files in the same folder."""
    theirs = rf"^(\s*)from ({PACKAGE}(?:\.\w+)+) import"
    return re.sub(theirs, lambda match: f"{match[1]}from .{file_stem(match[2])} import", source, flags=re.M)


def _imported(source: str) -> list[str]:
    """Modules of this package that the source imports at its top level."""
    return [
        node.module
        for node in ast.parse(source).body
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith(f"{PACKAGE}.")
    ]
