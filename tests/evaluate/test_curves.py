"""Learning curves and crossovers."""

import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from contextready import ContextReadyError
from contextready.cli.main import main
from contextready.evaluate.curves import Curve, _ticks, crossover, crossovers, draw, read_curve, short


def curve(name, losses, x=None):
    return Curve(name, np.arange(1.0, len(losses) + 1) if x is None else np.array(x, float), np.array(losses))


def test_the_crossing_is_interpolated():
    cross = crossover(curve("ready", [8.0, 6.0, 3.0]), curve("plain", [8.0, 5.0, 4.0]))
    assert (cross.below, cross.above) == ("ready", "plain")
    assert cross.x == pytest.approx(2.5)
    assert cross.loss == pytest.approx(4.5)


def test_the_order_of_the_two_does_not_matter():
    a, b = curve("a", [9.0, 6.0, 3.0, 2.0]), curve("b", [8.0, 5.0, 4.0, 3.5])
    assert crossover(a, b) == crossover(b, a)


def test_untrained_models_have_no_order():
    assert crossover(curve("a", [7.9, 5.0, 4.0], [0, 1, 2]), curve("b", [8.0, 4.0, 3.0], [0, 1, 2])) is None


def test_curves_that_never_cross():
    assert crossover(curve("a", [8.0, 5.0, 4.0]), curve("b", [8.0, 4.0, 3.0])) is None


def test_curves_that_touch_at_a_validation_cross_there():
    cross = crossover(curve("a", [5.0, 4.0, 3.0]), curve("b", [4.0, 4.0, 4.0]))
    assert (cross.below, cross.x) == ("a", pytest.approx(2.0))


def test_of_several_crossings_the_last_counts():
    cross = crossover(curve("a", [1.0, 3.0, 1.0, 3.0]), curve("b", [2.0, 2.0, 2.0, 2.0]))
    assert (cross.below, cross.x) == ("b", pytest.approx(3.5))


def test_only_the_range_that_both_cover_counts():
    long, brief = curve("long", [9.0, 5.0, 1.0], [1, 11, 21]), curve("brief", [8.0, 6.0], [1, 9])
    assert 1 < crossover(long, brief).x < 9
    assert crossover(long, curve("brief", [8.0, 4.0], [1, 6])) is None


def test_every_pair_is_compared():
    a, b, c = curve("a", [5.0, 1.0]), curve("b", [4.0, 2.0]), curve("c", [3.0, 3.0])
    assert {(x.below, x.above) for x in crossovers([a, b, c])} == {("a", "b"), ("a", "c"), ("b", "c")}


@pytest.fixture
def runs(tmp_path):
    for name, losses in {"ready": [8.0, 6.0, 3.0], "plain": [8.0, 5.0, 4.0]}.items():
        (tmp_path / name).mkdir()
        lines = [
            {"step": i, "tokens": 1000 * i, "macs": 7 * i, "seconds": 0.5 * i, "val_loss": v}
            for i, v in enumerate(losses)
        ]
        lines.insert(1, {"step": 0, "tokens": 500, "loss": 7.0})
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 9, "val')
    return tmp_path


@pytest.mark.parametrize(("axis", "scale"), [("tokens", 1000), ("steps", 1), ("macs", 7), ("seconds", 0.5)])
def test_curves_of_runs(runs, axis, scale):
    found = read_curve(runs / "ready", axis)
    assert found.name == "ready"
    np.testing.assert_allclose(found.x, scale * np.arange(3))
    np.testing.assert_allclose(found.loss, [8, 6, 3])


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot_draws_and_prints_the_crossing(runs, ending, capsys):
    out = runs / f"picture.{ending}"
    assert main(["plot", str(runs / "ready"), str(runs / "plain"), "--out", str(out)]) == 0
    assert "ready overtakes plain at 1.50k training tokens, perplexity 90.0" in capsys.readouterr().out
    if ending == "png":
        assert out.read_bytes().startswith(b"\x89PNG")
    else:
        assert ElementTree.fromstring(out.read_text()).tag.endswith("svg")


def test_runs_with_equal_names_are_told_apart_and_pairs_that_do_not_cross_are_reported(runs, capsys):
    (runs / "more").mkdir()
    (runs / "ready").rename(runs / "more" / "plain")
    with (runs / "plain" / "metrics.jsonl").open("w") as file:
        for i, value in enumerate([8.0, 7.0, 6.5, None]):
            file.write(json.dumps({"step": i, "tokens": 1000 * i, "val_loss": value}) + "\n")
    assert main(["plot", str(runs / "plain"), str(runs / "more" / "plain"), "--out", str(runs / "x.png")]) == 0
    out = capsys.readouterr().out
    other = f"{runs.name}/plain"
    assert f"more/plain and {other} do not cross; more/plain ends with the lower perplexity" in out


def test_bad_plots_are_one_sentence(runs, capsys):
    for words, message in [
        ([str(runs / "nowhere")], "There is no run at"),
        ([str(runs / "ready"), "--out", str(runs / "picture.bmp")], "choose a file name that ends in .png"),
    ]:
        assert main(["plot", *words]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1
    (runs / "short").mkdir()
    (runs / "short" / "metrics.jsonl").write_text('{"step": 0, "tokens": 0, "val_loss": 8.0}\n')
    with pytest.raises(ContextReadyError, match="fewer than two validations"):
        read_curve(runs / "short")


def test_drawing_needs_its_extra(runs, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ContextReadyError, match=r"pip install .*matplotlib"):
        draw([curve("a", [1.0, 2.0])], runs / "x.png")


def test_narrow_ranges_have_ticks_too():
    for low, high in ((4.9, 5.2), (4.0, 30.0), (99.0, 101.0), (1.0, 50_000.0)):
        ticks = _ticks(low, high)
        assert 3 <= len(ticks) <= 16
        assert low <= min(ticks) < max(ticks) <= high


def test_short_numbers():
    assert [short(x) for x in (7, 1500, 2_130_000, 3.2e12)] == ["7", "1.50k", "2.13M", "3.20T"]
