"""What a replica remembers of its jobs, as it is asked for it."""

import pytest

from prefill_node.replica.governing.ledger import Accepted
from prefill_node.replica.job_history import MOST_ENDED, JobHistory, JobState
from slo.queue.slack import NO_DEADLINE
from slo.request import JobId
from slo.tiers import BACKGROUND, PREMIUM


def accepted(name, at_s, tier=BACKGROUND, deadline_s=NO_DEADLINE):
    return Accepted(JobId(name), tier, 1000, deadline_s, at_s)


def states(job):
    return [(stretch.state, stretch.start_s, stretch.end_s) for stretch in job.stretches]


def test_a_job_that_made_way_is_told_without_gaps_in_seconds_before_now():
    history = JobHistory()
    history.arrived(accepted("long", 100.0))
    history.started("long", 101.0)
    history.arrived(accepted("urgent", 102.5, PREMIUM, 104.0))
    history.stopped("long", 103.0, "urgent", "rescue", 4096)
    history.started("urgent", 103.0)
    history.ended("urgent", 103.5)
    history.started("long", 103.5)
    long, urgent = history.recent(60.0, now_s=105.0).jobs

    assert states(long) == [
        (JobState.WAITING, -5.0, -4.0),
        (JobState.RUNNING, -4.0, -2.0),
        (JobState.SUSPENDED, -2.0, -1.5),
        (JobState.RUNNING, -1.5, 0.0),
    ]
    suspension = long.stretches[2]
    assert (suspension.preempted_by, suspension.reason) == ("urgent", "rescue")
    assert suspension.checkpoint_bytes == 4096
    assert (long.due_s, long.ended_s) == (None, 0.0)
    assert (urgent.due_s, urgent.ended_s) == (-1.0, -1.5)


def test_jobs_that_ended_before_are_left_out():
    history = JobHistory()
    for name, end_s in (("before", 10.0), ("within", 50.0)):
        history.arrived(accepted(name, 1.0))
        history.ended(name, end_s)
    history.arrived(accepted("present", 2.0))
    past = history.recent(60.0, now_s=100.0)
    assert [job.job_id for job in past.jobs] == ["within", "present"]
    assert past.since_s == -60.0


def test_it_says_from_when_on_it_remembers_all():
    history = JobHistory()
    for number in range(MOST_ENDED + 2):
        history.arrived(accepted(f"job-{number}", float(number)))
        history.ended(f"job-{number}", number + 0.5)
    now_s = MOST_ENDED + 2.0
    past = history.recent(1e6, now_s)
    assert past.since_s == pytest.approx(1.5 - now_s)
    assert [past.jobs[0].job_id, len(past.jobs)] == ["job-2", MOST_ENDED]


def test_what_is_said_of_a_job_that_is_gone_changes_nothing():
    history = JobHistory()
    history.started("nobody", 1.0)
    history.stopped("nobody", 2.0, "", "", 0)
    history.ended("nobody", 3.0)
    assert history.recent(60.0, now_s=4.0).jobs == ()
