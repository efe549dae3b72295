"""Whatever arrives at the side channel, whoever shakes hands is answered."""

import contextlib
import os
import random
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ports import free_port
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from waiting import assert_soon
from zmq.utils.monitor import recv_monitor_message

from kv_transfer import side_channel
from kv_transfer.leases import EndedBook
from kv_transfer.side_channel import (
    PORT_BASE,
    NoPortError,
    SideChannelError,
    ask_about_leases,
    probe,
    serve_handshakes,
    take_port,
)

HOST = "127.0.0.1"
ANSWERS = {(0, 0): b"first", (0, 1): b"second"}
OUR_QUESTION = b"\x93\xc4\x17slackserve_ended_leases"
"""How one about leases begins."""


@pytest.fixture(scope="module")
def port():
    """Of a listener that runs while these tests do."""
    port, ready, stop = free_port(), threading.Event(), threading.Event()
    book = EndedBook("engine")
    book.note({"a"})
    listener = threading.Thread(
        target=serve_handshakes, args=(ANSWERS, ready, stop, HOST, port), kwargs={"ended": book.ended}
    )
    listener.start()
    assert ready.wait(5)
    yield port
    stop.set()
    listener.join(5)
    assert not listener.is_alive()


def send(port, *frames):
    """Send one message, as a client with a socket of its own."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 200
        client.connect(f"tcp://{HOST}:{port}")
        client.send_multipart(frames)


def ask(port, rank):
    with zmq.Context() as context, context.socket(zmq.REQ) as client:
        client.linger = 0
        client.rcvtimeo = 5000
        client.connect(f"tcp://{HOST}:{port}")
        client.send(msgspec.msgpack.encode((GET_META_MSG, *rank)))
        return client.recv_multipart()


def test_each_rank_is_told_with_the_time(port):
    for rank, expected in ANSWERS.items():
        answer, clock = ask(port, rank)
        assert answer == expected
        assert msgspec.msgpack.decode(clock) > 0


def test_who_asks_about_leases_is_told_which_have_ended_and_what_the_clock_says(port):
    told = ask_about_leases((HOST, port), "engine", ["a", "b"])
    assert told.ended == {"a"}
    assert abs(told.offset_s) < 0.5, "both are this process's"
    assert ask_about_leases((HOST, port), "another", ["b"]).ended == {"b"}


@pytest.mark.parametrize("leases", [["x" * 10_000], ["a"]])
def test_no_answer_about_leases_is_said(port, leases):
    """A question that is too long is cut off; elsewhere nobody listens."""
    with pytest.raises(SideChannelError):
        ask_about_leases((HOST, port if len(leases[0]) > 1 else free_port()), "engine", leases, within_s=0.3)


@pytest.mark.parametrize(
    "frames",
    [
        (b"",),
        (b"", msgspec.msgpack.encode((b"slackserve_ended_leases", "engine", "a"))),
        (b"", msgspec.msgpack.encode((b"slackserve_ended_leases", 1, ["a"]))),
        (b"", OUR_QUESTION + b"\xa2\xff\xfe\x90"),  # an engine that is not UTF-8
        (b"", OUR_QUESTION + b"\xa1e\x91\xa2\xff\xfe"),  # such a lease
        (b"", b"\x93\xa2\xff\xfe\x00\x00"),
        (b"\xff",),
        (b"", b""),
        (b"", b"\xc1\xc1"),
        (b"", b"x" * 100_000),
        (b"", msgspec.msgpack.encode(("another", 0, 0))),
        (b"", msgspec.msgpack.encode((GET_META_MSG, 0))),
        (b"", msgspec.msgpack.encode((GET_META_MSG, "a", None))),
        (b"", msgspec.msgpack.encode((GET_META_MSG, 0, 99))),
        (b"", msgspec.msgpack.encode((GET_META_MSG, [0], {"a": 1}))),
        (b"", msgspec.msgpack.encode({1: 2})),
        (b"", msgspec.msgpack.encode((GET_META_MSG, 0, 0)), b"one too many"),
        (b"a", b"b", b"c", b"d", b"e"),
    ],
)
def test_what_is_no_handshake_is_ignored(port, frames):
    send(port, *frames)
    probe(HOST, port, (0, 0))


def test_whoever_sends_more_than_a_question_is_cut_off_before_it_is_taken_in(port):
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        watched = client.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        watched.rcvtimeo = 5000
        client.connect(f"tcp://{HOST}:{port}")
        assert recv_monitor_message(watched)["event"] == zmq.EVENT_CONNECTED
        client.send_multipart((b"", bytes(1024 * 1024)))
        assert recv_monitor_message(watched)["event"] == zmq.EVENT_DISCONNECTED
        client.disable_monitor()
    assert ask(port, (0, 0))[0] == b"first"


def zmtp_client(port, **options):
    """A connection on which ZeroMQ's greetings have been exchanged."""
    client = socket.socket()
    for name, value in options.items():
        client.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    client.settimeout(10)
    client.connect((HOST, port))
    client.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    client.sendall(b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER")
    while len(client.recv(4096, socket.MSG_PEEK)) <= 64:  # its greeting, and more
        time.sleep(0.01)
    return client


@pytest.mark.parametrize("frame", [b"\x03" + struct.pack(">Q", 4096) + bytes(4096), b"\x01\x00" * 2000])
def test_frames_of_a_message_that_never_ends_are_not_kept(port, frame):
    process = psutil.Process()
    before, piece = process.memory_info().rss, frame * (1024 * 1024 // len(frame))
    with zmtp_client(port) as client, contextlib.suppress(ConnectionError):
        for _ in range(64):
            client.sendall(piece)
        time.sleep(0.5)
    assert process.memory_info().rss - before < 10 * 1024 * 1024
    probe(HOST, port, (0, 0))


@pytest.mark.parametrize("says", [b"", b"\xff", b"\x01\x00\x00"])
def test_who_takes_long_to_ask_is_cut_off(port, says, monkeypatch):
    monkeypatch.setattr(side_channel, "_LONGEST_S", 0.3)
    with zmtp_client(port) as client:
        client.sendall(says)
        while client.recv(4096):
            pass


def test_who_asks_and_does_not_read_is_cut_off(port, monkeypatch):
    monkeypatch.setattr(side_channel, "_LONGEST_S", 2)
    question = msgspec.msgpack.encode((GET_META_MSG, 0, 0))
    asked = b"\x01\x00\x00" + struct.pack("!B", len(question)) + question
    with zmtp_client(port, SO_RCVBUF=4096, SO_SNDBUF=1 << 20) as client:
        name = client.getsockname()
        client.settimeout(0.5)
        while sent(client, 1000 * asked):
            pass  # until the listener reads no more, as its answers are not read
        assert_soon(lambda: name not in peers(port), 10)


def sent(client, data):
    try:
        client.sendall(data)
    except (TimeoutError, ConnectionError):  # the latter where it was cut off meanwhile
        return False
    return True


def peers(port):
    connections = psutil.Process().net_connections("tcp")
    return [each.raddr for each in connections if each.raddr and each.laddr.port == port]


def test_several_questions_over_one_connection_are_answered_in_turn(port):
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger, client.rcvtimeo = 0, 5000
        client.connect(f"tcp://{HOST}:{port}")
        for rank in (0, 1, 99, 0):
            client.send_multipart((b"", msgspec.msgpack.encode((GET_META_MSG, 0, rank))))
        answers = [client.recv_multipart()[1] for _ in range(3)]
    assert answers == [b"first", b"second", b"first"]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    frames=st.lists(st.binary(max_size=64), min_size=1, max_size=5)
    | st.tuples(st.just(b""), st.binary(max_size=64).map(OUR_QUESTION.__add__))
)
def test_any_message_is_survived(port, frames):
    send(port, *frames)
    assert ask(port, (0, 0))[0] == b"first"


def test_what_is_no_message_at_all_is_survived(port):
    for junk in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" + b"\0" * 8 + b"\x7f" * 64):
        with socket.create_connection((HOST, port)) as stranger:
            stranger.sendall(junk)
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert ask(port, (0, 1))[0] == b"second"


def test_connections_that_are_open_at_the_end_leave_no_word(caplog):
    port, ready, stop = free_port(), threading.Event(), threading.Event()
    listener = threading.Thread(target=serve_handshakes, args=(ANSWERS, ready, stop, HOST, port))
    listener.start()
    assert ready.wait(5)
    with zmtp_client(port):
        stop.set()
        listener.join(5)
    assert not listener.is_alive()
    assert caplog.records == []


def test_a_side_channel_that_does_not_answer_is_said_with_its_address():
    port = free_port()
    with pytest.raises(SideChannelError, match=rf"{HOST}:{port}.*kv_transfer\.prefill_port"):
        probe(HOST, port, (0, 0), within_s=0.3)


def test_a_port_that_is_anothers_is_given_up_and_said(port, monkeypatch):
    """Its owner answers handshakes, too, but not with what is here."""
    monkeypatch.setattr(side_channel, "BIND_S", 0.2)
    ready, stop = threading.Event(), threading.Event()
    listener = threading.Thread(target=serve_handshakes, args=(ANSWERS, ready, stop, HOST, port))
    listener.start()
    assert ready.wait(10), "vLLM would wait without end"
    listener.join(5)
    with pytest.raises(SideChannelError, match="nobody else uses"):
        probe(HOST, port, (0, 0))
    side_channel._not_ours.clear()


@pytest.fixture
def first():
    """Port of a tier, with free ones behind it: no test that runs beside others listens there."""
    return random.randrange(24_000, 31_000)


@pytest.fixture
def replica(monkeypatch):
    """Starts a replica of a tier: its place, its port, and what ends it."""
    holds = []
    monkeypatch.setattr(side_channel, "_holds", holds)
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "")

    def start(first, **engine_kwargs):
        monkeypatch.delenv("VLLM_NIXL_SIDE_CHANNEL_PORT")
        config = SimpleNamespace(experimental_configs={PORT_BASE: first}, engine_kwargs=engine_kwargs)
        place = take_port(config)
        return place, int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]), holds[-1].close

    yield start
    for hold in holds:
        hold.close()


