"""`crt generate`: continue prompts from the command line, a file or standard input."""

import argparse
import io
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contextready.cli.generation_options import (
    add_reading_options,
    add_sampling_options,
    check_limits,
    note_emulation,
    opening_of,
    sampling_of,
)
from contextready.cli.options import Verbs, verb, whole_number
from contextready.errors import ContextReadyError
from contextready.files import to_json
from contextready.formats.limits import MOST_ROWS, check_count, check_memory
from contextready.formats.regular import read_text
from contextready.hf.trust import add_trust_option

if TYPE_CHECKING:
    from contextready.infer.generate import Completion, GenerationSettings, Piece
    from contextready.infer.language_model import LanguageModel

LARGEST_PROMPT = 16 << 20
"""Characters of standard input, and bytes of a prompt file, that are read."""
LOGPROB_BYTES = 128
"""Bytes of memory for a token and its log-probability in a list."""


def add(verbs: Verbs) -> None:
    """Describe `crt generate`."""
    generate = verb(
        verbs,
        "generate",
        "continue prompts, token by token",
        "Continue prompts from the command line, from a file, or from standard input. A single\n"
        "completion is printed as it is generated; several are printed one after the other.",
        examples='crt generate runs/mini-d1 "The history of" --seed 1\n'
        "crt generate runs/mini-d1 --file prompts.txt --samples 3 --json\n"
        "echo 'The history of' | crt generate runs/mini-d1\n"
        'crt generate runs/mini-d1 "The history of" --save-state some.state\n'
        'crt generate runs/mini-d1 " and then" --state some.state\n'
        'crt generate model.gguf "The history of" --temperature 0 --stats',
    )
    generate.add_argument("model", type=Path, help="run, checkpoint, Hugging Face folder, or exported .gguf file")
    generate.add_argument(
        "prompts", nargs="*", default=[], help="texts to continue (default: standard input, as one prompt)"
    )
    generate.add_argument("--file", type=Path, help="read prompts from a file, one per line")
    generate.add_argument(
        "--max-tokens", type=whole_number, metavar="N", default=128, help="most tokens to generate per completion"
    )
    generate.add_argument("--samples", type=whole_number, metavar="N", default=1, help="completions per prompt")
    add_sampling_options(generate)
    generate.add_argument(
        "--stop", action="append", metavar="TEXT", default=[], help="stop before this text (may be repeated)"
    )
    generate.add_argument("--past-end", action="store_true", help="continue after the end-of-text token")
    generate.add_argument(
        "--logprobs",
        type=whole_number,
        metavar="N",
        help="with --json: add log-probabilities, and those of the N most likely tokens (default: off)",
    )
    generate.add_argument(
        "--context",
        type=whole_number,
        metavar="N",
        help="room for this many tokens per completion (default: as many as needed)",
    )
    add_reading_options(generate)
    generate.add_argument("--state", type=Path, metavar="FILE", help="continue a saved session")
    generate.add_argument(
        "--rollback", type=whole_number, default=0, metavar="N", help="first remove the session's last N tokens"
    )
    generate.add_argument(
        "--save-state", type=Path, metavar="FILE", help="save the session at the end, to continue it later"
    )
    generate.add_argument(
        "--history",
        type=whole_number,
        metavar="N",
        help="tokens by which a saved session can be rolled back (default: 1)",
    )
    generate.add_argument("--stats", action="store_true", help="report on stderr how prompts were read, and the speed")
    generate.add_argument("--json", action="store_true", help="print one JSON object per completion and line")
    add_trust_option(generate, _run)
    generate.set_defaults(more_words="prompts")


def _run(options: argparse.Namespace) -> None:
    from contextready.infer.generate import GenerationSettings

    settings = GenerationSettings(
        sampling_of(options),
        max_tokens=options.max_tokens,
        samples=options.samples,
        seed=options.seed,
        stops=options.stop,
        logprobs=options.logprobs,
    )
    check_limits(options)
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
    history = {} if options.history is None else {"history": options.history}
    run_generate(options.model, request, **opening_of(options), **history)


@dataclass(frozen=True)
class Request:
    """What to generate from, and how to show it."""

    prompts: Sequence[str]
    settings: "GenerationSettings"
    """How to generate; stop tokens and kept states follow from the fields below."""
    file: Path | None = None
    past_end: bool = False
    """Continue after the end-of-text token."""
    capacity: int | None = None
    """Room for this many tokens per row; None for as many as needed."""
    state: Path | None = None
    save_state: Path | None = None
    rollback: int = 0
    as_json: bool = False
    stats: bool = False


