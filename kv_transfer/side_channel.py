"""NIXL's side channel: where a decode engine asks a prefill engine for what it needs to read its memory.

vLLM's own listener ends for good at the first packet that it cannot read, and everybody who reaches the port
can send one. Owns a listener that answers what vLLM's answers and takes no notice of anything else, the
question whether one answers, and a question of our own: which leases have ended. What else is asked and
answered is vLLM's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import zmq_ctx
from vllm.utils.network_utils import is_valid_ipv6_address, make_zmq_path

from kv_transfer.leases import Leases

_log = logging.getLogger(__name__)

PROBE_S: Final = 5.0
ANSWER_S: Final = 2.0
"""So long an answer about leases is waited for."""
_LEASES_MSG: Final = b"slackserve_ended_leases"
_RECEIVE_MS: Final = 1000
_REOPEN_S: Final = 1.0
_MAX_BYTES: Final = 4096
"""A handshake's question has thirty bytes, one about leases a hundred for each; who sends more is cut off."""
_MAX_TOLD: Final = 10
BIND_S: Final = 60.0
"""So long a port may still be another's, of one that is about to end."""
Ended = Callable[[str, Sequence[str]], list[str]]
"""Which of these leases of an engine have ended."""
_not_ours: set[tuple[str, int]] = set()
"""Where no listener of this process could be opened; somebody else may answer there."""


class SideChannelError(RuntimeError):
    """An engine's side channel does not answer on its own address."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(
            f"NIXL's side channel does not answer on {host}:{port}: decode could read nothing from here; "
            "give the tiers ports that nobody else uses (kv_transfer.prefill_port, kv_transfer.decode_port), "
            "and check VLLM_NIXL_SIDE_CHANNEL_HOST"
        )


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
            with _listening(host, port) as socket:
                ready.set()
                _answer(socket, answers, ended, stop)
        except zmq.ZMQError as error:
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
    with zmq_ctx(zmq.REQ, make_zmq_path("tcp", host, port)) as socket:
        socket.setsockopt(zmq.RCVTIMEO, int(1e3 * within_s))
        socket.send(msgspec.msgpack.encode((GET_META_MSG, *rank)))
        try:
            socket.recv_multipart()
        except zmq.Again:
            raise SideChannelError(host, port) from None


@contextmanager
def _listening(host: str, port: int) -> Iterator[Any]:
    """A socket for questions; whoever sends a frame that is longer is cut off before it is taken in."""
    context: zmq.Context[Any] = zmq.Context()
    try:
        socket = context.socket(zmq.ROUTER)
        # Both reach connections only when they are set before they are made.
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
        socket.setsockopt(zmq.IPV6, is_valid_ipv6_address(host))
        socket.setsockopt(zmq.RCVTIMEO, _RECEIVE_MS)
        socket.bind(make_zmq_path("tcp", host, port))
        yield socket
    finally:
        context.destroy(linger=0)


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
    with zmq_ctx(zmq.REQ, make_zmq_path("tcp", *address)) as socket:
        socket.setsockopt(zmq.RCVTIMEO, int(1e3 * within_s))
        socket.setsockopt(zmq.SNDTIMEO, int(1e3 * within_s))
        asked_s = time.perf_counter()
        try:
            socket.send(msgspec.msgpack.encode((_LEASES_MSG, engine, leases)))
            ended, clock = socket.recv_multipart()
            told = msgspec.msgpack.decode(ended, type=frozenset[str])
            clock_s = msgspec.msgpack.decode(clock, type=float)
        except (zmq.ZMQError, ValueError) as error:
            raise SideChannelError(*address) from error
        return Leases(told, clock_s - (asked_s + time.perf_counter()) / 2)


def _answer(
    socket: Any, answers: Mapping[tuple[int, int], bytes], ended: Ended, stop: threading.Event
) -> None:
    ignored = 0
    while not stop.is_set():
        try:
            frames = socket.recv_multipart()
        except zmq.Again:
            continue
        answer = answers.get(_rank_in(frames))
        if answer is None and (asked := _leases_in(frames)) is not None:
            answer = msgspec.msgpack.encode(ended(*asked))
        if answer is None:
            ignored += 1
            if ignored <= _MAX_TOLD:
                _log.warning(
                    "NIXL's side channel: ignored a packet that is no handshake (%d so far)", ignored
                )
            continue
        # The clock lets prefill and decode estimate how far their clocks are apart; vLLM compares it with the
        # leases that it stamps in this process.
        socket.send_multipart((frames[0], b"", answer, msgspec.msgpack.encode(time.perf_counter())))


def _rank_in(frames: list[bytes]) -> tuple[int, int]:
    """The rank that a packet asks about; one that nobody has when it is no handshake."""
    question = _question(frames, tuple[bytes, int, int])
    if question is None or question[0] != GET_META_MSG:
        return -1, -1
    return question[1], question[2]


def _leases_in(frames: list[bytes]) -> tuple[str, list[str]] | None:
    """The engine and the leases that a packet asks about, if it does."""
    question = _question(frames, tuple[bytes, str, list[str]])
    return None if question is None or question[0] != _LEASES_MSG else (question[1], question[2])


def _question(frames: list[bytes], of: Any) -> Any:
    """What a packet asks, if it is a question of this type."""
    if len(frames) != 3:  # noqa: PLR2004 - sender, delimiter, question
        return None
    try:
        return msgspec.msgpack.decode(frames[2], type=of)
    except ValueError:  # msgspec's own errors, and that of a text which is not UTF-8
        return None
