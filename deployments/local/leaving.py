"""A node that is about to end hands on what it has: its replicas start elsewhere, and finish what they serve.

Serve's proxy on it ends last, with the last stream that it passes on, whoever serves that. Ray's own end of a
node, SIGTERM, ends all its processes at once.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import ray
from ray.util.state import list_actors
from ray.util.state.exception import RayStateApiException

_LOOK_S: Final = 0.5
_REPLICA: Final = "ServeReplica:"
"""How Serve names the classes of its replicas' actors."""
_PROXY: Final = "ProxyActor"
"""The class of its proxies."""


class LeaveError(Exception):
    """Ray did not take the node out of the cluster; its replicas end with it."""


def leave(within_s: float, node_id: str | None = None) -> list[str]:
    """Take a node out of the cluster, and wait until Serve has neither a replica nor a proxy on it.

    Serve starts a replica elsewhere before it shuts one down here. Where there is no room for it, those here
    serve until their tier's `drain_s` before `within_s` is over. The proxy ends when none of its requests is
    left, half a minute later than this begins at the earliest. That of the head stays.

    Args:
        within_s: How long the node will last.
        node_id: Which; None for that of this process.

    Returns:
        The replicas, and the proxy, that it still has after `within_s`; they end with it.

    Raises:
        LeaveError: when there is no cluster, or it refuses.
    """
    ends_s = time.monotonic() + within_s
    try:
        ray.init("auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise LeaveError(f"there is no Ray cluster to leave: {error}") from None
    try:
        node = node_id or ray.get_runtime_context().get_node_id()
        _drain(node, max(1, int(ends_s - time.monotonic())))
        while (left := _serving_on(node)) and time.monotonic() < ends_s:
            time.sleep(_LOOK_S)
        return left
    finally:
        ray.shutdown()


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
        raise LeaveError(
            f"Ray does not drain node {node}: {(drained.stderr or drained.stdout).strip()[-500:]}"
        )


def _serving_on(node: str) -> list[str]:
    """The names of Serve's replicas and of its proxy there."""
    filters = [("node_id", "=", node), ("state", "=", "ALIVE")]
    try:
        found = list_actors(filters=filters, limit=1000)
    except RayStateApiException:  # the dashboard is busy; asked again
        return ["unknown"]
    return [
        actor.name or actor.actor_id
        for actor in found
        if actor.class_name == _PROXY or actor.class_name.startswith(_REPLICA)
    ]
