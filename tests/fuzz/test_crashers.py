"""Every file and command that ever crashed is refused now: `make fuzz` keeps one of each kind in `crashers/`."""

import json
from pathlib import Path

from fuzz.cases import make_case
from fuzz.pool import twice
from fuzz.worker import GOOD


def test_crashers_do_not_come_back(worker, corpus):
    kept = sorted((Path(__file__).parent / "crashers").glob("*.json"))
    assert kept
    for path in kept:
        crasher = json.loads(path.read_text())
        result = twice(worker, crasher.get("case") or make_case(corpus, crasher["number"]))
        assert result["outcome"] in GOOD, f"python -m fuzz --replay {path.name} ({crasher['kind']}): {result}"
