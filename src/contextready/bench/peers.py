"""The peers of the decode benchmark: random models of a transformer's shape in transformers and in llama.cpp.

Both are Llama models, which is what both programs are tuned for: gated MLP, RMS norms, rotary positions, untied head.
"""

import ctypes
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from contextready.errors import ContextReadyError
from contextready.extras import require
from contextready.infer.engine import check_ids
from contextready.model.config import TransformerConfig

Weights = Iterable[tuple[str, npt.NDArray[np.float32]]]

PRECISIONS = ("f32", "f16", "q8_0", "q4_0")

_BLOCK = 32  # weights that share a scale in Q8_0 and Q4_0; a row is a whole number of them
_WARM_UP = 2  # steps after the prompt that are made and not reported: they allocate and fill caches
_BATCH = 512  # tokens of a prompt that llama.cpp reads at once; its own default
_EMBEDDING = "token_embd.weight"
_NORM_EPSILON = 1e-5
_ROPE_BASE = 10_000.0


class Shape(NamedTuple):
    """The shape of a transformer baseline."""

    layers: int
    width: int
    heads: int
    vocab_size: int

    @property
    def ffn_width(self) -> int:
        """Inner width of a gated MLP that holds about the 8C² weights of the baseline's FFN, in whole blocks."""
        return max(1, round(8 * self.width / 3 / _BLOCK)) * _BLOCK

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the Llama model by its name in a GGUF file, as (out, in)."""
        C, H, V = self.width, self.ffn_width, self.vocab_size
        layer = {
            "attn_norm": (C,),
            "attn_q": (C, C),
            "attn_k": (C, C),
            "attn_v": (C, C),
            "attn_output": (C, C),
            "ffn_norm": (C,),
            "ffn_gate": (H, C),
            "ffn_up": (H, C),
            "ffn_down": (C, H),
        }
        blocks = {f"blk.{i}.{name}.weight": size for i in range(self.layers) for name, size in layer.items()}
        return {_EMBEDDING: (V, C), **blocks, "output_norm.weight": (C,), "output.weight": (V, C)}


class Peer(ABC):
    """A model of another program that decodes one stream greedily and says how long each token took."""

    name: str
    precision: str
    bytes_per_token: int
    """Weights read for one token: every matrix and norm, and one row of the embedding; the KV cache is not in it."""
    capacity: int | None = None
    """Tokens a stream can hold; none where nothing limits it."""
    vocab_size: int

    def decode(self, context: int, new: int) -> list[float]:
        """Seconds of each of `new` tokens after a prompt of `context` random ids, the prompt and a warm-up left out."""
        if context < 1 or new < 1:
            raise ContextReadyError(f"context={context} and new={new} were given; both must be at least 1.")
        prompt = np.random.default_rng(0).integers(self.vocab_size, size=context).tolist()
        _, seconds = self.generate(prompt, new + _WARM_UP)
        return seconds[_WARM_UP:]

    def generate(self, prompt: Sequence[int], new: int) -> tuple[list[int], list[float]]:
        """The token after the prompt and `new` greedy ones more, and the seconds of each of these `new`."""
        check_ids(prompt, self.vocab_size)
        if self.capacity is not None and len(prompt) + new > self.capacity:
            raise ContextReadyError(
                f"{len(prompt) + new} tokens were to be read and this {self.name} model has room for {self.capacity}; "
                "make it with a larger capacity, or decode fewer tokens."
            )
        return self._generate(prompt, new)

    @abstractmethod
    def close(self) -> None:
        """Free the model; nothing can be decoded afterwards."""

    @abstractmethod
    def _generate(self, prompt: Sequence[int], new: int) -> tuple[list[int], list[float]]: ...


class HuggingFacePeer(Peer):
    """`LlamaForCausalLM` of transformers in float32, decoded by its `generate` with a streamer, as users call it.

    A token's seconds are the time between two tokens that reach the streamer: one whole turn of the loop of `generate`,
    model, argmax and bookkeeping, which is what a user waits for. Threads are torch's, set by the caller.
    """

    name = "transformers"
    precision = "f32"

    def __init__(self, shape: Shape) -> None:
        transformers = require("transformers", "bench")
        _check(shape)
        config = transformers.LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.width,
            intermediate_size=shape.ffn_width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            rms_norm_eps=_NORM_EPSILON,
            rope_parameters={"rope_type": "default", "rope_theta": _ROPE_BASE},
            tie_word_embeddings=False,
            # A random model may choose any token at any time: none of them ends the text.
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model: Any = transformers.LlamaForCausalLM(config).float().eval()
        self.vocab_size = shape.vocab_size
        embedding = self.model.get_input_embeddings().weight
        held = sum(weight.numel() * weight.element_size() for weight in self.model.parameters())
        self.bytes_per_token = held - (shape.vocab_size - 1) * shape.width * embedding.element_size()

    def close(self) -> None:
        """Free the model; nothing can be decoded afterwards."""
        del self.model

    def _generate(self, prompt: Sequence[int], new: int) -> tuple[list[int], list[float]]:
        clock = _Clock()
        ids = torch.tensor([list(prompt)])
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new + 1,
            do_sample=False,
            streamer=clock,
        )
        # The streamer is given the prompt first, then the token that reading the prompt yields.
        return clock.tokens[1:], np.diff(clock.times[1:]).tolist()


class _Clock:
    """A streamer that notes when each token came."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, and then each token."""
        self.times.append(time.perf_counter())
        self.tokens.append(int(value.flatten()[-1]))

    def end(self) -> None:
        """Nothing is left to write at the end."""


