"""The parts of a GGUF file as plain values, and a writer that accepts parts that make no sense."""

import struct
from typing import Any

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
ALIGNMENT = 32
TRUE = "true"
"""Stands for the true number of items in place of a count."""


def read(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a valid file as plain values, and the data that follows it."""
    reader = _Reader(content)
    magic = reader.take(4).decode("latin-1")
    version, tensors, fields = reader.number("I"), reader.number("Q"), reader.number("Q")
    parts: dict[str, Any] = {"magic": magic, "version": version, "tensor_count": TRUE, "field_count": TRUE}
    parts["fields"] = [{"key": reader.string(), **reader.typed()} for _ in range(fields)]
    parts["tensors"] = []
    for _ in range(tensors):
        name, count = reader.string(), reader.number("I")
        dims = [reader.number("Q") for _ in range(count)]
        tensor = {"name": name, "dim_count": TRUE, "dims": dims, "type": reader.number("I")}
        parts["tensors"].append(tensor | {"offset": reader.number("Q")})
    return parts, content[reader.at + (-reader.at % ALIGNMENT) :]


def write(parts: dict[str, Any], data: bytes) -> bytes:
    """A file with these parts, whatever they are: numbers wrap around, and counts need not be true."""
    out = str(parts["magic"]).encode("latin-1", "replace")
    out += _packed("I", parts["version"])
    out += _count("Q", parts["tensor_count"], parts["tensors"]) + _count("Q", parts["field_count"], parts["fields"])
    for field in parts["fields"]:
        out += _string(field["key"]) + _packed("I", field["type"]) + _value(field["type"], field)
    for tensor in parts["tensors"]:
        out += _string(tensor["name"]) + _count("I", tensor["dim_count"], tensor["dims"])
        out += b"".join(_packed("Q", size) for size in tensor["dims"])
        out += _packed("I", tensor["type"]) + _packed("Q", tensor["offset"])
    return out + bytes(-len(out) % ALIGNMENT) + data


class _Reader:
    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def take(self, count: int) -> bytes:
        part = self.content[self.at : self.at + count]
        self.at += count
        if len(part) < count:
            raise ValueError("the file ends early")
        return part

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode()

    def typed(self) -> dict[str, Any]:
        kind = self.number("I")
        return {"type": kind, **self.value(kind)}

    def value(self, kind: int) -> dict[str, Any]:
        if kind == STRING:
            return {"value": self.string()}
        if kind != ARRAY:
            return {"value": self.number(NUMBERS[kind])}
        inner, count = self.number("I"), self.number("Q")
        return {"inner": inner, "count": TRUE, "value": [self.value(inner)["value"] for _ in range(count)]}


def _value(kind: Any, field: dict[str, Any]) -> bytes:
    value = field["value"]
    if kind == STRING:
        return _string(value)
    if kind == ARRAY:
        items = value if isinstance(value, list) else [value]
        head = _packed("I", field.get("inner", 4)) + _count("Q", field.get("count", TRUE), items)
        return head + b"".join(_value(field.get("inner", 4), {"value": item}) for item in items)
    return _packed(NUMBERS.get(kind, "Q"), value)


def _count(code: str, stated: Any, items: Any) -> bytes:
    return _packed(code, len(items) if stated == TRUE else stated)


def _string(value: Any) -> bytes:
    content = str(value).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(content)) + content


def _packed(code: str, value: Any) -> bytes:
    if code in "fd":
        try:
            return struct.pack(f"<{code}", float(value))
        except (TypeError, ValueError, OverflowError):
            return struct.pack(f"<{code}", float("nan"))
    if code == "?":
        return bytes([int(value) & 255 if isinstance(value, int | float) and value == value else 2])
    size = struct.calcsize(f"<{code}")
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = 0
    return (number % (1 << 8 * size)).to_bytes(size, "little")
