"""Conversion: gives a pretrained model a zero correction, or writes a run in Hugging Face format, and back."""

import shutil
from dataclasses import asdict, dataclass
from math import exp
from pathlib import Path
from typing import Any, Literal

from contextready.data.tokenizer import FILE
from contextready.errors import ContextReadyError
from contextready.files import staged_folder
from contextready.hf.backbone import HFBackbone
from contextready.hf.card import write_card
from contextready.hf.families import why_not_native
from contextready.hf.finetune import cost
from contextready.hf.load import load_lm, load_tokenizer, quiet, save_tokenizer
from contextready.hf.modeling import BaseTransformerForCausalLM, ContextReadyForCausalLM
from contextready.hf.native import from_native, to_native
from contextready.hf.proof import verified_structure
from contextready.hf.sizes import choose_correction, embedding_size
from contextready.hf.structure import PROOF
from contextready.model.checks import check_passes
from contextready.model.config import ModelConfig
from contextready.model.correction import CORRECTIONS, check_correction, find_correction
from contextready.runs.checkpoint import open_checkpoint
from contextready.runs.config import AUTO
from contextready.runs.models import is_pretrained
from contextready.runs.passes import largest_passes


@dataclass(frozen=True)
class Costs:
    """What a context-ready model costs, with and without its correction."""

    model_parameters: int
    correction_parameters: int
    model_macs_per_token: int
    """Multiply-accumulates, without attention scores."""
    correction_macs_per_token: int
    kv_bytes_per_token: int
    """Size of the KV cache; the correction does not change it."""
    carried_bytes: int
    """Size of z, which each stream carries in addition."""

    def rows(self) -> list[tuple[str, str]]:
        """Names and values for people."""
        more_parameters = self.correction_parameters / self.model_parameters
        more_macs = self.correction_macs_per_token / self.model_macs_per_token
        return [
            ("model parameters", f"{self.model_parameters:,}"),
            ("correction parameters", f"{self.correction_parameters:,} (+{more_parameters:.2%})"),
            (
                "model FLOPs per token (multiply-accumulates, without attention scores)",
                f"{self.model_macs_per_token:,}",
            ),
            ("correction FLOPs per token", f"{self.correction_macs_per_token:,} (+{more_macs:.2%})"),
            ("KV cache per token (unchanged)", f"{self.kv_bytes_per_token:,} bytes"),
            ("additional state per stream (z)", f"{self.carried_bytes:,} bytes"),
        ]


@dataclass(frozen=True)
class Training:
    """How far a run was trained, and its best validation."""

    step: int
    tokens: int
    best_step: int | None
    best_perplexity: float | None
    passes: int | None
    """K of the validation; None if it was streamed token by token."""

    def rows(self) -> dict[str, str]:
        """Names and sentences for the model card."""
        measured = {"Training": f"{self.step:,} steps, {self.tokens:,} tokens."}
        if self.best_perplexity is not None:
            passes = "streaming" if self.passes is None else f"K={self.passes}"
            measured["Best validation"] = (
                f"perplexity {self.best_perplexity:.3f} at step {self.best_step:,} ({passes})."
            )
        return measured


@dataclass(frozen=True)
class Conversion:
    """What was written, and what is known about it."""

    out: Path
    format: Literal["hugging_face", "checkpoint"]
    what: str
    """One sentence about the result, and the next command."""
    costs: Costs | None = None
    """If the model written is a context-ready one in Hugging Face format."""
    training: Training | None = None
    """If a run or checkpoint was converted."""
    not_native: str | None = None
    """Why a pretrained model has no native form; None if it has one."""

    def as_record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "out": str(self.out),
            "format": self.format,
            "costs": None if self.costs is None else asdict(self.costs),
            "training": None if self.training is None else asdict(self.training),
            "not_native": self.not_native,
        }


def convert(
    source: str,
    out: Path,
    *,
    correction: str = AUTO,
    bias: bool = False,
    scale: float | None = None,
    passes: int = 5,
    best: bool = False,
) -> Conversion:
    """Convert any model and write the result to OUT.

    A pretrained causal language model gets a zero correction. With `auto` it is balanced if the model's z is many times
    as large as e, and add otherwise. Its output has the factor `scale`, by default the root mean square of the model's
    embeddings. A run or checkpoint is written in Hugging Face format. A context-ready model in Hugging Face format is
    written as a checkpoint again, if it has a native form.
    """
    if out.exists():
        raise ContextReadyError(f"{out} already exists; delete it or choose another name.")
    check_passes(passes)
    named = "add" if correction == AUTO else correction
    check_correction(named, "random", 1.0 if scale is None else scale)
    if not find_correction(named).parts.has_network:
        usable = ", ".join(name for name, definition in CORRECTIONS.items() if definition.parts.has_network)
        raise ContextReadyError(
            f"correction={correction} has no output layer that could start at zero, so it would change the model; "
            f"choose one of: {usable}."
        )
    path = Path(source)
    unscaled = ContextReadyError(f"--scale applies to a correction that is added to a model, but {source} has its own.")
    if path.is_dir() and not is_pretrained(path):
        if scale is not None:
            raise unscaled
        return _from_run(path, out, best)
    lm = load_lm(source, dtype="auto")
    if isinstance(lm, ContextReadyForCausalLM | BaseTransformerForCausalLM):
        if scale is not None:
            raise unscaled
        to_native(path, lm, out)
        what = f"Wrote {out}, a native checkpoint. Next: crt eval {out} --data DATA"
        return Conversion(out, "checkpoint", what)
    settings = {
        "correction": correction,
        "correction_bias": bias,
        "correction_scale": embedding_size(lm) if scale is None else scale,
        "passes": passes,
    }
    return _from_pretrained(source, lm, out, settings)


