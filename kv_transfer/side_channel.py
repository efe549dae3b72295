"""NIXL's side channel: where a decode engine asks a prefill engine for what it needs to read its memory.

vLLM's own listener ends for good at the first packet that it cannot read, and everybody who reaches the port
can send one. Owns a listener that answers what vLLM's answers and takes no notice of anything else, on which
port it is, the question whether one answers, and a question of our own: which leases have ended. What else is
asked and answered is vLLM's.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import zmq_ctx
from vllm.utils.network_utils import make_zmq_path

from kv_transfer import zmtp
from kv_transfer.leases import Leases

if TYPE_CHECKING:
    from ray.serve.llm import LLMConfig

_log = logging.getLogger(__name__)

PROBE_S: Final = 5.0
ANSWER_S: Final = 2.0
"""So long an answer about leases is waited for."""
_LEASES_MSG: Final = b"slackserve_ended_leases"
_LOOK_S: Final = 1.0
_REOPEN_S: Final = 1.0
_LONGEST_S: Final = 60.0
"""So long a connection may stay; whoever asks over one that has ended makes another by itself."""
_MAX_TOLD: Final = 10
PORT_BASE: Final = "NIXL_SIDE_CHANNEL_PORT_BASE"
"""Ray Serve LLM's name for the first port of a tier, in `experimental_configs`."""
_PORT: Final = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_LAST_PORT: Final = 65535
BIND_S: Final = 60.0
"""So long a port may still be another's, of one that is about to end."""
Ended = Callable[[str, Sequence[str]], list[str]]
"""Which of these leases of an engine have ended."""
_not_ours: set[tuple[str, int]] = set()
"""Where no listener of this process could be opened; somebody else may answer there."""
_holds: list[socket.socket] = []
"""Each keeps a port for this process until it ends."""


class SideChannelError(RuntimeError):
    """An engine's side channel does not answer on its own address."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(
            f"NIXL's side channel does not answer on {host}:{port}: decode could read nothing from here; "
            "give the tiers ports that nobody else uses (kv_transfer.prefill_port, kv_transfer.decode_port), "
            "and check VLLM_NIXL_SIDE_CHANNEL_HOST"
        )


class NoPortError(RuntimeError):
    """No port is left for an engine's side channel."""

    def __init__(self, first: int) -> None:
        super().__init__(
            f"NIXL's side channel: all ports from {first} on are taken; give the tiers ports that nobody "
            "else uses (kv_transfer.prefill_port, kv_transfer.decode_port)"
        )


def take_port(llm_config: LLMConfig) -> int:
    """Have this process' engine listen on the first of its tier's ports that nobody on this host has.

    Ray would choose by Serve's rank of the replica. When one has gone, Serve may give its rank to another
    that runs, whose engine keeps its port, and the old rank of that to the next that starts.

    Returns:
        The place of the port among those of the tier, and so of the replica among those on this host.

    Raises:
        NoPortError: All are taken.
    """
    first = llm_config.experimental_configs[PORT_BASE]
    apart = llm_config.engine_kwargs.get("tensor_parallel_size", 1)
    for place, port in enumerate(range(first, _LAST_PORT + 1, apart)):
        if (hold := _hold_of(port)) is not None:
            _holds.append(hold)
            # Ray leaves alone what is set. What was before would be the port of all engines on this host.
            os.environ[_PORT] = str(port)
            return place
    raise NoPortError(first)


def _hold_of(port: int) -> socket.socket | None:
    """An abstract Unix socket whose name says the port; None where another process has either.

    The kernel gives a name to one in a network namespace, as it gives ports; the name is there before the
    engine listens, and goes with the process that has bound it.
    """
    hold = socket.socket(socket.AF_UNIX)
    try:
        hold.bind(f"\0slackserve_side_channel_{port}")
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", port))
    except OSError as error:
        hold.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return hold


def serve_handshakes(
    answers: Mapping[tuple[int, int], bytes],
    ready: threading.Event,
    stop: threading.Event,
    host: str,
    port: int,
    ended: Ended = lambda _, leases: list(leases),
) -> None:
    """Answer handshakes until told to stop, whatever else arrives; takes the place of vLLM's listener.

    A port that is not to be had for `BIND_S` is given up, which `probe` says.

    Args:
        answers: By pipeline and tensor-parallel rank.
        ready: Set once it listens, or has given up: vLLM waits for it without end.
        stop: Looked at every second.
        host: Where it listens.
        port: Likewise.
        ended: Called for questions about leases.
    """
    opened_s = time.monotonic()
    _not_ours.discard((host, port))
    while not stop.is_set():
        try:
            asyncio.run(_serve(host, port, _Answers(answers, ended), ready, stop))
        except OSError as error:
            _log.exception("NIXL's side channel on %s:%d failed (%s), it is opened again", host, port, error)
            if not ready.is_set() and time.monotonic() - opened_s >= BIND_S:
                _not_ours.add((host, port))
                ready.set()
                return
            stop.wait(_REOPEN_S)


