"""Generation on a plain engine: rows do not touch each other, states are what they say, every bad input is refused."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import small_model

from contextready.data.tokenizer import Tokenizer
from contextready.errors import ContextReadyError
from contextready.infer import generate as generation
from contextready.infer.generate import GenerationSettings
from contextready.infer.sampling import Sampling, choose, rng_for
from contextready.solve.reading import ReadInfo

GREEDY = Sampling(temperature=0)
WARM = Sampling(temperature=1.3)
FUSSY = Sampling(temperature=1.1, top_k=12, min_p=0.01, repetition_penalty=1.3)
MODEL = small_model(seed=5)  # one whose greedy choices do not settle on a token
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]


class StateEngine:
    """`ContextReady.stream` with one state a row; logits stay float64 and live in one buffer that is written anew."""

    name = "states"

    def __init__(self, model, rows, capacity=None, history=64):
        self.model, self.rows, self.capacity, self.history = model, rows, capacity, history
        self.vocab_size = model.backbone.config.vocab_size
        self.states = [model.init_state(1, history) for _ in range(rows)]
        self.buffer_RV = np.zeros((rows, self.vocab_size))
        self.reads, self.steps, self.loads = [], [], 0

    def position(self, row):
        return self.states[row].position

    def read(self, row, tokens):
        self.reads.append((row, list(tokens)))
        self.buffer_RV[0] = self._advance(row, tokens)
        info = ReadInfo("sequential", len(tokens), 0.0, 1.0, None, None, (), exact=True, note=f"row {row}")
        return self.buffer_RV[0], info

    def append(self, row, tokens):
        return self.read(row, tokens)[1]

    def step(self, tokens, rows=None):
        rows = range(self.rows) if rows is None else rows
        self.steps.append(dict(zip(rows, tokens, strict=True)))
        for i, (row, token) in enumerate(self.steps[-1].items()):
            self.buffer_RV[i] = self._advance(row, [token])
        return self.buffer_RV[: len(tokens)]

    def free(self, row):
        self.load(row, None)

    def state(self, row):
        return self.states[row].clone()

    def load(self, row, state):
        self.loads += 1
        self.states[row] = self.model.init_state(1, self.history) if state is None else state.clone()

    def copy_row(self, source, target):
        self.load(target, self.state(source))

    @torch.inference_mode()
    def _advance(self, row, tokens):
        assert self.capacity is None or self.position(row) + len(tokens) <= self.capacity, "the engine overflowed"
        logits_1TV, self.states[row] = self.model.stream(torch.tensor([list(tokens)]), self.states[row])
        return logits_1TV[0, -1].numpy()


class Scripted:
    """An engine whose most likely next token is scripted: the n-th token of a row's script, then token 11."""

    name, capacity = "scripted", None

    def __init__(self, scripts, vocab_size=300):
        self.scripts, self.rows, self.vocab_size = scripts, len(scripts), vocab_size
        self.at = [0] * self.rows

    def position(self, row):
        return self.at[row]

    def load(self, row, state):
        self.at[row] = 0

    def state(self, row):
        return self.at[row]

    def copy_row(self, source, target):
        self.at[target] = 0

    def read(self, row, tokens):
        return self._next(row), ReadInfo("sequential", len(tokens), 0.0, 1.0, None, None, (), exact=True)

    def append(self, row, tokens):
        return self.read(row, tokens)[1]

    def free(self, row):
        self.load(row, None)

    def step(self, tokens, rows=None):
        return np.stack([self._next(row) for row in (range(self.rows) if rows is None else rows)])

    def _next(self, row):
        logits_V = np.zeros(self.vocab_size, dtype=np.float32)
        logits_V[11] = 1.0
        logits_V[self.scripts[row][self.at[row] % len(self.scripts[row])]] = 9.0
        self.at[row] += 1
        return logits_V


def generate(engine, prompts, sampling, tokenizer=None, states=None, **settings):
    settings = GenerationSettings(sampling, **settings)
    return generation.generate(engine, prompts, settings, tokenizer=tokenizer, states=states)


def generate_pieces(engine, prompts, sampling, tokenizer=None, states=None, **settings):
    settings = GenerationSettings(sampling, **settings)
    return generation.generate_pieces(engine, prompts, settings, tokenizer=tokenizer, states=states)


def tokens_of(completions):
    return [completion.tokens for completion in completions]


def alone(prompt, sampling=GREEDY, model=MODEL, **options):
    (completion,) = generate(StateEngine(model, 1), [prompt], sampling, **options)
    return completion


