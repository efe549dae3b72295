"""Runs and searches of `slackserve bench`, from the options to what is printed."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from deployments.bench import BenchError, SearchEndedError
from deployments.bench.client import Server, connected
from deployments.bench.load import Asking, Prompts, offer
from deployments.bench.score import Result, score
from deployments.bench.search import Goodput, bisection, max_missed, search
from deployments.bench.stream import Extent, Shape, stream
from deployments.bench.view import (
    goodput_line,
    print_table,
    probe_line,
    remarks,
    rest_progress,
    run_progress,
)
from simulator.workload.arrivals import Workload

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What is asked of which server.

    Attributes:
        model: None takes the first one that is served.
        extent: Of each run.
        slo_headers: Whether the server is told tiers and objectives; they are scored in any case.
        body: Further fields of every request's body.
        timeout_s: After this a request has failed.
        cacert: Certificates to trust, and no others; None trusts those that the system does.
    """

    url: str
    model: str | None
    api_key: str | None
    workload: Workload
    extent: Extent
    shape: Shape
    seed: int
    vocabulary: range
    slo_headers: bool
    body: dict[str, Any]
    timeout_s: float
    cacert: Path | None = None


def run_once(plan: BenchPlan, console: Console, rate_rps: float) -> dict[str, Any]:
    """Offer one rate, print its table, and return it as JSON."""
    model, result = asyncio.run(_once(plan, rate_rps))
    print_table(console, result)
    for line in remarks(result):
        console.print(Text(line, style="yellow"))
    return {"model": model, "rate_rps": rate_rps, **asdict(result)}


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """How goodput is searched for.

    Attributes:
        between_rps: The lowest and the highest rate that are tried.
        wanted: The fraction of requests that shall be in time.
        precision: How close the best good rate and the lowest bad one shall be, as a fraction.
        max_rest_s: Longest time without load between two rates.
    """

    between_rps: tuple[float, float]
    wanted: float
    precision: float
    max_rest_s: float


def run_search(plan: BenchPlan, console: Console, searched: SearchPlan) -> dict[str, Any]:
    """Find goodput, print how each rate went that was tried, and return it as JSON.

    Raises:
        SearchEndedError: when it ends before that, after at least one rate.
    """
    wanted = searched.wanted

    def show(rate_rps: float, result: Result) -> None:
        console.print(Text(probe_line(rate_rps, result, wanted)))
        for line in remarks(result):
            console.print(Text(f"  {line}", style="yellow"))

    found, measured = asyncio.run(_search(plan, searched, show))
    console.print(Text(goodput_line(found, wanted), style="bold"))
    return {"goodput_rps": found.rate_rps, "is_bounded": found.is_bounded, **measured}


async def _once(plan: BenchPlan, rate_rps: float) -> tuple[str, Result]:
    async with connected(plan.url, plan.api_key, plan.timeout_s, plan.cacert) as server:
        model = await _model(server, plan.model)
        return model, await _probe(server, model, plan, rate_rps)


async def _search(
    plan: BenchPlan, searched: SearchPlan, show: Callable[[float, Result], None]
) -> tuple[Goodput, dict[str, Any]]:
    """Goodput, and what was measured as JSON."""
    async with connected(plan.url, plan.api_key, plan.timeout_s, plan.cacert) as server:
        model = await _model(server, plan.model)
        probes: list[dict[str, Any]] = []
        measured = {"model": model, "attainment": searched.wanted, "probes": probes}

        async def probe(rate_rps: float) -> Result:
            result = await _probe(server, model, plan, rate_rps, searched.wanted)
            show(rate_rps, result)
            probes.append({"rate_rps": rate_rps, **asdict(result)})
            return result

        async def rest(seconds: float) -> None:
            with rest_progress(seconds):
                await asyncio.sleep(seconds)
            if probes[-1]["overall"]["failed"]:
                await server.models()  # one that is gone ends the search: every rate would fail from now on

        rates = bisection(*searched.between_rps, searched.precision)
        try:
            return await search(rates, searched.wanted, probe, rest, searched.max_rest_s), measured
        except BenchError as error:
            if not probes:
                raise
            raise SearchEndedError(error, measured) from error


async def _model(server: Server, wanted: str | None) -> str:
    served = await server.models()
    if wanted is None:
        if not served:
            raise BenchError("the server does not say which models it has; give --model")
        return served[0]
    if served is not None and wanted not in served:
        near = difflib.get_close_matches(wanted, served, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"it serves {', '.join(served) or 'none'}"
        raise BenchError(f"--model: {wanted!r} is not served there; {hint}")
    return wanted


async def _probe(server: Server, model: str, plan: BenchPlan, rate_rps: float, wanted: float = 0.0) -> Result:
    """Offer one rate; it ends early when the fraction `wanted` cannot be in time any more."""
    arrivals = stream(plan.workload, rate_rps, plan.extent, plan.shape, plan.seed)
    asking = Asking(model, Prompts(plan.vocabulary), plan.slo_headers, plan.body)
    with run_progress(len(arrivals)) as count:
        most = max_missed(len(arrivals), wanted)
        return score(await offer(server, arrivals, asking, count, max_missed=most))
