"""tokenizer.json files that are damaged or crafted: refused in a sentence, before the native library sees them."""

import base64
import json
import subprocess
import sys

import pytest

from contextready.data.tokenizer import Tokenizer
from contextready.errors import ContextReadyError
from contextready.formats import tokenizer_json

END = "<|endoftext|>"


@pytest.fixture(scope="module")
def plain():
    """A valid tokenizer as JSON text."""
    return Tokenizer.train(["some text to learn from, some more of it"] * 3, 262).inner.to_str()


@pytest.fixture
def load(plain, tmp_path):
    """Load the valid tokenizer after a change to its JSON value."""

    def build(change=lambda _: None):
        value = json.loads(plain)
        change(value)
        (tmp_path / "tokenizer.json").write_text(json.dumps(value))
        return Tokenizer.load(tmp_path)

    return build


@pytest.fixture
def refused(load, tmp_path):
    def check(change):
        with pytest.raises(ContextReadyError) as caught:
            load(change)
        message = str(caught.value)
        assert message.startswith(f"{tmp_path / 'tokenizer.json'} is not a tokenizer: ")
        assert "\n" not in message
        return message

    return check


def setting(*keys, to):
    def change(value):
        for key in keys[:-1]:
            value = value[key]
        value[keys[-1]] = to

    return change


def test_the_same_file_shares_one_native_tokenizer(load):
    # tokenizers never frees part of a tokenizer that has encoded text, so opening one again must not build another.
    first, again, other = load(), load(), load(setting("normalizer", to={"type": "NFC"}))
    assert again.inner is first.inner
    assert other.inner is not first.inner


def test_a_valid_file_is_loaded(load, plain):
    tokenizer = load()
    assert tokenizer.vocab_size == 262
    assert tokenizer.decode(tokenizer.encode_batch(["some text é"])[0]) == "some text é"
    assert Tokenizer.parse(plain, "here").sha256 == tokenizer.sha256


IDS = [2**31, 2**32 - 1, 2**32, 2**64, 10**30, 2**24, -1, 1.5, "7", None, True, [1]]


@pytest.mark.parametrize("id", IDS)
def test_an_impossible_id_is_refused(refused, id):
    for keys in (("model", "vocab", "a"), ("model", "vocab", END), ("added_tokens", 0, "id")):
        message = refused(setting(*keys, to=id))
        assert "the id of the token '" in message
        assert message.endswith("but ids are below 16,777,216.")


def test_a_vocabulary_full_of_holes_is_refused(load, refused):
    assert load(setting("model", "vocab", "a", to=69_000)).vocab_size == 69_001
    assert "it has 262 tokens, but ids of up to 16,777,215" in refused(setting("model", "vocab", "a", to=2**24 - 1))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (setting("model", to=None), "it has no model"),
        (setting("model", to=[]), "it has no model"),
        (setting("model", "vocab", to=None), "its model has no vocabulary"),
        (setting("model", "vocab", to=5), "its model has no vocabulary"),
        (setting("model", "continuing_subword_prefix", to="##########"), "a merge lacks the prefix '##########'"),
        (setting("added_tokens", to={}), "invalid type: map"),
        (setting("added_tokens", to=5), "its added_tokens are not a list of objects"),
        (setting("added_tokens", to=[5]), "its added_tokens are not a list of objects"),
        (setting("model", "type", to="Nothing"), ""),
        (setting("model", "merges", to=[["q", "zz"]]), "out of vocabulary"),
        (setting("pre_tokenizer", to={"type": "FixedLength", "length": 0}), "it cuts text into pieces of length 0"),
        (setting("normalizer", to={"type": "Prepend", "prepend": ""}), "a step of type Prepend is empty"),
        (
            setting("normalizer", to={"type": "Replace", "pattern": {"String": ""}, "content": "x"}),
            "a step of type Replace is empty",
        ),
        (
            setting("normalizer", to={"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 65}),
            "its replacements make a text more than 64 times longer",
        ),
        (
            setting("pre_tokenizer", to={"type": "Split", "pattern": {"Regex": "a" * 70_000}, "behavior": "Isolated"}),
            "one of its regular expressions has more than 65,536 characters",
        ),
        (
            setting(
                "pre_tokenizer",
                to={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
            ),
            "end pattern with unmatched parenthesis",
        ),
        (
            setting("decoder", to={"type": "Sequence", "decoders": [{"type": "Fuse"}] * 5000}),
            "it has more than 4,096 steps",
        ),
    ],
)
def test_a_structure_that_makes_no_sense_is_refused(refused, change, why):
    assert why in refused(change)


def test_replacements_multiply(load, refused):
    def steps(count):
        step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
        return setting("normalizer", to={"type": "Sequence", "normalizers": [step] * count})

    assert len(load(steps(3)).encode_batch(["a"])[0]) == 8
    assert "more than 64 times longer" in refused(steps(7))


@pytest.mark.parametrize(
    "map", [b"", b"\0", b"\xff\xff\xff\xff" + bytes(8), (9).to_bytes(4, "little") + bytes(8), "é", 5]
)
def test_a_damaged_character_map_is_refused(refused, map):
    """The native library allocates as much memory as the first four bytes say, and aborts if it cannot."""
    encoded = base64.b64encode(map).decode() if isinstance(map, bytes) else map
    step = {"type": "Precompiled", "precompiled_charsmap": encoded}
    sequence = {"type": "Sequence", "normalizers": [{"type": "NFC"}, step]}
    assert "its character map is damaged" in refused(setting("normalizer", to=sequence))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "tokenizer.json cannot be read as JSON"),
        (b'{"model": ', "tokenizer.json cannot be read as JSON"),
        (b"\xff\xfe", "tokenizer.json is not UTF-8 text"),
        (b"[" * 100_000, "tokenizer.json is nested too deeply"),
        (b"[]", "tokenizer.json is not a tokenizer: it is not a JSON object"),
        (b"5", "tokenizer.json is not a tokenizer: it is not a JSON object"),
    ],
)
def test_other_contents_are_refused(tmp_path, content, sentence):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ContextReadyError, match=sentence):
        Tokenizer.load(tmp_path)


