"""Generation on any engine: prompts in, tokens and text out, piece by piece or whole."""

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
"""Why a completion ended: it had all its tokens, or a stop token or stop string came."""


@dataclass(frozen=True, eq=False)
class Completion:
    """All that followed a prompt."""

    prompt: int
    """Which prompt."""
    sample: int
    """Which of the prompt's samples."""
    tokens: list[int]
    """Every token chosen, with the stop token if one came."""
    text: str
    """The text after the prompt's, up to the stop token or stop string; empty without a tokenizer."""
    logprobs: list[float] | None
    """Each token's log-probability by the raw logits, if asked for."""
    top_logprobs: list[list[tuple[int, float]]] | None
    """The likeliest tokens in each token's place, if asked for."""
    finish: Finish
    state: "State | None"
    """If asked for, the state that has read the prompt and every token but the last (`unread`)."""
    read: ReadInfo
    """How the prompt was read."""

    @property
    def unread(self) -> int:
        """The last token: no step was spent on reading it, so going on from `state` begins with the prompt [unread]."""
        return self.tokens[-1]


@dataclass(frozen=True, eq=False)
class Piece:
    """One token of one completion."""

    prompt: int
    """Which prompt."""
    sample: int
    """Which of the prompt's samples."""
    token: int
    text: str
    """What can be shown now: it may lag behind the token, and never has to be taken back."""
    logprob: float | None
    """The token's log-probability by the raw logits, if asked for."""
    top: list[tuple[int, float]] | None
    """The likeliest tokens in its place, if asked for."""
    finish: Finish | None
    """Why the completion ended, on its last piece."""
    completion: Completion | None
    """The whole completion, on its last piece."""


@dataclass(frozen=True)
class GenerationSettings:
    """What to generate after every prompt."""

    sampling: Sampling = field(default_factory=Sampling)
    """How each token is chosen."""
    max_tokens: int = 128
    """Tokens of a completion, at most."""
    samples: int = 1
    """Completions of each prompt."""
    seed: int = 0
    """A row's draws depend on it and on which sample of its prompt the row is, so a prompt gets the same completions
    alone as among others."""
    stop_tokens: Collection[int] = ()
    """Tokens that end a completion."""
    stops: Sequence[str] = ()
    """Texts that end a completion; they are not part of it."""
    logprobs: int | None = None
    """Give log-probabilities, and so many of the likeliest tokens (0: of the chosen token only)."""
    keep_states: bool = False
    """Give the state after every completion."""

    def __post_init__(self) -> None:
        if not hasattr(self.samples, "__index__") or self.samples < 1:
            raise ContextReadyError(f"{self.samples} samples of a prompt are impossible; give 1, 2, 3, …")
        if not hasattr(self.max_tokens, "__index__") or self.max_tokens < 1:
            raise ContextReadyError(f"{self.max_tokens} tokens cannot be generated; give 1, 2, 3, …")
        if not hasattr(self.seed, "__index__") or self.seed < 0:
            raise ContextReadyError(f"A seed of {self.seed} is impossible; give 0, 1, 2, …")


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    *,
    tokenizer: "Tokenizer | None" = None,
    states: "Sequence[State | None] | None" = None,
) -> list[Completion]:
    """Every completion, by prompt and then by sample; the arguments are those of `generate_pieces`."""
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
    """Read each prompt once, go on with every sample of it in a row of its own, and yield the tokens as they come.

    The engine's rows are overwritten, those not needed too. With `states[i]`, prompt i is what comes after the tokens
    that state has read; those are not known here, so the repetition penalty does not see them. Nothing is read before
    the first piece is asked for.
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
            f"{len(states)} states were given for {len(ids)} prompts; give a state or none for every prompt."
        )
    for prompt, state in zip(ids, states, strict=True):
        # The last token is chosen and never read.
        check_capacity(
            engine.capacity, (0 if state is None else state.position) + len(prompt) + settings.max_tokens - 1
        )
    if tokenizer is None and settings.stops:
        raise ContextReadyError("Stop strings are looked for in text; give the model's tokenizer too.")
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
    """A completion in the making."""

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
        """All of it."""
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
    """Read the prompts, then step all rows together until the last has finished."""
    logits_RV, reads = _read(engine, prompts, states, len(rows) // len(prompts))
    while True:
        for r, row in enumerate(rows):
            if row.finish is not None:
                continue
            piece = row.extend(logits_RV[r], settings)
            if piece.finish is not None:
                # Taken now: from the next step on, this row only keeps the others company.
                state = engine.state(r) if settings.keep_states else None
                piece = replace(piece, completion=row.completion(piece.finish, state, reads[row.prompt]))
            yield piece
        if all(row.finish is not None for row in rows):
            return
        # Every step takes a token for every row: a finished row repeats its last, a row without a prompt reads id 0.
        # Neither runs out of room: no row steps more often than the longest completion needs.
        logits_RV = engine.step([row.pieces[-1].token for row in rows] + [0] * (engine.rows - len(rows)))


def _read(
    engine: Engine,
    prompts: list[list[int]],
    states: "Sequence[State | None]",
    samples: int,
) -> tuple[Logits, list[ReadInfo]]:
    """Read each prompt into the first of its rows and copy the state into the others; logits of every row in use."""
    for i, state in enumerate(states):
        engine.load(i * samples, state)
    for row in range(len(prompts) * samples, engine.rows):
        engine.load(row, None)
    logits: list[Logits] = []
    reads = []
    for i, prompt in enumerate(prompts):
        logits_V, read = engine.read(i * samples, prompt)
        if samples > 1:
            after = engine.state(i * samples)
            for row in range(i * samples + 1, (i + 1) * samples):
                engine.load(row, after)
        # A copy: the engine may write the next prompt's logits into the same buffer.
        logits += [logits_V.copy()] * samples
        reads.append(read)
    return np.stack(logits), reads


def _check_engine(engine: Engine, prompts: int, settings: GenerationSettings) -> None:
    """Refuse what this engine cannot generate."""
    samples, logprobs = settings.samples, settings.logprobs
    if prompts == 0:
        raise ContextReadyError("There is no prompt; give at least one.")
    if logprobs is not None and not (hasattr(logprobs, "__index__") and 0 <= logprobs <= engine.vocab_size):
        raise ContextReadyError(
            f"The {logprobs} likeliest tokens cannot be given; ask for 0 to {engine.vocab_size}, the whole vocabulary."
        )
    if prompts * samples > engine.rows:
        raise ContextReadyError(
            f"Prompts: {prompts}, samples of each: {samples}, so {prompts * samples} rows are needed and this engine "
            f"has {engine.rows}; ask for fewer or open the engine with more rows."
        )


def _as_ids(tokens: Iterable[int]) -> list[int]:
    """Plain ints, from whatever holds whole numbers."""
    try:
        return [index(token) for token in tokens]
    except TypeError:
        raise ContextReadyError("A prompt must be a list of token ids; encode text with the tokenizer first.") from None


def _mask(ids: list[int], vocab_size: int) -> npt.NDArray[np.bool_]:
    """Where these ids are."""
    mask_V = np.zeros(vocab_size, dtype=np.bool_)
    mask_V[ids] = True
    return mask_V


def _all_or_none(items: list[Item | None]) -> list[Item] | None:
    """The items, or none if they were not asked for: it is the same for every token."""
    there = [item for item in items if item is not None]
    return there or None
