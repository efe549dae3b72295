"""Hosts of their own for Ray nodes: network namespaces on one bridge, between which packets can be lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from typing import Self

import pytest

_BRIDGE, _PREFIX = "slackserve83", "10.83.0."
_NOBODY = "02:00:00:00:00:fe"
"""A hardware address that nobody has: what is sent there is lost without a word, as behind a broken link."""


class Network:
    """Namespaces that reach each other and this process, which is the first host.

    Attributes:
        address: Of this process's host.
    """

    address = f"{_PREFIX}1"

    def __init__(self) -> None:
        self._hosts: list[str] = []

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            pytest.skip("network namespaces need root and iproute2")
        self.__exit__()
        _ip("link", "add", _BRIDGE, "type", "bridge")
        _ip("address", "add", f"{self.address}/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for host in (f"{_BRIDGE}-{number}" for number in range(2, 10)):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", host)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "delete", _BRIDGE)

    def add_host(self) -> tuple[str, str]:
        """A new host: the name of its namespace, and its address."""
        number = len(self._hosts) + 2
        host, link = f"{_BRIDGE}-{number}", f"slack{number}"
        _ip("netns", "add", host)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", host)
        _ip("link", "set", link, "master", _BRIDGE)
        _ip("link", "set", link, "up")
        _ip("-n", host, "address", "add", f"{self._address(number)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", host, "link", "set", device, "up")
        # Who looks for its own address asks for the way to the Internet.
        _ip("-n", host, "route", "add", "default", "via", self.address)
        self._hosts.append(host)
        return host, self._address(number)

    def cut(self) -> None:
        """Lose what the hosts send each other; this process's host still reaches all."""
        for host, other in self._pairs():
            _ip("-n", host, "neigh", "replace", other, "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent")

    def heal(self) -> None:
        """Lose nothing any more."""
        for host, other in self._pairs():
            _ip("-n", host, "neigh", "delete", other, "dev", "eth0")

    def _pairs(self) -> list[tuple[str, str]]:
        addresses = {host: self._address(number) for number, host in enumerate(self._hosts, 2)}
        return [(host, addresses[other]) for host in self._hosts for other in self._hosts if host != other]

    def _address(self, number: int) -> str:
        return f"{_PREFIX}{number}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
