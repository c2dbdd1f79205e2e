"""Recipes and settings: all of them load and build, every key can be changed, and bad values give a clear error."""

import dataclasses
import json
import re

import pytest
import torch
from train_helpers import TINY, recipe_file, words

from contextready.cli.main import main
from contextready.errors import ContextReadyError
from contextready.formats import limits
from contextready.model.context_ready import build_model
from contextready.model.cost import account
from contextready.runs.config import (
    MODEL_KEYS,
    PASSES_FROM_SCRATCH,
    PRETRAINED_KEYS,
    TRAIN_KEYS,
    PretrainedModelConfig,
    RunConfig,
    TrainConfig,
    build_run,
)
from contextready.runs.paper_models import PAPER_MODELS
from contextready.runs.recipes import load_recipe, paper_experiments, recipe_names, resolve
from contextready.runs.run_checks import check_run_memory
from contextready.train.plan import make_plan

SMALL = (
    *("convert", "demo-d1", "demo-n1-ffn", "mini-d1", "mini-d1-paper", "mini-finetune", "mini-n1", "mini-n1-ffn"),
    *("miniature", "pointer-mini", "task-convert", "task-mini"),
)
PRETRAINED = ("convert", "task-convert")


def test_the_recipes_are_the_small_ones_and_the_papers():
    names = recipe_names()
    assert set(names[: len(SMALL)]) == set(SMALL)
    assert len(names) == len(set(names)) > 60


@pytest.mark.parametrize("name", [name for name in recipe_names() if name not in PRETRAINED])
def test_every_recipe_resolves_and_builds(data, name):
    learns_text = load_recipe(name).get("task") is None
    run = resolve(name, [f"data={data}", "init_from=none"] if learns_text else [])
    with torch.device("meta"):
        model = build_model(run.model)
    assert sum(p.numel() for p in model.parameters()) == account(run.model).parameters
    assert run.train.out == f"runs/{name}"
    if run.model.correction is None:
        assert run.train.passes == "1"
    elif run.train.gradient == "bptt":
        assert run.train.passes is None
    else:
        # Only our own recipes start as transformers.
        assert run.train.pass_schedule.least > 1 or run.train.passes == PASSES_FROM_SCRATCH
        assert run.train.pass_schedule.most > 1


def test_the_recipe_for_pretrained_models(data):
    run = resolve("convert", ["pretrained=some/model", f"data={data}"])
    assert run.model == PretrainedModelConfig("some/model")
    assert (run.train.passes, run.train.out) == ("2@0.9,2..3@0.1", "runs/convert")
    words = {"correction": "concat", "correction_init": "random", "tune": "lora", "lora_rank": "3"}
    words |= {"correction_scale": "0.1", "correction_gain": "scalar"}
    assert {"pretrained", *words} == set(PRETRAINED_KEYS)
    changed = resolve("convert", ["pretrained=some/model", *(f"{key}={value}" for key, value in words.items())])
    assert changed.model == PretrainedModelConfig("some/model", "concat", "random", 0.1, "scalar", "lora", 3)


@pytest.mark.parametrize("recipe", ["convert", "mini-d1"])
def test_without_a_correction_the_recipes_K_is_one(data, recipe):
    more = ["pretrained=some/model"] if recipe == "convert" else []
    run = resolve(recipe, ["correction=none", f"data={data}", *more])
    assert (run.model.correction, run.train.passes) == (None, "1")
    with pytest.raises(ContextReadyError, match="passes=3 needs a correction"):
        resolve(recipe, ["correction=none", "passes=3", f"data={data}", *more])


def test_every_model_of_the_paper_is_in_an_experiment():
    listed = {model for settings in paper_experiments().values() for model in settings["models"]}
    assert listed == set(PAPER_MODELS)


def test_a_models_name_alone_means_the_first_experiment(data):
    for name, paper in PAPER_MODELS.items():
        run = resolve(name, [] if name.startswith("pointer-") else [f"data={data}", "init_from=none"])
        # Timed with 16 heads, trained with one.
        heads = 1 if name == "owt-n12-c768" else paper.config.heads
        expected = dataclasses.replace(paper.config, correction_init=run.model.correction_init, heads=heads)
        assert run.model == expected
    assert load_recipe("owt-d1-c2048") == load_recipe("k10-fixed/owt-d1-c2048")
    assert load_recipe("owt-d5-c1120")["out"] == "runs/main-85m/owt-d5-c1120"


