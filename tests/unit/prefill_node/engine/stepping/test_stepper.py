"""Events in, commands and views out: one engine's steps, without an engine."""

import math

import msgspec
import pytest

from prefill_node.board.messages import Queued
from prefill_node.engine.stepping.memory import Memory
from prefill_node.engine.stepping.step_choice import (
    ChoiceRules,
    Resume,
    Start,
    Wait,
)
from prefill_node.engine.stepping.stepper import Member, StartOver, Stepper
from prefill_node.engine.stepping.suspension import Suspended, SuspendedStep
from slo.predict.prefill_time import PrefillPredictor
from slo.preemption.types import Limits
from slo.queue.arrival_forecast import Forecast
from slo.queue.class_targets import ClassTargets
from slo.queue.fairness import TARDY_PART, Boost, Fairness
from slo.queue.order import QueueOrder
from slo.queue.prefill import Prefill
from slo.request import JobId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD

LINE = PrefillPredictor(per_token_s=0.001, fixed_s=0.0)
PLENTY = 1000


@pytest.fixture
def stepper():
    rules = ChoiceRules(QueueOrder.SEDF, LINE, 1, Forecast(), Fairness(DEFAULT_TIERS))
    return Stepper(rules, Limits(max_suspended_s=10.0, max_suspended_steps=2, max_suspended_bytes=1000), 0.05)


def prefill(name, due_s=5.0, tier=PREMIUM, work_s=0.1):
    return Prefill(JobId(name), 1.0, due_s, work_s, 0.0, tier=tier)


def queued(name, **about):
    return Queued(prefill(name, **about), 100, 0.0, 1, request=f"engine-{name}")


def member(name, tokens=100, tier=PREMIUM):
    return Member(f"engine-{name}", prefill(name, tier=tier, work_s=0.0), tokens, 5.0, 0)


def suspended(step, due_s=5.0):
    return Suspended(step, prefill(f"of-{step.step_id}", due_s), 1)


def preempt(stepper, name, at_s, beneficiary="", kept_bytes=10, still_here=True):
    members = {f"engine-{name}": 100} if still_here else {}
    stepper.step_ended(at_s)
    step = SuspendedStep(stepper.step_id, members, 5.0, 3, 0.25, kept_bytes, at_s, beneficiary)
    stepper.step_preempted(step, at_s)
    return step


def test_a_step_that_runs_is_published_without_its_members_in_the_queue(stepper):
    queue = [queued("late", due_s=9.0), queued("soon"), queued("later", due_s=99.0)]
    command = stepper.next_step(queue, [], PLENTY, 0.0)
    assert command == Start(("engine-soon",))
    view = stepper.step_issued(command, [member("soon")], 0.0)
    assert (view.step_id, view.jobs, view.tokens, view.pairs) == (1, ("soon",), 100, 5.0)
    published = stepper.view([])
    assert published.step is view
    assert [item.prefill.job_id for item in published.queue] == ["late", "later"], "in their order"


def test_a_step_is_stopped_and_goes_on_where_it_was(stepper):
    command = stepper.next_step([queued("a")], [], PLENTY, 0.0)
    stepper.step_issued(command, [member("a")], 0.0)
    step = preempt(stepper, "a", 0.5)
    command = stepper.next_step([], [suspended(step)], PLENTY, 1.0)
    assert command == Resume(step)
    view = stepper.step_issued(command, [member("a")], 1.0)
    assert (view.step_id, view.from_boundary) == (2, 3)
    assert stepper.suspensions.steps == []
    assert stepper.suspensions.accounts["engine-a"].suspended_s == pytest.approx(0.5)


