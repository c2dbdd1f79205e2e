"""Other programs in the decode benchmark: transformers and llama.cpp with Llama models.

They run the same weights as a native model of the Llama family, or random ones of a transformer's shape. Both programs
are optimised for Llama models: gated MLP, RMS norms, rotary positions.
"""

import ctypes
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from contextready.bench.llama import Shape, Weights, check, random_weights, write_gguf
from contextready.errors import ContextReadyError
from contextready.extras import require
from contextready.infer.engine import check_ids

_WARM_UP = 2  # unreported steps after the prompt, which allocate memory and fill caches
_BATCH = 512  # prompt tokens that llama.cpp reads at once (its default)
_IN_TRANSFORMERS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names in transformers of the modules that a GGUF file names."""


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

    def __init__(self, shape: Shape, weights: Weights | None = None) -> None:
        transformers = require("transformers", "bench")
        check(shape)
        config = transformers.LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.width,
            intermediate_size=shape.ffn_width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            rms_norm_eps=shape.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},
            tie_word_embeddings=shape.tied,
            # A random model may choose any token, so no token may end the text.
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model: Any = transformers.LlamaForCausalLM(config).float().eval()
        if weights is not None:
            given = {_in_transformers(name): torch.from_numpy(weight) for name, weight in weights}
            self.model.load_state_dict(given, strict=not shape.tied)
        self.vocab_size = shape.vocab_size
        embedding = self.model.get_input_embeddings().weight
        held = sum(weight.numel() * weight.element_size() for weight in self.model.parameters())
        unread = 0 if shape.tied else (shape.vocab_size - 1) * shape.width
        self.bytes_per_token = held - unread * embedding.element_size()

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

    def read(self, prompt: Sequence[int]) -> None:
        """Read a prompt into an empty context."""
        self._llama.reset()
        self._llama.eval(list(prompt))

    def _generate(self, prompt: Sequence[int], new: int) -> tuple[list[int], list[float]]:
        self.read(prompt)
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


def _in_transformers(name: str) -> str:
    """The name that transformers has for a weight in a GGUF file."""
    *layer, module, kind = name.split(".")
    outer = f"model.layers.{layer[1]}." if layer else ""
    return f"{outer}{_IN_TRANSFORMERS[module]}.{kind}"
