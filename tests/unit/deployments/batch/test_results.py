"""The files of a batch's results where there is no more room for them."""

import errno
import os
from contextlib import contextmanager
from pathlib import Path

import pytest

from deployments.batch import BatchError
from deployments.batch.requests import BatchRequest
from deployments.batch.results import BatchFailure, ResultFiles


@pytest.fixture
def results(tmp_path):
    requests = tmp_path / "requests.jsonl"
    requests.touch()
    return ResultFiles(tmp_path / "answers.jsonl", requests)


@contextmanager
def over_quota(owner, call):
    """While entered, a call hears that there is no room; over NFS it may be the first to hear so."""

    def fail(*_, **__):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, call, fail)
        yield


def files_open():
    return len([*Path("/proc/self/fd").iterdir()])


def test_what_cannot_be_written_at_the_end_is_said(results):
    before = files_open()
    cannot = rf"{results.path}: cannot be written \(Disk quota exceeded\); what is there is kept"
    with over_quota(os, "fsync"), pytest.raises(BatchError, match=cannot), results:
        results.fail(BatchRequest("a", "/completions", "0123", 0, 1), BatchFailure("timeout", "too late"))
    assert files_open() == before


def test_an_error_that_is_under_way_is_the_one_that_is_said(results):
    before = files_open()
    with over_quota(os, "fsync"), pytest.raises(BatchError, match="another error"), results:
        raise BatchError("another error")
    assert files_open() == before


@pytest.mark.parametrize(
    ("owner", "call", "name"), [(os, "ftruncate", "answers.jsonl"), (Path, "unlink", "answers.failed.jsonl")]
)
def test_what_cannot_be_taken_away_is_said(results, owner, call, name):
    cannot = rf"{name}: cannot be written \(Disk quota exceeded\)"
    with results, over_quota(owner, call), pytest.raises(BatchError, match=cannot):
        results.answered({})