def test_that_nobody_finds_memory_is_told_while_the_step_that_stopped_goes_on(stepper):
    stepper.step_issued(stepper.next_step([queued("long")], [], PLENTY, 0.0), [member("long")], 0.0)
    step = preempt(stepper, "long", 0.5, "urgent")
    wants = Queued(prefill("urgent", 1.0), 100, 0.0, 9, request="engine-urgent")
    small = Queued(prefill("small", 9.0), 100, 0.0, 3, request="engine-small")
    held = Suspended(step, Prefill(JobId("long"), 4.0, math.inf, 0.7, 0.0, 1), 8, blocked=True)
    command = stepper.next_step([wants], [held], 2, 0.5)
    assert command == Resume(step, none_can_start=True)
    stepper.step_issued(command, [member("long")], 0.5)
    told = stepper.view(())
    assert told.none_can_start
    assert [item.prefill.job_id for item in told.queue] == ["urgent"]
    stepper.step_ended(0.6)
    stepper.step_issued(stepper.next_step([wants, small], [], 5, 0.6), [member("small")], 0.6)
    told = stepper.view(())
    assert not told.none_can_start, "another step runs"
    assert told.passed == {"urgent": math.inf}, "nobody can lose memory for it"


def test_who_has_time_to_wait_for_memory_waits_for_that_long(stepper):
    """It lets others run until what it waits for would be too late, and takes memory then."""
    holds = Queued(prefill("holds", 90.0, BACKGROUND, work_s=2.0), 100, 0.0, 1, 8, "engine-holds", True)
    waits = Queued(prefill("waits", 4.0, work_s=0.5), 100, 0.0, 9, request="engine-waits")
    small = Queued(prefill("small", 5.0), 100, 0.0, 3, request="engine-small")
    assert stepper.next_step([holds, waits, small], [], 5, 1.0).requests == ("engine-small",)
    assert stepper.view(()).passed == {"waits": 1.5}, "0.5 s of work, and 2 until the other has ended"
    assert stepper.next_step([holds, waits], [], 5, 1.0).requests == ("engine-holds",)
    assert stepper.view(()).passed == {"waits": math.inf}, "this is what it waits for"
    assert stepper.next_step([holds, waits, small], [], 5, 2.6).drop_requests == ("engine-holds",)
    assert not stepper.view(()).passed


def test_who_has_time_does_not_let_others_run_until_one_ends_that_cannot_go_on(stepper):
    """What it waits for needs a pull first, and another runs for long."""
    awaited = Queued(prefill("awaited", 4.5, BACKGROUND, work_s=0.2), 100, 0.0, 8, 9, "engine-awaited", True)
    waits = Queued(prefill("waits", 3.0, work_s=0.5), 100, 0.0, 9, request="engine-waits")
    other = Queued(prefill("other", 9.0, work_s=4.0), 100, 0.0, 3, request="engine-other")
    command = stepper.next_step([awaited, waits, other], [], 5, 0.0, memory=Memory(used_blocks=20))
    assert command.requests == ("engine-other",)
    assert stepper.view(()).passed == {"waits": 2.3, "awaited": 2.15}, "half of its time, for the pull"


def test_what_others_would_free_is_not_asked_for_one_that_has_time(stepper):
    holds = Queued(prefill("holds", 90.0, BACKGROUND, work_s=2.0), 100, 0.0, 1, 8, "engine-holds", True)
    waits = Queued(prefill("waits", 4.0, work_s=0.5), 100, 0.0, 9, request="engine-waits")
    memory = Memory(freed_blocks=lambda _: pytest.fail("it is asked"))
    assert stepper.next_step([holds, waits], [], 5, 1.0, memory=memory).requests == ("engine-holds",)


def test_a_prompt_that_has_started_goes_on_while_nobody_may_start_before_one_that_starves(stepper):
    stepper.step_issued(stepper.next_step([queued("long")], [], PLENTY, 60.0), [member("long")], 60.0)
    stepper.step_ended(70.0)
    starves = Queued(prefill("starves", math.inf, BACKGROUND), 100, 0.0, 1000, request="engine-starves")
    started = Queued(prefill("started", 90.0), 100, 0.0, 200, 500, "engine-started", True)
    fits = Queued(prefill("fits", 95.0), 100, 0.0, 1, request="engine-fits")
    command = stepper.next_step([starves, started, fits], [], 300, 70.0)
    assert command.requests == ("engine-started",)
    stepper.step_issued(command, [member("started")], 70.0)
    assert stepper.view(()).none_can_start


