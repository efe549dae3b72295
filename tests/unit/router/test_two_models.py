"""While two models of one name are served, a request has one of them from its prefill to its last token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_router import POLICIES, report, request

from router.admission import Gate
from router.core import RouterCore
from router.fleet.view import RouterLimits
from router.messages import Placed, PlacementReason, PlacementRequested
from router.placement.least_harm import LeastHarm
from slo.admission.controller import AdmissionController
from slo.admission.rules import AdmissionRules
from slo.admission.tenant_limits import TenantGates
from slo.errors import Rejected, RejectionReason
from slo.model_digest import UNTOLD, ModelDigest, is_same_model
from slo.replacement import FailureCause, ReplacementRequested
from slo.reports import DecodeReported
from slo.request import JobId, ReplicaId
from slo.tiers import DEFAULT_TIERS, STANDARD

OLD, NEW = ModelDigest("old"), ModelDigest("new")
MODELS = {"": UNTOLD, "old": OLD, "new": NEW}


def router(prefill, decode, *, local=True, gate=None):
    """One with replicas, whose models their names begin with; the first decode replica is the emptiest."""
    limits = RouterLimits(stale_after_s=100.0, local_prefill=local)
    made = RouterCore(POLICIES, LeastHarm(), limits, gate=gate)
    for name in prefill:
        made.prefill_reported(report(name, digest=model_of(name)), 0.0)
    for running, name in enumerate(decode):
        digest = model_of(name)
        told = DecodeReported(ReplicaId(name), running / 10, running, kv_tokens=10_000, digest=digest)
        made.view.decode_reported(told, 0.0)
    return made


def model_of(name):
    return MODELS[name.rpartition("-")[0]]


def failed(decode, *replicas, avoided=()):
    return PlacementRequested.again(
        ReplacementRequested(
            JobId("job"),
            STANDARD,
            2.0,
            explicit_deadline=False,
            tokens=100,
            decode_replica=ReplicaId(decode),
            failed_replicas=replicas,
            cause=FailureCause.REPLICA_DIED,
            avoided_replicas=avoided,
        )
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "places"),
    [
        (["old-p", "new-p"], ["old-d"], ("old-p", "old-d")),
        (["old-p"], ["new-d", "old-d"], ("old-p", "old-d")),
        (["old-p", "-p"], ["new-d"], ("-p", "new-d")),
        (["new-p"], ["-d"], ("new-p", "-d")),
        (["new-p"], ["old-d", "new-d"], ("new-p", "new-d")),
    ],
)
def test_both_replicas_of_a_request_serve_the_same_model(prefill, decode, places):
    placed = router(prefill, decode).place(request(1, 100), 0.0)
    assert (placed.prefill_replica, placed.decode_replica) == places


def test_without_a_prefill_replica_of_its_model_decode_computes_the_prompt():
    placed = router(["new-p"], ["old-d"]).place(request(1, 100), 0.0)
    assert (placed.prefill_replica, placed.decode_replica) == (None, "old-d")
    assert placed.reason is PlacementReason.NO_PREFILL_REPLICA


def test_where_decode_may_not_a_request_is_refused():
    refused = router(["new-p"], ["old-d"], local=False).place(request(1, 100), 0.0)
    assert refused.reason is RejectionReason.NO_REPLICA


def test_what_only_decode_can_compute_goes_to_any_replica():
    placed = router(["new-p"], ["old-d", "new-d"]).place(request(1, 100, only_decode=True), 0.0)
    assert (placed.prefill_replica, placed.decode_replica) == (None, "old-d")


def test_a_failed_prefill_is_placed_again_for_the_model_of_its_decode_replica():
    made = router(["old-p", "old-q", "new-p"], ["old-d", "new-d"])
    assert made.place(failed("old-d", "old-p"), 0.0).prefill_replica == "old-q"
    assert made.place(failed("old-d", "old-p", "old-q"), 0.0).prefill_replica is None
    doubted = failed("old-d", "old-p", avoided=("old-q",))
    assert made.place(doubted, 0.0).prefill_replica == "old-q", "there is no other of its model"


def test_what_is_delivered_of_an_answer_goes_on_with_the_same_model():
    made = router(["old-p", "new-p"], ["new-d", "old-d"])
    placed = made.place(request(1, 100, digest=OLD, is_admitted=True), 0.0)
    assert (placed.prefill_replica, placed.decode_replica) == ("old-p", "old-d")
    lost = request(2, 100, digest=OLD, is_admitted=True, failed_replicas=("old-d",))
    assert made.place(lost, 0.0).reason is RejectionReason.NO_REPLICA, "nobody has that model any more"


@pytest.mark.parametrize("only_decode", [False, True])
@pytest.mark.parametrize(
    ("prefill", "decode", "capacity"),
    [
        (["old-p", "new-p", "new-q"], ["old-d", "new-d"], 3),
        (["old-p", "new-p", "new-q"], ["old-d"], 1),
        (["old-p", "new-p"], ["-d"], 2),
        (["new-p"], ["old-d", "new-d"], 1),
    ],
)
def test_what_is_asked_of_both_models_is_held_against_the_replicas_of_both(
    prefill, decode, capacity, only_decode
):
    """But not against those from which no decode replica goes on."""
    rules = AdmissionRules()
    admission = AdmissionController(DEFAULT_TIERS, rules, TenantGates(), lambda: 1.0)
    made = router(prefill, decode, gate=Gate(admission))
    assert isinstance(made.place(request(1, 100, only_decode=only_decode), 0.0), Placed)
    assert admission.capacity == capacity


NAMES = st.sampled_from(["old", "new", ""])


@given(st.lists(NAMES, max_size=4), st.lists(NAMES, max_size=4), st.sampled_from([OLD, NEW, UNTOLD]))
def test_whatever_there_is_no_request_has_two_models(prefill, decode, begun):
    made = router([f"{n}-{k}p" for k, n in enumerate(prefill)], [f"{n}-{k}d" for k, n in enumerate(decode)])
    decision = made.place(request(1, 100, digest=begun), 0.0)
    usable = [name for name in decode if is_same_model(MODELS[name], begun)]
    if not usable:
        assert isinstance(decision, Rejected)
        return
    assert isinstance(decision, Placed)
    chosen = model_of(decision.decode_replica)
    assert is_same_model(chosen, begun)
    pairs = any(is_same_model(MODELS[p], MODELS[d]) for p in prefill for d in usable)
    assert (decision.prefill_replica is not None) == pairs
    if decision.prefill_replica is not None:
        assert is_same_model(model_of(decision.prefill_replica), chosen)