def probe(host: str, port: int, rank: tuple[int, int], within_s: float = PROBE_S) -> None:
    """Shake hands with a side channel as a decode engine does.

    Raises:
        SideChannelError: It does not answer in time, or is not this process's.
    """
    if (host, port) in _not_ours:
        raise SideChannelError(host, port)
    with zmq_ctx(zmq.REQ, make_zmq_path("tcp", host, port)) as asker:
        asker.setsockopt(zmq.RCVTIMEO, int(1e3 * within_s))
        asker.send(msgspec.msgpack.encode((GET_META_MSG, *rank)))
        try:
            asker.recv_multipart()
        except zmq.Again:
            raise SideChannelError(host, port) from None


def ask_about_leases(
    address: tuple[str, int], engine: str, leases: Sequence[str], within_s: float = ANSWER_S
) -> Leases:
    """Ask a prefill engine which of its leases have ended, and what its clock says.

    Args:
        address: Host and port of its side channel.
        engine: Its id.
        leases: Those asked about.
        within_s: Longest wait.

    Raises:
        SideChannelError: It does not answer in time, or with something else.
    """
    with zmq_ctx(zmq.REQ, make_zmq_path("tcp", *address)) as asker:
        asker.setsockopt(zmq.RCVTIMEO, int(1e3 * within_s))
        asker.setsockopt(zmq.SNDTIMEO, int(1e3 * within_s))
        asked_s = time.perf_counter()
        try:
            asker.send(msgspec.msgpack.encode((_LEASES_MSG, engine, leases)))
            ended, clock = asker.recv_multipart()
            told = msgspec.msgpack.decode(ended, type=frozenset[str])
            clock_s = msgspec.msgpack.decode(clock, type=float)
        except (zmq.ZMQError, ValueError) as error:
            raise SideChannelError(*address) from error
        return Leases(told, clock_s - (asked_s + time.perf_counter()) / 2)


class _Answers:
    """What is answered to whom.

    Args:
        by_rank: What handshakes are told.
        ended: See `serve_handshakes`.
    """

    def __init__(self, by_rank: Mapping[tuple[int, int], bytes], ended: Ended) -> None:
        self._by_rank = by_rank
        self._ended = ended
        self._ignored = 0

    async def converse(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Answer over one connection until it ends, or something else than a question comes."""
        try:
            async with asyncio.timeout(_LONGEST_S):
                await zmtp.greet(reader, writer)
                while True:
                    self._answer(await zmtp.question(reader), writer)
                    await writer.drain()
        except zmtp.NoQuestionError:
            self._ignore()
            writer.transport.abort()
        except TimeoutError:
            writer.transport.abort()  # also from what it has not read
        except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            pass  # it has left, or the listener ends
        finally:
            writer.close()

    def _answer(self, question: bytes, writer: StreamWriter) -> None:
        found = self._by_rank.get(_rank_in(question))
        if found is None and (asked := _leases_in(question)) is not None:
            found = msgspec.msgpack.encode(self._ended(*asked))
        if found is None:
            self._ignore()
            return
        # The clock lets prefill and decode estimate how far their clocks are apart; vLLM compares it with the
        # leases that it stamps in this process.
        writer.write(zmtp.answer(found, msgspec.msgpack.encode(time.perf_counter())))

    def _ignore(self) -> None:
        self._ignored += 1
        if self._ignored <= _MAX_TOLD:
            _log.warning(
                "NIXL's side channel: ignored a packet that is no handshake (%d so far)", self._ignored
            )


async def _serve(
    host: str, port: int, answers: _Answers, ready: threading.Event, stop: threading.Event
) -> None:
    server = await asyncio.start_server(answers.converse, host, port, limit=zmtp.MAX_BYTES)
    ready.set()
    while not stop.is_set():  # noqa: ASYNC110 - another thread's event
        await asyncio.sleep(_LOOK_S)
    server.close()


def _rank_in(question: bytes) -> tuple[int, int]:
    """The rank that is asked about; one that nobody has when it is no handshake."""
    asked = _decoded(question, tuple[bytes, int, int])
    if asked is None or asked[0] != GET_META_MSG:
        return -1, -1
    return asked[1], asked[2]


def _leases_in(question: bytes) -> tuple[str, list[str]] | None:
    """The engine and the leases that are asked about, if they are."""
    asked = _decoded(question, tuple[bytes, str, list[str]])
    return None if asked is None or asked[0] != _LEASES_MSG else (asked[1], asked[2])


def _decoded(question: bytes, of: Any) -> Any:
    """What is asked, if it is a question of this type."""
    try:
        return msgspec.msgpack.decode(question, type=of)
    except ValueError:  # msgspec's own errors, and that of a text which is not UTF-8
        return None
