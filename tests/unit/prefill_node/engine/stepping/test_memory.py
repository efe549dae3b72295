"""Who fits into memory, who waits for it, and who gives it up."""

from collections import Counter

import pytest
from step_choices import chosen, having_led, queued, rules, starts, suspended

from prefill_node.board.messages import Queued
from prefill_node.engine.stepping.memory import Memory
from prefill_node.engine.stepping.step_choice import Wait, choose, in_order
from slo.queue.prefill import Prefill
from slo.queue.slack import NO_DEADLINE
from slo.request import JobId
from slo.tiers import BACKGROUND


def chunked(name, arrived_s):
    """A background prompt between two chunks."""
    prefill = Prefill(JobId(name), 1.0, NO_DEADLINE, 0.1, arrived_s, tier=BACKGROUND)
    return Queued(prefill, 100, 0.0, 5, 9, name)


def test_what_others_hold_of_its_prefix_takes_no_memory_while_they_hold_it():
    def shared(item):
        return 8

    def shares(name, deadline_s):
        return queued(name, deadline_s=deadline_s, missing=10)

    both = [shares("a", 5), shares("b", 6)]
    assert chosen(both, free=4, join_tokens=1000, memory=Memory(shared_blocks=shared)) == starts("a", "b")
    assert chosen(both, free=3, join_tokens=1000, memory=Memory(shared_blocks=shared)) == starts("a")
    in_a_hurry = shares("urgent", 0.15)
    holder = suspended(1, deadline_s=90, held=9)
    assert chosen([in_a_hurry], [holder], free=2, memory=Memory(shared_blocks=shared)) == starts("urgent")
    assert chosen([in_a_hurry], [holder], free=1, memory=Memory(shared_blocks=shared)) == (["urgent"], [1])
    assert chosen([in_a_hurry], [holder], free=0, memory=Memory(shared_blocks=shared)) == 1, (
        "without the holder its prefix takes memory, too"
    )


def test_only_of_those_that_are_looked_at_it_is_asked_what_they_share():
    asked = []

    def shared(item):
        asked.append(item.request)
        return 0 if item.request == "alone" else 9

    behind = [queued(f"job-{n}", deadline_s=20 + n, missing=10) for n in range(500)]
    small = queued("small", deadline_s=5)
    assert chosen([*behind, small], free=1, join_tokens=100, memory=Memory(shared_blocks=shared)) == starts(
        "small"
    )
    assert not asked
    waiting = [*behind, queued("alone", deadline_s=4, missing=9), queued("first", deadline_s=5, missing=10)]
    assert chosen(waiting, free=1, join_tokens=100, memory=Memory(shared_blocks=shared)) == starts("first")
    assert set(asked) == {"alone", "first"}
    asked.clear()
    assert chosen(waiting, free=3, join_tokens=250, memory=Memory(shared_blocks=shared)) == starts(
        "first", "job-0"
    )
    assert set(asked) == {"alone", "first", "job-0"}


class Walked(list):
    """A queue that counts how often all of it is looked at."""

    walks = 0

    def __iter__(self):
        self.walks += 1
        return super().__iter__()


def test_among_thousands_that_do_not_fit_nothing_is_worked_out_for_each_of_them():
    """The engine computes nothing meanwhile."""
    shared, freed = Counter(), Counter()

    def shares(item):
        shared[item.request] += 1
        return 1

    def frees(holders):
        freed[len(holders)] += 1
        return [1 for _ in holders]

    waiting = [queued(f"job-{n}", deadline_s=9 + n / 1000, missing=100) for n in range(4096)]
    dear = [queued(f"dear-{n}", deadline_s=2 + n, weight=2.0, missing=100, held=90) for n in range(5)]
    holders = [queued(f"holder-{n}", missing=100, held=90) for n in range(5)]
    queue, memory = Walked([*waiting, *dear, *holders]), Memory(0, shares, frees)
    ordered = in_order(queue, [], 0.0, rules())
    queue.walks = 0
    assert choose(queue, [], 50, 0.0, rules(), ordered, memory) == Wait()
    assert queue.walks <= 3
    assert max(shared.values()) == 1
    assert sum(shared.values()) < 100
    assert sum(freed.values()) <= 1 + len(dear) + len(holders), "once for all that hold nothing"


