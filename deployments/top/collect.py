"""Looks at a running deployment for `slackserve top`: asks router, monitor and prefill replicas.

Owns what is remembered between two looks. The connection is `deployments.local.running`'s, how a look is
drawn `deployments.top.view`'s.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from rich.live import Live

from deployments.local.running import NotRunningError, RunningDeployment
from deployments.names import ROUTER_NAME
from deployments.top.frame import DecodeRow, Frame, PrefillRow
from deployments.top.view import view
from slo.monitor.messages import Role

if TYPE_CHECKING:
    from rich.console import Console


_Question: TypeAlias = Callable[[], Awaitable[Any]]

_MONITOR: Final = "SLO monitor"
_FIRST_TIMEOUT_S: Final = 5.0
_TIMEOUT_S: Final = 1.0
_SILENT_S: Final = 5.0
"""Replicas report to the router every second; one that has not for this long is taken to have failed."""
_FORGOTTEN_S: Final = 60.0
"""Serve replaces a failed replica within a minute."""
_GONE_S: Final = 10.0
"""Ray ends a process that cannot reach it for a minute, and leaves the terminal as it is: be gone by then."""
_FIND_EVERY_S: Final = 10.0
"""An upgrade starts another monitor, while the one before goes on answering for minutes."""


def quiet() -> None:
    """Log nothing from here on: what goes wrong is shown, and log lines would tear the picture."""
    logging.disable(logging.CRITICAL)
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")  # attempts to connect, of up to 40 s each


def print_once(running: RunningDeployment, console: Console, *, as_json: bool) -> None:
    """Look once and print it, drawn or as one line of JSON with the fields of `Frame`."""
    frame = asyncio.run(Collector(running).look(_FIRST_TIMEOUT_S))
    if as_json:
        console.out(json.dumps(asdict(frame), default=datetime.isoformat), highlight=False)
    else:
        console.print(view(frame))


def watch(running: RunningDeployment, console: Console, interval_s: float) -> None:
    """Fill the terminal with one look after the other until Ctrl-C, which raises KeyboardInterrupt.

    Raises:
        NotRunningError: when the deployment's Ray has ended.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # in place of Ray's, which prints a stack trace
    asyncio.run(_watch(running, console, interval_s))


async def _watch(running: RunningDeployment, console: Console, interval_s: float) -> None:
    collector = Collector(running)
    frame = await collector.look(_FIRST_TIMEOUT_S)
    alive_s = time.monotonic()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while time.monotonic() - alive_s < _GONE_S:
            live.update(view(frame, console.height), refresh=True)
            await asyncio.sleep(interval_s)
            frame = await collector.look(_TIMEOUT_S)
            if _anybody(frame) or await _is_up(running.address):
                alive_s = time.monotonic()
    raise NotRunningError("the deployment has ended; start `slackserve serve` again")


def _anybody(frame: Frame) -> bool:
    return frame.ready is not None or any(replica.work is not None for replica in frame.prefill)


async def _is_up(address: str) -> bool:
    """Whether anything listens there; Ray writes an IPv6 address in brackets."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


@dataclass(frozen=True, slots=True)
class _Heard:
    """A replica's state as the router told it, and when that was."""

    state: Mapping[str, Any]
    at_s: float

    def silent_s(self, now_s: float) -> float:
        return float(self.state["reported_s_ago"]) + now_s - self.at_s


