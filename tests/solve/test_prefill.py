"""Reading prompts: every solver ends in the stream's state, reports its cost, and notices a lack of convergence."""

from math import inf, nan

import pytest
import torch
from helpers import KINDS, gap, random_tokens, small_model
from prefill_helpers import STEP, assert_same_state, largest_error, largest_norm, read, settling_model, wrapped

from contextready import ContextReadyError, ModelConfig, build_model
from contextready.solve import hardware
from contextready.solve.prefill import prefill
from contextready.solve.prompt_reader import FEWEST_SEGMENTS, SHORTEST_SEGMENT, SOLVERS, TOLERANCE
from contextready.solve.reading import ReadInfo


@pytest.fixture(autouse=True)
def _known_hardware(monkeypatch):
    """Fix the hardware figure, so that the load of this machine does not matter and converging sweeps pay off."""
    monkeypatch.setattr("contextready.solve.prefill.free_tokens", lambda model: 1000.0)


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
            assert largest_error(found.z_B1C, z[:, -1:]) <= tolerance
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
    assert not (short and found.info.note)  # this is the intended way, so there is nothing to note


def test_a_prompt_of_four_shortest_segments_is_swept_by_default():
    model = settling_model()
    for length, solver in (
        (FEWEST_SEGMENTS * SHORTEST_SEGMENT - 1, "sequential"),
        (FEWEST_SEGMENTS * SHORTEST_SEGMENT, "sweep"),
    ):
        assert prefill(model, random_tokens(length=length)).info.solver == solver


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("window", [None, 5])
def test_a_prompt_may_be_solved_chunk_by_chunk(window, solver):
    model = settling_model(window=window)
    tokens = random_tokens(length=76)
    z, expected = read(model, tokens)
    found = prefill(model, tokens, solver=solver, tolerance=1e-6, segment=STEP, chunk=32)
    assert largest_error(found.z_B1C, z[:, -1:]) <= 1e-6
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
    assert (
        found.info.note == f"after sweep {m}, tokens from {m * STEP} on were read one at a time, which seemed cheaper"
    )
    assert (found.info.exact, found.info.solver, found.info.certificate) == (True, "sweep", 0.0)
    assert found.info.passes == pytest.approx(1 + sum(length - i * STEP for i in range(m + 1)) / length)
    z, expected = read(model, tokens)
    assert gap(found.z_B1C, z[:, -1:]) < 1e-9 * largest_norm(z)
    assert found.state.position == length
    assert gap(found.state.cache.layers[-1][0], expected.cache.layers[-1][0]) < 1e-9 * largest_norm(z)


