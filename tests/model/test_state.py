"""A state is a value: every operation on it continues exactly."""

import os

import pytest
import torch
from helpers import gap, random_tokens, small_model, stream_in_chunks
from safetensors import SafetensorError

from contextready import ContextReadyError, State, unroll

WINDOWS = [None, 1, 4]


def streamed(window=None, history=1, kind="add", length=10):
    model = small_model(window=window, correction=kind)
    tokens = random_tokens(batch=3, length=length)
    _, state = model.stream(tokens, model.init_state(3, history))
    return model, tokens, state


def continues(model, state, expected_state):
    more = random_tokens(batch=state.batch_size, length=5, seed=9)
    a, _ = model.stream(more, state)
    b, _ = model.stream(more, expected_state)
    return torch.equal(a, b)


def test_stepping_changes_no_earlier_state():
    model, tokens, state = streamed()
    before = state.clone()
    model.stream(tokens, state)
    assert state.position == before.position == 10
    assert continues(model, state, before)


def test_clone_shares_no_memory():
    _, _, state = streamed()
    copy = state.clone()
    copy.carried_BRC.zero_()
    for kv in copy.cache.layers:
        kv[0].zero_()
    assert state.carried_BRC.abs().max() > 0
    assert state.cache.layers[0][0].abs().max() > 0


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", ["add", "block_head"])
def test_select_reorder_and_repeat_rows(kind, window):
    model, tokens, state = streamed(window, kind=kind)
    for rows in ([2], [2, 0, 1], [1, 1, 0, 2, 2]):
        _, expected = model.stream(tokens[rows], model.init_state(len(rows)))
        chosen = state.select(rows)
        more = random_tokens(batch=len(rows), length=4, seed=9)
        assert gap(model.stream(more, chosen)[0], model.stream(more, expected)[0]) < 1e-12
    assert continues(model, state.repeat(2), state.select([0, 0, 1, 1, 2, 2]))
    assert not continues(model, state, state.select([2, 0, 1]))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", ["add", "block_head"])
def test_rollback_is_exact(kind, window):
    model, tokens, state = streamed(window, history=6, kind=kind)
    for position in (10, 9, 7, 4):
        _, expected = model.stream(tokens[:, :position], model.init_state(3, history=6))
        assert state.rollback(position).position == position
        assert continues(model, state.rollback(position), expected)
    twice = state.rollback(8).rollback(5)
    assert continues(model, twice, state.rollback(5))
    assert continues(model, state.rollback(0), model.init_state(3))
    assert state.rollback(0).nbytes == model.init_state(3).nbytes


def test_rollback_past_the_history_is_refused():
    _, _, state = streamed(history=2)
    assert state.rollback(8).position == 8
    with pytest.raises(ContextReadyError, match=r"Cannot roll back 3 tokens.*keeps a history of 2.*larger history"):
        state.rollback(7)
    with pytest.raises(ContextReadyError, match="10 tokens have been read"):
        state.rollback(11)
    # A second rollback cannot use history that the first one spent.
    with pytest.raises(ContextReadyError, match="larger history"):
        state.rollback(8).rollback(7)


def test_windowed_cache_alone_refuses_a_rollback_it_cannot_serve():
    model = small_model(correction=None, window=4)
    _, state = model.stream(random_tokens(length=10), model.init_state(2, history=1))
    cache = state.cache
    assert cache.rollback(9).length == 3
    with pytest.raises(ContextReadyError, match="needs 3 earlier positions, but only 2 are kept"):
        cache.rollback(8)


def test_history_zero_and_one_hold_no_more_than_the_window():
    for history in (0, 1):
        model = small_model(window=4)
        state = model.init_state(2, history)
        for t in range(12):
            _, state = model.stream(random_tokens(length=12)[:, t : t + 1], state)
            assert state.cache.length <= 4
        longer = random_tokens(length=30)
        _, at_once = model.stream(longer, model.init_state(2, history))
        assert at_once.cache.length <= 4


def test_history_is_only_kept_for_rollback():
    model = small_model(window=4)
    tokens = random_tokens(length=15)
    results = [stream_in_chunks(model, tokens, [5, 10], model.init_state(2, history=h))[0] for h in (0, 1, 7)]
    assert gap(results[0], results[1]) < 1e-12
    assert gap(results[0], results[2]) < 1e-12


