"""Costs compared with the paper's printed figures, PyTorch's counter, and the memory of a real stream."""

from itertools import product

import pytest
import torch
from helpers import KINDS, random_tokens, small_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from contextready import CORRECTIONS, ContextReadyError, ModelConfig, account, build_model
from contextready.formats import limits
from contextready.model.cost import check_model_memory
from contextready.runs.catalog import cache_ratios, entries, millions
from contextready.runs.paper_models import PAPER_MODELS

# PyTorch's counter does not know the fused attention kernel of the CPU, so attention runs as plain products there.
BY_NAME = {entry.name: entry for entry in entries([])}


@pytest.mark.parametrize("name", [name for name, model in PAPER_MODELS.items() if model.flops])
def test_flops_are_the_papers(name):
    entry = BY_NAME[name]
    assert millions(entry.paper_macs, entry.paper.flops) == entry.paper.flops


@pytest.mark.parametrize("name", [name for name, model in PAPER_MODELS.items() if model.coefficient])
def test_coefficients_are_the_papers(name):
    assert BY_NAME[name].account.width_squared_coefficient == PAPER_MODELS[name].coefficient


@pytest.mark.parametrize("name", [name for name, model in PAPER_MODELS.items() if model.parameters])
def test_parameters_are_the_papers(name):
    assert millions(BY_NAME[name].account.parameters) == PAPER_MODELS[name].parameters


def test_every_printed_figure_is_covered():
    printed = PAPER_MODELS.values()
    assert {m.flops for m in printed} - {None} == {
        *("121M", "117M", "120M", "110M", "146M", "376M", "389M", "401M", "411M", "149M"),
        *("42.5M", "15.9M", "7.2M"),
    }
    assert {m.coefficient for m in printed} - {None} == {144, 156, 152, 168, 288, 284, 44, 36, 32, 48}
    assert {m.parameters for m in printed} - {None} == {"215M", "155M", "157M", "134M"}


def test_cache_ratios_are_the_papers():
    assert [f"{row['cache_ratio']:.1f}×" for row in cache_ratios()] == ["1.6×", "3.2×"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_parameters_are_those_of_the_real_model(kind, bias):
    config = small_config(correction=kind, bias=bias, extra_ffn=kind is None)
    model, counted = build_model(config), account(config)
    assert counted.parameters == sum(p.numel() for p in model.parameters())
    own = 0 if kind is None else sum(p.numel() for p in model.correction.parameters())
    assert counted.correction_parameters == own
    assert counted.embedding_parameters == model.backbone.embedding.weight.numel()


@pytest.mark.parametrize("extra_ffn", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [None, *CORRECTIONS])
def test_the_arithmetic_agrees_with_the_modules(kind, bias, extra_ffn):
    """The account is closed arithmetic; here every module is built and counted, for many shapes."""
    for vocab_size, width, layers in product((1, 7, 40), (2, 6, 32), (1, 2, 5)):
        config = ModelConfig(vocab_size, width, layers, heads=1, correction=kind, bias=bias, extra_ffn=extra_ffn)
        with torch.device("meta"):
            model = build_model(config)
        counted = account(config)
        assert counted.parameters == sum(p.numel() for p in model.parameters())
        assert counted.correction_parameters == sum(p.numel() for p in model.correction.parameters())


def test_no_module_is_built_for_an_account(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "__init__", pytest.fail)
    config = ModelConfig(2**31 - 1, 2**20, 10**6, heads=16, correction="tied", bias=True, extra_ffn=True)
    assert account(config).parameters > 10**19


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float64, 8), (torch.bfloat16, 2)])
def test_a_model_larger_than_the_memory_is_refused_before_it_is_built(dtype, size, monkeypatch):
    number, before = account(small_config()).parameters, torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        monkeypatch.setattr(limits, "total_memory", lambda: size * number)
        build_model(small_config())
        monkeypatch.setattr(limits, "total_memory", lambda: size * number - 1)
        with pytest.raises(
            ContextReadyError, match=f"A model with {number:,} parameters .* of memory; choose a smaller"
        ):
            build_model(small_config())
    finally:
        torch.set_default_dtype(before)


def test_models_without_storage_may_have_any_size(monkeypatch):
    monkeypatch.setattr(limits, "total_memory", lambda: 1)
    with torch.device("meta"):
        build_model(small_config())
    with FakeTensorMode():
        check_model_memory(small_config())


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_exact_flops_are_what_pytorch_counts_in_a_step(kind, window):
    config = small_config(correction=kind, window=window, extra_ffn=kind is None)
    model, tokens = build_model(config).eval(), random_tokens(batch=1, length=9)
    state = model.init_state(1)
    _, state = model.stream(tokens[:, :8], state)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.stream(tokens[:, 8:], state)
    assert account(config).macs_exact(context=9) == counter.get_total_flops() // 2


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_sequence_flops_are_what_pytorch_counts_but_for_the_masked_half(kind):
    config, T, K = small_config(correction=kind), 9, 4
    counted = account(config)
    model, tokens = build_model(config).eval(), random_tokens(batch=1, length=T)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        _ = model(tokens) if kind is None else model(tokens, K)
    passes = 1 if kind is None else K
    # PyTorch counts all T² pairs of causal attention, the account only the T (T + 1) / 2 that are needed.
    masked = passes * 2 * config.width * config.layers * T * (T - 1) // 2
    assert counted.macs_sequence(T, passes) + masked == counter.get_total_flops() // 2


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("history", [0, 1, 5])
def test_state_bytes_are_what_a_stream_holds(window, history):
    config = small_config(window=window)
    model, counted = build_model(config), account(config)
    state = model.init_state(2, history)
    for t in range(1, 13):
        _, state = model.stream(random_tokens(length=1), state)
        assert state.nbytes == 2 * counted.state_bytes(t, torch.float32, history)
    plain = build_model(small_config(window=window, correction=None))
    _, after = plain.stream(random_tokens(length=12), plain.init_state(2, history))
    assert after.cache.nbytes == 2 * account(plain.backbone.config).state_bytes(12, torch.float32, history)
    if window is None:
        assert counted.kv_bytes_per_token() * 12 * 2 == state.cache.nbytes


def test_nothing_is_allocated_for_a_model_of_any_size():
    huge = account(ModelConfig(vocab_size=200_000, width=65_536, layers=400, heads=512, correction="concat"))
    assert huge.parameters > 2e13
