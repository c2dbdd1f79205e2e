"""Finds the blocks and the head of a pretrained causal language model.

Model families name and nest their parts differently, but each has a list of `num_hidden_layers` equal blocks between an
embedding and a few modules that turn the last block's output into logits. Running the model once finds these parts.
They are accepted only if they reproduce the model's own logits bit for bit (see also `proof.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from contextready.errors import ContextReadyError

PROOF = 16
"""Tokens on which a model is tried."""
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "logit_softcap")


@dataclass(frozen=True)
class Structure:
    """Module names of the parts of a causal language model."""

    blocks: str
    """Name of the list of blocks."""
    head: tuple[str, ...]
    """Modules that run after the last block, in order: norms, then the projection to logits."""
    finish: str = "none"
    """What happens to the projected logits: none, multiply, divide or softcap."""
    factor: float = 1.0
    """The factor of `finish`."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"head": list(self.head)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Structure":
        """Create a structure from the values that `as_dict` returned; raises ValueError if they are something else."""
        structure = cls(**values | {"head": tuple(values["head"]), "factor": float(values["factor"])})
        if not all(isinstance(name, str) for name in (structure.blocks, *structure.head)):
            raise ValueError("the names of its parts are not text")
        return structure

    def last_block(self, lm: nn.Module) -> nn.Module:
        """The module whose output is z."""
        blocks = lm.get_submodule(self.blocks)
        assert isinstance(blocks, nn.ModuleList)
        return blocks[-1]

    def logits(self, lm: nn.Module, z_BTC: Tensor) -> Tensor:
        """Compute logits (B, T, V) from z, exactly as the model does."""
        out = z_BTC
        for name in self.head:
            out = lm.get_submodule(name)(out)
        return finished(out, self.finish, self.factor)


def finished(logits: Tensor, finish: str, factor: float) -> Tensor:
    """Scale or soft-cap the projected logits."""
    if finish == "multiply":
        return logits * factor
    if finish == "divide":
        return logits / factor
    return torch.tanh(logits / factor) * factor if finish == "softcap" else logits


def block_output(output: Any) -> Tensor:
    """Extract the residual stream from a block's return value."""
    z_BTC: Tensor = output if isinstance(output, Tensor) else output[0]
    return z_BTC


def find_blocks(lm: nn.Module) -> str:
    """Name of the outermost module list whose length equals the configuration's number of layers."""
    config = lm.config.get_text_config()  # type: ignore[operator, union-attr]
    layers = getattr(config, "num_hidden_layers", None)
    lists = [
        name for name, part in lm.named_modules() if isinstance(part, nn.ModuleList) and len(part) == layers and layers
    ]
    if not lists:
        raise cannot_convert(lm, f"its blocks were not found (it has no list of {layers} modules, one per layer).")
    shallowest: str = min(lists, key=lambda name: name.count("."))
    return shallowest


@torch.no_grad()
def find_structure(lm: Any) -> Structure:
    """Find a model's parts by running it once; refuse models whose logits they do not reproduce."""
    _refuse_other_memory(lm)
    blocks, tokens_BT = find_blocks(lm), proof_tokens(lm)
    with evaluating(lm), refusing(lm):
        with _watched(lm, blocks) as seen:
            logits_BTV = lm(input_ids=tokens_BT, use_cache=False).logits
        e_BTC = lm.get_input_embeddings()(tokens_BT)
    if not isinstance(seen.z_BTC, Tensor) or not seen.head:
        raise cannot_convert(lm, "its head was not found (no module runs after its last block).")
    if not isinstance(logits_BTV, Tensor) or logits_BTV.shape[:2] != tokens_BT.shape:
        raise cannot_convert(lm, "it does not return the logits of every token.")
    if e_BTC.shape[:-1] != seen.z_BTC.shape[:-1]:
        shapes = " and ".join(str(tuple(t.shape)) for t in (e_BTC, seen.z_BTC))
        raise cannot_convert(
            lm, f"its blocks do not return one vector per token (its embeddings and blocks have the shapes {shapes})."
        )
    if e_BTC.shape != seen.z_BTC.shape:
        raise cannot_convert(
            lm,
            f"its embeddings have width {e_BTC.shape[-1]} and its blocks {seen.z_BTC.shape[-1]}, but a correction "
            "needs equal widths.",
        )
    with evaluating(lm), refusing(lm):
        structure = _with_finish(lm, Structure(blocks, tuple(seen.head)), seen.z_BTC, logits_BTV)
    if structure is None:
        raise cannot_convert(lm, "its embedding, blocks and head do not reproduce its logits.")
    return structure