@pytest.mark.parametrize("window", WINDOWS)
def test_save_and_load_continue_exactly(window, tmp_path):
    model, _, state = streamed(window, history=3)
    path = tmp_path / "state.safetensors"
    state.save(path)
    loaded = State.load(path)
    assert (loaded.position, loaded.history, loaded.nbytes) == (state.position, state.history, state.nbytes)
    longer = random_tokens(batch=3, length=20, seed=3)
    assert model.stream(longer, loaded)[1].nbytes == model.stream(longer, state)[1].nbytes
    assert continues(model, loaded, state)
    assert continues(model, loaded.rollback(8), state.rollback(8))
    assert [file.name for file in tmp_path.iterdir()] == ["state.safetensors"]


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_a_saved_state_obeys_the_umask(tmp_path, umask):
    earlier = os.umask(umask)
    try:
        streamed()[2].save(tmp_path / "state")
    finally:
        os.umask(earlier)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_fresh_state_can_be_saved(tmp_path):
    model = small_model()
    model.init_state(2).save(tmp_path / "s")
    assert continues(model, State.load(tmp_path / "s"), model.init_state(2))


def test_bad_files_are_refused(tmp_path):
    from safetensors.torch import save_file

    _, _, state = streamed()
    path = tmp_path / "state"
    state.save(path)
    whole = path.read_bytes()

    (tmp_path / "cut").write_bytes(whole[:-1])
    save_file({"x": torch.zeros(1)}, tmp_path / "weights")
    for name, message in (
        ("cut", "not a complete safetensors file"),
        ("weights", "not a saved state"),
        ("missing", "no state file"),
    ):
        with pytest.raises(ContextReadyError, match=message):
            State.load(tmp_path / name)
    with pytest.raises(ContextReadyError, match="could not be written"):
        state.save(tmp_path / "no such folder" / "state")