def test_the_papers_experiments_have_their_figures():
    assert load_recipe("k10-random/owt-d1-c2048")["passes"] == "2..10"
    fixed = resolve("k10-fixed/owt-d1-c2048", [])
    assert (fixed.train.passes, fixed.train.gradient, fixed.train.block_size) == ("10", "unroll", 1024)
    for depth in (1, 2, 3, 6):
        plain, converted = (resolve(f"token-matched/owt-{kind}{depth}-c1024", []).train for kind in "nd")
        start = resolve(converted.init_from.removeprefix("runs/"), []).train
        assert (plain.init_from, start.sequences_per_step) == (None, plain.sequences_per_step)
        tokens = [train.steps * train.tokens_per_step for train in (plain, start, converted)]
        assert [round(count, -6) for count in tokens] == [1_126_000_000, 409_000_000, 717_000_000]
    tuned = resolve("finetune/owt-d12-c1408", [])
    assert tuned.train.init_from == "runs/pretrain/owt-n12-c1408"
    assert tuned.model.correction_init == "zero"
    for name in ("finetune/owt-d12-c1408", "finetune/owt-d12-c1024", "finetune/owt-d24-c1024"):
        origin = load_recipe(load_recipe(name)["init_from"].removeprefix("runs/"))
        shape = {key: origin[key] for key in ("width", "layers", "heads", "vocab_size")}
        assert shape == {key: load_recipe(name)[key] for key in shape}


@pytest.mark.parametrize(("small", "large"), [("demo-d1", "demo-n1-ffn"), ("mini-d1", "mini-n1-ffn")])
def test_the_small_pairs_cost_and_train_the_same(data, small, large):
    ours, theirs = (resolve(name, [f"data={data}", "vocab_size=4096"]) for name in (small, large))
    assert account(ours.model).macs == account(theirs.model).macs
    for key in ("lr", "block_size", "batch_size", "steps", "warmup", "eval_every", "eval_tokens", "seed"):
        assert getattr(ours.train, key) == getattr(theirs.train, key)


OTHER = {
    "gradient": "truncated",
    "parallel": "fsdp",
    "truncated_passes": 2,
    **{"data": "elsewhere", "out": "there", "init_from": "none", "block_size": "8", "batch_size": "3"},
    **{
        "accumulate": "2",
        "steps": "1_000",
        "passes": "4..7",
        "correction_lr": "2",
        "convergence_weight": "0.1",
        "lr": "3e-4",
        "schedule": "cosine",
    },
    **{"min_lr": "0.2", "warmup": "9", "weight_decay": "0.01", "beta1": "0.8", "beta2": "0.99", "clip": "2.5"},
    **{"decay": "all", "eps": "1e-6", "head_bias": "true", "attention_dropout": "0.1", "init": "torch"},
    **{"dropout_at": "embedding", "rope": "llama3", "rope_factor": "8", "rope_low": "2", "rope_high": "8"},
    **{"rope_length": "64", "no_rope_every": "2", "norm": "rms", "norm_eps": "1e-6", "ffn": "swiglu"},
    **{"ffn_width": "40", "kv_heads": "1", "head_width": "6", "qk_norm": "true", "qkv_bias": "true"},
    "tied_embeddings": "true",
    **{"precision": "bf16", "compile": "true", "checkpoint_passes": "yes", "seed": "5", "eval_every": "11"},
    **{"eval_tokens": "none", "save_every": "12", "keep": "4", "log_every": "3", "tensorboard": "1"},
    **{"wandb": "mine", "device": "cpu", "verify_data": "false", "vocab_size": "500", "width": "24", "layers": "2"},
    **{"heads": "3", "window": "6", "extra_ffn": "true", "dropout": "0.5", "bias": "true"},
    **{"correction": "concat", "correction_init": "random", "correction_scale": "0.3", "correction_gain": "channel"},
}


