"""Existing token files in the formats of nanoGPT and Megatron, written here byte by byte."""

import struct

import numpy as np
import pytest

from contextready.data import token_files
from contextready.data.prepare import Preparation, prepare
from contextready.data.shards import Data
from contextready.errors import ContextReadyError

END = 399
CODES = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}


@pytest.fixture(scope="session")
def rows():
    """Different documents of ids below 399."""
    generator = np.random.default_rng(0)
    return [generator.integers(END, size=size).tolist() for size in generator.integers(5, 40, size=80)]


def write_nanogpt(path, rows, end=END):
    np.array([i for row in rows for i in [*row, end]], "<u2").tofile(path)
    return path


def write_megatron(path, rows, dtype="<u2", end=(END,), sequences_a_document=1):
    """The format of Megatron's IndexedDataset: sequences in .bin; lengths, offsets and documents in .idx."""
    sequences, bounds = [], [0]
    for row in rows:
        sequences += [part.tolist() for part in np.array_split([*row, *end], sequences_a_document)]
        bounds.append(len(sequences))
    np.array([i for sequence in sequences for i in sequence], dtype).tofile(path)
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    offsets = (np.cumsum(lengths) - lengths).astype("<i8") * np.dtype(dtype).itemsize
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(bounds))
    path.with_suffix(".idx").write_bytes(
        header + lengths.tobytes() + offsets.tobytes() + np.array(bounds, "<i8").tobytes()
    )
    return path


def documents_of(data, split):
    tokens = data.tokens(split)
    ids = tokens.read(0, len(tokens))
    assert ids[-1] == data.end_id
    return [part.tolist() for part in np.split(ids, np.flatnonzero(ids == data.end_id) + 1)[:-1]]


def check_same(data, rows, end=END):
    train, val = documents_of(data, "train"), documents_of(data, "val")
    assert sorted(train + val) == sorted([*row, end] for row in rows)
    assert data.manifest["splits"]["train"]["documents"] == len(train)
    assert 0 < len(val) < len(train)
    assert train == [row for row in ([*row, end] for row in rows) if row in train]


def take_over(path, tmp_path, vocab_size=400, end_id=END, **options):
    what = Preparation([str(path)], [], 0.2, vocab_size=vocab_size, end_id=end_id, **options)
    return prepare(tmp_path / "out", what)


@pytest.mark.parametrize("at_once", [1, 7, 1 << 22])
def test_nanogpt_round_trip(tmp_path, rows, at_once, monkeypatch):
    monkeypatch.setattr(token_files, "IDS_AT_ONCE", at_once)
    data = take_over(write_nanogpt(tmp_path / "train.bin", rows), tmp_path, shard_tokens=100)
    check_same(data, rows)
    assert len(data.manifest["splits"]["train"]["shards"]) > 5
    assert data.dtype == np.uint16
    assert data.tokenizer() is None
    assert data.bytes_per_token("train") is None


def test_a_last_document_without_its_end_and_empty_ones(tmp_path, rows):
    path = write_nanogpt(tmp_path / "train.bin", [[], *rows, []])
    with path.open("ab") as file:
        file.write(np.array([1, 2, 3], "<u2").tobytes())
    check_same(take_over(path, tmp_path), [*rows, [1, 2, 3]])


@pytest.mark.parametrize("end", [(END,), ()])
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("dtype", ["<u2", "<i4", "<i2", "<i8"])
def test_megatron_round_trip(tmp_path, rows, dtype, sequences, end):
    path = write_megatron(tmp_path / "train.bin", rows, dtype, end, sequences)
    check_same(take_over(path, tmp_path), rows)


def test_large_vocabularies_take_four_bytes(crt, tmp_path, rows):
    large = [[*row, 69_998] for row in rows]
    path = write_megatron(tmp_path / "train.bin", large, "<i4", (69_999,))
    words = ["--vocab-size", 70_000, "--end-id", 69_999, "--val-fraction", "0.2", "--shard-tokens", 200]
    code, out, _ = crt("data", "prepare", tmp_path / "out", path, *words)
    assert code == 0
    assert "uint32" in out
    data = Data(tmp_path / "out")
    assert data.manifest["dtype"] == "<u4"
    check_same(data, large, 69_999)
    first = data.manifest["splits"]["train"]["shards"][0]
    assert (tmp_path / "out" / first).stat().st_size == 4 * 200
    code, out, _ = crt("data", "show", tmp_path / "out", "--tokens", "50")
    assert code == 0
    assert "69998 69999" in out


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "<u2"), (65_537, "<u4")])
def test_the_type_changes_where_it_must(tmp_path, rows, vocab_size, dtype):
    end = vocab_size - 1
    path = write_megatron(tmp_path / "train.bin", rows, "<i4", (end,))
    data = take_over(path, tmp_path, vocab_size, end)
    assert data.manifest["dtype"] == dtype
    check_same(data, rows, end)


