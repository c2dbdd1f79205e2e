"""A short part of `make fuzz`: damaged files and odd commands are refused in a sentence, whatever they contain.

The cases run in processes of their own. Every crasher that was ever found is kept in `crashers/` and tried again.
"""

import json
from pathlib import Path

import pytest
from fuzz.cases import make_case
from fuzz.pool import Worker
from fuzz.worker import GOOD

CASES = 150
KEPT = sorted((Path(__file__).parent / "crashers").glob("*.json"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "corpus"


@pytest.fixture(scope="module")
def worker(corpus):
    worker = Worker(corpus, corpus.with_name("log"))
    yield worker
    worker.stop()


def outcome(worker, case):
    """What becomes of a case; one that is slow on a busy machine gets a second chance."""
    result = worker.run(case)
    return result if result["outcome"] in GOOD else worker.run(case)


def test_damaged_files_and_odd_commands(worker, corpus):
    for number in range(CASES):
        result = outcome(worker, make_case(corpus, number))
        assert result["outcome"] in GOOD, f"python -m fuzz --case {number}: {result}"


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_crashers_are_mended(worker, corpus, path):
    kept = json.loads(path.read_text())
    case = kept.get("case") or make_case(corpus, kept["number"])
    result = outcome(worker, case)
    assert result["outcome"] in GOOD, f"{kept['kind']} came back: {result}"


@pytest.mark.parametrize("how", ["abort", "hang", "memory", "execution", "connection", "traceback"])
def test_the_fuzzer_sees_every_kind_of_crasher(worker, how):
    """Otherwise a fuzzer that finds nothing would prove nothing."""
    case = {"loader": "misbehave", "needs": [], "edits": [], "renew": False, "words": [how]}
    if how == "hang":
        case["limit"] = 0.3
    assert worker.run(case)["outcome"] == how