@torch.inference_mode()
def by_hand(prompt, tokens, pick=lambda logits_V: int(logits_V.argmax())):
    """The loop everybody writes, and the logits each token was chosen from."""
    logits_1TV, state = MODEL.stream(torch.tensor([prompt]), MODEL.init_state(1))
    chosen, seen = [], []
    for _ in range(tokens):
        seen.append(logits_1TV[0, -1])
        chosen.append(pick(logits_1TV[0, -1]))
        logits_1TV, state = MODEL.stream(torch.tensor([chosen[-1:]]), state)
    return chosen, torch.stack(seen)


def test_greedy_is_the_loop_by_hand():
    for prompt in PROMPTS:
        completion = alone(prompt, max_tokens=15)
        assert completion.tokens == by_hand(prompt, 15)[0]
        assert (completion.finish, completion.text, completion.state) == ("length", "", None)
        assert (completion.logprobs, completion.top_logprobs) == (None, None)
    assert len(set(map(tuple, tokens_of(alone(p, max_tokens=15) for p in PROMPTS)))) == 3


def test_sampled_is_the_loop_by_hand_with_the_penalty():
    sampling = Sampling(temperature=0.9, top_k=7, top_p=0.95, repetition_penalty=1.4)
    rng, seen = rng_for(5, 0), list(PROMPTS[0])

    def pick(logits_V):
        seen.append(choose(logits_V.numpy(), sampling, rng, seen))
        return seen[-1]

    assert alone(PROMPTS[0], sampling, max_tokens=20, seed=5).tokens == by_hand(PROMPTS[0], 20, pick)[0]


def test_penalty_sees_prompt_and_completion():
    sampling = Sampling(temperature=0, repetition_penalty=1e6)
    seen_before = generate(Scripted([[7, 5, 7]]), [[7]], sampling, max_tokens=3)
    assert tokens_of(seen_before) == [[11, 5, 7]], "7 was in the prompt; at last 11 has been seen as well"
    seen_later = generate(Scripted([[7, 5, 7]]), [[8]], sampling, max_tokens=3)
    assert tokens_of(seen_later) == [[7, 5, 11]]


@pytest.mark.parametrize("sampling", [GREEDY, WARM, FUSSY], ids=["greedy", "sampled", "filtered"])
def test_a_batch_gives_what_each_prompt_gives_alone(sampling):
    engine = StateEngine(MODEL, len(PROMPTS))
    together = generate(engine, PROMPTS, sampling, max_tokens=12, seed=3)
    assert [c.prompt for c in together] == [0, 1, 2]
    assert tokens_of(together) == [alone(p, sampling, max_tokens=12, seed=3).tokens for p in PROMPTS]
    # The order of the prompts does not matter either.
    turned = generate(StateEngine(MODEL, 3), PROMPTS[::-1], sampling, max_tokens=12, seed=3)
    assert tokens_of(turned) == tokens_of(together)[::-1]


def test_samples_share_one_read_and_go_their_own_ways():
    engine = StateEngine(MODEL, 6)
    found = generate(engine, PROMPTS[:2], WARM, max_tokens=12, samples=3, seed=1)
    assert [(c.prompt, c.sample) for c in found] == [(i, s) for i in range(2) for s in range(3)]
    assert engine.reads == [(0, PROMPTS[0]), (3, PROMPTS[1])]
    assert [c.read.note for c in found] == ["row 0"] * 3 + ["row 3"] * 3
    assert len({tuple(c.tokens) for c in found}) == 6
    again = generate(StateEngine(MODEL, 6), PROMPTS[:2], WARM, max_tokens=12, samples=3, seed=1)
    assert tokens_of(again) == tokens_of(found)
    other = generate(StateEngine(MODEL, 6), PROMPTS[:2], WARM, max_tokens=12, samples=3, seed=2)
    assert all(a.tokens != b.tokens for a, b in zip(other, found, strict=True))
    # Sample 0 is what asking for one sample gives: more samples change nothing for the earlier ones.
    assert found[0].tokens == alone(PROMPTS[0], WARM, max_tokens=12, seed=1).tokens
    # All samples are equal when nothing is drawn.
    assert len({tuple(t) for t in tokens_of(generate(engine, PROMPTS[:1], GREEDY, max_tokens=8, samples=6))}) == 1


