"""`crt generate` on pretrained models gives the text of `transformers.generate`, token for token."""

import json
import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch
from chat_helpers import BEGINNING, stories
from transformers import AutoModelForCausalLM, AutoTokenizer

import contextready
from contextready.cli.main import main
from contextready.data.tokenizer import Tokenizer
from contextready.hf.convert import convert
from contextready.hf.load import load_model

MODELS = Path(__file__).parents[2] / ".." / "shared" / "models"
NAMES = ("stories260K-hf", "stories15M-hf")
PROMPTS = [
    "Once upon a time",
    "Lily and Tom went to the park.</s>One day",
    "",
    "  Two  spaces, é, 漢 and ☃",
    "<s>A name of a token\nand a new line ",
]


def model_folder(name):
    folder = MODELS / name
    if not folder.is_dir():
        pytest.skip(f"the pretrained model is not part of this repository (expected at ../shared/models/{name})")
    return folder


@pytest.fixture(scope="module", params=NAMES)
def original(request):
    return model_folder(request.param)


@pytest.fixture(scope="module")
def small():
    return model_folder(NAMES[0])


@pytest.fixture(scope="module")
def converted(small, tmp_path_factory):
    """The small model with a correction that does something."""
    place = tmp_path_factory.mktemp("converted")
    convert(str(small), place / "zero")
    model, tokenizer = load_model(str(place / "zero"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.model.correction.parameters():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    model.config.tolerance = 1e-6
    model.save_pretrained(place / "random")
    tokenizer.save_pretrained(place / "random")
    return place / "random"


def expected(folder, prompt, count, **changes):
    """What transformers generates: the new tokens, and the text with and without them."""
    import_module("contextready.hf.modeling")  # registers the classes of converted models
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")
    every = lm.generate(**ids, do_sample=False, max_new_tokens=count, **changes)[0]
    new = every[ids["input_ids"].shape[1] :].tolist()
    before, after = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids["input_ids"][0], every))
    return new, after[len(before) :]


def generated(capsys, folder, prompts, count, *words):
    capsys.readouterr()
    command = ["generate", folder, *prompts, "--temperature", 0, "--max-tokens", count, "--json", *words]
    assert main([str(word) for word in command]) == 0
    return [(line["tokens"], line["text"]) for line in map(json.loads, capsys.readouterr().out.splitlines())]


def test_a_pretrained_model_continues_as_in_transformers(original, capsys):
    wanted = [expected(original, prompt, 100) for prompt in PROMPTS]
    assert generated(capsys, original, PROMPTS, 100) == wanted
    model = contextready.load(original)
    assert model.generate(PROMPTS, max_tokens=100, temperature=0) == [text for _, text in wanted]
    assert "".join(model.stream(PROMPTS[0], max_tokens=100, temperature=0)) == wanted[0][1]


def test_a_converted_model_continues_as_in_transformers(converted, small, capsys):
    wanted = [expected(converted, prompt, 100) for prompt in PROMPTS]
    assert generated(capsys, converted, PROMPTS, 100, "--tolerance", "1e-6") == wanted
    assert wanted != [expected(small, prompt, 100) for prompt in PROMPTS]  # the correction does something


def test_a_text_is_scored_after_the_begin_token(small):
    model, text = contextready.load(small), "Once upon a time"
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(small), AutoTokenizer.from_pretrained(small)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert ids[0, 0] == tokenizer.bos_token_id
    with torch.no_grad():
        loss = lm(ids, labels=ids).loss.item()
    assert model.score(text).loss == pytest.approx(loss, abs=1e-5)


def test_text_ends_at_every_token_that_ends_it_for_transformers(small, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(small, folder)
    full = generated(capsys, small, PROMPTS[:1], 30)[0][0]
    ends = [2, full[7]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "bos_token_id": 1}))
    assert generated(capsys, folder, PROMPTS[:1], 30) == [
        (
            full[: full.index(ends[1]) + 1],
            "".join(contextready.load(folder).stream(PROMPTS[0], max_tokens=30, temperature=0)),
        )
    ]
    assert expected(folder, PROMPTS[0], 30)[0] == full[: full.index(ends[1]) + 1]


def test_a_session_continues_without_another_begin_token(small, tmp_path, capsys):
    words = ("--temperature", "0", "--max-tokens", "4", "--save-state", tmp_path / "a.state")
    generated(capsys, small, PROMPTS[:1], 4, *words[4:])
    state = tmp_path / "a.state"
    (tokens, _) = generated(capsys, small, ["</s>"], 4, "--state", state)[0]
    first = generated(capsys, small, PROMPTS[:1], 4)[0][0]
    tokenizer = AutoTokenizer.from_pretrained(small)
    lm = AutoModelForCausalLM.from_pretrained(small)
    ids = torch.tensor([[*tokenizer(PROMPTS[0])["input_ids"], *first, 2]])
    assert lm.generate(ids, do_sample=False, max_new_tokens=4)[0, ids.shape[1] :].tolist() == tokens


def test_a_corpus_has_no_special_tokens_whatever_is_read_before(small):
    tokenizer, text = Tokenizer.load(small), "<s>a</s>"
    split = tokenizer.encode_batch([text])
    assert not {1, 2} & set(split[0])
    assert tokenizer.encode_prompts([text])[0][0] == 1
    assert tokenizer.encode_batch([text]) == split


def test_end_tokens_that_are_not_ids_are_one_sentence(small, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(small, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 512}))
    assert main(["generate", str(folder), "Once"]) == 2
    assert "Token id 512 is out of range" in capsys.readouterr().err


def test_a_run_that_began_with_a_pretrained_model_keeps_its_conventions(tmp_path, capsys):
    folder, data, run, out = (tmp_path / name for name in ("model", "data", "run", "out"))
    stories(folder)
    lines = [json.dumps({"text": f"Lily saw {i} red boxes. Tom saw a big dog. They went home."}) for i in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    prepare = ["data", "prepare", data, tmp_path / "text.jsonl", "--tokenizer", folder, "--val-fraction", "0.2"]
    assert main([str(word) for word in prepare]) == 0
    settings = [f"pretrained={folder}", f"data={data}", f"out={run}", "steps=2", "batch_size=2", "block_size=16"]
    assert main(["train", "convert", *settings, "tune=all", "lr=1e-3", "device=cpu"]) == 0
    assert main(["convert", str(run), str(out)]) == 0
    model = contextready.load(run, tolerance=1e-6)
    assert model.tokenizer.conventions == contextready.load(out).tokenizer.conventions
    assert model.tokenizer.conventions.chat_template == BEGINNING
    assert model.tokenizer.begin_ids == [1]
    assert model.generate(PROMPTS[0], max_tokens=40, temperature=0) == expected(out, PROMPTS[0], 40)[1]