def test_memory_is_kept_for_one_that_starves_for_its_share_of_the_time_alone(stepper):
    """What decode does not pull, it does not get; the others need not wait for that."""
    stepper.step_issued(stepper.next_step([queued("long")], [], PLENTY, 60.0), [member("long")], 60.0)
    stepper.step_ended(70.0)
    starves = Queued(prefill("starves", math.inf, BACKGROUND), 100, 0.0, 1000, request="engine-starves")
    fits = Queued(prefill("fits", 95.0), 100, 0.0, 1, request="engine-fits")

    def next_step(now_s, free_blocks):
        return stepper.next_step([starves, fits], [], free_blocks, now_s, memory=Memory(used_blocks=900))

    assert next_step(70.0, 300) == Wait(starves=BACKGROUND)
    assert next_step(74.0, 400) == Wait(starves=BACKGROUND), "decode pulls"
    assert next_step(78.9, 400) == Wait(starves=BACKGROUND)
    assert next_step(79.0, 400).requests == ("engine-fits",), "it has pulled nothing for 5 s"
    assert stepper.view(()).passed == {"starves": math.inf}
    assert next_step(138.9, 500).requests == ("engine-fits",), "9 s for background's share, 0.15"
    assert next_step(139.0, 300) == Wait(starves=BACKGROUND)
    assert next_step(140.0, 1000).requests == ("engine-starves",)
    assert next_step(141.0, 300) == Wait(starves=BACKGROUND), "as if none had starved before"


def test_a_started_prompt_that_nobody_stops_any_more_loses_its_memory_to_nobody_but_who_starves(stepper):
    stepper.step_issued(stepper.next_step([queued("long")], [], PLENTY, 0.0), [member("long")], 0.0)
    stepper.step_ended(50.0)
    waited = Queued(prefill("waited", math.inf, BACKGROUND), 100, 0.0, 200, 500, "engine-waited", True)

    def taken(at_s):
        soon = Prefill(JobId("soon"), 4.0, at_s + 0.15, 0.1, at_s, tier=PREMIUM)
        needs = Queued(soon, 100, 0.0, 400, 0, "engine-soon")
        command = stepper.next_step([waited, needs], [], 300, at_s, memory=Memory(used_blocks=500))
        return command.drop_requests

    assert taken(59.9) == ("engine-waited",), "it has waited for less than twice the time"
    assert taken(60.1) == ()


def test_however_many_find_no_memory_the_most_urgent_is_among_them(stepper):
    stepper.step_issued(stepper.next_step([queued("long")], [], PLENTY, 0.0), [member("long")], 0.0)
    step = preempt(stepper, "long", 0.5, "last")
    held = Suspended(step, Prefill(JobId("long"), 4.0, math.inf, 0.7, 0.0, 1), 8, blocked=True)
    names = [*(f"job-{n}" for n in range(199)), "last"]
    waiting = [
        Queued(prefill(name, 1.0 if name == "last" else 90.0), 100, 0.0, 99, request=f"engine-{name}")
        for name in names
    ]
    command = stepper.next_step(waiting, [held], 2, 0.5)
    assert command.step is step
    stepper.step_issued(command, [member("long")], 0.5)
    told = stepper.view(())
    assert told.none_can_start
    assert sorted(item.prefill.job_id for item in told.queue) == sorted(names)
    assert told.queue[0].prefill.job_id == "last"