def test_a_forked_row_is_what_reading_the_prompt_again_gives():
    forked = generate(StateEngine(MODEL, 2), [PROMPTS[0]], WARM, max_tokens=10, samples=2, keep_states=True)[1]
    rng = rng_for(0, 1)
    tokens, _ = by_hand(PROMPTS[0], 10, lambda logits_V: choose(logits_V.numpy(), WARM, rng))
    assert forked.tokens == tokens
    _, state = MODEL.stream(torch.tensor([PROMPTS[0] + tokens[:-1]]), MODEL.init_state(1, 64))
    assert torch.allclose(forked.state.carried_BRC, state.carried_BRC, atol=1e-12, rtol=0)
    assert forked.state.position == state.position


def test_continued_is_the_whole_and_costs_no_step_more():
    whole = alone(PROMPTS[0], max_tokens=20).tokens
    engine = StateEngine(MODEL, 1)
    (first,) = generate(engine, [PROMPTS[0]], GREEDY, max_tokens=10, keep_states=True)
    assert len(engine.steps) == 9
    assert first.state.position == len(PROMPTS[0]) + 9
    assert first.unread == first.tokens[-1]
    (second,) = generate(StateEngine(MODEL, 1), [[first.unread]], GREEDY, max_tokens=10, states=[first.state])
    assert first.tokens + second.tokens == whole
    # The same engine goes on too, and the state can be used again: it is a value.
    (third,) = generate(engine, [[first.unread]], GREEDY, max_tokens=10, states=[first.state])
    assert third.tokens == second.tokens
    # Without the state the token alone means something else.
    assert alone([first.unread], max_tokens=10).tokens != second.tokens


def test_states_of_several_prompts_and_none():
    first = generate(StateEngine(MODEL, 2), PROMPTS[:2], GREEDY, max_tokens=5, keep_states=True)
    prompts = [[first[0].unread], PROMPTS[2], [first[1].unread, 7]]
    found = generate(
        StateEngine(MODEL, 6), prompts, WARM, max_tokens=6, samples=2, states=[first[0].state, None, first[1].state]
    )
    spelled = [PROMPTS[0] + first[0].tokens, PROMPTS[2], PROMPTS[1] + first[1].tokens + [7]]
    assert tokens_of(found) == tokens_of(generate(StateEngine(MODEL, 6), spelled, WARM, max_tokens=6, samples=2))


def test_a_rolled_back_state_goes_on_from_there():
    full = alone(PROMPTS[0], max_tokens=12, keep_states=True)
    back = full.state.rollback(len(PROMPTS[0]) + 4)
    again = alone([full.tokens[4]], max_tokens=7, states=[back])
    assert again.tokens == full.tokens[5:]
    other = next(token for token in range(23) if token != full.tokens[4])
    changed = alone([other], max_tokens=7, states=[back])
    assert changed.tokens == alone([*PROMPTS[0], *full.tokens[:4], other], max_tokens=7).tokens
    assert changed.tokens != again.tokens


def test_a_row_that_ends_early_is_not_stepped_on():
    plain, *others = (alone(prompt, max_tokens=12).tokens for prompt in PROMPTS[::-1])
    end = 3
    assert plain.index(end) == 5
    assert not any(end in tokens for tokens in others)
    engine = StateEngine(MODEL, 3)
    early, *rest = generate(engine, PROMPTS[::-1], GREEDY, max_tokens=12, stop_tokens=[end], keep_states=True)
    assert (early.tokens, early.finish, early.unread) == (plain[:6], "stop", end)
    assert early.state.position == len(PROMPTS[2]) + 5
    assert engine.position(0) == len(PROMPTS[2]) + 5
    assert [sorted(step) for step in engine.steps] == [[0, 1, 2]] * 5 + [[1, 2]] * 6
    (after,) = generate(StateEngine(MODEL, 1), [[end]], GREEDY, max_tokens=6, states=[early.state])
    assert after.tokens == plain[6:]
    assert [completion.finish for completion in rest] == ["length"] * 2
    assert tokens_of(rest) == others


def test_log_probabilities_are_float64_log_softmax_of_raw_logits():
    sampling = Sampling(temperature=0.5, top_k=5, repetition_penalty=2.0)
    completion = alone(PROMPTS[0], sampling, max_tokens=10, logprobs=4)
    picks = iter(completion.tokens)
    _, logits_TV = by_hand(PROMPTS[0], 10, lambda _: next(picks))
    expected_TV = logits_TV.log_softmax(-1)
    assert completion.logprobs == pytest.approx(
        [float(row[token]) for row, token in zip(expected_TV, completion.tokens, strict=True)], abs=1e-12
    )
    values, ids = expected_TV.topk(4)
    assert [[token for token, _ in top] for top in completion.top_logprobs] == ids.tolist()
    assert np.abs(np.array([[v for _, v in top] for top in completion.top_logprobs]) - values.numpy()).max() < 1e-12
    bare = alone(PROMPTS[0], sampling, max_tokens=10, logprobs=0)
    assert (bare.logprobs, bare.top_logprobs) == (completion.logprobs, [[]] * 10)


