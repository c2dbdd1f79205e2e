"""The notebook runs from top to bottom, and what it shows in the repository comes from such a run."""

import json
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "quickstart.ipynb"


def texts(notebook):
    """All text that the code cells print or display."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    lines = [output.get("text", output.get("data", {}).get("text/markdown", "")) for output in outputs]
    return "\n".join("".join(line) for line in lines)


def check_results(printed):
    """The correction helps, and parallel passes converge to the stream."""
    perplexity = {int(k): float(value) for k, value in re.findall(r"K = +(\d+): perplexity ([\d.]+)", printed)}
    (streaming,) = (float(value) for value in re.findall(r"streaming: perplexity ([\d.]+)", printed))
    assert sorted(perplexity) == list(range(1, 11))
    assert perplexity[10] == pytest.approx(streaming, rel=1e-3)
    assert perplexity[1] > 1.1 * streaming
    (gain,) = re.findall(r"raises the log-probability of the sentence by (-?\d+\.\d)", printed)
    assert float(gain) > 0


def test_the_stored_notebook_is_complete():
    text = NOTEBOOK.read_text()
    assert len(text) < 400_000
    assert not re.search(r"/(home|root|tmp|Users|work)/", text), "a path of the machine that ran it"
    notebook = json.loads(text)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    for address in re.findall(r"\]\(([^)#]+)", "".join(line for cell in notebook["cells"] for line in cell["source"])):
        assert (NOTEBOOK.parent / address).is_file(), address
    check_results(texts(notebook))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Jupyter's own
def test_the_notebook_runs(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    folder = tmp_path / "work"
    folder.mkdir()
    nbclient.NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": str(folder)}}).execute()
    check_results(texts(notebook))
    assert (folder / "runs" / "quickstart" / "model" / "checkpoints").is_dir()
