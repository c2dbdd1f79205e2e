"""`crt chat`: a conversation in the terminal, or with questions from standard input."""

import argparse
import io
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from contextready.cli.generate import LARGEST_PROMPT, bytes_needed, note_length
from contextready.cli.generation_options import (
    add_reading_options,
    add_sampling_options,
    check_limits,
    note_emulation,
    opening_of,
    sampling_of,
)
from contextready.cli.options import Verbs, one_line, verb, whole_number
from contextready.errors import ContextReadyError, nearest
from contextready.formats.limits import check_memory, shown
from contextready.hf.trust import add_trust_option

if TYPE_CHECKING:
    from contextready.infer.chat import Chat

HELP = """\
/undo           take back the last question and its answer
/fork NAME      keep this point of the conversation under a name, and continue
/switch NAME    return to such a point; the conversation that you leave is kept as 'last'
/switch         list the points
/save FILE      write the conversation to a file
/load FILE      continue the conversation in a file; the one that you leave is kept as 'last'
/system TEXT    set the system prompt
/system         show the system prompt
/help           show this list
/quit           leave, like Ctrl-D

Ctrl-C stops an answer and keeps what was written. To send a line that begins with /, write //."""
COMMANDS = ("/undo", "/fork", "/switch", "/save", "/load", "/system", "/help", "/quit")


def add(verbs: Verbs) -> None:
    """Describe `crt chat`."""
    chat = verb(
        verbs,
        "chat",
        "hold a conversation in the terminal",
        "Hold a conversation with a model that has a chat template, such as an instruct model.\n"
        "Without one, the model continues your lines as plain text. Questions may also come from\n"
        "standard input, one per line; standard output then has the answers only.",
        examples='crt chat smollm2-crt --system "Answer in one sentence."\n'
        "crt chat runs/mini-d1 --temperature 0.7 --max-tokens 64\n"
        "printf 'My name is Ann.\\nWhat is my name?\\n' | crt chat smollm2-crt --temperature 0",
        notes="in the conversation:\n" + "\n".join(f"  {line}".rstrip() for line in HELP.splitlines()),
    )
    chat.add_argument("model", type=Path, help="run, checkpoint, Hugging Face folder, or exported .gguf file")
    chat.add_argument("--system", metavar="TEXT", help="system prompt (default: none, or the template's own)")
    chat.add_argument(
        "--template",
        metavar="WHICH",
        default="auto",
        help="auto: the model's chat template, or plain text if it has none; model: refuse a model without one; none: "
        "plain text",
    )
    chat.add_argument(
        "--max-tokens", type=whole_number, metavar="N", default=512, help="most tokens to generate per answer"
    )
    chat.add_argument(
        "--context",
        type=whole_number,
        metavar="N",
        help="room for this many tokens (default: as many as the model was made for, at most 4096)",
    )
    add_sampling_options(chat)
    add_reading_options(chat)
    add_trust_option(chat, _run)


def _run(options: argparse.Namespace) -> None:
    from contextready.infer.chat import CONTEXT, Chat
    from contextready.infer.generate import GenerationSettings
    from contextready.infer.language_model import load

    check_limits(options)
    sampling = sampling_of(options)
    opened = load(options.model, **opening_of(options))
    note_emulation(opened, options.precision)
    context = options.context or min(opened.trained_length, CONTEXT)
    check_memory(
        bytes_needed(opened, 1, context, 1, GenerationSettings()),
        f"A conversation of up to {context:,} tokens",
        "use a smaller --context.",
    )
    chat = Chat(
        opened,
        system=options.system,
        sampling=sampling,
        max_tokens=options.max_tokens,
        context=context,
        seed=options.seed,
        template=options.template,
    )
    note_length(opened, context)
    if chat.template is None:
        why = "" if options.template == "none" else f"{options.model} has no chat template: "
        _say(f"{why}your lines are continued as plain text.")
    in_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    if in_terminal:
        _say("/help lists the commands; Ctrl-C stops an answer, and Ctrl-D leaves.")
    talk(chat, _typed() if in_terminal else _piped())


def talk(chat: "Chat", lines: Iterator[str]) -> None:
    """Answer questions and obey commands until the lines end. What is refused leaves the conversation as it was."""
    for line in lines:
        try:
            if not line.strip():
                continue
            if line.startswith("/") and not line.startswith("//"):
                if not _obey(chat, line):
                    return
            else:
                _answer(chat, line.removeprefix("/") if line.startswith("//") else line)
        except ContextReadyError as error:
            _say(str(error))
        except BrokenPipeError:
            raise
        except OSError as error:
            _say(f"a file could not be read or written: {error}")


