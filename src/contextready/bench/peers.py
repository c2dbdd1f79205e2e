"""Other programs in the decode benchmark: random Llama models with a transformer's shape in transformers and llama.cpp.

Both programs are optimised for Llama models: gated MLP, RMS norms, rotary positions, untied head.
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

_BLOCK = 32  # weights that share a scale in Q8_0 and Q4_0; row lengths are multiples of it
_WARM_UP = 2  # unreported steps after the prompt, which allocate memory and fill caches
_BATCH = 512  # prompt tokens that llama.cpp reads at once (its default)
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
        """Inner width of a gated MLP with about as many weights as the baseline's FFN (8C²), in whole blocks."""
        return max(1, round(8 * self.width / 3 / _BLOCK)) * _BLOCK

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes (out, in) of all weights of the Llama model, by their names in a GGUF file."""
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
    """A model in another program that decodes one stream greedily and reports the time of each token."""

    name: str
    precision: str
    bytes_per_token: int
    """Bytes of weights read per token: all matrices and norms, and one row of the embedding; without the KV cache."""
    capacity: int | None = None
    """Number of tokens that a stream can hold; None if there is no limit."""
    vocab_size: int

    def decode(self, context: int, new: int) -> list[float]:
        """Seconds per token for `new` tokens after a prompt of `context` random ids, without prompt and warm-up."""
        if context < 1 or new < 1:
            raise ContextReadyError(f"context and new must be at least 1, but got {context} and {new}.")
        prompt = np.random.default_rng(0).integers(self.vocab_size, size=context).tolist()
        _, seconds = self.generate(prompt, new + _WARM_UP)
        return seconds[_WARM_UP:]

    def generate(self, prompt: Sequence[int], new: int) -> tuple[list[int], list[float]]:
        """Greedy tokens: the one after the prompt and `new` more, and the seconds that each of the `new` took."""
        check_ids(prompt, self.vocab_size)
        if self.capacity is not None and len(prompt) + new > self.capacity:
            raise ContextReadyError(
                f"This {self.name} model has room for {self.capacity} tokens, but {len(prompt) + new} are needed; "
                "create it with a larger capacity, or decode fewer tokens."
            )
        return self._generate(prompt, new)

    @abstractmethod
    def close(self) -> None:
        """Free the model; it cannot decode afterwards."""

    @abstractmethod
    def _generate(self, prompt: Sequence[int], new: int) -> tuple[list[int], list[float]]: ...


class HuggingFacePeer(Peer):
    """`LlamaForCausalLM` from transformers in float32, decoded with `generate` and a streamer, as users call it.

    The time of a token is the time between two tokens that reach the streamer. It covers one whole iteration of
    `generate` (model, argmax and bookkeeping), which is what a user waits for. The caller sets torch's threads.
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
            # A random model may choose any token, so no token may end the text.
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
        """Free the model; it cannot decode afterwards."""
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
        # The streamer receives the prompt first, then the token that follows it.
        return clock.tokens[1:], np.diff(clock.times[1:]).tolist()


class _Clock:
    """A streamer that records when each token arrives."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt, then each token."""
        self.times.append(time.perf_counter())
        self.tokens.append(int(value.flatten()[-1]))

    def end(self) -> None:
        """Do nothing at the end."""


class LlamaCppPeer(Peer):
    """A Llama model in llama.cpp: all matrices, including embedding and head, in one precision, and norms in float32.

    `Llama.eval` reads the prompt. The timed steps call `llama_decode` directly, which saves Python work per token, and
    take the argmax. The KV cache is F16, llama.cpp's default; an f32 model gets an F32 cache, so that nothing is
    rounded. Flash attention is off, as by default; with one thread it was slower. Weights are loaded instead of mapped,
    so that the file can be deleted afterwards.
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
        """Free the model; it cannot decode afterwards."""
        self._llama.close()
        del self._llama

    def _generate(self, prompt: Sequence[int], new: int) -> tuple[list[int], list[float]]:
        self._llama.reset()
        self._llama.eval(list(prompt))
        api, context = self._api, self._llama.ctx
        slot = (ctypes.c_int32 * 1)()
        step = api.llama_batch_get_one(slot, 1)  # every step reads the slot again, at the next position
        tokens, times = [self._greedy()], [time.perf_counter()]
        for _ in range(new):
            slot[0] = tokens[-1]
            if api.llama_decode(context, step) != 0:
                raise ContextReadyError(
                    f"llama.cpp could not decode token {len(times)}; free some memory and try again."
                )
            tokens.append(self._greedy())
            times.append(time.perf_counter())
        return tokens, np.diff(times).tolist()

    def _greedy(self) -> int:
        logits = self._api.llama_get_logits_ith(self._llama.ctx, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())


def random_weights(shape: Shape) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Weights as at the start of training: norms are 1, matrices are normal with standard deviation 0.02."""
    random = np.random.default_rng(0)
    for name, size in shape.tensors().items():
        matrix = len(size) == 2
        yield name, random.standard_normal(size, np.float32) * np.float32(0.02) if matrix else np.ones(size, np.float32)


def write_gguf(path: Path, shape: Shape, precision: str, weights: Weights) -> int:
    """Write a Llama model without a tokenizer as a GGUF file; returns the bytes of weights read per token.

    Queries and keys are in llama.cpp's order, in which the two rows of a rotation pair are neighbours.
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
                f"{name} with shape {weight.shape} is not a weight of {shape}; give each weight once."
            )
        stored = gguf.quantize(weight, quantization) if weight.ndim == 2 else weight
        writer.add_tensor(name, stored, raw_dtype=quantization if weight.ndim == 2 else None)
        read += stored[0].nbytes if name == _EMBEDDING else stored.nbytes
    if expected:
        raise ContextReadyError(f"Weights of {shape} are missing: {', '.join(expected)}; give all of them.")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


def _check(shape: Shape, precision: str = "f32") -> None:
    """Refuse invalid shapes, and precisions that the shape does not allow."""
    TransformerConfig(shape.vocab_size, shape.width, shape.layers, shape.heads)
    if precision not in PRECISIONS:
        raise ContextReadyError(f"Unknown precision '{precision}'; choose one of: {', '.join(PRECISIONS)}.")
    if precision.startswith("q") and shape.width % _BLOCK:
        raise ContextReadyError(
            f"width={shape.width} cannot be stored in {precision}, which needs a multiple of {_BLOCK}; choose another "
            "width, or f16 or f32."
        )