def proof_tokens(lm: Any) -> Tensor:
    """Tokens (1, T) to try a model on: random ones, with padding and other special ones among them."""
    config, embedding = lm.config.get_text_config(), lm.get_input_embeddings()
    V = config.vocab_size
    tokens_1T = torch.randint(V, (1, PROOF), generator=torch.Generator().manual_seed(0))
    special = [getattr(config, f"{name}_token_id", None) for name in ("pad", "eos", "bos")]
    special += [getattr(embedding, "padding_idx", None), 0]
    # Not at the ends, because some models warn about padding there if there is no mask.
    for position, token in enumerate(special, 2):
        if isinstance(token, int) and 0 <= token < V:
            tokens_1T[0, position] = token
    most = getattr(config, "max_position_embeddings", None) or PROOF
    return tokens_1T[:, : max(4, min(PROOF, most))].to(embedding.weight.device)


@contextmanager
def evaluating(lm: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode inside the block."""
    was_training = lm.training
    lm.eval()
    try:
        yield
    finally:
        lm.train(was_training)


@contextmanager
def refusing(lm: nn.Module, what: str = "it does not run on plain text") -> Iterator[None]:
    """Report any error that the model itself raises inside the block as the reason why it cannot be converted."""
    try:
        yield
    except ContextReadyError:
        raise
    except Exception as error:  # models raise anything
        lines = str(error).strip().splitlines() or ["no reason given"]
        reason = f"{type(error).__name__}: {lines[0][:200].rstrip('.')}"
        raise cannot_convert(lm, f"{what} ({reason}).") from error


def cannot_convert(lm: nn.Module, why: str) -> ContextReadyError:
    """The error for a model that cannot be converted."""
    return ContextReadyError(f"{type(lm).__name__} cannot be converted: {why}")


def _refuse_other_memory(lm: Any) -> None:
    config = lm.config.get_text_config()
    if lm.config.is_encoder_decoder:
        raise ContextReadyError(
            f"{type(lm).__name__} is an encoder-decoder model; only decoder-only models can be converted."
        )
    layer_types = set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
        "chunked_attention",
    }
    if layer_types or getattr(lm, "_is_stateful", False):
        what = f"layers of type {', '.join(sorted(layer_types))}" if layer_types else "a recurrent state"
        raise cannot_convert(lm, f"it has {what}, and repeated passes can rewind only keys and values.")


def _with_finish(lm: Any, structure: Structure, z_BTC: Tensor, logits_BTV: Tensor) -> Structure | None:
    """Find the scaling or soft cap, among those in the configuration, that reproduces the model's logits exactly."""
    raw_BTV, config = structure.logits(lm, z_BTC), lm.config.get_text_config()
    tries: list[tuple[str, float | None]] = [("none", 1.0)]
    tries += [(finish, getattr(config, key, None)) for key in SCALES for finish in ("multiply", "divide")]
    tries += [("softcap", getattr(config, key, None)) for key in SOFTCAPS]
    for finish, factor in tries if isinstance(raw_BTV, Tensor) else ():
        if factor and torch.equal(finished(raw_BTV, finish, factor), logits_BTV):
            return Structure(structure.blocks, structure.head, finish, float(factor))
    return None


class _Seen:
    """What a run showed: the last block's output, and the modules that ran after it."""

    def __init__(self) -> None:
        self.z_BTC: Tensor | None = None
        self.head: list[str] = []
        self.inside = 0


@contextmanager
def _watched(lm: Any, blocks: str) -> Iterator[_Seen]:
    seen, handles = _Seen(), []

    def after_blocks(module: nn.Module, args: Any, output: Any) -> None:
        seen.z_BTC, seen.head = block_output(output), []

    def enter(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if seen.z_BTC is not None and seen.inside == 0:
                seen.head.append(name)
            seen.inside += 1

        return hook

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        seen.inside -= 1

    handles.append(lm.get_submodule(blocks)[-1].register_forward_hook(after_blocks))
    for name, part in lm.named_modules():
        # Modules that contain the blocks or are inside them do not belong to the head.
        if not blocks.startswith(name) and not name.startswith(blocks):
            handles += [part.register_forward_pre_hook(enter(name)), part.register_forward_hook(leave)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
