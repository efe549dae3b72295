"""A router with a few idle replicas, what they report, and what is asked of it."""

from router.admission import Gate
from router.core import RouterCore
from router.fleet.view import RouterLimits
from router.messages import PlacementRequested
from router.placement.least_harm import LeastHarm
from slo.admission.controller import AdmissionController
from slo.admission.rules import AdmissionRules
from slo.admission.tenant_limits import TenantGates
from slo.objectives import Objective
from slo.predict.prefill_time import PrefillPredictor
from slo.replacement import FailureCause, ReplacementRequested
from slo.reports import DecodeReported, OutstandingJob, PrefillReported
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD, TierPolicy

LINE = PrefillPredictor(per_token_s=0.001, fixed_s=0.0, handoff_s=0.1)
POLICIES = {
    PREMIUM: TierPolicy(0.5, None, sheddable=False, weight=4.0),
    STANDARD: TierPolicy(2.0, None, sheddable=True, weight=2.0),
    BACKGROUND: TierPolicy(None, None, sheddable=True, weight=1.0),
}


def core(prefill=2, decode=1, now_s=0.0, stale_after_s=100.0):
    router = RouterCore(POLICIES, LeastHarm(), RouterLimits(stale_after_s=stale_after_s))
    for n in range(prefill):
        router.prefill_reported(report(f"prefill-{n}"), now_s)
    for n in range(decode):
        router.view.decode_reported(DecodeReported(ReplicaId(f"decode-{n}"), 0.0, 0), now_s)
    return router


def report(replica, *jobs, **rest):
    return PrefillReported(ReplicaId(replica), LINE, tuple(jobs), rest.pop("running", None), 0.0, **rest)


def request(number, tokens, tier=STANDARD, ttft_s=..., explicit=False, **rest):
    objective = Objective(tier, POLICIES[tier].ttft_s if ttft_s is ... else ttft_s, None)
    return PlacementRequested(JobId(f"job-{number}"), objective, explicit, tokens, 0, **rest)


def admitted(*replicas, max_backlog_s=100.0):
    """A router that admits, without a limit that matters, and its admission."""
    rules = AdmissionRules(max_backlog_s=max_backlog_s, max_late_backlog_s=max_backlog_s)
    admission = AdmissionController(DEFAULT_TIERS, rules, TenantGates(), lambda: 1.0)
    limits = RouterLimits(stale_after_s=10.0)
    router = RouterCore(DEFAULT_TIERS, LeastHarm(), limits, 0.0, gate=Gate(admission))
    for name in replicas:
        router.prefill_reported(report(name), 0.0)
    router.view.decode_reported(DecodeReported(ReplicaId("decode-0"), 0.0, 0), 0.0)
    return router, admission


def runs(number, tokens, tier=PREMIUM):
    return OutstandingJob(JobId(f"job-{number}"), tier, tokens, None, tokens * LINE.per_token_s)


def placed_again(number, tokens, *failed):
    asked = ReplacementRequested(
        JobId(f"job-{number}"),
        PREMIUM,
        None,
        explicit_deadline=False,
        tokens=tokens,
        decode_replica=ReplicaId("decode-0"),
        failed_replicas=failed,
        cause=FailureCause.SILENT,
    )
    return PlacementRequested.again(asked)
