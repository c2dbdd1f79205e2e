"""A model on disk as one object: load it, generate, stream and score text.

model = contextready.load("runs/mini-d1")
print(model.generate("The people of", max_tokens=64))
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from contextready.errors import ContextReadyError, nearest
from contextready.infer.engine import ENGINES, EXPORTED, Engine, check_threads
from contextready.infer.generate import Completion, GenerationSettings, Piece, generate_pieces
from contextready.infer.sampling import Sampling, log_probabilities

if TYPE_CHECKING:
    from contextready.data.tokenizer import Tokenizer
    from contextready.model.context_ready import ContextReady


@dataclass(frozen=True)
class TextScore:
    """How well a model predicts a text."""

    tokens: list[int]
    """The tokens of the text."""
    logprobs: list[float]
    """The natural log-probability of each token, given all tokens before it."""
    bytes: int
    """Length of the text in UTF-8."""

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood per token, in nats."""
        return -sum(self.logprobs) / len(self.logprobs)

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Bits needed per byte of text, which compares models with different tokenizers."""
        return -sum(self.logprobs) / log(2) / self.bytes

    def __repr__(self) -> str:
        return (
            f"TextScore({len(self.tokens)} tokens, perplexity={self.perplexity:.4g}, "
            f"bits_per_byte={self.bits_per_byte:.4g})"
        )


class GenerateOptions(TypedDict, total=False):
    """The keywords of `LanguageModel.generate`, for type checkers."""

    max_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    stop: str | Sequence[str]
    seed: int


class LanguageModel:
    """A trained model with its tokenizer. `contextready.load` creates it."""

    def __init__(
        self,
        path: Path,
        tokenizer: "Tokenizer",
        trained_length: int,
        make_engine: Callable[[int, int], Engine],
        model: "ContextReady | None" = None,
    ) -> None:
        self.path = path
        self.tokenizer = tokenizer
        self.trained_length = trained_length
        """Tokens in the sequences the model was trained on; longer texts may make little sense to it."""
        self._make_engine = make_engine
        self._model = model

    def __repr__(self) -> str:
        return f"LanguageModel({str(self.path)!r})"

    @property
    def model(self) -> "ContextReady":
        """The torch module. An exported file has none, because it runs without torch."""
        if self._model is None:
            raise ContextReadyError(
                f"{self.path} is an exported file and has no torch module; load the run or checkpoint instead."
            )
        return self._model

    def engine(self, rows: int, capacity: int) -> Engine:
        """An engine with this many rows, each with room for `capacity` tokens."""
        return self._make_engine(rows, capacity)

    @overload
    def generate(self, prompt: str, **options: Unpack[GenerateOptions]) -> str: ...

    @overload
    def generate(self, prompt: list[str], **options: Unpack[GenerateOptions]) -> list[str]: ...

    def generate(
        self,
        prompt: str | list[str],
        *,
        max_tokens: int = 128,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int = 0,
    ) -> str | list[str]:
        """Continue a prompt, or each prompt of a list, and return the new text without the prompt.

        Generation ends at the end-of-text token, before a `stop` string, or after `max_tokens`. `temperature=0` always
        takes the most likely token. The same seed gives the same text.
        """
        prompts = [prompt] if isinstance(prompt, str) else prompt
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        done: list[Completion] = [
            piece.completion
            for piece in self._pieces(prompts, sampling, max_tokens=max_tokens, stops=_stops(stop), seed=seed)
            if piece.completion is not None
        ]
        texts = [completion.text for completion in sorted(done, key=lambda one: one.prompt)]
        return texts[0] if isinstance(prompt, str) else texts

    def stream(
        self,
        prompt: str,
        *,
        max_tokens: int = 128,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int = 0,
    ) -> Iterator[str]:
        """Continue a prompt and yield the text piece by piece, as soon as each piece is certain.

        The pieces together are what `generate` returns for the same settings.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        pieces = self._pieces([prompt], sampling, max_tokens=max_tokens, stops=_stops(stop), seed=seed)
        return (piece.text for piece in pieces if piece.text)

    def score(self, text: str, *, after: str = "") -> TextScore:
        """Log-probability of every token of a text, exactly as the model streams it.

        The text is scored as the start of a new document (it follows the model's begin token, or else the end-of-text
        token), or as the continuation of `after`.
        """
        (ids,) = self.tokenizer.encode_prompts([text], begin=False)
        if not ids:
            raise ContextReadyError("The text to score is empty; pass at least one character.")
        context = self.tokenizer.encode_prompts([after])[0] or [self.tokenizer.end_id]
        engine = self.engine(1, len(context) + len(ids))
        logits_V, logprobs = engine.step(context[:1])[0], []
        for token in context[1:]:
            logits_V = engine.step([token])[0]
        for token, following in zip(ids, [*ids[1:], None], strict=True):
            logprobs.append(log_probabilities(logits_V, token)[0])
            if following is not None:
                logits_V = engine.step([token])[0]
        return TextScore(ids, logprobs, len(text.encode()))

    def _pieces(self, prompts: list[str], sampling: Sampling, **settings: Any) -> Iterator[Piece]:
        ids = self.tokenizer.encode_prompts(prompts)
        if not all(ids):
            raise ContextReadyError("The prompt is empty; pass some text to continue.")
        chosen = GenerationSettings(sampling, stop_tokens=self.tokenizer.stop_ids, **settings)
        longest = max((len(prompt) for prompt in ids), default=0)
        engine = self.engine(len(ids) or 1, longest + chosen.max_tokens)
        return generate_pieces(engine, ids, chosen, tokenizer=self.tokenizer)


