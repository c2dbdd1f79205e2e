"""Dataclasses as schemas: the file and the key are named, all the way down."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from contextready.errors import ContextReadyError
from contextready.formats.record import Count, FileName, Sha256, read_record


@dataclass(frozen=True)
class Inner:
    size: Count
    sum: Sha256 = "0" * 64


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    files: dict[FileName, Inner] = field(default_factory=dict)
    number: float = 0.0
    pair: tuple[Literal["a", "b"], int | None] | None = None
    many: list[Annotated[int, range(3, 6)]] = field(default_factory=list)
    large: Annotated[int, range(1 << 100)] = 0
    anything: Any = None

    def __post_init__(self):
        if self.name == "bad":
            raise ContextReadyError("name must not be bad.")


GOOD = {"name": "x", "inner": {"size": 3}}


def test_a_record_is_built():
    value = GOOD | {"files": {"a.bin": {"size": 0}}, "number": 2, "pair": ["a", None], "many": [3, 5], "large": 1 << 99}
    record = read_record(Outer, value, "F")
    assert record == Outer("x", Inner(3), {"a.bin": Inner(0)}, 2.0, ("a", None), [3, 5], 1 << 99)
    assert type(record.number) is float
    assert read_record(Outer, GOOD | {"new": 1}, "F", extra=True) == Outer("x", Inner(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "F, name must be a string, but is a whole number"),
        ({"name": "bad"}, "F: name must not be bad."),
        ({"new\nline": 3}, "F has the unknown key 'new\N{REPLACEMENT CHARACTER}line'"),
        ({"inner": None}, "F, inner must be an object, but is null"),
        ({"inner": {}}, "F, inner lacks the key 'size'"),
        ({"inner": {"size": True}}, "F, inner, size must be a whole number, but is true or false"),
        ({"inner": {"size": -1}}, "F, inner, size must be at least 0"),
        ({"inner": {"size": 1 << 62}}, "but is a number with more than 15 digits"),
        ({"inner": {"size": 1, "sum": "0" * 63}}, "F, inner, sum must be a SHA-256 sum, but is '000"),
        ({"inner": {"size": 1, "sum": "0" * 64 + "\n"}}, "must be a SHA-256 sum"),
        ({"files": []}, "F, files must be an object, but is a list"),
        ({"files": {"a": {"size": 1.5}}}, "F, files, a, size must be a whole number, but is a number"),
        ({"number": 10**400}, "F, number is too large"),
        ({"number": "1"}, "F, number must be a number, but is a string"),
        ({"pair": ["a"]}, "F, pair must have 2 items, but has 1"),
        ({"pair": ["c", 1]}, "F, pair, item 0 must be a or b, but is 'c'"),
        ({"pair": ["a", 10**30]}, "F, pair, item 1 is too large"),
        ({"many": [3, 6]}, "F, many, item 1 must be from 3 to 5, but is 6"),
    ],
)
def test_the_key_of_a_wrong_value_is_named(change, message):
    with pytest.raises(ContextReadyError) as refusal:
        read_record(Outer, GOOD | change, "F")
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "/a", "a\\b", "a\0", "a\n", "é", "a" * 201])
def test_names_are_plain_names_of_files(name):
    with pytest.raises(ContextReadyError, match="must be the plain name of a file in the same folder"):
        read_record(Outer, GOOD | {"files": {name: {"size": 1}}}, "F")


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_a_record_is_an_object(value):
    with pytest.raises(ContextReadyError, match="F must be an object, but is "):
        read_record(Outer, value, "F")
