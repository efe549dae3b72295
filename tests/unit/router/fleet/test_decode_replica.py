import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.decode_replica import DecodeView, KvLink, Newcomer, PaceModel, choose_decode
from slo.decode.headroom import DecodeLoad
from slo.decode.predicted_peak import Holding
from slo.reports import DecodeReported
from slo.request import JobId, ReplicaId
from slo.tiers import STANDARD

LINK = KvLink(bytes_per_token=100_000, bytes_ps=1e9, latency_s=0.01)


def replica(name, kv_usage=0.0, running=0, **rest):
    known = DecodeView(ReplicaId(name))
    known.reported(DecodeReported(ReplicaId(name), kv_usage, running, **rest), 0.0)
    return known


def chosen(*replicas, tokens=1000, tpot_s=None, link=None):
    found = choose_decode(replicas, Newcomer(JobId("job"), STANDARD, tokens), tpot_s, link)
    return None if found is None else found.replica_id


SLOW = {"running": 9, "tpot_s": 0.05}
QUICK = {"kv_usage": 0.5, "running": 9, "tpot_s": 0.02}


@pytest.mark.parametrize(
    ("first", "second", "asked", "expected"),
    [
        ({"kv_usage": 0.8}, {"kv_usage": 0.1, "running": 50}, {}, "second"),
        ({"kv_usage": 0.11, "running": 3}, {"kv_usage": 0.14, "running": 2}, {}, "second"),
        ({"kv_usage": 0.1, "kv_tokens": 1000}, {"kv_usage": 0.5, "kv_tokens": 9000}, {}, "second"),
        ({"link_bytes_ps": 1e8}, {"kv_usage": 0.4}, {"link": LINK}, "second"),
        ({"link_bytes_ps": 1e8}, {"kv_usage": 0.4}, {}, "first"),
        (SLOW, QUICK, {"tpot_s": 0.04}, "second"),
        (SLOW, QUICK, {}, "first"),
    ],
    ids=[
        "the emptier",
        "of about equally empty ones the less busy",
        "with headroom for the prompt",
        "over the faster link",
        "a link matters only when there is a profile",
        "that keeps the pace",
        "the pace matters only to those who ask for one",
    ],
)  # fmt: skip
def test_decode_goes_to_the_replica(first, second, asked, expected):
    assert chosen(replica("first", **first), replica("second", **second), **asked) == expected


def test_of_none_there_is_none():
    assert chosen() is None


def test_what_was_sent_there_counts_until_the_next_report():
    known = replica("first", kv_usage=0.5, kv_tokens=10_000)
    known.placed(4000)
    assert known.usage_with(1000) == pytest.approx(1.0)
    known.reported(DecodeReported(known.replica_id, 0.9, 1, kv_tokens=10_000), 1.0)
    assert known.usage_with(1000) == pytest.approx(1.0)


def load(*streams, pool=1000, **about):
    named = {JobId(f"s{number}"): Holding(*stream) for number, stream in enumerate(streams)}
    return DecodeLoad(pool, 0, 0, 0.1, named, {STANDARD: 100}, **about)


def test_a_replica_whose_memory_will_last_goes_before_one_that_is_emptier_now():
    grows = replica("grows", 0.3, load=load((400, 600)))
    ends = replica("ends", 0.6, load=load((600, 10)))
    assert chosen(grows, ends, tokens=200) == "ends"
    assert chosen(replica("grows", 0.3), replica("ends", 0.6), tokens=200) == "grows"


def test_what_was_sent_counts_until_the_engine_has_it_or_it_has_ended():
    known = replica("first", load=load())
    newcomer = Newcomer(JobId("job"), STANDARD, 300)
    for name in ("a", "b"):
        known.placed(400, Newcomer(JobId(name), STANDARD, 400), 1.0)
    assert not known.has_room(newcomer)
    known.reported(DecodeReported(known.replica_id, 0.0, 2, load=load()), 2.0)
    assert not known.has_room(newcomer), "their prefill still runs"
    known.job_ended(JobId("a"))
    assert known.has_room(newcomer)
    there = DecodeLoad(1000, 0, 0, 0.1, {JobId("b"): Holding(410, 90)}, {STANDARD: 100})
    known.reported(DecodeReported(known.replica_id, 0.4, 1, load=there), 3.0)
    assert not known.sent


