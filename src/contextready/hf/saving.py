"""Saves a model together with the code that loads it, whether this module is installed or was copied with a model."""

import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

ENTRY = "contextready_hf_modeling"
"""The copied module that has the classes."""


class SavesItsCode:
    """A model that `trust_remote_code` can load when this package is not installed."""

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Save weights, configuration, and the code that loads them when this package is not installed."""
        folder, config = Path(save_directory), self.config  # type: ignore[attr-defined]
        folder.mkdir(parents=True, exist_ok=True)
        if __name__.startswith("contextready."):
            # Imported by name: Hugging Face scans the text of this file for imports, and bundle.py is not copied.
            import_module("contextready.hf.bundle").write_code(folder)
        else:
            for file in Path(__file__).parent.glob("contextready_*.py"):
                shutil.copyfile(file, folder / file.name)
        # For a class loaded as remote code, transformers would rewrite auto_map for the single file that defines it.
        type(config)._auto_class = None
        config.auto_map = {
            "AutoConfig": f"{ENTRY}.{type(config).__name__}",
            "AutoModelForCausalLM": f"{ENTRY}.{type(self).__name__}",
        }
        super().save_pretrained(folder, **kwargs)  # type: ignore[misc]
