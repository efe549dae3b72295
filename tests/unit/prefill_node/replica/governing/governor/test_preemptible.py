"""What the router is told of how soon a step can make way, and which limits keep it from that."""

import pytest
from governors import BYTES_PER_TOKEN, LONG, NOTHING_REACHED, URGENT, governor, job, view
from published import Account, running, suspended

from prefill_node.board.messages import Reached
from prefill_node.replica.governing.governor import ForwardProfile
from slo.predict.pass_shape import PassShape
from slo.preemption.types import Keep, Limits, PreemptionMode

LIMITS = {
    "stopped too often": {"accounts": {"long": Account(Limits().max_preemptions, 0.0, 0)}},
    "suspended for too long": {"accounts": {"long": Account(1, Limits().max_suspended_s, 0)}},
    "too many are suspended": {"stopped": [suspended("other")], "max_suspended_steps": 1},
    "too much memory is kept": {"stopped": [suspended("other")], "max_suspended_bytes": 100_499},
    "it cannot stop": {"step": running("long", stoppable=False)},
    "it ends first": {"reached": Reached(7, 9)},
    "it would be recomputed": {"mode": PreemptionMode.RECOMPUTE, "reached": Reached(7, 9)},
    "nothing runs": {"step": None},
}


@pytest.mark.parametrize("case", LIMITS.values(), ids=LIMITS.keys())
def test_a_step_that_has_reached_a_limit_is_not_said_to_make_way(case):
    case = dict(case)
    shown = view(case.pop("step", running("long")), *case.pop("stopped", ()), **case.pop("accounts", {}))
    reached = case.pop("reached", NOTHING_REACHED)
    governed = governor(LONG, URGENT, **case)
    assert governed.preemptible_in_s(shown, reached, 0.0) is None
    assert isinstance(governed.decide(shown, reached, 0.0), Keep), "and indeed it does not"


def test_what_finds_room_in_kv_blocks_takes_no_memory():
    """It does in the first half of the pass; from then on the step is one that has reached a limit."""
    shown = view(running("long"), suspended("other"))
    governed = governor(LONG, URGENT, max_suspended_bytes=500)
    assert governed.preemptible_in_s(shown, NOTHING_REACHED, 0.0) is None
    kept_bytes = (0.0,) * 5 + (BYTES_PER_TOKEN / 2,) * 4 + (BYTES_PER_TOKEN,)
    governed.profile = ForwardProfile(PassShape.even(10), kept_bytes)
    assert governed.preemptible_in_s(shown, NOTHING_REACHED, 0.0) is not None
    assert governed.preemptible_in_s(shown, Reached(7, 3), 0.0) is not None
    assert governed.preemptible_in_s(shown, Reached(7, 4), 0.0) is None, "it would stop behind it"
    assert governed.profile.checkpoint_bytes(1000, 4) == 1000 * BYTES_PER_TOKEN / 2
    assert governed.profile.checkpoint_bytes(1000, 9) == 1000 * BYTES_PER_TOKEN
    late = ForwardProfile(PassShape.told([(n / 10, n / 10) for n in range(10)], 0.0, 1), kept_bytes)
    assert late.checkpoint_bytes(1000, 3) == 1000 * BYTES_PER_TOKEN / 2, (
        "ranks of several hosts stop one later"
    )


@pytest.mark.parametrize(
    "within", [{}, {"max_suspended_bytes": 100_500, "max_suspended_steps": 2}], ids=["plenty", "just within"]
)
def test_a_step_within_its_limits_makes_way_after_half_a_stretch_in_the_mean(within):
    shown = view(
        running("long"),
        suspended("other"),
        long=Account(Limits().max_preemptions - 1, Limits().max_suspended_s - 1.0, 0),
    )
    governed = governor(LONG, job("other"), **within)
    assert governed.preemptible_in_s(shown, NOTHING_REACHED, 0.0) == pytest.approx(0.05)
