"""The ledger: every claim is there, with the paper's figures as printed, and judged on what was measured."""

import json
import re

import pytest

from contextready.cli.main import main
from contextready.paper.claims import claims
from contextready.paper.tables import tables
from contextready.reproduce.claims import CHECKS
from contextready.reproduce.computed import ABOUT_THE_PAPER, COMPUTED
from contextready.reproduce.ledger import as_markdown, as_text, entries
from contextready.reproduce.lines import MINIATURES
from contextready.reproduce.measured import (
    CONTEXTS,
    POINTER,
    TIMED,
    TIMING,
    pointer_findings,
    pointer_results,
    timing_findings,
    timing_table,
)
from contextready.reproduce.report import as_markdown as tables_as_markdown
from contextready.reproduce.report import table_markdown
from contextready.reproduce.runs import RUNS
from contextready.reproduce.verdicts import IN_SIGN, NOT_SEEN, NOT_TESTABLE, REPRODUCED, Verdict

from .test_measures import Records, record

PRINTED = {figure for table in tables() for row in table.rows for figure in row.figures if figure is not None}
PARALLEL = {1: 60.0, 2: 24.0, 3: 21.0, 5: 20.0, 10: 20.0}


def made_up(factor):
    """Three seeds of every run; context-ready models have `factor` times the perplexity of transformers."""
    found = []
    for key in RUNS:
        for seed in range(3):
            scale = (factor if key.startswith("d") else 1.0) * (1.0 + 0.001 * seed)
            parallel = {k: p * scale for k, p in PARALLEL.items()}
            streamed = None if key.startswith("n") else 20.0 * scale
            rates = (None,) * 3 if key.startswith("n") else (0.9, 0.6, 0.6)
            curve = [100.0, 40.0 * scale, 20.0 * scale]
            if key.endswith("-long"):
                curve += [20.0 * scale] * 4
            if key.startswith("n"):
                parallel = {1: 20.0 * scale}
            passes = 1 if key.startswith("n") else 5
            found.append(record(key, seed, curve, parallel=parallel, streamed=streamed, rates=rates, passes=passes))
    return found


@pytest.fixture(scope="module")
def ahead():
    """The ledger if every context-ready model is 4 % ahead."""
    return {entry.claim.id: entry for entry in entries({"runs": made_up(0.96)})}


def test_every_claim_is_checked_or_says_why_not():
    ids = [claim.id for claim in claims()]
    covered = [*CHECKS, *COMPUTED, *POINTER, *TIMING, *ABOUT_THE_PAPER]
    assert sorted(covered) == sorted(ids)
    assert [entry.claim.id for entry in entries({"runs": []})] == ids


def test_checks_name_the_tables_that_have_their_runs():
    for id, check in CHECKS.items():
        runs = {run for table in check.tables for run in MINIATURES[table].runs}
        for part in check.parts:
            assert set(part.measure.runs) <= runs, (id, part.what)


def test_the_perplexities_that_effects_are_compared_with_are_printed_in_the_tables():
    of_notebooks = {"40.59", "40.17"}
    for id, check in CHECKS.items():
        for part in check.parts:
            match = re.search(r"\(([\d.]+) against ([\d.]+)\)$", part.paper)
            for figure in match.groups() if match else ():
                assert figure in PRINTED | of_notebooks, (id, figure)


def test_claims_without_runs_are_not_testable_and_computed_ones_hold():
    found = {entry.claim.id: entry for entry in entries({"runs": []})}
    for id in CHECKS:
        assert found[id].verdict == Verdict(NOT_TESTABLE)
    for id in COMPUTED:
        assert found[id].verdict == Verdict(REPRODUCED), id
    for id in ABOUT_THE_PAPER:
        assert found[id].note
        assert found[id].verdict == Verdict(NOT_TESTABLE)


