"""GGUF files written here byte by byte: what is read, and what is refused before it can do harm."""

import os
import struct
import subprocess
import sys

import numpy as np
import pytest

from contextready.errors import ContextReadyError
from contextready.formats import gguf_file
from contextready.formats.gguf_file import TENSOR_TYPES, read_gguf_file

U32, STRING, ARRAY = 4, 8, 9


def text(value):
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def field(key, code, value):
    return text(key) + struct.pack("<I", code) + value


def tensor(name, dims, code=0, offset=0):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, code, offset)


def gguf(fields=(), tensors=(), data=b"", *, version=3, counts=None, alignment=32):
    tensor_count, field_count = counts or (len(tensors), len(fields))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, field_count) + b"".join(fields) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


@pytest.fixture
def refused(tmp_path):
    """The sentence with which these bytes are refused."""

    def check(content):
        path = tmp_path / "bad.gguf"
        path.write_bytes(content)
        with pytest.raises(ContextReadyError) as caught:
            read_gguf_file(path)
        message = str(caught.value)
        assert message.startswith(str(path))
        assert "\n" not in message
        return message

    return check


def read(tmp_path, content):
    (tmp_path / "good.gguf").write_bytes(content)
    return read_gguf_file(tmp_path / "good.gguf")


def test_values_of_every_type(tmp_path):
    numbers = {
        0: 200,
        1: -5,
        2: 60_000,
        3: -300,
        4: 2**32 - 1,
        5: -(2**31),
        6: 0.5,
        7: True,
        10: 2**64 - 1,
        11: -1,
        12: 0.1,
    }
    codes = dict(zip(numbers, "BbHhIif?Qqd", strict=True))
    fields = [field(f"n{code}", code, struct.pack(f"<{codes[code]}", value)) for code, value in numbers.items()]
    fields += [
        field(f"a{code}", ARRAY, struct.pack("<IQ", code, 3) + 3 * struct.pack(f"<{codes[code]}", value))
        for code, value in numbers.items()
    ]
    fields += [field("text", STRING, text("日本")), field("empty", ARRAY, struct.pack("<IQ", STRING, 0))]
    fields += [field("texts", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text(""))]
    found = read(tmp_path, gguf(fields)).fields
    expected = {f"n{code}": value for code, value in numbers.items()}
    expected |= {f"a{code}": [value] * 3 for code, value in numbers.items()}
    assert found == expected | {"text": "日本", "empty": [], "texts": ["a", ""]}
    assert type(found["n7"]) is bool
    assert type(found["n4"]) is int


@pytest.mark.parametrize("version", [2, 3])
def test_tensors_are_views_with_rows_first(tmp_path, version):
    values, halves = np.arange(6, dtype="<f4").reshape(2, 3), np.ones((2, 2, 1), "<f2")
    data = values.tobytes() + bytes(8) + halves.tobytes() + bytes(24) + bytes(range(34))
    tensors = [tensor("a", [3, 2]), tensor("b", [1, 2, 2], 1, 32), tensor("c", [32], 8, 64)]
    found = read(tmp_path, gguf(tensors=tensors, data=data, version=version)).tensors
    assert {name: (one.type, one.shape) for name, one in found.items()} == {
        "a": ("f32", (2, 3)),
        "b": ("f16", (2, 2, 1)),
        "c": ("q8_0", (32,)),
    }
    assert np.array_equal(found["a"].data, values)
    assert np.array_equal(found["b"].data, halves)
    assert found["c"].data.tolist() == list(range(34))
    assert not found["a"].data.flags.owndata


def test_the_alignment_can_be_chosen(tmp_path):
    fields = [field("general.alignment", U32, struct.pack("<I", 8))]
    content = gguf(fields, [tensor("a", [1]), tensor("b", [1], 0, 8)], struct.pack("<fxxxxf", 1.0, 2.0), alignment=8)
    found = read(tmp_path, content).tensors
    assert [float(found[name].data[0]) for name in "ab"] == [1.0, 2.0]


