"""The ledger: every claim of the paper with the paper's figure, ours, and a verdict by rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contextready.errors import ContextReadyError
from contextready.files import read_json
from contextready.paper.claims import Claim, claims
from contextready.reproduce.checks import Part
from contextready.reproduce.claims import CHECKS
from contextready.reproduce.computed import ABOUT_THE_PAPER, COMPUTED, Finding
from contextready.reproduce.measured import (
    COMPILED,
    MORE_HOPS,
    POINTER,
    TIMING,
    passes_findings,
    pointer_findings,
    timing_findings,
)
from contextready.reproduce.measures import Records
from contextready.reproduce.verdicts import NOT_TESTABLE, RULE, Verdict, worst
from contextready.study.tables import spread
from contextready.train.trials import aligned

Results = Mapping[str, Any]
"""A result file: the runs of the miniature, and what was measured on pointer chasing and decoding speed."""


@dataclass(frozen=True)
class Entry:
    """One claim with what was found."""

    claim: Claim
    findings: tuple[Finding, ...]
    verdict: Verdict
    command: str
    note: str


def read_results(path: Path) -> Results:
    """Read a result file."""
    if not path.is_file():
        raise ContextReadyError(
            f"There is no result file {path}; make it with crt reproduce all, or name one with --results."
        )
    results = read_json(path)
    runs = results.get("runs") if isinstance(results, dict) else None
    known = {"key", "seed", "model", "curve", "evaluation"}
    if not isinstance(runs, list) or not all(isinstance(run, dict) and known <= run.keys() for run in runs):
        raise ContextReadyError(f"{path} is not a result file of crt reproduce; name another one with --results.")
    return dict(results)


def entries(results: Results) -> list[Entry]:
    """Return all claims in the order of the paper's data."""
    records = Records(results["runs"])
    return [_entry(claim, records, results) for claim in claims()]


def _entry(claim: Claim, records: Records, results: Results) -> Entry:
    note, findings, command = "", list[Finding](), ""
    if claim.id in CHECKS:
        check = CHECKS[claim.id]
        findings = [_finding(part, records) for part in check.parts]
        seeds = max((finding.seeds or 0 for finding in findings), default=0)
        chosen = f" --seeds {','.join(map(str, range(seeds)))}" if seeds > 1 else ""
        if claim.id == COMPILED:
            findings += passes_findings(results.get("passes"))
        command, note = "; ".join(f"crt reproduce {table}{chosen}" for table in check.tables), check.note
    elif claim.id in COMPUTED:
        find, command = COMPUTED[claim.id]
        findings = find()
    elif claim.id in POINTER:
        findings = pointer_findings(claim.id, results.get("pointer", []))
        more = claim.id == MORE_HOPS
        command = f"crt reproduce pointer{' --part growth' if more else ' --seeds 0,1,2'}"
        size = "more hops with the same layer" if more else "5 levels"
        note = f"In miniature: {size}, answers masked; docs/pointer.md has the details."
    elif claim.id in TIMING:
        findings, command = timing_findings(claim.id, results.get("timing")), "crt reproduce timing"
        note = "Measured on a CPU, where the memory bandwidth limits decoding; the paper has an A100."
    if claim.id in ABOUT_THE_PAPER:
        note = ABOUT_THE_PAPER[claim.id]
    verdict = worst([finding.verdict for finding in findings if not finding.is_control])
    return Entry(claim, tuple(findings), verdict, command, note)


def _finding(part: Part, records: Records) -> Finding:
    values = part.values(records)
    unit = f" {part.unit}" if part.unit else ""
    ours = f"{spread(values, part.digits, signed=part.unit != '')}{unit}" if values else ""
    return Finding(part.what, part.paper, ours, part.judge(values), len(values), part.is_control)


def summary(found: Sequence[Entry]) -> str:
    """How many claims have each verdict."""
    counts: dict[str, int] = {}
    for entry in found:
        counts[entry.verdict.word] = counts.get(entry.verdict.word, 0) + 1
    few = sum(entry.verdict.preliminary for entry in found)
    words = ", ".join(f"{count} {word}" for word, count in sorted(counts.items(), key=lambda item: -item[1]))
    return f"{len(found)} claims: {words}. {few} are preliminary (°)."


def as_markdown(results: Results) -> str:
    """The ledger as Markdown: a line for each claim, the rule, and then every claim with its parts and controls."""
    found = entries(results)
    parts = [summary(found), _short_table(found), "How a verdict is found:", RULE]
    return "\n\n".join([*parts, *(_details(entry) for entry in found)])


def _details(entry: Entry) -> str:
    """One claim in words, what was measured for it, and the command."""
    title = f"**{entry.claim.id}** ({entry.verdict}). {entry.claim.claim}"
    lines = [["what was measured", "paper", "ours", "seeds", "verdict"]]
    for finding in entry.findings:
        what = f"control: {finding.what}" if finding.is_control else finding.what
        seeds = "" if not finding.seeds else str(finding.seeds)
        verdict = "" if finding.verdict.word == NOT_TESTABLE else str(finding.verdict)
        lines.append([what, finding.paper, finding.ours or "not run", seeds, verdict])
    commands = ", ".join(f"`{command}`" for command in entry.command.split("; ")) if entry.command else ""
    notes = [entry.note, *entry.claim.notes, f"Command: {commands}." if commands else ""]
    about = " ".join(text for text in notes if text)
    return "\n\n".join(text for text in (title, aligned(lines) if len(lines) > 1 else "", about) if text)


def _short_table(found: Sequence[Entry]) -> str:
    lines = [["claim", "paper", "ours", "seeds", "verdict"]]
    for entry in found:
        first = next((finding for finding in entry.findings if finding.ours and not finding.is_control), None)
        cells = ["", "", ""] if first is None else [first.paper, first.ours, str(first.seeds or "")]
        lines.append([entry.claim.id, *cells, str(entry.verdict)])
    return aligned(lines)


def as_text(results: Results) -> str:
    """The ledger in short: one line for each claim."""
    found = entries(results)
    return f"{_short_table(found)}\n\n{summary(found)}"
