"""The process that compiles grammars, as the decode replica has it: started, asked and ended.

It is started by `subprocess`, which calls nobody's fork handlers: uvloop's way to start one does, and gRPC's
handlers start threads in the child that now and then crash before it runs its program. What it is asked, and
what follows from its answers, is `decode_node.grammars.check`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_PROGRAM: Final = Path(__file__).with_name("child.py")
_SAID_BYTES: Final = 2000
"""Of what a child that does not start has written about it."""
_END_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Child:
    """The process that compiles, and both ends of what is said between it and this one."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def started(cls) -> Child:
        """A process that has just been started, and reads what it is told."""
        ours, its = socket.socketpair()
        with its:
            process = subprocess.Popen(  # noqa: ASYNC220, S603 - returns once our own program runs
                [sys.executable, "-P", str(_PROGRAM)],
                stdin=its.fileno(),
                stdout=its.fileno(),
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        return cls(process, *await asyncio.open_unix_connection(sock=ours))

    @property
    def has_ended(self) -> bool:
        """Whether it can be told nothing any more."""
        return self.process.poll() is not None or self.writer.is_closing()

    async def ask(self, value: Any, timeout_s: float) -> str:
        """Its answer to a value; nothing when it has ended, or does not answer in time."""
        try:
            async with asyncio.timeout(timeout_s):
                self.writer.write(json.dumps(value).encode() + b"\n")
                await self.writer.drain()
                return (await self.reader.readline()).decode().strip()
        except (TimeoutError, ConnectionError, RuntimeError):  # the last is uvloop's for a closed end
            return ""

    async def said(self) -> str:
        """What it has written to its standard error."""
        assert self.process.stderr is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                told = await asyncio.to_thread(self.process.stderr.read, _SAID_BYTES)
            return told.decode(errors="replace")
        return ""

    async def end(self) -> None:
        """Kill it, and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.writer.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.process.wait, _END_S)