def run_generate(model: Path, request: Request, **opening: Any) -> None:
    """Generate and print: one completion as it is generated, several one after the other, or JSON lines.

    `opening` (engine, threads, device, solver, …) is passed to `contextready.load`.
    """
    from contextready.infer.generate import generate_pieces
    from contextready.infer.language_model import load

    opened = load(model, **opening)
    note_emulation(opened, opening.get("precision", "fp32"))
    texts = _prompts(request)
    rows = len(texts) * request.settings.samples
    check_count("The number of completions (prompts × samples)", rows, 1, MOST_ROWS)
    if request.save_state is not None and rows != 1:
        raise ContextReadyError("--save-state saves one completion; give one prompt and --samples 1.")
    prompts, states, earlier = _ids(opened, texts, request)
    longest = max(len(ids) for ids in prompts) + max((s.position for s in states if s is not None), default=0)
    capacity = request.capacity or longest + request.settings.max_tokens
    check_memory(
        bytes_needed(opened, rows, capacity, opening.get("history", 1), request.settings),
        f"{rows} {'completions' if rows > 1 else 'completion'} of up to {capacity:,} tokens",
        "use a smaller --context, --max-tokens, --samples or --logprobs.",
    )
    start = time.perf_counter()
    engine = opened.engine(rows, capacity)
    note_length(opened, capacity)
    settings = replace(
        request.settings,
        stop_tokens=() if request.past_end else opened.tokenizer.stop_ids,
        keep_states=request.save_state is not None,
    )
    pieces = generate_pieces(engine, prompts, settings, tokenizer=opened.tokenizer, states=states)
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


def note_length(opened: "LanguageModel", capacity: int) -> None:
    """Say so if a text may become longer than those that the model was trained on."""
    if capacity > opened.trained_length:
        print(
            f"Note: this may reach {capacity} tokens, but the model was trained on sequences of "
            f"{opened.trained_length}; the text beyond that may make little sense.",
            file=sys.stderr,
        )


def bytes_needed(
    opened: "LanguageModel", rows: int, capacity: int, history: int, settings: "GenerationSettings"
) -> int:
    """About how much memory generating takes beside the weights. Engines of exported files count their own states."""
    from contextready.infer.engine import EXPORTED

    vocab_size = opened.tokenizer.vocab_size
    # Logits in two precisions, and a mask.
    size = 16 * vocab_size + LOGPROB_BYTES * min(settings.logprobs or 0, vocab_size) * settings.max_tokens
    if opened.path.suffix != EXPORTED:
        from contextready.model.transformer import Transformer

        backbone = opened.model.backbone
        weight = next(backbone.parameters())
        if isinstance(backbone, Transformer) and weight.device.type == "cpu":
            c = backbone.config
            slots = capacity if c.window is None else c.window - 1 + history
            size += (2 * c.layers * slots + history + 1) * c.width * weight.itemsize
    return rows * size


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
    """Prompts from the command line, from the lines of a file, or all of standard input as one prompt."""
    if request.prompts and request.file is not None:
        raise ContextReadyError("Prompts were given both on the command line and with --file; use one of the two.")
    if request.prompts:
        return list(request.prompts)
    if request.file is not None:
        lines = read_text(request.file, LARGEST_PROMPT).splitlines()
        prompts = [line for line in lines if line.strip()]
        if not prompts:
            raise ContextReadyError(f"{request.file} has no prompts; write one per line.")
        return prompts
    return [_standard_input(request.state is not None)]


def _standard_input(may_be_empty: bool) -> str:
    if sys.stdin is None:  # it was closed, as in: crt generate MODEL <&-
        return ""
    if sys.stdin.isatty():
        if may_be_empty:
            return ""
        print("Type the prompt, then press Ctrl-D on a new line.", file=sys.stderr)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # In some locales, Python would accept any bytes and pass them on as half characters.
        sys.stdin.reconfigure(errors="strict")
    try:
        text = sys.stdin.read(LARGEST_PROMPT + 1)
    except UnicodeDecodeError as error:
        raise ContextReadyError(
            f"Standard input is not valid {error.encoding.upper()} text; convert it first, for example with iconv."
        ) from None
    if len(text) > LARGEST_PROMPT:
        raise ContextReadyError(
            f"Standard input has more than {LARGEST_PROMPT:,} characters, which is too long for a prompt; shorten it."
        )
    return text.removesuffix("\n")


def _ids(opened: "LanguageModel", texts: list[str], request: Request) -> tuple[list[list[int]], list[Any], list[int]]:
    """Prompt ids, the states that they continue, and the newest tokens of the session before its last one."""
    ids = opened.tokenizer.encode_prompts(texts, begin=request.state is None)
    if request.state is None:
        if request.rollback:
            raise ContextReadyError("--rollback needs a saved session; name it with --state.")
        if not all(ids):
            raise ContextReadyError("The prompt is empty; give some text to continue, or a saved session with --state.")
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
        in_bf16 = f", {read.bf16_passes:.2f} of {read.passes:.2f} passes in bf16" if read.bf16_passes else ""
        note = f" ({read.note})" if read.note else ""
        print(
            f"prompt {completion.prompt + 1}: {read.tokens} tokens read by {read.solver} in {1e3 * read.seconds:.0f} ms"
            f"{cost}{in_bf16}, {exact}{note}; {len(completion.tokens)} tokens generated ({completion.finish})",
            file=sys.stderr,
        )
    total = sum(len(completion.tokens) for completion in done)
    print(
        f"{total} tokens generated in {seconds:.2f} s including prompts: {total / seconds:.1f} tokens/s",
        file=sys.stderr,
    )
