"""KV transfers share a link first come, first served."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.fleet.link import Ingest
from simulator.replica.loop import EventLoop
from slo.predict.handoff import INSTANT_LINK, Link


def sent(link, transfers):
    """When each of (time, bytes) has arrived."""
    loop = EventLoop()
    ingest = Ingest(loop, link)
    arrived = {}
    for number, (at_s, size) in enumerate(transfers):
        loop.call_at(at_s, lambda n=number, s=size: ingest.send(s, lambda: arrived.update({n: loop.now_s})))
    loop.run()
    return [arrived[number] for number in range(len(transfers))], ingest


def test_a_transfer_takes_its_bytes_and_the_latency():
    arrived, ingest = sent(Link(100.0, 0.5), [(1.0, 200)])
    assert arrived == [3.5]
    assert ingest.busy_s == 2.0


def test_the_second_waits_for_the_first_but_not_for_its_latency():
    arrived, _ = sent(Link(100.0, 0.5), [(0.0, 200), (0.5, 100)])
    assert arrived == [2.5, 3.5]


def test_an_instant_link_takes_no_time():
    assert sent(INSTANT_LINK, [(1.0, 1 << 40), (1.0, 5)])[0] == [1.0, 1.0]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 500)), min_size=1, max_size=12))
def test_arrivals_are_in_order_and_the_link_is_never_faster_than_it_is(transfers):
    transfers.sort(key=lambda pair: pair[0])
    arrived, ingest = sent(Link(100.0, 0.25), transfers)
    free_s = 0.0
    for (at_s, size), there_s in zip(transfers, arrived, strict=True):
        free_s = max(free_s, at_s) + size / 100
        assert there_s == pytest.approx(free_s + 0.25)
    assert ingest.busy_s == pytest.approx(sum(size for _, size in transfers) / 100)


def test_a_cancelled_transfer_makes_way():
    loop = EventLoop()
    ingest = Ingest(loop, Link(100.0, 0.0))
    arrived = []
    first = ingest.send(1000, lambda: arrived.append("first"))
    second = ingest.send(1000, lambda: arrived.append("second"))
    ingest.send(100, lambda: arrived.append(loop.now_s))
    loop.call_at(1.0, ingest.cancel, second)
    loop.call_at(2.0, ingest.cancel, first)
    loop.run()
    assert arrived == [3.0]