def test_a_large_file_is_refused(tmp_path, plain, monkeypatch):
    monkeypatch.setattr(tokenizer_json, "LARGEST", 1000)
    (tmp_path / "tokenizer.json").write_text(plain)
    with pytest.raises(ContextReadyError, match="files of its kind have at most 1,000"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ContextReadyError, match=r"here is not a tokenizer: it has .* characters"):
        Tokenizer.parse(plain, "here")


def test_panics_of_the_native_library_are_sentences(load, tmp_path, capfd):
    """A panic is not an Exception, so it would pass by every `except Exception`."""
    catastrophic = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = load(setting("pre_tokenizer", to=catastrophic))
    with pytest.raises(ContextReadyError, match=r"tokenizer\.json cannot encode this text: .*retry-limit"):
        tokenizer.encode_batch(["a" * 60 + "!"])
    tokenizer = load(setting("decoder", to={"type": "Strip", "content": "a", "start": 0, "stop": 2**40}))
    with pytest.raises(ContextReadyError, match=r"tokenizer\.json cannot decode these ids: "):
        tokenizer.decode(tokenizer.encode_batch(["a"])[0])
    capfd.readouterr()


def test_unknown_tokens_without_a_token_for_them(load):
    model = {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"a": 0, END: 1}}
    tokenizer = load(setting("model", to=model))
    with pytest.raises(ContextReadyError, match=r"cannot encode this text: .*Missing \[UNK\] token"):
        tokenizer.encode_batch(["b"])


def test_half_characters_are_refused(load):
    for text in ("\ud800", "caf\udce9"):
        with pytest.raises(ContextReadyError, match="half of a surrogate pair"):
            load().encode_batch(["fine", text])


def test_a_text_that_would_fill_the_memory_is_refused(load, monkeypatch):
    monkeypatch.setattr("contextready.formats.limits.total_memory", lambda: 10**6)
    assert load().encode_batch(["a" * 5000])
    with pytest.raises(ContextReadyError, match=r"Tokenizing 0 MB of text at once would take .*; use shorter texts"):
        load().encode_batch(["a" * 5001])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "tokenizer_config.json cannot be read as JSON"),
        ('{"eos_token": 5}', "tokenizer_config.json has an eos_token that is not a string"),
        ('{"eos_token": {"content": []}}', "tokenizer_config.json has an eos_token that is not a string"),
        ('{"eos_token": "<none>"}', "This tokenizer has no token '<none>'"),
    ],
)
def test_a_wrong_end_token_in_the_settings_is_refused(load, tmp_path, content, sentence):
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ContextReadyError, match=sentence):
        load()


@pytest.mark.parametrize("content", ["[]", "{}", '{"eos_token": null}', '{"eos_token": {}}'])
def test_settings_without_an_end_token(load, tmp_path, content):
    (tmp_path / "tokenizer_config.json").write_text(content)
    assert load().end == END


@pytest.mark.parametrize("vocab_size", [2**24 + 1, 2**31, 10**30])
def test_a_vocabulary_that_is_too_large_is_not_trained(vocab_size):
    with pytest.raises(ContextReadyError, match="The vocabulary size must be at most 16,777,216, but got"):
        Tokenizer.train(["some text"], vocab_size)


LIMITED = """
import resource, sys
from pathlib import Path
from contextready.data.tokenizer import Tokenizer
from contextready.errors import ContextReadyError
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
try:
    Tokenizer.load(Path(sys.argv[1])).sha256
except ContextReadyError as error:
    print(error)
"""


def test_an_enormous_id_does_not_abort(plain, tmp_path):
    value = json.loads(plain)
    value["model"]["vocab"]["a"] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the id of the token 'a' is 2,147,483,648" in done.stdout
