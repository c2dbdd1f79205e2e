"""The Python example in the documentation runs."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reproduction.md"


def test_the_example_of_the_guide_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    exec(compile(example, PAGE.name, "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "owt-d12-c1024 32.28"
    assert any(line.startswith("streaming-exact {'largest difference in PPL': '0.01'}") for line in lines)
