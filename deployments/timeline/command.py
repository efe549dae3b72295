"""`slackserve timeline`: the last minutes of a running deployment's prefill replicas, as a page."""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from deployments.config import ConfigError
from deployments.options import (
    ApplicationOption,
    ModelOption,
    check_file_and_directory,
    seconds,
    write_result,
)

_console = Console(stderr=True)


def timeline(
    last: Annotated[
        Any, typer.Option(parser=seconds, metavar="TIME", help="How far back: 60s, 5m, 1h.")
    ] = "60s",
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")] = Path("timeline.html"),
    model: ModelOption = None,
    application: ApplicationOption = None,
) -> None:
    """Draw who ran, waited and was suspended on the running deployment's prefill replicas."""
    check_file_and_directory("--out", out, ConfigError)
    with _console.status("asking the replicas"):
        from deployments.local.running import NotRunningError, connect  # noqa: PLC0415 - imports Ray
        from deployments.timeline.collect import pasts  # noqa: PLC0415 - likewise
        from deployments.timeline.page import html  # noqa: PLC0415 - imports Matplotlib

        try:
            running = connect(model, application)
            asked_at = datetime.now().astimezone()
            tiers, found = asyncio.run(pasts(running, last))
        except NotRunningError as error:
            _console.print(Text(f"timeline: {error}", style="red"))
            raise typer.Exit(1) from None
        page = html(running.model, asked_at, last, found, tiers)
    write_result("--out", out, page, ConfigError)
    requests = sum(len(heard.past.jobs) for heard in found.values() if heard is not None)
    _console.print(f"{out}: {requests} requests on {len(found)} prefill replicas", highlight=False)