def test_verdicts_follow_the_direction(ahead):
    assert ahead["d5-beats-n12"].verdict == Verdict(REPRODUCED)
    assert ahead["d23-against-n24"].verdict == Verdict(IN_SIGN)
    assert ahead["streaming-exact"].verdict == Verdict(REPRODUCED)
    assert ahead["conversion-gain"].verdict == Verdict(REPRODUCED)
    # Context-ready models should lose at C=50 and C=74.
    assert ahead["small-widths"].verdict == Verdict(NOT_SEEN)
    # All models with a correction are alike here.
    assert ahead["add-against-blind"].verdict == Verdict(NOT_SEEN)
    behind = {entry.claim.id: entry for entry in entries({"runs": made_up(1.04)})}
    for id in ("d5-beats-n12", "d12-beats-n13", "token-matched", "conversion-gain", "dedicated-network"):
        assert behind[id].verdict == Verdict(NOT_SEEN)


def test_controls_have_verdicts_and_do_not_count(ahead):
    parts = {finding.what: finding for finding in ahead["d5-beats-n12"].findings}
    control = parts["D=2 C=144 against N=6 C=96"]
    assert control.is_control
    assert control.verdict == Verdict(IN_SIGN)
    assert not parts["D=2 C=144 against N=6 C=96, 1 head"].is_control


def test_the_ledger_shows_figures_seeds_and_commands(ahead):
    text = as_markdown({"runs": made_up(0.96)})
    row = next(line for line in text.splitlines() if "D=2 C=144 against N=3 C=136" in line)
    assert "-3.7 % (36.38 against 37.76)" in row
    assert re.search(r"-4\.0 ± 0\.0 % +\| 3 +\| reproduced +\|", row)
    assert "Command: `crt reproduce main --seeds 0,1,2`." in text
    assert "How a verdict is found" in text
    short = as_text({"runs": made_up(0.96)})
    assert len(re.findall(r"^\| [a-z]", short, flags=re.MULTILINE)) == len(claims()) + 1


def test_every_line_of_every_table_is_filled():
    records = Records(made_up(0.96))
    for name, miniature in MINIATURES.items():
        lines = table_markdown(name, records).splitlines()[2:]
        ours = [line for line in lines if not line.startswith("| *")]
        assert len(ours) == len(miniature.lines)
        assert not any("not run" in line for line in ours)
        assert all(line.rstrip().endswith("3     |") or "| 3 " in line for line in ours), name
    assert table_markdown("width", Records([])) is None
    assert "### efficiency (Table 2)" in tables_as_markdown(list(MINIATURES), made_up(0.96))


SMALL = {"hops": 4, "levels": 5, "solved_at": None}
ROWS = [
    *(
        SMALL | {"layers": 1, "ready": True, "seed": s, "levels_solved": 5, "step": 700, "solved_at": [100, 100, 300]}
        for s in range(3)
    ),
    *(
        SMALL | {"layers": n, "ready": False, "seed": s, "levels_solved": min(n, 4), "step": 2500}
        for n in (1, 2, 4)
        for s in range(3)
    ),
    *(
        {"layers": 1, "ready": True, "hops": h, "seed": 0, "levels": h + 1, "levels_solved": s, "step": 9000}
        | {"solved_at": None}
        for h, s in ((8, 7), (12, 13))
    ),
]


def test_pointer_chasing_is_judged_by_its_levels():
    (solved,) = pointer_findings("pointer-all-levels", ROWS)
    assert (solved.verdict, solved.seeds) == (Verdict(REPRODUCED), 3)
    (stairs,) = pointer_findings("pointer-staircase", ROWS)
    assert (stairs.verdict, stairs.ours) == (Verdict(IN_SIGN), "N=1: 1, N=2: 2, N=4: 4")
    failed = [row | {"levels_solved": 4} if row["ready"] and row["seed"] == 1 else row for row in ROWS]
    assert pointer_findings("pointer-all-levels", failed)[0].verdict == Verdict(NOT_SEEN)
    flat = [row | {"levels_solved": 2} for row in ROWS]
    assert pointer_findings("pointer-staircase", flat)[0].verdict == Verdict(NOT_SEEN)
    for claim in POINTER:
        assert pointer_findings(claim, []) == []


def test_levels_are_learned_in_order_if_none_is_solved_before_a_lower_one():
    (wave,) = pointer_findings("pointer-wave", ROWS)
    assert (wave.verdict, wave.ours) == (Verdict(IN_SIGN), "; ".join(["100, 100, 300"] * 3))
    for broken in ([100, 300, 200], [None, 100, 100]):
        rows = [row | {"solved_at": broken} if row["ready"] and row["seed"] == 2 else row for row in ROWS]
        assert pointer_findings("pointer-wave", rows)[0].verdict == Verdict(NOT_SEEN)
    unfinished = [row | {"solved_at": [100, None, None]} for row in ROWS[:1]]
    assert pointer_findings("pointer-wave", unfinished)[0].verdict == Verdict(IN_SIGN, preliminary=True)