def _answer(chat: "Chat", question: str) -> None:
    """Print an answer as it is written. Ctrl-C ends it; a second one takes the question back as well."""
    begun = False
    try:
        with _interrupts() as interrupted, closing(chat.ask(question)) as pieces:
            for piece in pieces:
                begun = True
                print(piece, end="", flush=True)
                if interrupted():
                    break
    except BaseException as error:
        if begun:
            print(flush=True)
        if not isinstance(error, KeyboardInterrupt):
            raise
        _say("the question was taken back")
        return
    print(flush=True)
    if chat.finish == "length":
        _say(
            "the context is full; /undo makes room, and --context gives more."
            if chat.position >= chat.context
            else f"the answer was ended after {chat.max_tokens} tokens; --max-tokens allows more."
        )


def _obey(chat: "Chat", line: str) -> bool:
    """Carry out a command; returns whether the conversation continues."""
    command, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    if command not in COMMANDS:
        raise ContextReadyError(f"There is no command {shown(command)}; {nearest(command, COMMANDS)}")
    if command in ("/fork", "/save", "/load") and not rest:
        what = "NAME" if command == "/fork" else "FILE"
        raise ContextReadyError(f"{command} needs a {what.lower()}; write {command} {what}.")
    if command in ("/undo", "/help", "/quit") and rest:
        raise ContextReadyError(f"{command} takes nothing after it, but got {shown(rest)}.")
    if command == "/quit":
        return False
    _ACTIONS[command](chat, rest)
    return True


def _undo(chat: "Chat", _: str) -> None:
    _say(f"took back: {shown(chat.undo()['content'])}")


def _fork(chat: "Chat", name: str) -> None:
    chat.fork(name)
    _say(f"kept as '{name}'; return to it with: /switch {name}")


def _switch(chat: "Chat", name: str) -> None:
    if not name:
        _say(f"points to return to: {', '.join(sorted(chat.forks)) or 'none'}")
        return
    chat.switch(name)
    _say(f"returned to '{name}'; {_where(chat)}")


def _save(chat: "Chat", file: str) -> None:
    chat.save(Path(file).expanduser())
    _say(f"wrote {file}")


def _load(chat: "Chat", file: str) -> None:
    chat.load(Path(file).expanduser())
    _say(f"continuing {file}; {_where(chat)}")


def _system(chat: "Chat", text: str) -> None:
    if text:
        chat.system = text
    _say(f"system prompt: {chat.system or 'none'}")


def _help(chat: "Chat", _: str) -> None:
    print(HELP, file=sys.stderr)


_ACTIONS: "dict[str, Callable[[Chat, str], None]]" = {
    "/undo": _undo,
    "/fork": _fork,
    "/switch": _switch,
    "/save": _save,
    "/load": _load,
    "/system": _system,
    "/help": _help,
}


def _where(chat: "Chat") -> str:
    """Where a conversation is: its last question."""
    questions = [message["content"] for message in chat.messages if message["role"] == "user"]
    return f"the last question was: {shown(questions[-1])}" if questions else "nothing was asked yet"


def _say(remark: str) -> None:
    """Print a remark beside the answers."""
    print(f"crt chat: {one_line(remark)}", file=sys.stderr, flush=True)


def _typed() -> Iterator[str]:
    """Lines from a terminal; Ctrl-C discards one that is being typed."""
    with suppress(ImportError):
        import readline  # noqa: F401  (input() then has a history and can be edited)
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def _piped() -> Iterator[str]:
    """Lines from a pipe or file."""
    if sys.stdin is None:  # it was closed, as in: crt chat MODEL <&-
        return
    if isinstance(sys.stdin, io.TextIOWrapper):
        # In some locales, Python would accept any bytes and pass them on as half characters.
        sys.stdin.reconfigure(errors="strict")
    while True:
        try:
            line = sys.stdin.readline(LARGEST_PROMPT + 1)
        except UnicodeDecodeError as error:
            raise ContextReadyError(
                f"Standard input is not valid {error.encoding.upper()} text; convert it first, for example with iconv."
            ) from None
        if not line:
            return
        if len(line) > LARGEST_PROMPT:
            raise ContextReadyError(f"A line has more than {LARGEST_PROMPT:,} characters; shorten it.")
        yield line.removesuffix("\n").removesuffix("\r")


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Inside the block, Ctrl-C only makes the yielded function true; a second one interrupts as usual.

    An interruption at any place could leave a step of the model half done.
    """
    pressed = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield pressed.is_set
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
