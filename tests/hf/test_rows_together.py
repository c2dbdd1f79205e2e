"""The engine for wrapped models: rows at different positions step in one forward, and each is its solo run."""

import pytest
import torch
from hf_helpers import FAMILIES, randomise, tiny_lm, tiny_ready
from schedule_helpers import check_schedule

from contextready.hf.modeling import ContextReadyForCausalLM
from contextready.infer.torch_engine import torch_engine

every_family = pytest.mark.parametrize("family", FAMILIES)


def engine_of(model, rows=4, **settings):
    return torch_engine(model, rows=rows, capacity=64, **({"solver": "sequential"} | settings))


class Forwards:
    """Counts the forwards of a model, and their rows."""

    def __init__(self, model):
        self.rows = []
        model.backbone.structure.last_block(model.backbone.lm).register_forward_hook(self._count)

    def _count(self, module, args, output):
        self.rows.append(len(output if torch.is_tensor(output) else output[0]))


@every_family
def test_every_row_of_a_random_schedule_is_its_solo_run(family):
    model = tiny_ready(family).model
    assert model.backbone.steps_rows_together
    forwards = Forwards(model)
    # Gemma 2 and Bloom have a softmax in float32 whatever the model is in, and the recurrence amplifies its rounding.
    tolerance = 1e-3 if family in ("gemma2", "bloom") else 1e-5
    check_schedule(engine_of(model), model, seed=4, tolerance=tolerance, vocab=61, first_id=3)
    assert max(forwards.rows) > 1


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt-neox", "opt", "mistral-window", "gemma3", "qwen3-tied"])
def test_rows_in_single_precision_are_their_solo_runs(family):
    model = ContextReadyForCausalLM.wrap(tiny_lm(family)).float()
    randomise(model, std=0.05)
    check_schedule(engine_of(model.model), model.model, seed=4, tolerance=1e-4, vocab=61, first_id=3)


def test_as_few_forwards_as_possible_are_made():
    model = tiny_ready("llama").model
    engine = engine_of(model)
    for row in range(4):
        engine.read(row, [5, 6, 7, 8][: row + 1])
    assert model.backbone.steps_rows_together
    forwards = Forwards(model)
    for rows in ([0, 1, 2, 3], [0, 1, 2, 3], [3, 1], [2]):
        engine.step([9] * len(rows), rows)
    assert forwards.rows == [4, 4, 2, 1]
    # A prompt of another row is read without taking the others apart.
    engine.step([9, 9], [1, 3])
    together = engine._together
    engine.read(0, [3])
    engine.step([9, 9], [1, 3])
    assert together.rows == engine._together.rows == [1, 3]
    assert engine._together.cache.layers[0][0].shape[2] == max(engine.position(1), engine.position(3))


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
        "position",
        "mask",
        "error",
    ],
)
def test_rows_step_one_by_one_where_padding_would_be_wrong(change, monkeypatch):
    lm = tiny_lm("gpt2") if isinstance(change, str) else tiny_lm("llama", **change)
    model = ContextReadyForCausalLM.wrap(lm, tolerance=0.0)
    randomise(model)
    forward = model.model.backbone.lm.base_model.forward

    def careless(**arguments):
        """The forward of a model that does something wrong with padded rows only."""
        if arguments.get("attention_mask") is not None:
            if change == "error":
                raise RuntimeError("no padding, please")
            arguments["attention_mask" if change == "mask" else "position_ids"] = None
        return forward(**arguments)

    if isinstance(change, str):
        monkeypatch.setattr(model.model.backbone.lm.base_model, "forward", careless)
    assert not model.model.backbone.steps_rows_together
    forwards = Forwards(model.model)
    check_schedule(engine_of(model.model), model.model, seed=1, vocab=61, first_id=3)
    assert max(forwards.rows) == 1


def test_the_trial_leaves_a_model_as_it_was():
    model = tiny_ready("gpt2").train()
    assert model.model.backbone.steps_rows_together
    assert model.training
    assert model.model.backbone.lm.training


def test_generation_with_several_rows_is_generation_with_one():
    from contextready.infer.generate import GenerationSettings, generate
    from contextready.infer.sampling import Sampling

    model, prompts = tiny_ready("mistral-window").model, [[5, 6, 7, 8, 9], [10], [11, 12, 13]]
    settings = GenerationSettings(Sampling(temperature=0), max_tokens=20, stop_tokens=[4])
    together = generate(engine_of(model), prompts, settings)
    for prompt, completion in zip(prompts, together, strict=True):
        (alone,) = generate(engine_of(model, rows=1), [prompt], settings)
        assert completion.tokens == alone.tokens