def test_every_setting_can_be_changed():
    assert set(OTHER) | {"adjoint_steps", "adjoint_tolerance", "rope_base"} == {*MODEL_KEYS, *TRAIN_KEYS}
    assert resolve("mini-d1", ["vocab_size=300", "rope_base=500"]).model.rope_base == 500.0
    run = resolve("mini-d1", [f"{key}={value}" for key, value in OTHER.items()])
    found = run.as_dict()["model"] | run.as_dict()["train"]
    default = resolve("mini-d1", ["vocab_size=300"])
    unchanged = default.as_dict()["model"] | default.as_dict()["train"]
    same = {key for key in found if found[key] == unchanged[key]}
    assert same == {"init_from", "gradient", "adjoint_steps", "adjoint_tolerance", "rope_base"}
    words = ["gradient=implicit", "adjoint_steps=2", "adjoint_tolerance=0.5"]
    other = resolve("mini-d1", ["vocab_size=300", *words]).train
    assert (other.gradient, other.adjoint_steps, other.adjoint_tolerance) == ("implicit", 2, 0.5)
    assert (found["steps"], found["lr"], found["window"], found["eval_tokens"]) == (1000, 3e-4, 6, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mini-d2"], "Unknown recipe 'mini-d2'; did you mean 'mini-d1'?"),
        (["owt-d5-c1121"], "owt-d5-c1120"),
        (["nowhere.yaml"], "There is no recipe file nowhere.yaml"),
        (["mini-d1", "widht=5"], "Unknown setting 'widht'; did you mean 'width'?"),
        (["mini-d1", "stepz=5"], "Unknown setting 'stepz'; did you mean 'steps'?"),
        (["mini-d1", "steps"], "'steps' is not a setting; write it as key=value"),
        (["mini-d1", "steps=5", "steps=6"], "'steps' is set twice"),
        (["mini-d1", "steps=many"], "steps must be a whole number, but got many"),
        (["mini-d1", "steps=1.5"], "steps must be a whole number, but got 1.5"),
        (["mini-d1", "lr=fast"], "lr must be a number, but got fast"),
        (["mini-d1", "compile=maybe"], "compile must be true or false, but got maybe"),
        (["mini-d1", "steps=0"], "steps must be at least 1, but got 0"),
        (["mini-d1", "lr=nan"], "lr must be greater than 0 and finite, but got nan"),
        (["mini-d1", "lr=0"], "lr must be greater than 0 and finite, but got 0.0"),
        (["mini-d1", "beta2=1"], "beta2 must be at least 0 and less than 1, but got 1.0"),
        (["mini-d1", "weight_decay=inf"], "weight_decay must be at least 0 and finite, but got inf"),
        (["mini-d1", "eps=0"], "eps must be greater than 0 and finite, but got 0.0"),
        (["mini-d1", "decay=none"], "decay=none is unknown; choose one of: matrices, all"),
        (["mini-d1", "authors=true"], "authors=true applies to the recipes of the paper, not to mini-d1"),
        (["owt-d5-c1120", "authors=yes"], "authors must be true or false, but got yes"),
        (["mini-d1", "seed=-1"], "seed must be from 0 to 2**63 - 1, but got -1"),
        (["mini-d1", "schedule=cosin"], "did you mean 'cosine'?"),
        (["mini-d1", "precision=fp16"], "precision=fp16 is unknown"),
        (["mini-d1", "passes=6..5"], "passes=6..5 must be from 1 to 100,000, with the smaller number first"),
        (["mini-d1", "min_passes=6"], "min_passes=6 needs passes too; write both as one setting, passes=2..5"),
        (["mini-n1", "passes=5"], "passes=5 needs a correction"),
        (["mini-d1", "device=tpu"], "device=tpu is not available on this machine"),
        (["mini-d1", "vocab_size=10"], "vocab_size=10 is too small for"),
        (["mini-d1", "block_size=1000000"], "block_size=1000000 is longer than"),
        ([], "Name a recipe, for example: crt train mini-d1"),
    ],
)
def test_nonsense_is_one_sentence_and_code_2(data, tmp_path, capsys, arguments, message):
    rest = [f"data={data}", f"out={tmp_path / 'run'}"] if arguments else []
    settings = arguments[1:] if "vocab_size=10" in arguments else [*arguments[1:], "vocab_size=300"]
    assert main(["train", *arguments[:1], *(settings if arguments else []), *rest]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    "setting", ["min_lr=1.5", "seed=18446744073709551616", "lr=inf", "weight_decay=inf", "beta1=1.0", "clip=0"]
)
def test_numbers_out_of_range_are_refused_too(data, tmp_path, capsys, setting):
    settings = words(data, tmp_path / "run", steps=1, schedule="cosine")
    settings = [word for word in settings if word.partition("=")[0] != setting.partition("=")[0]]
    assert main(["train", recipe_file(tmp_path), *settings, setting]) == 2
    assert f"{setting.partition('=')[0]} must be " in capsys.readouterr().err


