"""A node that is about to end hands on what it has: its replicas start elsewhere, and finish what they serve.

Serve's proxy on it ends last, with the last stream that it passes on, whoever serves that. Ray's own end of a
node, SIGTERM, leaves it 30 s at most, in which few replicas have started elsewhere.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.state import list_actors
from ray.util.state.exception import RayStateApiException

_LOOK_S: Final = 0.5
_REPLICA: Final = "ServeReplica:"
"""How Serve names the classes of its replicas' actors."""
_PROXY: Final = "ProxyActor"
"""The class of its proxies."""
_WITHOUT_HEAD_S: Final = 150.0
"""How long the head may be away. A new pod for it takes about two minutes to answer; of a cluster that is
deleted none comes."""
_AWAY: Final = (ConnectionError, RuntimeError, ValueError, TimeoutError, RayError, RayStateApiException)
"""What Ray raises where its control plane or its dashboard does not answer; not the same in all places."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


class LeaveError(Exception):
    """Ray did not take the node out of the cluster; its replicas end with it."""


class _HeadAwayError(LeaveError):
    """The head does not answer now; another may take its place."""


def leave(within_s: float, node_id: str | None = None) -> list[str]:
    """Take a node out of the cluster, and wait until Serve has neither a replica nor a proxy on it.

    Serve starts a replica elsewhere before it shuts one down here. Where there is no room for it, those here
    serve until their tier's `drain_s` before `within_s` is over. The proxy ends when none of its requests is
    left, half a minute later than this begins at the earliest. That of the head stays. While the head is
    away, what the node serves goes on, so that this waits for another one.

    Args:
        within_s: How long the node will last.
        node_id: Which; None for that of this process.

    Returns:
        The replicas, and the proxy, that it still has after `within_s`; they end with it.

    Raises:
        LeaveError: when there is no cluster, it refuses or has no dashboard, or its head stays away.
    """
    ends_s = time.monotonic() + within_s
    _once_the_head_is_there(_connect, ends_s)
    try:
        node = node_id or ray.get_runtime_context().get_node_id()
        _once_the_head_is_there(lambda: _drain(node, max(1, int(ends_s - time.monotonic()))), ends_s)
        while left := _once_the_head_is_there(lambda: _serving_on(node), ends_s):
            if time.monotonic() >= ends_s:
                break
            time.sleep(_LOOK_S)
        return left
    finally:
        ray.shutdown()


def _once_the_head_is_there(work: Callable[[], T], ends_s: float) -> T:
    """What `work` gives; tried again while the head may come back.

    Raises:
        LeaveError: its own, or when the head has been away for too long.
    """
    until_s = min(ends_s, time.monotonic() + _WITHOUT_HEAD_S)
    while True:
        try:
            return work()
        except _HeadAwayError as error:
            if time.monotonic() >= until_s:
                raise
            _log.warning("%s; trying again", error)
        time.sleep(_LOOK_S)


def _connect() -> None:
    try:
        cluster = ray.init("auto", log_to_driver=False, logging_level=logging.ERROR)
    except _AWAY as error:
        ray.shutdown()
        # Without an address there is nothing that could come back.
        is_known = "RAY_ADDRESS" in os.environ or "Could not find any running Ray instance" not in str(error)
        raise (_HeadAwayError if is_known else LeaveError)(
            f"there is no Ray cluster to leave: {error}"
        ) from None
    if cluster.dashboard_url == "":  # None is one that has not started yet
        raise LeaveError(
            f"the Ray cluster at {ray.get_runtime_context().gcs_address} has no dashboard, which says what a "
            "node has; `slackserve serve`, which is one node, finishes what it serves at SIGTERM"
        )


def _drain(node: str, within_s: int) -> None:
    """Have Ray place nothing there any more; Serve looks at what is drained every tenth of a second."""
    command = [
        str(Path(sys.executable).parent / "ray"),
        "drain-node",
        f"--node-id={node}",
        "--reason=DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message=the node is about to end",
        f"--deadline-remaining-seconds={within_s}",
        f"--address={ray.get_runtime_context().gcs_address}",
    ]
    drained = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if drained.returncode:
        _serving_on(node)  # raises where nobody answers; else it was a refusal
        raise LeaveError(
            f"Ray does not drain node {node}: {(drained.stderr or drained.stdout).strip()[-500:]}"
        )


def _serving_on(node: str) -> list[str]:
    """The names of Serve's replicas and of its proxy there.

    Raises:
        LeaveError: when the dashboard does not answer, which may also be busy.
    """
    filters = [("node_id", "=", node), ("state", "=", "ALIVE")]
    try:
        found = list_actors(filters=filters, limit=1000)
    except _AWAY as error:
        raise _HeadAwayError(f"Ray's head does not say what is on node {node}: {error}") from None
    return [
        actor.name or actor.actor_id
        for actor in found
        if actor.class_name == _PROXY or actor.class_name.startswith(_REPLICA)
    ]
