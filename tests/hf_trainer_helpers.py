"""Short training runs with transformers' Trainer, and helpers to inspect them."""

import numpy as np
import torch
from hf_helpers import random_tokens
from transformers import Trainer as HFTrainer
from transformers import TrainingArguments

from contextready.hf.trainer import RandomPasses

T = 8
IGNORE = -100


def settings(out, **more):
    usual = {
        "output_dir": str(out),
        "use_cpu": True,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**usual | more)


def rows(count=8, masked=False):
    """Training sequences; with `masked`, their numbers of labels differ."""
    tokens = random_tokens(count, T)
    labels = tokens.clone()
    if masked:
        for i in range(count):
            labels[i, : i % (T - 1)] = IGNORE
    return [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]


def trained(model, out, data=None, passes=5, resume=None, **more):
    """Train a model; returns the trainer."""
    callbacks = [] if passes is None else [RandomPasses(passes)]
    trainer = HFTrainer(model=model, args=settings(out, **more), train_dataset=data or rows(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer):
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def changed(before, after):
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def drawn(steps, min_passes=2, passes=5, seed=42):
    """The documented sequence of K: uniform draws, seeded with the seed, the step and the letter K."""
    draws = (np.random.default_rng((seed, step, ord("K"))) for step in steps)
    return [int(draw.integers(min_passes, passes, endpoint=True)) for draw in draws]
