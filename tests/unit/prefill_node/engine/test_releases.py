"""Whom the release of a job means: what was begun of it before, computed or kept, and nothing else."""

import random
from types import SimpleNamespace

import pytest
from prefill_steps import PrefillSteps, resuming
from real_schedulers import Clock
from vllm.v1.request import RequestStatus

from prefill_node.board.events import Served
from prefill_node.release import RELEASE_PREFIX, Release
from slo.request import BEGUN_XARG, JOB_XARG

pytestmark = pytest.mark.slow


class Engine(PrefillSteps):
    """Steps of prefills that a replica begins one after the other, some of the same job."""

    def __init__(self, model, clock):
        super().__init__(resuming(model), clock)
        self.begun = 0
        self._rng = random.Random(1)

    def begin(self, job):
        """A prefill of the job, by the engine's name for it."""
        self.begun += 1
        name = f"{job}-{self.begun}"
        tokens = [self._rng.randrange(250) for _ in range(100)]
        self.add(name, tokens, extra={JOB_XARG: job, BEGUN_XARG: self.begun})
        return name

    def release(self, job):
        """What releases a job now, however often it is read."""
        name = Release(job, self.begun).encode()
        return lambda: self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)


@pytest.fixture
def engine(model, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("prefill_node.engine.scheduler.time", clock)
    return Engine(model, clock)


@pytest.mark.parametrize("job", ["job", "job#1", "a:b", "7:job", f"{RELEASE_PREFIX}0:job", ""])
def test_a_release_is_read_as_it_was_written_whatever_a_client_calls_its_request(job):
    assert Release.of(Release(job, 12).encode()) == Release(job, 12)
    assert Release.of(f"prefill-{job}") is None


def test_a_job_that_waits_or_runs_ends_and_no_other(engine):
    waits, stays = engine.begin("waits"), engine.begin("stays")
    engine.release("waits")()
    assert waits not in engine.scheduler.requests
    runs = engine.begin("runs")
    engine.step(meanwhile=engine.release("runs"))
    assert runs not in engine.scheduler.requests
    engine.finish()
    assert engine.finished == [stays]


def test_one_that_is_read_before_its_job_has_come_does_nothing(engine):
    engine.release("job")()
    name = engine.begin("job")
    engine.finish()
    assert engine.finished == [name]


def test_a_release_that_is_read_again_spares_what_was_begun_of_its_job_meanwhile(engine):
    """VLLM reads each abort in order and as a step ends; of one that it ends nobody is told."""
    engine.begin("job")
    release = engine.release("job")
    release()
    again = engine.begin("job")
    engine.step(meanwhile=release)
    assert engine.finished == [again]


def test_what_waits_to_be_pulled_is_freed(engine, monkeypatch):
    kept, released = keep_what_finishes(engine, monkeypatch), []
    name = engine.begin("job")
    engine.step()
    assert [request.request_id for request in kept] == engine.finished == [name]
    other = engine.begin("other")
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "connector", SimpleNamespace(release=released.append))
        engine.release("job")()
        engine.release("gone")()
    assert released == [name]
    engine.step()
    assert engine.finished == [name, other]


def test_a_job_that_was_begun_again_can_be_released_once_what_was_kept_of_it_is_freed(engine, monkeypatch):
    kept = keep_what_finishes(engine, monkeypatch)
    engine.begin("job")
    engine.step()
    again = engine.begin("job")
    engine.scheduler._free_blocks(kept.pop())
    engine.release("job")()
    assert again not in engine.scheduler.requests


def test_it_is_told_when_it_is_served_that_something_was_stopped_for(engine, monkeypatch):
    kept, said = keep_what_finishes(engine, monkeypatch), []
    bulletin = engine.scheduler._bulletin
    monkeypatch.setattr(bulletin, "notice", said.append)
    engine.begin("job")
    engine.step()
    engine.begin("job")
    bulletin.preempted("job", stopped_s=1.0)
    engine.scheduler._free_blocks(kept.pop())
    engine.step()
    assert [notice.job for notice in said if isinstance(notice, Served)] == ["job"]


def keep_what_finishes(engine, monkeypatch):
    """Requests that have finished, whose blocks wait to be pulled as they do with a connector."""
    kept = []

    def keep(request):
        if request.status is RequestStatus.FINISHED_ABORTED:
            return False, None
        kept.append(request)
        return True, None

    monkeypatch.setattr(engine.scheduler, "_connector_finished", keep)
    return kept