def test_who_was_not_asked_what_it_shares_is_before_anybody_gives_up_memory_for_it():
    many = [queued(f"job-{n}", deadline_s=9 + n / 1000, missing=100) for n in range(400)]
    last = queued("last", deadline_s=9.9, missing=100, weight=2.0)
    holder = queued("holder", missing=100, held=90, weight=1.5)

    def shared(item):
        return 60 if item.request == "last" else 1

    memory = Memory(shared_blocks=shared)
    assert chosen([*many, last, holder], free=40, memory=memory) == starts("last")
    assert chosen([*many, last, holder], free=39, memory=memory) == (["last"], ["holder"])


def test_one_that_does_not_fit_lets_the_next_one_go():
    queue = [queued("large", deadline_s=5, missing=10), queued("small", deadline_s=6, missing=2)]
    assert chosen(queue, free=3) == starts("small")
    assert chosen(queue, free=1) is None


def test_one_with_time_to_spare_waits_for_a_suspended_step_to_end():
    patient = queued("patient", deadline_s=60, missing=10)
    assert chosen([patient], [suspended(1, deadline_s=90)], free=3) == 1
    in_a_hurry = queued("in-a-hurry", deadline_s=0.15, missing=10)
    stopped = [suspended(1, deadline_s=90, held=10)]
    assert chosen([in_a_hurry], stopped, free=3) == (["in-a-hurry"], [1])


def test_one_with_time_to_spare_waits_for_a_prompt_between_two_chunks_to_end():
    """It would be thrown away for each that comes, and never be done."""
    long = queued("long", missing=3, held=9)
    assert chosen([queued("patient", deadline_s=60, missing=10), long], free=3) == starts("long")
    assert chosen([queued("in-a-hurry", deadline_s=0.15, missing=10), long], free=3) == (
        ["in-a-hurry"],
        ["long"],
    )
    longer = queued("longer", 1000, missing=3, held=9)
    later = queued("later", deadline_s=1.05, missing=10)
    assert chosen([later, longer], free=3) == (["later"], ["longer"]), "it would end too late"


def test_two_prompts_between_chunks_that_both_lack_memory_do_not_wait_for_each_other():
    behind = queued("behind", deadline_s=60, missing=3, held=9)
    ahead = queued("ahead", deadline_s=50, missing=3, held=9)
    assert chosen([behind, ahead], free=2) == (["ahead"], ["behind"])
    assert chosen([behind, ahead], [suspended(1, deadline_s=90)], free=2) == 1


def test_memory_that_decode_is_about_to_pull_need_not_be_taken_from_anybody():
    """One between two chunks goes on with it, and those that have time to spare wait for that."""
    long = queued("long", missing=5, held=9)
    patient = queued("patient", deadline_s=60, missing=10)
    assert chosen([patient, long], free=3, memory=Memory(9)) == (["patient"], ["long"]), (
        "nothing will get free"
    )
    assert chosen([patient, long], free=3, memory=Memory(9 + 2)) is None
    assert chosen([patient, long, queued("small", missing=2)], free=3, memory=Memory(9 + 2)) == starts(
        "small"
    )
    assert (
        chosen([patient, long], [suspended(1, blocked=True, held=4)], free=3, memory=Memory(9 + 4 + 2)) == 1
    )


def test_who_has_started_goes_on_while_the_model_runner_has_no_place_for_others():
    """With memory for all. One that cannot wait takes the place of one that weighs no more."""
    long = queued("long", deadline_s=70, held=9)
    dear = queued("dear", deadline_s=80, weight=3.0, held=9)
    patient, in_a_hurry = queued("patient", deadline_s=60), queued("in-a-hurry", deadline_s=0.15)

    def chosen_with(places, *queue):
        return chosen(queue, join_tokens=1000, memory=Memory(free_places=places))

    assert chosen_with(0, patient, long, dear) == starts("long", "dear")
    assert chosen_with(1, patient, long, dear) == starts("patient", "long", "dear")
    assert chosen_with(1, patient, queued("other", deadline_s=65), long) == starts("patient")
    assert chosen_with(0, in_a_hurry, long, dear) == (["in-a-hurry"], ["long"])
    assert chosen_with(0, in_a_hurry, dear) == starts("dear")
    stopped = [suspended(1, deadline_s=90, held=9)]
    assert chosen([in_a_hurry], stopped, memory=Memory(free_places=0)) == (["in-a-hurry"], [1])
    assert chosen([patient], stopped, memory=Memory(free_places=0)) == 1


