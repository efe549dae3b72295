"""Whether it can be for load that requests are late."""

from dataclasses import replace

import pytest

from slo.autoscaling.need import DecodeDemand, FleetDemand, FleetLoad, PrefillDemand

LOADED, IDLE, UNKNOWN = FleetLoad
FREE = DecodeDemand(0.1, 1, replicas=1)


@pytest.mark.parametrize(
    ("prefill", "decode", "load"),
    {
        "much is let in": (PrefillDemand(1.0, 0.0, capacity=2.0), FREE, LOADED),
        "little is asked for": (PrefillDemand(0.6, 0.0, capacity=2.0), FREE, IDLE),
        "most is refused": (PrefillDemand(9.0, 0.0, capacity=2.0, refused=8.5), FREE, IDLE),
        "much is let in, and more refused": (
            PrefillDemand(9.0, 0.0, capacity=2.0, refused=8.0),
            FREE,
            LOADED,
        ),
        "who was let in waits": (PrefillDemand(9.0, 11.0, capacity=2.0, refused=9.0), FREE, LOADED),
        "decode is full": (PrefillDemand(0.0, 0.0, capacity=2.0), DecodeDemand(0.6, 1, replicas=1), LOADED),
        "decode is between": (
            PrefillDemand(0.0, 0.0, capacity=2.0),
            DecodeDemand(0.4, 1, replicas=1),
            UNKNOWN,
        ),
        "no prefill replica": (PrefillDemand(9.0, 11.0), FREE, UNKNOWN),
    }.values(),
)
def test_what_loads_a_fleet(prefill, decode, load):
    assert FleetDemand(prefill, decode).load is load


def test_what_is_asked_for_of_decode_does_not_fall_with_what_is_let_in():
    asked = DecodeDemand(1.0, 10, pace=2.2, replicas=2, asked=5.0)
    assert (asked.load, asked.asked_load) == (1.1, 2.5)
    assert replace(asked, pace=1.0).asked_load == 2.5
    assert replace(asked, replicas=5).asked_load == 1.0
    assert replace(asked, asked=0.0).asked_load == 1.1, "what is in use at least, as where nobody says"
    assert DecodeDemand(0.0, 0, asked=1.0).asked_load == 0.0
