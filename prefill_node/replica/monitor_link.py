"""The replica's side of the cluster-wide monitor: what it reports, and how it follows.

Owns what of a policy changes what on a replica, and what its predictions are made of: what it has learned
from its own passes, times the correction that the monitor answers with. When reports are sent is
`telemetry.reporting.monitor_client`'s, and whether a directive still makes sense the governor's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from prefill_node.board.events import Passed
from prefill_node.board.messages import SchedulerView
from prefill_node.replica.governing.governor import Governor
from prefill_node.replica.governing.monitor_view import replica_seen
from prefill_node.replica.preemption_controller import Watch
from slo.monitor.directives import ReplicaSeen
from slo.monitor.messages import PrefillSeen, Role
from slo.monitor.policy import ClusterPolicy
from slo.predict.pass_time import LearnedPasses
from slo.predict.prediction_error import UNCORRECTED, PassMeasured
from slo.predict.prefill_time import PrefillPredictor
from slo.preemption.types import PreemptionRules
from slo.request import ReplicaId
from telemetry.instruments import Instruments
from telemetry.reporting.monitor_client import MonitorClient, Participant


class Monitored:
    """A prefill replica that reports to the monitor and follows its policy.

    Args:
        governor: Its predictor and rules are those of the configuration, and follow passes and the monitor.
        measured_at: Prompt lengths that the predictor was measured at.
    """

    def __init__(self, replica_id: ReplicaId, governor: Governor, measured_at: Sequence[int] = ()) -> None:
        self._replica_id = replica_id
        self._governor = governor
        self._passes = LearnedPasses(governor.ledger.predictor, measured_at)
        self._correction = UNCORRECTED
        self._rules = governor.rules
        self._watch: Watch | None = None
        self._client: MonitorClient | None = None

    def start(self, watch: Watch, instruments: Instruments, model: str = "") -> None:
        """Report from now on, as one of `model`'s replicas."""
        self._watch = watch
        participant = Participant(
            self._replica_id, Role.PREFILL, self._seen, self.follow, watch.direct, self.correct, model=model
        )
        self._client = MonitorClient(participant, instruments)
        self._client.start()

    def passed(self, notice: Passed) -> None:
        """A forward pass was measured."""
        measured = self.learn(notice)
        if self._client is not None:
            self._client.note(measured)

    def learn(self, notice: Passed) -> PassMeasured:
        """Learn from a measured pass; beside it what is predicted now, uncorrected, and what was."""
        shape = notice.tokens, notice.pairs
        corrected_s = self._governor.ledger.predictor.pass_s(*shape)
        self._passes.add(*shape, notice.seconds)
        self._governor.follow(self._passes.predictor.times(self._correction), self._governor.rules)
        return PassMeasured(self._passes.predictor.pass_s(*shape), corrected_s, notice.seconds)

    def follow(self, policy: ClusterPolicy) -> None:
        """Take over policy and margin of preemption; mode and limits stay."""
        rules = replace(
            self._rules,
            policy=policy.preemption or self._rules.policy,
            margin=policy.margin or self._rules.margin,
        )
        self._take_over(self._governor.ledger.predictor, rules)

    def correct(self, factor: float) -> None:
        """Take a prefill to last so many times as long as the replica's own predictor says."""
        self._correction = factor
        self._take_over(self._passes.predictor.times(factor), self._governor.rules)

    def _take_over(self, predictor: PrefillPredictor, rules: PreemptionRules) -> None:
        self._governor.follow(predictor, rules)
        if self._watch is not None:
            self._watch.changed()

    def _seen(self, events: tuple[PassMeasured, ...]) -> PrefillSeen:
        watch = self._watch
        assert watch is not None
        return PrefillSeen(watch.told(self._work), events, self._correction)

    def _work(self, view: SchedulerView | None) -> ReplicaSeen:
        watch = self._watch
        assert watch is not None
        kept = None if view is None or view.step is None else watch.kept(view.step.step_id)
        reached = watch.reached()
        return replica_seen(self._replica_id, self._governor, view, reached, kept, time.monotonic())