def test_the_package_gguf_reads_the_same(tmp_path):
    """A file like those of llama.cpp, with every type of tensor and a tokenizer, written by the package gguf."""
    library = pytest.importorskip("gguf")
    path, generator = tmp_path / "model.gguf", np.random.default_rng(0)
    writer = library.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bool("llama.flag", True)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i} é" for i in range(300)])
    writer.add_array("tokenizer.ggml.scores", [float(i) for i in range(300)])
    writer.add_array("tokenizer.ggml.token_type", list(range(300)))
    types = [type for type in library.GGMLQuantizationType if int(type) in TENSOR_TYPES]
    assert len(types) == len(TENSOR_TYPES)
    for type in types:
        block, size = library.GGML_QUANT_SIZES[type]
        assert TENSOR_TYPES[int(type)] == (type.name.lower(), block, size)
        data = generator.integers(256, size=(3, 2 * size), dtype=np.uint8)
        writer.add_tensor(f"blk.{type.name}", data, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader, found = library.GGUFReader(path), read_gguf_file(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert found.fields == fields
    assert list(found.tensors) == [one.name for one in reader.tensors]
    for theirs in reader.tensors:
        ours = found.tensors[theirs.name]
        assert ours.type == theirs.tensor_type.name.lower()
        assert ours.shape == tuple(theirs.shape.tolist()[::-1])
        assert ours.data.dtype == theirs.data.dtype
        assert ours.data.tobytes() == theirs.data.tobytes()
        assert ours.data.shape == theirs.data.shape


def test_what_is_not_gguf(refused):
    for content in (b"", b"GG", b"something else"):
        assert "is not a GGUF file" in refused(content)
    for version in (0, 1, 4, 3 << 24):
        assert "not a little-endian GGUF file of version 2 or 3" in refused(gguf(version=version))


def test_every_shorter_file_is_refused(refused):
    fields = [field("a", U32, struct.pack("<I", 1)), field("b", ARRAY, struct.pack("<IQ", STRING, 2) + 2 * text("xyz"))]
    content = gguf(fields, [tensor("t", [3, 2])], bytes(24))
    for length in range(4, len(content)):
        assert "is damaged or incomplete" in refused(content[:length])


HUGE = (10**12, 2**32, 2**63, 2**64 - 1)


@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize("code", [0, 4, 7, STRING, 12])
def test_claimed_arrays_are_compared_with_the_size_of_the_file(refused, code, count):
    message = refused(gguf([field("some.key", ARRAY, struct.pack("<IQ", code, count))]))
    assert f"claim to have {count:,} items" in message or f"claims to have {count:,}" in message


@pytest.mark.parametrize("count", HUGE)
def test_claimed_counts_and_lengths_are_compared_with_the_size_of_the_file(refused, count):
    assert f"claims to have {count:,} fields" in refused(gguf(counts=(0, count)))
    assert f"claims to have {count:,} tensors" in refused(gguf(counts=(count, 0)))
    assert "a key is too long" in refused(gguf([struct.pack("<Q", count) + bytes(99)]))
    assert "the field k is too long" in refused(gguf([field("k", STRING, struct.pack("<Q", count))]))
    assert "a tensor name is too long" in refused(gguf(tensors=[struct.pack("<Q", count) + bytes(99)]))


def test_items_are_counted_over_all_fields(refused, monkeypatch):
    monkeypatch.setattr(gguf_file, "MOST_ITEMS", 10)
    fields = [field(f"k{i}", ARRAY, struct.pack("<IQ", 0, 4) + bytes(4)) for i in range(3)]
    assert "its fields claim to have 12 items" in refused(gguf(fields))


def test_the_header_is_bounded(refused, monkeypatch):
    monkeypatch.setattr(gguf_file, "LARGEST_HEADER", 1000)
    assert "the field k is too long" in refused(gguf([field("k", STRING, text("x" * 2000))]))


NESTED = struct.pack("<IQ", ARRAY, 1) * 2000 + struct.pack("<IQB", 0, 1, 5)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (gguf([field("k", ARRAY, NESTED)]), "the field k is an array of arrays"),
        (gguf([field("k", 13, bytes(8))]), "the field k has the unknown type 13"),
        (gguf([field("k", ARRAY, struct.pack("<IQ", 99, 0) + bytes(9))]), "the field k has the unknown type 99"),
        (gguf([field("k", 7, b"\2")]), "the field k is neither true nor false"),
        (gguf([field("k", STRING, text(b"\xff"))]), "the field k is not UTF-8 text"),
        (gguf([field(b"\xff", 0, b"\0")]), "a key is not UTF-8 text"),
        (gguf([field("k", 0, b"\0"), field("k", 0, b"\1")]), "the key k appears twice"),
        (gguf(tensors=[tensor("t", [1])] * 2, data=bytes(64)), "the tensor t appears twice"),
        (gguf(tensors=[tensor("a\nb", [])], data=bytes(64)), r"the tensor a\nb has 0 dimensions"),
        (gguf(tensors=[tensor("t", [1] * 5)], data=bytes(64)), "the tensor t has 5 dimensions"),
        (gguf(tensors=[tensor("t", [1] * 6)], data=bytes(64)), "the tensor t has 6 dimensions"),
        (gguf(tensors=[tensor("t", [1], 4)], data=bytes(64)), "the tensor t has the unknown type 4"),
        (gguf(tensors=[tensor("t", [1], 2**32 - 1)], data=bytes(64)), "has the unknown type 4294967295"),
        (gguf(tensors=[tensor("t", [0, 4])], data=bytes(64)), "the tensor t of type f32 has shape (4, 0)"),
        (gguf(tensors=[tensor("t", [33], 8)], data=bytes(64)), "the tensor t of type q8_0 has shape (33,)"),
        (gguf(tensors=[tensor("t", [17])], data=bytes(64)), "the data of the tensor t are not inside the file"),
        (gguf(tensors=[tensor("t", [2**62, 4])], data=bytes(64)), "t are not inside the file"),
        (gguf(tensors=[tensor("t", [2**63, 2**63, 2**63, 2**63])], data=bytes(64)), "t are not inside the file"),
        (gguf(tensors=[tensor("t", [1], 0, 2**64 - 32)], data=bytes(64)), "t are not inside the file"),
        (gguf(tensors=[tensor("t", [1], 0, 4)], data=bytes(64)), "t are not inside the file"),
        (gguf(tensors=[tensor("t", [16]), tensor("u", [1], 0, 32)], data=bytes(64)), "tensor u overlap with another"),
        (gguf(tensors=[tensor("t", [1]), tensor("u", [1])], data=bytes(64)), "overlap with another"),
    ],
)
def test_what_no_writer_writes_is_refused(refused, content, why):
    message = refused(content)
    assert why in message
    assert message.endswith(". Export or copy it again.")


