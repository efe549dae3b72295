"""Requests whose end was not heard of are found by what their ingress says is alive."""

from collections import Counter

import pytest
from admission_offers import WORK_S, controller
from hypothesis import given
from hypothesis import strategies as st

from slo.admission.rules import AdmissionRequest
from slo.admission.tenant_limits import TenantLimit, Usage
from slo.request import JobId
from slo.tiers import STANDARD


def asked(number, asker="ingress", tenant="one"):
    return AdmissionRequest(JobId(f"{asker}-{number}"), STANDARD, tenant, Usage(100), WORK_S, asker, number)


def admitted(admission, request, now_s=0.0):
    return admission.decide(request, now_s) is None


def test_an_end_that_was_not_heard_of_does_not_keep_a_tenant_out():
    admission = controller(one=TenantLimit(max_concurrent=1))
    assert admitted(admission, asked(1))
    assert not admitted(admission, asked(2))
    assert admission.reconcile("ingress", 2, [JobId("ingress-1")], 1.0) == []
    assert not admitted(admission, asked(3), 1.0)
    assert admission.reconcile("ingress", 3, [], 2.0) == ["ingress-1"]
    assert admitted(admission, asked(4), 2.0)


def test_what_was_asked_after_the_word_was_given_is_left_alone():
    admission = controller()
    for number in (1, 2):
        assert admitted(admission, asked(number))
    assert admission.reconcile("ingress", 1, [], 1.0) == ["ingress-1"]


def test_nobody_speaks_for_others():
    admission = controller()
    assert admitted(admission, asked(1, "another"))
    assert admission.reconcile("ingress", 99, [], 1.0) == []


def test_a_word_on_ones_own_requests_looks_at_nobody_elses():
    looked_at = []

    class Asker(str):
        __slots__ = ()

        def __eq__(self, other):
            looked_at.append(other)
            return str.__eq__(self, other)

        def __hash__(self):
            looked_at.append(self)
            return str.__hash__(self)

    admission = controller()
    for number in range(100):
        assert admitted(admission, asked(number, Asker("another")))
    assert admitted(admission, asked(1))
    looked_at.clear()
    assert admission.reconcile("ingress", 1, [], 1.0) == ["ingress-1"]
    assert len(looked_at) < 10


def test_who_is_silent_while_others_speak_is_gone_and_its_requests_with_it():
    admission = controller()
    assert admitted(admission, asked(1, "lost"))
    assert admission.reconcile("lost", 1, [JobId("lost-1")], 0.0) == []
    ended = [admission.reconcile("ingress", 0, [], now_s) for now_s in (10.0, 20.0, 30.0, 40.0)]
    assert ended == [[], [], [], ["lost-1"]]


@pytest.mark.parametrize("spoke", [True, False], ids=["spoke", "died before it spoke"])
def test_who_is_silent_is_gone_too_when_the_next_speaks_only_long_after(spoke):
    admission = controller()
    assert admitted(admission, asked(1, "lost"))
    if spoke:
        assert admission.reconcile("lost", 1, [JobId("lost-1")], 0.0) == []
    ended = [admission.reconcile("new", 0, [], now_s) for now_s in (40.0, 50.0, 60.0, 71.0)]
    assert ended == [[], [], [], ["lost-1"]]


def test_a_router_that_was_stopped_blames_nobody():
    admission = controller()
    assert admitted(admission, asked(1, "a"))
    assert admitted(admission, asked(1, "b"))
    for name in "ab":
        admission.reconcile(name, 1, [JobId(f"{name}-1")], 0.0)
    assert admission.reconcile("a", 1, [JobId("a-1")], 100.0) == []
    assert admission.reconcile("b", 1, [JobId("b-1")], 100.1) == []


def test_nor_does_it_when_one_that_is_new_asks_first():
    admission = controller()
    assert admitted(admission, asked(1, "a"))
    admission.reconcile("a", 1, [JobId("a-1")], 0.0)
    assert admitted(admission, asked(1, "new"), 100.0)
    assert admission.reconcile("new", 1, [JobId("new-1")], 100.1) == []


def test_a_request_of_more_than_an_hour_lives_while_its_ingress_says_so():
    admission = controller(one=TenantLimit(max_concurrent=1, output_tokens_per_s=1, burst_output_tokens=9000))
    long = AdmissionRequest(JobId("long"), STANDARD, "one", Usage(100, 8000), WORK_S, "ingress", 1)
    assert admitted(admission, long)
    for now_s in range(10, 4000, 10):
        assert admission.reconcile("ingress", 1, ["long"], float(now_s)) == []
        if now_s % 100 == 0:
            assert not admitted(admission, asked(2), now_s), "one at a time"
    admission.ended(JobId("long"), 4000.0, Usage(100, 100))
    again = AdmissionRequest(JobId("again"), STANDARD, "one", Usage(100, 8900), WORK_S, "ingress", 3)
    assert admitted(admission, again, 4000.0), "what it has not generated was given back"


def test_one_of_which_nobody_says_that_it_lives_has_ended_after_an_hour():
    admission = controller(one=TenantLimit(max_concurrent=1))
    assert admitted(admission, asked(1, asker=""))
    assert not admitted(admission, asked(2), 3599.0)
    assert admitted(admission, asked(3), 3600.0)


@given(
    st.lists(st.tuples(st.sampled_from(["ask", "end", "lose", "tell"]), st.sampled_from("ab")), max_size=60)
)
def test_after_everybody_has_spoken_the_account_is_that_of_what_lives(events):
    admission = controller()
    live, count = {"a": set(), "b": set()}, Counter()
    for number, (event, asker) in enumerate(events):
        now_s = number / 2  # nobody is silent for so long that it is gone
        match event:
            case "ask":
                count[asker] += 1
                if admitted(admission, asked(count[asker], asker), now_s):
                    live[asker].add(JobId(f"{asker}-{count[asker]}"))
            case "end" if live[asker]:
                admission.ended(live[asker].pop(), now_s)
            case "lose" if live[asker]:  # the router does not hear of it
                live[asker].pop()
            case "tell":
                admission.reconcile(asker, count[asker], live[asker], now_s)
    for asker in "ab":
        admission.reconcile(asker, count[asker], live[asker], len(events) / 2)
    assert set(admission._jobs) == live["a"] | live["b"]
    assert admission.backlog_s(STANDARD) == pytest.approx(WORK_S * len(admission._jobs))
