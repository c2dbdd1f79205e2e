"""`authors=true`: the settings of the author's own runs, which the recipes of the paper expand."""

import json

import pytest

from contextready.cli.main import main
from contextready.errors import ContextReadyError
from contextready.model.cost import account
from contextready.runs.config import RunConfig
from contextready.runs.recipes import check_inputs, recipe_names, resolve

COUNTS = {
    "owt-n12-c768": 134_240_000,
    "owt-n6-c1088": 154_980_608,
    "owt-d6-c1024": 149_543_168,
    "owt-d5-c1120": 157_094_080,
    "owt-d1-c2048": 215_035_136,
}
"""The exact numbers of parameters in the author's public notebooks."""
TEXT = [name for name in recipe_names() if name.partition("/")[2].startswith(("owt-", "wiki-"))]


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_the_authors_to_the_unit(name):
    assert account(resolve(name, ["authors=true"]).model).parameters == COUNTS[name]


@pytest.mark.parametrize("name", TEXT)
def test_every_recipe_on_text_has_the_authors_settings(name):
    ours, his = (resolve(name, words) for words in ([], ["authors=true"]))
    assert ours == resolve(name, ["authors=false"])
    m, t = his.model, his.train
    assert (m.init, m.bias, m.head_bias, m.rope) == ("torch", True, True, "integer")
    assert (m.dropout, m.attention_dropout, m.dropout_at) == (0.2, 0.2, "embedding")
    assert (t.beta1, t.beta2, t.eps, t.weight_decay, t.decay) == (0.9, 0.999, 1e-8, 0.01, "all")
    assert (t.lr, t.warmup, t.schedule, t.clip) == (2e-4, 0, "constant", 1.0)
    weight = 0.0 if m.correction is None or name.startswith("wikipedia-k10/") else 0.1
    assert t.convergence_weight == weight
    assert (m.correction_scale, m.correction_gain) == (1.0, None)
    assert (t.passes, t.gradient) == (ours.train.passes, "unroll")
    # The two do not share folders.
    assert (ours.train.out, t.out) == (f"runs/{name}", f"runs/authors/{name}")
    if ours.train.init_from is not None:
        assert t.init_from == ours.train.init_from.replace("runs/", "runs/authors/", 1)
    assert ours.model.init == "gpt2"
    assert ours.train.convergence_weight == 0.0
    # What is stored is the expanded settings.
    assert "authors" not in json.dumps(his.as_dict()["model"])
    assert RunConfig.from_dict(his.as_dict()) == his


def test_heads_widths_and_budgets_are_the_authors():
    heads = {name: resolve(name, []).model.heads for name in TEXT}
    single = {"main-85m/owt-n12-c768", "main-85m/owt-d5-c1024", "main-85m/owt-d8-c768"}
    single |= {name for name in TEXT if name.startswith("wiki") or name.endswith(("-n1-c1024", "-d1-c1024"))}
    assert {name for name in TEXT if heads[name] == 1} == single
    assert {heads[f"width/owt-{kind}2-c{width}"] for kind in "nd" for width in (256,)} == {4}
    assert {heads[f"width/owt-{kind}2-c{width}"] for kind in "nd" for width in (512,)} == {8}
    assert resolve("owt-d8-c768", []).model.width == 768
    tokens = {}
    for width in (256, 512, 1024):
        for kind in "nd":
            t = resolve(f"width/owt-{kind}2-c{width}", []).train
            tokens[kind, width] = t.steps * t.tokens_per_step / 1e6
    assert [round(tokens["d", width]) for width in (256, 512, 1024)] == [500, 900, 1227]
    assert all(abs(tokens["n", width] / tokens["d", width] - 1) < 2e-3 for width in (256, 512, 1024))
    steps = {name: resolve(name, ["authors=true"]).train.steps for name in TEXT}
    assert (steps["pretrain/owt-n12-c1408"], steps["finetune/owt-d12-c1408"]) == (400_000, 100_000)
    assert (steps["pretrain/owt-n12-c1024"], steps["finetune/owt-d12-c1024"]) == (200_000, 50_000)


def test_single_settings_can_still_be_changed():
    run = resolve("owt-d5-c1120", ["authors=true", "rope=geometric", "beta2=0.95", "out=runs/mine"])
    assert (run.model.rope, run.train.beta2, run.train.out) == ("geometric", 0.95, "runs/mine")
    plain = resolve("owt-d5-c1120", ["authors=true", "correction=none"])
    assert (plain.model.correction, plain.train.convergence_weight) == (None, 0.0)


def test_a_dry_run_shows_them(capsys):
    assert main(["train", "owt-d5-c1120", "authors=true", "--dry-run"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["model"]["rope"], shown["train"]["decay"]) == ("integer", "all")
    assert shown["cost"]["parameters"] == COUNTS["owt-d5-c1120"]


def test_the_run_to_convert_is_trained_with_the_same_switch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, command in (([], ""), (["authors=true"], " authors=true")):
        config = resolve("finetune/owt-d12-c1024", words)
        with pytest.raises(ContextReadyError, match=f"first with: crt train pretrain/owt-n12-c1024{command}$"):
            check_inputs("finetune/owt-d12-c1024", words, config)


@pytest.mark.parametrize("name", ["pointer/pointer-n3-c256", "pointer/pointer-d1-c256"])
def test_pointer_chasing_has_the_authors_network_too(name):
    model, ours = (resolve(name, words) for words in (["authors=true"], []))
    assert (model.model.rope, model.model.init, model.model.bias, model.model.head_bias) == (
        "integer",
        "torch",
        True,
        True,
    )
    assert (model.train.convergence_weight, model.model.dropout) == (0.0, 0.0)
    changed = {key for key, value in vars(model.train).items() if getattr(ours.train, key) != value}
    assert changed == {"out"}
