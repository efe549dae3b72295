"""The simulator against recordings of the embedded model on CPU (`benchmarks.engines.validation`)."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from simulator.study.validation import Recorded, Recording, compare, hardware, lone_s, simulated

RESULTS = json.loads(
    (Path(__file__).parents[4] / "benchmarks" / "results" / "engines" / "validation.json").read_text()
)["results"]
RECORDINGS = [Recording.of(each) for each in RESULTS["recordings"]]
LIGHT = RECORDINGS[0]


def named(recording):
    return f"{recording.arm} at {recording.load}"


@pytest.mark.parametrize("recording", RECORDINGS, ids=named)
def test_the_figures_that_are_told_are_those_of_the_recording(recording):
    found = compare(recording)
    told = {
        row["of"]: (row["measured"], row["simulated"])
        for row in RESULTS["rows"]
        if (row["arm"], row["load"]) == (recording.arm, recording.load)
    }
    assert told.keys() == found.keys()
    for what, figures in found.items():
        assert told[what] == pytest.approx(figures), what


@pytest.mark.parametrize("recording", RECORDINGS, ids=named)
def test_it_foretells_what_the_real_server_did(recording):
    off = {
        what for what, (measured, ours) in compare(recording).items() if not is_foretold(what, measured, ours)
    }
    assert off == set()


def is_foretold(what, measured, ours):
    match what:
        case "p50":
            return ours == pytest.approx(measured, rel=0.10)
        case "p95":
            return ours == pytest.approx(measured, rel=0.15)
        case "stops":
            return True  # no aim was set
        case _:
            return ours == pytest.approx(measured, abs=0.05)


@pytest.mark.parametrize("recording", RECORDINGS, ids=named)
def test_the_recording_is_of_requests_that_met_each_other(recording):
    """Of requests that all had the server to themselves anything would foretell the times."""
    slowest = max(request.ttft_s / alone_s(recording, request.tokens) for request in recording.requests)
    assert slowest > 2.0
    assert len(recording.requests) >= 300


@pytest.mark.parametrize(("tokens", "alone"), LIGHT.alone)
def test_a_request_that_was_alone_takes_what_was_measured_alone(tokens, alone):
    lone = replace(LIGHT, requests=[Recorded(0.0, "short", "premium", tokens, 9.0, alone)])
    assert simulated(lone) == ([pytest.approx(alone)], 0)


@pytest.mark.parametrize("recording", RECORDINGS, ids=named)
def test_prefills_take_what_was_measured_in_the_chunks_of_the_server(recording):
    replica = hardware(recording)
    for tokens, seconds in recording.prefill:
        assert lone_s(recording.arm, replica, tokens) == pytest.approx(seconds, rel=0.1)


def test_a_pass_takes_what_its_tokens_look_at():
    cost = hardware(LIGHT).cost
    joined_s, whole_s = cost.times([(512, 0), (512, 0)]).total_s, cost.prefill_s(1024)
    assert joined_s < 0.9 * whole_s
    assert cost.prefill_s(512, 512) > 1.2 * cost.prefill_s(512)


def test_who_is_late_is_served_as_well():
    (tokens, alone) = LIGHT.alone[-1]
    late = [Recorded(0.0, "long", "standard", tokens, 0.001, alone) for _ in range(3)]
    times_s, _ = simulated(replace(LIGHT, requests=late))
    assert max(times_s) < 4 * alone
    found = compare(replace(LIGHT, requests=late))
    assert found["in time"] == found["in time, long"] == (0.0, 0.0)


def test_a_recording_survives_its_document():
    assert Recording.of(json.loads(json.dumps(LIGHT.document()))) == LIGHT


def alone_s(recording, tokens):
    return min(seconds for length, seconds in recording.alone if length >= tokens)
