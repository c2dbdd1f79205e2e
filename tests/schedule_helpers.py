"""Random schedules of everything that may be done to the rows of an engine, each row checked against its solo run."""

import random

import numpy as np
import torch

from contextready.infer.prompt import PromptInPieces

LONGEST = 40
"""Tokens of a row before it is freed."""
WEIGHTS = {"step": 8, "read": 2, "pieces": 1, "free": 1, "copy": 1, "fork": 1}
"""How often everything is done."""


class Solo:
    """The rows' own streams, in torch, one after the other."""

    def __init__(self, model, rows, history):
        self.model, self.history = model, history
        self.states = [model.init_state(1, history) for _ in range(rows)]

    @torch.inference_mode()
    def read(self, row, tokens):
        logits_1TV, self.states[row] = self.model.stream(torch.tensor([list(tokens)]), self.states[row])
        return logits_1TV[0, -1].numpy()

    def free(self, row):
        self.states[row] = self.model.init_state(1, self.history)


def check_schedule(engine, model, seed, turns=60, tolerance=1e-5, vocab=23, first_id=0, history=1):
    """Do random things to random rows; after each of them, compare what came out, and at the end all states."""
    chance, rows = random.Random(seed), range(engine.rows)
    solo = Solo(model, engine.rows, history)
    pending: dict[int, PromptInPieces] = {}

    def tokens(count):
        return [chance.randrange(first_id, vocab) for _ in range(count)]

    def compare(found, expected):
        assert found.dtype == np.float32
        assert np.abs(found - expected).max() <= tolerance * max(1.0, np.abs(expected).max())

    # Everything happens at least once.
    kinds = [*WEIGHTS, *chance.choices(list(WEIGHTS), list(WEIGHTS.values()), k=turns - len(WEIGHTS))]
    chance.shuffle(kinds)
    for what in kinds:
        for row in rows:
            if row not in pending and engine.position(row) > LONGEST - 16:
                engine.free(row)
                solo.free(row)
        idle = [row for row in rows if row not in pending]
        row = chance.choice(idle)
        if what == "step":
            stepping = chance.sample(idle, chance.randrange(1, len(idle) + 1))
            chosen = tokens(len(stepping))
            everything = len(stepping) == engine.rows and stepping == list(rows)
            logits = engine.step(chosen, None if everything else stepping).copy()
            assert logits.shape == (len(stepping), engine.vocab_size)
            for found, stepped, token in zip(logits, stepping, chosen, strict=True):
                compare(found, solo.read(stepped, [token]))
        elif what == "read":
            prompt = tokens(chance.randrange(1, 12))
            compare(engine.read(row, prompt)[0].copy(), solo.read(row, prompt))
        elif what == "pieces" and len(idle) > 1:
            pending[row] = PromptInPieces(engine, row, tokens(chance.randrange(1, 15)), piece=chance.randrange(1, 6))
        elif what == "free":
            engine.free(row)
            solo.free(row)
        elif what in ("copy", "fork"):
            other = chance.choice(idle)
            if what == "copy":
                engine.copy_row(row, other)
            else:
                engine.load(other, engine.state(row))
            solo.states[other] = solo.states[row]
        # Prompts are read on between the steps of the other rows.
        for row, prompt in list(pending.items()):
            if prompt.advance():
                compare(prompt.logits, solo.read(row, prompt.tokens))
                assert prompt.info.tokens == len(prompt.tokens)
                del pending[row]
        for row in idle:
            assert row in pending or engine.position(row) == solo.states[row].position
    for row in set(rows) - set(pending):
        found, expected = engine.state(row), solo.states[row]
        assert (found.position, found.batch_size) == (expected.position, 1)
        near = {"rtol": 0, "atol": tolerance * max(1.0, float(expected.carried_BRC.abs().max()))}
        torch.testing.assert_close(found.carried_BRC[:, -1:], expected.carried_BRC[:, -1:], **near)
        for kv, wanted in zip(found.cache.layers, expected.cache.layers, strict=True):
            for a, b in zip(kv, wanted, strict=True):
                held = min(a.shape[2], b.shape[2])
                torch.testing.assert_close(a[:, :, a.shape[2] - held :], b[:, :, b.shape[2] - held :], **near)