def test_who_would_fit_but_waits_for_one_that_starves_is_not_stopped_for_again(stepper):
    """Nothing starts before the head of its class, for which even everybody's memory is not enough."""
    stepper.step_issued(stepper.next_step([queued("long")], [], PLENTY, 60.0), [member("long")], 60.0)
    step = preempt(stepper, "long", 70.0, "fits")
    starves = Queued(prefill("starves", math.inf, BACKGROUND), 100, 0.0, 99, request="engine-starves")
    fits = Queued(prefill("fits", 70.5), 100, 0.0, 1, request="engine-fits")
    held = Suspended(step, Prefill(JobId("long"), 4.0, math.inf, 0.7, 60.0, 1), 8, blocked=True)
    command = stepper.next_step([fits, starves], [held], 2, 70.0)
    assert command.step is step
    stepper.step_issued(command, [member("long")], 70.0)
    told = stepper.view(())
    assert told.none_can_start
    assert {item.prefill.job_id for item in told.queue} == {"fits", "starves"}


def test_a_step_that_nobody_waits_for_any_more_leaves_a_checkpoint_to_be_discarded(stepper):
    stepper.step_issued(stepper.next_step([queued("a")], [], PLENTY, 0.0), [member("a")], 0.0)
    preempt(stepper, "a", 0.5, still_here=False)
    assert stepper.suspensions.steps == []
    assert stepper.suspensions.take_discarded() == (1,)


def test_too_many_late_steps_start_over_before_anything_is_chosen(stepper):
    steps = [preempt(stepper, name, 0.5) for name in ("a", "b")]
    late = [suspended(step, due_s=0.4) for step in steps]
    assert stepper.next_step([queued("c")], late, PLENTY, 1.0) == StartOver(("engine-a",))
    stepper.suspensions.forget("engine-a", 1.0)
    assert stepper.next_step([queued("c")], late[1:], PLENTY, 1.0) == Start(("engine-c",))
    over = queued("a", due_s=0.4)
    stepper.started_over(over)
    assert over in stepper.view([]).queue


def test_who_loses_the_memory_of_a_suspended_step_stands_in_the_queue_once(stepper):
    """The step stood in it, under the name of a member."""
    stepper.step_issued(stepper.next_step([queued("a")], [], PLENTY, 0.0), [member("a")], 0.0)
    step = preempt(stepper, "a", 0.5)
    held = Suspended(step, prefill("a", 9.0), 8)
    urgent = Queued(prefill("urgent", 1.0, work_s=0.5), 100, 0.0, 9, request="engine-urgent")
    command = stepper.next_step([urgent, queued("b", due_s=99.0)], [held], 1, 0.5)
    assert command == Start(("engine-urgent",), drop_steps=(step,))
    stepper.suspensions.forget("engine-a", 0.5)
    stepper.started_over(queued("a", due_s=9.0))
    assert [item.prefill.job_id for item in stepper.view([]).queue].count("a") == 1


def test_the_suspension_that_has_ended_counts_for_the_members_of_the_step(stepper):
    stepper.step_issued(stepper.next_step([queued("a")], [], PLENTY, 0.0), [member("a")], 0.0)
    step = preempt(stepper, "a", 0.5)
    view = stepper.step_issued(Resume(step), [member("a")], 4.0)
    assert [each.suspended_s for each in view.members] == [3.5]


def test_who_has_started_goes_on_when_nobody_else_finds_room(stepper):
    """Who looked as if it would fit was refused: it stays in the queue, and nothing is stopped for it."""
    ahead = queued("ahead", due_s=3.0)
    holds = Queued(prefill("holds", 9.0), 100, 0.0, 1, 4, "engine-holds")
    dear = msgspec.structs.replace(holds, prefill=msgspec.structs.replace(holds.prefill, weight=4.0))
    assert stepper.next_step([dear, ahead], [], PLENTY, 0.0) == Start(("engine-ahead",))
    command = stepper.next_step([dear, ahead], [], PLENTY, 0.0, refused=True)
    assert command == Start(("engine-holds",))
    stepper.step_issued(command, [member("holds")], 0.0)
    published = stepper.view([])
    assert [item.prefill.job_id for item in published.queue] == ["ahead"]
    assert published.none_can_start
    stepper.step_ended(0.1)
    assert stepper.next_step([holds, ahead], [], PLENTY, 0.1, refused=True) == Start(
        ("engine-ahead",), drop_requests=("engine-holds",)
    ), "it takes the memory of who weighs no more"
    assert stepper.next_step([ahead], [], PLENTY, 0.1, refused=True) == Wait()