def test_pieces_come_as_they_are_made_and_the_last_holds_the_whole():
    engine = StateEngine(MODEL, 4)
    pieces = generate_pieces(engine, PROMPTS[:2], WARM, max_tokens=4, samples=2, logprobs=1)
    assert engine.loads == 0, "nothing happens before the first piece is asked for"
    first = next(pieces)
    assert (len(engine.reads), len(engine.steps)) == (2, 0)
    rest = list(pieces)
    assert [(p.prompt, p.sample) for p in [first, *rest]] == [(0, 0), (0, 1), (1, 0), (1, 1)] * 4
    assert [p.finish for p in rest] == [None] * 11 + ["length"] * 4
    assert [p.completion is None for p in rest] == [True] * 11 + [False] * 4
    whole = generate(StateEngine(MODEL, 4), PROMPTS[:2], WARM, max_tokens=4, samples=2, logprobs=1)
    for completion in whole:
        mine = [p for p in [first, *rest] if (p.prompt, p.sample) == (completion.prompt, completion.sample)]
        assert [p.token for p in mine] == completion.tokens == mine[-1].completion.tokens
        assert [p.logprob for p in mine] == completion.logprobs
        assert [p.top for p in mine] == completion.top_logprobs


def test_rows_without_a_prompt_stay_as_they_are():
    engine = StateEngine(MODEL, 3, capacity=12)
    for _ in range(12):
        engine.step([1, 1, 1])
    (completion,) = generate(engine, [PROMPTS[0]], GREEDY, max_tokens=8)
    assert completion.tokens == alone(PROMPTS[0], max_tokens=8).tokens
    assert [engine.position(row) for row in range(3)] == [12, 12, 12]
    assert engine.loads == 1


def test_capacity_holds_everything_but_the_last_token():
    assert len(generate(StateEngine(MODEL, 2, capacity=9), PROMPTS[:2], GREEDY, max_tokens=5)[0].tokens) == 5
    engine = StateEngine(MODEL, 2, capacity=9)
    with pytest.raises(ContextReadyError, match="10 tokens do not fit into a context of 9"):
        generate(engine, [PROMPTS[1], PROMPTS[0]], GREEDY, max_tokens=6)
    assert (engine.reads, engine.loads) == ([], 0), "refused before anything was done"
    state = alone(PROMPTS[0], max_tokens=4, keep_states=True).state
    generate(StateEngine(MODEL, 1, capacity=12), [[1]], GREEDY, max_tokens=4, states=[state])
    with pytest.raises(ContextReadyError, match="13 tokens"):
        generate(StateEngine(MODEL, 1, capacity=12), [[1]], GREEDY, max_tokens=5, states=[state])


TOKENIZER = Tokenizer.train(["abc 😀 é"], 257)


def spell(text):
    return TOKENIZER.encode_batch([text])[0]


def scripted(texts, max_tokens, stop_tokens=(), stops=()):
    scripts = [spell(text) if isinstance(text, str) else text for text in texts]
    engine = Scripted(scripts, vocab_size=257)
    prompts = [spell("x")] * len(texts)
    options = {"stop_tokens": stop_tokens, "stops": stops, "tokenizer": TOKENIZER, "keep_states": True}
    return generate(engine, prompts, GREEDY, max_tokens=max_tokens, **options)


def test_stop_token_is_a_token_without_text():
    end = TOKENIZER.end_id
    (completion,) = scripted([[*spell("abc"), end, *spell("more")]], 20, [end])
    assert (completion.tokens, completion.text, completion.finish) == ([*spell("abc"), end], "abc", "stop")
    assert completion.unread == end
    # As the very last token allowed it is a stop, not the length; unasked it is a token like any other.
    assert scripted([[*spell("abc"), end]], 4, [end])[0].finish == "stop"
    (completion,) = scripted([[*spell("abc"), end]], 4)
    assert (completion.text, completion.finish) == ("abc<|endoftext|>", "length")