def test_the_largest_number_of_hops_counts():
    (found,) = pointer_findings("pointer-20-hops", ROWS)
    assert (found.verdict, found.ours) == (Verdict(IN_SIGN, preliminary=True), "13 / 13 at step 9,000")
    assert pointer_findings("pointer-20-hops", ROWS[:-1])[0].verdict == Verdict(NOT_SEEN, preliminary=True)


def test_results_on_pointer_chasing_are_read_from_its_report(tmp_path):
    outcome = {"accuracy": [1.0, 0.5], "levels_solved": 1, "step": 100, "solved_at": [50, None]}
    rows = [
        {
            "part": part,
            "answers": answers,
            "config": {"model": {"layers": n, "correction": c}, "task": {"hops": hops}},
            "seeds": {"0": outcome},
        }
        for part, answers, n, c, hops in (
            ("table", "masked", 1, "add", 4),
            ("table", "masked", 2, None, 4),
            ("table", "visible", 2, None, 4),
            ("parallel", "masked", 1, "add", 4),
            ("growth", "masked", 1, "add", 8),
        )
    ]
    (tmp_path / "report.json").write_text(json.dumps(rows))
    found = pointer_results(tmp_path / "report.json")
    assert [(row["layers"], row["ready"], row["levels"], row["hops"]) for row in found] == [
        (1, True, 2, 4),
        (2, False, 2, 4),
        (1, True, 2, 8),
    ]
    assert found[0]["solved_at"] == [50, None]
    assert pointer_results(tmp_path / "nothing.json") == []


def test_decoding_speeds_are_compared_in_pairs():
    seconds = {"owt-d1-c2048": 1.0, "owt-n6-c1088": 2.6, "owt-d5-c1120": 2.0, "owt-n12-c768": 2.1}
    timing = {
        "decode": [
            {"label": name, "context": context, "seconds": value * growth}
            for name, value in seconds.items()
            for context, growth in zip(CONTEXTS, (1.0, 1.1), strict=True)
        ]
    }
    one, five = timing_findings("decoding-speed", timing)
    assert (one.ours, one.verdict) == ("2.60×", Verdict(REPRODUCED))
    assert (five.ours, five.verdict) == ("1.05×", Verdict(NOT_TESTABLE))
    assert [found.ours for found in timing_findings("flat-latency", timing)] == ["+10.0 %"] * len(TIMED)
    assert "| owt-d1-c2048 | 919" in timing_table(timing)
    assert timing_findings("decoding-speed", None) == []


def test_compiled_passes_are_compared_with_both_kinds_of_five():
    seconds = {"K=2": 2.0, "K=5": 5.1, "K=2 compiled": 1.0, "K=5 compiled": 2.5}
    results = {"runs": made_up(0.96), "passes": {"seconds": {"D=2 C=256": seconds}}}
    (entry,) = [one for one in entries(results) if one.claim.id == "two-passes-compiled"]
    _, plain, control = entry.findings
    assert (plain.ours, plain.is_control, plain.verdict) == ("5.10×", False, Verdict(IN_SIGN))
    assert (control.ours, control.is_control) == ("2.50×", True)


def test_bad_result_files_are_refused(tmp_path, capsys):
    for name, content in (("empty.json", "{}"), ("list.json", "[1]"), ("runs.json", '{"runs": [{"key": "a"}]}')):
        (tmp_path / name).write_text(content)
        assert main(["reproduce", "ledger", "--results", str(tmp_path / name)]) == 2
        assert "is not a result file of crt reproduce" in capsys.readouterr().err
    assert main(["reproduce", "ledger", "--results", str(tmp_path / "none.json")]) == 2
    assert "There is no result file" in capsys.readouterr().err
    assert main(["reproduce", "ledger", "--out", str(tmp_path)]) == 2
    assert "There is no finished run" in capsys.readouterr().err