def _from_pretrained(source: str, lm: Any, out: Path, settings: dict[str, Any]) -> Conversion:
    # The card names a model on the Hub, but never a local path.
    base = source if not Path(source).exists() else None
    if lm.is_remote_code():
        raise ContextReadyError(
            f"{source} cannot be converted: only its own code defines {type(lm).__name__}, and the converted model "
            "would need that code again. Evaluate or run the original with crt eval or crt generate."
        )
    if settings["correction"] == AUTO:
        backbone = HFBackbone(lm, verified_structure(lm))
        try:
            settings |= {"correction": choose_correction(backbone)}
        finally:
            backbone.unhook()
    model = ContextReadyForCausalLM.wrap(lm, **settings)
    costs = count_costs(model)
    measured = {"Before training": f"identical logits to {base or 'the original model'}, checked on {PROOF} tokens."}
    _write(out, model, load_tokenizer(source), base, costs.rows(), measured=measured)
    not_native = why_not_native(lm)
    runs = "a native model" if not_native is None else f"it is, inside a wrapper, because {not_native}"
    what = (
        f"Wrote {out}: {type(lm).__name__} with a zero correction ({settings['correction']}); its logits are "
        f"unchanged. crt runs it as {runs}. Next: crt train convert pretrained={out} data=DATA"
    )
    return Conversion(out, "hugging_face", what, costs, not_native=not_native)


def _from_run(run: Path, out: Path, best: bool) -> Conversion:
    checkpoint = open_checkpoint(run, best)
    model, tokenizer = from_native(checkpoint.folder)
    p, train = checkpoint.progress, checkpoint.config["train"]
    training = Training(
        step=p.step,
        tokens=p.sequences * train["block_size"],
        best_step=None if p.best_loss is None else p.best_step,
        best_perplexity=None if p.best_loss is None else exp(min(p.best_loss, 700.0)),
        passes=largest_passes(train),
    )
    costs = count_costs(model) if isinstance(model, ContextReadyForCausalLM) else None
    # A native tokenizer is copied as it is, because transformers would write it differently.
    exact = checkpoint.folder / FILE if isinstance(checkpoint.model_config, ModelConfig) else None
    rows = [] if costs is None else costs.rows()
    _write(out, model, tokenizer, None, rows, measured=training.rows(), exact=exact)
    return Conversion(
        out, "hugging_face", f"Wrote {out}. Next: crt generate {out} 'Once upon a time'", costs, training=training
    )


def _write(
    out: Path,
    model: Any,
    tokenizer: Any,
    base: str | None,
    costs: list[tuple[str, str]],
    *,
    measured: dict[str, str],
    exact: Path | None = None,
) -> None:
    with staged_folder(out) as staging, quiet():
        model.save_pretrained(staging)
        save_tokenizer(tokenizer, staging)
        if exact is not None:
            shutil.copyfile(exact, staging / FILE)
        write_card(staging, model.config, base, costs, measured)


def describe_costs(model: ContextReadyForCausalLM) -> list[tuple[str, str]]:
    """Parameters, multiply-accumulates and cache of a context-ready model, as text for people."""
    return count_costs(model).rows()


def count_costs(model: ContextReadyForCausalLM) -> Costs:
    """Count parameters, multiply-accumulates and cache of a context-ready model, with and without its correction."""
    account = cost(model.model)
    backbone = model.model.backbone
    past = backbone.init_cache(1)
    itemsize = next(backbone.parameters()).dtype.itemsize
    return Costs(
        model_parameters=account.parameters - account.correction_parameters,
        correction_parameters=account.correction_parameters,
        model_macs_per_token=account.macs_blocks + account.macs_head,
        correction_macs_per_token=account.macs_correction,
        kv_bytes_per_token=sum((t.shape[1] * t.shape[3]) * itemsize for kv in past.layers for t in kv),
        carried_bytes=backbone.width * itemsize,
    )