def test_both_kinds_split_alike(tmp_path, rows):
    nano = take_over(write_nanogpt(tmp_path / "nano.bin", rows), tmp_path)
    (tmp_path / "b").mkdir()
    megatron = take_over(write_megatron(tmp_path / "b" / "a.bin", rows), tmp_path / "b")
    assert nano.identity == megatron.identity


def test_with_their_tokenizer_and_own_validation(crt, tmp_path, texts, trained):
    from contextready.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(trained)
    ids = tokenizer.encode_batch(texts[:40])
    train = write_nanogpt(tmp_path / "train.bin", ids[:30], tokenizer.end_id)
    val = write_nanogpt(tmp_path / "val.bin", ids[30:], tokenizer.end_id)
    code, _, _ = crt("data", "prepare", tmp_path / "out", train, "--val", val, "--tokenizer", trained)
    assert code == 0
    data = Data(tmp_path / "out")
    assert documents_of(data, "val") == [[*row, tokenizer.end_id] for row in ids[30:]]
    assert data.tokenizer().decode(documents_of(data, "train")[3]) == texts[3] + "<|endoftext|>"
    assert data.manifest["splits"]["train"]["bytes"] == sum(len(text.encode()) for text in texts[:30])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vocab-size", 390, "--end-id", 389], "train.bin contains the id 39"),
        (["--vocab-size", 400], "Token files need --tokenizer, or --end-id for the id that ends documents"),
        (["--end-id", END], "Token files need --tokenizer, or --vocab-size for the number of ids."),
        (["--vocab-size", 400, "--end-id", END, "--val", "a.txt"], "Token files (.bin) and text cannot be combined"),
        (["--vocab-size", 400, "--end-id", END, "--val", "no.bin"], "There is no file, folder or corpus 'no.bin'"),
    ],
)
def test_bad_options(refused, tmp_path, rows, words, message):
    path = write_nanogpt(tmp_path / "train.bin", rows)
    assert message in refused("data", "prepare", tmp_path / "out", path, *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("end_id", [400, 70_000, -1])
def test_an_end_outside_the_vocabulary_is_refused(refused, tmp_path, rows, end_id):
    path = write_megatron(tmp_path / "train.bin", rows, end=())
    words = ["--vocab-size", 400, "--end-id", end_id, "--val-fraction", "0.2"]
    assert "--end-id" in refused("data", "prepare", tmp_path / "out", path, *words)


def test_ids_beyond_the_vocabulary_say_which(refused, tmp_path):
    path = write_nanogpt(tmp_path / "train.bin", [[1, 2], [3, 1000, 4]])
    words = ["--vocab-size", 400, "--end-id", END, "--val-fraction", "0.2"]
    message = refused("data", "prepare", tmp_path / "out", path, *words)
    assert "train.bin contains the id 1000, but the vocabulary has only 0 to 399" in message


def test_negative_ids_say_which(refused, tmp_path):
    path = write_megatron(tmp_path / "train.bin", [[1, 2], [3, -5, 4]], "<i4")
    words = ["--vocab-size", 400, "--end-id", END, "--val-fraction", "0.2"]
    assert "contains the id -5" in refused("data", "prepare", tmp_path / "out", path, *words)


def damaged(path, cut):
    path.write_bytes(path.read_bytes()[:cut])


WORDS = ("--vocab-size", 400, "--end-id", END, "--val-fraction", "0.2")


def test_an_odd_byte_is_refused(refused, tmp_path, rows):
    damaged(write_nanogpt(tmp_path / "train.bin", rows), -1)
    message = refused("data", "prepare", tmp_path / "out", tmp_path / "train.bin", *WORDS)
    assert "bytes, which is not a multiple of 2" in message


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
@pytest.mark.parametrize(
    ("suffix", "cut"),
    [
        (".bin", -4),
        (".idx", -1),
        (".idx", -800),
        (".idx", 40),
        (".bin", -1),
    ],
)
def test_megatron_files_cut_short_are_refused(refused, tmp_path, rows, dtype, suffix, cut):
    path = write_megatron(tmp_path / "train.bin", rows, dtype)
    damaged(path.with_suffix(suffix), cut)
    message = refused("data", "prepare", tmp_path / "out", path, *WORDS)
    assert "do not match: one of them is truncated" in message or "is not a multiple of" in message


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"TNTIDX\x00\x00", "train.idx is not a Megatron index (its first bytes are wrong)."),
        (b"MMIDIDX\x00\x00", "train.idx is not a Megatron index"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 2, 8, 0, 1), "is not supported: it has version 2 and type 8"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 7, 0, 1), "is not supported: it has version 1 and type 7"),
    ],
)
def test_an_index_of_another_kind_is_refused(refused, tmp_path, rows, head, message):
    path = write_nanogpt(tmp_path / "train.bin", rows)
    path.with_suffix(".idx").write_bytes(head)
    assert message in refused("data", "prepare", tmp_path / "out", path, *WORDS)