def counted(model, batch, position, spans):
    """Multiply-accumulates by the paper's counts, token by token; a span is (from, to, with a correction)."""
    c, total = model.backbone.config, 0
    correction = {"concat": 12, "concat_z": 12, "block_head": 0}.get(c.correction, 8) * c.width**2
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
        # With smaller weights, sweeps of a random concat_z model settle, because it normalises z alone.
        gain = 2.0 if kind == "concat_z" else 1.0
        own = {"kind": kind} if build is settling_model else {"correction": kind, "gain": gain}
        model = build(**own, window=window, extra_ffn=extra_ffn)
        state = read(model, tokens[:, :before])[1] if before else None
        for solver in SOLVERS:
            info = prefill(model, tokens[:, before:], state, solver=solver, segment=STEP).info
            m = len(info.changes)
            spans = {
                "sequential": [(0, T, True)],
                "jacobi": [(0, T, False)] + [(0, T, True)] * m,
                # Exact segments are not swept again; reading one at a time starts where the next sweep would.
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
def test_a_backbone_without_sweeps_is_read_by_parallel_passes(window):
    model = settling_model(window=window)
    tokens = random_tokens(length=40)
    found = prefill(wrapped(model), tokens, tolerance=1e-9, segment=STEP)
    assert found.info.note == "this backbone does not support sweeps, so parallel passes were used"
    assert (found.info.solver, found.info.macs, found.info.cost) == ("jacobi", None, None)
    assert found.info.certificate <= 1e-9
    assert_same_state(model, found.state, read(model, tokens)[1], 1e-7)
    asked = prefill(wrapped(model), tokens, solver="jacobi", tolerance=1e-9)
    assert (asked.info.note, asked.info.changes) == ("", found.info.changes)


def test_a_backbone_without_sweeps_is_read_one_token_at_a_time_if_passes_do_not_converge():
    model = small_model()
    tokens = random_tokens(length=40)
    found = prefill(wrapped(model), tokens, segment=STEP)
    assert found.info.note.endswith("were used; 32 were not enough, so the prompt was read one token at a time")
    assert (found.info.solver, found.info.exact) == ("sequential", True)
    assert_same_state(model, found.state, read(model, tokens)[1], 1e-10)
    for length, solver, passes in ((20, "jacobi", 21), (31, "jacobi", 32), (32, "sequential", 33)):
        # T + 1 passes are exact whatever the contraction.
        info = prefill(wrapped(model), tokens[:, :length], tolerance=0.0, segment=STEP).info
        assert (info.solver, info.exact, info.passes) == (solver, True, passes)
    one_by_one = prefill(wrapped(model), tokens, solver="sequential")
    assert (one_by_one.info.note, one_by_one.info.passes) == ("", 1.0)
    assert_same_state(model, one_by_one.state, found.state, 0.0)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("window", [None, 5])
def test_a_plain_transformer_is_read_in_one_pass(window, solver):
    model = small_model(correction=None, window=window)
    tokens = random_tokens(length=70)
    found = prefill(model, tokens, solver=solver)
    with torch.inference_mode():
        logits, state = model.stream(tokens, model.init_state(2))
        assert gap(model.backbone.head(found.z_B1C), logits[:, -1:]) < 1e-10
    assert gap(found.state.cache.layers[1][1], state.cache.layers[1][1]) < 1e-10
    info = found.info
    assert (info.solver, info.passes, info.exact, info.changes, info.cost) == ("plain", 1.0, True, (), 1.0)


def test_the_hardware_is_measured_once_for_each_model(monkeypatch):
    model, other, timed = small_model(), small_model(), []

    def seconds(model, rows):
        timed.append((model, rows))
        return {1: 1.0, hardware.WIDE: 1.0 + (hardware.WIDE - 1) * 0.1}[rows]

    with monkeypatch.context() as patch:
        patch.setattr(hardware, "_seconds", seconds)
        # 0.1 per row and a fixed cost of 0.9, which equals the cost of 9 rows.
        assert hardware.free_tokens(model) == pytest.approx(9.0)
        assert hardware.free_tokens(model) == pytest.approx(9.0)
        patch.setattr(hardware, "_seconds", lambda model, rows: float(rows))
        assert hardware.free_tokens(other) == 1.0  # never less
    assert timed == [(model, 1), (model, hardware.WIDE)]
    for window in (None, 1, 5):
        assert 1.0 <= hardware.free_tokens(small_model(window=window, dtype=torch.float32)) < inf


def test_bad_calls_say_what_is_wrong():
    model, tokens = small_model(), random_tokens()
    cases = [
        (lambda: prefill(model, tokens, solver="sweeps"), "Unknown solver 'sweeps'; .*sweep"),
        (lambda: prefill(model, tokens, tolerance=-1e-3), "tolerance must be at least 0 .* but got -0.001"),
        (lambda: prefill(model, tokens, tolerance=nan), "tolerance must be at least 0 .* but got nan"),
        (lambda: prefill(model, tokens, chunk=0), "at least 1, but got chunk=0"),
        (lambda: prefill(model, tokens, segment=0), "at least 1, but got .*segment=0"),
        (lambda: prefill(model, tokens[:, :0]), r"got \(2, 0\)"),
        (lambda: prefill(model, tokens + 23), "out of range"),
        (lambda: prefill(model, tokens, model.init_state(3)), "3 rows, but the input has 2"),
        (lambda: prefill(model, tokens, small_model(width=24).init_state(2)), "does not match the model"),
    ]
    for call, sentence in cases:
        with pytest.raises(ContextReadyError, match=sentence):
            call()


def test_tokens_that_are_not_a_batch_are_refused():
    with pytest.raises(ContextReadyError, match=r"got \(9,\)"):
        prefill(small_model(), random_tokens()[0])


@pytest.mark.parametrize(
    "solver",
    SOLVERS,
)
@pytest.mark.parametrize("changes", [{"layers": 1}, {"window": 3}])
def test_a_state_of_another_model_is_refused(changes, solver):
    other, tokens = small_model(**changes), random_tokens(length=20)
    with pytest.raises(ContextReadyError, match="state does not match the model"):
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
                assert largest_error(found.z_B1C, read(model, tokens)[0][:, -1:]) <= TOLERANCE
        assert torch.equal(*continuations)
        assert len(set(map(tuple, continuations[0].tolist()))) > 10  # the prompts matter
