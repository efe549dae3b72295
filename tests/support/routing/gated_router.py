"""A router behind its gate, with replicas that report what a test says."""

import random

from router.admission import Gate
from router.core import RouterCore
from router.messages import PlacementRequested
from router.placement.registry import POLICIES
from slo.admission.controller import AdmissionController
from slo.admission.rules import AdmissionRules
from slo.admission.tenant_limits import TenantGates
from slo.decode.headroom import DecodeLoad
from slo.decode.predicted_peak import Holding
from slo.objectives import Objective
from slo.predict.prefill_time import PrefillPredictor
from slo.reports import DecodeReported, PrefillReported
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, DEFAULT_TIERS

LINE = PrefillPredictor(per_token_s=0.001, fixed_s=0.0)


def router(replicas=1, **limits):
    """A settled router with idle replicas."""
    tenants = TenantGates()
    for tenant, limit in limits.items():
        tenants.of(tenant, limit)
    admission = AdmissionController(DEFAULT_TIERS, AdmissionRules(), tenants, random.Random(1).random)
    core = RouterCore(DEFAULT_TIERS, POLICIES["least_harm"](random.Random(1).randrange), gate=Gate(admission))
    for number in range(replicas):
        report(core, number)
    core.view.decode_reported(DecodeReported(ReplicaId("decode"), 0.0, 0), 0.0)
    return core, admission


def report(core, number=0, now_s=0.0, **about):
    core.prefill_reported(
        PrefillReported(ReplicaId(f"prefill-{number}"), LINE, (), None, 0.0, **about), now_s
    )


def ask(core, name, tier=BACKGROUND, tokens=100, tenant="a", now_s=0.0, ttft_s=None, **about):
    about = {"prompt_tokens": tokens, "prompt_bytes": 0, "tenant": tenant, **about}
    return core.place(PlacementRequested(JobId(name), Objective(tier, ttft_s, None), True, **about), now_s)


def full_decode(step_s=0.1, remaining=200, **about):
    """A decode replica whose one stream holds nearly all of its memory for so many steps more."""
    load = DecodeLoad(10_000, 0, 0, step_s, {JobId("there"): Holding(9000, remaining)}, {BACKGROUND: 50})
    return DecodeReported(ReplicaId("decode"), 0.9, 1, kv_tokens=10_000, load=load, **about)
