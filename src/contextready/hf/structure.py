"""Finds the blocks and the head of a pretrained causal language model and verifies them numerically.

Model families name and nest their parts differently, but each has a list of `num_hidden_layers` equal blocks between an
embedding and a few modules that turn the last block's output into logits. Running the model once finds these parts.
They are accepted only if embed, blocks and head built from them reproduce the model's own logits bit for bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from contextready.errors import ContextReadyError

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
        """Create a structure from the values that `as_dict` returned."""
        return cls(**values | {"head": tuple(values["head"])})

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
        raise ContextReadyError(
            f"{type(lm).__name__} cannot be converted: its blocks were not found (it has no list of {layers} modules, "
            "one per layer)."
        )
    shallowest: str = min(lists, key=lambda name: name.count("."))
    return shallowest


@torch.no_grad()
def find_structure(lm: Any) -> Structure:
    """Find a model's parts by running it on three tokens; refuse models whose logits they do not reproduce."""
    _refuse_other_memory(lm)
    blocks, was_training = find_blocks(lm), lm.training
    tokens_BT = torch.tensor([[1, 2, 3]], device=next(lm.parameters()).device)
    lm.eval()
    try:
        with _watched(lm, blocks) as seen:
            logits_BTV = lm(input_ids=tokens_BT, use_cache=False).logits
        if seen.z_BTC is None or not seen.head:
            raise ContextReadyError(
                f"{type(lm).__name__} cannot be converted: its head was not found (no module runs after its last "
                "block)."
            )
        e_BTC = lm.get_input_embeddings()(tokens_BT)
        if e_BTC.shape != seen.z_BTC.shape:
            raise ContextReadyError(
                f"{type(lm).__name__} cannot be converted: its embeddings have width {e_BTC.shape[-1]} and its blocks "
                f"{seen.z_BTC.shape[-1]}, but a correction needs equal widths."
            )
        structure = _with_finish(lm, Structure(blocks, tuple(seen.head)), seen.z_BTC, logits_BTV)
        other_BTV = lm(input_ids=tokens_BT + torch.tensor([0, 0, 1], device=tokens_BT.device), use_cache=False).logits
        again_BTV = lm(inputs_embeds=e_BTC, use_cache=False).logits
    finally:
        lm.train(was_training)
    if not torch.equal(other_BTV[:, :-1], logits_BTV[:, :-1]):
        raise ContextReadyError(
            f"{type(lm).__name__} cannot be converted: its tokens attend to later tokens, as in an encoder. Only "
            "decoder-only models can be converted."
        )
    if structure is None or not torch.equal(again_BTV, logits_BTV):
        raise ContextReadyError(
            f"{type(lm).__name__} cannot be converted: its embedding, blocks and head do not reproduce its logits."
        )
    return structure


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
        raise ContextReadyError(
            f"{type(lm).__name__} cannot be converted: it has {what}, and repeated passes can rewind only keys and "
            "values."
        )


def _with_finish(lm: Any, structure: Structure, z_BTC: Tensor, logits_BTV: Tensor) -> Structure | None:
    """Find the scaling or soft cap, among those in the configuration, that reproduces the model's logits exactly."""
    raw_BTV, config = structure.logits(lm, z_BTC), lm.config.get_text_config()
    tries: list[tuple[str, float | None]] = [("none", 1.0)]
    tries += [(finish, getattr(config, key, None)) for key in SCALES for finish in ("multiply", "divide")]
    tries += [("softcap", getattr(config, key, None)) for key in SOFTCAPS]
    for finish, factor in tries:
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
