"""Reading a prompt: every solver ends in the stream's own state, says what it cost, and notices what does not settle."""

from math import inf, isnan, nan

import pytest
import torch
from helpers import KINDS, contractive_model, gap, random_tokens, small_model

from contextready import ContextReady, ContextReadyError, ModelConfig, build_model
from contextready.infer.torch_engine import as_context_ready
from contextready.model.correction import Add
from contextready.solve import hardware
from contextready.solve.prefill import FEWEST_SEGMENTS, SHORTEST_SEGMENT, SOLVERS, TOLERANCE, prefill, segment_length
from contextready.solve.report import ReadInfo
from contextready.solve.sweep import Chunk, as_many_as_alone, largest_norm, solve_by_sweeps, sweeps_left

STEP = 4
"""The segment of most tests."""


@pytest.fixture(autouse=True)
def _known_hardware(monkeypatch):
    """What is cheaper does not depend on how busy this machine is; here sweeps pay while they settle at all."""
    monkeypatch.setattr("contextready.solve.prefill.free_rows", lambda model: 1000.0)


def settling_model(kind="add", **changes):
    """A model of any kind whose passes settle quickly: large embeddings, small branches."""
    model = small_model(correction=kind, **changes)
    with torch.no_grad():
        model.backbone.embedding.weight.mul_(6.0)
        for name, weight in model.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                weight.mul_(0.15)
    return model


class Wrapped:
    """Some other backbone: a transformer whose inside no one knows."""

    def __init__(self, inner):
        for name in ("width", "embed", "blocks", "head", "init_cache", "parameters"):
            setattr(self, name, getattr(inner, name))


def wrapped(model):
    hidden = ContextReady(Wrapped(model.backbone), Add(model.backbone))
    hidden.correction = model.correction
    return hidden.eval()


def read(model, tokens, state=None):
    """z of every token and the state after them, one by one."""
    with torch.inference_mode():
        return model.read(model.backbone.embed(tokens), state or model.init_state(len(tokens)))


def assert_same_state(model, found, expected, tolerance):
    """Keys, values, carried, history, position; and what is streamed from there, and from one token before."""
    assert (found.position, found.history) == (expected.position, expected.history)
    assert (found.cache.window, found.cache.keep) == (expected.cache.window, expected.cache.keep)
    assert found.carried_BRC.shape == expected.carried_BRC.shape
    scale = max(largest_norm(expected.carried_BRC), 1.0)
    assert gap(found.carried_BRC, expected.carried_BRC) <= tolerance * scale
    for kv, wanted in zip(found.cache.layers, expected.cache.layers, strict=True):
        for a, b in zip(kv, wanted, strict=True):
            assert a.shape == b.shape
            assert a.numel() == 0 or gap(a, b) <= tolerance * scale
    more = random_tokens(batch=found.batch_size, length=5, seed=6)
    backs = [0, 1] if expected.history and expected.position else [0]
    with torch.inference_mode():
        for back in backs:
            a, b = (model.stream(more, state.rollback(state.position - back))[0] for state in (found, expected))
            assert gap(a, b) <= tolerance * scale


def test_solvers_are_the_three_that_are_tested_here():
    assert set(SOLVERS) == {"sequential", "jacobi", "sweep"}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_every_solver_ends_in_the_streams_state(kind, window, solver):
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-4)):
        model = settling_model(kind, window=window, dtype=dtype)
        tokens = random_tokens(length=42)
        # From the start; after a short state; after one whose window has dropped old positions; with other histories.
        for before, history in ((0, 1), (2, 0), (9, 3))[:: 1 if dtype == torch.float64 else 2]:
            state = model.init_state(2, history)
            if before:
                state = read(model, tokens[:, :before], state)[1]
            prompt = tokens[:, before:]
            z, expected = read(model, prompt, state)
            found = prefill(model, prompt, state, solver=solver, tolerance=tolerance, segment=STEP)
            assert largest_norm(found.z_B1C - z[:, -1:]) <= tolerance * largest_norm(z)
            assert found.z_B1C.dtype == dtype
            assert_same_state(model, found.state, expected, 50 * tolerance)
            assert found.info.certificate <= tolerance
            assert (found.info.solver, found.info.tokens) == (solver, 42 - before)
            assert found.info.exact == (solver == "sequential")


