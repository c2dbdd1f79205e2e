"""Early passes and sweeps over prompts in bf16: the result is as exact as without them, and they stop in time.

Nothing here needs a processor that multiplies bf16: emulated products have the same rounding.
"""

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from helpers import KINDS, random_tokens, small_model
from prefill_helpers import STEP, assert_same_state, largest_error, read, settling_model, wrapped

from contextready import ContextReadyError
from contextready.model.narrow import is_narrow, narrowed
from contextready.solve import early as early_passes
from contextready.solve.early import early_model
from contextready.solve.prefill import prefill
from contextready.solve.prompt_reader import PromptReader
from contextready.solve.reading import ROUNDING, early_should_end

ITERATIVE = ("sweep", "jacobi")


@pytest.fixture(autouse=True)
def _known_hardware(monkeypatch):
    """Fix the hardware figure, so that converging sweeps pay off on any machine."""
    monkeypatch.setattr("contextready.solve.prefill.free_tokens", lambda model: 1000.0)


def settling(kind="add", **changes):
    return settling_model(kind, dtype=torch.float32, **changes)


@pytest.mark.parametrize("solver", ITERATIVE)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_meet_the_tolerance_of_exact_reading(kind, window, solver):
    model, tokens = settling(kind, window=window), random_tokens(batch=3, length=50)
    for before, tolerance in ((0, 0.05), (9, 0.05), (9, 1e-3)):
        state = read(model, tokens[:, :before])[1] if before else model.init_state(3)
        prompt = tokens[:, before:]
        z, expected = read(model, prompt, state)
        settings = {"solver": solver, "tolerance": tolerance, "segment": STEP}
        without = prefill(model, prompt, state, bf16_passes="off", **settings)
        found = prefill(model, prompt, state, bf16_passes="on", **settings)
        assert found.info.certificate <= tolerance
        assert largest_error(found.z_B1C, z[:, -1:]) <= tolerance
        assert_same_state(model, found.state, expected, tolerance)
        assert without.info.bf16_passes == 0.0
        # All but the last ones are early, and there are hardly more than without.
        late = found.info.passes - found.info.bf16_passes
        assert found.info.bf16_passes >= 2.0
        assert late == pytest.approx(len(found.info.changes), abs=0.8)
        assert 1.0 <= late < without.info.passes
        assert found.info.passes < without.info.passes + 2.5


@pytest.mark.parametrize("solver", ITERATIVE)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_greedy_continuations_are_those_after_reading_one_token_at_a_time(kind, solver):
    model, tokens = settling(kind), random_tokens(batch=8, length=64, seed=4)
    continuations = []
    for settings in ({"solver": "sequential"}, {"solver": solver, "bf16_passes": "on"}):
        found = prefill(model, tokens, **settings)
        logits, state, chosen = model.backbone.head(found.z_B1C), found.state, []
        for _ in range(12):
            chosen.append(logits[:, -1:].argmax(dim=-1))
            logits, state = model.stream(chosen[-1], state)
        continuations.append(torch.cat(chosen, dim=1))
    assert found.info.bf16_passes > 0
    assert torch.equal(*continuations)
    assert len(set(map(tuple, continuations[0].tolist()))) > 4  # the prompts matter


@pytest.mark.parametrize("solver", ITERATIVE)
def test_a_tolerance_of_zero_is_still_exact(solver):
    model, tokens = small_model(window=5, dtype=torch.float32), random_tokens(length=40)
    found = prefill(model, tokens, solver=solver, tolerance=0.0, segment=STEP, bf16_passes="on")
    assert (found.info.exact, found.info.certificate) == (True, 0.0)
    assert found.info.bf16_passes > 0
    assert_same_state(model, found.state, read(model, tokens)[1], 1e-4)


def failing(factor, window):
    """A model for early passes that does not contract, or overflows."""
    other = small_model(seed=9, gain=3.0, window=window, dtype=torch.float32)
    recur = other.recur
    other.recur = lambda e, carried, past=None: recur(e * factor, carried, past)
    return other


@pytest.mark.parametrize("factor", [1.0, nan, inf])
@pytest.mark.parametrize("solver", ITERATIVE)
@pytest.mark.parametrize("window", [None, 5])
def test_early_passes_that_do_not_contract_cost_little_and_lose_nothing(window, solver, factor):
    model, tokens = settling(window=window), random_tokens(length=50)
    state = read(model, tokens[:, :9])[1]
    z, expected = read(model, tokens[:, 9:], state)
    settings = {"solver": solver, "tolerance": 1e-3, "segment": STEP}
    without = prefill(model, tokens[:, 9:], state, bf16_passes="off", **settings)
    found = prefill(model, tokens[:, 9:], state, early=failing(factor, window), **settings)
    assert found.info.certificate <= 1e-3
    assert largest_error(found.z_B1C, z[:, -1:]) <= 1e-3
    assert_same_state(model, found.state, expected, 1e-2)
    assert found.info.note == ""
    assert 2.0 <= found.info.bf16_passes <= 10.0
    assert found.info.passes <= without.info.passes + found.info.bf16_passes + 2.0


