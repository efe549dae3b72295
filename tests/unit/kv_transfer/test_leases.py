"""A pull counts only if its blocks were leased until it was done."""

from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from kv_transfer.leases import (
    AGAIN_S,
    MARGIN_S,
    MOST_BYTES,
    TRUSTED_S,
    EndedBook,
    EndedLeases,
    Leases,
    Pull,
    Pulls,
)

OFFSET_S = 1000.0
ENDS_S = 30.0
"""On this process's clock, if that knows the other's."""


@dataclass
class Prefill:
    """A prefill engine that is asked; answers when it is told to."""

    asked: list[tuple[str, ...]] = field(default_factory=list)
    answers: list[Future] = field(default_factory=list)

    def ask(self, pull, leases):
        self.asked.append(tuple(leases))
        self.answers.append(Future())
        return self.answers[-1]

    def answer(self, *ended, offset_s=OFFSET_S):
        self.answers.pop(0).set_result(Leases(frozenset(ended), offset_s))

    def is_silent(self):
        self.answers.pop(0).set_exception(TimeoutError())


@pytest.fixture
def prefill():
    return Prefill()


@pytest.fixture
def pulls(prefill):
    return Pulls(prefill.ask, {"engine": OFFSET_S})


def pull(lease="lease", block=1):
    return Pull("engine", ("host", 1), lease, OFFSET_S + ENDS_S, frozenset({block}))


def begin(pulls, *names, at_s=0.0):
    for block, name in enumerate(names, 1):
        pulls.began(name, pull(f"lease-of-{name}", block), at_s)


def test_one_that_is_done_well_before_is_used_at_once(pulls, prefill):
    begin(pulls, "a")
    assert pulls.settle(set(), 1.0, 0.0) == (set(), frozenset(), 0)
    assert pulls.settle({"a"}, ENDS_S - MARGIN_S - 0.1, 0.0) == ({"a"}, frozenset(), 0)
    assert prefill.asked == []


def test_requests_without_a_lease_are_passed_on(pulls):
    assert pulls.settle({"other"}, 99.0, 0.0).done == {"other"}


@pytest.mark.parametrize("done_s", [ENDS_S - MARGIN_S + 0.1, ENDS_S + 100.0])
@pytest.mark.parametrize("has_ended", [False, True])
def test_of_any_other_prefill_is_asked(pulls, prefill, done_s, has_ended):
    begin(pulls, "a")
    assert pulls.settle({"a"}, done_s, 0.0).done == set(), "not before it has answered"
    assert prefill.asked == [("lease-of-a",)]
    assert pulls.settle(set(), done_s + 0.1, 0.0).done == set()
    assert len(prefill.asked) == 1
    prefill.answer(*(["lease-of-a"] if has_ended else []))
    expected = ({"a"}, frozenset({1}), 1) if has_ended else ({"a"}, frozenset(), 0)
    assert pulls.settle(set(), done_s + 0.2, 0.0) == expected
    assert pulls.settle(set(), done_s + 9, 0.0) == (set(), frozenset(), 0), "it is told once"


def test_one_whose_prefill_does_not_answer_is_not_used(pulls, prefill):
    begin(pulls, "a")
    pulls.settle({"a"}, 31.0, 0.0)
    prefill.is_silent()
    assert pulls.settle(set(), 33.0, 0.0) == ({"a"}, frozenset({1}), 1)


def test_what_prefill_said_while_it_was_read_does_not_count(pulls, prefill):
    begin(pulls, "a")
    pulls.settle(set(), 31.0, 0.0)
    assert pulls.settle({"a"}, 31.5, 0.0).done == set()
    prefill.answer()
    pulls.settle(set(), 31.6, 0.0)
    assert prefill.asked == [("lease-of-a",)] * 2, "asked again, now that it is done"
    prefill.answer("lease-of-a")
    assert pulls.settle(set(), 31.7, 0.0) == ({"a"}, frozenset({1}), 1)


