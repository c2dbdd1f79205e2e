"""`crt generate`: prompts from the command line, a file or standard input; text as it comes."""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contextready.cli.options import Verbs, verb
from contextready.errors import ContextReadyError
from contextready.files import to_json

if TYPE_CHECKING:
    from contextready.infer.generate import Completion, GenerationSettings, Piece
    from contextready.infer.open import Opened


def add(verbs: Verbs) -> None:
    """Describe `crt generate`."""
    generate = verb(
        verbs,
        "generate",
        "continue prompts, token by token",
        "Continue prompts from the command line, from a file, or from standard input. One\n"
        "completion appears as it comes; several are printed one after the other.",
        "examples:\n"
        '  crt generate runs/mini-d1 "The history of" --seed 1\n'
        "  crt generate runs/mini-d1 --file prompts.txt --samples 3 --json\n"
        '  crt generate runs/mini-d1 "The history of" --save-state some.state\n'
        '  crt generate runs/mini-d1 " and then" --state some.state\n'
        '  crt generate model.gguf "The history of" --temperature 0 --stats',
    )
    generate.add_argument("model", type=Path, help="run, checkpoint, or exported .gguf file")
    generate.add_argument("prompts", nargs="*", help="texts to continue (default: standard input, as one)")
    generate.add_argument("--file", type=Path, help="a file of prompts, one a line")
    generate.add_argument("--max-tokens", type=int, default=128, help="tokens to generate (default: 128)")
    generate.add_argument("--samples", type=int, default=1, help="completions of each prompt (default: 1)")
    generate.add_argument("--seed", type=int, default=0, help="seed of the draws (default: 0)")
    generate.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    generate.add_argument("--top-k", type=int, help="draw among the k likeliest tokens only")
    generate.add_argument(
        "--top-p", type=float, default=1.0, help="draw among the likeliest tokens that together reach p"
    )
    generate.add_argument(
        "--min-p", type=float, default=0.0, help="draw among tokens at least p times as likely as the likeliest"
    )
    generate.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: avoid tokens seen before")
    generate.add_argument("--stop", action="append", default=[], help="end before this text (may be repeated)")
    generate.add_argument("--past-end", action="store_true", help="do not stop at the end-of-text token")
    generate.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: log-probabilities, and the N likeliest"
    )
    generate.add_argument(
        "--context", type=int, help="capacity of a row in tokens (default: as needed; none with a window)"
    )
    generate.add_argument("--engine", help="eager, compiled, or ggml for exported files (default: eager)")
    generate.add_argument("--solver", help="how prompts are read: sweep, jacobi or sequential (default: sweep)")
    generate.add_argument("--tolerance", type=float, help="error that sweep and jacobi may leave (default: 0.05)")
    generate.add_argument("--chunk", type=int, help="tokens of a prompt solved at once (default: 4096)")
    generate.add_argument("--state", type=Path, help="go on from a saved session")
    generate.add_argument("--rollback", type=int, default=0, metavar="N", help="first take back its last N tokens")
    generate.add_argument("--save-state", type=Path, help="save the session at the end, to go on later")
    generate.add_argument("--history", type=int, help="tokens that a saved session can be rolled back (default: 1)")
    generate.add_argument("--threads", type=int, help="threads to compute with (default: all cores)")
    generate.add_argument("--device", default="auto", help="cpu, cuda, mps or auto (default: auto)")
    generate.add_argument("--stats", action="store_true", help="say how prompts were read and how fast it went")
    generate.add_argument("--json", action="store_true", help="print one JSON line a completion")
    generate.set_defaults(run=_run, more_words="prompts")


def _run(options: argparse.Namespace) -> None:
    from contextready.infer.generate import GenerationSettings
    from contextready.infer.sampling import Sampling

    settings = GenerationSettings(
        Sampling(options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty),
        max_tokens=options.max_tokens,
        samples=options.samples,
        seed=options.seed,
        stops=options.stop,
        logprobs=options.logprobs,
    )
    request = Request(
        prompts=options.prompts,
        settings=settings,
        file=options.file,
        past_end=options.past_end,
        capacity=options.context,
        state=options.state,
        save_state=options.save_state,
        rollback=options.rollback,
        as_json=options.json,
        stats=options.stats,
    )
    chosen = {name: getattr(options, name) for name in ("solver", "tolerance", "chunk", "history")}
    run_generate(
        options.model,
        request,
        engine=options.engine,
        threads=options.threads,
        device=options.device,
        **{name: value for name, value in chosen.items() if value is not None},
    )


@dataclass(frozen=True)
class Request:
    """What to generate from, and how to show it."""

    prompts: Sequence[str]
    settings: "GenerationSettings"
    """How to generate; stop tokens and kept states follow from what is below."""
    file: Path | None = None
    past_end: bool = False
    """Go on after the end-of-text token."""
    capacity: int | None = None
    """Room for so many tokens a row; none: as many as are needed."""
    state: Path | None = None
    save_state: Path | None = None
    rollback: int = 0
    as_json: bool = False
    stats: bool = False


def run_generate(model: Path, request: Request, **opening: Any) -> None:
    """Generate and print: one completion as it comes, several one after the other, or JSON lines.

    `opening` (engine, threads, device, solver, …) goes to `open_for_generation`.
    """
    from contextready.infer.generate import generate_pieces
    from contextready.infer.open import open_for_generation

    opened = open_for_generation(model, **opening)
    texts = _prompts(request)
    rows = len(texts) * request.settings.samples
    if request.save_state is not None and rows != 1:
        raise ContextReadyError("--save-state keeps one completion; give one prompt and one sample.")
    prompts, states, earlier = _ids(opened, texts, request)
    longest = max(len(ids) for ids in prompts) + max((s.position for s in states if s is not None), default=0)
    capacity = request.capacity or longest + request.settings.max_tokens
    if capacity > opened.trained_length:
        print(
            f"Note: this may become {capacity} tokens, and the model was trained on {opened.trained_length} at a time; "
            "what it writes beyond that may make little sense.",
            file=sys.stderr,
        )
    settings = replace(
        request.settings,
        stop_tokens=() if request.past_end else (opened.tokenizer.end_id,),
        keep_states=request.save_state is not None,
    )
    start = time.perf_counter()
    pieces = generate_pieces(
        opened.engine(rows, capacity), prompts, settings, tokenizer=opened.tokenizer, states=states
    )
    alone = rows == 1 and not request.as_json
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


def _show(pieces: "Iterable[Piece]", alone: bool) -> "list[Completion]":
    done = []
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


def _ids(opened: "Opened", texts: list[str], request: Request) -> tuple[list[list[int]], list[Any], list[int]]:
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


def _save(path: Path, completion: "Completion", earlier: list[int]) -> None:
    from contextready.infer.session import Session

    assert completion.state is not None
    newest = (earlier + completion.tokens)[-completion.state.history - 1 :]
    Session(completion.state, newest).save(path)


def _record(completion: "Completion", texts: list[str]) -> dict[str, Any]:
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


def _print_stats(done: "list[Completion]", seconds: float) -> None:
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