def test_a_step_is_charged_once_to_the_classes_of_its_members(stepper):
    account = stepper.rules.fairness.account
    members = [member("a", 300), member("b", 100, BACKGROUND)]
    stepper.step_issued(Start(("engine-a", "engine-b")), members, 0.0)
    stepper.step_ended(4.0)
    stepper.step_ended(9.0)
    assert account.achieved(BACKGROUND) == pytest.approx(0.25)
    assert stepper.view([]).fairness == account.state()
    assert account.state().deficit(STANDARD) == DEFAULT_TIERS[STANDARD].share - account.achieved(STANDARD)


@pytest.mark.parametrize(
    ("ran_s", "counts_s"), [(0.5, 0.5), (2.4, 2.4), (30.5, 2.5)], ids=["as predicted", "slow", "held up"]
)
def test_a_pass_that_was_held_up_does_not_keep_its_class_from_leading_again(stepper, ran_s, counts_s):
    fairness, began_s = stepper.rules.fairness, 1000.0
    fairness.step_ended({PREMIUM: 1}, 100.0, began_s)
    head = prefill("late", 900.0, BACKGROUND)
    lead = Start(("engine-late",), boost=fairness.boost_of(head, began_s))
    stepper.step_issued(lead, [member("late", 500, BACKGROUND)], began_s)
    stepper.step_ended(began_s + ran_s)
    fairness.step_ended({PREMIUM: 1}, 1e6, began_s + ran_s)
    next_s = began_s + counts_s / (TARDY_PART * DEFAULT_TIERS[BACKGROUND].share)
    assert fairness.boost_of(head, next_s - 0.01) is None
    assert fairness.boost_of(head, next_s + 0.01) is not None


def test_while_nothing_can_be_predicted_a_pass_counts_for_as_long_as_it_takes(stepper):
    stepper.predicts(PrefillPredictor(0.0, 0.0))
    lead = Start(("engine-a",), boost=Boost(BACKGROUND, math.inf))
    stepper.step_issued(lead, [member("a", 500, BACKGROUND)], 0.0)
    stepper.step_ended(3.0)
    assert stepper.view([]).fairness.next_boost_s[BACKGROUND] == 3.0 / DEFAULT_TIERS[BACKGROUND].share


def test_what_loses_its_memory_to_another_was_not_served_to_its_class(stepper):
    """Else a class that computes the same again and again has had its share of the time, and starves."""
    account = stepper.rules.fairness.account
    for at_s in (0.0, 2.0):
        members = [member("long", 300, BACKGROUND), member("other", 100)]
        stepper.step_issued(Start(("engine-long", "engine-other")), members, at_s)
        stepper.step_ended(at_s + 1.0)
    assert account.achieved(BACKGROUND) == pytest.approx(0.75)
    holds = Queued(prefill("long", math.inf, BACKGROUND), 100, 0.0, 9, 4, "engine-long")
    urgent = Queued(prefill("urgent", 4.15), 100, 0.0, 4, request="engine-urgent")
    command = stepper.next_step([holds, urgent], [], 0, 4.0)
    assert command == Start(("engine-urgent",), drop_requests=("engine-long",))
    stepper.started_over(holds)
    assert account.achieved(BACKGROUND) == pytest.approx(0.0, abs=1e-9)
    stepper.step_issued(command, [member("urgent")], 4.0)
    assert stepper.view([]).fairness.deficit(BACKGROUND) == DEFAULT_TIERS[BACKGROUND].share