def test_a_model_that_does_not_contract_is_read_as_without_early_passes():
    model, tokens = small_model(), random_tokens(length=64)
    z, expected = read(model, tokens)
    found = prefill(model, tokens, segment=STEP, bf16_passes="on")
    assert (found.info.exact, found.info.certificate) == (True, 0.0)
    swept = round(found.info.bf16_passes) - 1 + len(found.info.changes)
    alone = STEP * len(found.info.changes)
    assert found.info.note == (
        f"after sweep {swept}, tokens from {alone} on were read one at a time, which seemed cheaper"
    )
    assert largest_error(found.z_B1C, z[:, -1:]) < 1e-9
    assert found.state.position == expected.position


def test_chunks_share_the_model_for_early_passes(monkeypatch):
    made = []

    def counted(model, reader):
        made.append(reader)
        return early_model(model, reader)

    monkeypatch.setattr("contextready.solve.prefill.early_model", counted)
    model, tokens = settling(), random_tokens(length=76)
    settings = {"segment": STEP, "chunk": 32, "bf16_passes": "on"}
    found = prefill(model, tokens, **settings)
    assert len(made) == 1
    assert largest_error(found.z_B1C, read(model, tokens)[0][:, -1:]) < 0.05
    assert 2.0 < found.info.bf16_passes < found.info.passes
    prefill(model, tokens, solver="sequential", **settings)
    prefill(model, tokens[:, :7], **settings)
    assert len(made) == 1  # one pass needs no early ones


@pytest.mark.parametrize("solver", ["sweep", "jacobi", "sequential"])
def test_a_model_in_bf16_makes_all_passes_in_bf16(solver):
    model, tokens = settling(), random_tokens(length=50)
    found = prefill(narrowed(model), tokens, solver=solver, segment=STEP)
    assert found.info.bf16_passes == found.info.passes
    assert 0.0 < largest_error(found.z_B1C, read(model, tokens)[0][:, -1:]) < 0.05


def test_auto_makes_early_passes_in_fp32_models_where_bf16_is_native(monkeypatch):
    model, wide = settling(), settling_model()
    for native in (False, True):
        monkeypatch.setattr("contextready.device.multiplies_bf16", lambda _, native=native: native)
        assert (early_model(model, PromptReader()) is not None) == native
        assert early_model(model, PromptReader(bf16_passes="off")) is None
        assert is_narrow(early_model(model, PromptReader(bf16_passes="on")))
        assert prefill(model, random_tokens(length=50), segment=STEP).info.bf16_passes > 0 or not native
        for other in (wide, narrowed(model), wrapped(model)):
            assert early_model(other, PromptReader()) is None
    size = sum(weight.nbytes for weight in model.parameters())
    for memory, enough in ((1.4, False), (1.6, True)):
        monkeypatch.setattr(early_passes, "total_memory", lambda memory=memory: memory * size)
        assert (early_model(model, PromptReader()) is not None) == enough


def test_what_cannot_be_is_refused():
    model, tokens = settling(), random_tokens()
    with pytest.raises(ContextReadyError, match="bf16_passes must be auto, on or off, but got maybe"):
        prefill(model, tokens, bf16_passes="maybe")
    with pytest.raises(ContextReadyError, match="bf16_passes=on works with native transformers only"):
        prefill(wrapped(model), tokens, bf16_passes="on")
    with pytest.raises(ContextReadyError, match="This model computes in bf16 already"):
        prefill(narrowed(model), tokens, bf16_passes="on")
    assert replace(PromptReader(), bf16_passes="off").bf16_passes == "off"


def test_when_early_passes_end():
    assert not early_should_end([], 0.05)
    assert not early_should_end([0.4], 0.05)
    assert early_should_end([0.04], 0.05)
    assert not early_should_end([0.8, 0.4], 0.05)
    assert early_should_end([0.4, 0.12], 0.05)  # 0.036 is next
    assert not early_should_end([0.4, 0.12], 0.02)
    assert early_should_end([0.4, 0.38], 0.05)  # does not contract
    assert early_should_end([0.4, 0.5], 0.05)
    assert early_should_end([0.4, nan], 0.05)
    assert early_should_end([inf], 0.05)
    assert early_should_end([0.0], 0.0)
    assert early_should_end([0.1, 0.0], 0.0)
    # Below the rounding of bf16 there is nothing to gain.
    assert early_should_end([0.1, 2 * ROUNDING], 0.0)
    assert not early_should_end([1.0, 0.1], 0.0)
