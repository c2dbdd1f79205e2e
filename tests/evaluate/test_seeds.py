"""Runs that differ only in their seed: one curve with a band, and paired differences."""

import json

import numpy as np
import pytest

from contextready import ContextReadyError
from contextready.cli.main import main
from contextready.evaluate.seeds import band, difference, draw_difference, group_runs, mean_curve
from contextready.runs.config import build_run

SHAPE = {"vocab_size": 300, "width": 16, "layers": 1, "heads": 2, "data": "data"}


@pytest.fixture
def write(tmp_path):
    def write_run(name, losses, steps=None, **settings):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        config = build_run(SHAPE | {"out": str(folder)} | settings)
        (folder / "config.json").write_text(json.dumps(config.as_dict()))
        records = [
            {"step": step, "tokens": 1000 * step, "macs": 7 * step, "seconds": 0.5 * step, "val_loss": loss}
            for step, loss in zip(steps or range(len(losses)), losses, strict=True)
        ]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
        return folder

    return write_run


@pytest.fixture
def six(write):
    """Three seeds with a correction, and three without one."""
    ready = [write(f"ready-{s}", [8.0, 6.0 + s, 3.0 + s], correction="add", seed=s) for s in (0, 1, 2)]
    plain = [write(f"plain-{s}", [8.0, 6.5 + s, 4.0 + 2 * s], seed=s) for s in (0, 1, 2)]
    return [*ready, *plain]


def test_runs_that_differ_in_the_seed_are_one_group(six):
    ready, plain = group_runs(six)
    assert (ready.name, plain.name) == ("ready", "plain")
    assert ready.runs == dict(enumerate(six[:3]))
    assert plain.runs == dict(enumerate(six[3:]))


def test_other_settings_make_other_groups(write):
    runs = [write(f"lr-{i}", [2.0, 1.0], seed=i, lr=lr) for i, lr in enumerate((1e-3, 1e-3, 2e-3))]
    assert [list(group.runs.values()) for group in group_runs(runs)] == [runs[:2], runs[2:]]


def test_repetitions_with_the_same_seed_are_not_seeds(write):
    runs = [write(f"again-{i}", [2.0, 1.0], seed=0) for i in range(2)]
    assert [group.name for group in group_runs(runs)] == ["again-0", "again-1"]


def test_runs_without_readable_settings_are_drawn_by_themselves(write):
    runs = [write(f"old-{i}", [2.0, 1.0], seed=i) for i in range(3)]
    (runs[0] / "config.json").unlink()
    (runs[1] / "config.json").write_text("{}")
    assert [(group.name, list(group.runs)) for group in group_runs(runs)] == [
        ("old-0", [None]),
        ("old-1", [None]),
        ("old-2", [2]),
    ]


def test_groups_with_one_name_are_told_apart(write):
    runs = [
        write(f"d1-{s}{name}", [2.0, 1.0], seed=s, lr=lr) for name, lr in (("a", 1e-3), ("b", 2e-3)) for s in (0, 1)
    ]
    assert [group.name for group in group_runs(runs)] == ["d1-0a, d1-1a", "d1-0b, d1-1b"]


def test_seeds_may_start_from_seeds_of_their_own(write, tmp_path):
    bases = [write(f"base-{s}", [2.0, 1.0], seed=s) for s in (0, 1)]
    other = write("other-base", [2.0, 1.0], seed=1, lr=5e-3)
    tuned = [write(f"tuned-{s}", [2.0, 1.0], seed=s, init_from=str(base)) for s, base in enumerate(bases)]
    assert len(group_runs(tuned)) == 1
    elsewhere = write("tuned-2", [2.0, 1.0], seed=2, init_from=str(other))
    assert len(group_runs([*tuned, elsewhere])) == 2
    scratch = write("scratch", [2.0, 1.0], seed=2)
    assert len(group_runs([*tuned, scratch])) == 2
    gone = [write(f"gone-{s}", [2.0, 1.0], seed=s, init_from=str(tmp_path / f"gone-base-{s}")) for s in (0, 1)]
    assert len(group_runs(gone)) == 1