def test_what_one_of_too_many_late_steps_has_computed_was_not_served_to_its_class(stepper):
    account = stepper.rules.fairness.account
    late = []
    for at_s, (name, tier) in enumerate((("a", BACKGROUND), ("b", PREMIUM))):
        stepper.step_issued(Start((f"engine-{name}",)), [member(name, tier=tier)], at_s)
        late.append(suspended(preempt(stepper, name, at_s + 1.0), due_s=0.4))
    assert account.achieved(BACKGROUND) == pytest.approx(0.5, abs=0.01)
    assert stepper.next_step([queued("c")], late, PLENTY, 2.0) == StartOver(("engine-a",))
    stepper.suspensions.forget("engine-a", 2.0)
    stepper.started_over(queued("a", due_s=0.4, tier=BACKGROUND))
    assert account.achieved(BACKGROUND) == pytest.approx(0.0, abs=1e-9)
    assert stepper.view([]).fairness.deficit(BACKGROUND) == DEFAULT_TIERS[BACKGROUND].share


def test_what_was_served_to_whose_client_has_left_stays_served(stepper):
    stepper.step_issued(Start(("engine-a",)), [member("a", 300, BACKGROUND)], 0.0)
    stepper.job_left("a", "engine-a")
    stepper.step_ended(1.0)
    assert stepper.rules.fairness.account.achieved(BACKGROUND) == 1.0
    assert not stepper._passes


def test_jobs_are_known_until_they_leave_and_remembered_longer(stepper):
    stepper.job_arrived("a", "engine-a", prefill("a"), 0.0)
    assert (stepper.jobs, stepper.has_arrived("a")) == ({"a": "engine-a"}, True)
    assert stepper.rules.forecast.at(0.0).load > 0
    stepper.job_done("a", 1.0)
    stepper.job_left("a", "engine-a")
    assert (stepper.jobs, stepper.has_arrived("a")) == ({}, True)
    assert stepper.view([]).done == ("a",)
    assert stepper.next_step([], [], PLENTY, 0.0) == Wait()


def test_a_job_that_has_come_again_stays_when_its_first_request_leaves():
    """The first was answered, in vain, and its blocks waited to be pulled."""
    targets = ClassTargets({PREMIUM: 0.9})
    stepper = Stepper(ChoiceRules(QueueOrder.FEASIBLE_SET, LINE, 1, targets=targets), Limits())
    for request in ("engine-first", "engine-a"):
        stepper.job_arrived("a", request, prefill("a", due_s=5.0), 0.0)
    stepper.next_step([queued("a")], [], PLENTY, 0.0)
    stepper.job_left("a", "engine-first")
    assert stepper.jobs == {"a": "engine-a"}
    assert [item.request for item in stepper.view([]).queue] == ["engine-a"]
    stepper.job_done("a", 4.0)
    assert stepper.view([]).targets.counts[PREMIUM].ended == pytest.approx(1.0, abs=0.05)
    stepper.job_left("a", "engine-a")
    assert not stepper.jobs


def test_all_that_the_last_two_steps_completed_are_told(stepper):
    """Their answers may not have been handled yet."""
    many, more = [f"a-{n}" for n in range(300)], [f"b-{n}" for n in range(200)]
    for names in (many, more):
        short(stepper, names[0], 0.0)
        stepper.step_ended(0.01)
        for name in names:
            stepper.job_done(name, 0.01)
    assert stepper.view([]).done == (*many, *more)
    for _ in range(2):
        short(stepper, "c", 0.02)
        stepper.step_ended(0.03)
    stepper.job_done("c", 0.03)
    assert stepper.view([]).done == (*more[-127:], "c"), "not for ever"


# Steps that are issued ahead


def short(stepper, name, at_s, tokens=10):
    """A step of a predicted hundredth of a second is issued."""
    return stepper.step_issued(Start((f"engine-{name}",)), [member(name, tokens)], at_s)


