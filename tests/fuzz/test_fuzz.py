"""A short part of `make fuzz`: damaged files and odd commands are refused in a sentence, whatever they contain."""

from fuzz.cases import make_case
from fuzz.pool import twice
from fuzz.worker import BAD, GOOD

CASES = 150


def test_damaged_files_and_odd_commands(worker, corpus):
    for number in range(CASES):
        result = twice(worker, make_case(corpus, number))
        assert result["outcome"] in GOOD, f"python -m fuzz --case {number}: {result}"


def test_the_fuzzer_sees_every_kind_of_crasher(worker):
    """Otherwise a fuzzer that finds nothing would prove nothing."""
    for how in BAD:
        case = {"loader": "misbehave", "needs": [], "edits": [], "renew": False, "words": [how]}
        if how == "hang":
            case["limit"] = 0.3
        assert worker.run(case)["outcome"] == how
