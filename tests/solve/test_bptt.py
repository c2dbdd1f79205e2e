"""Backpropagation through the stream compared with autograd, in float64 with random weights."""

import pytest
import torch
import torch.nn.functional as F
from helpers import KINDS, OPTIONS, every_option, random_tokens, small_model

from contextready import ContextReady, Transformer
from contextready.model.correction_module import CorrectionModule
from contextready.solve.bptt import DifferentiableStream
from contextready.solve.bptt_attention import KEY_BLOCK
from contextready.train.objective import Objective

LONG = 2 * KEY_BLOCK + 5


def embeddings(batch=2, length=7, width=12, seed=1):
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(model):
    """The stream as autograd differentiates it."""
    return lambda e: model.read(e, model.init_state(len(e)))[0]


def gradients(z, e, model, seed=2):
    """Gradients of a random function of z with respect to the embeddings and every weight."""
    direction = embeddings(*z.shape, seed=seed)
    loss = (z * direction + z.square() * direction.flip(1)).sum()
    weights = dict(model.named_parameters())
    found = torch.autograd.grad(loss, [e, *weights.values()], allow_unused=True)
    return dict(zip(["e", *weights], found, strict=True))


def outcome(read, model, e, seed=None):
    """z and all gradients for one way to read."""
    if seed is not None:
        torch.manual_seed(seed)
    e = e.clone().requires_grad_()
    z = read(e)
    return z.detach().clone(), gradients(z, e, model)


def assert_same(found, expected, tolerance=1e-10):
    (z, grads), (z_expected, grads_expected) = found, expected
    assert (z - z_expected).norm() <= tolerance * z_expected.norm()
    for name, wanted in grads_expected.items():
        assert (grads[name] is None) == (wanted is None), name
        if wanted is not None:
            assert wanted.isfinite().all()
            assert (grads[name] - wanted).norm() <= tolerance * wanted.norm(), name