URGENT = queued("urgent", deadline_s=0.15, weight=2.0, missing=10)
HOLDERS = {
    "the least valuable first": ([suspended(1, weight=2, held=9), suspended(2, weight=1, held=9)], [2]),
    "then the latest deadline": (
        [suspended(1, held=9, deadline_s=50), suspended(2, held=9, deadline_s=60)],
        [2],
    ),
    "then the most work left": ([suspended(1, 500, held=9), suspended(2, 900, held=9)], [2]),
    "no more than needed": ([suspended(1, weight=2, held=20), suspended(2, weight=1, held=20)], [2]),
    "as many as needed": ([suspended(1, held=5), suspended(2, held=5)], [1, 2]),
    "never what is worth more": ([suspended(1, weight=3, held=20), suspended(2, held=9)], [2]),
    "also of the blocked": ([suspended(1, held=9, blocked=True)], [1]),
}


@pytest.mark.parametrize(("stopped", "tardy"), HOLDERS.values(), ids=HOLDERS.keys())
def test_memory_is_taken_from(stopped, tardy):
    names, dropped = chosen([URGENT], stopped, free=1)
    assert names == ["urgent"]
    assert sorted(dropped) == tardy


def test_memory_is_taken_from_a_prompt_between_two_chunks():
    chunked = queued("chunked", weight=1.0, missing=5, held=9)
    assert chosen([URGENT, chunked], free=1) == (["urgent"], ["chunked"])


def test_one_of_a_class_that_starves_keeps_its_memory_for_what_it_has_come_to_be_worth():
    """It has led for a chunk, and its class may not lead again for a while: it would start over each time."""
    old = chunked("old", -40.0)
    dear = queued("dear", deadline_s=0.15, weight=4.0, missing=10)
    has_led = having_led(BACKGROUND)
    assert chosen([URGENT, old], free=4, fairness=has_led) is None
    assert chosen([dear, old], free=4, fairness=has_led) == (["dear"], ["old"])
    assert chosen([URGENT, chunked("new", 0.0)], free=4, fairness=has_led) == (["urgent"], ["new"])
    has_led.step_ended({BACKGROUND: 1}, 100.0, 0.0)
    assert chosen([URGENT, old], free=4, fairness=has_led) == (["urgent"], ["old"]), "its class has its share"


def test_of_two_holders_the_one_that_has_come_to_be_worth_more_goes_on():
    """Else neither could take the other's memory, and both would wait."""
    old = chunked("old", -40.0)
    dear = queued("dear", deadline_s=60, weight=2.0, missing=5, held=9)
    assert chosen([old, dear], free=4, fairness=having_led(BACKGROUND)) == (["old"], ["dear"])
    assert chosen([old, dear], free=4) == (["dear"], ["old"])


def test_nobody_takes_the_memory_of_an_equal_that_would_run_before_it():
    ahead = queued("ahead", deadline_s=5, missing=9, held=4)
    assert chosen([ahead, queued("behind", deadline_s=60, missing=3)], free=1) is None
    dearer = queued("behind", deadline_s=60, missing=3, weight=2.0)
    assert chosen([ahead, dearer], free=1) == (["behind"], ["ahead"])
    behind = queued("behind", deadline_s=60, missing=3, held=9)
    assert chosen([ahead, behind], free=1) == (["ahead"], ["behind"])


def test_nothing_is_given_up_in_vain():
    """The work of all that may be given up would not be enough."""
    stopped = [suspended(1, weight=3, held=20), suspended(2, held=8)]
    assert chosen([URGENT], stopped, free=1) == 1


def test_what_somebody_else_holds_too_does_not_get_free():
    def freed(holders):
        return [one.held_blocks - 6 for one in holders]

    stopped, memory = [suspended(1, held=10), suspended(2, held=11)], Memory(freed_blocks=freed)
    assert chosen([URGENT], stopped, free=1, memory=memory) == (["urgent"], [1, 2])
    assert chosen([URGENT], stopped, free=0, memory=memory) == 1, "nothing is given up in vain"


def test_of_two_that_lose_their_memory_again_and_again_one_takes_it_from_the_other():
    """Whatever they are worth; from all others, and for all others, as ever."""
    heavy = Queued(Prefill(JobId("heavy"), 4.0, 2.0, 1.0, 0.0), 100, 0.0, 5, 9, "heavy", True)
    light = Queued(
        Prefill(JobId("light"), 1.0, 2.0, 1.5, 0.0, tier=BACKGROUND), 100, 0.0, 5, 9, "light", True
    )

    def given(first, other, *lost_often):
        return chosen([first, other], free=0, memory=Memory(lost_often=lost_often))

    assert given(heavy, light) == (["heavy"], ["light"])
    assert given(heavy, light, "light") == (["heavy"], ["light"])
    assert given(heavy, light, "heavy", "light") == (["heavy"], ["light"])
    assert given(heavy, light, "light", "heavy") == (["light"], ["heavy"])
