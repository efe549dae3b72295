"""The monitor and the router's admission together: what is shed, for what, and for how long."""

from steered_fleet import SteeredFleet, Stream

from slo.errors import RejectionReason
from slo.tiers import BACKGROUND, PREMIUM, STANDARD

CALM = {PREMIUM: Stream(5, 0.01)}


def test_a_tier_that_asks_for_too_much_takes_nothing_of_the_share_of_another():
    """Standard asks for three times the fleet, and misses its target by what is refused to it."""
    fleet = SteeredFleet()
    fleet.run(420, **CALM, **{STANDARD: Stream(30, 0.1), BACKGROUND: Stream(0.5, 0.1)})
    assert fleet.steps[-1][1] == {BACKGROUND: 1.0}, "the monitor does what it can"
    assert fleet.fates[STANDARD, RejectionReason.DEADLINE_INFEASIBLE] > 5000
    refused = sum(
        count for (tier, why), count in fleet.fates.items() if tier == BACKGROUND and why is not None
    )
    assert refused == 0
    assert fleet.fates[BACKGROUND, None] == 210


def test_background_that_makes_premium_late_is_shed_to_its_share_within_a_minute():
    """What has come first is served first: premium waits behind twice the fleet of background."""
    fleet = SteeredFleet(in_order=True)
    fleet.run(120, **CALM)
    assert fleet.steps == []
    fleet.run(160, **CALM, **{BACKGROUND: Stream(20, 0.1)})
    began_s, steps = fleet.late_s[PREMIUM][0], fleet.steps
    raised = [(at_s, shed[BACKGROUND]) for at_s, shed, _ in steps[:4]]
    assert raised == [(steps[0][0] + 10 * number, 0.25 * (number + 1)) for number in range(4)]
    assert steps[0][0] < began_s + 6
    assert max(fleet.late_s[PREMIUM]) < began_s + 50, "and is in time from then on"
