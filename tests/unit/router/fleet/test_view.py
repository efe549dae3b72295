"""What the router makes of silence: of one replica, of all, and of its own."""

import pytest
from small_router import POLICIES, report, request

from router.core import RouterCore
from router.fleet.view import RouterLimits
from router.messages import Placed
from router.placement.least_harm import LeastHarm
from slo.errors import RejectionReason
from slo.reports import DecodeReported
from slo.request import ReplicaId
from slo.tiers import PREMIUM

PREFIX = {"prefix_hashes": (1, 2, 3, 4), "hash_block": 200}


def prefill(router, name, now_s):
    router.prefill_reported(report(name, kv_tokens=100_000), now_s)


def decode(router, name, now_s):
    router.view.decode_reported(DecodeReported(ReplicaId(name), 0.1, 4, 100_000, 0.03), now_s)


def after_a_minute():
    """A fleet that has reported for a minute, one prefill replica of which has a prefix cached."""
    limits = RouterLimits(stale_after_s=10.0, settle_s=3.0)
    router = RouterCore(POLICIES, LeastHarm(), limits, started_s=0.0)
    for second in range(61):
        for number in range(2):
            prefill(router, f"prefill-{number}", float(second))
            decode(router, f"decode-{number}", float(second))
    placed = router.place(request("first", 1000, PREMIUM, **PREFIX), 60.0)
    assert isinstance(placed, Placed)
    return router, placed.prefill_replica


@pytest.mark.parametrize("silent_s", [10.0, 31.0])
@pytest.mark.parametrize("speaks", ["prefill-0", "prefill-1", "decode-0", "decode-1"])
def test_a_router_that_hears_its_replicas_again_has_kept_them_and_waits_for_the_others(silent_s, speaks):
    """Also the one that has the prefix, whoever speaks first."""
    router, where = after_a_minute()
    back_s = 60.0 + silent_s
    asked = request("again", 1000, PREMIUM, **PREFIX)
    (prefill if speaks.startswith("prefill") else decode)(router, speaks, back_s)
    assert router.place(asked, back_s + 0.1).reason is RejectionReason.NOT_SETTLED
    assert router.place(asked, back_s + 3.1).reason is RejectionReason.NO_REPLICA
    for number in range(2):
        prefill(router, f"prefill-{number}", back_s + 3.2)
        decode(router, f"decode-{number}", back_s + 3.2)
    placed = router.place(asked, back_s + 3.3)
    assert (placed.prefill_replica, placed.cached_tokens) == (where, 800)


def test_a_router_whose_replicas_are_all_lost_does_not_take_their_successor_for_one_that_it_missed():
    router, _ = after_a_minute()
    assert router.place(request(1, 10), 91.0).reason is RejectionReason.NO_REPLICA
    prefill(router, "another", 91.0)
    assert router.place(request(1, 10), 91.1).reason is RejectionReason.NO_REPLICA
    assert set(router.view.prefill) == {"another"}
    assert not router.view.decode


def test_replicas_that_stay_silent_are_forgotten_and_one_that_comes_back_has_what_it_had():
    router, where = after_a_minute()
    for second in range(61, 91):
        decode(router, "decode-0", float(second))
    prefill(router, where, 91.0)
    assert set(router.view.prefill) == {where}
    assert set(router.view.decode) == {"decode-0"}
    placed = router.place(request("again", 1000, PREMIUM, **PREFIX), 91.1)
    assert (placed.prefill_replica, placed.cached_tokens) == (where, 800)
