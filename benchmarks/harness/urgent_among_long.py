"""An urgent prompt that arrives while a long one is being prefilled, at evenly spread moments."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.harness.local_server import Client
from simulator.workload.arrivals import Arrival


def among(urgent: Arrival, long_s: float, number: int, count: int) -> Arrival:
    """The urgent prompt at the moment of its round, counted from a long one's that takes `long_s` alone.

    Not in the last quarter: there the long one may end in time for the urgent one by itself.
    """
    return replace(urgent, at_s=long_s * (0.1 + 0.5 * (number + 0.5) / count))


async def rounds(asked: Client, urgent: Arrival, long: Arrival, count: int) -> dict[str, list[float]]:
    """TTFTs of both, seconds: alone and together."""
    times: dict[str, list[float]] = {"urgent_alone": [], "long_alone": [], "urgent": [], "long": []}
    for _ in range(2):  # the first touches memory
        await asked.ttfts_s(urgent)
        (long_s,) = await asked.ttfts_s(long)
    for number in range(count):
        times["urgent_alone"] += await asked.ttfts_s(urgent)
        times["long_alone"] += await asked.ttfts_s(long)
        together = await asked.ttfts_s(long, among(urgent, long_s, number, count))
        times["long"].append(together[0])
        times["urgent"].append(together[1])
    return times