def check(model, e, stream=None, seed=None):
    assert_same(outcome(stream or DifferentiableStream(model), model, e, seed), outcome(plain(model), model, e, seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layers", "window"), [(1, None), (2, 3), (2, 1)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("extra_ffn", [False, True])
def test_the_gradient_is_that_of_the_stream(kind, layers, window, bias, extra_ffn):
    model = small_model(correction=kind, layers=layers, window=window, bias=bias, extra_ffn=extra_ffn)
    check(model, embeddings())


@pytest.mark.parametrize("gain", [None, "scalar", "channel"])
@pytest.mark.parametrize("kind", ["add", "balanced", "concat", "concat_z", "blind"])
def test_the_gradient_of_a_scaled_correction(kind, gain):
    check(small_model(correction=kind, correction_scale=0.3, correction_gain=gain), embeddings())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, KEY_BLOCK // 3, KEY_BLOCK, KEY_BLOCK + 9])
def test_the_gradient_of_sequences_longer_than_a_chunk(kind, window):
    check(small_model(correction=kind, window=window, gain=0.5), embeddings(length=LONG))


@pytest.mark.parametrize("length", [KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 1, 2 * KEY_BLOCK])
@pytest.mark.parametrize("window", [None, 1, KEY_BLOCK - 1, KEY_BLOCK + 1])
def test_the_gradient_of_lengths_and_windows_around_a_chunk(length, window):
    check(small_model(layers=1, window=window, gain=0.5), embeddings(length=length))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(("batch", "length"), [(2, 1), (1, 7), (1, 1)])
def test_the_gradient_of_one_token_and_of_one_row(kind, window, batch, length):
    check(small_model(correction=kind, window=window, bias=True), embeddings(batch, length))


@pytest.mark.parametrize(("width", "heads"), [(12, 1), (12, 6), (2, 1), (16, 2), (20, 5)])
def test_the_gradient_of_any_number_and_size_of_heads(width, heads):
    model = small_model(width=width, heads=heads, rope_base=50.0, bias=True)
    check(model, embeddings(width=width))


@pytest.mark.parametrize(("width", "heads"), [(12, 1), (12, 6), (2, 1), (20, 5)])
def test_the_gradient_of_neighbouring_channels_that_rotate_together(width, heads):
    model = small_model(width=width, heads=heads, rope="integer", bias=True)
    check(model, embeddings(width=width))


@every_option
@pytest.mark.parametrize("kind", ["add", "block_head", "tied", "tied_norm"])
def test_the_gradient_with_the_settings_of_other_families(kind, changes):
    check(small_model(correction=kind, gain=0.5, **changes), embeddings())


@pytest.mark.parametrize("name", ["like Qwen3", "like SmolLM3", "everything"])
def test_their_gradient_of_sequences_longer_than_a_chunk(name):
    model = small_model(gain=0.5, **OPTIONS[name])
    stream = DifferentiableStream(model)
    check(model, embeddings(length=LONG), stream)
    # Again with the same buffers.
    check(model, embeddings(length=LONG, seed=4), stream)


def test_their_gradient_with_dropout():
    changes = {"dropout": 0.3, "attention_dropout": 0.3, "dropout_at": "embedding"}
    model = small_model(gain=0.5, **OPTIONS["everything"], **changes).train()
    objective = Objective(model, gradient="bptt")
    objective.backward(random_tokens(), random_tokens(seed=5), None)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_the_gradient_is_that_of_numerical_differentiation():
    model, e, toward = small_model(bias=True), embeddings(), embeddings(seed=8)
    stream, step = DifferentiableStream(model), 1e-6
    found = torch.autograd.grad(stream(e.requires_grad_()).square().sum(), e)[0].mul(toward).sum()
    with torch.no_grad():
        ahead, behind = (stream(e + sign * step * toward).square().sum() for sign in (1, -1))
    assert found.item() == pytest.approx(((ahead - behind) / (2 * step)).item(), rel=1e-6)


def test_no_buffer_is_read_before_it_is_written():
    """With deterministic algorithms PyTorch fills new memory with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        for window in (None, 3, KEY_BLOCK + 9):
            check(small_model(window=window, gain=0.5), embeddings(length=LONG))
    finally:
        torch.use_deterministic_algorithms(before)


def test_the_gradient_in_single_precision():
    model = small_model(dtype=torch.float32, gain=0.5)
    e = embeddings(length=LONG).float()
    z, found = outcome(DifferentiableStream(model), model, e)
    assert z.dtype == found["e"].dtype == torch.float32
    assert_same((z, found), outcome(plain(model), model, e), 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_call_reuses_the_buffers_with_the_current_weights(kind):
    model = small_model(correction=kind, window=5, bias=True)
    stream, first, second = DifferentiableStream(model), embeddings(), embeddings(seed=7)
    check(model, first, stream)
    tape, optimizer = stream._free, torch.optim.SGD(model.parameters(), lr=0.05)
    z = stream(first)
    kept = z.detach().clone()
    z.square().sum().backward()
    optimizer.step()
    found = outcome(stream, model, second)
    assert stream._free is tape is not None
    assert torch.equal(z, kept)
    assert_same(found, outcome(plain(model), model, second))
    assert_same(found, outcome(DifferentiableStream(model), model, second), 0.0)


@pytest.mark.parametrize("shape", [(1, 7), (3, 1), (1, 1)])
def test_results_of_one_row_or_one_token_are_not_overwritten(shape):
    model = small_model()
    stream = DifferentiableStream(model)
    z = stream(embeddings(*shape))
    kept = z.detach().clone()
    z.sum().backward()
    stream(embeddings(*shape, seed=7))
    assert torch.equal(z, kept)


def test_another_shape_after_that_is_right():
    model = small_model(window=4)
    stream = DifferentiableStream(model)
    for batch, length in ((2, 7), (3, 7), (2, 7), (2, KEY_BLOCK + 3), (1, 1), (2, 7)):
        check(model, embeddings(batch, length), stream)


def test_another_type_after_that_is_right():
    model = small_model()
    stream = DifferentiableStream(model)
    check(model, embeddings(), stream)
    model.float()
    found = outcome(stream, model, embeddings().float())
    assert_same(found, outcome(plain(model), model, embeddings().float()), 1e-4)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_before_their_backwards(order):
    model = small_model()
    stream, inputs = DifferentiableStream(model), [embeddings(seed=seed).requires_grad_() for seed in (1, 7)]
    check(model, embeddings(seed=3), stream)
    outputs = [stream(e) for e in inputs]
    for i in order:
        found = outputs[i].detach().clone(), gradients(outputs[i], inputs[i], model)
        assert_same(found, outcome(plain(model), model, inputs[i].detach()))
    check(model, embeddings(seed=3), stream)


def test_one_loss_of_two_streams_adds_their_gradients():
    model = small_model()
    a, b = embeddings(seed=1), embeddings(seed=7)
    found, expected = (
        torch.autograd.grad((read(a) * read(b)).sum(), model.correction.ffn.up.weight)[0]
        for read in (DifferentiableStream(model), plain(model))
    )
    assert (found - expected).norm() <= 1e-10 * expected.norm()


def test_a_second_backward_is_refused():
    model = small_model()
    loss = DifferentiableStream(model)(embeddings()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can be called only once"):
        loss.backward()


def test_a_forward_without_a_gradient_does_not_disturb_the_next():
    model = small_model(dropout=0.3).train()
    stream, e = DifferentiableStream(model), embeddings()
    with torch.no_grad():
        assert not stream(e).requires_grad
    with torch.inference_mode():
        stream(e)
    stream(e)  # never differentiated
    check(model, e, stream, seed=5)


def test_only_frozen_weights_get_no_gradient():
    model = small_model(bias=True)
    expected = outcome(plain(model), model, embeddings())[1]
    model.backbone.layers[0].requires_grad_(False)
    e = embeddings()
    z = DifferentiableStream(model)(e)
    (z * embeddings(*z.shape, seed=2) + z.square() * embeddings(*z.shape, seed=2).flip(1)).sum().backward()
    assert e.grad is None
    for name, p in model.named_parameters():
        if name.startswith("backbone.layers.0."):
            assert p.grad is None
        elif expected[name] is not None:
            assert (p.grad - expected[name]).norm() <= 1e-10 * expected[name].norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extra_ffn", [False, True])
def test_dropout_draws_the_masks_of_the_stream(kind, extra_ffn):
    """One position at a time, both draw the same masks in the same order."""
    model = small_model(correction=kind, dropout=0.4, window=5, extra_ffn=extra_ffn).train()
    stream, e = DifferentiableStream(model), embeddings()
    for seed in (3, 4):
        check(model, e, stream, seed)
    (one, _), (other, _) = (outcome(stream, model, e, seed) for seed in (3, 4))
    assert (one - other).abs().max() > 1e-3


@pytest.mark.parametrize(("kind", "gain"), [*((kind, None) for kind in KINDS), ("add", "channel")])
def test_the_authors_places_of_dropout(kind, gain):
    rates = {"dropout": 0.3, "attention_dropout": 0.4, "dropout_at": "embedding"}
    model = small_model(correction=kind, window=5, correction_gain=gain, **rates).train()
    stream, e = DifferentiableStream(model), embeddings()
    for seed in (3, 4):
        check(model, e, stream, seed)


def test_evaluation_does_not_drop_out_and_training_does_again():
    model = small_model(dropout=0.4)
    stream, e = DifferentiableStream(model), embeddings()
    for training in (True, False, True):
        model.train(training)
        check(model, e, stream, seed=3)
    model.eval()
    assert torch.equal(stream(e), stream(e))


class Delegating:
    """Another backbone: a transformer whose internals are hidden."""

    def __init__(self, inner):
        self.inner, self.width = inner, inner.width

    def embed(self, tokens_BT):
        return self.inner.embed(tokens_BT)

    def blocks(self, x_BTC, cache=None):
        return self.inner.blocks(x_BTC, cache)

    def head(self, z_BTC):
        return self.inner.head(z_BTC)

    def init_cache(self, batch_size, history=1):
        return self.inner.init_cache(batch_size, history)

    def parameters(self):
        return self.inner.parameters()


@pytest.mark.parametrize("kind", ["add", "concat", "blind", "memoryless", "block_head"])
def test_another_backbone_goes_through_autograd(kind):
    model, e = small_model(correction=kind), embeddings()
    stream = DifferentiableStream(ContextReady(Delegating(model.backbone), model.correction))
    assert_same(outcome(stream, model, e), outcome(DifferentiableStream(model), model, e))
    assert stream._free is None


def test_another_correction_goes_through_autograd():
    class Louder(CorrectionModule):
        def forward(self, carried_BTC, e_BTC):
            return 2.0 * super().forward(carried_BTC, e_BTC)

    model = small_model()
    model.correction.__class__ = Louder
    check(model, embeddings())


def test_a_backbone_with_blocks_of_its_own_goes_through_autograd():
    class Doubling(Transformer):
        def blocks(self, x_BTC, cache=None):
            z_BTC, cache = super().blocks(x_BTC, cache)
            return 2.0 * z_BTC, cache

    model = small_model()
    model.backbone.__class__ = Doubling
    check(model, embeddings())


def test_another_rate_of_dropout_is_seen():
    model = small_model(dropout=0.4).train()
    stream, e = DifferentiableStream(model), embeddings()
    check(model, e, stream, seed=3)
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.1
    check(model, e, stream, seed=3)


def test_weights_changed_between_forward_and_backward_are_refused():
    """Autograd refuses them too, because the gradient would be wrong."""
    model = small_model()
    z = DifferentiableStream(model)(embeddings())
    with torch.no_grad():
        model.correction.ffn.down.weight.mul_(2.0)
    with pytest.raises(RuntimeError):
        z.sum().backward()


TOKENS, TARGETS = random_tokens(length=7), random_tokens(length=7, seed=5)


def gradient_of(model, passes, scale=1.0, **options):
    model.zero_grad()
    loss = Objective(model, **options).backward(TOKENS, TARGETS, passes, scale)
    return loss, {name: p.grad.clone() for name, p in model.named_parameters()}


def distance(one, other):
    assert one.keys() == other.keys()
    size = sum(float(g.square().sum()) for g in other.values()) ** 0.5
    return sum(float((one[n] - other[n]).square().sum()) for n in one) ** 0.5 / size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layers", "window"), [(1, None), (2, 3)])
def test_the_implicit_gradient_of_enough_passes_is_this_one(kind, layers, window):
    model = small_model(correction=kind, layers=layers, window=window, bias=True)
    _, implicit = gradient_of(model, 9, gradient="implicit", adjoint_tolerance=0.0)
    loss, found = gradient_of(model, None, gradient="bptt")
    assert distance(implicit, found) < 1e-8
    assert (loss.residual, loss.adjoint_steps) == (None, 0)


def test_the_objective_is_the_loss_of_the_stream():
    model = small_model()
    logits, _ = model.stream(TOKENS, model.init_state(len(TOKENS)))
    expected = F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten())
    model.zero_grad()
    expected.backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters()}
    loss, found = gradient_of(model, None, gradient="bptt")
    assert loss.mean.item() == pytest.approx(expected.item(), rel=1e-12)
    assert not loss.mean.requires_grad
    assert distance(found, exact) < 1e-10
    _, half = gradient_of(model, None, 0.5, gradient="bptt")
    Objective(model, gradient="bptt").backward(TOKENS, TARGETS, None, 0.5)
    assert distance({name: 2.0 * g for name, g in half.items()}, found) < 1e-12
    assert distance({name: p.grad for name, p in model.named_parameters()}, found) < 1e-12
