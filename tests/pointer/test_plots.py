"""The plots of pointer chasing: drawn from real records, as PNG and SVG."""

import json

import numpy as np
import pytest

from contextready.errors import ContextReadyError
from contextready.pointer.plots import Staircase, Wave, draw_staircases, draw_waves, level_records, read_wave


def write_records(run, records):
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_wave_is_read_from_the_validations(tmp_path):
    run = tmp_path / "run"
    more = {"seconds": 1.0, "levels_solved": 0, "solved": False}
    first, last = ({"step": step, "accuracy": [a, b]} | more for step, a, b in ((0, 0.1, 0.2), (50, 1.0, 0.3)))
    write_records(run, [first, {"step": 10, "loss": 1.0}, last])
    wave = read_wave(run)
    assert (wave.name, wave.steps_S.tolist(), wave.accuracy_SL.tolist()) == ("run", [0, 50], [[0.1, 0.2], [1.0, 0.3]])
    assert len(level_records(run)) == 2


def test_a_run_on_text_has_no_levels(tmp_path):
    write_records(tmp_path / "run", [{"step": 0, "val_loss": 1.0}])
    assert level_records(tmp_path / "run") == []
    with pytest.raises(ContextReadyError, match="has no validation on pointer chasing yet"):
        read_wave(tmp_path / "run")


def test_records_with_missing_keys_are_damaged(tmp_path):
    write_records(tmp_path / "run", [{"step": 4, "accuracy": [1.0], "solved": True, "levels_solved": 1}])
    with pytest.raises(ContextReadyError, match="is damaged: the validation at step 4 has no 'seconds'"):
        level_records(tmp_path / "run")


def are_plots(paths):
    png, svg = paths
    return png.read_bytes().startswith(b"\x89PNG") and "<svg" in svg.read_text() and png.stem == svg.stem


def test_waves_of_any_lengths_are_drawn_below_each_other(tmp_path):
    waves = [
        Wave("long", np.array([0, 50, 100]), np.random.rand(3, 5)),
        Wave("short", np.array([0, 20]), np.random.rand(2, 13)),
        Wave("only one validation", np.array([0]), np.random.rand(1, 2)),
    ]
    assert are_plots(draw_waves(waves, tmp_path / "new" / "wave", chance=0.1))
    text = (tmp_path / "new" / "wave.svg").read_text()
    assert all(name in text for name in ("long", "short", "only one validation"))


def test_staircases_are_drawn_side_by_side(tmp_path):
    stairs = [
        Staircase("answers masked", {1: [1, 1], 2: [2, 1]}, {1: [5, 5]}, {1: 1, 2: 2}),
        Staircase("answers visible", {1: [1]}, {}, {}),
    ]
    assert are_plots(draw_staircases(stairs, 5, tmp_path / "stairs"))
    text = (tmp_path / "stairs.svg").read_text()
    assert all(title in text for title in ("answers masked", "answers visible", "limit of the receptive field"))