@pytest.mark.parametrize("solver", SOLVERS)
def test_what_is_read_does_not_change_the_state_before(solver):
    model = settling_model(window=5)
    tokens = random_tokens(length=30)
    state = read(model, tokens[:, :6])[1]
    kept = state.clone()
    prefill(model, tokens[:, 6:], state, solver=solver, segment=STEP)
    assert_same_state(model, state, kept, 0.0)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("length", [1, 2, 4 * STEP - 1, 4 * STEP, 4 * STEP + 1])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_short_prompts_and_segments_that_do_not_divide_them(window, length, solver):
    model = settling_model(window=window)
    tokens = random_tokens(length=length)
    found = prefill(model, tokens, solver=solver, tolerance=1e-9, segment=STEP)
    assert_same_state(model, found.state, read(model, tokens)[1], 1e-7)
    short = solver == "sequential" or (solver == "sweep" and length < FEWEST_SEGMENTS * STEP)
    assert (found.info.solver == "sequential") == short
    assert not (short and found.info.note)  # it is what should be done, so there is nothing to say


def test_by_itself_a_prompt_of_four_shortest_segments_is_swept():
    model = settling_model()
    for length, solver in ((FEWEST_SEGMENTS * SHORTEST_SEGMENT - 1, "sequential"), (64, "sweep")):
        assert prefill(model, random_tokens(length=length)).info.solver == solver


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("window", [None, 5])
def test_a_prompt_may_be_solved_chunk_by_chunk(window, solver):
    model = settling_model(window=window)
    tokens = random_tokens(length=76)
    z, expected = read(model, tokens)
    found = prefill(model, tokens, solver=solver, tolerance=1e-6, segment=STEP, chunk=32)
    assert largest_norm(found.z_B1C - z[:, -1:]) <= 1e-6 * largest_norm(z)
    assert_same_state(model, found.state, expected, 1e-4)
    state, infos = model.init_state(2), []
    for first in (0, 32, 64):
        part = prefill(model, tokens[:, first : first + 32], state, solver=solver, tolerance=1e-6, segment=STEP)
        state = part.state
        infos.append(part.info)
    info = found.info
    assert (info.tokens, info.macs) == (76, sum(i.macs for i in infos))
    assert info.plain_macs == sum(i.plain_macs for i in infos)
    assert info.passes == pytest.approx(sum(i.passes * i.tokens for i in infos) / 76)
    assert info.certificate == max(i.certificate for i in infos)
    assert info.exact == (solver == "sequential")  # the last chunk of a sweep is exact, and that is not enough


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_tolerance_of_zero_is_exact(solver):
    model = small_model(window=5)
    tokens = random_tokens(length=40)
    found = prefill(model, tokens, solver=solver, tolerance=0.0, segment=STEP)
    assert (found.info.exact, found.info.certificate) == (True, 0.0)
    assert_same_state(model, found.state, read(model, tokens)[1], 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("gain", "length"), [(1.0, 64), (3.0, 16)])
def test_what_does_not_contract_is_noticed_and_still_exact(kind, gain, length):
    model = small_model(correction=kind, gain=gain)
    tokens = random_tokens(length=length)
    found = prefill(model, tokens, segment=STEP)
    m = len(found.info.changes)
    assert found.info.note == f"{m} sweeps settled too slowly; from token {m * STEP} on one by one"
    assert (found.info.exact, found.info.solver, found.info.certificate) == (True, "sweep", 0.0)
    assert found.info.passes == pytest.approx(1 + sum(length - i * STEP for i in range(m + 1)) / length)
    z, expected = read(model, tokens)
    assert gap(found.z_B1C, z[:, -1:]) < 1e-9 * largest_norm(z)
    assert found.state.position == length
    assert gap(found.state.cache.layers[-1][0], expected.cache.layers[-1][0]) < 1e-9 * largest_norm(z)