def test_stop_strings_cut_the_text_and_end_the_row():
    found = scripted(["two, and on and on", "one. END more", "EN EN EN E"], 12, stops=["END", "zzz"])
    assert [completion.prompt for completion in found] == [0, 1, 2], "in the prompts' order, not as they ended"
    two, one, three = found
    assert (one.text, one.finish, one.tokens) == ("one. ", "stop", spell("one. END"))
    assert (two.text, two.finish) == ("two, and on ", "length")
    # What was held back as a possible beginning is shown in the end.
    assert (three.text, three.finish) == ("EN EN EN EEN", "length")
    # A stop token after a false start shows it too.
    (held,) = scripted([[*spell("aEN"), TOKENIZER.end_id]], 12, [TOKENIZER.end_id], ["END"])
    assert (held.text, held.finish) == ("aEN", "stop")


def test_characters_are_whole_in_every_piece():
    engine = Scripted([spell("a😀é")], vocab_size=257)
    pieces = list(generate_pieces(engine, [spell("x")], GREEDY, max_tokens=7, tokenizer=TOKENIZER))
    assert [piece.text for piece in pieces] == ["a", "", "", "", "😀", "", "é"]
    assert pieces[-1].completion.text == "a😀é"
    # Cut off inside a character, it says so.
    (cut,) = scripted(["a😀é"], 4)
    assert (cut.text, len(cut.tokens), cut.finish) == ("a\ufffd", 4, "length")


def test_text_follows_the_prompts_so_its_first_space_stays():
    class Words:
        """Strips a text's first space, as sentencepiece does."""

        special_ids = frozenset()

        def decode(self, ids):
            return "".join(f" {token}" for token in ids).removeprefix(" ")

    (completion,) = generate(Scripted([[5, 6]]), [[4]], GREEDY, max_tokens=2, tokenizer=Words())
    assert completion.text == " 5 6"


def test_nothing_here_needs_torch():
    script = "import sys; sys.modules['torch'] = None; import contextready.infer.generate"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_prompts_may_be_arrays_or_tensors():
    expected = alone(PROMPTS[0], max_tokens=5).tokens
    assert alone(np.array(PROMPTS[0]), max_tokens=5).tokens == expected
    assert alone(torch.tensor(PROMPTS[0]), max_tokens=5).tokens == expected
    assert all(type(token) is int for token in alone(np.array(PROMPTS[0]), WARM, max_tokens=5).tokens)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_tokens": 0}, "max_tokens must .* got 0"),
        ({"max_tokens": 2.0}, "max_tokens must .* got 2.0"),
        ({"samples": 0}, "samples must .* got 0"),
        ({"samples": 1.5}, "samples must .* got 1.5"),
        ({"samples": 2}, "has 2 rows, but 4 are needed"),
        ({"seed": -1}, "seed must .* got -1"),
        ({"seed": None}, "seed must .* got None"),
        ({"logprobs": -1}, "logprobs must .* got -1"),
        ({"logprobs": 24}, "between 0 and 23"),
        ({"prompts": []}, "No prompt was given"),
        ({"prompts": [[1], []]}, "The prompt is empty"),
        ({"prompts": [[1], [23]]}, "Token id 23 is out of range"),
        ({"prompts": [[1], [-1]]}, "Token id -1 is out of range"),
        ({"prompts": [1, 2]}, "must be a list of token ids"),
        ({"prompts": ["ab"]}, "encode text with the tokenizer"),
        ({"prompts": [[0.5]]}, "must be a list of token ids"),
        ({"prompts": [[1]] * 3}, "has 2 rows, but 3 are needed"),
        ({"stop_tokens": [99]}, "Token id 99 is out of range"),
        ({"stops": ["x"]}, "pass the model's tokenizer"),
        ({"stops": [""], "tokenizer": TOKENIZER}, "Stop strings must be a list"),
        ({"states": [None]}, "1 states were passed for 2 prompts"),
    ],
)
def test_bad_input_is_refused_at_once(changes, says):
    engine = StateEngine(MODEL, 2)
    options = {"prompts": PROMPTS[:2], "max_tokens": 3} | changes
    with pytest.raises(ContextReadyError, match=says):
        generate_pieces(engine, options.pop("prompts"), GREEDY, **options)
    assert (engine.reads, engine.loads) == ([], 0)


def test_logits_that_are_no_numbers_are_refused():
    engine = StateEngine(MODEL, 1)
    engine.step = lambda tokens, rows: np.full((1, 23), np.nan)
    with pytest.raises(ContextReadyError, match="not finite"):
        generate(engine, [[1]], GREEDY, max_tokens=3)
