"""Ports to listen on."""

import secrets
import socket

_PORTS = range(31_500, 32_768)
"""Below those that the kernel gives to connections, any of which could be taken before somebody listens."""


def free_port() -> int:
    """One that nobody on this machine listens on."""
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
