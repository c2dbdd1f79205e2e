"""lm-evaluation-harness on small random models gives the figures that follow from their log-likelihoods."""

import csv
import io
import json
import math
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval")
from hf_helpers import FAMILIES, LLAMA_LIKE, randomise, tiny_lm

from contextready import ContextReadyError
from contextready.cli.eval import score_tasks
from contextready.cli.main import main
from contextready.data.tokenizer import END, Tokenizer
from contextready.evaluate.harness import TASKS, open_tasks, score
from contextready.hf.modeling import ContextReadyForCausalLM

LONGEST, VOCABULARY = 64, 360
PLACES = ("river", "mountain", "house", "garden", "bridge")
PASSAGES = [f"The old man walked to the {a}, past the {b}, and sat by the {a}" for a in PLACES for b in PLACES]
TEXTS = ["A short one.", "[1, 2]", " ".join(PASSAGES[:9]) + "\n", "Ünïcödé by the river: " + " ".join(PASSAGES[3:6])]
QUESTIONS = [
    (f"What is beside the {a}?", [b, f"the {b} and the {a}", f"no {b}"][: 2 + len(a) % 2], len(b) % 2)
    for a in PLACES
    for b in PLACES
    if a < b
]


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer.train([*PASSAGES, *(asked for asked, _, _ in QUESTIONS)], VOCABULARY).inner
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END)


@pytest.fixture(scope="module")
def base(tokenizer):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "text", ("llama", LLAMA_LIKE | {"vocab_size": VOCABULARY, "eos_token_id": 0}))
        lm = tiny_lm("text", seed=6)
    # A random model never guesses a word, so some words are made likely; accuracy is then neither 0 nor 1.
    with torch.no_grad():
        lm.lm_head.weight[sorted({i for place in PLACES for i in tokenizer.encode(f" {place}")})] *= 4
    return lm


@pytest.fixture(scope="module")
def ready(base):
    model = ContextReadyForCausalLM.wrap(base, tolerance=0.0)
    randomise(model)
    return model


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")

    def write(name, rows):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder / name

    labels = "ABC"
    return {
        "folder": folder,
        "lambada": write("lambada.jsonl", [{"text": text} for text in PASSAGES]),
        "bits": write("bits.jsonl", [{"text": text} for text in TEXTS]),
        "arc_easy": write(
            "arc.jsonl",
            [
                {
                    "question": {
                        "stem": asked,
                        "choices": [{"text": c, "label": label} for c, label in zip(choices, labels, strict=False)],
                    },
                    "answerKey": labels[right],
                }
                for asked, choices, right in QUESTIONS
            ],
        ),
        "arc_hub": write(
            "arc_hub.jsonl",
            [
                {
                    "question": asked,
                    "choices": {"text": choices, "label": list(labels[: len(choices)])},
                    "answerKey": labels[right],
                }
                for asked, choices, right in QUESTIONS
            ],
        ),
    }


@pytest.fixture(params=["base", "ready"])
def model(request):
    return request.getfixturevalue(request.param)


def figures(model, tokenizer, tasks, **settings):
    return {one.metric: one.value for one in score(model, tokenizer, tasks, **settings)}


def last_log_probs(model, ids, count):
    """log p of the last `count` of these tokens, and whether each was the most likely one."""
    with torch.no_grad():
        log_p_TV = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)[-count:]
    targets = torch.tensor(ids[-count:])
    return log_p_TV.gather(1, targets[:, None]).sum().item(), bool((log_p_TV.argmax(1) == targets).all())


def continuation(model, tokenizer, context, text):
    ids = tokenizer.encode(text)
    return last_log_probs(model, ids, len(ids) - len(tokenizer.encode(context)))


def test_lambada_scores_the_last_word(model, tokenizer, files):
    found = figures(model, tokenizer, open_tasks([f"lambada={files['lambada']}"]))
    by_hand = [continuation(model, tokenizer, text.rpartition(" ")[0], text) for text in PASSAGES]
    accuracy = sum(greedy for _, greedy in by_hand) / len(by_hand)
    assert 0 < accuracy < 1
    assert found["acc"] == pytest.approx(accuracy)
    assert found["perplexity"] == pytest.approx(math.exp(-sum(ll for ll, _ in by_hand) / len(by_hand)))


def test_arc_takes_the_most_likely_choice(model, tokenizer, files):
    found = figures(model, tokenizer, open_tasks([f"arc_easy={files['arc_easy']}"]))
    right, right_by_length = [], []
    for asked, choices, answer in QUESTIONS:
        context = f"Question: {asked}\nAnswer:"
        lls = [continuation(model, tokenizer, context, f"{context} {choice}")[0] for choice in choices]
        right.append(max(range(len(lls)), key=lls.__getitem__) == answer)
        right_by_length.append(max(range(len(lls)), key=lambda i, lls=lls: lls[i] / len(choices[i])) == answer)
    assert 0 < sum(right) < len(right)
    assert found == {
        "acc": pytest.approx(sum(right) / len(right)),
        "acc_norm": pytest.approx(sum(right_by_length) / len(right_by_length)),
    }