@pytest.mark.parametrize("window", [None, 6])
def test_m_sweeps_make_the_first_m_segments_exact_and_no_more(window):
    model = small_model(window=window)
    tokens = random_tokens(length=5 * STEP + 3)
    with torch.inference_mode():
        for before in (0, 9):
            state = read(model, tokens[:, :before])[1] if before else model.init_state(2)
            e = model.backbone.embed(tokens)
            z, _ = model.read(e, state)
            chunk = Chunk(model, e, state)
            chunk.plain_pass()
            assert gap(chunk.z_BTC, next(model.passes(e, state)).z_BTC) < 1e-10
            for m in range(1, 7):
                old = chunk.z_BTC.clone()
                change = chunk.sweep(m - 1, STEP)
                assert change == pytest.approx(largest_norm(chunk.z_BTC - old) / largest_norm(chunk.z_BTC))
                wrong_T = (chunk.z_BTC - z).abs().amax(dim=(0, 2))
                assert wrong_T[: m * STEP].max() < 1e-9
                assert m == 6 or wrong_T[m * STEP :].min() > 1e-6
            assert_same_state(model, chunk.solved(), model.read(e, state)[1], 1e-9)


@pytest.mark.parametrize("segment", [3, 4, 24])
def test_as_many_sweeps_as_segments_are_the_stream(segment):
    model = small_model()
    tokens = random_tokens(length=24)
    with torch.inference_mode():
        e = model.backbone.embed(tokens)
        found = solve_by_sweeps(model, e, model.init_state(2), 0.0, segment, inf)
    segments = 24 // segment
    assert (found.exact, found.alone_from, len(found.changes)) == (True, None, segments)
    assert found.runs == tuple((m * segment, 24) for m in range(segments))
    z, expected = read(model, tokens)
    assert gap(found.z_BTC, z) < 1e-9
    assert_same_state(model, found.state, expected, 1e-9)


def test_a_contracting_model_stops_at_the_first_sweep_within_the_tolerance():
    model = contractive_model(scale=0.05)
    tokens = random_tokens(length=120)
    z, _ = read(model, tokens)
    with torch.inference_mode():
        e = model.backbone.embed(tokens)
        for tolerance in (1e-2, 1e-5):
            found = solve_by_sweeps(model, e, model.init_state(2), tolerance, 8, 8.0)
            assert found.changes[-1] <= tolerance < found.changes[-2]
            assert not found.exact
            assert largest_norm(found.z_BTC - z) <= tolerance * largest_norm(z)
            info = prefill(model, tokens, segment=8, tolerance=tolerance).info
            assert info.certificate == found.changes[-1]
            assert info.passes < 8
            assert info.note == ""


@pytest.mark.parametrize("window", [None, 5])
def test_sweeps_that_are_not_finite_are_thrown_away(monkeypatch, window):
    model = settling_model(window=window)
    tokens = random_tokens(length=34)
    state = read(model, tokens[:, :9])[1]
    z, expected = read(model, tokens[:, 9:], state)
    recur = model.recur

    def overflowing(e, carried, cache=None):
        return recur(e * nan if carried is None else e, carried, cache)

    monkeypatch.setattr(model, "recur", overflowing)
    found = prefill(model, tokens[:, 9:], state, segment=STEP)
    assert found.info.note == "1 sweeps settled too slowly; from token 0 on one by one"
    assert found.info.exact
    assert isnan(found.info.changes[0])
    assert found.info.passes == 3.0  # the plain pass, the sweep, and all again
    assert gap(found.z_B1C, z[:, -1:]) < 1e-10
    assert_same_state(model, found.state, expected, 1e-10)


def counted(model, batch, position, spans):
    """Multiply-accumulates by the paper's counts, token by token; a span is (from, to, with a correction)."""
    c, total = model.backbone.config, 0
    correction = {"add": 8, "blind": 8, "tied": 8, "concat": 12, "block_head": 0}[c.correction] * c.width**2
    for begin, end, corrected in spans:
        for t in range(position + begin, position + end):
            seen = t + 1 if c.window is None else min(t + 1, c.window)
            total += 12 * c.layers * c.width**2 + (8 * c.width**2 if c.extra_ffn else 0)
            total += 2 * c.width * c.layers * seen + (correction if corrected else 0)
    return batch * total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window", "extra_ffn", "before"), [(None, False, 0), (5, True, 9), (None, True, 3)])
