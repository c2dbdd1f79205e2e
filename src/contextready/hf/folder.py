"""A Hugging Face folder used in place of a run or checkpoint, for evaluation and generation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contextready.data.tokenizer import Tokenizer
from contextready.errors import ContextReadyError
from contextready.hf.backbone import HFBackbone
from contextready.hf.conventions import conventional_tokenizer
from contextready.hf.families import NotNativeError, native_backbone
from contextready.hf.load import load_lm, load_tokenizer, native_tokenizer
from contextready.hf.modeling import ContextReadyForCausalLM
from contextready.hf.native import LONGEST
from contextready.hf.proof import verified_structure
from contextready.model.context_ready import ContextReady
from contextready.runs.checkpoint import Checkpoint, Progress


@dataclass(frozen=True)
class PretrainedFolder(Checkpoint):
    """A Hugging Face model, context-ready or not, with the interface of a checkpoint."""

    lm: Any

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens."""
        size: int = self.lm.config.get_text_config().vocab_size
        return size

    @property
    def trained_length(self) -> int:
        """The number of tokens that the model was made to read."""
        return _known_length(self.lm) or LONGEST

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer as transformers does, with the model's conventions."""
        ends = self.lm.generation_config.eos_token_id
        return conventional_tokenizer(load_tokenizer(str(self.folder)), ends, str(self.folder))

    def model(self) -> ContextReady:
        """The model, on the CPU and in evaluation mode, natively if its family has a native form.

        A model that is not context-ready has no correction.
        """
        is_ready = isinstance(self.lm, ContextReadyForCausalLM)
        try:
            backbone = native_backbone(self.lm.lm if is_ready else self.lm)
        except NotNativeError:
            return self.lm.model if is_ready else self._wrapped()
        return ContextReady(backbone, self.lm.model.correction if is_ready else None).eval()

    def _wrapped(self) -> ContextReady:
        return ContextReady(HFBackbone(self.lm, verified_structure(self.lm))).eval()


def open_folder(path: Path) -> PretrainedFolder:
    """Open a folder that `save_pretrained` or `crt convert` wrote."""
    lm = load_lm(str(path))
    tokenizer = native_tokenizer(str(path))
    if tokenizer is None:
        raise ContextReadyError(
            f"{path} has no tokenizer.json; save a fast tokenizer there with tokenizer.save_pretrained(FOLDER)."
        )
    known = _known_length(lm) or LONGEST
    passes = lm.config.passes if isinstance(lm, ContextReadyForCausalLM) else 1
    return PretrainedFolder(
        folder=path,
        config={"model": {}, "train": {"data": None, "block_size": min(known, LONGEST), "passes": passes}},
        progress=Progress(tokenizer_sha256=tokenizer.sha256),
        sharded=False,
        lm=lm,
    )


def _known_length(lm: Any) -> int | None:
    length: int | None = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    return length
