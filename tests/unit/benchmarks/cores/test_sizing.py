"""What is made of one way to size a tier on several streams."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks import report
from benchmarks.cores import autoscaling, decode_autoscaling
from benchmarks.cores.sizing import RAY_DEFAULT, compare, fixed, on_more_streams, over_streams, sized
from simulator.fleet.outcome import Passage
from simulator.workload.arrivals import Arrival
from slo.outcomes import Outcome
from slo.tiers import PREMIUM


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


WAYS = {
    "with refusals": lambda _, make, replicas, seed: sizing(96, 2.0 if replicas == 1 else 1.0 * replicas),
    "nobody refused": lambda _, make, replicas, seed: sizing(98, 1.0 if replicas == 1 else 2.0 * replicas),
}


def test_of_others_the_better_way_to_take_requests_is_shown_and_ours_runs_in_the_first():
    with ThreadPoolExecutor(1) as pool:
        found = compare(pool, WAYS, lambda: None, [RAY_DEFAULT, (4.0, 5.0, 120.0)])["step"]
    assert found["ours"]["replica_hours"] == 2.0
    assert (found["ray"]["way"], found["ray"]["setting"]) == ("nobody refused", RAY_DEFAULT)
    assert found["ray_tuned"]["way"] == "nobody refused"
    assert (found["fixed"]["way"], found["fixed"]["replicas"]) == ("with refusals", 2)
    assert len(found["all_ray"]) == 4


def test_further_streams_take_requests_as_what_was_chosen(monkeypatch, tmp_path):
    with ThreadPoolExecutor(1) as pool:
        loads = compare(pool, WAYS, lambda: None, [RAY_DEFAULT])
        (tmp_path / "any.json").write_text(json.dumps({"results": {"loads": loads}}))
        monkeypatch.setattr(report, "RESULTS", tmp_path)
        rows = on_more_streams(pool, WAYS, lambda: None, "any", [2])
    attainments = {row["arm"]: row["attainment"][0] for row in rows}
    assert attainments == {"ours": 0.96, "ray": 0.98, "ray_tuned": 0.98, "fixed": 0.96}


def test_a_prefill_tier_is_sized_with_refusals_and_without():
    def refused(**way):
        return autoscaling.serve(lambda _: 2.0, 120.0, lambda: fixed(1), 1, **way).refused

    assert refused() > 0.1
    assert refused(refuses=False) == 0


def test_an_answer_of_one_token_has_no_time_per_token_to_miss():
    def passage(outcome, tpot_s):
        arrival = Arrival(0, 0.0, "chat", 10, 1 if tpot_s is None else 9, None, PREMIUM)
        return Passage(arrival, outcome=outcome, tpot_s=tpot_s)

    assert decode_autoscaling.is_in_time(passage(Outcome.FINISHED, None))
    assert not decode_autoscaling.is_in_time(passage(Outcome.REJECTED, None))
    assert decode_autoscaling.is_in_time(passage(Outcome.FINISHED, 0.02))
    assert not decode_autoscaling.is_in_time(passage(Outcome.FINISHED, 0.2))
