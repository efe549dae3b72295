"""The search for goodput: the highest rate that a server can keep, each tried on a server that is at rest.

Owns which rate is tried when, and what is found. What a rate is offered by is `load`'s. A server that sheds
under overload, as SlackServe does, admits again in small steps, and what it still refuses then would count
against the next rate. It need not say so, and may have begun after the last request of a rate was sent. So
the search goes by what went wrong at that rate: refusals, failures, or too many late answers.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, replace
from typing import Final

from deployments.bench.score import Result

_REST_S: Final = 60.0
_REST_PER_S: Final = 3.0
"""SlackServe's monitor takes a step towards more shedding every 10 s, and one back every 30 s
(`slo.monitor.shedding.SteeringRules`)."""
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Goodput:
    """What a search found.

    Attributes:
        rate_rps: The highest rate that was good; None when not even the lowest was.
        is_bounded: Whether the next higher rate that was tried was not good, by no fault of the client.
    """

    rate_rps: float | None
    is_bounded: bool


def bisection(low_rps: float, high_rps: float, precision: float) -> Generator[float, bool, Goodput]:
    """Search for goodput: yields the rate to try next, is sent whether it was good, returns what was found.

    It ends when the best good rate and the lowest bad one are as close as `precision`, a fraction.
    """
    if not (yield low_rps):
        return Goodput(None, is_bounded=True)
    if (yield high_rps):
        return Goodput(high_rps, is_bounded=False)
    good_rps, bad_rps = low_rps, high_rps
    while bad_rps - good_rps > precision * bad_rps:
        middle_rps = (good_rps + bad_rps) / 2
        if (yield middle_rps):
            good_rps = middle_rps
        else:
            bad_rps = middle_rps
    return Goodput(good_rps, is_bounded=True)


async def search(
    rates: Generator[float, bool, Goodput],
    wanted: float,
    probe: Callable[[float], Awaitable[Result]],
    rest: Callable[[float], Awaitable[None]],
    max_rest_s: float,
) -> Goodput:
    """Try rates, and let the server rest between them where `rest_s` says so.

    A rate is good when the fraction `wanted` of its requests is in time. One that was not good with a client
    that was too slow says nothing of the server. After one with failures there is a `rest` in any case, the
    last one too: what it raises ends the search.
    """
    rate_rps = next(rates)
    lowest_bad_rps, is_client_slow = math.inf, False
    while True:
        result = await probe(rate_rps)
        is_good = result.overall.attainment >= wanted
        if not is_good and rate_rps < lowest_bad_rps:
            lowest_bad_rps, is_client_slow = rate_rps, result.is_client_slow
        found: Goodput | None = None
        try:
            rate_rps = rates.send(is_good)
        except StopIteration as end:
            found = end.value
        seconds = rest_s(result, max_rest_s, is_good=is_good)
        if result.overall.failed or (seconds > 0 and found is None):
            await rest(seconds)
        if found is not None:
            return replace(found, is_bounded=found.is_bounded and not is_client_slow)


def rest_s(result: Result, max_rest_s: float, *, is_good: bool) -> float:
    """How long a server is left alone after a rate: not at all if it was good and all was answered.

    Else by how long it was under load, which is how far it may have gone in turning requests away. One that
    was only late may turn them away, too: it learns that when first tokens come, when no more are sent.
    """
    if is_good and not result.overall.refused and not result.overall.failed:
        return 0.0
    return min(max_rest_s, _REST_S + _REST_PER_S * result.wall_s)


def max_missed(requests: int, wanted: float) -> int:
    """How many of the requests may miss while the fraction `wanted` can still be in time."""
    return requests - math.ceil(wanted * requests - _ROUNDING)
