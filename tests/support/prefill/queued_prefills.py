"""Prefills that wait, and the most that can be on time of them, found by trying every choice."""

import itertools
import math

from hypothesis import strategies as st

from slo.queue.prefill import Prefill
from slo.request import JobId

NEVER = math.inf
DUE = st.integers(-5, 60).map(float)
DUE_OR_NOT = st.one_of(st.just(NEVER), DUE)


def job(name, due_s=NEVER, work_s=1.0, weight=1.0, arrived_s=0.0, **history):
    return Prefill(JobId(name), weight, due_s, work_s, arrived_s, **history)


def names(prefills):
    return [prefill.job_id for prefill in prefills]


def queues(weights=(1.0, 2.0, 4.0), due=DUE_OR_NOT, stopped=(0,)):
    """Up to seven of these weights and deadlines, stopped so many times."""
    prefills = st.builds(
        Prefill,
        st.uuids().map(str).map(JobId),
        st.sampled_from(weights),
        due,
        st.integers(1, 20).map(float),
        st.integers(0, 9).map(float),
        preemptions=st.sampled_from(stopped),
    )
    return st.lists(prefills, max_size=7)


def on_time(prefills, start_s=0.0):
    """Those that end by their deadline when run in the given order."""
    ends = itertools.accumulate((prefill.remaining_s for prefill in prefills), initial=start_s)
    return [
        prefill
        for prefill, end_s in zip(prefills, itertools.islice(ends, 1, None), strict=True)
        if end_s <= prefill.deadline_s + 1e-9
    ]


def is_feasible(prefills, start_s=0.0):
    """Whether all end by their deadline when run in the given order."""
    return len(on_time(prefills, start_s)) == len(prefills)


def weight(prefills):
    return sum(prefill.weight for prefill in prefills)


def best_weight(prefills, start_s=0.0):
    """The largest weight on time, by trying every set in order of deadlines."""
    by_deadline = sorted(prefills, key=lambda prefill: prefill.deadline_s)
    sets = itertools.chain.from_iterable(
        itertools.combinations(by_deadline, size) for size in range(len(by_deadline) + 1)
    )
    return max(weight(chosen) for chosen in sets if is_feasible(chosen, start_s))