def write(folder, text):
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_a_recipe_of_the_users(data, tmp_path):
    lines = [f"{key}: {value}" for key, value in TINY.items() if key != "vocab_size"]
    recipe = write(tmp_path, "\n".join([f"data: {data}", "lr: 2e-4", *(x for x in lines if not x.startswith("lr"))]))
    run = resolve(recipe, ["steps=7"])
    assert (run.train.lr, run.train.steps, run.train.out) == (2e-4, 7, "runs/mine")
    assert run.model.vocab_size == json.loads((data / "manifest.json").read_text())["vocab_size"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: [1, 2]", r"steps must be a whole number, but got \[1, 2\]"),
        ("steps: true", "steps must be a whole number, but got True"),
        ("steps: 1.5", "steps must be a whole number, but got 1.5"),
        ("lr: {a: 1}", "lr must be a number"),
        ("stepz: 3", "did you mean 'steps'"),
        ("a: b: c", "is not valid YAML"),
        ("- 1", "contains no settings"),
        ("", "contains no settings"),
    ],
)
def test_a_wrong_recipe_of_the_users_is_refused(data, tmp_path, text, message):
    with pytest.raises(ContextReadyError, match=message):
        resolve(write(tmp_path, text), [f"data={data}", "width=16", "layers=1", "heads=2"])


LIMITED = {
    **{"block_size": 2**24, "batch_size": 2**20, "accumulate": 10**6, "steps": 99_999_999},
    **{"truncated_passes": 100_000, "adjoint_steps": 100_000, "warmup": 10**8},
    **{"eval_every": 10**9, "eval_tokens": 10**12, "save_every": 10**9, "keep": 10**6, "log_every": 10**9},
}


def test_every_whole_number_of_the_training_has_a_limit():
    numbers = {field.name for field in dataclasses.fields(TrainConfig) if field.type in (int, int | None)}
    assert numbers == {*LIMITED, "seed"}
    for name, most in LIMITED.items():
        mode = {"truncated_passes": "truncated", "adjoint_steps": "implicit"}.get(name, "unroll")
        assert getattr(TrainConfig("data", "out", gradient=mode, **{name: most}), name) == most
        for value in (most + 1, 10**5000):
            with pytest.raises(ContextReadyError, match=f"^{name} must be at most {most:,}, but got "):
                TrainConfig("data", "out", gradient=mode, **{name: value})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("out:", "out is empty; name a folder, for example out=runs/mine"),
        ("out: ''", "out is empty"),
        ("out: [a]", r"out must be text, but got \['a'\]; write the name in quotes"),
        ("out: no", "out must be text, but got False; write the name in quotes"),
        ("out: 12:30", "out must be text, but got 750"),
        ('out: "a\\0b"', "out contains a null character"),
        ("data:", "data is empty; name a folder, for example data=data/mini"),
        ("data: {a: 1}", "data must be text"),
        ("data: 2024", "data must be text, but got 2024"),
        ("init_from: ''", "init_from is empty"),
        ("init_from: [7]", "init_from must be text"),
        ("pretrained: ''", "pretrained is empty"),
        ("wandb: ''", "wandb is empty; name a Weights & Biases project"),
        ("wandb: ' '", "wandb is empty"),
        ("wandb: 7", "wandb must be text, but got 7"),
        ("correction: [add]", "correction must be text"),
        ("correction: {add: 1}", "correction must be text"),
        ("task: [pointer]", "is unknown; did you mean 'pointer'"),
        ("task:", "task=None is unknown"),
        ("gradient: []", "gradient must be text"),
        ("width:", "width must be a whole number, but got None"),
        ("heads: '3x'", "heads must be a whole number, but got 3x"),
        ("steps: 0x" + "f" * 5000, "steps must be at most 99,999,999, but got a number with more than 15 digits"),
        ("lr: 0x" + "f" * 5000, "lr must be a number, but got a number with more than 15 digits"),
        ("lr: .nan", "lr must be greater than 0 and finite, but got nan"),
        ("window: 4611686018427387904", "window must be at most 2,147,483,647"),
        ("k_min: 2\nmin_passes: 3", "k_min and min_passes are the same setting"),
        ("steps: 1\nsteps: 2", "sets 'steps' twice"),
        ("? [a, b]\n: 1", "is not valid YAML"),
        ("1: 2", "contains no settings"),
        ("true: 2", "contains no settings"),
        ("a: &a [*a]", "alias that refers to itself"),
        ("steps: !!python/object/apply:os.getcwd []", "is not valid YAML"),
    ],
    ids=lambda value: value[:30],
)
def test_a_hostile_recipe_is_one_sentence(data, tmp_path, text, message, capsys):
    base = {"data": f"'{data}'", "width": 16, "layers": 1, "heads": 2, "out": f"'{tmp_path / 'run'}'"}
    rest = "".join(f"{key}: {value}\n" for key, value in base.items() if not text.startswith(f"{key}:"))
    recipe = write(tmp_path, rest + text)
    for line in (["train", recipe, "--dry-run"], ["train", recipe], ["plan", recipe]):
        assert main(line) == 2
        err = capsys.readouterr().err
        assert re.search(message, err)
        assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_run_that_the_memory_cannot_hold_is_refused(data, tmp_path, monkeypatch):
    config = resolve(recipe_file(tmp_path), words(data, tmp_path / "run"))
    number = account(config.model).parameters
    for on_cpu, sharded, copies in ((True, False, 4), (False, False, 1), (True, True, 1)):
        if sharded:
            config = dataclasses.replace(config, train=dataclasses.replace(config.train, parallel="fsdp"))
        monkeypatch.setattr(limits, "total_memory", lambda: 4 * copies * number - 1)  # noqa: B023
        with pytest.raises(ContextReadyError, match=f"Training {number:,} parameters .* would take"):
            check_run_memory(config, 2, on_cpu)
        monkeypatch.setattr(limits, "total_memory", lambda: 4 * copies * number)  # noqa: B023
        with pytest.raises(
            ContextReadyError, match=r"A forward pass with batch_size=4, block_size=16 and passes=2\.\.3 would"
        ):
            check_run_memory(config, 2, on_cpu)
        monkeypatch.setattr(limits, "total_memory", lambda: 4 * copies * number + 10**6)  # noqa: B023
        check_run_memory(config, 2, on_cpu)


