"""Optional packages that are too old are refused in one sentence, before they are imported."""

import importlib.metadata
import re
import sys

import pytest

from contextready.cli.main import main
from contextready.errors import ContextReadyError
from contextready.extras import install_command, require


def lowest(package, extra):
    """The lowest version that the extra allows, as the pip command names it."""
    return re.search(rf"{package}>=([\d.]+)", install_command(extra))[1]


@pytest.fixture
def pretend(monkeypatch):
    """Pretend that one package is installed in another version."""
    version = importlib.metadata.version

    def pretend(package, other):
        monkeypatch.setattr(importlib.metadata, "version", lambda name: other if name == package else version(name))

    return pretend


@pytest.mark.parametrize("extra", ["hf", "eval", "bench"])
@pytest.mark.parametrize("installed", ["4.57.6", "5.4.0", "5.20.2", "5.9.0rc1"])
def test_a_transformers_below_the_lowest_version_is_refused(pretend, monkeypatch, installed, extra):
    pretend("transformers", installed)
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import would fail
    with pytest.raises(ContextReadyError) as refusal:
        require("transformers", extra)
    assert str(refusal.value) == (
        f"transformers {installed} is too old; version {lowest('transformers', extra)} or newer is needed. "
        f"Install it with: {install_command(extra)}"
    )


def test_the_lowest_version_and_newer_ones_are_imported(pretend):
    floor = lowest("transformers", "hf")
    for installed in (floor, f"{floor}.0", f"{floor}.1", f"{floor}.0.dev0", "5.100.0", "6.0.0rc1", "unknown"):
        pretend("transformers", installed)
        assert require("transformers", "hf").__name__ == "transformers"


def test_modules_of_a_package_and_names_with_a_dash_are_checked_too(pretend):
    pretend("matplotlib", "3.7.5")
    with pytest.raises(ContextReadyError, match=r"matplotlib 3\.7\.5 is too old; version 3\.8 or newer is needed"):
        require("matplotlib.pyplot", "plot")
    pretend("lm_eval", "0.4.9")
    with pytest.raises(ContextReadyError, match=r"lm_eval 0\.4\.9 is too old; version 0\.4\.13 or newer is needed"):
        require("lm_eval", "eval")


def test_a_source_tree_that_is_not_installed_checks_nothing(monkeypatch):
    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", unknown)
    assert require("transformers", "hf").__name__ == "transformers"


def test_crt_reports_an_old_transformers_in_one_sentence(pretend, tmp_path, capsys):
    pretend("transformers", "5.4.0")
    assert main(["convert", str(tmp_path), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("crt convert: transformers 5.4.0 is too old; version ")
