"""Preparing data: complete or nothing, reproducible splits, progress and notes, and error messages."""

import fcntl
import gzip
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from contextready.data import corpora
from contextready.data import prepare as preparing
from contextready.data.corpora import Corpus
from contextready.data.prepare import Preparation, is_validation, prepare, small_validation_note
from contextready.data.shards import Data
from contextready.data.tokenizer import Tokenizer
from contextready.errors import ContextReadyError

MODEL = Path(__file__).parents[2] / ".." / "shared" / "models" / "stories260K-hf"
TRAINED_HERE = ("--vocab-size", "300", "--val-fraction", "0.2")


def documents_of(data, split):
    tokenizer, tokens = data.tokenizer(), data.tokens(split)
    ids = tokens.read(0, len(tokens)).tolist()
    ends = [i for i, token in enumerate(ids) if token == data.end_id]
    starts = [0, *(end + 1 for end in ends)]
    return [tokenizer.decode(ids[start:end]) for start, end in zip(starts, ends, strict=False)]


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def test_prepare_and_show_from_the_command_line(crt, source, tmp_path, texts, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    code, out, err = crt("data", "prepare", tmp_path / "out", source, *TRAINED_HERE)
    assert code == 0
    assert err.startswith("Note: The validation split has only ")
    assert err.count("\n") == 1
    data = Data(tmp_path / "out")
    val = len(documents_of(data, "val"))
    assert "vocabulary 300, uint16" in out
    assert f"{300 - val} documents, 1 shard, " in out
    assert f"{val} documents, 1 shard, " in out
    assert sorted(documents_of(data, "train") + documents_of(data, "val")) == sorted(texts)
    code, shown, _ = crt("data", "show", tmp_path / "out", "--count", "1")
    assert code == 0
    assert str(source) in shown


def test_progress_goes_to_standard_error_and_results_to_standard_output(crt, source, tmp_path, monkeypatch):
    monkeypatch.setattr("contextready.cli.progress.EVERY", 0.0)
    _, out, err = crt("data", "prepare", tmp_path / "out", source, *TRAINED_HERE)
    assert "reading text for the tokenizer: " in err
    assert "tokenizing: 0.0 MB of 0.0 MB (100 %)" in err
    assert [line.split()[0] for line in out.splitlines()] == [f"{tmp_path / 'out'}:", "train", "val"]


def test_the_help_of_prepare_has_its_examples_before_the_options(crt, capsys):
    with pytest.raises(SystemExit):
        crt("data", "prepare", "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert text.index("examples:") < text.index("--vocab-size 4096") < text.index("options:")
    assert (
        f"(default: {preparing.VAL_FRACTION_INSTALLED} for the corpora {', '.join(corpora.INSTALLED[:2])} and "
        f"{corpora.INSTALLED[2]}, {preparing.VAL_FRACTION} for everything else)"
    ) in text


@pytest.mark.parametrize(
    ("sources", "fraction"),
    [(["default"], 0.05), (["sotu"], 0.05), (["stdlib"], 0.05), (["wikipedia"], 0.005), (["a.txt", "b/"], 0.005)],
)
def test_the_default_fraction_for_validation_depends_on_the_corpus(sources, fraction):
    assert Preparation(sources, []).fraction == fraction
    assert Preparation(sources, [], 0.2).fraction == 0.2


def test_a_folder_with_the_name_of_a_corpus_has_the_usual_fraction(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("default").mkdir()
    assert Preparation(["default"], []).fraction == 0.005


def test_the_default_corpus_has_enough_validation_text(crt, tmp_path):
    code, _, err = crt("data", "prepare", tmp_path / "out", "default", "--vocab-size", "4096")
    assert code == 0
    assert "Note:" not in err
    manifest = Data(tmp_path / "out").manifest
    assert manifest["val_fraction"] == 0.05
    assert manifest["splits"]["val"]["documents"] >= 10
    assert manifest["splits"]["val"]["tokens"] >= 50_000


@pytest.mark.parametrize(
    ("documents", "tokens", "said"),
    [
        (10, 50_000, None),
        (9, 1_000_000, "only 1,000,000 tokens in 9 documents, so"),
        (1000, 49_999, "only 49,999 tokens in 1,000 documents, so"),
        (1, 3953, "only 3,953 tokens in 1 document, so"),
    ],
)
def test_a_small_validation_split_is_noted(tmp_path, trained, source, documents, tokens, said):
    data = prepare(tmp_path / "out", Preparation([str(source)], [], 0.2, tokenizer=str(trained)))
    data.manifest["splits"]["val"] |= {"documents": documents, "tokens": tokens}
    note = small_validation_note(data)
    if said is None:
        assert note is None
    else:
        assert said in note
        assert note.endswith("will be noisy. Raise --val-fraction, or give validation files with --val.")


def test_brackets_in_the_name_of_the_folder_are_printed(crt, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, out, _ = crt("data", "prepare", "mine[old]", source, *TRAINED_HERE)
    assert "mine[old]: vocabulary" in out


def test_the_tokenizer_learns_from_training_documents_only(tmp_path, texts):
    # A word in the validation documents that is so frequent that it would become a token.
    marked = [
        f"{text} zqxjv zqxjv zqxjv" if is_validation(f"{text} zqxjv zqxjv zqxjv".encode(), 0.5) else text
        for text in texts
    ]
    assert sum("zqxjv" in text for text in marked) > 100
    data = prepare(tmp_path / "out", Preparation([write_jsonl(tmp_path / "a.jsonl", marked)], [], 0.5, vocab_size=400))
    assert not any("zq" in token for token in data.tokenizer().inner.get_vocab())
    assert any("guests" in token for token in data.tokenizer().inner.get_vocab())


@pytest.fixture
def learned_from(monkeypatch):
    """The texts that tokenizers are trained on."""
    seen, train = [], Tokenizer.train.__func__

    def recording(cls, learned, vocab_size):
        seen.extend(learned)
        return train(cls, seen, vocab_size)

    monkeypatch.setattr(Tokenizer, "train", classmethod(recording))
    return seen


def test_the_tokenizer_learns_from_a_part_of_a_large_corpus(source, tmp_path, learned_from):
    prepare(tmp_path / "out", Preparation([str(source)], [], 0.2, vocab_size=300, tokenizer_bytes=4000))
    assert 1000 < sum(len(text.encode()) for text in learned_from) < 8000


def test_the_limit_for_the_tokenizer_holds_for_compressed_text(tmp_path, learned_from):
    lines = "".join(json.dumps({"text": f"{i} " + "again and " * 100}) + "\n" for i in range(300))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    limit = (tmp_path / "a.jsonl.gz").stat().st_size // 2
    prepare(
        tmp_path / "out", Preparation([str(tmp_path / "a.jsonl.gz")], [], 0.2, vocab_size=300, tokenizer_bytes=limit)
    )
    assert 0 < sum(len(text) for text in learned_from) <= 2 * limit


def test_too_little_text_for_the_tokenizer_is_not_reported_as_no_text(refused, source, tmp_path):
    message = refused("data", "prepare", tmp_path / "out", source, *TRAINED_HERE, "--tokenizer-bytes", "10")
    assert "--tokenizer-bytes" in message


def test_only_the_end_of_a_document_is_an_end_token(tmp_path, texts, trained):
    path = write_jsonl(tmp_path / "a.jsonl", [f"{text} GPT-2 writes <|endoftext|> at the end." for text in texts])
    data = prepare(tmp_path / "out", Preparation([path], [], 0.2, tokenizer=str(trained)))
    for split, counts in data.manifest["splits"].items():
        assert len(documents_of(data, split)) == counts["documents"]


def test_more_documents_move_no_document_between_the_splits(tmp_path, texts, trained):
    splits = []
    for name, part in [("few", texts[:100]), ("all", texts), ("turned", texts[::-1])]:
        what = Preparation([write_jsonl(tmp_path / f"{name}.jsonl", part)], [], 0.3, tokenizer=str(trained))
        data = prepare(tmp_path / name, what)
        splits.append({split: set(documents_of(data, split)) for split in ("train", "val")})
    few, many, turned = splits
    assert many == turned
    assert few["train"] < many["train"]
    assert few["val"] < many["val"]
    assert not many["train"] & many["val"]


def test_the_split_is_as_large_as_asked():
    documents = [str(i).encode() for i in range(20_000)]
    for fraction in (0.005, 0.1, 0.5):
        assert sum(is_validation(d, fraction) for d in documents) == pytest.approx(20_000 * fraction, rel=0.2)
    assert all(is_validation(d, 0.2) for d in documents if is_validation(d, 0.1))


def test_equal_documents_are_never_in_both_splits(tmp_path, texts, trained):
    path = write_jsonl(tmp_path / "a.jsonl", texts[:50] * 4)
    data = prepare(tmp_path / "out", Preparation([path], [], 0.4, tokenizer=str(trained)))
    train, val = documents_of(data, "train"), documents_of(data, "val")
    assert len(train) + len(val) == 200
    assert not set(train) & set(val)


def test_separate_validation_files(tmp_path, texts, trained):
    train, val = write_jsonl(tmp_path / "a.jsonl", texts[:60]), write_jsonl(tmp_path / "b.jsonl", texts[60:70])
    data = prepare(tmp_path / "out", Preparation([train], [val], tokenizer=str(trained)))
    assert documents_of(data, "train") == texts[:60]
    assert documents_of(data, "val") == texts[60:70]
    assert data.manifest["val_fraction"] is None


@pytest.mark.parametrize("how", ["file", "folder", "named", "asked"])
def test_an_existing_tokenizer(crt, source, tmp_path, texts, how):
    folder = tmp_path / "theirs"
    folder.mkdir()
    inner = Tokenizer.train(texts, 300).inner
    inner.add_special_tokens(["<done>"])
    inner.enable_padding(length=500)
    inner.enable_truncation(3)
    inner.save(str(folder / "tokenizer.json"))
    if how == "named":
        (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<done>", "special": true}}')
    words = ["--tokenizer", folder / "tokenizer.json" if how == "file" else folder, "--val-fraction", "0.2"]
    words += ["--end-token", "<done>"] * (how == "asked")
    code, _, _ = crt("data", "prepare", tmp_path / "out", source, *words)
    assert code == 0
    data = Data(tmp_path / "out")
    assert data.end_id == inner.token_to_id("<done>" if how in ("named", "asked") else "<|endoftext|>")
    assert data.vocab_size == 301
    assert data.tokenizer().end_id == data.end_id
    assert sorted(documents_of(data, "train") + documents_of(data, "val")) == sorted(texts)


def test_the_tokenizer_of_a_model(source, tmp_path, texts):
    if not MODEL.is_dir():
        pytest.skip("the model stories260K is missing")
    data = prepare(tmp_path / "out", Preparation([str(source)], [], 0.2, tokenizer=str(MODEL)))
    assert data.vocab_size == 512
    assert data.tokenizer().end == "</s>"
    documents = documents_of(data, "train") + documents_of(data, "val")
    assert sorted(document.strip() for document in documents) == sorted(text.strip() for text in texts)


def test_documents_are_read_and_released_one_batch_at_a_time(tmp_path, texts, trained, monkeypatch):
    monkeypatch.setattr(preparing, "BATCH_DOCUMENTS", 8)
    alive, most = weakref.WeakSet(), []

    class Document(str):
        __hash__ = object.__hash__

    def read(advance):
        for i in range(400):
            document = Document(f"{texts[i % 300]} {i}")
            alive.add(document)
            most.append(len(alive))
            yield document
            del document

    monkeypatch.setitem(corpora.NAMED, "counted", lambda: Corpus("counted", read, None))
    data = prepare(tmp_path / "out", Preparation(["counted"], [], 0.2, tokenizer=str(trained)))
    assert sum(split["documents"] for split in data.manifest["splits"].values()) == 400
    assert max(most) <= 3 * 8


def test_a_source_that_breaks_leaves_nothing_and_a_second_run_works(tmp_path, texts, trained, monkeypatch):
    monkeypatch.setattr(preparing, "BATCH_DOCUMENTS", 8)
    folder, broken = tmp_path / "deep" / "out", [True]

    def read(advance):
        yield from texts[:200]
        assert list(folder.with_name(".out.partial").glob("train-*.bin"))  # shards are being written
        assert not folder.exists()
        if broken:
            raise RuntimeError("the source broke")

    monkeypatch.setitem(corpora.NAMED, "broken", lambda: Corpus("broken", read, None))
    what = Preparation(["broken"], [], 0.2, tokenizer=str(trained))
    with pytest.raises(RuntimeError, match="the source broke"):
        prepare(folder, what)
    assert {path.name for path in folder.parent.iterdir()} <= {".out.lock"}
    broken.clear()
    assert len(documents_of(prepare(folder, what), "train")) > 100


def test_a_killed_preparation_leaves_no_folder_and_a_second_run_works(crt, tmp_path, texts, trained):
    large = tmp_path / "large.txt"
    large.write_text("\n".join(texts) * 1500)  # takes tens of seconds
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    command = [sys.executable, "-m", "contextready", "data", "prepare", out, large, "--tokenizer", trained]
    with subprocess.Popen(command) as process:
        until = time.monotonic() + 60
        while not any(path.stat().st_size for path in partial.glob("train-*.bin")):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        with pytest.raises(ContextReadyError, match=r"Another process is preparing .*out; wait for it"):
            prepare(out, Preparation([str(large)], [], tokenizer=str(trained)))
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not out.exists()
    assert partial.exists()
    large.write_text("<|endoftext|>\n".join(texts))
    assert crt("data", "prepare", out, large, "--tokenizer", trained, "--val-fraction", "0.2")[0] == 0
    assert not partial.exists()
    assert Data(out).manifest["splits"]["train"]["documents"] > 200


def test_two_preparations_at_once_are_refused(refused, source, tmp_path):
    with (tmp_path / ".out.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        message = refused("data", "prepare", tmp_path / "out", source, *TRAINED_HERE)
    assert "Another process is preparing" in message
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_refused_and_kept(refused, source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    message = refused("data", "prepare", tmp_path / "out", source, *TRAINED_HERE)
    assert "out already exists; choose another folder or remove it first" in message
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
