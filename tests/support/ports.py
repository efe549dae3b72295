"""Ports to listen on."""

import os
import random
import socket

_WORKERS = 8
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
_PORTS = list(range(31_500 + _WORKER, 32_768, _WORKERS))
"""Below those that the kernel gives to connections, any of which could be taken before somebody listens, and
none that another process of pytest may choose meanwhile."""
_RANDOM = random.SystemRandom()
_RANDOM.shuffle(_PORTS)


def free_port() -> int:
    """One that nobody on this machine listens on, and never the same twice."""
    while True:
        port = _PORTS.pop()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def side_channels() -> dict[str, int]:
    """The first NIXL ports of the tiers, with room for 500 replicas each.

    They are below all other ports of tests, and far from the defaults, so that a deployment of the machine's
    user is left alone.
    """
    first = _RANDOM.randrange(24_000, 30_500)
    return {"prefill_port": first, "decode_port": first + 500}
