"""Settings of a pretrained model's tokenizer (special tokens, chat templates), as a checkpoint keeps them.

A checkpoint has a tokenizer.json, which turns text into tokens. Everything else that `tokenizer.save_pretrained` writes
is stored in its description of the pretrained model. So `crt convert RUN` needs the original model no longer.
"""

import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from contextready.data.tokenizer import FILE
from contextready.errors import ContextReadyError
from contextready.hf.load import load_tokenizer, quiet, save_tokenizer

KEPT = re.compile(
    r"tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|chat_template\.jinja"
    r"|additional_chat_templates/[\w.-]+\.jinja"
)
"""Files that are kept; vocabularies are in tokenizer.json."""


def read_tokenizer_settings(source: str) -> dict[str, str]:
    """The settings of a model's tokenizer: file names and contents."""
    tokenizer = load_tokenizer(source)
    with TemporaryDirectory(prefix="contextready-") as temporary:
        folder = Path(temporary)
        with quiet():
            save_tokenizer(tokenizer, folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in files]
        return {
            name: path.read_text(encoding="utf-8")
            for name, path in zip(names, files, strict=True)
            if KEPT.fullmatch(name)
        }


def load_with_settings(checkpoint: Path, settings: Any) -> Any:
    """Load the tokenizer of a checkpoint with transformers, with these settings."""
    if not isinstance(settings, dict) or not all(
        KEPT.fullmatch(str(name)) and isinstance(text, str) for name, text in settings.items()
    ):
        raise ContextReadyError(f"The tokenizer settings in {checkpoint} are damaged; convert another checkpoint.")
    with TemporaryDirectory(prefix="contextready-") as temporary:
        folder = Path(temporary)
        shutil.copyfile(checkpoint / FILE, folder / FILE)
        for name, text in settings.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        try:
            return load_tokenizer(temporary)
        except ContextReadyError as error:
            raise ContextReadyError(str(error).replace(temporary, str(checkpoint))) from None
