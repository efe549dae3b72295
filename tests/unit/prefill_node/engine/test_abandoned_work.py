"""What the scheduler says was computed for nobody, when a client leaves while a step runs."""

import random

import pytest
from prefill_steps import BOUNDARIES, PrefillSteps, resuming
from real_schedulers import Clock
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from prefill_node.board.events import Dropped, Stopped
from prefill_node.release import Release
from slo.predict.prefill_time import attention_pairs

pytestmark = pytest.mark.slow

CHUNK = 128


class Engine(PrefillSteps):
    """Steps of which a test reads what is said of them."""

    def __init__(self, model, clock):
        super().__init__(resuming(model), clock)
        self.said = []
        self.scheduler._bulletin.notice = self.said.append
        self._rng = random.Random(1)

    def prompt(self, name, tokens, **about):
        self.add(name, [self._rng.randrange(250) for _ in range(tokens)], **about)

    def leave(self, *names):
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def abandoned(self):
        """Jobs, part of the pass, tokens and pairs of each drop."""
        drops = [notice for notice in self.said if isinstance(notice, Dropped)]
        assert {drop.reason for drop in drops} <= {"abandoned"}
        return [(drop.jobs, drop.done, drop.tokens, drop.pairs) for drop in drops]


@pytest.fixture
def engine(model, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("prefill_node.engine.scheduler.time", clock)
    return Engine(model, clock)


def test_a_pass_that_ends_although_its_client_has_left_was_computed_for_nobody(engine):
    engine.prompt("gone", 1000)
    engine.step(meanwhile=lambda: engine.leave("gone"))
    assert engine.abandoned() == [(("gone",), 1.0, 1000, attention_pairs(1000, 0))]
    engine.finish()
    assert len(engine.abandoned()) == 1


def test_chunks_of_who_has_left_count_as_computed_for_nobody(engine):
    engine.prompt("gone", 1000, chunk=CHUNK)
    engine.step()
    engine.step(meanwhile=lambda: engine.leave("gone"))
    assert engine.abandoned() == [
        (("gone",), 1.0, CHUNK, attention_pairs(CHUNK, 0)),
        (("gone",), 1.0, CHUNK, attention_pairs(CHUNK, CHUNK)),
    ]


def test_it_counts_once_though_client_replica_and_decode_all_say_that_it_has_left(engine):
    engine.prompt("gone", 1000, chunk=CHUNK)
    engine.step()
    engine.step(meanwhile=lambda: engine.leave("gone", *[Release("gone", 0).encode()] * 2))
    assert [tokens for _, _, tokens, _ in engine.abandoned()] == [CHUNK, CHUNK]


def test_of_a_pass_of_several_only_what_was_computed_of_who_has_left(engine):
    engine.prompt("gone", 30)
    engine.prompt("stays", 50)
    output = engine.step(meanwhile=lambda: engine.leave("gone"))
    assert len(output.num_scheduled_tokens) == 2
    assert engine.abandoned() == [(("gone",), 1.0, 30, attention_pairs(30, 0))]
    assert engine.finished == ["stays"]


def test_of_a_pass_that_is_kept_for_the_others_what_is_kept(engine):
    engine.prompt("gone", 30)
    engine.prompt("stays", 50)
    engine.step(stops_at=BOUNDARIES // 2, meanwhile=lambda: engine.leave("gone"))
    ((jobs, done, tokens, pairs),) = engine.abandoned()
    assert (jobs, tokens, pairs) == (("gone",), 30, attention_pairs(30, 0))
    (stopped,) = [notice for notice in engine.said if isinstance(notice, Stopped)]
    assert done == stopped.done == pytest.approx(0.5)
    engine.finish()
    assert len(engine.abandoned()) == 1


@pytest.mark.parametrize("boundary", [0, BOUNDARIES // 2])
def test_a_pass_that_stops_as_all_have_left_says_so_itself(engine, boundary):
    engine.prompt("gone", 30)
    engine.prompt("gone-too", 50)
    engine.step(stops_at=boundary, meanwhile=lambda: engine.leave("gone", "gone-too"))
    assert engine.abandoned() == []
    engine.prompt("next", 30)
    engine.finish()
    assert engine.abandoned() == []


def test_of_two_steps_that_are_issued_both_count(engine):
    """Where vLLM composes a step while one runs, a client that leaves may be in both."""
    scheduler = engine.scheduler
    engine.prompt("gone", 1000, chunk=CHUNK)
    outputs = [scheduler.schedule() for _ in range(2)]
    assert [output.total_num_scheduled_tokens for output in outputs] == [CHUNK, CHUNK]
    engine.leave("gone")
    for output in outputs:
        scheduler.update_from_output(output, ModelRunnerOutput(["gone"], {"gone": 0}, [[]]))
    assert engine.abandoned() == [
        (("gone",), 1.0, CHUNK, attention_pairs(CHUNK, 0)),
        (("gone",), 1.0, CHUNK, attention_pairs(CHUNK, CHUNK)),
    ]
    assert not scheduler._wasted._left


def test_a_client_that_leaves_after_the_last_pass_has_abandoned_nothing(engine):
    engine.prompt("done", 100)
    engine.step()
    engine.leave("done")
    engine.finish()
    assert engine.abandoned() == []
