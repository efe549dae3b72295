"""What is made of one way to size a tier on several streams."""

import pytest

from benchmarks.cores import autoscaling, decode_autoscaling
from benchmarks.cores.sizing import fixed, over_streams, sized


def sizing(in_time, hours):
    return sized([True] * in_time + [False] * (100 - in_time), 0.0, [1, 2], 3600 * hours)


def test_streams_are_compared_in_pairs():
    ours, fleet = [sizing(90, 1.0), sizing(80, 2.0)], [sizing(90, 2.0), sizing(80, 1.0)]
    found = over_streams(fleet, ours)
    assert found["attainment"] == pytest.approx([0.8, 0.85, 0.9])
    assert found["per_replica_hour"] == pytest.approx([45, 62.5, 80])
    assert found["ours over it"] == pytest.approx([0.5, 1.25, 2.0])
    assert over_streams(ours, ours)["ours over it"] == pytest.approx([1.0, 1.0, 1.0])


@pytest.mark.parametrize("of", [autoscaling, decode_autoscaling])
def test_another_seed_is_another_stream(of):
    def sent(seed):
        return [job.arrival.at_s for job in of.serve(lambda _: 0.5, 60.0, lambda: fixed(1), 1, seed).jobs]

    assert sent(1) == sent(1)
    assert sent(1) != sent(2)
