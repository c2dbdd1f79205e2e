"""`crt generate`, `crt export` and `crt bench` as users run them."""

import importlib.util
import io
import json
import subprocess
import sys

import pytest
import torch
from train_helpers import make_data, run

from contextready.cli.main import main
from contextready.data.tokenizer import Tokenizer
from contextready.infer.session import Session
from contextready.model.state import State
from contextready.runs.checkpoint import open_checkpoint

needs_ggml = pytest.mark.skipif(importlib.util.find_spec("ggml") is None, reason="the extra ggml is not installed")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a tiny model that has learnt a little."""
    folder = tmp_path_factory.mktemp("trained")
    run(make_data(folder), folder / "run", steps=40)
    return folder / "run"


@pytest.fixture
def crt(capsys):
    """Run the command; returns the exit code, standard output and standard error."""

    def call(*words):
        capsys.readouterr()
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def greedy_by_hand(run_folder, prompt, count):
    checkpoint = open_checkpoint(run_folder)
    model, tokenizer = checkpoint.model(), Tokenizer.load(checkpoint.folder)
    ids = tokenizer.encode_batch([prompt])[0]
    chosen = []
    with torch.inference_mode():
        logits, state = model.stream(torch.tensor([ids]), model.init_state(1))
        for _ in range(count):
            chosen.append(int(logits[0, -1].argmax()))
            logits, state = model.stream(torch.tensor([chosen[-1:]]), state)
    return chosen


def completions(out):
    return [json.loads(line) for line in out.splitlines()]


GREEDY = ("--temperature", "0", "--past-end")


def test_greedy_text_is_the_streams(trained, crt):
    code, out, _ = crt("generate", trained, "river stone", *GREEDY, "--max-tokens", 12)
    tokens = greedy_by_hand(trained, "river stone", 12)
    assert code == 0
    assert out == Tokenizer.load(open_checkpoint(trained).folder).decode(tokens) + "\n"


def test_prompts_come_from_words_a_file_or_standard_input(trained, crt, tmp_path, monkeypatch):
    words = (*GREEDY, "--max-tokens", 6, "--json")
    _, given, _ = crt("generate", trained, *words, "green water", "seven names hold")
    (tmp_path / "prompts.txt").write_text("green water\n\nseven names hold\n")
    _, from_file, _ = crt("generate", trained, "--file", tmp_path / "prompts.txt", *words)
    assert [one["tokens"] for one in completions(given)] == [one["tokens"] for one in completions(from_file)]
    monkeypatch.setattr("sys.stdin", io.StringIO("seven names hold\n"))
    _, piped, _ = crt("generate", trained, *words)
    assert completions(piped)[0]["tokens"] == completions(given)[1]["tokens"]


def test_samples_seeds_and_log_probabilities(trained, crt):
    words = ("generate", trained, "river", "--samples", 3, "--max-tokens", 8, "--json", "--logprobs", 2)
    _, once, _ = crt(*words, "--seed", 3)
    _, again, _ = crt(*words, "--seed", 3)
    _, other, _ = crt(*words, "--seed", 4)
    assert [o["tokens"] for o in completions(once)] == [o["tokens"] for o in completions(again)]
    assert [o["tokens"] for o in completions(once)] != [o["tokens"] for o in completions(other)]
    first = completions(once)[0]
    assert len(first["logprobs"]) == len(first["tokens"])
    assert all(len(top) == 2 and top[0][1] >= top[1][1] for top in first["top_logprobs"])


def test_a_session_continues_and_rolls_back(trained, crt, tmp_path):
    session = tmp_path / "some.state"
    words = ("generate", trained, "river stone", *GREEDY, "--json")
    _, whole, _ = crt(*words, "--max-tokens", 14)
    _, start, _ = crt(*words, "--max-tokens", 8, "--save-state", session, "--history", 4)
    _, rest, _ = crt("generate", trained, "", "--state", session, *GREEDY, "--json", "--max-tokens", 6)
    whole, start, rest = (completions(out)[0]["tokens"] for out in (whole, start, rest))
    assert start + rest == whole
    _, back, _ = crt("generate", trained, "", "--state", session, "--rollback", 3, *GREEDY, "--json", "--max-tokens", 9)
    assert start[:-3] + completions(back)[0]["tokens"] == whole
    saved = Session.load(session)
    assert list(saved.newest) == whole[3:8]
    assert saved.state.position == saved.rollback(0).state.position
    code, _, err = crt("generate", trained, "", "--state", session, "--rollback", 5)
    assert code == 2
    assert "rolled back by at most 4 tokens" in err


def test_a_saved_session_is_not_changed_by_going_on(trained, crt, tmp_path):
    session = tmp_path / "some.state"
    crt("generate", trained, "river stone", *GREEDY, "--max-tokens", 4, "--save-state", session)
    before = session.read_bytes()
    crt("generate", trained, " green", "--state", session, *GREEDY, "--max-tokens", 4)
    assert session.read_bytes() == before


def test_stop_strings_cut_the_text(trained, crt):
    _, out, _ = crt("generate", trained, "river stone", *GREEDY, "--max-tokens", 30)
    stop = out.split()[2]
    _, cut, _ = crt("generate", trained, "river stone", *GREEDY, "--max-tokens", 30, "--stop", stop)
    assert cut == out[: out.index(stop)] + "\n"


def test_stats_say_how_prompts_were_read(trained, crt):
    prompt = " ".join(["river stone light"] * 40)
    code, _, err = crt("generate", trained, prompt, "--max-tokens", 2, "--stats")
    assert code == 0
    assert "by sweep" in err
    assert "plain passes of arithmetic" in err
    assert "tokens/s" in err
    assert "trained on sequences of 16" in err


def test_text_appears_while_it_is_generated(trained):
    """A real process: the first words can be read before the last are there."""
    words = [sys.executable, "-m", "contextready", "generate", str(trained), "river", *GREEDY, "--max-tokens", "3000"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read(5)
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "The prompt is empty"),
        (("--temperature", "-1", "x"), "temperature must be 0 (the most likely token) or greater, but got -1.0"),
        (("--top-p", "0", "x"), "top_p must be greater than 0 and at most 1, but got 0.0"),
        (("--top-k", "0", "x"), "top_k must be"),
        (("--max-tokens", "0", "x"), "0"),
        (("--context", "5", "--max-tokens", "30", "x"), "do not fit into a context of 5"),
        (("--engine", "eagre", "x"), "Unknown engine 'eagre'"),
        (("--engine", "ggml", "x"), "crt export"),
        (("--solver", "swep", "x"), "Unknown solver 'swep'"),
        (("--rollback", "2", "x"), "--rollback needs a saved session"),
        (("--state", "nowhere.state", "x"), "no state file"),
        (("--samples", "2", "--save-state", "a", "x"), "--save-state saves one completion"),
        (("--file", "nowhere.txt"), "nowhere.txt does not exist"),
        (("--file", "nowhere.txt", "x"), "use one of the two"),
        (("--stop", "", "x"), "Stop strings"),
    ],
)
def test_bad_input_is_one_sentence(trained, crt, monkeypatch, words, sentence):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    code, out, err = crt("generate", trained, *words)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.strip().splitlines()) <= 2


def test_a_plain_state_is_not_a_session(trained, crt, tmp_path):
    model = open_checkpoint(trained).model()
    state = model.init_state(1)
    state.save(tmp_path / "plain.state")
    assert State.load(tmp_path / "plain.state").position == 0
    code, _, err = crt("generate", trained, "x", "--state", tmp_path / "plain.state")
    assert code == 2
    assert "is a state but not a session" in err


@needs_ggml
def test_an_exported_file_generates_the_same_text(trained, crt, tmp_path):
    file = tmp_path / "model.gguf"
    code, out, _ = crt("export", trained, file, "--type", "f32", "--tokens", 64)
    assert code == 0
    assert "f32 costs +0.0000" in out.replace("-0.0000", "+0.0000")
    _, here, _ = crt("generate", trained, "river stone", *GREEDY, "--max-tokens", 10)
    _, there, err = crt("generate", file, "river stone", *GREEDY, "--max-tokens", 10, "--stats", "--threads", 1)
    assert there == here
    assert "read by sequential" in err


@needs_ggml
def test_quantised_weights_cost_perplexity_and_it_is_said(trained, crt, tmp_path):
    _, out, _ = crt("export", trained, tmp_path / "q4.gguf", "--type", "q4_0", "--tokens", 256)
    assert "q4_0 costs" in out
    code, out, _ = crt("export", trained, tmp_path / "q8.gguf", "--type", "q8_0", "--tokens", 0)
    assert code == 0
    assert "Perplexity" not in out


@needs_ggml
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("export", "{run}", "{tmp}/model.bin"), "must have the extension .gguf"),
        (("export", "{run}", "{tmp}/model.gguf", "--type", "q5"), "Unknown type 'q5'"),
        (("export", "{run}", "{tmp}/model.gguf", "--tokens", "-1"), "--tokens must be at least 0"),
        (("generate", "{tmp}/nowhere.gguf", "x"), "nowhere.gguf"),
        (("generate", "{model}", "x", "--history", "2"), "history cannot be chosen"),
        (("generate", "{model}", "x", "--engine", "eager"), "only the engine ggml runs"),
        (("generate", "{model}", "x", "--context", "4", "--max-tokens", "9"), "do not fit into a context of 4"),
        (("bench", "no-such-model"), "There is no model 'no-such-model'"),
        (("bench", "{run}", "--engines", "fast"), "Unknown engine 'fast'"),
        (("bench", "{run}", "--contexts", "a"), "is not a list of numbers"),
        (("bench", "{run}", "--rounds", "0"), "must be at least 1"),
        (("bench", "{run}", "--rounds", "1", "--tokens", "1", "--plot", "x.doc"), "ends in .png, .svg or .pdf"),
    ],
)
def test_bad_input_of_export_and_bench(trained, crt, tmp_path, words, sentence):
    model = tmp_path / "good.gguf"
    if "{model}" in words:
        assert crt("export", trained, model, "--tokens", 0)[0] == 0
    code, _, err = crt(*(str(word).format(run=trained, tmp=tmp_path, model=model) for word in words))
    assert code == 2
    assert sentence in err


@needs_ggml
def test_bench_measures_every_engine_and_solver(trained, crt, tmp_path):
    words = ("bench", trained, "--engines", "eager,ggml", "--contexts", "8,40", "--prefill", "80", "--rounds", 2)
    words += ("--tokens", 3, "--threads", 1, "--precisions", "f32,bf16,q8_0")
    code, out, _ = crt(*words, "--json", "--plot", tmp_path / "bench.png")
    assert code == 0
    found = json.loads(out)
    kinds = {(one["engine"], one["precision"], one["context"]) for one in found["decode"]}
    pairs = (("eager", "f32"), ("eager", "bf16"), ("ggml", "f32"), ("ggml", "q8_0"))
    assert kinds == {(e, p, c) for e, p in pairs for c in (8, 40)}
    assert all(one["low"] <= one["seconds"] <= one["high"] for one in found["decode"])
    eager, narrow = (
        {one["context"]: one for one in found["decode"] if (one["engine"], one["precision"]) == ("eager", precision)}
        for precision in ("f32", "bf16")
    )
    # D=1, C=16: 20 C² and a head of 300 × 16, four bytes each; keys and values and two carried vectors beside them.
    assert eager[8]["bytes_per_token"] == 4 * (20 * 16**2 + 300 * 16) + 4 * (2 * 16 * 8 + 2 * 16)
    assert narrow[8]["bytes_per_token"] == 2 * (20 * 16**2 + 300 * 16) + 4 * (2 * 16 * 8 + 2 * 16)
    assert eager[8]["growth"] == 1.0
    assert eager[40]["growth"] == pytest.approx(eager[40]["seconds"] / eager[8]["seconds"])
    assert {one["asked"] for one in found["prefill"]} == {"sweep", "jacobi", "sequential"}
    assert (tmp_path / "bench.png").stat().st_size > 10_000
    code, table, _ = crt(*words)
    assert code == 0
    assert "of bandwidth" in table.replace("\n", " ")
    assert "Reading a prompt" in table


@needs_ggml
def test_bench_measures_exported_files(trained, crt, tmp_path):
    file = tmp_path / "model.gguf"
    crt("export", trained, file, "--type", "f32", "--tokens", 0)
    code, out, _ = crt("bench", file, "--contexts", 8, "--rounds", 1, "--tokens", 2, "--threads", 1, "--json")
    assert code == 0
    (only,) = json.loads(out)["decode"]
    assert (only["label"], only["engine"], only["precision"]) == (str(file), "ggml", "f32")
    assert only["bytes_per_token"] == 4 * (20 * 16**2 + 300 * 16) + 4 * (2 * 16 * 8 + 2 * 16)
