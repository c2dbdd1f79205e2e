"""Conversion: a pretrained model in, the same function with a correction that is still zero out."""

import shutil
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

import torch

from contextready.data.tokenizer import FILE
from contextready.errors import ContextReadyError
from contextready.files import staged_folder
from contextready.hf.card import write_card
from contextready.hf.finetune import cost
from contextready.hf.load import load_lm, load_tokenizer, quiet
from contextready.hf.modeling import BaseTransformerForCausalLM, ContextReadyForCausalLM
from contextready.hf.native import from_native, to_native
from contextready.model.checks import check_passes
from contextready.model.config import ModelConfig
from contextready.model.correction import check_correction, find_correction
from contextready.runs.checkpoint import open_checkpoint
from contextready.runs.models import is_pretrained

PROOF = 16
"""Tokens on which the converted model's logits are compared with the original's."""


@dataclass(frozen=True)
class Conversion:
    """What was written, and what the correction costs."""

    out: Path
    what: str
    """One sentence."""
    costs: list[tuple[str, str]]


def convert(
    source: str, out: Path, *, correction: str = "add", bias: bool = False, passes: int = 5, best: bool = False
) -> Conversion:
    """Write OUT from any model.

    A pretrained causal language model gets a zero correction; a run or checkpoint of this package is written in the
    format of Hugging Face; and such a folder, if the model in it is this package's own, as a checkpoint again.
    """
    if out.exists():
        raise ContextReadyError(f"{out} exists already; choose another folder.")
    check_passes(passes)
    check_correction(correction, "random")
    if not find_correction(correction).parts.has_network:
        raise ContextReadyError(
            f"correction={correction} has no output layer of its own, so it cannot start at zero and would change the "
            "model; choose add, concat or blind."
        )
    path = Path(source)
    if path.is_dir() and not is_pretrained(path):
        return _from_run(path, out, best)
    lm = load_lm(source, dtype="auto")
    if isinstance(lm, ContextReadyForCausalLM | BaseTransformerForCausalLM):
        to_native(path, lm, out)
        return Conversion(out, f"Wrote {out}, a checkpoint of this package. Next: crt eval {out} --data DATA", [])
    return _from_pretrained(source, lm, out, {"correction": correction, "correction_bias": bias, "passes": passes})


def _from_pretrained(source: str, lm: Any, out: Path, settings: dict[str, Any]) -> Conversion:
    # Where it lay on this machine is nobody else's business; a name on the Hub is.
    base = source if not Path(source).exists() else None
    tokens_1T = torch.arange(PROOF)[None] % lm.config.get_text_config().vocab_size
    with torch.no_grad():
        before_1TV = lm(tokens_1T).logits
        model = ContextReadyForCausalLM.wrap(lm, **settings)
        if not torch.equal(model(tokens_1T).logits, before_1TV):
            raise ContextReadyError(f"{source} changed when it was converted, which must not be; nothing was written.")
    costs = describe_costs(model)
    measured = {"Before any training": f"the logits of {base or 'the original'}, bit for bit, on {PROOF} tokens."}
    _write(out, model, load_tokenizer(source), base, costs, measured=measured)
    return Conversion(
        out,
        f"Wrote {out}: {type(lm).__name__} with a zero correction, the same logits. "
        f"Next: crt train convert pretrained={out} data=DATA",
        costs,
    )


def _from_run(run: Path, out: Path, best: bool) -> Conversion:
    checkpoint = open_checkpoint(run, best)
    model, tokenizer = from_native(checkpoint.folder)
    p, train = checkpoint.progress, checkpoint.config["train"]
    measured = {"Trained": f"{p.step:,} steps, {p.sequences * train['block_size']:,} tokens."}
    if p.best_loss is not None:
        passes = "streamed" if train["passes"] is None else f"K={train['passes']}"
        perplexity = exp(min(p.best_loss, 700.0))
        measured["Best validation"] = f"perplexity {perplexity:.3f} at step {p.best_step:,} ({passes})."
    costs = describe_costs(model) if isinstance(model, ContextReadyForCausalLM) else []
    # A native tokenizer goes along as it is, not as another library would write it.
    exact = checkpoint.folder / FILE if isinstance(checkpoint.model_config, ModelConfig) else None
    _write(out, model, tokenizer, None, costs, measured=measured, exact=exact)
    return Conversion(out, f"Wrote {out}. Next: crt generate {out} 'Once upon a time'", costs)


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
        tokenizer.save_pretrained(staging)
        if exact is not None:
            shutil.copyfile(exact, staging / FILE)
        write_card(staging, model.config, base, costs, measured)


def describe_costs(model: ContextReadyForCausalLM) -> list[tuple[str, str]]:
    """Parameters, multiply-accumulates and cache of a context-ready model, with and without its correction."""
    account = cost(model.model, model.config.correction)
    backbone = model.model.backbone
    past = backbone.init_cache(1)
    itemsize = next(backbone.parameters()).dtype.itemsize
    kv = sum((t.shape[1] * t.shape[3]) * itemsize for kv in past.layers for t in kv)
    plain, added = account.macs_blocks + account.macs_head, account.macs_correction
    ours = account.correction_parameters
    base = account.parameters - ours
    return [
        ("parameters of the model", f"{base:,}"),
        ("parameters of the correction", f"{ours:,} (+{ours / base:.2%})"),
        ("FLOPs per token of the model (multiply-accumulates, attention scores left out)", f"{plain:,}"),
        ("FLOPs per token of the correction", f"{added:,} (+{added / plain:.2%})"),
        ("KV cache per token, as before", f"{kv:,} bytes"),
        ("carried besides by a stream (z)", f"{backbone.width * itemsize:,} bytes"),
    ]
