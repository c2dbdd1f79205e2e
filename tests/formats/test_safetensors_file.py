"""Safetensors: the header is checked before anything is loaded, and input and output errors are one sentence."""

import errno
import gc
import json
import sys

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

from contextready.errors import ContextReadyError
from contextready.formats.safetensors_file import TORCH_TYPES, load_tensors, read_header, save_tensors

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(0, 4), "c": torch.tensor(1.5), "d": torch.ones(3)}


@pytest.fixture
def file(tmp_path):
    save_tensors(tmp_path / "x.safetensors", TENSORS, {"note": "kept"})
    return tmp_path / "x.safetensors"


def test_tensors_come_back(file):
    loaded = load_tensors(file, {name: tensor.shape for name, tensor in TENSORS.items()})
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    header = read_header(file)
    assert {name: info.shape for name, info in header.tensors.items()} == {"a": (2, 3), "b": (0, 4), "c": (), "d": (3,)}
    assert {info.dtype for info in header.tensors.values()} == {"F32"}
    assert header.metadata == {"note": "kept"}
    assert header.nbytes == 4 * (6 + 1 + 3)


def test_no_tensors_are_a_file_too(tmp_path):
    save_tensors(tmp_path / "x", {})
    assert load_tensors(tmp_path / "x", {}) == {}


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64])
def test_every_type_has_its_size(tmp_path, dtype):
    save_tensors(tmp_path / "x", {"a": torch.ones(5, dtype=dtype)})
    assert read_header(tmp_path / "x").nbytes == 5 * dtype.itemsize
    assert load_tensors(tmp_path / "x")["a"].dtype == dtype


def with_header(file, change):
    """Write the file again with another header."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = change(json.loads(content[8 : 8 + length]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def entry(name, **changes):
    return lambda header: header | {name: header[name] | changes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: b"", "cannot be read as JSON"),
        (lambda header: b"\xff", "is not UTF-8 text"),
        (lambda header: [], "is not a JSON object"),
        (lambda header: b"[" * 100_000, "nested too deeply"),
        (lambda header: b'{"a": {}, "a": {}}', "a key occurs twice"),
        (lambda header: header | {"a": 3}, "a must be an object"),
        (lambda header: header | {"__metadata__": {"note": 3}}, "__metadata__, note must be a string"),
        (entry("a", dtype="F31"), "has the unknown type F31"),
        (entry("a", dtype=3), "a, dtype must be a string"),
        (entry("a", shape=[2, -3]), "a, shape, item 1 must be at least 0"),
        (entry("a", shape=[2, 1 << 61]), "the size of a does not match its shape"),
        (entry("a", shape=[1] * 40), "has 40 dimensions"),
        (entry("a", shape=[2, 4]), "the size of a does not match its shape"),
        (entry("a", data_offsets=[0]), "data_offsets must have 2 items"),
        (entry("a", data_offsets=[24, 0]), "the size of a does not match"),
        (entry("d", data_offsets=[0, 12]), "does not begin where the tensor before it ends"),
        (entry("d", data_offsets=[1000, 1012]), "does not begin where the tensor before it ends"),
        (lambda header: {name: header[name] for name in "abc"}, "tensors take"),
        (lambda header: header | {"e": {"dtype": "F32", "shape": [9], "data_offsets": [40, 76]}}, "tensors take"),
    ],
)
def test_a_wrong_header_is_refused(file, change, message, monkeypatch):
    with_header(file, change)
    monkeypatch.setattr(torch, "from_file", None)
    with pytest.raises(ContextReadyError, match=message) as refusal:
        load_tensors(file)
    assert str(file) in str(refusal.value)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 8, (1 << 40).to_bytes(8, "little") + b"{}"])
def test_a_wrong_length_is_refused(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ContextReadyError, match="is not a complete safetensors file"):
        read_header(tmp_path / "x")


def test_a_cut_file_is_refused(file):
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ContextReadyError, match="its tensors take 40 bytes, but 39 follow the header"):
        read_header(file)


@pytest.mark.parametrize(
    "expected",
    [
        {"a": (2, 3), "b": (0, 4), "c": ()},
        {"a": (2, 3), "b": (0, 4), "c": (), "d": (3,), "e": (1,)},
        {"a": (3, 2), "b": (0, 4), "c": (), "d": (3,)},
        {},
    ],
)
def test_other_names_and_shapes_are_refused_before_loading(file, expected, monkeypatch):
    monkeypatch.setattr(torch, "from_file", None)
    with pytest.raises(ContextReadyError, match="do not fit this model"):
        load_tensors(file, expected)


def test_other_types_are_refused(tmp_path):
    save_tensors(tmp_path / "x", {"a": torch.ones(5, dtype=torch.int32)})
    with pytest.raises(ContextReadyError, match=r"do not fit this model \(1 differ, for example a\)"):
        load_tensors(tmp_path / "x", {"a": (5,)})


def test_a_sparse_file_larger_than_the_memory_is_refused(tmp_path):
    size = 1 << 43
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "x").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    assert read_header(tmp_path / "x").nbytes == size
    with pytest.raises(ContextReadyError, match=r"Loading .* would take 8,796\.0 GB"):
        load_tensors(tmp_path / "x")


ERRORS = [
    SafetensorError("Error while serializing: I/O error: Input/output error (os error 5)"),
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ENOSPC, "No space left on device"),
]


@pytest.mark.parametrize("error", ERRORS)
def test_errors_while_loading_and_saving_are_one_sentence(file, error, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError(f"unable to mmap 40 bytes: {error}")

    def half(tensors, path, metadata=None):
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(torch, "from_file", fail)
    monkeypatch.setattr(safetensors.torch, "save_file", half)
    with pytest.raises(ContextReadyError, match=r"x\.safetensors could not be loaded: "):
        load_tensors(file)
    new = file.with_name("new")
    with pytest.raises(ContextReadyError, match=r"new could not be written: ") as refusal:
        save_tensors(new, TENSORS)
    assert refusal.value.__cause__ is error
    assert not new.exists()


def test_loading_loses_no_memory(file):
    """The reader of safetensors 0.8 keeps two objects for every tensor that it reads."""
    counts = []
    for _ in range(2):
        for _ in range(300):
            load_tensors(file)
        gc.collect()
        counts.append(sys.getallocatedblocks())
    assert counts[1] - counts[0] < 300  # it would be 2,400


def test_tensors_at_odd_places_and_of_every_type_are_loaded(tmp_path):
    tensors = {name: torch.arange(3).to(getattr(torch, kind)) for name, kind in TORCH_TYPES.items()}
    save_tensors(tmp_path / "all", tensors)
    for name, tensor in load_tensors(tmp_path / "all").items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])
    # Three bytes before a float32: no view of its bytes is possible.
    numbers = torch.tensor([1.5, -2.0])
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + b"\1\2\3" + numbers.numpy().tobytes()
    (tmp_path / "odd").write_bytes(content)
    assert torch.equal(load_tensors(tmp_path / "odd")["b"], numbers)
