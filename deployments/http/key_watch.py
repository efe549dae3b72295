"""Keeps an ingress's API keys as their file says, without a restart."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path
from typing import Any, Final

from deployments.config.keys import KeySource
from slo.admission.tenants import KeyRing
from telemetry import logs
from telemetry.catalogue import API_KEYS_UNREAD
from telemetry.instruments import Instruments

LOOK_S: Final = 1.0
"""How often the file is looked at. A mounted secret changes by a link, which this sees as well."""


class KeysNotReadError(Exception):
    """This process has not been able to read the file of keys so far, and cannot tell whose a key is."""


class KeyWatch:
    """The keys as of the last state of the file that this process could read.

    A file that cannot be used changes nothing: the last keys that could be read stay, and the log says so.
    They do not travel to another process, for which they may be out of date.

    Args:
        source: Where the keys come from.

    Raises:
        ConfigError: when they cannot be used to begin with.
    """

    def __init__(self, source: KeySource) -> None:
        self._source = source
        self._ring: KeyRing | None = source.ring()
        self._seen: tuple[int, ...] | None = None
        """What the file was like when its keys were read."""
        self._told = ""
        """Why it could not be, as it was logged last."""
        self._thread: threading.Thread | None = None
        self._instruments: Instruments | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What travels: without the keys where a file has to say which they are by then."""
        if self._source.path is None:
            return self.__dict__
        return {**self.__dict__, "_ring": None, "_seen": None, "_told": "", "_thread": None}

    @property
    def ring(self) -> KeyRing:
        """Whose each key is.

        The first to ask, in the replica's process and maybe long after the application was built, waits for
        the file to be read.

        Raises:
            KeysNotReadError: when this process has not been able to read it so far, saying why.
        """
        if self._thread is None and self._source.path is not None:
            self._look(self._source.path)
            self._thread = threading.Thread(target=self._watch, args=(self._source.path,), daemon=True)
            self._thread.start()
        if self._ring is None:
            raise KeysNotReadError(self._told)
        return self._ring

    async def first_read(self) -> None:
        """Wait until this process has keys.

        An ingress that is still starting has Serve keep those that serve, and none that lets nobody in takes
        the place of one.
        """
        while True:
            try:
                self.ring  # noqa: B018 - asking for it reads them
            except KeysNotReadError:
                await asyncio.sleep(LOOK_S)
            else:
                return

    def _watch(self, path: Path) -> None:
        while True:
            time.sleep(LOOK_S)
            self._look(path)

    def _look(self, path: Path) -> None:
        """Read the file where it has to be, and show whether it can be used."""
        if self._instruments is None:  # in the replica's process, not where the application is built
            self._instruments = Instruments(API_KEYS_UNREAD)
        self._read_another(path)
        self._instruments.set(API_KEYS_UNREAD, float(self._seen is None))

    def _read_another(self, path: Path) -> None:
        """Read the file if it is another one, or could not be read so far."""
        try:
            stat = path.stat()
            seen = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if seen == self._seen:
                return
            ring = self._source.ring()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, a next look may find it mended
            self._seen = None
            if str(error) != self._told:
                self._told = str(error)
                logs.event("api_keys_not_read", level=logging.ERROR, error=self._told[:2000])
        else:
            self._ring, self._seen, self._told = ring, seen, ""
            logs.event("api_keys_read", keys=len(ring))
