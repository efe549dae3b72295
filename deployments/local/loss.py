"""Ends `slackserve serve` when it waits for a Ray that does not answer any more, or has ended under it.

A call that waits for such a Ray returns only when Ray's own patience of a minute ends, by aborting the
process, with the replicas left running.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from rich.text import Text

from deployments.local.ending import end_at_once, end_within

if TYPE_CHECKING:
    from rich.console import Console

    from deployments.local.launcher import LocalDeployment

_LOOK_S: Final = 0.5
_GO_ON_S: Final = 45.0
"""Answers go on for so long without Ray's GCS; less than its own patience."""
_BY_ITSELF_S: Final = 10.0
"""Within which the command begins to stop once it is asked to, unless it waits for Ray."""
_SAY_S: Final = 5.0
"""Within which somebody takes what is said last, unless nobody reads it."""


def end_if_stuck(deployment: LocalDeployment, stop: threading.Event, console: Console) -> None:
    """End this process and all of a deployment if nobody else does, after `stop` is set or Ray has ended."""
    while not (stop.wait(_LOOK_S) or deployment.is_lost()):
        pass
    until_s = time.monotonic() + _GO_ON_S
    while deployment.can_answer() and time.monotonic() < until_s and not stop.is_set():
        stop.wait(_LOOK_S)
    is_told = stop.wait(_LOOK_S)  # a signal to all processes may have ended Ray's before it comes here
    until_s = time.monotonic() + (_BY_ITSELF_S if is_told or deployment.is_stopping else 0.0)
    while time.monotonic() < until_s:
        if deployment.is_stopping:
            return
        time.sleep(_LOOK_S)
    code = 0 if is_told else 2
    try:
        killed = deployment.kill()
        end_within(_SAY_S, code)
        console.show_cursor()  # which a start hides as long as it is drawn
        if not is_told:
            console.print(Text(f"Ray has ended; its logs are in {deployment.logs}.", style="red"))
        say_stopped(console, killed)
    finally:  # also where nobody can be told
        end_at_once(code)


def say_stopped(console: Console, killed: int) -> None:
    """Say that all has ended, and how many processes had to be killed."""
    console.print(f"Stopped{f'; {killed} processes had to be killed' if killed else ''}.")
