"""Which decode replica is chosen, what counts as on its way there, and what is learned of its pace."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.decode_replica import DecodeView, Newcomer, choose_decode
from router.fleet.pace_model import PaceModel
from slo.decode.headroom import DecodeLoad
from slo.decode.predicted_peak import Holding
from slo.reports import AwaitedKv, DecodeReported
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, PREMIUM, STANDARD


def replica(name, kv_usage=0.0, running=0, **rest):
    known = DecodeView(ReplicaId(name))
    known.reported(DecodeReported(ReplicaId(name), kv_usage, running, **rest), 0.0)
    return known


def chosen(*replicas, tokens=1000, tpot_s=None, now_s=0.0):
    found = choose_decode(replicas, Newcomer(JobId("job"), STANDARD, tokens), tpot_s, now_s)
    return None if found is None else found.replica_id


SLOW = {"running": 9, "tpot_s": 0.05}
QUICK = {"kv_usage": 0.5, "running": 9, "tpot_s": 0.02}


@pytest.mark.parametrize(
    ("first", "second", "asked", "expected"),
    [
        ({"kv_usage": 0.8}, {"kv_usage": 0.1, "running": 50}, {}, "second"),
        ({"kv_usage": 0.11, "running": 3}, {"kv_usage": 0.14, "running": 2}, {}, "second"),
        ({"kv_usage": 0.1, "kv_tokens": 1000}, {"kv_usage": 0.5, "kv_tokens": 9000}, {}, "second"),
        (SLOW, QUICK, {"tpot_s": 0.04}, "second"),
        (SLOW, QUICK, {}, "first"),
    ],
    ids=[
        "the emptier",
        "of about equally empty ones the less busy",
        "with headroom for the prompt",
        "that keeps the pace",
        "the pace matters only to those who ask for one",
    ],
)  # fmt: skip
def test_decode_goes_to_the_replica(first, second, asked, expected):
    assert chosen(replica("first", **first), replica("second", **second), **asked) == expected


def test_memory_is_asked_for_only_until_there_is_some(monkeypatch):
    asked, has_room = [], DecodeView.has_room

    def ask(view, newcomer):
        asked.append(view.replica_id)
        return has_room(view, newcomer)

    monkeypatch.setattr(DecodeView, "has_room", ask)
    full = replica("full", 0.1, kv_tokens=1000)
    others = [replica(name, usage) for name, usage in (("busy", 0.8), ("third", 0.4), ("idle", 0.2))]
    assert chosen(*others, full, tokens=900) == "idle"
    assert asked == ["idle"]
    asked.clear()
    assert chosen(full, replica("too", 0.95, kv_tokens=1000), tokens=900) == "full"
    assert asked == ["full", "too"]


HELD = st.tuples(st.integers(0, 600), st.integers(0, 300), st.integers(0, 2), st.booleans())
VIEWS = st.lists(
    st.tuples(
        st.sampled_from([0.1, 0.12, 0.5, 0.97]),
        st.integers(0, 4),
        st.sampled_from([None, 0.02, 0.06]),
        st.none() | st.lists(HELD, max_size=5),
        st.lists(st.tuples(st.integers(0, 500), st.integers(0, 2)), max_size=4),
    ),
    max_size=6,
)
NEWCOMERS = st.builds(
    Newcomer,
    st.just(JobId("job")),
    st.just(STANDARD),
    st.integers(0, 800),
    most_output=st.integers(0, 100),
    is_top=st.booleans(),
    rank=st.integers(0, 2),
)


@given(VIEWS, st.lists(NEWCOMERS, min_size=1, max_size=4), st.sampled_from([None, 0.04]))
def test_the_choice_is_the_least_of_all_by_memory_then_pace_then_use_then_requests(views, newcomers, tpot_s):
    known = []
    for number, (usage, running, pace_s, streams, sent) in enumerate(views):
        about = {} if streams is None else {"load": load(*streams)}
        known.append(replica(str(number), usage, running, kv_tokens=1000, tpot_s=pace_s, **about))
        for job, (tokens, rank) in enumerate(sent):
            known[-1].placed(one_of(tokens, f"sent {job}", rank=rank), 0.5)

    def key(one, newcomer):
        predicted_s = one.pace.tpot_s(one.streams_with(newcomer.rank) + 1)
        too_slow = tpot_s is not None and predicted_s is not None and predicted_s > tpot_s
        usage = one.usage_with(newcomer)
        return not one.has_room(newcomer), too_slow, int(usage / 0.05), one.streams_with(0), usage

    for newcomer in newcomers:
        found = choose_decode(known, newcomer, tpot_s, 1.0)
        assert found is min(known, key=lambda one: key(one, newcomer), default=None)
        if found is not None:
            found.placed(replace(newcomer, job_id=JobId(f"placed {len(found.sent)}")), 1.0)


def test_of_none_there_is_none():
    assert chosen() is None


def one_of(tokens, name="job", **about):
    return Newcomer(JobId(name), STANDARD, tokens, **about)


def told(known, kv_usage, *awaited, now_s=1.0, **about):
    waits = tuple(AwaitedKv(JobId(name), STANDARD, tokens) for name, tokens in awaited)
    known.reported(
        DecodeReported(known.replica_id, kv_usage, 1, kv_tokens=10_000, awaited=waits, **about), now_s
    )


def test_what_was_sent_there_counts_until_its_kv_has_come():
    known = replica("first", kv_usage=0.5, kv_tokens=10_000)
    known.placed(one_of(4000, "sent"), 0.0)
    assert known.usage_with(one_of(1000)) == pytest.approx(1.0)
    told(known, 0.5)
    assert known.usage_with(one_of(1000)) == pytest.approx(1.0), "it has not reached the replica yet"
    told(known, 0.5, ("sent", 3000))
    assert known.usage_with(one_of(1000)) == pytest.approx(0.9), "there its tokens are known"
    told(known, 0.5, ("sent", 3000), now_s=100.0)
    assert known.usage_with(one_of(1000)) == pytest.approx(0.9), "however long it waits for its prefill"
    told(known, 0.8)
    assert known.usage_with(one_of(1000)) == pytest.approx(0.9)
    assert not known.sent


def test_one_that_ends_or_never_comes_does_not_count_any_more():
    known = replica("first", kv_tokens=10_000)
    known.placed(one_of(4000, "ended"), 0.0)
    known.placed(one_of(2000, "lost"), 0.0)
    known.job_ended(JobId("ended"))
    assert known.usage_with(one_of(0)) == pytest.approx(0.2)
    told(known, 0.0, now_s=4.9)
    assert known.usage_with(one_of(0)) == pytest.approx(0.2)
    told(known, 0.0, now_s=5.1)
    assert known.usage_with(one_of(0)) == 0.0


def test_one_that_is_prefilled_once_more_counts_once():
    known = replica("first", kv_tokens=10_000)
    known.placed(one_of(4000, "again"), 0.0)
    told(known, 0.0, ("again", 4000))
    known.placed(one_of(4100, "again"), 1.5)
    assert known.usage_with(one_of(0)) == pytest.approx(0.41)
    told(known, 0.0, now_s=1.6)
    assert known.usage_with(one_of(0)) == pytest.approx(0.41), "a report that was on its way"


def test_a_router_that_starts_anew_learns_from_one_report_what_is_on_its_way():
    known = replica("first")
    told(known, 0.2, ("one", 3000), ("unknown", 0))
    assert known.usage_with(one_of(0)) == pytest.approx(0.5)
    there = DecodeLoad(4000, 0, 0, 0.1, {}, {PREMIUM: 100, BACKGROUND: 100})
    told(known, 0.2, load=there)
    ranks = {PREMIUM: 2, BACKGROUND: 0}
    for tier, has_room in ((BACKGROUND, True), (PREMIUM, False)):
        waits = (AwaitedKv(JobId("one"), tier, 3000),)
        anew = DecodeView(known.replica_id)
        anew.reported(DecodeReported(known.replica_id, 0.0, 1, load=there, awaited=waits), 0.0, ranks)
        assert anew.has_room(Newcomer(JobId("job"), PREMIUM, 1000, is_top=True, rank=2)) is has_room


@pytest.mark.parametrize("is_pressed", [False, True])
def test_equal_replicas_share_what_comes_while_its_prefills_run(is_pressed):
    usage, pulled_s = {"a": 0.50, "b": 0.56}, {}
    about = {"load": DecodeLoad(1_000_000, 0, 0, 0.1, {}, {STANDARD: 100})} if is_pressed else {}
    known = [replica(name, of, kv_tokens=1_000_000, **about) for name, of in usage.items()]
    taken = {"a": [], "b": []}
    for number in range(60):  # ten a second, of 8,000 tokens each, and their prefills take six seconds
        now_s, newcomer = number / 10, one_of(8000, str(number))
        found = choose_decode(known, newcomer, None, now_s)
        found.placed(newcomer, now_s)
        taken[found.replica_id].append(newcomer.job_id)
        pulled_s[newcomer.job_id] = now_s + 6.0
        for one in known:
            awaited = [AwaitedKv(job, STANDARD, 8000) for job in taken[one.replica_id]]
            one.reported(
                DecodeReported(
                    one.replica_id, usage[one.replica_id], 0, 1_000_000, awaited=tuple(awaited), **about
                ),
                now_s + 0.005,
            )
    assert len(taken["a"]) == pytest.approx(34, abs=4), "until both are as full"


def test_what_others_hold_of_a_prompt_takes_no_memory():
    known = replica("first", 0.5, kv_tokens=10_000)
    held = {known.replica_id: 3000}
    known.placed(one_of(4000, "sent", held_tokens=held), 0.0)
    assert known.usage_with(one_of(3500, held_tokens=held)) == pytest.approx(0.65)
    told(known, 0.5, ("sent", 4200))
    assert known.usage_with(one_of(0)) == pytest.approx(0.62)
    told(known, 0.5, ("sent", 4200), caches_prefixes=False)
    assert known.usage_with(one_of(1000, held_tokens=held)) == pytest.approx(0.72)


def test_what_others_hold_of_a_prompt_counts_once_in_the_peak():
    known = replica("first", load=load((600, 50)))
    held = {known.replica_id: 500}
    assert not known.has_room(one_of(600))
    assert known.has_room(one_of(600, held_tokens=held))
    known.placed(one_of(550, "sent", held_tokens=held), 0.0)
    assert known.has_room(one_of(600, held_tokens=held))
    assert not known.has_room(one_of(700, held_tokens=held)), "200 of its own, beside 50 and answers of 250"
    assert known.has_room(one_of(510, held_tokens=held, most_output=10))


def test_what_streams_of_lower_tiers_hold_of_a_prompt_is_not_there_once_they_have_yielded():
    known = replica("first", load=load((600, 50), (10, 5, 1)))
    above = {"rank": 1, "most_output": 10}
    assert known.has_room(one_of(900, held_tokens={known.replica_id: 500}, **above))
    assert not known.has_room(one_of(1100, held_tokens={known.replica_id: 500}, **above))


def test_a_stream_that_has_left_is_neither_forgotten_nor_counted_twice():
    known = replica("first", load=load((900, 50)))
    known.placed(one_of(910, "s0"), 1.0)
    repeated = load((900, 50))
    told(known, 0.9, ("s0", 910), load=repeated, now_s=1.1)
    assert known.has_room(one_of(0, most_output=1)), "it is in what the engine has told before"
    told(known, 0.0, load=load(), now_s=1.2)
    known.placed(one_of(910, "s0"), 1.3)
    told(known, 0.0, load=load(), now_s=1.4)
    assert not known.has_room(one_of(100)), "the replica has not heard of it"
    told(known, 0.0, ("s0", 910), load=load(), now_s=1.5)
    assert not known.has_room(one_of(100))
    told(known, 0.9, ("s0", 910), load=load((910, 40, 0, True)), now_s=1.6)
    assert known.has_room(one_of(0, most_output=1)), "it waits in the engine"
    assert not known.has_room(one_of(100))


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
        known.placed(one_of(400, name), 1.0)
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


def test_a_replica_that_was_slow_and_has_nothing_to_do_is_tried_again():
    slow, quick = replica("slow"), replica("quick", 0.5)

    def report(slow_s, now_s, running):
        slow.reported(DecodeReported(slow.replica_id, 0.0, running, tpot_s=slow_s), now_s)
        quick.reported(DecodeReported(quick.replica_id, 0.5, 9, tpot_s=0.02), now_s)

    for half in range(40):
        report(0.2, half / 2, 9)
    report(None, 20.0, 0)
    asked = {"tpot_s": 0.04}
    assert chosen(slow, quick, **asked, now_s=49.0) == "quick"
    report(None, 49.5, 0)
    assert chosen(slow, quick, **asked, now_s=49.6) == "slow"
    slow.placed(one_of(100, "tried"), 49.6)
    assert chosen(slow, quick, **asked, now_s=49.7) == "quick", "one at a time"
    report(None, 50.0, 1)
    assert chosen(slow, quick, **asked, now_s=50.0) == "quick"
    report(0.02, 50.5, 1)
    assert chosen(slow, quick, **asked, now_s=50.5) == "slow", "what it was before counts no more"
    report(0.2, 51.0, 1)
    report(None, 51.5, 0)
    assert chosen(slow, quick, **asked, now_s=52.0) == "quick", "it is slow again"


@pytest.mark.parametrize("awaited", [0, 1], ids=["decodes", "waits for its KV"])
def test_an_answer_that_has_begun_and_ended_between_two_reports_tells_the_pace(awaited):
    slow, quick = replica("slow"), replica("quick")
    slow.reported(DecodeReported(slow.replica_id, 0.0, 1, awaited=waiting(awaited)), 1.0)
    slow.reported(DecodeReported(slow.replica_id, 0.0, 0, tpot_s=0.2), 1.4)
    assert chosen(slow, quick, tpot_s=0.04, now_s=2.0) == "quick"
    assert slow.tpot_s(1, 2.0) == pytest.approx(0.2)


def test_a_replica_that_has_requests_and_says_nothing_of_its_pace_is_not_tried():
    stuck, quick = replica("stuck", running=9, tpot_s=0.2), replica("quick", 0.5, running=9, tpot_s=0.02)
    for second in range(100):
        stuck.reported(DecodeReported(stuck.replica_id, 0.0, 1), float(second))
        quick.reported(DecodeReported(quick.replica_id, 0.5, 9, tpot_s=0.02), float(second))
    assert chosen(stuck, quick, tpot_s=0.04, now_s=99.0) == "quick"


def waiting(many, tier=BACKGROUND):
    return tuple(AwaitedKv(JobId(f"waits {number}"), tier, 100) for number in range(many))


def test_the_pace_is_that_of_the_requests_that_decode():
    known = DecodeView(ReplicaId("d"))
    for running in (4, 8, 16, 8, 4, 16) * 10:
        for many in (0, 40):
            told = DecodeReported(known.replica_id, 0.1, running + many, tpot_s=0.01 + 0.001 * running)
            known.reported(replace(told, awaited=waiting(many)), 1.0)
    assert known.pace.tpot_s(32) == pytest.approx(0.042)
    for _ in range(20):
        known.reported(DecodeReported(known.replica_id, 0.1, 40, tpot_s=9.0, awaited=waiting(40)), 2.0)
    assert known.pace.tpot_s(32) == pytest.approx(0.042), "none of them decodes"


RANKS = {PREMIUM: 2, STANDARD: 1, BACKGROUND: 0}


@pytest.mark.parametrize(("tier", "expected"), [(BACKGROUND, "waits"), (STANDARD, "busy"), (PREMIUM, "busy")])
def test_what_waits_for_its_prefill_counts_for_its_own_tier_and_below(tier, expected):
    waits, busy = DecodeView(ReplicaId("waits")), DecodeView(ReplicaId("busy"))
    for running in (4, 8, 16, 8, 4, 16) * 10:
        for known in (waits, busy):
            known.reported(DecodeReported(known.replica_id, 0.1, running, tpot_s=0.01 + 0.001 * running), 1.0)
    waits.reported(DecodeReported(waits.replica_id, 0.1, 42, awaited=waiting(40, tier)), 2.0, RANKS)
    busy.reported(DecodeReported(busy.replica_id, 0.1, 30), 2.0, RANKS)
    newcomer = Newcomer(JobId("job"), STANDARD, 100, rank=1)
    assert choose_decode([waits, busy], newcomer, 0.035, 2.0).replica_id == expected
    others = replace(newcomer, tier=PREMIUM)
    assert choose_decode([waits, busy], others, None, 2.0).replica_id == "busy", "it has fewer in all"
    if tier is BACKGROUND:
        below = Newcomer(JobId("job"), BACKGROUND, 100, rank=0)
        assert choose_decode([waits, busy], below, 0.035, 2.0).replica_id == "busy"
    waits.placed(replace(newcomer, job_id=JobId("waits 1")), 2.5)
    waits.job_ended(JobId("waits 0"))
    assert waits.streams_with(0) == 41, "one is prefilled once more, one has ended"