def test_of_two_issued_steps_the_first_runs_and_the_second_begins_when_it_ends(stepper):
    first = short(stepper, "a", 0.0)
    short(stepper, "b", 0.001)
    stepper.next_step([], [], PLENTY, 0.002)
    assert stepper.running is first
    stepper.step_ended(0.01)
    assert (stepper.running.jobs, stepper.running.started_s) == (("b",), 0.01)
    stepper.step_ended(0.03)
    assert stepper.running is None
    assert stepper.rules.fairness.account.achieved(PREMIUM) == pytest.approx(1.0)


def test_nothing_is_issued_behind_two_or_behind_a_long_one(stepper):
    queue = [queued("c")]
    short(stepper, "a", 0.0)
    assert stepper.next_step(queue, [], PLENTY, 0.0) == Start(("engine-c",))
    short(stepper, "b", 0.0)
    assert stepper.next_step(queue, [], PLENTY, 0.0) == Wait()
    stepper.step_ended(0.01)
    stepper.step_ended(0.02)
    short(stepper, "long", 0.02, tokens=51)
    assert stepper.next_step(queue, [], PLENTY, 0.02) == Wait()


def test_who_is_in_an_issued_step_does_not_wait(stepper):
    stepper.next_step([queued("a"), queued("b"), queued("c")], [], PLENTY, 0.0)
    short(stepper, "a", 0.0)
    short(stepper, "b", 0.0)
    assert [item.prefill.job_id for item in stepper.view([]).queue] == ["c"]


# What classes aim at


def test_what_each_class_has_missed_is_counted_and_published():
    targets = ClassTargets({PREMIUM: 0.9, STANDARD: 0.9})
    stepper = Stepper(ChoiceRules(QueueOrder.FEASIBLE_SET, LINE, 1, targets=targets), Limits())
    for name, tier in (("a", PREMIUM), ("b", STANDARD), ("gone", STANDARD)):
        stepper.job_arrived(name, f"engine-{name}", prefill(name, due_s=5.0, tier=tier), 0.0)
    stepper.job_done("a", 4.0)
    stepper.job_left("gone", "engine-gone")
    stepper.job_done("b", 6.0)
    stepper.job_done("b", 7.0)
    counts = stepper.view([]).targets.counts
    assert (counts[PREMIUM].ended, counts[PREMIUM].missed) == pytest.approx((1.0, 0.0), abs=0.05)
    assert (counts[STANDARD].ended, counts[STANDARD].missed) == pytest.approx((1.0, 1.0), abs=0.05)
    assert counts[STANDARD].arrived == pytest.approx(2.0, abs=0.1)


def test_without_targets_nothing_is_published_of_them(stepper):
    stepper.job_arrived("a", "engine-a", prefill("a"), 0.0)
    stepper.job_done("a", 9.0)
    assert stepper.view([]).targets is None


def test_a_chunk_that_begins_may_be_stopped_again_however_often_and_long_the_last_one_was(stepper):
    def begins(behind):
        prefill_s = prefill("a", work_s=0.0)
        account = stepper.suspensions.accounts.get("engine-a")
        if account is not None:  # as the queue makes it
            prefill_s = msgspec.structs.replace(
                prefill_s,
                preemptions=account.preemptions,
                preemptions_before=account.preemptions_before,
                suspended_s=account.suspended_s,
            )
        view = stepper.step_issued(
            Start(("engine-a",)), [Member("engine-a", prefill_s, 100, 5.0, behind)], at_s[0]
        )
        (running,) = view.members
        return running.preemptions, running.preemptions_before, running.suspended_s

    at_s = [0.0]
    counted = []
    for behind in (300, 200, 100):
        counted.append(begins(behind))
        for _ in range(2):
            at_s[0] += 1.0
            stopped = preempt(stepper, "a", at_s[0])
            at_s[0] += 3.0
            stepper.step_issued(Resume(stopped), [member("a")], at_s[0])
        at_s[0] += 1.0
        stepper.step_ended(at_s[0])
    assert counted == [(0, 0, 0.0), (2, 2, 0.0), (4, 4, 0.0)]
