"""Shards: written once, read as one array, and refused if a byte has changed."""

import hashlib
import json
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
    assert crt("data", "show", prepared, "--tokens", "9999999", "--count", "1")[1].count("guests") > 200


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


def test_there_are_two_splits(prepared):
    with pytest.raises(ContextReadyError, match="There is no split 'test'; choose train or val"):
        Data(prepared).tokens("test")