def test_the_arithmetic_is_counted_as_in_the_paper(kind, window, extra_ffn, before):
    T = 26
    tokens = random_tokens(length=before + T)
    for build in (settling_model, small_model):
        model = build(**{"kind" if build is settling_model else "correction": kind}, window=window, extra_ffn=extra_ffn)
        state = read(model, tokens[:, :before])[1] if before else None
        for solver in SOLVERS:
            info = prefill(model, tokens[:, before:], state, solver=solver, segment=STEP).info
            m = len(info.changes)
            spans = {
                "sequential": [(0, T, True)],
                "jacobi": [(0, T, False)] + [(0, T, True)] * m,
                # Segments that are exact are not swept again; what is read alone begins where the next sweep would.
                "sweep": [(0, T, False)] + [(i * STEP, T, True) for i in range(m + bool(info.note))],
            }[solver]
            assert info.macs == counted(model, 2, before, spans)
            assert info.plain_macs == counted(model, 2, before, [(0, T, False)])
            assert info.cost == info.macs / info.plain_macs
            assert info.passes == pytest.approx(sum(end - begin for begin, end, _ in spans) / T)
            assert bool(info.note) == (solver == "sweep" and build is small_model)
            assert info.seconds > 0


def test_the_certificate_is_the_last_change_unless_the_result_is_exact():
    def info(changes, exact, macs=30, plain=20):
        return ReadInfo("sweep", 5, 0.1, 2.0, macs, plain, changes, exact)

    assert info((0.5, 0.25), False).certificate == 0.25
    assert info((0.25, 0.5), False).certificate == 0.5
    assert info((0.5, 0.25), True).certificate == 0.0
    assert info((), True).certificate == 0.0
    assert info((), False).certificate == inf
    assert info((), True).cost == 1.5
    assert info((), True, macs=None).cost is None
    assert info((), True, plain=None).cost is None
    assert info((), True).note == ""


@pytest.mark.parametrize("window", [None, 5])
def test_a_backbone_without_fixed_places_is_read_by_parallel_passes(window):
    model = settling_model(window=window)
    tokens = random_tokens(length=40)
    found = prefill(wrapped(model), tokens, tolerance=1e-9, segment=STEP)
    assert found.info.note == "this backbone has no fixed places for keys and values, so parallel passes were made"
    assert (found.info.solver, found.info.macs, found.info.cost) == ("jacobi", None, None)
    assert found.info.certificate <= 1e-9
    assert_same_state(model, found.state, read(model, tokens)[1], 1e-7)
    asked = prefill(wrapped(model), tokens, solver="jacobi", tolerance=1e-9)
    assert (asked.info.note, asked.info.changes) == ("", found.info.changes)


def test_and_one_by_one_when_those_do_not_settle():
    model = small_model()
    tokens = random_tokens(length=40)
    found = prefill(wrapped(model), tokens, segment=STEP)
    assert found.info.note.endswith("were made; 32 were not enough, and the prompt was read one by one")
    assert (found.info.solver, found.info.exact) == ("sequential", True)
    assert_same_state(model, found.state, read(model, tokens)[1], 1e-10)
    short = prefill(wrapped(model), tokens[:, :31], segment=STEP)  # T + 1 passes are exact whatever the contraction
    assert (short.info.solver, short.info.exact, short.info.passes) == ("jacobi", True, 32)
    one_by_one = prefill(wrapped(model), tokens, solver="sequential")
    assert (one_by_one.info.note, one_by_one.info.passes) == ("", 1.0)
    assert_same_state(model, one_by_one.state, found.state, 0.0)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("window", [None, 5])
def test_a_plain_transformer_is_read_in_one_pass(window, solver):
    model = small_model(correction=None, window=window)
    tokens = random_tokens(length=70)
    found = prefill(as_context_ready(model), tokens, solver=solver)
    with torch.inference_mode():
        logits, cache = model.stream(tokens, model.init_cache(2))
        assert gap(model.head(found.z_B1C), logits[:, -1:]) < 1e-10
    assert gap(found.state.cache.layers[1][1], cache.layers[1][1]) < 1e-10
    info = found.info
    assert (info.solver, info.passes, info.exact, info.changes, info.cost) == ("plain", 1.0, True, (), 1.0)


