"""`crt generate`: prompts from the command line, a file or standard input; text as it comes."""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contextready.errors import ContextReadyError
from contextready.files import to_json
from contextready.infer.generate import Completion, Piece, stream
from contextready.infer.opened import Opened, open_for_generation
from contextready.infer.sampling import Sampling


@dataclass(frozen=True)
class Request:
    """What to generate."""

    prompts: Sequence[str]
    file: Path | None = None
    max_tokens: int = 128
    samples: int = 1
    seed: int = 0
    stops: Sequence[str] = ()
    past_end: bool = False
    """Go on after the end-of-text token."""
    logprobs: int | None = None
    context: int | None = None
    """Room for so many tokens a row; none: as many as are needed."""
    state: Path | None = None
    save_state: Path | None = None
    rollback: int = 0
    as_json: bool = False
    stats: bool = False


def run_generate(model: Path, request: Request, sampling: Sampling, **engine: Any) -> None:
    """Generate and print: one completion as it comes, several one after the other, or JSON lines."""
    opened = open_for_generation(model, **engine)
    texts = _prompts(request)
    if request.save_state is not None and len(texts) * request.samples != 1:
        raise ContextReadyError("--save-state keeps one completion; give one prompt and one sample.")
    prompts, states, earlier = _ids(opened, texts, request)
    longest = max(len(ids) for ids in prompts) + max((s.position for s in states if s is not None), default=0)
    room = request.context or longest + request.max_tokens
    if room > opened.trained_length:
        print(
            f"Note: this may become {room} tokens, and the model was trained on {opened.trained_length} at a time; "
            "what it writes beyond that may make little sense.",
            file=sys.stderr,
        )
    start = time.perf_counter()
    pieces = stream(
        opened.engine(len(prompts) * request.samples, room),
        prompts,
        sampling,
        max_tokens=request.max_tokens,
        samples=request.samples,
        seed=request.seed,
        stop_tokens=() if request.past_end else (opened.tokenizer.end_id,),
        stops=request.stops,
        tokenizer=opened.tokenizer,
        logprobs=request.logprobs,
        states=states,
        keep_states=request.save_state is not None,
    )
    alone = len(prompts) * request.samples == 1 and not request.as_json
    done = _show(pieces, alone)
    seconds = time.perf_counter() - start
    for completion in done:
        if request.as_json:
            print(to_json(_record(completion, texts)))
        elif not alone:
            print(f"— prompt {completion.prompt + 1}, sample {completion.sample + 1} —\n{completion.text}")
    if request.stats:
        _print_stats(done, seconds)
    if request.save_state is not None:
        _save(request.save_state, done[0], earlier + prompts[0])


def _show(pieces: Any, alone: bool) -> list[Completion]:
    done = []
    piece: Piece
    for piece in pieces:
        if alone:
            print(piece.text, end="", flush=True)
        if piece.completion is not None:
            done.append(piece.completion)
    if alone:
        print()
    return sorted(done, key=lambda completion: (completion.prompt, completion.sample))


def _prompts(request: Request) -> list[str]:
    """Prompts of the command line, else one a line of a file, else all of standard input as one."""
    if request.prompts and request.file is not None:
        raise ContextReadyError("Prompts were given and a file of prompts too; give one of both.")
    if request.prompts:
        return list(request.prompts)
    if request.file is not None:
        try:
            lines = request.file.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            raise ContextReadyError(f"There is no file of prompts at {request.file}.") from None
        except UnicodeDecodeError:
            raise ContextReadyError(f"{request.file} is not text in UTF-8; save it as such.") from None
        prompts = [line for line in lines if line.strip()]
        if not prompts:
            raise ContextReadyError(f"{request.file} holds no prompt; write one a line.")
        return prompts
    return [""] if request.state is not None and sys.stdin.isatty() else [sys.stdin.read().removesuffix("\n")]


def _ids(opened: Opened, texts: list[str], request: Request) -> tuple[list[list[int]], list[Any], list[int]]:
    """Prompts as ids, the states they follow, and the newest tokens before the only one of a session."""
    ids = opened.tokenizer.encode_batch(texts)
    if request.state is None:
        if request.rollback:
            raise ContextReadyError("--rollback goes back in a saved session; name it with --state.")
        if not all(ids):
            raise ContextReadyError("The prompt is empty; give some text to go on from, or a session with --state.")
        return ids, [None] * len(ids), []
    from contextready.infer.session import Session

    session = Session.load(request.state).rollback(request.rollback)
    return [[session.unread, *more] for more in ids], [session.state] * len(ids), list(session.newest[:-1])


def _save(path: Path, completion: Completion, earlier: list[int]) -> None:
    from contextready.infer.session import Session

    assert completion.state is not None
    newest = (earlier + completion.tokens)[-completion.state.history - 1 :]
    Session(completion.state, newest).save(path)


def _record(completion: Completion, texts: list[str]) -> dict[str, Any]:
    return {
        "prompt": texts[completion.prompt],
        "sample": completion.sample,
        "text": completion.text,
        "tokens": completion.tokens,
        "finish": completion.finish,
        "logprobs": completion.logprobs,
        "top_logprobs": completion.top_logprobs,
        "read": asdict(completion.read) | {"certificate": completion.read.certificate, "cost": completion.read.cost},
    }


def _print_stats(done: list[Completion], seconds: float) -> None:
    for completion in done:
        read = completion.read
        exact = "exact" if read.exact else f"error about {read.certificate:.0e}"
        cost = "" if read.cost is None else f", {read.cost:.2f} plain passes of arithmetic"
        note = f" ({read.note})" if read.note else ""
        print(
            f"prompt {completion.prompt + 1}: {read.tokens} tokens by {read.solver} in {1e3 * read.seconds:.0f} ms"
            f"{cost}, {exact}{note}; {len(completion.tokens)} tokens generated ({completion.finish})",
            file=sys.stderr,
        )
    total = sum(len(completion.tokens) for completion in done)
    print(f"{total} tokens in {seconds:.2f} s, prompts included: {total / seconds:.1f} tokens/s", file=sys.stderr)
