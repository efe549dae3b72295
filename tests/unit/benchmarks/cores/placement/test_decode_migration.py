"""Decode replicas between which streams move: nobody is lost, and no memory is."""

from dataclasses import replace

import pytest

from benchmarks.cores.placement.decode_migration import MOVES, REPLICAS, Fleet
from benchmarks.cores.pool_pressure import arrivals, on_a100


@pytest.mark.parametrize("placement", ["router", "by replica"])
@pytest.mark.parametrize("moves", MOVES)
def test_everybody_is_served_once_and_all_memory_is_free_then(moves, placement):
    asked = [replace(one, name=f"{number % 2}-{one.name}") for number, one in enumerate(arrivals(1)[:160])]
    fleet = Fleet(on_a100(600, has_host=False), placement, moves)
    fleet.run(asked)
    assert sorted(one.asked.name for engine in fleet.engines for one in engine.done) == sorted(
        one.name for one in asked
    )
    assert [engine.free_blocks for engine in fleet.engines] == [600] * REPLICAS
    assert all(one.emitted == one.asked.answer for engine in fleet.engines for one in engine.done)
    assert moves or not fleet.moved
    assert fleet.moved or not (moves and placement == "by replica"), "two have all, and two have nothing"