def test_a_replica_has_a_port_that_none_of_its_tier_has_whichever_of_them_are_left(replica, first):
    """Ports of one that has gone are given again, those of one that stays are not."""
    (*_, end), *others = [replica(first) for _ in range(3)]
    ports = [port for _, port, _ in others]
    end()
    place, port, _ = replica(first)
    assert (place, port) == (0, first)
    place, port, _ = replica(first)
    assert place == 3
    assert port not in {first, *ports}


def test_a_replica_passes_over_a_port_where_somebody_listens(replica, first):
    """As the engine of a replica that was killed does for a while."""
    with socket.create_server((HOST, first)):
        place, port, _ = replica(first)
    assert place == 1
    assert port > first


def test_ports_of_replicas_are_as_far_apart_as_they_have_workers(replica, first):
    assert [replica(first, tensor_parallel_size=4)[1] - first for _ in range(2)] == [0, 4]


def test_replicas_that_start_together_have_a_port_each(replica, first):
    config = SimpleNamespace(experimental_configs={PORT_BASE: first}, engine_kwargs={})
    with ThreadPoolExecutor(8) as pool:
        places = list(pool.map(take_port, [config] * 8))
    assert sorted(places) == list(range(8))


def test_a_port_that_the_environment_names_is_that_of_no_engine(replica, first, monkeypatch):
    """Those of both tiers on a host would have the same."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
    take_port(SimpleNamespace(experimental_configs={PORT_BASE: first}, engine_kwargs={}))
    assert os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(first)


def test_without_a_port_that_is_left_it_is_said_what_to_change(replica):
    replica(65535)
    with pytest.raises(NoPortError, match=r"65535.*kv_transfer\.prefill_port"):
        replica(65535)
