"""A replica's reports, and the gauges that are set with each of them."""

import time
from types import SimpleNamespace

import pytest
from governors import governor_of
from played_watch import PlayedWatch
from published import Engine, running

from prefill_node.board.messages import Reached, SchedulerView, StepView
from prefill_node.replica.governing.ledger import Accepted, PrefillLedger
from prefill_node.replica.report import ReportBuilder
from slo.model_digest import ModelDigest
from slo.monitor.messages import Role
from slo.predict.prefill_time import PrefillPredictor
from slo.preemption.types import PreemptionRules
from slo.queue.slack import NO_DEADLINE
from slo.reports import EngineEnd, ReplicaGone
from slo.request import JobId, ReplicaId
from slo.tiers import PREMIUM
from telemetry.engine_tap import EngineTap

WATCH = PlayedWatch(
    collect=lambda: None,
    view=lambda: None,
    reached=lambda: Reached(0, 0),
    is_up=True,
    has_vote_timeout=lambda: False,
)
WATCHDOG = SimpleNamespace(engine_end=EngineEnd.FAILED)
ENGINE = SimpleNamespace(_engine_client=SimpleNamespace(errored=False))
DEAD = SimpleNamespace(_engine_client=SimpleNamespace(errored=True))


class Instruments:
    def __init__(self):
        self.gauges = {}

    def set(self, metric, value, **labels):
        self.gauges[metric.name] = value


def builder_of(ledger, tap, instruments, engine=ENGINE):
    governor = governor_of(ledger, PreemptionRules(), boundaries=4)
    return ReportBuilder(ReplicaId("p"), engine, governor, tap, instruments)


@pytest.mark.parametrize("caches", [True, False])
def test_the_router_is_told_whether_there_is_a_prefix_cache_and_of_which_model(caches):
    cache = SimpleNamespace(
        num_gpu_blocks=10, block_size=16, kv_cache_size_tokens=160, enable_prefix_caching=caches
    )
    parallel = SimpleNamespace(tensor_parallel_size=1)
    config = SimpleNamespace(cache_config=cache, parallel_config=parallel)
    manager = SimpleNamespace(stat_loggers=[])
    tap = EngineTap("prefill", Instruments())
    tap.attach(SimpleNamespace(_engine_client=SimpleNamespace(logger_manager=manager, vllm_config=config)))
    ledger = PrefillLedger(PrefillPredictor(per_token_s=0.001, fixed_s=0.0))
    builder = builder_of(ledger, tap, Instruments())
    builder.digest = ModelDigest("model")
    report = builder.build(WATCH, WATCHDOG)
    assert (report.kv_tokens, report.caches_prefixes, report.digest) == (160, caches, "model")


def test_the_router_is_told_what_was_predicted_before_anything_was_learned():
    before = PrefillPredictor(per_token_s=0.001, fixed_s=0.0)
    ledger, instruments = PrefillLedger(before), Instruments()
    builder = builder_of(ledger, EngineTap("prefill", instruments), instruments)
    builder._governor.follow(before.times(4.0), PreemptionRules())
    report = builder.build(WATCH, WATCHDOG)
    assert (report.predictor, report.unlearned) == (before.times(4.0), before)


def test_a_replica_at_rest_goes_on_setting_its_gauges():
    """Ray forgets one that is not set for two of its intervals."""
    instruments = Instruments()
    ledger = PrefillLedger(PrefillPredictor(per_token_s=0.001, fixed_s=0.0))
    builder = builder_of(ledger, EngineTap("prefill", instruments), instruments)
    for outstanding in (0, 1):
        if outstanding:
            ledger.arrived(Accepted(JobId("a"), PREMIUM, 100, NO_DEADLINE, 0.0))
        instruments.gauges.clear()
        assert len(builder.build(WATCH, WATCHDOG).jobs) == outstanding
        assert instruments.gauges == {
            "slackserve_kv_usage_ratio": 0.0,
            "slackserve_prefill_outstanding": outstanding,
        }


@pytest.mark.parametrize(
    ("has_vote_timeout", "engine_end", "told"),
    [
        (False, EngineEnd.FAILED, EngineEnd.FAILED),
        (False, EngineEnd.HUNG, EngineEnd.HUNG),
        (True, EngineEnd.FAILED, EngineEnd.VOTE_TIMEOUT),
    ],
)
def test_the_router_is_told_how_an_engine_ended(has_vote_timeout, engine_end, told):
    """Nobody asks this process again: what it counts now is not exported before Serve ends it."""
    instruments = Instruments()
    ledger = PrefillLedger(PrefillPredictor(per_token_s=0.001, fixed_s=0.0))
    builder = builder_of(ledger, EngineTap("prefill", instruments), instruments, DEAD)
    watch = SimpleNamespace(has_vote_timeout=lambda: has_vote_timeout)
    report = builder.build(watch, SimpleNamespace(engine_end=engine_end))
    assert report == ReplicaGone(ReplicaId("p"), (Role.PREFILL, told))


@pytest.mark.parametrize("is_up", [True, False])
def test_how_far_jobs_are_is_told_also_after_the_governor_has_failed(is_up):
    instruments, jobs = Instruments(), Engine()
    ledger = PrefillLedger(PrefillPredictor(per_token_s=0.001, fixed_s=0.0))
    for name in ("runs", "waits"):
        ledger.arrived(jobs.knows(Accepted(JobId(name), PREMIUM, 1000, NO_DEADLINE, 0.0)))
    builder = builder_of(ledger, EngineTap("prefill", instruments), instruments)
    builder._governor.has_failed = not is_up
    view = jobs.view(running("runs", started_s=time.monotonic()))
    shown = {"view": lambda: view, "reached": lambda: Reached(7, 2), "is_up": is_up}
    watch = PlayedWatch(**{**vars(WATCH), **shown})
    report = builder.build(watch, WATCHDOG)
    assert (report.running, report.running_for_s) == ("runs", pytest.approx(0.5))
    assert (report.preemptible_in_s is not None) == is_up, "nothing makes way any more"


def test_of_a_view_that_the_governor_has_failed_on_nothing_is_told():
    """A replica that does not report is not used."""
    instruments = Instruments()
    ledger = PrefillLedger(PrefillPredictor(per_token_s=0.001, fixed_s=0.0))
    ledger.arrived(Accepted(JobId("a"), PREMIUM, 1000, NO_DEADLINE, 0.0))
    builder = builder_of(ledger, EngineTap("prefill", instruments), instruments)
    unreadable = SchedulerView(StepView(7, (None,), 1000, 0.0, 0, 0.0, True, 0.0))
    watch = PlayedWatch(**{**vars(WATCH), "view": lambda: unreadable, "is_up": False})
    report = builder.build(watch, WATCHDOG)
    assert [job.tokens for job in report.jobs] == [1000]
    assert report.running is None
