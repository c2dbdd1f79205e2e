"""Saving a model together with the code that loads it, here and from wherever that code was copied to."""

import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

ENTRY = "contextready_hf_modeling"
"""The copied module that has the classes."""


class SavesItsCode:
    """A model that `trust_remote_code` loads where this package is not installed."""

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Save weights and configuration, and with them the code that loads them where this package is not."""
        folder, config = Path(save_directory), self.config  # type: ignore[attr-defined]
        folder.mkdir(parents=True, exist_ok=True)
        if __name__.startswith("contextready."):
            # By name: Hugging Face looks for imports in the text of this file, which goes along without that one.
            import_module("contextready.hf.bundle").write_code(folder)
        else:
            for file in Path(__file__).parent.glob("contextready_*.py"):
                shutil.copyfile(file, folder / file.name)
        # Loaded as remote code, a class has transformers write this anew, for the one file that it is in.
        type(config)._auto_class = None
        config.auto_map = {
            "AutoConfig": f"{ENTRY}.{type(config).__name__}",
            "AutoModelForCausalLM": f"{ENTRY}.{type(self).__name__}",
        }
        super().save_pretrained(folder, **kwargs)  # type: ignore[misc]
