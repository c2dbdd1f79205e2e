"""`contextready.load`: one object that generates, streams and scores, whatever it was loaded from."""

import importlib.util
import json
import subprocess
import sys
from math import exp, log

import pytest
import torch
from train_helpers import make_data, run

import contextready
from contextready.cli.main import main
from contextready.errors import ContextReadyError
from contextready.infer.ggml.export import Export
from contextready.runs.checkpoint import open_checkpoint

needs_ggml = pytest.mark.skipif(importlib.util.find_spec("ggml") is None, reason="the extra ggml is not installed")

NO_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch must not be imported here")
sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a tiny model that has learned a little."""
    folder = tmp_path_factory.mktemp("trained")
    run(make_data(folder), folder / "run", steps=40)
    return folder / "run"


@pytest.fixture(scope="module")
def exported(trained):
    """The same model as an exported file."""
    path = trained.parent / "model.gguf"
    Export(trained, path, "f32", tokens=0).write()
    return path


def test_generate_gives_what_the_command_gives(trained, capsys):
    model = contextready.load(trained)
    assert main(["generate", str(trained), "river stone", "--max-tokens", "12", "--seed", "5"]) == 0
    text = capsys.readouterr().out.removesuffix("\n")
    assert model.generate("river stone", max_tokens=12, temperature=0.8, seed=5) == text
    assert text


def test_stream_yields_the_text_in_pieces(trained):
    model = contextready.load(str(trained))
    pieces = list(model.stream("river stone", max_tokens=12))
    assert len(pieces) > 2
    assert "".join(pieces) == model.generate("river stone", max_tokens=12)


def test_a_list_of_prompts_gives_what_each_gives_alone(trained):
    model = contextready.load(trained)
    prompts = ["river", "green water runs", "seven names"]
    together = model.generate(prompts, max_tokens=8, seed=2)
    assert together == [model.generate(prompt, max_tokens=8, seed=2) for prompt in prompts]


def test_every_setting_reaches_the_sampling(trained):
    model = contextready.load(trained)
    # A prompt after which the tiny model does not end the text at once.
    prompts = ("river stone", "green water", "seven names hold", "the", "stone")
    prompt = next(p for p in prompts if len(model.generate(p, max_tokens=16, temperature=0)) > 8)

    def generate(**settings):
        return model.generate(prompt, max_tokens=16, **settings)

    greedy = generate(temperature=0)
    for only_the_first in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert generate(seed=9, **only_the_first) == greedy
    assert generate(temperature=0, repetition_penalty=50.0) != greedy
    stop = greedy[4:7]
    assert generate(temperature=0, stop=stop) == greedy[: greedy.index(stop)]
    assert generate(temperature=0, stop=["zzzz", stop]) == greedy[: greedy.index(stop)]


def test_score_is_the_log_likelihood_of_the_stream(trained):
    model = contextready.load(trained)
    text = "river stone, seven names — ü"
    ids = model.tokenizer.encode_batch([text])[0]
    module = open_checkpoint(trained).model()
    with torch.inference_mode():
        logits, _ = module.stream(torch.tensor([[model.tokenizer.end_id, *ids]]), module.init_state(1))
    expected = logits[0, :-1].log_softmax(-1)[torch.arange(len(ids)), ids]
    score = model.score(text)
    assert score.tokens == ids
    assert torch.allclose(torch.tensor(score.logprobs), expected, atol=1e-4)
    assert score.loss == pytest.approx(-sum(score.logprobs) / len(ids))
    assert score.perplexity == pytest.approx(exp(score.loss))
    assert score.bits_per_byte == pytest.approx(-sum(score.logprobs) / log(2) / len(text.encode()))
    assert str(len(ids)) in repr(score)


def test_score_after_a_context_is_conditional(trained):
    model = contextready.load(trained)
    whole = model.score("river stone")
    parts = [model.tokenizer.encode_batch([part])[0] for part in ("river", " stone")]
    assert whole.tokens == parts[0] + parts[1]
    conditional = model.score(" stone", after="river")
    assert conditional.tokens == parts[1]
    # `after` alone is the context; a new document would begin with the end-of-text token.
    module = model.model
    with torch.inference_mode():
        logits, _ = module.stream(torch.tensor([whole.tokens]), module.init_state(1))
    expected = logits[0].log_softmax(-1)[len(parts[0]) - 1, parts[1][0]]
    assert conditional.logprobs[0] == pytest.approx(float(expected), abs=1e-4)


def test_bad_input_is_refused(trained, tmp_path):
    model = contextready.load(trained)
    for call, sentence in (
        (lambda: model.generate(""), "prompt is empty"),
        (lambda: model.generate([]), "No prompt was given"),
        (lambda: model.score(""), "empty"),
        (lambda: model.generate("x", temperature=-1), "temperature must be"),
        (lambda: contextready.load(tmp_path / "nothing"), "nothing"),
        (lambda: contextready.load(trained, engine="egaer"), "did you mean 'eager'"),
        (lambda: contextready.load(trained, engine="ggml"), "crt export"),
        (lambda: contextready.load(trained, solver="swep").generate("x"), "solver 'swep'"),
    ):
        with pytest.raises(ContextReadyError, match=sentence):
            call()


def test_names_complete_with_tab():
    assert set(contextready.__all__) <= set(dir(contextready))
    members = dir(contextready.LanguageModel)
    assert {"generate", "stream", "score", "model", "engine"} <= set(members)
    assert contextready.load.__module__ == "contextready.infer.language_model"


@needs_ggml
def test_an_exported_file_gives_the_same_and_has_no_module(trained, exported):
    here, there = contextready.load(trained), contextready.load(exported, threads=1)
    assert there.generate("river stone", max_tokens=12, temperature=0) == here.generate(
        "river stone", max_tokens=12, temperature=0
    )
    assert there.score("river stone").logprobs == pytest.approx(here.score("river stone").logprobs, abs=1e-3)
    with pytest.raises(ContextReadyError, match="no torch module"):
        _ = there.model
    with pytest.raises(ContextReadyError, match="history cannot be chosen"):
        contextready.load(exported, history=2)
    with pytest.raises(ContextReadyError, match="only the engine ggml"):
        contextready.load(exported, engine="eager")


@needs_ggml
def test_an_exported_file_is_loaded_where_torch_cannot_be_imported(trained, exported):
    script = f"""{NO_TORCH}