def test_an_empty_token_file_is_refused(refused, tmp_path):
    (tmp_path / "train.bin").touch()
    message = refused("data", "prepare", tmp_path / "out", tmp_path / "train.bin", *WORDS)
    assert "train.bin contains no text to train on" in message


def test_globs_of_token_files(crt, tmp_path, rows):
    write_nanogpt(tmp_path / "1.bin", rows[:40])
    write_nanogpt(tmp_path / "2.bin", rows[40:])
    assert crt("data", "prepare", tmp_path / "out", tmp_path / "*.bin", *WORDS)[0] == 0
    check_same(Data(tmp_path / "out"), rows)


def hostile_index(path, lengths=(3, 2, 4), offsets=(0, 6, 10), bounds=(0, 2, 3), counts=None, code=8):
    """A .bin of nine ids, and an index with these arrays and claimed counts."""
    np.arange(9, dtype="<u2").tofile(path)
    sequences, documents = counts or (len(lengths), len(bounds))
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, sequences, documents)
    arrays = (np.array(values, dtype) for values, dtype in ((lengths, "<i4"), (offsets, "<i8"), (bounds, "<i8")))
    path.with_suffix(".idx").write_bytes(head + b"".join(array.tobytes() for array in arrays))
    return path


def read_ids(path):
    return [ids.tolist() for ids in token_files.read_token_file(path, END, lambda _: None)]


def test_documents_are_ranges_of_sequences(tmp_path):
    assert read_ids(hostile_index(tmp_path / "a.bin")) == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
    assert read_ids(hostile_index(tmp_path / "a.bin", (), (), ())) == []
    assert read_ids(hostile_index(tmp_path / "a.bin", bounds=(0, 0, 3, 3))) == [list(range(9))]
    assert read_ids(hostile_index(tmp_path / "a.bin", bounds=(1, 2))) == [[3, 4]]


FOLLOW, RANGES = "its sequences do not follow each other", "its documents are not ranges of its sequences"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": (2**63, 3)}, "do not match: one of them is truncated"),
        ({"counts": (10**12, 3)}, "do not match: one of them is truncated"),
        ({"counts": (3, 2**64 - 1)}, "do not match: one of them is truncated"),
        ({"counts": (3, 4)}, "do not match: one of them is truncated"),
        ({"lengths": (3, 2, 5)}, "do not match: one of them is truncated"),
        ({"lengths": (3, 2, 2**31 - 1)}, "do not match: one of them is truncated"),
        ({"lengths": (3, -2, 4)}, FOLLOW),
        ({"lengths": (3, 2, -4)}, FOLLOW),
        ({"lengths": (3, -3, 9), "offsets": (0, 6, 0)}, FOLLOW),
        ({"offsets": (0, 6, 2**62)}, FOLLOW),
        ({"offsets": (-6, 0, 4)}, FOLLOW),
        ({"offsets": (0, 6, 9)}, FOLLOW),
        ({"offsets": (0, 0, 0), "lengths": (9, 9, 9)}, FOLLOW),
        ({"bounds": (0, 4)}, RANGES),
        ({"bounds": (-1, 3)}, RANGES),
        ({"bounds": (0, 3, 1, 3)}, RANGES),
        ({"bounds": (0, 2**63 - 1, -(2**63), 3)}, RANGES),
    ],
)
def test_a_hostile_index_is_refused(tmp_path, changes, message):
    path = hostile_index(tmp_path / "a.bin", **changes)
    with pytest.raises(ContextReadyError, match=message) as caught:
        read_ids(path)
    assert "a.idx" in str(caught.value)
