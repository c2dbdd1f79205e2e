"""The environment of jobs that run together. tests/pointer/test_tables.py tests how they run and fail."""

import os

import pytest

from contextready.train import jobs
from contextready.train.jobs import Job, run_jobs


@pytest.mark.parametrize(("chosen", "expected"), [(None, "4"), ("3", "3")])
def test_threads_are_shared_unless_the_user_has_chosen(chosen, expected, tmp_path, monkeypatch):
    given = []

    class Process:
        returncode = 0

        def __init__(self, command, env, **_):
            given.append(env)

        def poll(self):
            return 0

    monkeypatch.setattr(jobs.subprocess, "Popen", Process)
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    made = [Job(name, tmp_path / name, ("info",), 1) for name in ("a", "b")]
    assert run_jobs(made, 2, lambda running, done: None, lambda job: None) is None
    assert [env["OMP_NUM_THREADS"] for env in given] == [expected] * 2
    assert all("MALLOC_TRIM_THRESHOLD_" in env for env in given)
