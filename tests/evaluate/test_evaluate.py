"""`crt eval` on a model that was really trained, for a few steps."""

import csv
import io
import json

import numpy as np
import pytest
import torch

from contextready import ContextReadyError
from contextready.cli.main import main
from contextready.data.batches import Sequences
from contextready.data.prepare import Preparation, prepare
from contextready.data.shards import Data
from contextready.evaluate.evaluate import evaluate
from contextready.measure.contraction import empirical_rate
from contextready.measure.perplexity import parallel_scores, sequential_score
from contextready.runs.checkpoint import open_checkpoint
from contextready.runs.config import build_run
from contextready.train.trainer import train

T = 16


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    words = [f"{a}{b}" for a in ("hou", "riv", "lon", "man") for b in ("se", "er", "g", "sion", "y")]
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(words, 60)) for _ in range(40)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    prepare(folder / "data", Preparation([str(folder / "text.jsonl")], [], val_fraction=0.3, vocab_size=300))
    shape = {"vocab_size": 300, "width": 16, "layers": 1, "heads": 2, "block_size": T, "batch_size": 4, "steps": 30}
    run = {"data": str(folder / "data"), "lr": 1e-2, "warmup": 2, "eval_every": 10, "save_every": 10, "keep": 9}
    train(build_run(shape | run | {"out": str(folder / "ready"), "correction": "add", "passes": 4}))
    train(build_run(shape | run | {"out": str(folder / "plain"), "extra_ffn": True}))
    return folder