def test_the_band_is_the_range_of_two_and_the_standard_deviation_of_three():
    two, three = np.array([[1.0, 5.0], [3.0, 4.0]]), np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 4.0]])
    np.testing.assert_allclose(band(two), [[1.0, 4.0], [3.0, 5.0]])
    np.testing.assert_allclose(band(three), [[1.0, 2 - np.sqrt(3)], [3.0, 2 + np.sqrt(3)]])


def test_the_mean_curve_interpolates_on_the_common_range(write):
    runs = [write("a-0", [8.0, 4.0, 2.0], [0, 2, 4]), write("a-1", [6.0, 3.0, 3.0], [1, 3, 9], seed=1)]
    (group,) = group_runs(runs)
    curve = mean_curve(group, "steps")
    assert (curve.name, curve.seeds) == ("a", 2)
    np.testing.assert_allclose(curve.x, [1, 2, 3, 4])
    np.testing.assert_allclose(curve.loss, [(6 + 6) / 2, (4 + 4.5) / 2, (3 + 3) / 2, (2 + 3) / 2])
    np.testing.assert_allclose(curve.low, [6, 4, 3, 2])
    np.testing.assert_allclose(curve.high, [6, 4.5, 3, 3])


def test_runs_that_never_overlap_cannot_be_averaged(write):
    runs = [write("a-0", [8.0, 4.0], [0, 2]), write("a-1", [6.0, 3.0], [3, 4], seed=1)]
    with pytest.raises(ContextReadyError, match="no training position in common"):
        mean_curve(group_runs(runs)[0])


def test_differences_are_paired_by_seed(six, write):
    extra = write("ready-7", [9.0, 9.0, 9.0], correction="add", seed=7)
    found = difference(*group_runs([*six[:3], extra, *reversed(six[3:])]), "steps")
    assert (found.first, found.second, found.seeds, found.unpaired) == ("ready", "plain", [0, 1, 2], [extra])
    np.testing.assert_allclose(found.x, [0, 1, 2])
    np.testing.assert_allclose(found.loss_SX, [[0, -0.5, -1], [0, -0.5, -2], [0, -0.5, -3]])


def test_plot_draws_one_curve_per_configuration(six, tmp_path, capsys):
    out = tmp_path / "curves.svg"
    assert main(["plot", *map(str, six), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "ready: mean of 3 seeds (ready-0, ready-1, ready-2)" in printed
    assert "plain: mean of 3 seeds" in printed
    assert "ready and plain do not cross; ready ends with the lower perplexity" in printed
    assert main(["plot", *map(str, six), "--out", str(out), "--each"]) == 0
    assert "ready-0 and plain-0 do not cross" in capsys.readouterr().out


def test_plot_draws_the_difference(six, tmp_path, capsys):
    out = tmp_path / "difference.png"
    assert main(["plot", *map(str, six), "--out", str(out), "--difference", "--x", "steps"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert (
        "Validation loss of ready minus plain at 2 training steps: -2.0000 ± 1.0000 (standard deviation over seeds); "
        "seed 0: -1.0000, seed 1: -2.0000, seed 2: -3.0000\n"
    ) in capsys.readouterr().out
    for few in (1, 2):
        assert main(["plot", *map(str, six[:few]), *map(str, six[3:]), "--out", str(out), "--difference"]) == 0
        printed = capsys.readouterr().out
        assert f"{-0.5 - 0.5 * few:.4f}" in printed
        assert printed.count("Left out") == 3 - few


def test_equal_curves_have_a_difference_of_zero(write, tmp_path):
    runs = [write("a", [8.0, 4.0], lr=1e-3), write("b", [8.0, 4.0], lr=2e-3)]
    draw_difference(difference(*group_runs(runs)), tmp_path / "zero.png")
    assert (tmp_path / "zero.png").is_file()


def test_bad_differences_are_one_sentence(six, write, tmp_path, capsys):
    other = write("other", [8.0, 7.0], lr=5e-3, seed=9)
    for runs, message in [
        (six[:3], "exactly two configurations that differ in more than the seed, but got 1: ready (ready-0, ready-1,"),
        ([*six, other], "but got 3"),
        ([six[0], other], "ready-0 and other have no seed in common"),
    ]:
        assert main(["plot", *map(str, runs), "--difference", "--out", str(tmp_path / "x.png")]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["plot", *map(str, six), "--difference", "--each"])