def test_what_a_replica_repeats_is_as_old_as_when_it_was_first_said():
    known, newcomer = replica("first"), Newcomer(JobId("job"), STANDARD, 300)
    for now_s in (1.0, 1.5, 2.0):
        known.reported(DecodeReported(known.replica_id, 0.9, 1, load=load((900, 100))), now_s)
    assert known.wait_s(newcomer, 2.0) == pytest.approx(9.0)
    known.reported(DecodeReported(known.replica_id, 0.9, 1, load=load((910, 90))), 2.0)
    assert known.wait_s(newcomer, 2.0) == pytest.approx(9.0)
    assert known.wait_s(newcomer, 2.5) == pytest.approx(8.5)


def test_the_pace_is_learned_as_a_line():
    pace = PaceModel()
    assert pace.tpot_s(5) is None
    for running in (4, 8, 16, 8, 4, 16) * 5:
        pace.observe(running, 0.01 + 0.001 * running)
    assert pace.tpot_s(12) == pytest.approx(0.022)
    assert pace.tpot_s(32) == pytest.approx(0.042)


def test_so_many_may_decode_together_at_a_pace():
    fast, slow = PaceModel(), PaceModel()
    assert fast.most(0.02) == math.inf, "nobody knows"
    for running in (10, 20) * 20:
        fast.observe(running, 0.01 + 0.0005 * running)
        slow.observe(4 * running, 0.01 + 0.0005 * 4 * running)
    both = PaceModel.of_all([fast, slow, PaceModel()])
    assert both.most(0.03) == pytest.approx(40, rel=0.2)
    assert both.most(0.005) == 0.0, "the weights alone take longer"


def test_numbers_that_hardly_differ_say_little_of_what_a_request_takes():
    pace = PaceModel()
    for running, tpot_s in ((100, 0.020), (101, 0.019), (100, 0.021), (101, 0.022)) * 20:
        pace.observe(running, tpot_s)
    assert pace.most(0.030) == pytest.approx(200, rel=0.1), "half of the time is taken to be theirs"


def test_replicas_that_are_all_too_slow_alike_may_decode_fewer_not_none():
    pace = PaceModel()
    for running, tpot_s in ((120, 0.059), (150, 0.070)) * 20:
        pace.observe(running, tpot_s)
    assert 50 <= pace.most(0.030) < 120


@given(
    st.lists(st.tuples(st.integers(1, 100), st.floats(0.001, 0.2)), min_size=1, max_size=30),
    st.floats(0.001, 0.3),
)
def test_a_pace_at_which_one_may_decode_is_never_out_of_reach(seen, tpot_s):
    pace = PaceModel()
    for running, took_s in seen:
        pace.observe(running, took_s)
    assert pace.most(tpot_s) < 1 or pace.alone_s < tpot_s + 1e-6


def test_a_replica_that_is_always_busy_does_not_say_that_one_alone_is_slow():
    pace = PaceModel()
    assert pace.alone_s == 0.0, "nobody knows"
    for _ in range(40):
        pace.observe(32, 0.06)
    assert pace.alone_s < 0.03


def test_a_replica_that_decodes_nothing_says_nothing_of_the_pace():
    known = replica("d", running=40, tpot_s=0.03)
    for _ in range(20):
        known.reported(DecodeReported(ReplicaId("d"), 0.0, 0, tpot_s=0.03), 1.0)
    assert known.pace.tpot_s(40) == pytest.approx(0.03)


def test_a_transfer_takes_latency_and_bytes_over_bandwidth():
    assert LINK.transfer_s(1000) == pytest.approx(0.01 + 0.1)
