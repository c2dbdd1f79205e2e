"""YAML: plain values, and one sentence for everything else, in little time and memory."""

import datetime
import os
import resource
import subprocess
import sys

import pytest

from contextready.errors import ContextReadyError
from contextready.formats.yaml_file import LARGEST, MOST_VALUES, parse_yaml, read_yaml


def doubling(item, first):
    """Thirty levels, each of which refers twice to the level before: 2³⁰ values in a kilobyte."""
    lines = [f"m0: &m0 {first}"]
    lines += [f"m{i}: &m{i} {item.format(f'*m{i - 1}, *m{i - 1}')}" for i in range(1, 31)]
    return "\n".join(lines)


BOMBS = {
    "lists": doubling("[{}]", "[x, x]"),
    "merges": doubling("{{<<: [{}]}}", "{a: 1, b: 2}"),
    "mappings": "m0: &m0 {a: 1}\n" + "\n".join(f"m{i}: &m{i} {{a: *m{i - 1}, b: *m{i - 1}}}" for i in range(1, 31)),
    "many": "a: &a [" + "x, " * 500 + "]\nb: [" + "*a, " * 500 + "]",
    "flat": "[" + "a, " * (MOST_VALUES + 1) + "]",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_before_they_are_built(name):
    with pytest.raises(ContextReadyError, match=r"^F has more than 10,000 values, with aliases written out; "):
        parse_yaml(BOMBS[name], "F")


@pytest.mark.parametrize("text", ["&a [*a]", "a: &a [x, *a]", "a: &a {b: *a}", "a: &a {<<: *a}", "a: &a [{b: [*a]}]"])
def test_an_alias_of_itself_is_refused(text):
    with pytest.raises(ContextReadyError, match="contains a YAML alias that refers to itself"):
        parse_yaml(text, "F")


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? "])
def test_deep_nesting_is_refused(opening):
    with pytest.raises(ContextReadyError, match="F is nested too deeply to be read as YAML"):
        parse_yaml(opening * 10_000, "F")


def test_deep_nesting_that_ends_is_refused_too():
    with pytest.raises(ContextReadyError, match="F is nested too deeply to be read as YAML"):
        parse_yaml("[" * 30_000 + "]" * 30_000, "F")


@pytest.mark.parametrize(
    "text",
    [
        "a: b: c",
        "\ta: 1",
        "a: *b",
        "a: 1\n---\nb: 2",
        "a: \0",
        "[a]: 1",
        "{a: 1}: 2",
        "<<: 3",
        "!!str [a]",
        "!tag 1",
        "!!python/object/apply:os.system [exit 7]",
        "!!python/name:os.system",
        "a: !!binary x",
        "%YAML 9.9\n---\na: 1",
        "'" * 101,
    ],
)
def test_what_is_not_plain_yaml_is_refused_in_one_line(text):
    with pytest.raises(ContextReadyError) as error:
        parse_yaml(text, "F")
    message = str(error.value)
    assert message.startswith("F is not valid YAML: ")
    assert "\n" not in message
    assert len(message) < 500


@pytest.mark.parametrize(
    "value",
    [
        "2020-99-99",
        "2020-02-30",
        "!!int ''",
        "!!int x",
        "!!float ''",
        "!!bool x",
        "!!timestamp x",
        pytest.param("9" * 5000, id="5000 digits"),
        pytest.param("1" + ":1" * 5000 + ".5", id="sixty to the power of 5000"),
    ],
)
def test_impossible_values_are_one_sentence(value):
    with pytest.raises(ContextReadyError, match=r"^F contains an impossible number, date or tagged value; "):
        parse_yaml(f"a: {value}", "F")


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3", "{a: 1, a: 1}", "b: {c: 1, c: 2}", "1: a\n1: b"])
def test_a_key_that_is_set_twice_is_refused(text):
    with pytest.raises(ContextReadyError, match=r"^F sets '[ac1]' twice; remove one of the two"):
        parse_yaml(text, "F")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# nothing", None),
        ("~", None),
        ("a: 1\nb: [x, 2.5, true, null]", {"a": 1, "b": ["x", 2.5, True, None]}),
        ("a: 2020-02-03", {"a": datetime.date(2020, 2, 3)}),
        ("a: &x 1\nb: *x", {"a": 1, "b": 1}),
        ("a: &x {c: 1, d: 2}\nb: {<<: *x, d: 3}", {"a": {"c": 1, "d": 2}, "b": {"c": 1, "d": 3}}),
        ("\ufeffa: 1", {"a": 1}),
        ("a: 😀", {"a": "😀"}),
        ("{1: a, '1': b}", {1: "a", "1": "b"}),
    ],
)
def test_plain_values_are_read(text, value):
    assert parse_yaml(text, "F") == value


def test_files_are_regular_utf8_and_small(tmp_path):
    path = tmp_path / "a.yaml"
    with pytest.raises(ContextReadyError, match=r"a\.yaml does not exist"):
        read_yaml(path)
    path.write_bytes(b"a: caf\xe9")
    with pytest.raises(ContextReadyError, match=r"a\.yaml is not UTF-8 text"):
        read_yaml(path)
    path.write_text("#" * (LARGEST + 1))
    with pytest.raises(ContextReadyError, match=r"a\.yaml has 65,537 bytes, but files of its kind have at most 65,536"):
        read_yaml(path)
    path.write_text("#" * (LARGEST - 5) + "\na: 1")
    assert read_yaml(path) == {"a": 1}
    with pytest.raises(ContextReadyError, match="is not a regular file"):
        read_yaml(tmp_path)
    os.mkfifo(tmp_path / "fifo.yaml")
    with pytest.raises(ContextReadyError, match="is not a regular file"):
        read_yaml(tmp_path / "fifo.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    with pytest.raises(ContextReadyError, match="is not a regular file"):
        read_yaml(tmp_path / "zero.yaml")


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_take_little_memory(name, tmp_path):
    path = tmp_path / "bomb.yaml"
    path.write_text(BOMBS[name])
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from contextready.formats.yaml_file import read_yaml\n"
        "from contextready.errors import ContextReadyError\n"
        "try:\n    read_yaml(Path(sys.argv[1]))\nexcept ContextReadyError:\n    sys.exit(2)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        timeout=30,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28)),
    )
    assert done.returncode == 2
