"""A replica's view counts what comes and goes as one that is told of everything at once."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.prefill_replica import PlacedJob, PrefillView
from slo.predict.prefill_time import PrefillPredictor
from slo.request import JobId, ReplicaId
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM

LINE = PrefillPredictor(per_token_s=0.001, fixed_s=0.01)


def view(*jobs, running=None):
    known = PrefillView(ReplicaId("replica"), LINE, 0.0, DEFAULT_TIERS.weights)
    known.replace(jobs, running, 0.0)
    return known


def job(number, tokens, deadline_s, work_s=None):
    tier = BACKGROUND if deadline_s == math.inf else PREMIUM
    return PlacedJob(JobId(f"job-{number}"), tier, tokens, deadline_s, 0.0, work_s=work_s)


CHANGES = st.lists(
    st.tuples(
        st.booleans(),
        st.builds(
            job,
            st.integers(0, 5),
            st.integers(1, 2000),
            st.one_of(st.just(math.inf), st.floats(0.1, 9.0)),
            st.one_of(st.none(), st.floats(0.0, 5.0)),
        ),
    ),
    max_size=30,
)


@given(CHANGES, st.booleans())
def test_changes_are_counted_as_a_report_of_the_same_work(changes, runs):
    running = JobId("job-0") if runs else None
    changed = view(job(0, 100, math.inf), job(1, 200, 5.0), running=running)
    for comes, one in changes:
        changed.outstanding(0.0)
        if one.job_id == changed.running:
            changed.remove(one.job_id)
        elif comes:
            changed.add(one)
        else:
            changed.remove(one.job_id)
        told = view(*changed.jobs.values(), running=changed.running)
        ours, theirs = changed.outstanding(0.0), told.outstanding(0.0)
        assert list(ours.waiting) == list(theirs.waiting)
        assert (ours.runner, ours.free_at_s) == (theirs.runner, theirs.free_at_s)
        assert ours.undue_s == pytest.approx(theirs.undue_s, abs=1e-9)
        assert changed.backlog_s(0.0) == pytest.approx(told.backlog_s(0.0), abs=1e-9)
        assert changed.outstanding_tokens == told.outstanding_tokens


def test_of_work_without_a_deadline_only_the_sum_is_looked_at():
    known = view(*[job(number, 1000, math.inf, 1.0) for number in range(4000)])
    work = known.outstanding(0.0)
    assert list(work.waiting) == []
    assert work.undue_s == pytest.approx(4000)
    known.add(job("urgent", 100, 5.0))
    assert [one.job_id for one in known.outstanding(0.0).waiting] == ["job-urgent"]
    assert known.backlog_s(0.0) == pytest.approx(4000.11)
