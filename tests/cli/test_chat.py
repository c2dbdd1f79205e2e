"""`crt chat` with questions from standard input, and interrupted as in a terminal."""

import importlib.util
import io
import os
import signal
import subprocess
import sys

import pytest
from chat_helpers import native, stories
from train_helpers import make_data, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from contextready.cli import chat as verb
from contextready.cli.main import main
from contextready.infer.chat import Chat
from contextready.infer.sampling import Sampling

needs_ggml = pytest.mark.skipif(importlib.util.find_spec("ggml") is None, reason="the extra ggml is not installed")
QUESTIONS = ("Once upon a time", "One day Lily saw a box", "The end")


@pytest.fixture
def model(tmp_path):
    return stories(tmp_path / "model")


@pytest.fixture
def converse(capsys, monkeypatch):
    """Pipe lines into `crt chat`; returns the lines of standard output and of standard error."""

    def call(model, *lines, words=()):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        capsys.readouterr()
        command = ["chat", str(model), "--temperature", "0", "--max-tokens", "16", *map(str, words)]
        assert main(command) == 0
        out, err = capsys.readouterr()
        return out.splitlines(), [line.removeprefix("crt chat: ") for line in err.splitlines()]

    return call


def by_hand(folder, questions):
    """The answers of transformers, greedy, with the whole conversation read anew for each."""
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    messages, answers = [], []
    for question in questions:
        messages.append({"role": "user", "content": question})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        every = lm.generate(**ids, do_sample=False, max_new_tokens=16)[0]
        length = ids["input_ids"].shape[1]
        answers.append(tokenizer.decode(every)[len(tokenizer.decode(every[:length])) :].removesuffix("</s>"))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_a_conversation_is_that_of_transformers(model, converse):
    out, err = converse(model, *QUESTIONS, "", "  ")
    assert "\n".join(out) == "\n".join(by_hand(model, QUESTIONS))
    assert err == ["the answer was ended after 16 tokens; --max-tokens allows more."] * len(QUESTIONS)


def test_commands(model, converse, tmp_path):
    one, two, three = by_hand(model, QUESTIONS)
    out, err = converse(
        model,
        *(QUESTIONS[0], "/fork here", QUESTIONS[1], "/undo", QUESTIONS[1], f"/save {tmp_path / 'a talk'}"),
        *(QUESTIONS[2], "/switch here", "/switch", QUESTIONS[1], "/quit", "not read"),
        words=("--max-tokens", 16),
    )
    assert "\n".join(out) == "\n".join([one, two, two, three, two])
    assert [line for line in err if "--max-tokens" not in line] == [
        "kept as 'here'; return to it with: /switch here",
        f"took back: {QUESTIONS[1]}",
        f"wrote {tmp_path / 'a talk'}",
        f"returned to 'here'; the last question was: {QUESTIONS[0]}",
        "points to return to: here, last",
    ]
    out, err = converse(
        model, f"/load {tmp_path / 'a talk'}", QUESTIONS[2], "/undo", "/undo", "/undo", "/undo", "/undo"
    )
    assert "\n".join(out) == three
    assert err[0] == f"continuing {tmp_path / 'a talk'}; the last question was: {QUESTIONS[1]}"
    assert err[-2:] == ["There is nothing to undo; the conversation is at its start."] * 2


def test_what_is_refused_is_one_sentence_and_loses_nothing(model, converse, tmp_path):
    (tmp_path / "bad").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    one, two, _ = by_hand(model, QUESTIONS)
    out, err = converse(
        model,
        *("/undo", "/undone", "/fork", "/save", "/load", "/undo 3", "/switch x", QUESTIONS[0]),
        *(f"/load {tmp_path / 'bad'}", f"/load {tmp_path}", "/load none", f"/save {tmp_path}", "/save /proc/none/x"),
        *("/switch x", "/ ", "\ud800", QUESTIONS[1]),
    )
    assert "\n".join(out) == "\n".join([one, two])
    said = [line for line in err if "--max-tokens" not in line]
    for line, sentence in zip(
        said,
        [
            "There is nothing to undo; the conversation is at its start.",
            "There is no command /undone; did you mean '/undo'?",
            "/fork needs a name; write /fork NAME.",
            "/save needs a file; write /save FILE.",
            "/load needs a file; write /load FILE.",
            "/undo takes nothing after it, but got 3.",
            "There is no fork 'x'; keep the present conversation with: fork x",
            "bad is not a complete safetensors file",
            "is not a regular file.",
            "There is no state file at none.",
            "exists and is not a saved conversation; choose another name.",
            "/proc/none",
            "There is no fork 'x'; keep the present conversation",
            "There is no command /; choose one of: /undo, /fork,",
            "half of a surrogate pair",
        ],
        strict=True,
    ):
        assert sentence in line


def test_the_system_prompt_and_lines_that_begin_with_a_slash(model, converse):
    system = [{"role": "system", "content": "a story"}]
    tokenizer = AutoTokenizer.from_pretrained(model)
    lm = AutoModelForCausalLM.from_pretrained(model)
    ids = tokenizer.apply_chat_template(
        [*system, {"role": "user", "content": "/Lily"}], add_generation_prompt=True, return_tensors="pt"
    )
    every = lm.generate(**ids, do_sample=False, max_new_tokens=16)[0]
    answer = tokenizer.decode(every)[len(tokenizer.decode(ids["input_ids"][0])) :].removesuffix("</s>")
    out, err = converse(model, "//Lily", words=("--system", "a story"))
    assert "\n".join(out) == answer
    out, err = converse(model, "/system", "/system a story", "//Lily", "/help")
    assert "\n".join(out) == answer
    assert err[:2] == ["system prompt: none", "system prompt: a story"]
    assert any(line.startswith("/switch NAME") for line in err)