class Collector:
    """Takes one look after the other, and remembers replicas that stop answering for a while."""

    def __init__(self, running: RunningDeployment) -> None:
        self._running = running
        self._questions = _Questions()
        self._prefill: dict[str, _Heard] = {}
        self._decode: dict[str, _Heard] = {}
        self._router_at_s = 0.0
        self._tiers: tuple[str, ...] = ()
        self._monitored = False
        self._monitors: dict[str, Any] = {}
        self._found_s = -math.inf

    async def look(self, timeout_s: float) -> Frame:
        """Ask everybody; who has not answered after `timeout_s` is shown as not answering."""
        questions: dict[str, _Question] = {ROUTER_NAME: self._ask_router, _MONITOR: self._find_monitors}
        answers = await self._questions.put(questions, timeout_s)
        fleet = answers[ROUTER_NAME]
        if fleet is not None:
            self._router_at_s = at_s = time.monotonic()
            self._tiers = tuple(fleet.get("tiers", ()))
            self._monitored = fleet.get("monitored", False)
            self._prefill |= {state["replica"]: _Heard(state, at_s) for state in fleet["prefill"]}
            self._decode |= {state["replica"]: _Heard(state, at_s) for state in fleet["decode"]}
        asked = {replica: partial(self._ask_prefill, replica) for replica in self._prefill}
        asked |= {name: partial(self._ask_monitor, monitor) for name, monitor in self._monitors.items()}
        works = await self._questions.put(asked, timeout_s)
        now_s = time.monotonic()
        if fleet is not None:
            # A router that has just started has not heard of all of them yet.
            named = {each["replica"] for role in ("prefill", "decode") for each in fleet[role]}
            self._forget(works, now_s, named if fleet["ready"] else None)
        return Frame(
            model=self._running.model,
            taken_at=datetime.now().astimezone(),
            ready=None if fleet is None else fleet["ready"],
            prefill=tuple(
                PrefillRow(**self._seen(heard, now_s, "outstanding", "outstanding_tokens"), work=works[name])
                for name, heard in self._prefill.items()
            ),
            decode=tuple(DecodeRow(**self._seen(heard, now_s, "running")) for heard in self._decode.values()),
            tiers=self._tiers,
            monitored=self._monitored,
            monitor=self._steering(works),
        )

    async def _ask_router(self) -> Any:
        return await self._running.router.fleet.remote()

    async def _find_monitors(self) -> None:
        """Find the application's monitors, now and then and when none has answered."""
        find = self._running.find_monitors
        if find is not None and time.monotonic() - self._found_s >= _FIND_EVERY_S:
            found = await asyncio.to_thread(lambda: list(find()))
            self._monitors = {f"{_MONITOR} {monitor}": monitor for monitor in found}
            self._found_s = time.monotonic()

    async def _ask_monitor(self, monitor: Any) -> Any:
        return await monitor.state.remote(self._running.model)

    def _steering(self, answers: Mapping[str, Any]) -> Any:
        """The state of the monitor that steers; None when none answers, and then it is looked for anew."""
        states = [state for name in self._monitors if (state := answers.get(name)) is not None]
        if not states:
            self._found_s = -math.inf
        return max(states, key=_precedence, default=None)

    async def _ask_prefill(self, replica: str) -> Any:
        return await self._running.ask_prefill("snapshot", replica)

    def _seen(self, heard: _Heard, now_s: float, *fields: str) -> dict[str, Any]:
        return {
            **{name: heard.state[name] for name in ("replica", "kv_usage", *fields)},
            "reports": heard.silent_s(self._router_at_s) < _SILENT_S,
            "silent_s": heard.silent_s(now_s),
        }

    def _forget(self, works: Mapping[str, Any], now_s: float, named: AbstractSet[str] | None) -> None:
        """Of those that do not answer, those that are long silent, and those that a router knows no more."""
        for known in (self._prefill, self._decode):
            for replica, heard in list(known.items()):
                is_over = named is not None and replica not in named
                if works.get(replica) is None and (is_over or heard.silent_s(now_s) > _FORGOTTEN_S):
                    del known[replica]


def _precedence(monitor: Mapping[str, Any]) -> tuple[bool, float]:
    """Highest of the monitor that ingresses and router report to.

    Each knows for a minute who has left it: of several that have both it is the youngest.
    """
    subscribers = monitor.get("subscribers", {})
    return Role.INGRESS in subscribers and Role.ROUTER in subscribers, -monitor["uptime_s"]


class _Questions:
    """Asks many at once. One that still owes an answer is not asked another time."""

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Task[Any]] = {}

    async def put(self, questions: Mapping[str, _Question], timeout_s: float) -> dict[str, Any]:
        """The answers by name, None for each that fails or does not come in time."""
        for name, question in questions.items():
            if (task := self._asked.get(name)) is None or task.done():
                self._asked[name] = asyncio.create_task(_answer(question))
        tasks = {name: self._asked[name] for name in questions}
        if tasks:
            await asyncio.wait(tasks.values(), timeout=timeout_s)
        answered = {name for name, task in tasks.items() if task.done() and not task.cancelled()}
        return {name: task.result() if name in answered else None for name, task in tasks.items()}


async def _answer(question: _Question) -> Any:
    try:
        return await question()
    except Exception:  # noqa: BLE001 - not answering is the answer
        return None
