"""Edits of files as plain values: a list of them is a whole case, small enough to keep and to replay.

Every edit is a dictionary with a `file` and an `op`:

    bytes       replace `delete` bytes at `offset` by `insert` (hexadecimal)
    copy        replace `delete` bytes at `offset` by `length` bytes from `source` of the same file
    kind        replace the file by something else: missing, empty, folder, pipe, zero (an endless device), loop, sparse
    place       copy the file `source` of the corpus here
    text        replace the whole file by `before` + `part` × `times` + `after`
    set         give the value at `path` another `value`, or the `raw` text, or `depth` nested brackets
    remove      remove the key or item at `path`
    rename      give the key at `path` another name
    repeat      state the item of a list at `path` twice
    append      add `value` to the list at `path`

The last five work on the structure of a file: the documents of JSON, JSON lines and YAML, the header of a safetensors
file, and the fields and tensors of a GGUF file. A path that leads into a string reads it as JSON. `inner` says that the
file is compressed and that its contents are edited.
"""

import contextlib
import copy
import gzip
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

from fuzz import gguf_parts

Edit = dict[str, Any]
RAW = "@@raw@@"
SPARSE = 1 << 40
LARGEST = 1 << 26
STRUCTURAL = ("set", "remove", "rename", "repeat", "append")


def apply(edits: list[Edit], corpus: Path, place: Path) -> None:
    """Apply edits to the copies of corpus files in `place`; one that no longer fits is skipped."""
    for edit in edits:
        with contextlib.suppress(Exception):  # an earlier edit may have left nothing that this one can change
            _apply(edit, corpus, place / edit["file"])


def _apply(edit: Edit, corpus: Path, path: Path) -> None:
    op = edit["op"]
    if op == "kind":
        _replace(path, edit["kind"])
    elif op == "place":
        _remove(path)
        shutil.copyfile(corpus / edit["source"], path)
    elif op == "text":
        path.write_bytes((edit["before"] + edit["part"] * edit["times"] + edit["after"]).encode())
    else:
        if not path.is_file() or path.is_symlink() or path.stat().st_size > LARGEST:
            return
        content = path.read_bytes()
        if inner := edit.get("inner"):
            path.write_bytes(_compress(_changed(decompress(content, inner), edit), inner))
        else:
            path.write_bytes(_changed(content, edit))


def _changed(content: bytes, edit: Edit) -> bytes:
    op = edit["op"]
    if op == "bytes":
        at = edit["offset"]
        return content[:at] + bytes.fromhex(edit["insert"]) + content[at + edit["delete"] :]
    if op == "copy":
        at, source = edit["offset"], edit["source"]
        return content[:at] + content[source : source + edit["length"]] + content[at + edit["delete"] :]
    assert op in STRUCTURAL
    return _restructured(content, edit)


def read_structure(content: bytes, format: str) -> Any:
    """The structure of a file: the documents of a JSON lines file, the header of a safetensors file, …"""
    if format == "json":
        return json.loads(content)
    if format == "jsonl":
        return [json.loads(line) for line in content.splitlines()]
    if format == "yaml":
        import yaml

        return yaml.safe_load(content)
    if format == "safetensors":
        (length,) = struct.unpack("<Q", content[:8])
        return json.loads(content[8 : 8 + length])
    if format == "gguf":
        return gguf_parts.read(content)[0]
    raise ValueError(format)


def _restructured(content: bytes, edit: Edit) -> bytes:
    format = edit["format"]
    structure = read_structure(content, format)
    raw = None if edit["op"] == "remove" else _raw_text(edit)
    _edit_value(structure, edit, list(edit["path"]), RAW if raw is not None else edit.get("value"))

    def text(value: Any) -> str:
        written = json.dumps(value)
        return written if raw is None else written.replace(f'"{RAW}"', raw).replace(f'\\"{RAW}\\"', raw)

    if format == "json":
        return text(structure).encode("utf-8", "surrogatepass")
    if format == "jsonl":
        return "".join(text(one) + "\n" for one in structure).encode("utf-8", "surrogatepass")
    if format == "yaml":
        import yaml

        lines = yaml.safe_dump(structure, default_flow_style=False, sort_keys=False, width=1 << 20)
        written = lines if raw is None else lines.replace(f"'{RAW}'", raw).replace(RAW, raw)
        return written.encode("utf-8", "surrogatepass")
    if format == "safetensors":
        (length,) = struct.unpack("<Q", content[:8])
        header = text(structure).encode("utf-8", "surrogatepass")
        header += b" " * (-len(header) % 8)
        return struct.pack("<Q", len(header)) + header + content[8 + length :]
    return gguf_parts.write(structure, gguf_parts.read(content)[1])


def _raw_text(edit: Edit) -> str | None:
    if "raw" in edit:
        return str(edit["raw"])
    if "depth" in edit:
        opening, closing = ("[", "]") if edit.get("bracket", "[") == "[" else ('{"a":', "}")
        return opening * edit["depth"] + "0" + closing * edit["depth"]
    return None


def _edit_value(value: Any, edit: Edit, path: list[Any], new: Any) -> Any:
    """Change the value at a path in place, and return the new version of what the path starts from."""
    if not path:
        return new
    key, *rest = path
    if isinstance(value, str):
        return json.dumps(_edit_value(json.loads(value), edit, path, new))
    if rest:
        value[key] = _edit_value(value[key], edit, rest, new)
        return value
    op = edit["op"]
    if op == "remove":
        del value[key]
    elif op == "rename":
        items = [(edit["name"] if name == key else name, one) for name, one in value.items()]
        value.clear()
        value.update(items)
    elif op == "append":
        value[key].append(new)
    elif op == "repeat":
        value.insert(key, copy.deepcopy(value[key]))
    else:
        value[key] = new
    return value


def _replace(path: Path, kind: str) -> None:
    _remove(path)
    if kind == "empty":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(SPARSE)
    elif kind != "missing":
        raise ValueError(kind)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def decompress(content: bytes, inner: str) -> bytes:
    if inner == "gz":
        return gzip.decompress(content)
    import zstandard

    return bytes(zstandard.ZstdDecompressor().decompress(content, 1 << 24))


def _compress(content: bytes, inner: str) -> bytes:
    if inner == "gz":
        return gzip.compress(content, mtime=0)
    import zstandard

    return bytes(zstandard.ZstdCompressor().compress(content))
