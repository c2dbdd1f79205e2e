"""Conversations: written with the model's own template, and only the answers count, in training and in evaluation."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hf_finetune_helpers import WORDS
from hf_helpers import KNOWN, refused, save, tiny_lm, train_tokenizer

from contextready.cli.main import main
from contextready.data.batches import Batches, Sequences
from contextready.data.shards import IGNORED, Data
from contextready.hf.chat import chat_encoder
from contextready.measure.perplexity import parallel_scores
from contextready.runs.checkpoint import open_checkpoint

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [
    {"role": "system", "content": "holds water"},
    {"role": "user", "content": "river stone"},
    {"role": "assistant", "content": "light under"},
    {"role": "user", "content": "small"},
    {"role": "assistant", "content": "green"},
]


def model_with(folder, template):
    tokenizer = train_tokenizer(folder)
    tokenizer.chat_template = template
    return save(folder, tiny_lm("llama", vocab_size=KNOWN).float(), tokenizer)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_with(tmp_path_factory.mktemp("chat") / "model", TEMPLATE)


@pytest.fixture(scope="module")
def data(model, tmp_path_factory):
    """Sixty conversations of several lengths, prepared in shards that cut through them."""
    folder = tmp_path_factory.mktemp("talks")
    words = ("river", "stone", "light", "under", "small", "green", "walks", "seven")
    chooser = np.random.default_rng(0)
    lines = []
    for number in range(60):
        turns = [
            {"role": role, "content": " ".join(chooser.choice(words, 1 + number % 7))}
            for _ in range(1 + number % 3)
            for role in ("user", "assistant")
        ]
        lines.append(json.dumps({"messages": turns, "id": number}))
    (folder / "talks.jsonl").write_text("\n".join(lines))
    words = ["data", "prepare", folder / "data", folder / "talks.jsonl", "--chat", "--tokenizer", model]
    assert main([*map(str, words), "--val-fraction", "0.2", "--shard-tokens", "100"]) == 0
    return folder / "data"


def test_answers_and_their_end_count_and_nothing_else(model):
    from transformers import AutoTokenizer

    ids, counted = chat_encoder(str(model))(json.dumps(TALK))
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert ids == tokenizer(tokenizer.apply_chat_template(TALK, tokenize=False), add_special_tokens=False)["input_ids"]
    groups, before = [], False
    for token, counts in zip(ids, counted, strict=True):
        if counts:
            groups = groups if before else [*groups, []]
            groups[-1].append(token)
        before = counts
    assert [tokenizer.decode(group) for group in groups] == ["light under<|endoftext|>", "green<|endoftext|>"]
    assert tokenizer.eos_token_id in groups[0]  # special tokens of the template are tokens, not text


def test_prepared_conversations_have_masks_in_every_shard(model, data):
    opened = Data(data)
    manifest = json.loads((data / "manifest.json").read_text())
    assert len(manifest["splits"]["train"]["shards"]) == len(manifest["splits"]["train"]["masks"]) > 2
    tokens = opened.tokens("train")
    ids, mask = tokens.read(0, len(tokens)), tokens.counted.read(0, len(tokens))
    assert set(mask.tolist()) == {0, 1}
    text = opened.tokenizer().decode(ids[mask == 1].tolist())
    assert "<user>" not in text
    assert text.count("<|endoftext|>") == opened.tokenizer().decode(ids.tolist()).count("<assistant>")
    assert opened.bytes_per_token("train") is None


def test_only_answers_are_targets(data):
    tokens = Data(data).tokens("train")
    inputs, targets = Sequences(tokens, 16).read(np.arange(5))
    ids, mask = tokens.read(0, 81).astype("int64"), tokens.counted.read(0, 81)
    for i in range(5):
        piece = slice(16 * i + 1, 16 * i + 17)
        assert inputs[i].tolist() == ids[16 * i : 16 * i + 16].tolist()
        assert targets[i].tolist() == np.where(mask[piece] == 1, ids[piece], IGNORED).tolist()
    _, drawn = Batches(tokens, 16, seed=1).read(3, 8)
    assert (drawn == IGNORED).any()
    assert (drawn != IGNORED).any()


def run_words(model, data, out):
    settings = {"pretrained": model, "data": data, "out": out} | WORDS | {"block_size": 8}
    return ["train", "convert", *(f"{key}={value}" for key, value in settings.items())]


def test_a_model_is_fine_tuned_on_answers_only(model, data, tmp_path, capsys):
    assert main(run_words(model, data, tmp_path / "run")) == 0
    checkpoint = open_checkpoint(tmp_path / "run")
    trained, windows = checkpoint.model().eval(), Sequences(Data(data).tokens("val"), 8, "validation")
    inputs, targets = windows.read(np.arange(windows.count))
    with torch.no_grad():
        logits = trained(inputs, passes=3)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    found = parallel_scores(trained, windows, [3])[3]
    assert found.loss == pytest.approx(expected, rel=1e-5)
    assert (found.counts_N == 0).any()  # some windows hold no answer
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--passes", "3", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["evaluations"]
    assert row["parallel"]["3"]["loss"] == pytest.approx(expected, rel=1e-5)
    assert row["parallel"]["3"]["bits_per_byte"] is None


def test_a_damaged_mask_is_noticed(model, data, tmp_path, capsys):
    import shutil

    copy = shutil.copytree(data, tmp_path / "data")
    mask = copy / "train-00000.mask"
    mask.write_bytes(b"\0" * mask.stat().st_size)
    assert "train-00000.mask" in refused(capsys, *run_words(model, copy, tmp_path / "run"))
    mask.write_bytes(mask.read_bytes()[1:])
    assert "train-00000.mask" in refused(capsys, *run_words(model, copy, tmp_path / "run"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "river"}', "has no list of messages under 'messages' (it has text); name the right field"),
        ('{"messages": "river"}', "has no list of messages under 'messages'"),
        ('{"messages": [3]}', "has a message without a role (system, user, assistant) or without text"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "has a message without a role"),
        ('{"messages": [{"role": "user", "content": ["x"]}]}', "or without text as its content"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "has no message of the assistant"),
    ],
)
def test_bad_conversations_are_one_sentence(model, tmp_path, capsys, line, message):
    (tmp_path / "bad.jsonl").write_text(line)
    said = refused(capsys, "data", "prepare", tmp_path / "out", tmp_path / "bad.jsonl", "--chat", "--tokenizer", model)
    assert message in said
    assert "bad.jsonl, line 1," in said
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_written_as_a_conversation_is_refused(tmp_path, capsys):
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": TALK}))
    words = ["data", "prepare", tmp_path / "out", tmp_path / "talk.jsonl", "--chat"]
    assert "--chat needs --tokenizer MODEL" in refused(capsys, *words)
    plain = model_with(tmp_path / "plain", None)
    assert "has no chat template" in refused(capsys, *words, "--tokenizer", plain)
    last_only = model_with(tmp_path / "last", "{{ messages[-1]['content'] }}")
    assert "changes earlier messages when another one follows" in refused(capsys, *words, "--tokenizer", last_only)
    raising = model_with(tmp_path / "raising", "{{ raise_exception('no system please') }}")
    assert "does not accept a conversation: no system please" in refused(capsys, *words, "--tokenizer", raising)
    (tmp_path / "talk.txt").write_text("river")
    words[3] = tmp_path / "talk.txt"
    assert "holds no conversations; give .jsonl files" in refused(capsys, *words, "--tokenizer", plain.parent / "last")