def test_a_model_without_a_template_says_so_and_continues(tmp_path, converse, capsys, monkeypatch):
    folder = stories(tmp_path / "plain", template=None)
    out, err = converse(folder, QUESTIONS[0])
    assert main(["generate", str(folder), QUESTIONS[0], "--temperature", "0", "--max-tokens", "16"]) == 0
    assert "\n".join(out) + "\n" == capsys.readouterr().out
    assert err[0] == f"{folder} has no chat template: your lines are continued as plain text."
    assert main(["chat", str(folder), "--template", "model"]) == 2
    assert "has no chat template; use a model that was made for conversations" in capsys.readouterr().err
    _, err = converse(folder, "/system x")
    assert "so there is no place for a system prompt" in err[1]


@needs_ggml
def test_an_exported_file_is_talked_with_too(tmp_path, converse, capsys):
    run(make_data(tmp_path), tmp_path / "run", steps=8)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "m.gguf"), "--type", "f32", "--tokens", "0"]) == 0
    lines = ("river stone", " and", "/undo", " and", f"/save {tmp_path / 'talk'}", "/switch x", " small")
    words = ("--context", "200", "--solver", "sequential")
    out, err = converse(tmp_path / "run", *lines, words=words)
    exported, said = converse(tmp_path / "m.gguf", *lines[:4], *lines[5:], words=words[:2])
    assert exported == out
    assert err[0].replace(str(tmp_path / "run"), "M") == said[0].replace(str(tmp_path / "m.gguf"), "M")
    out, _ = converse(tmp_path / "m.gguf", f"/load {tmp_path / 'talk'}", " small", words=words[:2])
    assert exported[-len(out) :] == out


WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} must not be imported here")
sys.meta_path.insert(0, Refuse())
from contextready.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@needs_ggml
def test_an_exported_file_with_a_template_needs_neither_torch_nor_transformers(tmp_path):
    from contextready.infer.ggml.file import write_gguf

    model, path, lines = (
        native(),
        tmp_path / "m.gguf",
        ("the river", "stones", "/undo", "stones", "/fork a", "/switch a"),
    )
    write_gguf(model.model, path, 200, "f32", model.tokenizer)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "chat", path, "--temperature", "0", "--max-tokens", "9"],
        input="\n".join((*lines, "small", f"/save {tmp_path / 'talk'}")),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    chat = Chat(model, sampling=Sampling(temperature=0), max_tokens=9)
    first, second = ("".join(chat.ask(question)) for question in lines[:2])
    third = "".join(chat.ask("small"))
    assert done.stdout == "".join(f"{answer}\n" for answer in (first, second, second, third))
    assert done.stderr.splitlines()[-1] == (
        "crt chat: The state of the model cannot be saved; install torch with: pip install torch"
    )


def test_ctrl_c_ends_the_answer_and_keeps_the_conversation(capsys):
    chat = Chat(native(), sampling=Sampling(temperature=0), max_tokens=30)
    step, calls = chat.engine.step, []

    def interrupted(tokens):
        calls.append(tokens)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return step(tokens)

    chat.engine.step = interrupted
    verb.talk(chat, iter(["the river", "stones"]))
    first, second = (message["content"] for message in chat.messages[1::2])
    assert (len(first), len(second)) == (6, 30)
    assert chat.messages[0]["content"] == "the river"
    assert capsys.readouterr().out == f"{first}\n{second}\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_takes_the_question_back(capsys):
    chat = Chat(native(), sampling=Sampling(temperature=0), max_tokens=30)
    read = chat.engine.read

    def interrupted(row, tokens):
        if len(chat.messages) == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return read(row, tokens)

    verb.talk(chat, iter(["the river"]))
    chat.engine.read = interrupted
    verb.talk(chat, iter(["stones"]))
    assert [message["content"] for message in chat.messages[::2]] == ["the river"]
    assert "the question was taken back" in capsys.readouterr().err


def test_in_a_process_of_its_own_standard_output_has_the_answers_only(model):
    done = subprocess.run(
        [sys.executable, "-m", "contextready", "chat", model, "--temperature", "0", "--max-tokens", "16"],
        input="\n".join((*QUESTIONS[:2], "/undo", "caf\xe9")).encode("latin-1"),
        capture_output=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"},
    )
    assert done.returncode == 2
    assert done.stdout.decode() == "".join(f"{answer}\n" for answer in by_hand(model, QUESTIONS[:2]))
    assert b"\x1b" not in done.stdout + done.stderr
    assert done.stderr.decode().splitlines()[-1].startswith("crt chat: Standard input is not valid UTF-8 text")


def test_a_hostile_template_is_one_sentence(tmp_path, converse):
    folder = stories(tmp_path / "hostile", "{{ 'a' * 10**10 }}")
    out, err = converse(folder, "hello", "again")
    assert not out
    sentence = f"The chat template of {folder} does not accept this conversation: it needs too much memory."
    assert err == [sentence, sentence]
