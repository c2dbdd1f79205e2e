"""Plain values from a file as dataclasses: every field present, of its type, and within its limits."""

import dataclasses
import re
import types
import typing
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from contextready.errors import ContextReadyError
from contextready.formats.limits import shown

Record = TypeVar("Record")

LARGEST_INT = 1 << 62
"""No count, size or step in a file is larger."""


@dataclass(frozen=True)
class Matches:
    """The limit of a text: a regular expression for all of it, and what such a text is called in messages."""

    pattern: str
    what: str


Count = Annotated[int, range(LARGEST_INT)]
Sha256 = Annotated[str, Matches("[0-9a-f]{64}", "a SHA-256 sum")]
FileName = Annotated[
    str,
    Matches(r"(?!\.{1,2}\Z)[A-Za-z0-9._+-]{1,200}", "the plain name of a file in the same folder"),
]


def read_record(cls: type[Record], value: Any, where: str, *, extra: bool = False) -> Record:
    """Build a dataclass from a dictionary that a file contained.

    Fields with a default may be missing. Unknown keys are refused, unless `extra` says to ignore them. Lists, tuples,
    dictionaries, optional values, literals and nested dataclasses are checked all the way down. An `Annotated` type
    has a limit: a range for a whole number, `Matches` for a text. `where` names the file in error messages, and the key
    of the wrong value is added to it.
    """
    where = where.removesuffix(",")
    if not isinstance(value, dict):
        _wrong(where, f"must be an object, but is {_kind(value)}")
    hints, fields = _hints(cls), {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = [key for key in value if key not in fields]
    if unknown and not extra:
        _wrong(where, f"has the unknown key '{one_line(unknown[0])}'")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in value:
            _wrong(where, f"lacks the key '{name}'")
    checked = {name: check(value[name], hints[name], f"{where}, {name},") for name in fields if name in value}
    try:
        return cls(**checked)
    except ContextReadyError as error:
        # The dataclass has checks of its own.
        raise ContextReadyError(f"{where}: {error}") from None


def check(value: Any, hint: Any, where: str) -> Any:
    """Check one value against a type hint, and return it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (hint,) = (option for option in arguments if option is not type(None))
        return check(value, hint, where)
    if hint is Any:
        return value
    if origin is Annotated:
        return _check_limited(value, *arguments, where=where)
    if origin is Literal:
        if not any(type(value) is type(choice) and value == choice for choice in arguments):
            _wrong(where, f"must be {' or '.join(map(str, arguments))}, but is {_value(value)}")
        return value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return read_record(hint, value, where)
    if origin in (list, tuple):
        return _check_items(value, origin, arguments, where)
    if origin is dict:
        if not isinstance(value, dict):
            _wrong(where, f"must be an object, but is {_kind(value)}")
        of_keys, of_values = arguments
        return {
            check(key, of_keys, f"{where} the key '{one_line(key)}',"): check(
                one, of_values, f"{where} {one_line(key)},"
            )
            for key, one in value.items()
        }
    if hint is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            _wrong(where, "is too large")
    if type(value) is not hint:
        _wrong(where, f"must be {_NAMES.get(hint, str(hint))}, but is {_kind(value)}")
    if hint is int and abs(value) > LARGEST_INT:
        _wrong(where, "is too large")
    return value


def one_line(text: object) -> str:
    """A name from a file as a message shows it: short, and on one line."""
    letters = shown(str(text))
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in letters)


def _check_items(value: Any, origin: Any, hints: tuple[Any, ...], where: str) -> Any:
    if not isinstance(value, list):
        _wrong(where, f"must be a list, but is {_kind(value)}")
    if origin is tuple and hints[-1] is not Ellipsis:
        if len(value) != len(hints):
            _wrong(where, f"must have {len(hints)} items, but has {len(value):,}")
    else:
        hints = hints[:1] * len(value)
    pairs = enumerate(zip(value, hints, strict=True))
    return origin(check(one, hint, f"{where} item {i},") for i, (one, hint) in pairs)


def _check_limited(value: Any, hint: Any, limit: Any, *, where: str) -> Any:
    if type(value) is not hint:
        _wrong(where, f"must be {_NAMES[hint]}, but is {_kind(value)}")
    if isinstance(limit, range):
        if value not in limit:
            is_open = limit.stop == LARGEST_INT
            allowed = f"at least {limit[0]}" if is_open else f"from {limit[0]} to {limit[-1]}"
            _wrong(where, f"must be {allowed}, but is {shown(value)}")
    elif not re.fullmatch(limit.pattern, value):
        _wrong(where, f"must be {limit.what}, but is {_value(value)}")
    return value


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _wrong(where: str, what: str) -> NoReturn:
    raise ContextReadyError(f"{where.removesuffix(',')} {what}; the file is damaged or from another program.")


def _kind(value: Any) -> str:
    return _NAMES.get(type(value), type(value).__name__)


def _value(value: Any) -> str:
    return f"'{one_line(value)}'" if isinstance(value, str) else _kind(value)


_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
