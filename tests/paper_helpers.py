"""The source of the paper, read independently of the package: its tables cell by cell, and its sections as text."""

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

SOURCE = Path(__file__).parents[1] / ".." / "shared" / "paper.tex"
REASON = "the source of the paper is not part of this repository (expected at ../shared/paper.tex)"

SYMBOLS = {
    "~": " ",
    r"\times": "×",
    r"\sim": "~",
    r"\to": "→",
    r"\Delta": "Δ",
    r"\hat{L}": "L̂",
    r"\lceil": "⌈",
    r"\rceil": "⌉",
    r"\min": "min",
    r"\approx": "≈",
    r"\%": "%",
    r"\_": "_",
    r"\!": "",
    r"\ ": " ",
    "^2": "²",
    "^*": "*",
    "10^{-4}": "10⁻⁴",
    "--": "–",
}
BLANK = ("", "–-")
"""A cell without a figure: empty, or a dash (---)."""


@dataclass
class TexTable:
    number: str | None
    label: str | None
    section: str
    headings: list[str]
    rows: list[list[str | None]]


def plain(tex):
    """TeX as plain text, with one space between words."""
    for command, symbol in SYMBOLS.items():
        # \to is not the beginning of \toprule.
        end = r"(?![A-Za-z])" if re.fullmatch(r"\\[A-Za-z]+", command) else ""
        tex = re.sub(re.escape(command) + end, lambda _, symbol=symbol: symbol, tex)
    tex = re.sub(r"\\(textbf|mathbf|texttt|emph|text|footnotesize|small)(?![A-Za-z])", "", tex)
    return " ".join(re.sub(r"[${}]", "", tex).split()).replace("⌈ ", "⌈").replace(" ⌉", "⌉")


def sections():
    """The text of every section and subsection by its label, and the abstract."""
    tex = SOURCE.read_text(encoding="utf-8")
    found = {"abstract": re.search(r"\\begin\{abstract\}(.*?)\\end\{abstract\}", tex, flags=re.DOTALL)[1]}
    label = None
    for part in re.split(r"(?=\\(?:sub)?section\*?\{)", tex)[1:]:
        heading = re.search(r"\A\\(?:sub)?section\*?\{[^\n]*\n\\label\{([^}]+)\}", part)
        # A subsection without a label is part of the section before it.
        label = heading[1] if heading else label
        found[label] = found.get(label, "") + part
    return found


def tables():
    """Every table of the paper in order, numbered as LaTeX does."""
    found, appendix, number = [], False, 0
    for section, text in sections().items():
        if section.startswith("app:") and not appendix:
            appendix, number = True, 0
        for body in re.findall(r"\\begin\{table\}(.*?)\\end\{table\}", text, flags=re.DOTALL):
            captioned = r"\caption" in body
            number += captioned
            label = re.search(r"\\label\{(tab:[^}]+)\}", body)
            headings, rows = _cells(re.search(r"\\toprule(.*?)\\end\{tabular\}", body, flags=re.DOTALL)[1])
            name = f"{'A' if appendix else ''}{number}" if captioned else None
            found.append(TexTable(name, label and label[1], section, headings, rows))
    return found


def _cells(tabular):
    lines = [re.sub(r"\\(mid|bottom)rule|\\cmidrule\{[^}]*\}", "", line).strip() for line in tabular.split(r"\\")]
    headings, *rows = (
        [_cell(cell) for cell in line.split("&")] for line in lines if line and r"\multicolumn" not in line
    )
    for above, row in pairwise(rows):
        # A group in the first column (\multirow) is printed once for all of its rows.
        row[0] = row[0] or above[0]
    return [heading or "" for heading in headings], rows


def _cell(tex):
    text = plain(re.sub(r"\\multirow\{\d+\}\{\*\}", "", tex))
    return None if text in BLANK else text