def test_arc_is_read_in_both_of_its_forms(base, tokenizer, files):
    published, hub = (figures(base, tokenizer, open_tasks([f"arc_easy={files[n]}"])) for n in ("arc_easy", "arc_hub"))
    assert published == hub


def test_bits_per_byte_counts_every_token_once(model, tokenizer, files):
    found = figures(model, tokenizer, open_tasks([f"bits={files['bits']}"]))
    total = 0.0
    for text in TEXTS:
        ids = [tokenizer.eos_token_id, *tokenizer.encode(text)]
        for start in range(1, len(ids), LONGEST):
            stop = min(start + LONGEST, len(ids))
            total += last_log_probs(model, ids[max(0, stop - LONGEST - 1) : stop], stop - start)[0]
    size, words = sum(len(text.encode()) for text in TEXTS), sum(len(re.split(r"\s+", text)) for text in TEXTS)
    assert max(len(tokenizer.encode(text)) for text in TEXTS) > 2 * LONGEST
    assert found == {
        "bits_per_byte": pytest.approx(-total / size / math.log(2)),
        "byte_perplexity": pytest.approx(math.exp(-total / size)),
        "word_perplexity": pytest.approx(math.exp(-total / words)),
    }


def test_a_fresh_conversion_scores_exactly_as_its_base(base, tokenizer, files):
    tasks = open_tasks([f"{name}={files[name]}" for name in ("lambada", "arc_easy", "bits")])
    found = [score(one, tokenizer, tasks, batch_size=5) for one in (base, ContextReadyForCausalLM.wrap(base))]
    assert found[0] == found[1]
    assert [(one.task, one.documents) for one in found[0][::2]] == [
        ("lambada=lambada.jsonl", len(PASSAGES)),
        ("arc_easy=arc.jsonl", len(QUESTIONS)),
        ("bits=bits.jsonl", len(TEXTS)),
        ("bits=bits.jsonl", len(TEXTS)),
    ]
    assert [one.stderr is None for one in found[0]] == [False] * 4 + [True] * 3


def test_the_batch_changes_nothing_and_shots_do(ready, tokenizer, files):
    asked = [f"lambada={files['lambada']}", f"bits={files['bits']}"]
    tasks = open_tasks(asked)
    alone = figures(ready, tokenizer, tasks, limit=2, batch_size=1)
    assert figures(ready, tokenizer, tasks, limit=2, batch_size=2) == pytest.approx(alone)
    shown = figures(ready, tokenizer, open_tasks(asked, shots=1), limit=2)
    assert shown["perplexity"] != pytest.approx(alone["perplexity"])
    assert shown["bits_per_byte"] == pytest.approx(alone["bits_per_byte"])
    # The examples are drawn in the same way every time, so all models see the same ones.
    assert figures(ready, tokenizer, open_tasks(asked, shots=1), limit=2) == shown


@pytest.fixture
def few_defaults(monkeypatch):
    """Only one folder of lm_eval's own tasks, because reading all of them takes ten seconds."""
    from lm_eval.tasks import manager

    folder = Path(manager.__file__).parent / "lambada"
    monkeypatch.setattr(manager, "__file__", str(folder / "manager.py"))


