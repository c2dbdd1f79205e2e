"""Settings as dataclasses: turns `key=value` arguments and plain dictionaries into checked, typed fields."""

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from contextready.errors import ContextReadyError, nearest
from contextready.formats.limits import shown

Settings = TypeVar("Settings")

_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse_assignments(words: Sequence[str]) -> dict[str, str]:
    """Split `["width=64", "heads=4"]` into a dictionary whose values are still text."""
    pairs: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ContextReadyError(f"'{shown(word)}' is not a setting; write it as key=value, for example width=256.")
        if key in pairs:
            raise ContextReadyError(f"'{shown(key)}' is set twice; remove one of the two.")
        pairs[key] = text
    return pairs


def build_settings(cls: type[Settings], values: Mapping[str, Any]) -> Settings:
    """Create a settings dataclass from a mapping. Text is converted; unknown and missing keys are errors."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise ContextReadyError(f"Unknown setting '{shown(key)}'; {nearest(str(key), list(fields))}")
    missing = [
        name
        for name, field in fields.items()
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ContextReadyError(f"Missing setting{'s' * (len(missing) > 1)}: {', '.join(missing)}; add {missing[0]}=….")
    return cls(**{key: _convert(key, value, hints[key]) for key, value in values.items()})


def describe_settings(cls: type) -> str:
    """Format the help text of a settings dataclass: each key with the docstring of its field and its default."""
    documented: dict[str, str] = {}
    for base in cls.__mro__[:-1]:
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, doc in pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(doc, ast.Expr):
                documented.setdefault(field.target.id, ast.literal_eval(doc.value))
    lines = []
    for setting in dataclasses.fields(cls):
        default = "" if setting.default is dataclasses.MISSING else f" (default: {_as_text(setting.default)})"
        text = documented.get(setting.name, "") + default
        lines.append(textwrap.fill(f"  {setting.name:<20}{text}", width=79, subsequent_indent=" " * 22))
    return "\n".join(lines)


def _as_text(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else f"{value}"


def _convert(key: str, value: Any, hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        (hint,) = (option for option in typing.get_args(hint) if option is not type(None))
    if isinstance(value, str) and hint is not str:
        try:
            return _BOOLEANS[value.lower()] if hint is bool else hint(value.replace("_", ""))
        except (ValueError, KeyError):
            if hint is int and value.isdecimal():
                # Python does not convert numbers with thousands of digits.
                raise ContextReadyError(f"{key} is a number with {len(value):,} digits, which is too large.") from None
            got = f"got {shown(value)}" if value else "it is empty"
            raise ContextReadyError(f"{key} must be {_KIND[hint]}, but {got}.") from None
    if hint is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ContextReadyError(f"{key} must be a number, but got {shown(value)}.") from None
    if type(value) is not hint:
        raise ContextReadyError(f"{key} must be {_KIND[hint]}, but got {shown(value)}.")
    return value


_KIND = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
