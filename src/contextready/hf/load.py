"""Loads pretrained models from a Hugging Face folder, a name on the Hub, a GGUF file, or a run."""

import re
import struct
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from contextready.data.tokenizer import FILE, Tokenizer
from contextready.errors import ContextReadyError
from contextready.extras import require
from contextready.runs.models import is_pretrained

if TYPE_CHECKING:
    from collections.abc import Iterator

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
GGUF = ".gguf"
UNFIT = ("missing_keys", "mismatched_keys")


def load_model(source: str, device: str = "cpu", dtype: Any = torch.float32) -> tuple[Any, Any]:
    """Load a causal language model, context-ready or not, and its tokenizer; a run is converted in memory.

    A name that is not a local folder is looked up on the Hub. `dtype="auto"` keeps the type of the weights.
    """
    require("transformers", "hf")
    path = Path(source)
    if path.is_dir() and not is_pretrained(path):
        from contextready.hf.native import from_native

        model, tokenizer = from_native(path)
        return model.to(device), tokenizer
    return load_lm(source, dtype).to(device).eval(), load_tokenizer(source)


def load_lm(source: str, dtype: Any = torch.float32) -> Any:
    """Load a causal language model from a folder, the Hub or a GGUF file; weights must be safetensors or GGUF."""
    require("transformers", "hf")
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    import contextready.hf.modeling  # noqa: F401  (registers its classes)

    where = _where(source)
    with quiet():
        config = _load_config(source, where)
        if config.is_encoder_decoder:
            raise ContextReadyError(
                f"{source} is an encoder-decoder model ({config.model_type}); only decoder-only models can be "
                "converted."
            )
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ContextReadyError(
                f"{source} is not a causal language model: transformers has none of type {config.model_type}."
            )
        try:
            lm, info = AutoModelForCausalLM.from_pretrained(
                **where, dtype=dtype, use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True
            )
        except ContextReadyError:
            raise
        except Exception as error:
            _refuse(source, error)
    wrong = sorted(key if isinstance(key, str) else key[0] for group in UNFIT for key in info[group])
    if wrong:
        raise ContextReadyError(
            f"The weights of {source} do not match its config.json: {len(wrong)} are missing or have another shape, "
            f"for example {wrong[0]}. Download or save the model again."
        )
    if "gguf_file" in where:
        # The weights are dequantised now. If this were saved with them, they would be read as quantised.
        del lm.config.quantization_config
    return lm.eval()


def load_tokenizer(source: str) -> Any:
    """Load a model's tokenizer with transformers."""
    require("transformers", "hf")
    from transformers import AutoTokenizer

    with quiet():
        try:
            return AutoTokenizer.from_pretrained(**_where(source, weights=False))
        except Exception as error:
            raise ContextReadyError(f"The tokenizer of {source} cannot be loaded: {_first_line(error)}") from None


def native_tokenizer(source: str) -> Tokenizer | None:
    """Load a model's tokenizer as a native `Tokenizer`; None unless it is a fast tokenizer."""
    _where(source)
    folder = Path(source)
    if (folder / FILE).is_file():
        return Tokenizer.load(folder)
    loaded = load_tokenizer(source)
    inner = getattr(loaded, "backend_tokenizer", None)
    return None if inner is None else Tokenizer(inner, loaded.eos_token)


def _where(source: str, weights: bool = True) -> dict[str, str]:
    """Arguments with which transformers finds the model; refuses what cannot be one."""
    path = Path(source)
    if path.suffix == GGUF:
        require("gguf", "hf")
        require("accelerate", "hf")
        _check_gguf(path)
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if path.is_dir():
        if weights and not is_pretrained(path):
            raise ContextReadyError(
                f"{source} is not a Hugging Face model: it has no config.json with a model_type. To convert a run: "
                "crt convert RUN OUT"
            )
        if weights and not any(path.glob("*.safetensors")):
            pickled = sorted(file.name for pattern in PICKLED for file in path.glob(pattern))
            if pickled:
                raise ContextReadyError(
                    f"The weights of {source} are pickled ({pickled[0]}), and reading them could run code; save them "
                    "as safetensors first with model.save_pretrained(FOLDER)."
                )
            raise ContextReadyError(f"{source} contains no weights: it has no .safetensors file. Save the model again.")
        return {"pretrained_model_name_or_path": source}
    if path.exists() or not HUB_NAME.fullmatch(source):
        raise ContextReadyError(
            f"There is no model at {source}; give a folder, a .gguf file, or the name of a model on the Hugging Face "
            "Hub."
        )
    return {"pretrained_model_name_or_path": source}


def _check_gguf(path: Path) -> None:
    if not path.is_file():
        raise ContextReadyError(f"There is no file at {path}; check the path.")
    with path.open("rb") as file:
        head = file.read(8)
    if head[:4] != b"GGUF" or len(head) < 8 or struct.unpack("<I", head[4:])[0] not in (2, 3):
        raise ContextReadyError(f"{path} is not a GGUF file (version 2 or 3); download or export it again.")


def _load_config(source: str, where: dict[str, str]) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(**where)
    except Exception as error:
        _refuse(source, error)


def _refuse(source: str, error: Exception) -> NoReturn:
    raise ContextReadyError(f"{source} cannot be loaded as a model: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") + "." if lines else f"{type(error).__name__}."


@contextmanager
def quiet() -> "Iterator[None]":
    """Silence the progress bars and log messages of transformers inside the block."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
