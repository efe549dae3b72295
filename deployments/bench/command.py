"""The command `slackserve bench`: its options, and what it does with them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from deployments.bench import BenchError, SearchEndedError
from deployments.bench.mixes import WorkloadFile, load_workload
from deployments.bench.stream import Extent, Shape
from deployments.calibrate.profile import load_profile
from deployments.options import (
    CacertOption,
    KeyOption,
    UrlOption,
    check_file,
    finite,
    parse_key,
    refuse_given,
    write_result,
)
from simulator.workload.arrivals import TraceError, Workload, read_trace
from slo.tiers import DEFAULT_TIERS, Tier, check_tier_name

_SEARCHED_REQUESTS = 30
"""Of each rate of a search, at least: of fewer than ten, one late request makes a rate a bad one."""
_MISSPELT = 0.8
"""How alike two names are of which one is a misspelling of the other."""


def bench(  # noqa: PLR0913 - each is an option of the command
    ctx: typer.Context,
    *,
    url: UrlOption = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="By default the first one that is served.")] = None,
    api_key: KeyOption = None,
    cacert: CacertOption = None,
    mix: Annotated[
        str | None, typer.Option(help="embedded (the default), assistant, or a YAML file.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Replay a Mooncake .jsonl or Azure .csv.")] = None,
    rate: Annotated[float, typer.Option(callback=finite, min=1e-6, help="Requests per second.")] = 1.0,
    requests: Annotated[int | None, typer.Option(min=1, help="How many to send.")] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            callback=finite, min=0.1, help="Or for how many seconds: 60, and with --search until 30 are sent."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Times, lengths and tiers follow from it.")] = 0,
    tiers: Annotated[str | None, typer.Option(help="Shares, such as premium=0.2,standard=0.8.")] = None,
    scale: Annotated[float, typer.Option(callback=finite, min=1e-6, help="Factor on all lengths.")] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Most of prompt and output together.")] = None,
    max_output: Annotated[int | None, typer.Option(min=1, help="Most tokens of an output.")] = None,
    vocabulary: Annotated[str, typer.Option(help="Token ids that prompts are made of.")] = "1000-30000",
    profile: Annotated[Path | None, typer.Option(help="Prefill times for kinds with ttft_scale.")] = None,
    slo_headers: Annotated[bool, typer.Option(help="Send tier and objective as headers.")] = True,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for outputs of the drawn length.")] = True,
    timeout: Annotated[
        float, typer.Option(callback=finite, min=0.1, help="Seconds until a request has failed.")
    ] = 600.0,
    search: Annotated[bool, typer.Option("--search", help="Find the highest good rate instead.")] = False,
    attainment: Annotated[float, typer.Option(min=0.01, max=1, help="What --search calls good.")] = 0.9,
    min_rate: Annotated[float, typer.Option(callback=finite, min=1e-6, help="Where --search begins.")] = 0.1,
    max_rate: Annotated[float, typer.Option(callback=finite, min=1e-6, help="Where --search ends.")] = 10.0,
    precision: Annotated[float, typer.Option(min=0.001, max=1, help="How close --search goes.")] = 0.05,
    settle: Annotated[
        float, typer.Option(callback=finite, min=0, help="Most seconds without load after an overload.")
    ] = 240.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result here.")] = None,
) -> None:
    """Send open-loop load to a running server, and score its answers against their objectives."""
    from deployments.bench.run import BenchPlan, SearchPlan, run_once, run_search  # noqa: PLC0415 - imports aiohttp

    if search:
        refuse_given(ctx, ("rate",), "with --search", BenchError)
    else:
        refuse_given(
            ctx,
            ("attainment", "min_rate", "max_rate", "precision", "settle"),
            "without --search",
            BenchError,
        )
    if trace is not None:
        refuse_given(ctx, ("profile",), "with --trace", BenchError)
    if search and min_rate >= max_rate:
        raise BenchError(f"--min-rate {min_rate:g} must be less than --max-rate {max_rate:g}")
    if requests is not None and duration is not None:
        raise BenchError("give --requests or --duration, not both")
    given = load_workload(mix or ("embedded" if trace is None else "trace"))
    plan = BenchPlan(
        url=url,
        model=model,
        api_key=parse_key(api_key, BenchError),
        workload=_workload(given, trace, profile),
        extent=_extent(requests, duration, is_search=search),
        shape=Shape(
            scale, max_tokens, max_output, None if tiers is None else parse_tiers(tiers, given.tiers())
        ),
        seed=seed,
        vocabulary=parse_vocabulary(vocabulary),
        slo_headers=slo_headers,
        body={"ignore_eos": True} if ignore_eos else {},
        timeout_s=timeout,
        cacert=cacert,
    )
    plan.extent.check(max_rate if search else rate)
    check_file("--json", json_file, BenchError)
    console = Console(soft_wrap=True)
    about = {"url": url, "seed": seed, "trace": None if trace is None else str(trace), "mix": mix}
    try:
        if search:
            searched = SearchPlan((min_rate, max_rate), attainment, precision, settle)
            found = run_search(plan, console, searched)
        else:
            found = run_once(plan, console, rate)
    except SearchEndedError as error:
        _write(json_file, {**about, **error.found}, console)
        raise
    _write(json_file, {**about, **found}, console)


def _extent(requests: int | None, duration_s: float | None, *, is_search: bool) -> Extent:
    """How long a run is; how many requests of a search decide is left to whoever gives either."""
    rate_option = "--min-rate" if is_search else "--rate"
    if duration_s is not None:
        return Extent(None, duration_s, rate_option)
    return Extent(requests, rate_option=rate_option, fewest=_SEARCHED_REQUESTS if is_search else 0)


def parse_tiers(text: str, named: Iterable[Tier] = ()) -> dict[Tier, float]:
    """Shares by tier, as in `premium=0.2,standard=0.8`.

    Only the server knows its tiers. So any name will do that is not nearly that of a default tier or of one
    of `named`, those of the workload.

    Raises:
        BenchError: when it is something else, or all shares are 0.
    """
    known = [*dict.fromkeys((*DEFAULT_TIERS.names, *named))]
    shares: dict[Tier, float] = {}
    for part in text.split(","):
        name, _, share = part.strip().partition("=")
        if name not in known and (near := difflib.get_close_matches(name, known, n=1, cutoff=_MISSPELT)):
            raise BenchError(f"--tiers: there is no tier {name!r}; did you mean {near[0]!r}?")
        try:
            check_tier_name(name)
        except ValueError as error:
            raise BenchError(f"--tiers: {error}") from None
        try:
            shares[Tier(name)] = float(share)
        except ValueError:
            raise BenchError(f"--tiers: {part!r} is not a tier and its share, like {name}=0.5") from None
    if not all(0 <= share < float("inf") for share in shares.values()) or not any(shares.values()):
        raise BenchError(f"--tiers: {text!r} gives no share above 0, or one below")
    return shares


def parse_vocabulary(text: str) -> range:
    """Token ids from the first to the last, as in `1000-30000`; raises BenchError for anything else."""
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and int(low) < int(high)):
        raise BenchError(f"--vocabulary: {text!r} is not a range of token ids, like 1000-30000")
    return range(int(low), int(high) + 1)


def _workload(given: WorkloadFile, trace: Path | None, profile: Path | None) -> Workload:
    if trace is None:
        return given.mix(None if profile is None else load_profile(profile).prefill_s)
    try:
        return given.trace(read_trace(trace))
    except TraceError as error:
        raise BenchError(f"--trace: {error}") from None


def _write(path: Path | None, values: dict[str, Any], console: Console) -> None:
    if path is None:
        return
    write_result("--json", path, json.dumps(values, indent=2) + "\n", BenchError)
    console.print(Text(f"written to {path}"))
