"""A profile that is wrong by a factor is corrected online: replica, monitor and governor together."""

import math
import random

import pytest
from governors import governor_of, ledger_of

from prefill_node.board.events import Passed
from prefill_node.replica.monitor_link import Monitored
from slo.monitor.core import SETTLE_S, MonitorCore
from slo.monitor.directives import ReplicaSeen
from slo.monitor.messages import MonitorReport, PrefillSeen, Role
from slo.monitor.settings import MonitorSettings
from slo.predict.prefill_time import PrefillPredictor, attention_pairs
from slo.preemption.types import PreemptionMode, PreemptionRules
from slo.request import ReplicaId

R = ReplicaId("r")
TRUTH = PrefillPredictor(per_token_s=2e-4, fixed_s=0.01, handoff_s=0.05, per_pair_s=1e-8)
NOISE = 0.05


def replica(profile):
    return governor_of(ledger_of(predictor=profile), PreemptionRules(mode=PreemptionMode.RESUME))


def serve(requests, governor, core, *, seed=1):
    """Prefills one after the other; the relative errors of what the replica predicted for each."""
    monitored, drawn = Monitored(R, governor), random.Random(seed)
    now_s, follows, correction, errors, measured = SETTLE_S, 0, 1.0, [], []
    for _ in range(requests):
        tokens = drawn.randrange(64, 8192)
        seconds = TRUTH.prefill_s(tokens) * math.exp(drawn.gauss(0, NOISE))
        predicted_s = governor.ledger.predictor.prefill_s(tokens)
        errors.append(abs(predicted_s - seconds) / seconds)
        measured.append(monitored.learn(Passed(tokens, attention_pairs(tokens), seconds)))
        now_s += seconds
        core.look(now_s)
        seen = PrefillSeen(ReplicaSeen(R, None, ()), tuple(measured), correction=correction)
        answer = core.heard(MonitorReport(R, Role.PREFILL, follows, seen), now_s)
        measured.clear()
        if answer.policy is not None:
            follows = answer.policy.version
            monitored.follow(answer.policy)
        if answer.correction is not None:
            correction = answer.correction
            monitored.correct(correction)
    return errors


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize("seed", range(3))
def test_a_profile_that_is_wrong_by_three_is_corrected_within_a_hundred_requests(factor, seed):
    governor, core = replica(TRUTH.times(factor)), MonitorCore(MonitorSettings(), 0.0)
    errors = serve(140, governor, core, seed=seed)
    assert errors[0] > 0.6, "it is wrong to begin with"
    assert sum(errors[10:30]) / 20 < 0.15
    assert sum(errors[100:]) / 40 < 0.1
    for tokens in (64, 1000, 8000):
        assert governor.ledger.predictor.prefill_s(tokens) == pytest.approx(TRUTH.prefill_s(tokens), rel=0.1)
    assert governor.ledger.predictor.handoff_s == TRUTH.handoff_s, "the handoff is not the replica's"
    assert core.errors()[R].mape < 0.25


def test_a_good_profile_is_left_as_it_is():
    governor, core = replica(TRUTH), MonitorCore(MonitorSettings(), 0.0)
    errors = serve(100, governor, core)
    assert sum(errors) / 100 < 0.1


def test_without_the_monitors_correction_a_replica_learns_by_itself():
    governor, core = replica(TRUTH.times(3.0)), MonitorCore(MonitorSettings(corrects=False), 0.0)
    errors = serve(100, governor, core)
    assert sum(errors[10:]) / 90 < 0.1
    assert core.state(0.0).corrections == {R: 1.0}
