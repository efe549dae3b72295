"""What is asked of a configuration before anything of it starts on this machine.

Owns the order, labels and ports; what the machine has is `deployments.local.machine`'s.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from deployments.config import ConfigError
from deployments.local.machine import check_memory, check_packages
from deployments.local.ray_access import check_access

if TYPE_CHECKING:
    from deployments.config.settings import SlackServeConfig

RAYS_AGENT_PORT: Final = 52365
"""Where Ray's agent listens, so that Ray does not take it for its metrics."""


def check_no_labels(config: SlackServeConfig) -> None:
    """Make sure that no tier waits for a node that this machine is not.

    Raises:
        ConfigError: naming the key.
    """
    given = {"node_labels": config.node_labels}
    for where, each in config.by_section().items():
        given |= {
            f"{where}prefill.node_labels": each.prefill.node_labels,
            f"{where}decode.node_labels": each.decode.node_labels,
        }
    for key, labels in given.items():
        if labels:
            msg = (
                f"{key}: `slackserve serve` starts a Ray of its own, without labels; "
                "leave it out, or deploy `deployments.app:build` on a Ray cluster"
            )
            raise ConfigError(msg)


CHECKS_OF_THIS_MACHINE: Final[Sequence[Callable[[SlackServeConfig], None]]] = (
    check_packages,
    check_memory,
    check_no_labels,
    lambda _: check_access(),
)
"""What is asked before anything starts, beside the ports; each raises a ConfigError."""


def check_ports(config: SlackServeConfig, *, may_be_taken: bool = False) -> None:
    """Make sure that every port is asked for once, and can be listened on; the monitor waits for its own.

    Args:
        config: What is to be served.
        may_be_taken: By the server that it is to replace, for example.

    Raises:
        ConfigError: when one cannot, naming the key.
    """
    wanted = [("port", config.host, config.port)]
    if config.grpc.port is not None:
        wanted.append(("grpc.port", "", config.grpc.port))
    if config.ray_metrics_port is not None:
        wanted.append(("ray_metrics_port", "", config.ray_metrics_port))
    for where, each in config.by_section().items():
        for key, first, pool in (
            (f"{where}kv_transfer.prefill_port", each.kv_transfer.prefill_port, each.prefill),
            (f"{where}kv_transfer.decode_port", each.kv_transfer.decode_port, each.decode),
        ):
            wanted += [(key, "", first + worker) for worker in range(pool.most * pool.tensor_parallel_size)]
    keys: dict[int, str] = {}
    if config.monitor.enabled and config.monitor.port:  # waits until its port is free
        keys[config.monitor.port] = "monitor.port"
    if config.ray_metrics_port == RAYS_AGENT_PORT:
        msg = f"ray_metrics_port: {RAYS_AGENT_PORT} is where Ray's own agent listens; choose another"
        raise ConfigError(msg)
    for key, host, port in wanted:
        if port in keys:
            msg = f"{key}: {port} is a port of {keys[port]} too; choose another"
            raise ConfigError(msg)
        keys[port] = key
        _check_port(key, host, port, may_be_taken=may_be_taken)


def _check_port(key: str, host: str, port: int, *, may_be_taken: bool) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if may_be_taken and error.errno == errno.EADDRINUSE:
                return
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"host: {host} is no address of this machine ({error.strerror})") from None
            msg = f"{key}: cannot listen on {host}:{port} ({error.strerror}); choose another port"
            raise ConfigError(msg) from None
