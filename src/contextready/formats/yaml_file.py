"""YAML settings files: plain values only, bounded in size, depth and aliases."""

from pathlib import Path
from typing import Any

from contextready.errors import ContextReadyError
from contextready.formats.regular import read_text

LARGEST = 1 << 16
"""Bytes of the largest settings file that is read; a long recipe has a thousand, and parsing takes seconds per MB."""
MOST_VALUES = 10_000
"""Values in a file after aliases are written out; nested aliases multiply, so a short file can mean billions."""


def read_yaml(path: Path) -> Any:
    """Read a YAML file."""
    return parse_yaml(read_text(path, LARGEST), str(path))


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML text with plain values; `where` names its origin in error messages."""
    import yaml  # type: ignore[import-untyped]

    try:
        loader = yaml.SafeLoader(text)
        try:
            # Nodes exist once however often they are referred to. They are counted before any value is constructed,
            # because merges (<<) copy what they refer to.
            root = loader.get_single_node()
            if root is None:
                return None
            _check_values(root, where)
            return loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ContextReadyError(f"{where} is not valid YAML: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise ContextReadyError(f"{where} is nested too deeply to be read as YAML.") from None
    except ContextReadyError:
        raise
    # The loader raises plain errors for impossible values, such as 2020-99-99, !!int "", !!bool x, or long numbers.
    except (ValueError, ArithmeticError, TypeError, AttributeError, LookupError):
        raise ContextReadyError(
            f"{where} contains an impossible number, date or tagged value; write it in quotes if it is text."
        ) from None


def _check_values(root: Any, where: str) -> None:
    """Refuse keys that are set twice, aliases that refer to themselves, and aliases that stand for too many values."""
    sizes: dict[int, int | None] = {}

    def size(node: Any) -> int:
        if id(node) not in sizes:
            # Still None when the node is reached again from within itself.
            sizes[id(node)] = None
            inner = [] if isinstance(node.value, str) else node.value
            pairs = [item for item in inner if isinstance(item, tuple)]
            _check_keys([key for key, _ in pairs], where)
            sizes[id(node)] = 1 + sum(size(part) for item in inner for part in (item if pairs else (item,)))
        known = sizes[id(node)]
        if known is None:
            raise ContextReadyError(f"{where} contains a YAML alias that refers to itself; write the values out.")
        if known > MOST_VALUES:
            raise ContextReadyError(
                f"{where} has more than {MOST_VALUES:,} values, with aliases written out; settings need far fewer."
            )
        return known

    size(root)


def _check_keys(keys: list[Any], where: str) -> None:
    seen: set[tuple[str, str]] = set()
    for key in keys:
        if isinstance(key.value, str) and key.value != "<<":
            if (key.tag, key.value) in seen:
                raise ContextReadyError(f"{where} sets '{key.value[:40]}' twice; remove one of the two.")
            seen.add((key.tag, key.value))
