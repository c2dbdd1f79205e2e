"""A run keeps the settings of its model's tokenizer, also if the model is moved or changed later."""

import json
import shutil

import pytest
from hf_finetune_helpers import arguments
from hf_helpers import KNOWN, TEXTS, crt, refused, save, tiny_lm, train_tokenizer
from train_helpers import make_data
from transformers import AutoTokenizer

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A chat model, data, and a run that was trained from it."""
    place = tmp_path_factory.mktemp("settings")
    tokenizer = train_tokenizer(place / "tokenizer")
    tokenizer.chat_template = {"default": TEMPLATE, "tools": TEMPLATE + "!"}
    tokenizer.model_max_length = 77
    tokenizer.pad_token = "<|endoftext|>"
    save(place / "llama", tiny_lm("llama", vocab_size=KNOWN).float(), tokenizer)
    file = place / "llama" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"padding_side": "left"}))
    make_data(place / "corpus", tokenizer=str(place / "llama"))
    crt(*arguments(place, place / "run", steps=1))
    crt("convert", place / "run", place / "before")
    (place / "llama").rename(place / "moved")
    return place


def test_a_run_keeps_them_when_its_model_has_moved(place):
    crt("convert", place / "run", place / "after")
    files = sorted(path.relative_to(place / "before") for path in (place / "before").rglob("*") if path.is_file())
    assert any(file.name == "chat_template.jinja" for file in files)
    assert any(file.name == "tools.jinja" for file in files)
    for file in files:
        assert (place / "after" / file).read_bytes() == (place / "before" / file).read_bytes(), file
    ours, theirs = (AutoTokenizer.from_pretrained(place / name) for name in ("after", "moved"))
    assert (ours.model_max_length, ours.padding_side, ours.pad_token) == (77, "left", "<|endoftext|>")
    assert ours.chat_template == theirs.chat_template == {"default": TEMPLATE, "tools": TEMPLATE + "!"}
    chat = [{"role": "user", "content": "river"}]
    assert ours.apply_chat_template(chat, tokenize=False) == "<user>river"
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]


def test_a_resumed_run_keeps_them(place):
    (place / "moved").rename(place / "llama")
    crt(*arguments(place, place / "run", steps=2))
    (place / "llama").rename(place / "moved")
    crt("convert", place / "run", place / "resumed")
    assert (place / "resumed" / "chat_template.jinja").read_text() == TEMPLATE
    (newest,) = (place / "run" / "checkpoints").glob("step-00000002")
    kept = json.loads((newest / "pretrained.json").read_text())["tokenizer"]
    assert set(kept) >= {"tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/tools.jinja"}
    assert "tokenizer.json" not in kept


def with_settings(place, folder, settings):
    """A copy of the first checkpoint of the run in which other settings were kept, or none."""
    from contextready.files import write_manifest
    from contextready.runs.checkpoint import FORMAT

    (first,) = (place / "run" / "checkpoints").glob("step-00000001")
    shutil.copytree(first, folder)
    described = json.loads((first / "pretrained.json").read_text()) | {"tokenizer": settings}
    (folder / "pretrained.json").write_text(json.dumps(described))
    (folder / "manifest.json").unlink()
    write_manifest(folder, FORMAT, {"step": 1})
    return folder


def test_an_older_checkpoint_uses_the_original_model_and_no_other(place, tmp_path, capsys):
    older, llama = with_settings(place, tmp_path / "older", None), place / "llama"
    missing = f"Note: {llama}, from which {older} was trained, was not found"
    crt("convert", older, tmp_path / "moved")
    assert missing in capsys.readouterr().err
    assert not (tmp_path / "moved" / "chat_template.jinja").exists()
    shutil.copytree(place / "moved", llama)
    try:
        crt("convert", older, tmp_path / "found")
        assert capsys.readouterr().err == ""
        assert (tmp_path / "found" / "chat_template.jinja").read_text() == TEMPLATE
        tokenizer = json.loads((llama / "tokenizer.json").read_text())
        tokenizer["model"]["merges"].pop()
        (llama / "tokenizer.json").write_text(json.dumps(tokenizer))
        crt("convert", older, tmp_path / "other")
        assert missing in capsys.readouterr().err
        for file in (tmp_path / "moved").iterdir():
            assert (tmp_path / "other" / file.name).read_bytes() == file.read_bytes()
    finally:
        shutil.rmtree(llama)


@pytest.mark.parametrize("settings", [3, [], {"../x": "y"}, {"tokenizer_config.json": 3}, {"/tmp/x": "y"}])
def test_settings_that_make_no_sense_are_refused(place, tmp_path, capsys, settings):
    with_settings(place, tmp_path / "checkpoint", settings)
    said = refused(capsys, "convert", tmp_path / "checkpoint", tmp_path / "out")
    assert "tokenizer settings" in said
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
