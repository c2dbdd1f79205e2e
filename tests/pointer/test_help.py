"""The help of `crt pointer`, `crt reproduce` and `crt demo`: built without torch, with examples before options."""

import subprocess
import sys
from dataclasses import fields

import pytest

from contextready.cli.main import main
from contextready.pointer.task import PointerTask

SCRIPT = """
import sys
from contextready.cli import demo, pointer, reproduce
from contextready.cli.options import VerbParser
parser = VerbParser()
verbs = parser.add_subparsers()
for module in (demo, pointer, reproduce):
    module.add(verbs)
for verb in verbs.choices.values():
    verb.format_help()
from contextready.pointer import provider
print("torch" in sys.modules)
"""


def test_the_help_and_the_settings_need_no_torch():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.fixture(params=["pointer", "reproduce", "demo"])
def help_text(request, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        main([request.param, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_examples_come_before_options_and_lines_are_short(help_text):
    assert 0 < help_text.index("examples:\n  crt ") < help_text.index("\noptions:\n")
    assert all(len(line) <= 100 for line in help_text.splitlines())
    assert "Run the same command again to resume." in help_text.replace("\n", " ")


def test_the_words_of_the_task_and_its_settings_are_explained(capsys):
    with pytest.raises(SystemExit):
        main(["pointer", "--help"])
    out = capsys.readouterr().out
    words, settings = out.split("settings of the task")
    for word in ("hops", "level", "window", "masked answers", "absent answers"):
        assert f"\n  {word} " in words
    for field in fields(PointerTask):
        assert f"\n  {field.name} " in settings