class LlamaCppPeer(Peer):
    """A Llama model in llama.cpp: all matrices, embedding and head too, in one precision, and norms in float32.

    The prompt is read by `Llama.eval`; the timed steps call `llama_decode` itself, which spares Python work a token,
    and take the largest logit. The KV cache is llama.cpp's default, F16, except that an f32 model has an F32 one: then
    nothing in it is rounded. Flash attention is off, as by default; with one thread, on was slower.
    Weights are loaded, not mapped, so that the file can go once they are.
    """

    name = "llama.cpp"

    def __init__(
        self, shape: Shape, precision: str, threads: int = 1, capacity: int = 2048, weights: Weights | None = None
    ) -> None:
        self._api = require("llama_cpp", "bench")
        self.precision, self.vocab_size, self.capacity = precision, shape.vocab_size, capacity
        cache = self._api.GGML_TYPE_F32 if precision == "f32" else self._api.GGML_TYPE_F16
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            self.bytes_per_token = write_gguf(
                path, shape, precision, random_weights(shape) if weights is None else weights
            )
            self._llama: Any = self._api.Llama(
                str(path),
                n_ctx=capacity,
                n_batch=min(_BATCH, capacity),
                n_threads=threads,
                n_threads_batch=threads,
                type_k=cache,
                type_v=cache,
                use_mmap=False,
                logits_all=False,
                verbose=False,
            )

    def close(self) -> None:
        """Free the model; nothing can be decoded afterwards."""
        self._llama.close()
        del self._llama

    def _generate(self, prompt: Sequence[int], new: int) -> tuple[list[int], list[float]]:
        self._llama.reset()
        self._llama.eval(list(prompt))
        api, context = self._api, self._llama.ctx
        slot = (ctypes.c_int32 * 1)()
        step = api.llama_batch_get_one(slot, 1)  # reads the slot anew in every step, at the position after the last
        tokens, times = [self._greedy()], [time.perf_counter()]
        for _ in range(new):
            slot[0] = tokens[-1]
            if api.llama_decode(context, step) != 0:
                raise ContextReadyError(f"llama.cpp could not decode token {len(times)}; free memory and try again.")
            tokens.append(self._greedy())
            times.append(time.perf_counter())
        return tokens, np.diff(times).tolist()

    def _greedy(self) -> int:
        logits = self._api.llama_get_logits_ith(self._llama.ctx, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())


def random_weights(shape: Shape) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Weights as at the start of training: norms are ones, matrices normal with the usual deviation 0.02."""
    random = np.random.default_rng(0)
    for name, size in shape.tensors().items():
        matrix = len(size) == 2
        yield name, random.standard_normal(size, np.float32) * np.float32(0.02) if matrix else np.ones(size, np.float32)


def write_gguf(path: Path, shape: Shape, precision: str, weights: Weights) -> int:
    """Write a Llama model without a tokenizer as a GGUF file; the bytes of weights that one token reads.

    Queries and keys are in llama.cpp's order: the two rows that a rotation turns stand beside each other.
    """
    gguf = require("gguf", "bench")
    _check(shape, precision)
    quantization = gguf.GGMLQuantizationType[precision.upper()]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(shape.layers)
    writer.add_context_length(np.iinfo(np.int32).max)  # rotary positions set no limit
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ffn_width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_rope_freq_base(_ROPE_BASE)
    writer.add_layer_norm_rms_eps(_NORM_EPSILON)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    expected, read = shape.tensors(), 0
    for name, weight in weights:
        if expected.pop(name, None) != weight.shape:
            raise ContextReadyError(
                f"{name} with shape {weight.shape} is not a weight of {shape}; give it once and whole."
            )
        stored = gguf.quantize(weight, quantization) if weight.ndim == 2 else weight
        writer.add_tensor(name, stored, raw_dtype=quantization if weight.ndim == 2 else None)
        read += stored[0].nbytes if name == _EMBEDDING else stored.nbytes
    if expected:
        raise ContextReadyError(f"{', '.join(expected)} is missing from the weights of {shape}; give every weight.")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


def _check(shape: Shape, precision: str = "f32") -> None:
    """Refuse shapes that are no transformer's, and precisions that the shape cannot have."""
    TransformerConfig(shape.vocab_size, shape.width, shape.layers, shape.heads)
    if precision not in PRECISIONS:
        raise ContextReadyError(f"precision={precision!r} is unknown; choose one of {', '.join(PRECISIONS)}.")
    if precision.startswith("q") and shape.width % _BLOCK:
        raise ContextReadyError(
            f"width={shape.width} cannot be stored in {precision}, whose blocks are {_BLOCK} weights long; "
            f"choose a multiple of {_BLOCK}, or f16 or f32."
        )