@pytest.mark.usefixtures("few_defaults")
def test_the_plain_harness_scores_the_same_from_a_yaml_file(base, tokenizer, files, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("lambada", "arc_easy", "bits"):
        (tmp_path / f"{name}.yaml").write_text(
            f"include: {TASKS / name}.yaml\ntask: mine_{name}\n"
            f"dataset_kwargs: {{data_files: {{test: {files[name]}}}}}\n"
        )
    ours = open_tasks([f"{name}={files[name]}" for name in ("lambada", "arc_easy", "bits")])
    theirs = open_tasks([f"mine_{name}" for name in ("lambada", "arc_easy", "bits")], tmp_path)
    found = [score(base, tokenizer, tasks) for tasks in (ours, theirs)]
    assert [(one.metric, one.value, one.stderr) for one in found[0]] == [
        (one.metric, one.value, one.stderr) for one in found[1]
    ]


def test_models_are_printed_side_by_side(base, ready, tokenizer, files, tmp_path, capsys):
    for name, lm in (("plain", base), ("ready", ready)):
        lm.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    tasks = f"lambada={files['lambada']}, bits={files['bits']}"
    asked = (tmp_path / "plain", tmp_path / "ready", "--tasks", tasks, "--limit", 3)
    capsys.readouterr()
    assert main(["eval", *map(str, asked), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    plain, corrected = json.loads(line)["evaluations"]
    assert plain["model"] == str(tmp_path / "plain")
    assert [(one["task"], one["metric"], one["documents"]) for one in plain["tasks"][:2]] == [
        ("lambada=lambada.jsonl", "perplexity", 3),
        ("lambada=lambada.jsonl", "acc", 3),
    ]
    assert plain["tasks"][0]["value"] != corrected["tasks"][0]["value"]
    assert main(["eval", *map(str, asked)]) == 0
    out = capsys.readouterr().out
    for part in (
        "bits_per_byte ↓",
        "acc ↑",
        "lambada=lambada.jsonl, 3 documents",
        f"{plain['tasks'][2]['value']:,.2f}",
    ):
        assert part in out
    assert main(["eval", *map(str, asked), "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["model"] for row in rows] == [str(tmp_path / "plain"), str(tmp_path / "ready")]
    for row, found in zip(rows, (plain, corrected), strict=True):
        for one in found["tasks"]:
            assert float(row[f"{one['task']} {one['metric']}"]) == one["value"]
        assert row["lambada=lambada.jsonl documents"] == "3"
    assert main(["eval", *map(str, asked), "--markdown"]) == 0
    heading, _, first, second = capsys.readouterr().out.splitlines()
    assert "| lambada=lambada.jsonl acc ↑ |" in heading
    assert (first.split()[1], second.split()[1]) == ("plain", "ready")


def test_a_perplexity_that_overflows_is_reported_in_one_sentence(base, tokenizer, tmp_path):
    (tmp_path / "unspaced.txt").write_text("river" * 500)
    with pytest.raises(ContextReadyError, match="too large for a number"):
        figures(base, tokenizer, open_tasks([f"bits={tmp_path / 'unspaced.txt'}"]))


@pytest.mark.usefixtures("few_defaults")
def test_an_unknown_task_is_told_the_nearest(files):
    with pytest.raises(
        ContextReadyError, match=r"Unknown lm_eval task 'lambada_openia'; did you mean 'lambada_openai'\?"
    ):
        open_tasks([f"lambada={files['lambada']}", "lambada_openia"])


@pytest.mark.parametrize(
    ("tasks", "settings", "message"),
    [
        ([""], {}, "--tasks names no task; give for example"),
        (["lambda={lambada}"], {}, "The task 'lambda' does not take a file; did you mean 'lambada'?"),
        (
            ["lambada=none.jsonl"],
            {},
            "There is no file 'none.jsonl' for the task lambada; give an existing file as lambada=FILE.",
        ),
        (["lambada={empty}"], {}, "empty.jsonl is empty, so the task lambada has nothing to score."),
        (["arc_easy={empty}"], {}, "empty.jsonl is empty"),
        (["lambada={arc_easy}"], {}, "has no text under 'text'"),
        (["arc_easy={lambada}"], {}, "line 1 is not an ARC question; it must have question, choices with text"),
        (["arc_easy={wrong}"], {}, "wrong.jsonl, line 2 is not an ARC question"),
        (["arc_easy={broken}"], {}, "broken.jsonl, line 1 is not JSON"),
        (["bits={bits}", "bits={bits}"], {}, "The task bits=bits.jsonl is listed twice"),
        (["bits={bits}"], {"include": "{empty}"}, "--tasks-path must be a folder with task descriptions (.yaml)"),
        (["bits={bits}"], {"limit": 0}, "--limit must be at least 1, but got 0."),
        (["bits={bits}"], {"shots": -1}, "--shots must be at least 0, but got -1."),
        (["bits={bits}"], {"batch_size": 0}, "--batch-size must be at least 1, but got 0."),
        (["bits={bits}"], {"device": "abacus"}, "device=abacus is not available"),
    ],
)
def test_bad_input_is_reported_in_one_sentence(files, tasks, settings, message):
    folder = files["folder"]
    (folder / "empty.jsonl").write_text("\n")
    (folder / "broken.jsonl").write_text("{")
    good = json.loads(files["arc_easy"].read_text().splitlines()[0])
    (folder / "wrong.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(good | {'answerKey': 'Z'})}\n")
    names = files | {name: folder / f"{name}.jsonl" for name in ("empty", "broken", "wrong")}
    if "include" in settings:
        settings = {"include": Path(settings["include"].format(**names))}
    with pytest.raises(ContextReadyError) as caught:
        score_tasks(["no-model-is-opened"], [task.format(**names) for task in tasks], **settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