@pytest.mark.parametrize(
    "damage",
    [
        lambda t, m: m.pop("cache"),
        lambda t, m: m.update(cache="{"),
        lambda t, m: m.update(cache="[]"),
        lambda t, m: m.update(cache=m["cache"].replace('"layers": 2', '"layers": 5')),
        lambda t, m: m.update(cache=m["cache"].replace('"layers": 2', '"layers": 0')),
        lambda t, m: m.update(cache=m["cache"].replace('"position": 10', '"position": "x"')),
        lambda t, m: m.update(cache=m["cache"].replace('"position": 10', '"position": 2')),
        lambda t, m: m.update(cache=m["cache"].replace('"position": 10', '"position": 50')),
        lambda t, m: m.update(cache=m["cache"].replace('"keep": null', '"keep": 2')),
        lambda t, m: m.update(cache=m["cache"].replace('"keep": null', '"keep": "x"')),
        lambda t, m: m.pop("history"),
        lambda t, m: m.update(history="-3"),
        lambda t, m: t.pop("carried"),
        lambda t, m: t.update(carried=t["carried"][0]),
        lambda t, m: t.update(carried=t["carried"][:2].clone()),
        lambda t, m: t.update({"cache.1.v": t["cache.1.v"][:, :, 1:].clone()}),
        lambda t, m: m.update(cache="[" * 100_000),
        lambda t, m: m.update(cache=m["cache"].replace('"layers": 2', '"layers": 1000000000')),
        lambda t, m: m.update(cache=m["cache"].replace('"layers": 2', '"layers": true')),
        lambda t, m: m.update(cache=m["cache"].replace('"position": 10', '"position": 10.0')),
        lambda t, m: m.update(cache=m["cache"].replace('"position": 10', '"position": NaN')),
        lambda t, m: m.update(cache=m["cache"].replace('"window": null', '"window": 4')),
        lambda t, m: m.update(cache=m["cache"].replace('"keep": null', '"keep": 11')),
        lambda t, m: m.update(cache=m["cache"].replace("{", '{"more": 1, ')),
        lambda t, m: m.update(history="1" * 5000),
        lambda t, m: m.update(history="x"),
        lambda t, m: m.update(more="x"),
        lambda t, m: t.update(more=torch.zeros(1)),
        lambda t, m: t.update(carried=t["carried"].float()),
        lambda t, m: t.update({"cache.0.k": t["cache.0.k"].flatten(0, 1)}),
        lambda t, m: t.update({name: tensor.long() for name, tensor in t.items()}),
        lambda t, m: t.update({name: tensor[:0].clone() for name, tensor in t.items()}),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, damage):
    from safetensors import safe_open
    from safetensors.torch import save_file

    _, _, state = streamed()
    state.save(tmp_path / "whole")
    with safe_open(tmp_path / "whole", framework="pt") as file:
        tensors, meta = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    damage(tensors, meta)
    save_file(tensors, tmp_path / "damaged", metadata=meta)
    with pytest.raises(ContextReadyError, match=r"The state at .* is damaged .* save it again"):
        State.load(tmp_path / "damaged")


def test_layers_of_other_sizes_do_not_match_the_model(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    model, _, state = streamed()
    state.save(tmp_path / "whole")
    with safe_open(tmp_path / "whole", framework="pt") as file:
        tensors, meta = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    tensors["cache.1.v"] = tensors["cache.1.v"][..., :1].clone()
    save_file(tensors, tmp_path / "other", metadata=meta)
    with pytest.raises(ContextReadyError, match="This state does not match the model"):
        model.stream(random_tokens(batch=3), State.load(tmp_path / "other"))


def test_a_state_of_another_type_does_not_fit_an_engine():
    model, _, state = streamed()
    buffer = model.float().backbone.init_buffer(1, 16)
    with pytest.raises(ContextReadyError, match=r"numbers of type torch\.float64, but the engine computes in"):
        buffer.load(0, state.select([0]).cache)


def test_an_impossible_buffer_is_refused():
    with pytest.raises(ContextReadyError, match=r"would take .* GB, but this machine has"):
        small_model().backbone.init_buffer(1, 10**12)


@pytest.mark.parametrize(
    "note", ["", "[", "3", "{}", '{"newest": []}', '{"newest": [-1]}', '{"newest": ["1"]}', '{"newest": [1], "x": 1}']
)
def test_a_state_without_a_valid_note_is_no_session(tmp_path, note):
    from contextready.infer.session import Session

    streamed()[2].save(tmp_path / "state", note=note)
    with pytest.raises(ContextReadyError, match="is a state but not a session"):
        Session.load(tmp_path / "state")


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), SafetensorError("I/O error (os error 5)")])
def test_errors_of_the_disk_are_one_sentence(tmp_path, monkeypatch, error):
    import safetensors.torch

    def broken(*_, **__):
        raise error

    def broken_read():
        raise RuntimeError(f"unable to mmap: {error}")

    _, _, state = streamed()
    state.save(tmp_path / "state")
    monkeypatch.setattr(torch, "from_file", lambda *_, **__: broken_read())
    monkeypatch.setattr(safetensors.torch, "save_file", broken)
    with pytest.raises(ContextReadyError, match=r"state could not be loaded: .*os error 5|Errno 5"):
        State.load(tmp_path / "state")
    with pytest.raises(ContextReadyError, match=r"other could not be written: .*os error 5|Errno 5"):
        state.save(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_pipe_is_not_a_state(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ContextReadyError, match="is not a regular file"):
        State.load(tmp_path / "pipe")


def test_an_unusable_device_is_named(tmp_path):
    _, _, state = streamed()
    state.save(tmp_path / "state")
    for device in ("nowhere", "xpu:7"):
        with pytest.raises(ContextReadyError, match=f"device '{device}' is not available"):
            State.load(tmp_path / "state", device)
    assert State.load(tmp_path / "state", "meta").carried_BRC.is_meta


def test_a_state_does_not_hold_on_to_the_chunk_it_came_from():
    model = small_model(window=4)
    tokens = random_tokens(batch=1, length=500)
    with torch.inference_mode():
        _, info = unroll(model, tokens, passes=2, state=model.init_state(1))
        _, cache = model.backbone.blocks(model.backbone.embed(tokens), model.backbone.init_cache(1))
    held = [t for kv in (*info.state.cache.layers, *cache.layers) for t in kv] + [info.state.carried_BRC]
    for tensor in held:
        assert tensor.untyped_storage().nbytes() <= 2 * tensor.nbytes


def test_a_failed_save_leaves_the_earlier_file(tmp_path, monkeypatch):
    import safetensors.torch

    model, _, state = streamed()
    path = tmp_path / "state"
    state.save(path)

    def full_disk(tensors, filename, metadata=None):
        filename.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    with pytest.raises(ContextReadyError, match=r"The disk is full, so .*state was not written"):
        state.rollback(9).save(path)
    assert continues(model, State.load(path), state)
    assert [file.name for file in tmp_path.iterdir()] == ["state"]


def test_bad_rows_are_refused():
    _, _, state = streamed()
    for rows in ([3], [-1], [], [[0]], [0.5]):
        with pytest.raises(ContextReadyError, match=r"[Rr]ow"):
            state.select(rows)
    with pytest.raises(ContextReadyError, match="at least 1"):
        state.repeat(0)


def test_nbytes_is_what_is_held():
    _, _, state = streamed(history=1)
    # 2 layers of keys and values of 10 positions, and the two newest z, in float64, 3 rows of width 12.
    assert state.nbytes == 3 * 12 * 8 * (2 * 2 * 10 + 2)


def test_a_windowed_state_that_was_rolled_back_can_be_saved(tmp_path):
    model, _, state = streamed(window=4, history=3)
    back = state.rollback(8)
    back.save(tmp_path / "back.state")
    assert continues(model, State.load(tmp_path / "back.state"), back)