@pytest.mark.parametrize("change", ["gradient=unroll", "gradient=implicit", "checkpoint_passes=true"])
def test_what_is_refused_is_more_than_what_the_plan_counts(change, monkeypatch):
    """So no run is refused that would fit."""
    for small in (["batch_size=1"], ["width=16", "heads=1"]):
        config = resolve("mini-d1", ["vocab_size=300", change, *small])
        total = make_plan(config, 1).total
        monkeypatch.setattr(limits, "total_memory", lambda total=total: total)
        check_run_memory(config, 1, on_cpu=True)


def test_settings_of_a_damaged_file_are_one_sentence():
    good = resolve("mini-d1", ["vocab_size=300"]).as_dict()
    assert RunConfig.from_dict(good).as_dict() == good
    for part in ("model", "train"):
        for value in (None, [], "text", 7):
            with pytest.raises(ContextReadyError, match=f"lack the part '{part}'; their file is damaged"):
                RunConfig.from_dict(good | {part: value})
    for whole in (None, [], "text"):
        with pytest.raises(ContextReadyError, match="their file is damaged"):
            RunConfig.from_dict(whole)


@pytest.mark.parametrize("text", ["7: 3", "data: 2024", "init_from: 7\ncorrection: add"])
def test_wrong_types_in_a_recipe_of_the_users_are_refused(tmp_path, text):
    with pytest.raises(ContextReadyError):
        resolve(write(tmp_path, text), ["width=16", "layers=1", "heads=2"])


def test_none_is_none_in_capitals_too(data):
    assert resolve("mini-finetune", [f"data={data}", "init_from=None"]).train.init_from is None


def test_an_experiments_path_is_no_recipe():
    with pytest.raises(ContextReadyError, match="Unknown recipe 'paper/main-85m'"):
        resolve("paper/main-85m", ["vocab_size=300"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("owt-d5-c1120", (64, 256, 100_000, "2..5")),
        ("owt-d6-c2048", (32, 256, 200_000, "2..5")),
        ("owt-d12-c1024", (32, 256, 200_000, "2..5")),
        ("owt-d1-c2048", (16, 1024, 110_000, "10")),
        ("k10-random/owt-d1-c2048", (16, 1024, 135_000, "2..10")),
        ("finetune/owt-d24-c1024", (32, 256, 18_000, "2..4")),
        ("finetune/owt-d12-c1408", (32, 256, 200_000, "2..5")),
        ("block-1024/owt-d1-c2048", (32, 1024, 200_000, "2..5")),
        ("token-matched/owt-n2-c1024", (1024, 64, 17_181, "1")),
        ("token-matched/owt-d2-c1024", (256, 64, 43_762, "2..5")),
        ("width/owt-n2-c256", (1024, 64, 7_629, "1")),
        ("width/owt-d2-c256", (512, 64, 15_259, "2..5")),
        ("wiki-d3-c446", (64, 256, 100_000, "2..5")),
        ("wiki-d1-c50-blind", (64, 256, 100_000, "2..10")),
    ],
)
def test_recipes_have_the_papers_hyperparameters(name, expected):
    t = build_run(load_recipe(name)).train
    assert (t.sequences_per_step, t.block_size, t.steps, t.passes) == expected
    assert (t.lr, t.clip, t.schedule) == (2e-4, 1.0, "constant")