def load(
    path: str | os.PathLike[str],
    *,
    engine: str | None = None,
    device: str = "auto",
    threads: int | None = None,
    precision: str = "fp32",
    **reading: Any,
) -> LanguageModel:
    """Load a run, a checkpoint, a Hugging Face folder or an exported .gguf file.

    `engine` is `eager` (the default) or `compiled`; an exported file always runs on `ggml` and does not import torch.
    `threads` is the number of CPU threads, for PyTorch of the whole process; by default a measurement of milliseconds
    chooses it. `precision` is fp32 (the weights as they are), bf16 (matrices in bf16), or auto: bf16 if the hardware
    multiplies it natively. `reading` says how prompts are read (solver, tolerance, chunk, bf16_passes) and, except for
    exported files, how far states can be rolled back (history). Exported files read one token at a time unless another
    solver is chosen.
    """
    path = Path(path)
    if engine is not None and engine not in ENGINES:
        raise ContextReadyError(f"Unknown engine '{engine}'; {nearest(engine, ENGINES)}")
    check_threads("threads", threads)
    if path.suffix == EXPORTED:
        if engine not in (None, "ggml"):
            raise ContextReadyError(f"{path} is an exported file, which only the engine ggml runs; choose no engine.")
        if precision != "fp32":
            raise ContextReadyError(
                "An exported file has a precision of its own, which crt export --type chooses; leave precision out."
            )
        if "history" in reading:
            raise ContextReadyError(
                "An exported file keeps a history of 1, so history cannot be chosen; leave it out, or use the run or "
                "checkpoint."
            )
        return _load_exported(path, threads, reading)
    if engine == "ggml":
        raise ContextReadyError(f"The engine ggml runs exported files; create one with: crt export {path} model.gguf")
    return _load_checkpoint(path, engine or "eager", threads, device, precision, reading)


def _load_exported(path: Path, threads: int | None, reading: dict[str, Any]) -> LanguageModel:
    from contextready.infer.ggml.engine import GgmlEngine
    from contextready.infer.ggml.file import read_gguf

    exported = read_gguf(path)
    return LanguageModel(
        path,
        exported.tokenizer(),
        exported.trained_length,
        lambda rows, capacity: GgmlEngine(path, rows, capacity, threads, **reading),
    )


def _load_checkpoint(
    path: Path, engine: str, threads: int | None, device: str, precision: str, reading: dict[str, Any]
) -> LanguageModel:
    import torch

    from contextready.device import check_precision, find_device
    from contextready.infer.threads import torch_threads
    from contextready.infer.torch_engine import torch_engine
    from contextready.model.narrow import in_precision
    from contextready.runs.checkpoint import open_trained

    checkpoint = open_trained(path)
    checkpoint.must_have_learned_text()
    where = find_device(device)
    check_precision(precision, where)
    model, tokenizer = in_precision(checkpoint.model().to(where), precision), checkpoint.tokenizer()
    if threads is not None or where.type == "cpu":
        torch.set_num_threads(threads or torch_threads(model.backbone.width))

    def make(rows: int, capacity: int) -> Engine:
        return torch_engine(model, engine, rows=rows, capacity=capacity, **reading)

    return LanguageModel(path, tokenizer, checkpoint.trained_length, make, model)


def _stops(stop: str | Sequence[str]) -> Sequence[str]:
    """A single stop string is a list of one."""
    return [stop] if isinstance(stop, str) else stop
