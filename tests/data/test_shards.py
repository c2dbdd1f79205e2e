"""Shards: written once, read as one array, and refused if a byte has changed."""

import errno
import hashlib
import json
import os
import shutil
import tracemalloc

import numpy as np
import pytest

from contextready.data.prepare import Preparation, prepare
from contextready.data.shards import Data, ShardWriter, TokenArray
from contextready.data.tokenizer import Tokenizer
from contextready.errors import ContextReadyError


@pytest.fixture(scope="session")
def prepared(texts, trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "source.txt").write_text("<|endoftext|>\n".join(texts))
    what = Preparation([str(folder / "source.txt")], [], 0.2, tokenizer=str(trained), shard_tokens=1000)
    return prepare(folder / "out", what).folder


@pytest.fixture
def out(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / "out")


def write_shards(folder, rows, shard_tokens, dtype="<u2"):
    writer = ShardWriter(folder, "train", np.dtype(dtype), shard_tokens)
    for row in rows:
        writer.add(row, 9, 2 * len(row))
    writer.close()
    return writer


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("shard_tokens", [1, 3, 4, 7, 100])
def test_shards_are_full_and_read_as_one_array(tmp_path, shard_tokens, dtype):
    rows = [[1, 2, 3], [4], [5, 6, 7, 8, 0, 1, 2, 3, 4], [5]]
    writer = write_shards(tmp_path, rows, shard_tokens, dtype)
    expected = [i for row in rows for i in [*row, 9]]
    parts = [np.fromfile(tmp_path / name, dtype) for name in writer.names]
    assert [len(part) for part in parts[:-1]] == [shard_tokens] * (len(parts) - 1)
    assert writer.summary() == {"tokens": 18, "documents": 4, "bytes": 28, "shards": writer.names}
    assert writer.names == [f"train-{i:05d}.bin" for i in range(-(-18 // shard_tokens))]
    tokens = TokenArray(parts)
    assert len(tokens) == 18
    for start in range(18):
        for count in range(1, 18 - start + 1):
            assert tokens.read(start, count).tolist() == expected[start : start + count]


def test_the_writer_keeps_no_tokens(tmp_path):
    ids = list(range(50_000))
    writer = ShardWriter(tmp_path, "train", np.dtype("<u4"), 120_000)
    writer.add(ids, 9, 1)
    tracemalloc.start()
    for _ in range(40):
        writer.add(ids, 9, 1)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    writer.close()
    assert writer.tokens == 41 * 50_001
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 4 * writer.tokens
    assert kept < 1 << 17
    assert peak < 1 << 20  # one document of 200 kB and a copy of it; all are 8 MB


def test_reading_loads_what_is_read(tmp_path):
    np.zeros(10_000_000, "<u2").tofile(tmp_path / "a.bin")
    tokens = TokenArray([np.memmap(tmp_path / "a.bin", "<u2", "r")])
    tracemalloc.start()
    assert tokens.read(9_000_000, 10).sum() == 0
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 16


def documents_of(data, split):
    tokens = data.tokens(split)
    ids = tokens.read(0, len(tokens)).tolist()
    assert ids[-1] == data.end_id
    *documents, rest = data.tokenizer().decode(ids).split("<|endoftext|>")
    assert rest == ""
    return documents


def test_decoding_the_shards_gives_the_documents_back(prepared, texts):
    data = Data(prepared)
    train, val = documents_of(data, "train"), documents_of(data, "val")
    assert sorted(train + val) == sorted(texts)
    chosen = set(val)
    assert train == [text for text in texts if text not in chosen]  # in the order of the source
    assert val == [text for text in texts if text in chosen]
    assert not chosen & set(train)
    assert 30 < len(val) < 90  # a fifth of 300


def test_the_manifest_says_what_is_there(prepared, texts):
    data = Data(prepared)
    manifest = json.loads((prepared / "manifest.json").read_text())
    for split, counts in manifest["splits"].items():
        documents = documents_of(data, split)
        assert counts["documents"] == len(documents)
        assert counts["bytes"] == sum(len(document.encode()) for document in documents)
        assert counts["tokens"] == len(data.tokens(split))
        assert len(counts["shards"]) > 1
        assert data.bytes_per_token(split) == pytest.approx(counts["bytes"] / counts["tokens"])
    present = {path.name: path.read_bytes() for path in prepared.iterdir() if path.name != "manifest.json"}
    assert set(manifest["files"]) == set(present)
    for name, content in present.items():
        assert manifest["files"][name] == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert manifest["dtype"] == "<u2"
    assert manifest["val_fraction"] == 0.2
    assert data.vocab_size == data.tokenizer().vocab_size == 320
    assert data.end_id == data.tokenizer().end_id


def test_the_same_shards_have_the_same_identity(out, prepared, source, trained, texts):
    assert Data(out).identity == Data(prepared).identity
    same = Preparation([str(source)], [], 0.2, tokenizer=str(trained), shard_tokens=1000)
    other = Preparation([str(source)], [], 0.2, tokenizer=str(trained), shard_tokens=999)
    assert prepare(out.with_name("same"), same).identity == Data(prepared).identity
    assert prepare(out.with_name("other"), other).identity != Data(prepared).identity


def test_show_prints_text_of_the_corpus(crt, prepared, texts):
    code, printed, err = crt("data", "show", prepared, "--split", "val", "--count", "2", "--tokens", "40")
    assert (code, err) == (0, "")
    assert printed.count("— token ") == 2
    assert "vocabulary 320" in printed
    assert "guests" in printed
    assert printed == crt("data", "show", prepared, "--split", "val", "--count", "2", "--tokens", "40")[1]
    assert crt("data", "show", prepared, "--tokens", "999999", "--count", "1")[1].count("guests") > 200


def test_show_refuses_nothing_to_show(refused, prepared):
    assert "--count and --tokens must be at least 1" in refused("data", "show", prepared, "--count", "0")


def test_show_refuses_a_negative_seed(refused, prepared):
    assert "--seed" in refused("data", "show", prepared, "--seed", "-1")


def test_missing_data(refused, tmp_path):
    assert f"No prepared data exists at {tmp_path / 'none'}. Prepare it with crt data prepare, or pass" in refused(
        "data", "show", tmp_path / "none"
    )
    assert "it has no manifest.json" in refused("data", "show", tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    assert "cannot be read as JSON" in refused("data", "show", tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "contextready-checkpoint", "version": 1}')
    assert "has another format" in refused("data", "show", tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "contextready-data", "version": 2}')
    assert "format version 2, which needs a newer contextready" in refused("data", "show", tmp_path)


def test_a_manifest_without_files_is_refused(refused, tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": "contextready-data", "version": 1}')
    assert "manifest.json" in refused("data", "show", tmp_path)


@pytest.mark.parametrize("verify", [True, False])
def test_a_shard_short_of_a_byte_is_refused(refused, out, verify):
    shard = out / "train-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(
        ContextReadyError, match=r"train-00001\.bin has 1,999 bytes instead of 2,000\. The folder is dam"
    ):
        Data(out, verify)
    assert "1,999 bytes instead of 2,000" in refused("data", "show", out)
    shard.unlink()
    assert "train-00001.bin is missing" in refused("data", "show", out)


def test_a_flipped_byte_is_refused(refused, out):
    shard = out / "val-00000.bin"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    assert "val-00000.bin does not match its checksum. The folder is damaged" in refused(
        "data", "show", out, "--split", "val"
    )


def test_another_tokenizer_in_the_folder_is_refused(refused, out, texts):
    Tokenizer.train(texts[:50], 300).save(out)
    message = refused("data", "show", out)
    assert "tokenizer.json has " in message
    assert "instead of" in message


def test_another_tokenizer_of_the_same_size_is_refused(out):
    file = out / "tokenizer.json"
    content = file.read_text()
    assert content.count('"special": true') == 1
    file.write_text(content.replace('"special": true', '"special":false'))
    with pytest.raises(ContextReadyError, match=r"tokenizer\.json is not the tokenizer that these shards were created"):
        Data(out).tokenizer()


def edit_manifest(folder, change):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def repeat_a_shard(manifest):
    """List a shard in both splits, with counts that fit."""
    shard = manifest["splits"]["train"]["shards"][0]
    manifest["splits"]["val"]["shards"].append(shard)
    manifest["splits"]["val"]["tokens"] += manifest["files"][shard]["bytes"] // 2


def forget_a_shard(manifest):
    shard = manifest["splits"]["train"]["shards"].pop(0)
    manifest["splits"]["train"]["tokens"] -= manifest["files"][shard]["bytes"] // 2


def entry(manifest, name):
    return manifest["splits"][name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(dtype="|u1"), "dtype must be <u2 or <u4, but is '|u1'"),
        (lambda m: m.update(dtype="?"), "dtype must be <u2 or <u4, but is '?'"),
        (lambda m: m.update(dtype="<f2"), "dtype must be <u2 or <u4, but is '<f2'"),
        (lambda m: m.update(dtype="<u4"), "dtype must be <u2 for a vocabulary of 320, but is <u4"),
        (lambda m: m.update(vocab_size=70_000), "dtype must be <u4 for a vocabulary of 70,000, but is <u2"),
        (lambda m: m.update(vocab_size=0), "vocab_size must be from 1 to 2147483647, but is 0"),
        (lambda m: m.update(vocab_size="320"), "vocab_size must be a whole number, but is a string"),
        (lambda m: m.update(end_id=320), "end_id must be below the vocabulary size of 320"),
        (lambda m: m.pop("splits"), "manifest.json lacks the key 'splits'"),
        (lambda m: m["splits"].pop("val"), "splits lacks the key 'val'"),
        (lambda m: m["splits"].update(test={}), "splits has the unknown key 'test'"),
        (lambda m: entry(m, "train").update(tokens=1), "the shards of train have "),
        (lambda m: entry(m, "train").update(tokens=entry(m, "train")["tokens"] + 1), "which does not match "),
        (lambda m: entry(m, "val").update(documents=-1), "splits, val, documents must be at least 0"),
        (lambda m: entry(m, "val").update(shards=["../val-00000.bin"]), "must be the plain name of a file"),
        (lambda m: entry(m, "val").update(shards=["val-9.bin"]), "files does not list val-9.bin, a shard of val"),
        (repeat_a_shard, "a shard is listed twice"),
        (forget_a_shard, "files lists train-00000.bin, which belongs to no split"),
        (lambda m: m.update(tokenizer_sha256=None), "tokenizer.json and tokenizer_sha256 must be both there or both"),
        (lambda m: m.pop("tokenizer_sha256"), "manifest.json lacks the key 'tokenizer_sha256'"),
        (lambda m: m.update(tokenizer_sha256="x"), "tokenizer_sha256 must be a SHA-256 sum"),
        (lambda m: m["files"].pop("tokenizer.json"), "must be both there or both absent"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(refused, out, change, message):
    edit_manifest(out, change)
    said = refused("data", "show", out)
    assert message in said
    assert str(out / "manifest.json") in said


def test_a_tokenizer_that_the_manifest_does_not_know_is_refused(out):
    def forget(manifest):
        del manifest["files"]["tokenizer.json"]
        manifest["tokenizer_sha256"] = None

    edit_manifest(out, forget)
    with pytest.raises(ContextReadyError, match=r"manifest\.json does not list tokenizer\.json, so it is unknown"):
        Data(out)
    (out / "tokenizer.json").unlink()
    assert Data(out).tokenizer() is None


def test_a_damaged_tokenizer_is_not_parsed(out, monkeypatch):
    content = (out / "tokenizer.json").read_bytes()
    (out / "tokenizer.json").write_bytes(b"X" + content[1:])
    data = Data(out)
    monkeypatch.setattr(Tokenizer, "load", None)
    with pytest.raises(ContextReadyError, match=r"tokenizer\.json is not the tokenizer"):
        data.tokenizer()


def test_ids_outside_the_vocabulary_are_refused_when_they_are_read(out):
    shard = out / "train-00001.bin"
    ids = np.fromfile(shard, "<u2")
    ids[7] = 320
    ids.tofile(shard)
    sha256 = hashlib.sha256(shard.read_bytes()).hexdigest()
    edit_manifest(out, lambda manifest: manifest["files"]["train-00001.bin"].update(sha256=sha256))
    tokens = Data(out).tokens("train")
    assert len(tokens.read(0, 1007)) == 1007
    with pytest.raises(ContextReadyError, match=r"out contains the id 320, but its vocabulary has only 0 to 319"):
        tokens.read(990, 18)


def test_a_folder_whose_name_is_not_utf8_is_refused(source, trained, tmp_path):
    out = tmp_path / os.fsdecode(b"out\xff")
    with pytest.raises(ContextReadyError, match="is not valid UTF-8; choose another name"):
        prepare(out, Preparation([str(source)], [], 0.2, tokenizer=str(trained)))
    assert not out.exists()


def test_a_source_whose_name_is_not_utf8_is_recorded(texts, trained, tmp_path):
    source = tmp_path / os.fsdecode(b"source\xff.txt")
    source.write_text("<|endoftext|>\n".join(texts))
    data = prepare(tmp_path / "out", Preparation([str(source)], [], 0.2, tokenizer=str(trained)))
    assert data.manifest["source"].endswith("source?.txt")


def test_a_shard_that_cannot_be_read_is_named(prepared, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    data = Data(prepared)
    monkeypatch.setattr(np, "memmap", broken)
    with pytest.raises(ContextReadyError, match=r"val-00000\.bin cannot be read: .*Input/output error"):
        data.tokens("val")


def test_there_are_two_splits(prepared):
    with pytest.raises(ContextReadyError, match="There is no split 'test'; choose train or val"):
        Data(prepared).tokens("test")
