"""The command `slackserve batch`: its options, and what it does with them."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import typer
from rich.console import Console
from rich.text import Text

from deployments.batch import BatchError
from deployments.batch.pace import BatchPace
from deployments.batch.requests import open_requests, read_requests
from deployments.batch.results import ResultFiles
from deployments.batch.view import BatchView
from deployments.options import CacertOption, KeyOption, UrlOption, check_file, finite, parse_key, seconds
from slo.tiers import check_tier_name

_INTERRUPTED: Final = 130
_CONNECT_S: Final = 30.0


def batch(  # noqa: PLR0913 - each is an option of the command
    requests: Annotated[
        Path, typer.Argument(help="A request in each line, as OpenAI's Batch API takes them.")
    ],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where answers are written, one in each line.")],
    url: UrlOption = "http://127.0.0.1:8000",
    api_key: KeyOption = None,
    cacert: CacertOption = None,
    tier: Annotated[str, typer.Option(help="The tier of all requests.")] = "background",
    at_a_time: Annotated[int, typer.Option(min=1, max=10_000, help="Most requests under way.")] = 32,
    within: Annotated[
        Any, typer.Option(parser=seconds, metavar="TIME", help="When to end, done or not: 90m, 8h.")
    ] = "24h",
    timeout: Annotated[
        float, typer.Option(callback=finite, min=0.1, help="Seconds until an attempt has failed.")
    ] = 3600.0,
) -> None:
    """Have a file of requests answered by a running server, beside whatever else it serves.

    Given again, it goes on where it ended.
    """
    try:
        check_tier_name(tier)
    except ValueError as error:
        raise BatchError(f"--tier: {error}") from None
    check_file("--out", out, BatchError)
    plan = _Plan(
        url, parse_key(api_key, BatchError), cacert, {"x-slo-tier": tier}, at_a_time, within, timeout
    )
    console = Console(stderr=True, soft_wrap=True)
    with open_requests(requests) as file, ResultFiles(out, requests) as results:
        code = asyncio.run(_run(plan, file, results, console))
    if code:
        raise typer.Exit(code)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Whom is asked, and how.

    Attributes:
        within_s: After which it ends.
        timeout_s: Of an attempt.
    """

    url: str
    api_key: str | None
    cacert: Path | None
    headers: Mapping[str, str]
    at_a_time: int
    within_s: float
    timeout_s: float


async def _run(plan: _Plan, file: BinaryIO, results: ResultFiles, console: Console) -> int:
    """Ask for what has no answer yet; the exit status."""
    from deployments.batch.batch_run import BatchRun  # noqa: PLC0415 - imports aiohttp
    from deployments.client import connection  # noqa: PLC0415 - likewise

    until_s = time.monotonic() + plan.within_s
    connect_s = min(_CONNECT_S, plan.timeout_s / 2)  # before the attempt has failed: it was not begun
    async with connection(
        plan.url, plan.api_key, plan.timeout_s, BatchError, plan.cacert, connect_s
    ) as server:
        requests = read_requests(file, await server.models())
        answered = results.answered({request.custom_id: request for request in requests})
        left = [request for request in requests if request.custom_id not in answered]
        if answered:
            console.print(Text(f"{len(answered):,} of {len(requests):,} are answered in {results.path}"))
        with BatchView(len(left), console) as view:
            run = BatchRun(server, plan.headers, file, results, BatchPace(plan.at_a_time), view)
            is_stopped = await _until_stopped(run.ask(left, until_s))
    for line in view.summary(results):
        console.print(Text(line))
    if is_stopped:
        console.print(Text("Stopped. Give the command again to go on."))
        return _INTERRUPTED
    return 1 if view.failed else 0


async def _until_stopped(work: Coroutine[Any, Any, None]) -> bool:
    """Do it, until SIGINT or SIGTERM; whether one came."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    await asyncio.wait([task])
    if task.cancelled():
        return True
    task.result()
    return False