def test_one_that_is_never_done_fails_when_its_lease_has_ended(pulls, prefill):
    """The request is told at once; its blocks stay its own until nothing is read into them."""
    begin(pulls, "a")
    pulls.settle(set(), 31.0, 0.0)
    prefill.answer()
    pulls.settle(set(), 31.1, 0.0)
    pulls.settle(set(), 31.0 + AGAIN_S - 0.01, 0.0)
    assert len(prefill.asked) == 1
    pulls.settle(set(), 31.0 + AGAIN_S, 0.0)
    assert len(prefill.asked) == 2
    prefill.answer("lease-of-a")
    assert pulls.settle(set(), 33.0, 0.0) == (set(), frozenset({1}), 1)
    assert pulls.settle(set(), 60.0, 0.0) == (set(), frozenset(), 0)
    assert len(prefill.asked) == 2
    assert pulls.settle({"a"}, 90.0, 0.0) == ({"a"}, frozenset(), 0)


def test_one_that_has_failed_is_passed_on_without_a_question(pulls, prefill):
    begin(pulls, "a")
    pulls.failed("a")
    pulls.failed("unknown")
    assert pulls.settle({"a"}, 99.0, 0.0) == ({"a"}, frozenset(), 0)
    assert prefill.asked == []


def test_one_that_fails_while_prefill_is_asked_about_it(pulls, prefill):
    """As a handshake does that nobody answers."""
    begin(pulls, "a")
    pulls.settle(set(), ENDS_S, 0.0)
    pulls.failed("a")
    assert pulls.settle({"a"}, ENDS_S + 1, 0.0) == ({"a"}, frozenset(), 0)
    prefill.is_silent()
    assert pulls.settle(set(), ENDS_S + 2, 0.0) == (set(), frozenset(), 0)


def test_what_is_said_of_a_pull_that_failed_decides_about_no_later_one(pulls, prefill):
    begin(pulls, "a")
    pulls.settle(set(), ENDS_S, 0.0)
    pulls.failed("a")
    pulls.settle({"a"}, ENDS_S + 1, 0.0)
    begin(pulls, "a", at_s=ENDS_S + 1)
    prefill.answer("lease-of-a")
    assert pulls.settle(set(), ENDS_S + 1.5, 0.0) == (set(), frozenset(), 0)
    pulls.settle({"a"}, ENDS_S + 3, 0.0)
    prefill.answer()
    assert pulls.settle(set(), ENDS_S + 4, 0.0) == ({"a"}, frozenset(), 0)


def test_after_the_other_host_was_suspended_its_clock_is_learned_anew(pulls, prefill):
    """It stood still for a minute: leases that it gives now seem to be over."""
    begin(pulls, "a", at_s=65.0)
    pulls.settle({"a"}, 66.0, 0.0)
    prefill.answer(offset_s=OFFSET_S - 60.0)
    assert pulls.settle(set(), 66.1, 0.0).done == {"a"}
    begin(pulls, "b", at_s=70.0)
    assert pulls.settle({"b"}, 71.0, 0.0) == ({"b"}, frozenset(), 0)
    assert len(prefill.asked) == 1


def test_after_this_host_was_suspended_no_clock_is_trusted(pulls, prefill):
    """It seems to be early, and the lease ended long ago."""
    begin(pulls, "a")
    pulls.settle(set(), 1.0, 5.0)
    assert pulls.settle({"a"}, 2.0, 65.0).done == set()
    prefill.answer("lease-of-a", offset_s=OFFSET_S + 60.0)
    assert pulls.settle(set(), 2.1, 65.0) == ({"a"}, frozenset({1}), 1)
    pulls.began("b", Pull("engine", ("host", 1), "b", OFFSET_S + 60.0 + 32.0, frozenset({2})), 3.0)
    assert pulls.settle({"b"}, 4.0, 65.0) == ({"b"}, frozenset(), 0), "its clock is known again"


def used_at_once(pulls, now_s):
    """Whether a pull that is done by then, well before the end of its lease, is."""
    ends_s = OFFSET_S + now_s + ENDS_S
    pulls.began("one", Pull("engine", ("host", 1), "one", ends_s, frozenset({1})), now_s - 1.0)
    return "one" in pulls.settle({"one"}, now_s, 0.0).done


