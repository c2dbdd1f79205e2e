"""`crt export`: what it writes, measures, prints and refuses."""

import json
import shutil

import pytest
from train_helpers import make_data, run

pytest.importorskip("ggml")
pytest.importorskip("gguf")

from contextready.cli.main import main
from contextready.errors import ContextReadyError
from contextready.infer.ggml.export import Export
from contextready.infer.ggml.file import read_gguf
from contextready.runs.checkpoint import open_checkpoint

BLOCK = 16
"""Tokens per sequence in these runs."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a tiny model, which tests must not change."""
    folder = tmp_path_factory.mktemp("trained")
    run(make_data(folder), folder / "run", steps=2)
    return folder / "run"


@pytest.fixture
def crt(capsys):
    """Run a command; returns the exit code, standard output and standard error."""

    def call(*words):
        capsys.readouterr()
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def strict(text):
    """The only JSON document in a text; NaN and Infinity are not allowed."""

    def refuse(constant):
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def test_json_has_the_file_and_the_perplexities(trained, crt, tmp_path):
    file = tmp_path / "model.gguf"
    code, out, _ = crt("export", trained, file, "--type", "q4_0", "--tokens", 4 * BLOCK, "--json")
    assert code == 0
    found = strict(out)
    assert (found["out"], found["bytes"]) == (str(file), file.stat().st_size)
    assert (found["type"], found["tokens"]) == ("q4_0", 4 * BLOCK)
    assert found["perplexity_cost"] == pytest.approx(found["perplexity"] - found["original_perplexity"])
    assert found["perplexity_cost_error"] > 0


def test_json_has_null_for_what_was_not_measured(trained, crt, tmp_path):
    _, out, _ = crt("export", trained, tmp_path / "none.gguf", "--tokens", 0, "--json")
    assert strict(out)["perplexity"] is None
    # One sequence has no standard error.
    _, out, _ = crt("export", trained, tmp_path / "one.gguf", "--tokens", BLOCK, "--json")
    found = strict(out)
    assert found["perplexity"] > 1
    assert found["perplexity_cost_error"] is None
    _, out, _ = crt("export", trained, tmp_path / "text.gguf", "--tokens", BLOCK)
    assert "nan" not in out
    assert "Perplexity on 16 validation tokens" in out


def test_an_existing_file_is_kept_unless_told_otherwise(trained, crt, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_text("mine")
    # Refused before any work: the run does not even exist.
    code, out, err = crt("export", tmp_path / "nowhere", file)
    assert (code, out) == (2, "")
    assert err == f"crt export: {file} already exists; delete it, choose another name, or pass --overwrite.\n"
    assert file.read_text() == "mine"
    assert crt("export", trained, file, "--tokens", 0, "--overwrite")[0] == 0
    assert read_gguf(file).type == "f16"
    (tmp_path / "folder.gguf").mkdir()
    code, _, err = crt("export", trained, tmp_path / "folder.gguf", "--overwrite")
    assert code == 2
    assert "is a folder; choose another name" in err


def test_a_file_that_another_process_has_written_meanwhile_is_kept(trained, tmp_path):
    out = tmp_path / "model.gguf"
    export = Export(trained, out, tokens=0)
    out.write_bytes(b"of another process")
    with pytest.raises(ContextReadyError, match=r"model\.gguf already exists"):
        export.write()
    assert out.read_bytes() == b"of another process"
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_progress_is_on_standard_error(trained, crt, tmp_path, monkeypatch):
    monkeypatch.setattr("contextready.cli.progress.EVERY", 0.0)
    _, out, err = crt("export", trained, tmp_path / "a.gguf", "--tokens", 4 * BLOCK)
    assert "Writing a.gguf: 0.0 MB" in err
    assert "Scoring the original: 64 tokens of 64 tokens (100 %)" in err
    assert "Scoring a.gguf: 64 tokens of 64 tokens (100 %)" in err
    assert len(out.splitlines()) == 2
    _, out, err = crt("export", trained, tmp_path / "b.gguf", "--tokens", 4 * BLOCK, "--json")
    assert len(out.splitlines()) == 1
    assert "Scoring b.gguf" in err


def test_callbacks_count_every_byte_and_every_token(trained, tmp_path):
    counted, totals = {}, {}

    def advance(stage, total, done):
        counted[stage] = counted.get(stage, 0) + done
        totals[stage] = total

    export = Export(trained, tmp_path / "model.gguf", "f32", tokens=3 * BLOCK)
    report = export.measure(export.write(advance), advance)
    assert counted == totals
    assert report.tokens == counted["Scoring the original"] == counted["Scoring model.gguf"] == 3 * BLOCK
    weights = sum(weight.data.nbytes for weight in read_gguf(tmp_path / "model.gguf").weights.values())
    assert counted["Writing model.gguf"] == weights


def test_the_library_prints_nothing(trained, tmp_path, capsys):
    export = Export(trained, tmp_path / "model.gguf", tokens=BLOCK)
    export.measure(export.write())
    assert capsys.readouterr() == ("", "")


def test_a_run_without_a_tokenizer(trained, crt, tmp_path):
    """It can be exported; `crt generate` then says what to do."""
    shutil.copytree(open_checkpoint(trained).folder, tmp_path / "checkpoint")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "checkpoint" / name).unlink()
    manifest = tmp_path / "checkpoint" / "manifest.json"
    described = json.loads(manifest.read_text())
    described["files"] = {name: one for name, one in described["files"].items() if not name.startswith("tokenizer")}
    manifest.write_text(json.dumps(described))
    file = tmp_path / "model.gguf"
    assert crt("export", tmp_path / "checkpoint", file, "--tokens", 0)[0] == 0
    code, out, err = crt("generate", file, "river")
    assert (code, out) == (2, "")
    assert "export a run whose data has a tokenizer" in err
    assert "--" not in err


def test_bad_requests_are_refused_before_anything_is_written(trained, tmp_path):
    for changes, sentence in (
        ({"out": tmp_path / "model.bin"}, "must have the extension .gguf"),
        ({"type": "q8"}, "Unknown type 'q8'; did you mean 'q8_0'?"),
        ({"tokens": -1}, r"--tokens must be at least 0 \(0 measures nothing\), but got -1"),
        ({"data": tmp_path / "nowhere"}, "nowhere"),
    ):
        request = {"run": trained, "out": tmp_path / "model.gguf"} | changes
        with pytest.raises(ContextReadyError, match=sentence):
            Export(**request)
    assert list(tmp_path.iterdir()) == []
