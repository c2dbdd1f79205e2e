"""Generation on any engine: prompts in, tokens and text out, piece by piece or all at once."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from contextready.errors import ContextReadyError
from contextready.infer.engine import Engine, Logits, check_capacity, check_ids
from contextready.infer.sampling import Sampling, choose, log_probabilities, rng_for
from contextready.infer.text import IncrementalText
from contextready.solve.reading import ReadInfo

if TYPE_CHECKING:
    from contextready.data.tokenizer import Tokenizer
    from contextready.model.state import State

Item = TypeVar("Item")

Finish = Literal["length", "stop"]
"""Why a completion ended: it reached its maximum length, or a stop token or stop string."""


@dataclass(frozen=True, eq=False)
class Completion:
    """One complete continuation of a prompt."""

    prompt: int
    """Index of the prompt."""
    sample: int
    """Index of the sample of this prompt."""
    tokens: list[int]
    """All chosen tokens, including the stop token if there was one."""
    text: str
    """The text after the prompt, up to the stop token or stop string; empty without a tokenizer."""
    logprobs: list[float] | None
    """Log-probability of each token under the raw logits, if requested."""
    top_logprobs: list[list[tuple[int, float]]] | None
    """The most likely tokens at each position, if requested."""
    finish: Finish
    state: "State | None"
    """If requested, the state after the prompt and every token except the last (`unread`)."""
    read: ReadInfo
    """How the prompt was read."""

    @property
    def unread(self) -> int:
        """The last token. The state has not read it, so to continue from `state`, start with the prompt [unread]."""
        return self.tokens[-1]


@dataclass(frozen=True, eq=False)
class Piece:
    """One token of one completion."""

    prompt: int
    """Index of the prompt."""
    sample: int
    """Index of the sample of this prompt."""
    token: int
    text: str
    """Text that can be shown now; it may lag behind the token and is never taken back."""
    logprob: float | None
    """Log-probability of the token under the raw logits, if requested."""
    top: list[tuple[int, float]] | None
    """The most likely tokens at its position, if requested."""
    finish: Finish | None
    """Why the completion ended; set on its last piece."""
    completion: Completion | None
    """The whole completion; set on its last piece."""


@dataclass(frozen=True)
class GenerationSettings:
    """What to generate for every prompt."""

    sampling: Sampling = field(default_factory=Sampling)
    """How each token is chosen."""
    max_tokens: int = 128
    """Maximum number of tokens per completion."""
    samples: int = 1
    """Completions per prompt."""
    seed: int = 0
    """Random numbers depend on the seed and on the index of the sample only, so a prompt gets the same completions
    alone and in a batch."""
    stop_tokens: Collection[int] = ()
    """Tokens that end a completion."""
    stops: Sequence[str] = ()
    """Strings that end a completion; they are not part of it."""
    logprobs: int | None = None
    """Return log-probabilities, and those of this many most likely tokens (0 for the chosen token only)."""
    keep_states: bool = False
    """Return the state after every completion."""

    def __post_init__(self) -> None:
        if not hasattr(self.samples, "__index__") or self.samples < 1:
            raise ContextReadyError(f"samples must be an integer of at least 1, but got {self.samples}.")
        if not hasattr(self.max_tokens, "__index__") or self.max_tokens < 1:
            raise ContextReadyError(f"max_tokens must be an integer of at least 1, but got {self.max_tokens}.")
        if not hasattr(self.seed, "__index__") or self.seed < 0:
            raise ContextReadyError(f"seed must be an integer of at least 0, but got {self.seed}.")


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    *,
    tokenizer: "Tokenizer | None" = None,
    states: "Sequence[State | None] | None" = None,
) -> list[Completion]:
    """All completions, ordered by prompt and sample; the arguments are those of `generate_pieces`."""
    pieces = generate_pieces(engine, prompts, settings, tokenizer=tokenizer, states=states)
    whole = [piece.completion for piece in pieces if piece.completion is not None]
    return sorted(whole, key=lambda completion: (completion.prompt, completion.sample))


def generate_pieces(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    *,
    tokenizer: "Tokenizer | None" = None,
    states: "Sequence[State | None] | None" = None,
) -> Iterator[Piece]:
    """Read each prompt once, continue every sample of it in its own row, and yield the tokens as they are chosen.

    The first rows of the engine are overwritten, one for each completion, and the others stay as they are. With
    `states[i]`, prompt i continues the tokens that this state has read. Those tokens are not known here, so the
    repetition penalty does not see them. Nothing is read until the first piece is requested.
    """
    samples = settings.samples
    _check_engine(engine, len(prompts), settings)
    ids = [_as_ids(prompt) for prompt in prompts]
    for prompt in ids:
        check_ids(prompt, engine.vocab_size)
    ends = _as_ids(settings.stop_tokens)
    if ends:
        check_ids(ends, engine.vocab_size)
    if states is None:
        states = [None] * len(ids)
    elif len(states) != len(ids):
        raise ContextReadyError(
            f"{len(states)} states were passed for {len(ids)} prompts; pass a state or None for every prompt."
        )
    for prompt, state in zip(ids, states, strict=True):
        # The last token is chosen but never read.
        check_capacity(
            engine.capacity, (0 if state is None else state.position) + len(prompt) + settings.max_tokens - 1
        )
    if tokenizer is None and settings.stops:
        raise ContextReadyError("Stop strings are searched for in text; pass the model's tokenizer too.")
    rows = [
        _Row(
            prompt=i,
            sample=sample,
            rng=rng_for(settings.seed, sample),
            seen_V=_mask(ids[i], engine.vocab_size),
            text=None if tokenizer is None else IncrementalText(tokenizer, settings.stops, after=ids[i]),
        )
        for i in range(len(ids))
        for sample in range(samples)
    ]
    return _run(engine, ids, states, rows, replace(settings, stop_tokens=frozenset(ends)))


@dataclass(eq=False)
class _Row:
    """A completion that is being generated."""

    prompt: int
    sample: int
    rng: np.random.Generator
    seen_V: npt.NDArray[np.bool_]
    text: IncrementalText | None
    pieces: list[Piece] = field(default_factory=list)

    @property
    def finish(self) -> Finish | None:
        return self.pieces[-1].finish if self.pieces else None

    def extend(self, logits_V: Logits, settings: GenerationSettings) -> Piece:
        """Choose the next token."""
        token = choose(logits_V, settings.sampling, self.rng, self.seen_V)
        self.seen_V[token] = True
        count = settings.logprobs
        logprob, top = (None, None) if count is None else log_probabilities(logits_V, token, count)
        stopped, full, text = token in settings.stop_tokens, len(self.pieces) + 1 == settings.max_tokens, ""
        if self.text is not None:
            text = "" if stopped else self.text.push(token)
            text += self.text.flush() if stopped or full else ""
            stopped = stopped or self.text.stopped
        finish: Finish | None = "stop" if stopped else "length" if full else None
        self.pieces.append(
            Piece(self.prompt, self.sample, token, text, logprob, top=top, finish=finish, completion=None)
        )
        return self.pieces[-1]

    def completion(self, finish: Finish, state: "State | None", read: ReadInfo) -> Completion:
        """The finished completion."""
        return Completion(
            prompt=self.prompt,
            sample=self.sample,
            tokens=[piece.token for piece in self.pieces],
            text="".join(piece.text for piece in self.pieces),
            logprobs=_all_or_none([piece.logprob for piece in self.pieces]),
            top_logprobs=_all_or_none([piece.top for piece in self.pieces]),
            finish=finish,
            state=state,
            read=read,
        )


def _run(
    engine: Engine,
    prompts: list[list[int]],
    states: "Sequence[State | None]",
    rows: list[_Row],
    settings: GenerationSettings,
) -> Iterator[Piece]:
    """Read the prompts, then step the rows together; a row that has finished is not stepped on."""
    logits_RV, reads = _read(engine, prompts, states, len(rows) // len(prompts))
    running = list(range(len(rows)))
    while running:
        for logits_V, r in zip(logits_RV, running, strict=True):
            row = rows[r]
            piece = row.extend(logits_V, settings)
            if piece.finish is not None:
                state = engine.state(r) if settings.keep_states else None
                piece = replace(piece, completion=row.completion(piece.finish, state, reads[row.prompt]))
            yield piece
        running = [r for r in running if rows[r].finish is None]
        if running:
            logits_RV = engine.step([rows[r].pieces[-1].token for r in running], running)


def _read(
    engine: Engine,
    prompts: list[list[int]],
    states: "Sequence[State | None]",
    samples: int,
) -> tuple[Logits, list[ReadInfo]]:
    """Read each prompt into the first of its rows and copy it to the others; returns logits of every row in use."""
    for i, state in enumerate(states):
        engine.load(i * samples, state)
    logits: list[Logits] = []
    reads = []
    for i, prompt in enumerate(prompts):
        logits_V, read = engine.read(i * samples, prompt)
        for row in range(i * samples + 1, (i + 1) * samples):
            engine.copy_row(i * samples, row)
        # Copy, because the engine may write the next prompt's logits into the same buffer.
        logits += [logits_V.copy()] * samples
        reads.append(read)
    return np.stack(logits), reads


def _check_engine(engine: Engine, prompts: int, settings: GenerationSettings) -> None:
    """Refuse requests that this engine cannot serve."""
    samples, logprobs = settings.samples, settings.logprobs
    if prompts == 0:
        raise ContextReadyError("No prompt was given; pass at least one.")
    if logprobs is not None and not (hasattr(logprobs, "__index__") and 0 <= logprobs <= engine.vocab_size):
        raise ContextReadyError(
            f"logprobs must be between 0 and {engine.vocab_size}, the size of the vocabulary, but got {logprobs}."
        )
    if prompts * samples > engine.rows:
        raise ContextReadyError(
            f"The engine has {engine.rows} rows, but {prompts * samples} are needed (prompts: {prompts}, samples per "
            f"prompt: {samples}); request fewer, or create the engine with more rows."
        )


def _as_ids(tokens: Iterable[int]) -> list[int]:
    """Plain ints from any sequence of integers."""
    try:
        return [index(token) for token in tokens]
    except TypeError:
        raise ContextReadyError("A prompt must be a list of token ids; encode text with the tokenizer first.") from None


def _mask(ids: list[int], vocab_size: int) -> npt.NDArray[np.bool_]:
    """A mask over the vocabulary that is true at these ids."""
    mask_V = np.zeros(vocab_size, dtype=np.bool_)
    mask_V[ids] = True
    return mask_V


def _all_or_none(items: list[Item | None]) -> list[Item] | None:
    """The items, or None if they were not requested, which is the same for every token."""
    there = [item for item in items if item is not None]
    return there or None
