"""Models to talk with: tiny native ones with random weights, and a pretrained one with a chat template."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import small_model

from contextready.data.conventions import Conventions
from contextready.data.tokenizer import Tokenizer
from contextready.infer.language_model import LanguageModel
from contextready.infer.torch_engine import torch_engine

STORIES = Path(__file__).parent / ".." / ".." / "shared" / "models" / "stories260K-hf"

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BEGINNING = "{{ bos_token }}" + TEMPLATE
FORGETFUL = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{{ m['content'] if loop.index0 + 2 >= messages|length else '(forgotten)' }}{{ eos_token }}\n{% endfor %}"
    "<assistant>"
)
"""Writes only the newest messages in full, as templates do that drop earlier reasoning."""
WITHOUT_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + TEMPLATE
WORDS = "the river holds seven stones and the green light walks under small water " * 3


def native(template=TEMPLATE, seed=0, vocab_size=257, **changes):
    """A native model in which every weight is random, with a tokenizer and a chat template.

    It writes the letters t, h, e and s only. With 257 tokens (the bytes, and one for the end), its tokens are those of
    its text. With more, words have tokens of their own, and it writes them in other tokens than the tokenizer.
    """
    trained = Tokenizer.train([WORDS], vocab_size)
    named = {"eos_token": trained.end}
    tokenizer = Tokenizer(trained.inner, trained.end, conventions=Conventions(chat_template=template, named=named))
    model = small_model(seed, dtype=torch.float32, vocab_size=vocab_size, head_bias=True, **changes)
    letters = [id for (id,) in trained.encode_batch(list("thes"))]
    with torch.no_grad():
        model.backbone.unembedding.bias.fill_(-1e4)
        model.backbone.unembedding.bias[letters] = 0
    return LanguageModel(
        Path("a-model"),
        tokenizer,
        400,
        lambda rows, capacity: torch_engine(model, rows=rows, capacity=capacity, solver="sequential"),
        model,
    )


def stories(folder, template=BEGINNING):
    """Copy the pretrained stories model, with a chat template, to a folder."""
    if not STORIES.is_dir():
        pytest.skip("the pretrained model is not part of this repository (expected at ../shared/models/stories260K-hf)")
    shutil.copytree(STORIES, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    if template is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return folder
