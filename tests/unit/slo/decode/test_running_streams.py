"""Streams in arrays go on as the same streams in a list do."""

import random

from hypothesis import given
from hypothesis import strategies as st

from slo.decode.headroom import DecodeLoad
from slo.decode.outlook import FAR_S, Outlook
from slo.decode.predicted_peak import Holding, predicted_peak
from slo.decode.running_streams import RunningStreams
from slo.request import JobId

STREAM = st.builds(Holding, st.integers(0, 300), st.integers(0, 60))


@given(st.lists(STREAM, min_size=1, max_size=12), STREAM)
def test_they_are_what_lists_would_be(streams, newcomer):
    running, left = RunningStreams.of(streams), list(streams)
    while left:
        assert len(running) == len(left)
        assert running.peak_with(newcomer) == predicted_peak([*left, newcomer])
        ends = max(1, min(one.remaining for one in left))
        left = [Holding(one.tokens + ends, one.remaining - ends) for one in left if one.remaining > ends]
        steps, running = running.after(1)
        assert steps == ends
    assert len(running) == 0


@given(st.lists(STREAM, min_size=1, max_size=12), STREAM)
def test_one_that_joins_is_one_of_them(streams, newcomer):
    joined = RunningStreams.of(streams).joined_by([newcomer])
    together = RunningStreams.of([*streams, newcomer])
    assert joined.peak_with(newcomer) == together.peak_with(newcomer)
    (steps, joined), (all_steps, together) = joined.after(3), together.after(3)
    assert (steps, len(joined)) == (all_steps, len(together))
    assert joined.peak_with(newcomer) == together.peak_with(newcomer)


@given(st.lists(STREAM, max_size=12), st.lists(STREAM, min_size=1, max_size=6), st.integers(0, 3000))
def test_as_many_fit_as_would_one_after_the_other(streams, waiting, limit):
    fit = 0
    while fit < len(waiting) and predicted_peak([*streams, *waiting[: fit + 1]]) <= limit:
        fit += 1
    assert RunningStreams.of(streams).fitting(waiting, limit) == fit


def test_a_wait_among_a_thousand_takes_few_looks(monkeypatch):
    looks, rng = [], random.Random(1)
    for name in ("peak_with", "fitting"):
        look = getattr(RunningStreams, name)
        monkeypatch.setattr(RunningStreams, name, lambda *args, look=look: looks.append(1) or look(*args))
    streams = {JobId(str(n)): Holding(1000, rng.randrange(1, 2000)) for n in range(1000)}
    streams |= {JobId(f"waits {n}"): Holding(1000, 500, waits=True) for n in range(50)}
    load = DecodeLoad(1_000_000, 0, 0, 0.02, streams)
    wait_s = Outlook(load, 0, []).wait_s(Holding(1000, 500), is_top=False)
    assert 0.0 < wait_s <= FAR_S
    assert len(looks) < 200