def test_clocks_that_drift_apart_are_compared_anew_by_one_question_an_hour(prefill):
    offsets = {"engine": OFFSET_S}
    pulls = Pulls(prefill.ask, offsets)
    assert used_at_once(pulls, 100.0)
    assert used_at_once(pulls, 100.0 + TRUSTED_S)
    later_s = 101.0 + TRUSTED_S
    assert not used_at_once(pulls, later_s)
    prefill.answer(offset_s=OFFSET_S + 0.2)
    assert pulls.settle(set(), later_s + 0.1, 0.0).done == {"one"}
    assert used_at_once(pulls, later_s + TRUSTED_S)
    assert len(prefill.asked) == 1
    assert not used_at_once(pulls, later_s + TRUSTED_S + 1.0)


def test_a_handshake_that_has_told_a_clock_anew_counts_as_an_answer(prefill):
    offsets = {"engine": OFFSET_S}
    pulls = Pulls(prefill.ask, offsets)
    assert used_at_once(pulls, 100.0)
    offsets["engine"] = OFFSET_S + 0.1
    assert used_at_once(pulls, 101.0 + TRUSTED_S)
    assert used_at_once(pulls, 101.0 + 2 * TRUSTED_S)
    assert prefill.asked == []


def test_an_engine_whose_clock_is_unknown_is_asked(prefill):
    pulls = Pulls(prefill.ask, {})
    begin(pulls, "a")
    pulls.settle(set(), AGAIN_S / 2, 0.0)
    assert prefill.asked == [], "hands are shaken meanwhile"
    pulls.settle({"a"}, 0.6, 0.0)
    prefill.answer()
    assert pulls.settle(set(), 0.7, 0.0).done == {"a"}


@pytest.mark.parametrize("has_ended", [False, True])
def test_what_is_said_of_a_pull_that_is_done_by_then_takes_no_blocks_back(prefill, has_ended):
    """A slow handshake has told the clock after prefill was asked; the blocks are in use, or another's."""
    offsets = {}
    pulls = Pulls(prefill.ask, offsets)
    begin(pulls, "a")
    pulls.settle(set(), AGAIN_S, 0.0)
    assert prefill.asked == [("lease-of-a",)]
    offsets["engine"] = OFFSET_S
    assert pulls.settle({"a"}, AGAIN_S + 0.6, 0.0) == ({"a"}, frozenset(), 0)
    if has_ended:
        prefill.answer("lease-of-a")
    else:
        prefill.is_silent()
    assert pulls.settle(set(), AGAIN_S + 2.0, 0.0) == (set(), frozenset(), 0)


def test_many_are_asked_about_at_once_and_the_rest_with_the_next_question(pulls, prefill):
    names = [f"{number:03}" + "x" * 100 for number in range(60)]
    begin(pulls, *names)
    done, now_s = pulls.settle(set(names), 31.0, 0.0).done, 31.0
    for _ in range(20):
        assert len(prefill.answers) <= 1
        if prefill.answers:
            prefill.answer()
        now_s += 0.1
        done |= pulls.settle(set(), now_s, 0.0).done
    assert done == set(names)
    assert all(sum(map(len, leases)) <= MOST_BYTES for leases in prefill.asked)
    assert len(prefill.asked) <= 4


def test_a_book_knows_what_has_ended_of_its_own_engine_and_nothing_of_another():
    book = EndedBook("engine")
    book.note(EndedLeases(frozenset({"a"})).aggregate(EndedLeases(frozenset({"b"}))).leases)
    assert book.ended("engine", ["a", "b", "c"]) == ["a", "b"]
    assert book.ended("its predecessor", ["c"]) == ["c"]


def test_a_book_forgets_what_ended_long_ago():
    book = EndedBook("engine")
    for number in range(30_000):
        book.note([str(number)])
    assert book.ended("engine", ["0", "29999"]) == ["29999"]
    assert len(book._ended) == 10_000
