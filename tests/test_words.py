"""The words that users read: phrases that native readers stumble over do not come back."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [
    *(ROOT / "src").rglob("*.py"),
    *(ROOT / "src").rglob("*.yaml"),
    *(path for path in (ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "pyproject.toml")),
]
PHRASES = {
    r"(?<!there )(?<!which )\b(is|are) no (?!(longer|more|less|fewer|larger|better|faster|worse)\b)": "is not a",
    r"\b(goes|going) on\b|\bgo on\b": "resume, continue",
    r"\bto be had\b": "is available",
    r"\b(model|models|format|folder|folders) of Hugging Face\b": "Hugging Face model",
    r"\blikeliest\b": "most likely",
    r"\bfrom where that\b": "falls back to",
    r"\b(?<!head)rooms\b|\broom may\b": "packages",
    r"\bone a (line|row|token)\b": "one per line",
    r"\btells? of\b": "reports",
    r"\blikewise\b": "too",
    r"contextready\[": "the packages by name: the project is not on a package index",
}


@pytest.mark.parametrize("phrase", PHRASES)
def test_no_one_stumbles_over(phrase):
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(phrase, line, flags=re.IGNORECASE)
        and not (path.name == "pyproject.toml" and "contextready[" in line)
    ]
    assert not hits, f"Write instead: {PHRASES[phrase]}\n" + "\n".join(hits)