def test_segments_get_longer_with_the_prompt_and_shorter_with_wider_hardware():
    lengths, widths = [64, 65, 100, 1000, 4096, 10_000], [1.0, 2.0, 3.0, 8.0, 30.0, 1e6]
    for rows in widths:
        segments = [segment_length(T, rows) for T in lengths]
        assert segments == sorted(segments)
        assert min(segments) >= SHORTEST_SEGMENT
        # Steps are at most twice as wide as is free, to the nearest power of two.
        assert all(-(-T // L) <= 2 * rows * 2**0.5 for T, L in zip(lengths, segments, strict=True))
    for T in lengths:
        segments = [segment_length(T, rows) for rows in widths]
        assert segments == sorted(segments, reverse=True)
    assert (segment_length(4096, 8.0), segment_length(4097, 8.0), segment_length(4096, 1e6)) == (256, 257, 16)


@pytest.mark.xfail(strict=True, reason="segment_length gives 2 segments on narrow hardware, fewer than pay")
def test_a_prompt_is_never_swept_in_fewer_segments_than_pay():
    assert all(-(-T // segment_length(T, 1.0)) >= FEWEST_SEGMENTS for T in (64, 100, 4096))


def test_the_sweeps_left_follow_from_the_last_two_changes():
    assert sweeps_left([0.5], 1e-3, 9) == 1  # one change says nothing
    assert sweeps_left([0.5, 0.3], 1e-3, 9) == 1  # hopeful
    assert sweeps_left([0.5, 0.4], 1e-3, 90) == 27  # 0.4 · 0.8^27 is the first below
    assert 0.4 * 0.8**27 <= 1e-3 < 0.4 * 0.8**26
    assert sweeps_left([0.9, 0.5, 0.25], 1e-3, 90) == 8
    assert sweeps_left([0.9, 0.5, 0.25], 1e-3, 5) == 5
    assert sweeps_left([0.5, 0.5], 1e-3, 7) == sweeps_left([0.5, 0.6], 1e-3, 7) == 7
    assert sweeps_left([0.5, 0.1], 0.0, 7) == 7
    assert sweeps_left([0.5, nan], 1e-3, 7) == sweeps_left([inf], 1e-3, 7) == inf


def test_as_many_sweeps_as_take_the_time_of_reading_alone():
    for rows in (1.0, 4.0, 100.0):
        found = [as_many_as_alone(segments, rows) for segments in range(1, 200)]
        assert found == sorted(found)
        assert found[0] == pytest.approx(1.0)
        assert all(1.0 <= some <= min(segments, rows + 1) + 1e-9 for segments, some in enumerate(found, 1))
        # A sweep of L steps, s wide, against s · L steps of one: L drops out.
        assert found[9] * (1 + 10 / rows) == pytest.approx(10 * (1 + 1 / rows))
    assert as_many_as_alone(12, inf) == 12


def test_the_hardware_is_measured_once_for_each_model(monkeypatch):
    model, other, timed = small_model(), small_model(), []

    def seconds(model, rows):
        timed.append((model, rows))
        return {1: 1.0, hardware.WIDE: 1.0 + (hardware.WIDE - 1) * 0.1}[rows]

    with monkeypatch.context() as patch:
        patch.setattr(hardware, "_seconds", seconds)
        # 0.1 a row and 0.9 whatever the rows: 9 rows cost as much as the step itself.
        assert hardware.free_rows(model) == pytest.approx(9.0)
        assert hardware.free_rows(model) == pytest.approx(9.0)
        patch.setattr(hardware, "_seconds", lambda model, rows: float(rows))
        assert hardware.free_rows(other) == 1.0  # never less
    assert timed == [(model, 1), (model, hardware.WIDE)]
    for window in (None, 1, 5):
        assert 1.0 <= hardware.free_rows(small_model(window=window, dtype=torch.float32)) < inf


def test_bad_calls_say_what_is_wrong():
    model, tokens = small_model(), random_tokens()
    cases = [
        (lambda: prefill(model, tokens, solver="sweeps"), "Unknown solver 'sweeps'; .*sweep"),
        (lambda: prefill(model, tokens, tolerance=-1e-3), "tolerance=-0.001 is not a distance"),
        (lambda: prefill(model, tokens, tolerance=nan), "tolerance=nan is not a distance"),
        (lambda: prefill(model, tokens, chunk=0), "chunk=0 .* at least 1"),
        (lambda: prefill(model, tokens, segment=0), "segment=0 .* at least 1"),
        (lambda: prefill(model, tokens[:, :0]), r"shape \(2, 0\)"),
        (lambda: prefill(model, tokens + 23), "out of range"),
        (lambda: prefill(model, tokens, model.init_state(3)), "3 rows and 2 were given"),
        (lambda: prefill(model, tokens, small_model(width=24).init_state(2)), "another model"),
    ]
    for call, sentence in cases:
        with pytest.raises(ContextReadyError, match=sentence):
            call()


@pytest.mark.xfail(strict=True, raises=IndexError, reason="prefill indexes tokens before it checks their shape")
def test_tokens_that_are_no_batch_are_refused():
    with pytest.raises(ContextReadyError, match=r"shape \(9,\)"):
        prefill(small_model(), random_tokens()[0])


@pytest.mark.parametrize(
    "solver",
    ["jacobi"]
    + [
        pytest.param(s, marks=pytest.mark.xfail(strict=True, reason="buffers take states of other models"))
        for s in ("sweep", "sequential")
    ],
)
@pytest.mark.parametrize("changes", [{"layers": 1}, {"window": 3}])
def test_a_state_of_another_model_is_refused(changes, solver):
    other, tokens = small_model(**changes), random_tokens(length=20)
    with pytest.raises(ContextReadyError, match="state is of another model"):
        prefill(small_model(), tokens, read(other, tokens)[1], solver=solver, segment=STEP)


@pytest.mark.parametrize("solver", ["sweep", "sequential"])
def test_after_a_state_that_was_rolled_back_no_more_is_held_than_was_read(solver):
    model, tokens = settling_model(window=10), random_tokens(length=60)
    state = read(model, tokens, model.init_state(2, 30))[1].rollback(40)
    expected = read(model, tokens[:, 40:56], state)[1]
    found = prefill(model, tokens[:, 40:56], state, solver=solver, tolerance=1e-9, segment=STEP).state
    assert expected.cache.length == 19 + 16
    assert found.cache.length == expected.cache.length
    assert_same_state(model, found, expected, 1e-7)


@pytest.mark.xfail(strict=True, raises=RuntimeError, reason="z and the state are inference tensors; use torch.no_grad")
def test_what_was_read_can_be_used_while_gradients_are_on():
    model = small_model(correction="blind")
    found = prefill(model, random_tokens())
    loss = model.backbone.head(found.z_B1C).sum() + model.stream(random_tokens(), found.state)[0].sum()
    loss.backward()
    assert all(weight.grad is not None for weight in model.correction.parameters())


@pytest.fixture(scope="module")
def trained():
    """A tiny model trained by parallel passes on a language in which a token depends on the two before it."""
    torch.manual_seed(0)
    V, T = 64, 64
    table = torch.randint(V, (V, 8, 3))
    noise = torch.Generator().manual_seed(1)

    def texts(count, length):
        tokens = torch.randint(V, (count, length), generator=noise)
        for t in range(2, length):
            choice = (torch.rand(count, generator=noise) ** 3 * 3).long()
            tokens[:, t] = table[tokens[:, t - 1], tokens[:, t - 2] % 8, choice]
        return tokens

    model = build_model(ModelConfig(vocab_size=V, width=32, layers=1, heads=2, correction="add"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, corpus = [], texts(16 * 150, T + 1)
    for step in range(150):
        batch = corpus[16 * step : 16 * step + 16]
        logits = model(batch[:, :-1], passes=2 + step % 3)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    return model.eval(), texts(20, 100)


def test_a_trained_model_continues_a_swept_prompt_as_a_streamed_one(trained):
    model, prompts = trained
    for length in (64, 83, 100):
        tokens, continuations = prompts[:, :length], []
        for solver in ("sweep", "sequential"):
            found = prefill(model, tokens, solver=solver)
            assert (found.info.solver, found.info.note) == (solver, "")
            state, chosen = found.state, []
            with torch.inference_mode():
                logits = model.backbone.head(found.z_B1C)
                for _ in range(20):
                    chosen.append(logits[:, -1:].argmax(dim=-1))
                    logits, state = model.stream(chosen[-1], state)
            continuations.append(torch.cat(chosen, dim=1))
            if solver == "sweep":
                assert found.info.certificate <= TOLERANCE
                assert found.info.passes < 6
                error = largest_norm(found.z_B1C - read(model, tokens)[0][:, -1:])
                assert error <= TOLERANCE * largest_norm(found.z_B1C)
        assert torch.equal(*continuations)
        assert len(set(map(tuple, continuations[0].tolist()))) > 10  # the prompts matter
