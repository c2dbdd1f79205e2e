"""One corpus and one worker for all tests of this folder."""

import pytest
from fuzz.pool import Worker


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """The worker writes it."""
    return tmp_path_factory.mktemp("fuzz") / "corpus"


@pytest.fixture(scope="session")
def worker(corpus):
    worker = Worker(corpus, corpus.with_name("log"))
    yield worker
    worker.stop()
