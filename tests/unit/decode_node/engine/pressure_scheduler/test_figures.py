"""What the engine tells of its pressure with its statistics."""

import msgspec
import pytest
from pressure_steps import LOW, MIDDLE, TOP, expects
from real_schedulers import BLOCK

from kv_transfer.connector import NixlConnector
from telemetry.pressure import PRESSURE_KEY, PressureFigures

pytestmark = pytest.mark.slow


def told(engine):
    """What travels with the statistics of the next step; None for nothing."""
    engine.scheduler.connector = NixlConnector  # of which the statistics need the class alone
    try:
        stats = engine.scheduler.make_stats().kv_connector_stats
    finally:
        engine.scheduler.connector = None
    if stats is None:
        return None
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(stats))
    assert NixlConnector.build_kv_connector_stats(sent).is_empty()
    return msgspec.convert(sent[PRESSURE_KEY], PressureFigures)


def test_what_it_does_and_what_it_holds_is_told_once(stepped):
    engine = stepped(24)
    expects(engine, 1)
    for name in ("a", "b", "c"):
        engine.add(name, 100, 100, tier=LOW)
    while not engine.preempted:
        engine.step()
    figures = told(engine)
    assert figures.preempted == [(LOW, "cost", "recompute")] * len(engine.preempted)
    load = figures.load
    assert load.pool_tokens == 24 * BLOCK
    assert set(load.streams) == {"a", "b", "c"}, "also those that wait for memory"
    assert all(holding.tokens >= 100 for holding in load.streams.values())
    assert set(load.answers) == {LOW, MIDDLE, TOP}
    assert figures.peak > 0
    assert told(engine) is None, "events are told once, the rest every half second"
    engine.finish()
    figures = told(engine)
    assert len(figures.restored) == len(engine.preempted)
    assert figures.load.streams == {}, "an engine at rest holds nothing for anybody"