def test_an_evaluation_is_made_of_the_scores(trained):
    model, data = open_checkpoint(trained / "ready").model(), Data(trained / "data")
    found = evaluate(model, data, T)
    sequences = Sequences(data.tokens("val"), T)
    assert found.sequences == sequences.count
    assert found.tokens == sequences.count * T > 200
    assert sorted(found.parallel) == [1, 2, 3, 5, 10]
    expected = parallel_scores(model, sequences, [1, 5, 10])
    for k in (1, 5, 10):
        np.testing.assert_allclose(found.parallel[k].nll_N, expected[k].nll_N)
    np.testing.assert_allclose(found.sequential.nll_N, sequential_score(model, sequences).nll_N)
    assert found.correction[0] == pytest.approx(expected[1].perplexity - expected[5].perplexity)
    assert found.sequential_gap[0] == pytest.approx(found.sequential.perplexity - expected[10].perplexity)
    tokens, _ = sequences.read(np.arange(min(sequences.count, 8192 // T)))
    rate = empirical_rate(model, tokens, 5)
    assert (found.rate, found.norm_rate) == (pytest.approx(rate.rate), pytest.approx(rate.norm_rate))


def test_a_sample_is_random_batches_of_the_training_batch_size(trained, capsys):
    data, model = Data(trained / "data"), open_checkpoint(trained / "ready").model()
    assert main(["eval", str(trained / "ready"), "--sample", "3", "--passes", "1,4", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["evaluations"]
    assert (found["sample"], found["sequences"], found["tokens"]) == (3, 12, 12 * T)
    tokens = data.tokens("val")
    starts = np.random.default_rng(42).integers(len(tokens) - T, size=12)
    rows = torch.from_numpy(np.stack([tokens.read(int(start), T + 1) for start in starts]).astype(np.int64))
    with torch.inference_mode():
        for k, score in found["parallel"].items():
            logits = model(rows[:, :-1], int(k))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            assert score["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["sequential"]["loss"] == pytest.approx(found["parallel"]["4"]["loss"], rel=0.05)
    assert main(["eval", str(trained / "ready"), "--sample", "3", "--passes", "1,4", "--csv"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert float(row["sample_perplexity_k4"]) == pytest.approx(found["parallel"]["4"]["perplexity"])
    assert float(row["channel_rate"]) == found["channel_rate"]
    assert "perplexity_k4" not in row
    assert main(["eval", str(trained / "ready"), "--sample", "3"]) == 0
    assert "perplexity on a sample of 3 random batches, 192 tokens in windows of 16" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sample", "0"], "--sample must be at least 1, but got 0"),
        (["--sample", "2", "--tokens", "64"], "--tokens does not apply"),
        (["--sample", "2", "--tasks", "bits=x.txt"], "which --tasks does not use"),
    ],
)
def test_a_sample_that_cannot_be_drawn(trained, capsys, words, message):
    assert main(["eval", str(trained / "ready"), *words]) == 2
    assert message in capsys.readouterr().err


def test_bits_per_byte_count_the_bytes_of_the_text(trained):
    data = Data(trained / "data")
    model = open_checkpoint(trained / "plain").model()
    found = evaluate(model, data, T)
    counts = data.manifest["splits"]["val"]
    bits = found.parallel[1].loss / np.log(2) * counts["tokens"] / counts["bytes"]
    assert found.as_record()["parallel"]["1"]["bits_per_byte"] == pytest.approx(bits)
    assert sorted(found.parallel) == [1]
    assert found.sequential is None
    assert found.correction is None
    assert found.rate is None


def test_training_mode_comes_back(trained):
    model = open_checkpoint(trained / "ready").model().train()
    evaluate(model, Data(trained / "data"), T, passes=[1], sequential=False, tokens=T)
    assert model.training
    assert torch.is_grad_enabled()


def test_eval_prints_a_table_of_both(trained, capsys):
    assert main(["eval", str(trained / "ready"), str(trained / "plain"), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for heading in ("K=1 ", "K=10", "streaming", "bits/byte", "Corr.", "L̂", "tokens in windows of 16"):
        assert heading in out


def test_eval_as_json_is_the_evaluation(trained, capsys):
    words = ["eval", str(trained / "ready"), "--json", "--passes", "1,3", "--tokens", "64", "--device", "cpu"]
    assert main(words) == 0
    (record,) = json.loads(capsys.readouterr().out)["evaluations"]
    assert record["tokens"] == 64
    assert sorted(record["parallel"]) == ["1", "3"]
    assert record["checkpoint"] == "step-00000030"
    assert record["rate_corrections"] == 4
    model = open_checkpoint(trained / "ready").model()
    expected = evaluate(model, Data(trained / "data"), T, passes=[1, 3], tokens=64)
    assert record["sequential"]["perplexity"] == pytest.approx(expected.sequential.perplexity)
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["evaluations"] == [record]


def test_eval_as_csv_has_the_figures_of_the_json(trained, capsys):
    words = ["eval", str(trained / "ready"), str(trained / "plain"), "--tokens", "64", "--device", "cpu"]
    assert main([*words, "--json"]) == 0
    ready, plain = json.loads(capsys.readouterr().out)["evaluations"]
    assert main([*words, "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["model"] for row in rows] == [str(trained / "ready"), str(trained / "plain")]
    for k in ("1", "2", "3", "5", "10"):
        assert float(rows[0][f"perplexity_k{k}"]) == ready["parallel"][k]["perplexity"]
        assert float(rows[0][f"perplexity_k{k}_error"]) == ready["parallel"][k]["perplexity_error"]
    assert float(rows[0]["perplexity_streaming"]) == ready["sequential"]["perplexity"]
    assert [float(rows[0][key]) for key in ("correction", "correction_error")] == ready["correction"]
    assert [float(rows[0][key]) for key in ("streaming_gap", "streaming_gap_error")] == ready["sequential_gap"]
    assert (float(rows[0]["rate"]), float(rows[0]["norm_rate"])) == (ready["rate"], ready["norm_rate"])
    assert float(rows[0]["bits_per_byte"]) == ready["sequential"]["bits_per_byte"]
    assert float(rows[1]["bits_per_byte"]) == plain["parallel"]["1"]["bits_per_byte"]
    assert (rows[1]["perplexity_streaming"], rows[1]["rate"], rows[1]["tokens"]) == ("", "", "64")


def test_eval_as_markdown_is_one_table(trained, capsys):
    words = ["eval", str(trained / "ready"), str(trained / "plain"), "--passes", "1,5", "--device", "cpu"]
    assert main([*words, "--markdown"]) == 0
    heading, rule, ready, plain = capsys.readouterr().out.splitlines()
    assert heading.startswith("| model | K=1 | K=5 | streaming | Corr. |")
    assert rule.startswith("| --- | ---: |")
    assert ready.startswith("| ready | ")
    assert plain.startswith("| plain | ")
    assert {line.count("|") for line in (heading, rule, ready, plain)} == {heading.count("|")}


def test_best_and_single_checkpoints(trained, capsys):
    best = open_checkpoint(trained / "ready", best=True)
    assert best.progress.step == open_checkpoint(trained / "ready").progress.best_step
    folder = trained / "ready" / "checkpoints" / "step-00000010"
    assert main(["eval", str(folder), "--json", "--passes", "1", "--no-sequential", "--device", "cpu"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["evaluations"]
    assert record["checkpoint"] == "step-00000010"
    assert record["sequential"] is None


def test_validation_while_training_is_the_evaluation(trained):
    lines = [json.loads(line) for line in (trained / "ready" / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "val_loss" in line][-1]
    model = open_checkpoint(trained / "ready").model()
    found = evaluate(model, Data(trained / "data"), T, passes=[4], sequential=False)
    assert last["step"] == 30
    assert last["val_loss"] == pytest.approx(found.parallel[4].loss, rel=1e-6)
    assert last["val_loss_error"] == pytest.approx(found.parallel[4].loss_error, rel=1e-6)


def test_bad_requests_are_one_sentence(trained, tmp_path, capsys):
    other = tmp_path / "text.txt"
    other.write_text("Quite another text with other words in it.\n\n" * 50)
    prepare(tmp_path / "other", Preparation([str(other)], [str(other)], vocab_size=280))
    ready = str(trained / "ready")
    for words, message in [
        ([ready, "--data", str(tmp_path / "other")], "another tokenizer"),
        ([str(tmp_path / "nothing")], "no run or checkpoint"),
        ([str(tmp_path / "other")], "is not a run or checkpoint"),
        ([ready, "--passes", "1,x"], "not a list of numbers"),
        ([ready, "--passes", "0"], "at least 1"),
        ([ready, "--block-size", "1000000"], "longer than the validation data"),
        ([ready, "--tokens", "3"], "--tokens must be at least 16, the length of one sequence, but got 3"),
        ([ready, "--device", "toaster"], "is not available"),
    ]:
        assert main(["eval", *words]) == 2, words
        err = capsys.readouterr().err
        assert message in err, err
        assert err.count("\n") == 1


def test_no_sequence_no_score(trained):
    with pytest.raises(ContextReadyError, match="but got none"):
        evaluate(open_checkpoint(trained / "ready").model(), Data(trained / "data"), T, passes=[])