import json, contextready
model = contextready.load({str(exported)!r}, threads=1)
text = model.generate("river stone", max_tokens=12, temperature=0)
print(json.dumps([text, "".join(model.stream("river", max_tokens=5)), model.score("river stone").perplexity]))
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text, streamed, perplexity = json.loads(done.stdout)
    model = contextready.load(trained)
    assert text == model.generate("river stone", max_tokens=12, temperature=0)
    assert streamed == model.generate("river", max_tokens=5)
    assert perplexity == pytest.approx(model.score("river stone").perplexity, rel=1e-3)


@needs_ggml
def test_the_command_generates_where_torch_cannot_be_imported(trained, exported, capsys):
    words = ["river stone", "green water", "--samples", "2", "--max-tokens", "8", "--json", "--seed", "3"]
    script = (
        f"{NO_TORCH}\nfrom contextready.cli.main import main\nsys.exit(main({['generate', str(exported), *words]}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert main(["generate", str(trained), *words]) == 0
    expected = [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()]
    assert [json.loads(line)["tokens"] for line in done.stdout.splitlines()] == expected
    assert len(expected) == 4


def test_help_does_not_import_torch():
    script = f"{NO_TORCH}\nfrom contextready.cli.main import main\nsys.exit(main([]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "crt generate" in done.stdout


@pytest.mark.parametrize("threads", [0, -1, 100_000, 10**400])
def test_numbers_of_threads_that_no_computer_has_are_refused(threads, tmp_path):
    with pytest.raises(ContextReadyError, match="threads must be at"):
        contextready.load(tmp_path, threads=threads)
