"""`crt train convert`: a pretrained model trained for real: all of it, its correction, adapters; and the controls."""

import json
import shutil

import pytest
import torch
from distributed_helpers import assert_equal_tensors, do_together, everything, went_well
from hf_finetune_helpers import arguments, make_place
from hf_helpers import KNOWN, crt, randomise, refused, some_tokens
from train_helpers import metrics as metrics_of
from train_helpers import sums
from transformers import AutoModelForCausalLM

import contextready.hf.modeling  # noqa: F401  (registers its classes)
from contextready import Transformer
from contextready.data.batches import Sequences
from contextready.data.shards import Data
from contextready.hf import finetune
from contextready.hf.backbone import HFBackbone
from contextready.hf.families import fill, their_names
from contextready.hf.finetune import start
from contextready.hf.modeling import ContextReadyForCausalLM
from contextready.measure.perplexity import parallel_scores
from contextready.runs.checkpoint import open_checkpoint, step_folder, unshard
from contextready.runs.config import PretrainedModelConfig
from contextready.runs.metrics import read_metrics
from contextready.train.objective import Objective

pytest.importorskip("peft")
# Said by peft of every layer of GPT-2, and it does as it says.
pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")

TUNES = {
    "all": {},
    "correction": {"tune": "correction"},
    "lora": {"tune": "lora", "lora_rank": 4},
    "none": {"correction": "none", "passes": 1},
    "none, lora": {"correction": "none", "passes": 1, "tune": "lora"},
    "memoryless": {"correction": "memoryless"},
    "memoryless, correction": {"correction": "memoryless", "tune": "correction"},
    "concat, lora": {"correction": "concat", "tune": "lora"},
    "block_head": {"correction": "block_head", "correction_init": "random"},
    "truncated": {"gradient": "truncated", "truncated_passes": 2},
    "implicit": {"gradient": "implicit", "adjoint_steps": 2},
    "bptt": {"gradient": "bptt", "passes": "none"},
    "recomputed": {"checkpoint_passes": "true"},
    "tied": {"pretrained": "tied"},
    "gpt2, lora": {"pretrained": "gpt2", "tune": "lora"},
}
every_run = pytest.mark.parametrize("name", TUNES)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Pretrained models on disk, and data prepared with their tokenizer."""
    return make_place(tmp_path_factory.mktemp("finetune"))


@pytest.fixture(scope="module")
def data(place):
    return place / "corpus" / "data"


@pytest.fixture(scope="module")
def runs(place):
    """All kinds of runs, four steps long."""
    for name in TUNES:
        crt(*arguments(place, place / "runs" / name, **TUNES[name]))
    return place / "runs"


@pytest.fixture(scope="module")
def folders(place, runs):
    """What `crt convert` makes of them."""
    for name in TUNES:
        crt("convert", runs / name, place / "folders" / name)
    return place / "folders"


def base_of(place, name):
    return AutoModelForCausalLM.from_pretrained(place / TUNES[name].get("pretrained", "llama"))


def trained_weights(place, runs, name):
    """The weights of a run by the names of transformers, from which those of native models differ."""
    checkpoint = open_checkpoint(runs / name)
    tensors, model = checkpoint.tensors("model"), checkpoint.model()
    is_native = type(model.backbone) is Transformer
    assert is_native == ("lora" not in name and "gpt2" not in name)
    if not is_native:
        return tensors
    lm = base_of(place, name)
    fill(lm, model.backbone)
    own = {key: tensor for key, tensor in tensors.items() if key.startswith("correction.")}
    return own | {f"backbone.lm.{key}": p.detach() for key, p in lm.named_parameters()}


def is_plain(name):
    return TUNES[name].get("correction") == "none"


@every_run
def test_only_the_right_weights_are_trained(place, runs, name):
    """Bit for bit: what is not trained is what was pretrained, and all the rest has changed."""
    trained, tune = trained_weights(place, runs, name), TUNES[name].get("tune", "all")
    pretrained = {f"backbone.lm.{key}": p.detach() for key, p in base_of(place, name).named_parameters()}
    seen = set()
    for key, tensor in trained.items():
        if key.startswith("correction."):
            continue
        if "lora_" in key:
            assert tune == "lora"
            assert "lora_A" in key or tensor.any(), f"{key} was not trained"
            continue
        original = key.replace(".base_layer.", ".")
        seen.add(original)
        assert torch.equal(tensor, pretrained[original]) == (tune != "all"), key
    assert seen == pretrained.keys()
    corrections = {key: tensor for key, tensor in trained.items() if key.startswith("correction.")}
    assert bool(corrections) == (not is_plain(name) and name != "block_head")
    if corrections:
        assert corrections["correction.ffn.down.weight"].any()
        before, after = (open_checkpoint(step_folder(runs / name, s)).tensors("model") for s in (1, 4))
        assert not any(torch.equal(before[key], after[key]) for key in corrections)
    assert any("lora_" in key for key in trained) == (tune == "lora")


@every_run
def test_moments_are_of_what_is_trained_only(runs, name):
    moments = open_checkpoint(runs / name).tensors("optimizer")
    tune = TUNES[name].get("tune", "all")
    frozen = [key for key in moments if "correction." not in key and "lora_" not in key]
    assert bool(frozen) == (tune == "all")


@pytest.mark.parametrize("name", [name for name in TUNES if name != "block_head"])
def test_training_starts_at_the_loss_of_the_original(place, data, runs, name):
    """transformers' own loss of the pretrained model, over the same windows."""
    first = read_metrics(runs / name)[0]
    assert first["step"] == 0
    windows = Sequences(Data(data, verify=()).tokens("val"), 16, "validation")
    lm, losses = base_of(place, name), []
    with torch.no_grad():
        for i in range(256 // 16):
            inputs, targets = windows.read(torch.tensor([i]).numpy())
            row = torch.cat((inputs, targets[:, -1:]), dim=1)
            losses.append(lm(row, labels=row).loss)
    assert first["val_loss"] == pytest.approx(float(torch.stack(losses).mean()), abs=1e-5)
    assert read_metrics(runs / name)[-1]["val_loss"] != first["val_loss"]


@every_run
@torch.no_grad()
def test_a_checkpoint_comes_back_as_what_was_measured(data, runs, name):
    """The loss that training wrote down is the loss of the model that the checkpoint gives."""
    checkpoint, last = open_checkpoint(runs / name), read_metrics(runs / name)[-1]
    assert (checkpoint.progress.step, last["step"]) == (4, 4)
    assert checkpoint.vocab_size == KNOWN
    if name == "bptt":
        return
    windows = Sequences(Data(data, verify=()).tokens("val"), 16, "validation")
    K = int(checkpoint.config["train"]["passes"])
    assert parallel_scores(checkpoint.model(), windows, [K], 16)[K].loss == last["val_loss"]


@every_run
@torch.no_grad()
def test_a_run_becomes_a_plain_folder(runs, folders, name):
    """Adapters are merged; transformers opens it without knowing of any."""
    model, info = AutoModelForCausalLM.from_pretrained(folders / name, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not any("lora" in key or "base_layer" in key for key in model.state_dict())
    tokens, native = some_tokens(3), open_checkpoint(runs / name).model()
    # Every pass makes more of the rounding of merged weights.
    settings = {} if is_plain(name) else {"passes": 3 if "lora" in name else 10}
    found, expected = model(tokens, **settings).logits, native(tokens, passes=settings.get("passes", 1))
    if TUNES[name].get("tune") == "lora":
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
        unmerged = base_of(runs.parent, name)(tokens).logits
        assert float((expected - unmerged).abs().max()) > 1e-2 * float(expected.abs().max())
    else:
        # The weights are equal bit for bit, but the native transformer rounds differently.
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
        weights = dict((model if is_plain(name) else model.lm).named_parameters())
        for key, tensor in trained_weights(runs.parent, runs, name).items():
            if key.startswith("backbone.lm."):
                assert torch.equal(weights[key.removeprefix("backbone.lm.")], tensor), key
    assert type(model) is (ContextReadyForCausalLM if not is_plain(name) else type(base_of(runs.parent, name)))
    assert model.generation_config.eos_token_id is None
    assert not is_plain(name) or not (folders / name / "contextready_errors.py").exists()
    assert "4 steps, 256 tokens" in (folders / name / "README.md").read_text()


def evaluation(*words):
    (found,) = json.loads(crt("eval", *words, "--tokens", "128", "--passes", "1,3", "--json"))["evaluations"]
    return {key: found[key] for key in ("parallel", "sequential")}


def losses_of(found):
    return [score["loss"] for score in (*found["parallel"].values(), found["sequential"]) if score is not None]


@pytest.mark.parametrize("name", ["all", "lora", "none", "gpt2, lora"])
def test_runs_and_folders_are_evaluated_alike(data, runs, folders, name):
    theirs = evaluation(folders / name, "--data", data, "--block-size", "16")
    assert losses_of(theirs) == pytest.approx(losses_of(evaluation(runs / name)), abs=1e-4)
    assert (theirs["sequential"] is None) == is_plain(name)


def test_a_folder_does_not_say_how_large_its_batches_were(data, folders, capsys):
    message = refused(capsys, "eval", folders / "all", "--data", data, "--sample", "2")
    assert "does not record the batch size of its training, which --sample needs" in message


@every_run
def test_runs_and_folders_write_alike(runs, folders, name):
    words = ["river stone", "--max-tokens", "6", "--seed", "1", "--solver", "sequential"]
    text = crt("generate", folders / name, *words)
    assert text.strip()
    assert crt("generate", runs / name, *words) == text


@pytest.mark.parametrize("name", ["all", "correction", "lora", "none, lora", "implicit", "gpt2, lora"])
def test_a_run_goes_on_bit_for_bit(place, runs, tmp_path, name):
    """Two steps and two more are four steps: weights, moments and curves."""
    for steps in (2, 4):
        crt(*arguments(place, tmp_path / "run", **TUNES[name] | {"steps": steps}))
    assert sums(step_folder(tmp_path / "run", 4)) == sums(step_folder(runs / name, 4))
    assert metrics_of(tmp_path / "run")[-1] == metrics_of(runs / name)[-1]


def test_a_run_of_an_earlier_version_goes_on_with_its_wrapper(place, tmp_path, monkeypatch):
    """Earlier versions trained every model as transformers computes it."""
    with monkeypatch.context() as earlier:
        earlier.setattr(finetune, "_native", lambda model: model)
        for out, steps in (("run", 2), ("whole", 4)):
            crt(*arguments(place, tmp_path / out, steps=steps))
    crt(*arguments(place, tmp_path / "run"))
    assert sums(step_folder(tmp_path / "run", 4)) == sums(step_folder(tmp_path / "whole", 4))
    assert type(open_checkpoint(tmp_path / "run").model().backbone) is HFBackbone


def test_other_settings_do_not_go_on(place, runs, tmp_path, capsys):
    shutil.copytree(runs / "all", tmp_path / "run")
    said = refused(capsys, *arguments(place, tmp_path / "run", steps=5, tune="correction"))
    assert "was trained with tune=all" in said


def test_a_converted_folder_is_trained_on(place, folders, tmp_path):
    """From a fresh one, as from the model it was made of; from a trained one, on with its correction."""
    crt("convert", place / "llama", tmp_path / "fresh", "--correction", "blind")
    crt(*arguments(place, tmp_path / "one", steps=1, pretrained=tmp_path / "fresh", correction="concat"))
    crt(*arguments(place, tmp_path / "two", steps=1, correction="concat"))
    assert metrics_of(tmp_path / "one")[-1] == metrics_of(tmp_path / "two")[-1]
    crt(*arguments(place, tmp_path / "on", steps=1, pretrained=folders / "all"))
    first = read_metrics(tmp_path / "on")[0]["val_loss"]
    assert first == pytest.approx(read_metrics(place / "runs" / "all")[-1]["val_loss"], abs=1e-6)


def test_biases_of_a_converted_folder_are_kept(place, tmp_path):
    crt("convert", place / "llama", tmp_path / "fresh", "--bias")
    crt(*arguments(place, tmp_path / "run", steps=1, pretrained=tmp_path / "fresh"))
    crt("convert", tmp_path / "run", tmp_path / "out")
    tokens, model = some_tokens(3), AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.model.correction.ffn.down.bias.any()
    with torch.no_grad():
        found, expected = model(tokens, passes=10).logits, open_checkpoint(tmp_path / "run").model()(tokens, passes=10)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_where_the_original_is_gone_the_run_is_still_whole(place, runs, tmp_path):
    shutil.copytree(place / "llama", tmp_path / "llama")
    crt(*arguments(place, tmp_path / "run", steps=1, pretrained=tmp_path / "llama"))
    expected = crt("generate", tmp_path / "run", "river stone", "--max-tokens", "5")
    shutil.rmtree(tmp_path / "llama")
    crt("convert", tmp_path / "run", tmp_path / "out")
    assert crt("generate", tmp_path / "run", "river stone", "--max-tokens", "5") == expected
    assert crt("generate", tmp_path / "out", "river stone", "--max-tokens", "5") == expected


@pytest.mark.parametrize("name", ["llama", "tied", "gpt2"])
@pytest.mark.parametrize(("gradient", "recompute"), [("unroll", False), ("unroll", True), ("bptt", False)])
def test_gradients_are_those_of_transformers_own_loss(place, gradient, recompute, name):
    """Of K=3 passes, and of the stream; in float64, so that nothing but rounding is left."""
    model = start(PretrainedModelConfig(str(place / name), correction="add")).double()
    assert (type(model.backbone) is Transformer) == (name != "gpt2")
    randomise(model, std=0.1)
    # Tokens without padding, whose embedding transformers does not train.
    row = some_tokens(2, 7).clamp(min=3)
    K = 3 if gradient == "unroll" else 99
    assert model.correction.scale != 1.0
    lm = AutoModelForCausalLM.from_pretrained(place / name)
    hf = ContextReadyForCausalLM.wrap(lm, correction_scale=model.correction.scale)
    hf.model.correction.load_state_dict(model.correction.state_dict())
    hf.double().eval()
    loss = hf(row, labels=row, passes=K, use_cache=False).loss
    loss.backward()
    expected = {key: p.grad.clone() for key, p in hf.model.named_parameters()}
    objective = Objective(model.eval(), gradient=gradient, recompute=recompute)
    found = objective.backward(row[:, :-1], row[:, 1:], K if gradient == "unroll" else None)
    assert float(found.mean) == pytest.approx(float(loss.detach()), rel=1e-6)
    for key, p in model.named_parameters():
        wanted = expected.get(key)
        if wanted is None:
            names = their_names(key.removeprefix("backbone."))
            wanted = torch.cat([expected[f"backbone.lm.{each}"] for each in names])
        torch.testing.assert_close(p.grad, wanted, rtol=1e-4, atol=1e-6, msg=key)


# Two processes.


TOGETHER = {
    (parallel, tune): {"parallel": parallel} | TUNES[tune]
    for parallel, tune in (
        *(("ddp", "correction"), ("ddp", "lora"), ("ddp", "tied")),
        *(("fsdp", "all"), ("fsdp", "correction"), ("fsdp", "tied")),
    )
}


@pytest.fixture(scope="module")
def together(place, runs):
    """Both ways of sharing the work, in one launch of two processes."""
    tasks = {
        key: {"do": "command", "arguments": arguments(place, place / "two" / " ".join(key), **changes)}
        for key, changes in TOGETHER.items()
    }
    (place / "two").mkdir()
    return do_together(place, tasks)


@pytest.mark.parametrize("key", TOGETHER, ids=" ".join)
def test_two_processes_train_as_one(place, runs, folders, together, tmp_path, key):
    parallel, tune = key
    two, one = place / "two" / " ".join(key), runs / tune
    went_well(together[key])
    assert_equal_tensors(everything(two, tmp_path), everything(one, tmp_path), rtol=0, atol=1e-4)
    assert open_checkpoint(two).sharded == (parallel == "fsdp")
    plain = unshard(two, tmp_path / "plain") if parallel == "fsdp" else two
    crt("convert", plain, tmp_path / "out")
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "out", folders / tune)]
    with torch.no_grad():
        found, expected = (model(some_tokens(3), passes=3).logits for model in models)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


def test_a_sharded_run_says_what_to_do_first(place, together, tmp_path, capsys):
    went_well(together["fsdp", "all"])
    assert "crt unshard" in refused(capsys, "convert", place / "two" / "fsdp all", tmp_path / "out")