@pytest.mark.parametrize("alignment", [0, 1, 7, 48, 2**17, 2**31])
def test_an_odd_alignment_is_refused(refused, alignment):
    message = refused(gguf([field("general.alignment", U32, struct.pack("<I", alignment))]))
    assert f"its alignment of {alignment} is not a power of two" in message
    assert "its alignment of x" in refused(gguf([field("general.alignment", STRING, text("x"))]))


LIMITED = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from contextready.errors import ContextReadyError
from contextready.formats.gguf_file import read_gguf_file
for path in sys.argv[1:]:
    try:
        read_gguf_file(Path(path))
    except ContextReadyError as error:
        print(error)
assert "torch" not in sys.modules
"""


def test_bombs_and_pipes_neither_hang_nor_fill_the_memory(tmp_path):
    (tmp_path / "array.gguf").write_bytes(gguf([field("k", ARRAY, struct.pack("<IQ", STRING, 10**12))])[:49])
    (tmp_path / "nested.gguf").write_bytes(gguf([field("k", ARRAY, NESTED * 100)]))
    os.mkfifo(tmp_path / "pipe.gguf")
    paths = [*sorted(str(path) for path in tmp_path.iterdir()), "/dev/zero", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", LIMITED, *paths], capture_output=True, text=True, timeout=30)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert "claim" in lines[0]
    assert "array of arrays" in lines[1]
    assert [line.split(" ", 1)[1] for line in lines[2:]] == ["is not a regular file."] * 3
