"""The simulator against a recording of the embedded model on CPU (`benchmarks.engines.validation`)."""

import json
from pathlib import Path

import pytest

from simulator.study.validation import Recorded, Recording, compare, simulated_s

RECORDED = Path(__file__).parents[4] / "benchmarks" / "results" / "engines" / "validation.json"
LIMITS = {"p50": 0.10, "p95": 0.15}


@pytest.fixture(scope="module")
def recording():
    return Recording.of(json.loads(RECORDED.read_text())["results"]["recording"])


def test_it_foretells_what_the_real_server_did(recording):
    for name, (measured_s, simulated) in compare(recording).items():
        assert simulated == pytest.approx(measured_s, rel=LIMITS[name]), name


def test_the_figures_that_are_told_are_those_of_the_recording(recording):
    told = json.loads(RECORDED.read_text())["results"]["quantiles_s"]
    for name, figures in compare(recording).items():
        assert told[name] == pytest.approx(figures), name


def test_the_recording_is_of_requests_that_met_each_other(recording):
    """Of requests that all had the server to themselves anything would foretell the times."""
    slowest = max(request.ttft_s / alone_s(recording, request.tokens) for request in recording.requests)
    assert slowest > 2.0
    assert len(recording.requests) >= 40


def test_a_request_that_was_alone_takes_what_was_measured_alone(recording):
    (tokens, alone) = recording.alone[2]
    lone = Recording(
        recording.arm,
        recording.prefill,
        recording.alone,
        [Recorded(0.0, "short", "premium", tokens, 9.0, alone)],
    )
    assert simulated_s(lone) == [pytest.approx(alone)]


def test_a_recording_survives_its_document(recording):
    assert Recording.of(json.loads(json.dumps(recording.document()))) == recording


def alone_s(recording, tokens):
    return min(seconds for length, seconds in recording.alone if length >= tokens)
