"""The command: what a user types, what it prints, and how it refuses."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from contextready.cli.main import main
from contextready.measure.exactness import run_exact


@pytest.fixture
def crt(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")

    def run(*words):
        code = main(words)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_info_prints_every_figure_of_the_paper(crt):
    code, out, _ = crt("info")
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    expected = {
        "owt-d5-c1120": ["121M ✓", "157M ✓"],
        "owt-d6-c1024": ["117M ✓"],
        "owt-n6-c1088": ["120M ✓", "155M ✓"],
        "owt-n12-c768": ["110M ✓", "134M ✓"],
        "owt-n2-c1888": ["146M ✓"],
        "owt-n24-c1088": ["376M ✓"],
        "owt-d6-c2048": ["401M ✓"],
        "owt-n12-c1536": ["389M ✓"],
        "owt-n6-c2176": ["411M ✓"],
        "owt-d1-c2048": ["149M ✓", "215M ✓"],
        "owt-n12-c1024": ["144 ✓"],
        "owt-n13-c1024": ["156 ✓"],
        "owt-d12-c1024": ["152 ✓"],
        "owt-n14-c1024": ["168 ✓"],
        "owt-n24-c1024": ["288 ✓"],
        "owt-d23-c1024": ["284 ✓"],
        "wiki-d3-c446": ["44 ✓"],
        "wiki-n3-c446": ["36 ✓", "7.2M ✓*"],
        "wiki-d2-c446": ["32 ✓"],
        "wiki-d2-c446-concat": ["36 ✓"],
        "wiki-d3-c446-concat": ["48 ✓"],
        "wiki-n6-c768": ["42.5M ✓*"],
    }
    for name, figures in expected.items():
        assert all(figure in rows[name] for figure in figures), rows[name]
    assert "(paper: 1.6×)" in out
    assert "The cache of owt-d1-c2048 is 3.2× smaller than that of owt-n6-c1088" in out
    for column in ("C²", "FLOPs", "exact", "params", "KV bytes"):
        assert f"{column} = " in out
    assert "M (paper: " not in out


def test_info_shows_figures_that_differ_from_the_paper(monkeypatch):
    from dataclasses import replace

    from contextready.cli import info
    from contextready.runs import catalog

    model = catalog.PAPER_MODELS["owt-d5-c1120"]
    monkeypatch.setitem(catalog.PAPER_MODELS, "owt-d5-c1120", replace(model, flops="122M"))
    entry = catalog.entries(["owt-d5-c1120"])[0]
    assert info._compare(catalog.millions(entry.paper_macs), entry.paper.flops) == "121M (paper: 122M)"


def test_info_of_any_configuration(crt):
    words = ["vocab_size=4096", "width=128", "layers=1", "heads=4", "correction=concat", "window=64"]
    code, out, _ = crt("info", *words, "--json", "--dtype", "bfloat16", "--context", "1000")
    assert code == 0
    (model,) = json.loads(out)["models"]
    assert model["macs_per_token"] == (12 + 12) * 128**2 + 4096 * 128
    assert model["macs_per_token_exact"] == model["macs_per_token"] + 2 * 64 * 128
    assert model["kv_bytes_per_token"] == 2 * 128 * 2
    assert model["state_bytes_at_context"] == 64 * 2 * 128 * 2 + 2 * 128 * 2
    assert model["paper"] is None


def test_info_in_detail_and_changed(crt):
    code, out, _ = crt("info", "owt-d1-c2048")
    assert code == 0
    assert "149,422,080" in out
    assert "parameters 215M" in out
    _, out, _ = crt("info", "wiki-n6-c768")
    assert "(no head)" in out
    assert "42,467,328  (42.5M)" in out
    code, out, _ = crt("info", "owt-d1-c2048", "correction=concat", "--json")
    (model,) = json.loads(out)["models"]
    assert model["width_squared_coefficient"] == 24
    assert model["paper"] is None  # changed, so the paper has no figures for it


def test_info_of_several_models_at_one_context_and_dtype(crt):
    code, out, _ = crt("info", "owt-d1-c2048", "owt-n6-c1088", "--context", "4096", "--dtype", "bfloat16")
    assert code == 0
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    # C², FLOPs ✓, exact = FLOPs + 2 · 4096 · C · layers, parameters ✓, 2 · C · layers · 2 bytes
    assert rows["owt-d1-c2048"][1:] == ["20", "149M", "✓", "166M", "215M", "✓", "8,192"]
    assert rows["owt-n6-c1088"][1:] == ["72", "120M", "✓", "174M", "155M", "✓", "26,112"]
    _, one, _ = crt("info", "owt-d1-c2048", "--context", "4096", "--dtype", "bfloat16")
    for figure in ("166,199,296", "16,777,216", "8,192", "33,562,624"):
        assert figure in one


def test_a_reader_that_leaves_causes_no_traceback():
    command = [sys.executable, "-m", "contextready", "info", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_an_interrupt_causes_no_traceback(crt, monkeypatch):
    from contextready.cli import info

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "print_info", interrupted)
    assert crt("info") == (130, "", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["info", "owt-d5-c1121"], "did you mean 'owt-d5-c1120'?"),
        (["info", "widht=5"], "did you mean 'width'?"),
        (["info", "vocab_size=10", "width=6", "layers=1", "heads=2"], "odd head size of 3"),
        (["info", "owt-d5-c1120", "correction=plus"], "Unknown correction 'plus'"),
        (["info", "owt-d5-c1120", "heads=3"], "not divisible by heads=3"),
        (["info", "owt-d5-c1120", "--context", "0"], "--context must be at least 1, but got 0"),
        (["exact", "--tokens", "2"], "--tokens must be at least 8, but got 2"),
        (["exact", "--width", "12"], "--width a multiple of 8"),
        (["exact", "--seed", "99999999999999999999999"], "--seed between 0 and 2**63 - 1"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(crt, words, message):
    code, out, err = crt(*words)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize("words", [["sing"], ["info", "--dtype", "int3"]])
def test_bad_options_exit_with_2(crt, words):
    with pytest.raises(SystemExit) as stop:
        crt(*words)
    assert stop.value.code == 2


@pytest.mark.parametrize("verb", ["info", "exact", "demo", "data", "train", "eval", "plot"])
def test_help_explains_every_option(crt, verb, capsys):
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) > 8
    assert all(len(line) <= 100 for line in out.splitlines())


def test_help_lists_every_setting(capsys):
    from dataclasses import fields

    from contextready import ModelConfig

    with pytest.raises(SystemExit):
        main(["info", "--help"])
    out = capsys.readouterr().out
    for field in fields(ModelConfig):
        (line,) = [line for line in out.splitlines() if line.startswith(f"  {field.name} ")]
        assert len(line.split()) > 2, line  # with the words of its docstring
    assert "including itself; none means all" in " ".join(out.split())


def test_exact_shows_what_it_measured(crt):
    code, out, _ = crt("exact", "--tokens", "16", "--width", "16")
    assert code == 0
    assert "16 of 16" in out
    assert "one function" in out
    for column in ("change", "error", "exact positions", "L̂"):
        assert f"{column} = " in out


def test_exact_as_json_is_what_it_measured(crt):
    code, out, _ = crt("exact", "--tokens", "9", "--width", "16", "--seed", "3", "--json")
    assert code == 0
    (line,) = out.splitlines()
    expected = {"layers": 1, "width": 16, "seed": 3} | asdict(run_exact(tokens=9, layers=1, width=16, seed=3))
    assert json.loads(line, parse_constant=pytest.fail) == expected


@pytest.mark.parametrize(
    ("verb", "texts"),
    [
        ("plot", ["(default: tokens)", "(default: curves.png)"]),
        ("info", ["(default: float32)", "(default: the model's block size, or 1024)"]),
        ("eval", ["evaluate only the first N validation tokens (default: all)", "(default: 1,2,3,5,10)"]),
        ("exact", ["(default: 48)", "(default: 64)"]),
    ],
)
def test_help_shows_examples_first_and_defaults(capsys, verb, texts):
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert out.index("examples: crt") < out.index("options: -h")
    for text in texts:
        assert text in out


@pytest.mark.parametrize("layers", [1, 3])
def test_exact_measures_what_it_claims(layers):
    result = run_exact(tokens=24, layers=layers, width=32, seed=1)
    assert result.errors[-1] < 1e-12 < 1e-3 < result.errors[4]
    assert result.exact == [min(24, k - 1) for k in range(1, 26)]
    assert result.changes[-1] < 1e-3 * result.changes[0]
    assert result.cumulative_error > 0.1


def test_installed_command_and_module_run():
    done = subprocess.run(
        [sys.executable, "-m", "contextready", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("contextready ")


def test_the_core_benchmark_ends_with_one_json_line():
    """Runs it for real, on few rounds; the figures are not judged here."""
    command = [sys.executable, str(Path(__file__).parent.parent.parent / "benchmarks" / "core.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert {row["D"] for row in result["unroll"]} == {1, 4}
    assert all(row["measured_over_predicted"] > 0 for row in result["unroll"])
    assert all(row["step_over_products"] > 0 for row in result["step"])


@pytest.mark.slow
def test_the_gradients_benchmark_ends_with_one_json_line():
    command = [sys.executable, str(Path(__file__).parent.parent.parent / "benchmarks" / "gradients.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert {row["mode"].split()[0].strip(",") for row in result["rows"]} == {"unroll", "truncated", "implicit", "bptt"}
    assert all(row["units"] > 0 and row["bytes"] > 0 and row["planned"] > 0 for row in result["rows"])
    assert all(row["ratio"] > 0 for row in result["streams"])


@pytest.mark.slow
def test_the_versions_benchmark_compares_a_checkout_with_itself():
    root = Path(__file__).parent.parent.parent
    if Path(sys.prefix).resolve() != (root / ".venv").resolve():
        pytest.skip("it runs the .venv of a checkout, and these tests run in another environment")
    command = [sys.executable, str(root / "benchmarks" / "versions.py"), str(root), "--pairs", "1", "--rounds", "2"]
    done = subprocess.run([*command, "--seconds", "0"], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["tasks"]) > 20
    assert all(row["other_over_this"] > 0 for row in result["tasks"])
    assert result["import_over_torch"] > 0


@pytest.mark.parametrize(
    ("line", "expected"),
    [("crt gen", {"generate"}), ("crt generate --tempe", {"--temperature"}), ("crt data s", {"show"})],
)
def test_the_shell_completes_verbs_and_options(line, expected):
    """As bash asks: the line is in the environment, and the answer goes to file descriptor 8."""
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m contextready 8>&1 9>/dev/null >/dev/null"],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
    )
    assert {word.strip() for word in done.stdout.splitlines()} == expected, done.stderr


def test_the_command_alone_prints_its_help(crt):
    code, out, err = crt()
    assert (code, err) == (0, "")
    assert "crt data prepare" in out
    assert "verbs:" in out
