"""How `slackserve bench` shows a run while it goes on and when it is over.

Owns the presentation. What the numbers are is `score`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deployments.bench.answer import Ended
from deployments.bench.score import Result, Score
from deployments.bench.search import Goodput


@contextmanager
def run_progress(total: int) -> Iterator[Callable[[Ended], None]]:
    """Draw a bar of the requests that the given callback is told of, and how many of them were in time."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    over = met = 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)

        def count(ended: Ended) -> None:
            nonlocal over, met
            over += 1
            met += ended.is_met
            bar.update(task, completed=over, description=f"in time {met / over:.0%}")

        yield count


@contextmanager
def rest_progress(seconds: float) -> Iterator[None]:
    """Say that the server is left alone for so long."""
    with Console(stderr=True).status(f"no load for {seconds:.0f} s, as some were late, refused or failed"):
        yield


def print_table(console: Console, result: Result) -> None:
    """Print all scores of a run, one a row, and whole: a terminal that is too narrow wraps the lines."""
    shown = _table(result)
    needed = console.measure(shown, options=console.options.update(max_width=_ANY_COLUMNS)).maximum
    if needed > console.width:
        shown.width = needed
    console.print(shown, crop=False)


def _table(result: Result) -> Table:
    shown = Table(
        caption=_sending(result), box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )
    shown.add_column(no_wrap=True)
    for name in _COLUMNS:
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_row("all", *_cells(result.overall), end_section=True)
    for group in (result.tiers, result.kinds):
        for number, (name, score) in enumerate(group.items(), start=1):
            shown.add_row(name, *_cells(score), end_section=number == len(group))
    return shown


_ANY_COLUMNS = 1000
_SMALL_MS = 30
_QUANTILES = "p50/p90/p99"
_COLUMNS = (
    "sent",
    "in time",
    f"TTFT, ms\n{_QUANTILES}",
    f"TPOT, ms\n{_QUANTILES}",
    "refused",
    "failed",
    "tokens\n/s",
)


def _cells(score: Score) -> list[str]:
    return [
        str(score.requests),
        f"{score.attainment:.1%}",
        _times(score.ttft_ms),
        _times(score.tpot_ms),
        str(sum(score.refused.values())),
        str(sum(score.failed.values())),
        f"{score.tokens_ps:,.0f}",
    ]


def _times(quantiles: Mapping[str, float]) -> str:
    return "/".join(f"{value:.{1 if value < _SMALL_MS else 0}f}" for value in quantiles.values()) or "none"


def _sending(result: Result) -> str:
    return (
        f"{result.overall.goodput_rps:.2f} requests/s in time, {result.wall_s:.1f} s; "
        f"sent late by p50 {result.late_ms['p50']:.1f}, p99 {result.late_ms['p99']:.1f} ms"
    )


def remarks(result: Result) -> list[str]:
    """What the reader has to know beside the table, a line each."""
    lines = [f"{count} refused: {reason}" for reason, count in result.overall.refused.items()]
    for reason, count in result.overall.failed.items():
        said = result.said.get(reason, "")
        lines.append(f"{count} failed: {reason}" + (f": {said}" if said not in reason else ""))
    if any(reason.startswith("400") for reason in result.overall.failed):
        lines.append(
            "400: for a model with fewer tokens give --vocabulary, for a server with other tiers --tiers"
        )
    if result.is_client_slow:
        lines.append(
            f"warning: the client was too slow: 10% of the requests were sent {result.late_ms['p90']:.0f} ms "
            "or more after their time, so the server did not get the load that is stated; give the client a "
            "faster machine, or less to do"
        )
    return lines


def probe_line(rate_rps: float, result: Result, wanted: float) -> str:
    """One line on a rate that a search tried."""
    is_good = result.overall.attainment >= wanted
    worst = min(result.kinds, key=lambda kind: result.kinds[kind].attainment)
    sent = result.overall.requests
    early = f"; ended after {sent} of {sent + result.unsent} requests" if result.unsent else ""
    return (
        f"{'✓' if is_good else '✗'} {rate_rps:8.3f} requests/s: {result.overall.attainment:6.1%} in time, "
        f"worst {worst} {result.kinds[worst].attainment:.1%}{early}"
    )


def goodput_line(found: Goodput, wanted: float) -> str:
    """One line on what a search found."""
    if found.rate_rps is None and not found.is_bounded:
        return f"goodput at {wanted:.0%}: unknown, as the client was too slow for --min-rate"
    if found.rate_rps is None:
        return f"goodput at {wanted:.0%}: less than --min-rate"
    bound = "" if found.is_bounded else "at least "
    return f"goodput at {wanted:.0%}: {bound}{found.rate_rps:.3f} requests/s"
