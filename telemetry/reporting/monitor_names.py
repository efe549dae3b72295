"""How the cluster-wide SLO monitors are named and found: one per Serve application and code."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import ray
from ray import serve

import slo

NAMESPACE: Final = "slackserve"
_SOURCES: Final = ("slo", "deployments/monitor")
"""What a monitor runs, from the root of the code."""


def monitor_prefix(application: str) -> str:
    """How the names of a Serve application's monitors begin."""
    return f"slo-monitor-{application}-"


def monitor_name(application: str, code: str | None = None) -> str:
    """The actor's name: that of the Serve application and of the code that runs here.

    Two applications of one cluster have a monitor each, and those that run new code do not report to the
    monitor of the old, which ends when nobody reports to it any more.

    Args:
        application: The name of the Serve application.
        code: What that runs, as its own processes' `running_code` says; by default the code of this process.
    """
    return monitor_prefix(application) + (code or running_code())


def find_monitor(application: str, code: str | None = None) -> Any:
    """The handle of an application's monitor, by what `monitor_name` takes.

    Raises:
        ValueError: when there is none that runs that code.
    """
    return ray.get_actor(monitor_name(application, code), namespace=NAMESPACE)


def monitors_of(application: str) -> Iterator[Any]:
    """The handles of an application's monitors, whatever code they run."""
    prefix = monitor_prefix(application)
    for each in ray.util.list_named_actors(all_namespaces=True):
        code = each["name"].removeprefix(prefix)
        if each["namespace"] == NAMESPACE and code != each["name"] and "-" not in code:
            with suppress(ValueError):  # it has just ended
                yield ray.get_actor(each["name"], namespace=NAMESPACE)


def find_own_monitor() -> Any:
    """The handle of the monitor of the Serve application that this process belongs to.

    Raises:
        ValueError: when there is none.
    """
    return find_monitor(serve.get_replica_context().app_name)


@functools.cache
def running_code() -> str:
    """A hash of the code of this process, as far as a monitor runs it."""
    root = Path(slo.__file__).parents[1]
    digest = hashlib.sha256()
    for source in _SOURCES:
        for path in sorted((root / source).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
