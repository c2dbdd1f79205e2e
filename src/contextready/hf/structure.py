"""Where the blocks and the head of a pretrained causal language model are: looked for, then proved on real numbers.

Families name and nest their parts in ways of their own, but every one is a list of `num_hidden_layers` equal blocks,
between an embedding and a few modules that turn the last block's output into logits. These are found by running the
model once and are believed only if the three functions made of them give its own logits, bit for bit.
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
    """The parts of a causal language model, by the names of its modules."""

    blocks: str
    """The list of blocks."""
    head: tuple[str, ...]
    """What runs after the last block, in order: norms, then the projection to logits."""
    finish: str = "none"
    """What is done to the projection: none, multiply, divide or softcap."""
    factor: float = 1.0
    """The number that is done with."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"head": list(self.head)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Structure":
        """What `as_dict` gave."""
        return cls(**values | {"head": tuple(values["head"])})

    def last_block(self, lm: nn.Module) -> nn.Module:
        """The module whose output is z."""
        blocks = lm.get_submodule(self.blocks)
        assert isinstance(blocks, nn.ModuleList)
        return blocks[-1]

    def logits(self, lm: nn.Module, z_BTC: Tensor) -> Tensor:
        """Block outputs to logits (B, T, V), as the model itself does it."""
        out = z_BTC
        for name in self.head:
            out = lm.get_submodule(name)(out)
        return finished(out, self.finish, self.factor)


def finished(logits: Tensor, finish: str, factor: float) -> Tensor:
    """The projection's logits, scaled or softly capped."""
    if finish == "multiply":
        return logits * factor
    if finish == "divide":
        return logits / factor
    return torch.tanh(logits / factor) * factor if finish == "softcap" else logits


def block_output(output: Any) -> Tensor:
    """The residual stream in what a block returned."""
    z_BTC: Tensor = output if isinstance(output, Tensor) else output[0]
    return z_BTC


def find_blocks(lm: nn.Module) -> str:
    """The name of the shallowest list of as many modules as the configuration says there are layers."""
    config = lm.config.get_text_config()  # type: ignore[operator, union-attr]
    layers = getattr(config, "num_hidden_layers", None)
    lists = [
        name for name, part in lm.named_modules() if isinstance(part, nn.ModuleList) and len(part) == layers and layers
    ]
    if not lists:
        raise ContextReadyError(
            f"The blocks of {type(lm).__name__} were not found: no list of {layers} modules, as many as its "
            "configuration names layers; such a model cannot be converted."
        )
    shallowest: str = min(lists, key=lambda name: name.count("."))
    return shallowest


@torch.no_grad()
def find_structure(lm: Any) -> Structure:
    """Find a model's parts by running it on three tokens, and prove them by its own logits; refuse what fails."""
    _refuse_other_memory(lm)
    blocks, was_training = find_blocks(lm), lm.training
    tokens_BT = torch.tensor([[1, 2, 3]], device=next(lm.parameters()).device)
    lm.eval()
    try:
        with _watched(lm, blocks) as seen:
            logits_BTV = lm(input_ids=tokens_BT, use_cache=False).logits
        if seen.z_BTC is None or not seen.head:
            raise ContextReadyError(
                f"The head of {type(lm).__name__} was not found: no module runs after its last block; such a model "
                "cannot be converted."
            )
        e_BTC = lm.get_input_embeddings()(tokens_BT)
        if e_BTC.shape != seen.z_BTC.shape:
            raise ContextReadyError(
                f"{type(lm).__name__} embeds tokens in {e_BTC.shape[-1]} channels and its blocks have "
                f"{seen.z_BTC.shape[-1]}; a correction needs the same width for both, so it cannot be converted."
            )
        structure = _with_finish(lm, Structure(blocks, tuple(seen.head)), seen.z_BTC, logits_BTV)
        other_BTV = lm(input_ids=tokens_BT + torch.tensor([0, 0, 1], device=tokens_BT.device), use_cache=False).logits
        again_BTV = lm(inputs_embeds=e_BTC, use_cache=False).logits
    finally:
        lm.train(was_training)
    if not torch.equal(other_BTV[:, :-1], logits_BTV[:, :-1]):
        raise ContextReadyError(
            f"{type(lm).__name__} sees later tokens, as an encoder does; only decoders that read left to right can be "
            "converted."
        )
    if structure is None or not torch.equal(again_BTV, logits_BTV):
        raise ContextReadyError(
            f"{type(lm).__name__} is not embed, blocks, head: its logits could not be rebuilt from its parts; such a "
            "model cannot be converted."
        )
    return structure


def _refuse_other_memory(lm: Any) -> None:
    config = lm.config.get_text_config()
    if lm.config.is_encoder_decoder:
        raise ContextReadyError(
            f"{type(lm).__name__} is an encoder-decoder model; only decoders that read left to right can be converted."
        )
    layer_types = set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
        "chunked_attention",
    }
    if layer_types or getattr(lm, "_is_stateful", False):
        what = f"layers of the kind {', '.join(sorted(layer_types))}" if layer_types else "a state"
        raise ContextReadyError(
            f"{type(lm).__name__} has {what} besides keys and values, which a correction's passes cannot rewind; such "
            "a model cannot be converted."
        )


def _with_finish(lm: Any, structure: Structure, z_BTC: Tensor, logits_BTV: Tensor) -> Structure | None:
    """What turns the projection into the model's logits exactly, among what its configuration names."""
    raw_BTV, config = structure.logits(lm, z_BTC), lm.config.get_text_config()
    tries: list[tuple[str, float | None]] = [("none", 1.0)]
    tries += [(finish, getattr(config, key, None)) for key in SCALES for finish in ("multiply", "divide")]
    tries += [("softcap", getattr(config, key, None)) for key in SOFTCAPS]
    for finish, factor in tries:
        if factor and torch.equal(finished(raw_BTV, finish, factor), logits_BTV):
            return Structure(structure.blocks, structure.head, finish, float(factor))
    return None


class _Seen:
    """What ran: the last block's output, and the modules after it."""

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
        # What holds the blocks or lies inside them is no part of the head.
        if not blocks.startswith(name) and not name.startswith(blocks):
            handles += [part.register_forward_pre_hook(enter(name)), part.register_forward_hook(leave)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
