"""Loads pretrained models from a Hugging Face folder, a name on the Hub, a GGUF file, or a run."""

import re
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from contextready.data.tokenizer import FILE, Tokenizer
from contextready.errors import ContextReadyError
from contextready.extras import require
from contextready.formats.tokenizer_json import read_tokenizer_json
from contextready.hf.trust import is_trusting, never_asking
from contextready.hf.untrusted import check_gguf, check_model_files, check_size, needs_code
from contextready.runs.models import is_pretrained

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
GGUF = ".gguf"
UNFIT = ("missing_keys", "mismatched_keys")


def load_model(source: str, device: str = "cpu", dtype: Any = torch.float32) -> tuple[Any, Any]:
    """Load a causal language model, context-ready or not, and its tokenizer; a run is converted in memory.

    A name that is not a local folder is looked up on the Hub. `dtype="auto"` keeps the type of the weights. A folder's
    own code is not run, except inside `trusting(True)`.
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
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    with _located(source) as where, _cautious(source):
        try:
            config, trusted = _with_least_trust(source, AutoConfig.from_pretrained, where)
        except ContextReadyError:
            raise
        except Exception as error:
            _refuse(source, error)
        if config.is_encoder_decoder:
            raise ContextReadyError(
                f"{source} is an encoder-decoder model ({config.model_type}); only decoder-only models can be "
                "converted."
            )
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            if "AutoModelForCausalLM" not in (getattr(config, "auto_map", None) or {}):
                raise ContextReadyError(
                    f"{source} is not a causal language model: transformers has none of type {config.model_type}."
                )
            if not is_trusting():
                raise needs_code(source, "config.json, auto_map")
            trusted = True
        if Path(source).exists() and not trusted:
            check_size(source, config)
        try:
            lm, info = AutoModelForCausalLM.from_pretrained(
                **where,
                dtype=dtype,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                trust_remote_code=trusted,
            )
        except ContextReadyError:
            raise
        except Exception as error:
            if "trust_remote_code" in str(error):
                raise ContextReadyError(
                    f"{source} cannot be loaded as a model: its base_config needs Python code of its own, which is "
                    "never run."
                ) from None
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


def load_config(source: str) -> Any:
    """Load a model's configuration with transformers, without its weights."""
    require("transformers", "hf")
    from transformers import AutoConfig

    with _located(source) as where, _cautious(source):
        try:
            return _with_least_trust(source, AutoConfig.from_pretrained, where)[0]
        except ContextReadyError:
            raise
        except Exception as error:  # transformers and configurations raise anything
            _refuse(source, error)


def load_tokenizer(source: str) -> Any:
    """Load a model's tokenizer with transformers."""
    require("transformers", "hf")
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    with _located(source, weights=False) as where, _cautious(source):
        if (Path(source) / FILE).exists():
            read_tokenizer_json(Path(source) / FILE)
        try:
            tokenizer, _ = _with_least_trust(source, AutoTokenizer.from_pretrained, where)
        except ContextReadyError:
            raise
        except BaseException as error:
            # A panic in Rust is not even an Exception, and its class cannot be imported.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ContextReadyError(f"The tokenizer of {source} cannot be loaded: {first_line(error)}") from None
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ContextReadyError(
            f"The tokenizer of {source} cannot be loaded: tokenizer_config.json names a {type(tokenizer).__name__}."
        )
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer with transformers, which may fail on settings that it loaded without complaint."""
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:
        raise ContextReadyError(f"The tokenizer cannot be saved: {first_line(error)}") from None


def native_tokenizer(source: str) -> Tokenizer | None:
    """Load a model's tokenizer as a native `Tokenizer`; None unless it is a fast tokenizer."""
    folder = Path(source)
    with _located(source):
        if (folder / FILE).is_file():
            return Tokenizer.load(folder)
        loaded = load_tokenizer(source)
    inner = getattr(loaded, "backend_tokenizer", None)
    return None if inner is None else Tokenizer(inner, loaded.eos_token)


@contextmanager
def _located(source: str, weights: bool = True) -> "Iterator[dict[str, Any]]":
    """Arguments with which transformers finds the model inside the block; refuses what cannot be one."""
    import contextready.hf.modeling  # noqa: F401  (registers its classes, whose code need not be run then)

    path = Path(source)
    if path.suffix == GGUF:
        require("gguf", "hf")
        require("accelerate", "hf")
        check_gguf(path)
        with TemporaryDirectory(prefix="contextready-") as alone:
            # In a folder of its own, because transformers would also read the settings and adapters beside the file.
            file = Path(alone) / path.name
            file.symlink_to(path.absolute())
            yield {"pretrained_model_name_or_path": alone, "gguf_file": str(file), "local_files_only": True}
        return
    if path.is_dir():
        if weights and not is_pretrained(path):
            raise ContextReadyError(
                f"{source} is not a Hugging Face model: it has no config.json with a model_type. To convert a run: "
                "crt convert RUN OUT"
            )
        check_model_files(source, weights)
        yield {"pretrained_model_name_or_path": source, "local_files_only": True}
        return
    if path.exists() or not HUB_NAME.fullmatch(source):
        raise ContextReadyError(
            f"There is no model at {source}; give a folder, a .gguf file, or the name of a model on the Hugging Face "
            "Hub."
        )
    check_model_files(source, weights)
    yield {"pretrained_model_name_or_path": source}


@contextmanager
def _cautious(source: str) -> "Iterator[None]":
    """Inside the block, transformers is silent, asks nothing, and for a model on disk does not contact the Hub."""
    with quiet(), never_asking(offline=Path(source).exists() and not is_trusting()):
        yield


def _with_least_trust(source: str, load: "Callable[..., Any]", where: dict[str, Any]) -> tuple[Any, bool]:
    """Load without the folder's own code if possible, and with it if the user trusts it; also returns which."""
    try:
        return load(**where, trust_remote_code=False), False
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
    if not is_trusting():
        raise needs_code(source, "auto_map")
    return load(**where, trust_remote_code=True), True


def _refuse(source: str, error: Exception) -> NoReturn:
    raise ContextReadyError(f"{source} cannot be loaded as a model: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """What an error of another library says, as the end of a sentence."""
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
