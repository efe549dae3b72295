"""Decode replicas start, drain and fail under load."""

import asyncio
import contextlib
import os
import signal
import socket
import struct
import time

import psutil
import pytest
import ray
import zmq
from fleet import actor, tell
from streams import stream
from waiting import seconds_until

pytestmark = [pytest.mark.e2e, pytest.mark.long]

STREAMS, STREAM_S = 6, 60.0
PACE_TOKENS = 300


@pytest.mark.nightly
async def test_a_decode_replica_with_long_streams_drains(fleet):
    """It gets nothing new, and ends when the last stream has."""
    await fleet.until_whole()
    async with fleet.deployment.http(wait_s=120) as http:
        begun = []
        started_s = time.monotonic()
        await asyncio.gather(*[stream(http, PACE_TOKENS, lambda: None) for _ in range(STREAMS)])
        pace_s = (time.monotonic() - started_s) / PACE_TOKENS
        most = min(15_000, round(STREAM_S / pace_s))
        calls = [asyncio.create_task(stream(http, most, lambda: begun.append(0))) for _ in range(STREAMS)]
        await asyncio.sleep(3)
        leaving = await fleet.busiest("decode", at_least=3)
        handle, pid = actor("Decode:", leaving)
        drained_s = time.monotonic()
        shutdown = handle.perform_graceful_shutdown.remote()

        async def told():
            return (await fleet.replicas("decode"))[leaving]["draining"]

        told_s = await seconds_until(told, 5, "the router did not hear of it")
        running = [(await fleet.replicas("decode"))[leaving]["running"]]
        async with asyncio.TaskGroup() as group:
            later = [group.create_task(stream(http, 100, lambda: None)) for _ in range(12)]
            while not (await asyncio.to_thread(ray.wait, [shutdown], timeout=0.2))[0]:
                replica = (await fleet.replicas("decode")).get(leaving)
                running.append(0 if replica is None else replica["running"])
                assert time.monotonic() - drained_s < 150, "the replica did not end"
        os.kill(pid, signal.SIGKILL)  # as Serve does then
        took_s = time.monotonic() - drained_s
        answers = await asyncio.gather(*calls)
    tell(
        "decode replica drained",
        told_s=told_s,
        drained_s=round(took_s, 1),
        running=running[0],
        streams=len(answers),
        cut=sum(answer != (most, ["[DONE]"]) for answer in answers),
    )
    assert answers == [(most, ["[DONE]"])] * len(calls)
    assert [one.result() for one in later] == [(100, ["[DONE]"])] * len(later)
    assert running == sorted(running, reverse=True), "it was given more work"
    await fleet.until_whole()
    await fleet.until_at_rest()


def send_malformed(host, port):
    """What is no handshake, as a message and as mere bytes."""
    for frames in ((b"",), (b"\xff",), (b"", b"\xc1\xc1"), (b"", b"", b"", os.urandom(4096))):
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 200
            stranger.connect(f"tcp://{host}:{port}")
            stranger.send_multipart(frames)
    with socket.create_connection((host, port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def call_side_channels(fleet):
    """Send what is no handshake to each prefill engine; how many there are."""
    replicas = await fleet.fresh("prefill")
    called = set()
    for process in [process for name in replicas for process in fleet.processes("prefill", name)]:
        for connection in process.net_connections("tcp"):
            host, port = connection.laddr
            if connection.status == psutil.CONN_LISTEN and port in fleet.side_channels:
                await asyncio.to_thread(send_malformed, host, port)
                called.add(port)
    return len(called)


async def test_a_prefill_replica_is_stopped_for_good_and_decode_starts_meanwhile(fleet):
    """After malformed packets at each side channel; with one of two replicas of each tier for a while."""
    async with fleet.under_load(
        "prefill replica stopped for good, then decode replica killed", may_fail=True
    ) as fault:
        assert await call_side_channels(fleet) == 2
        hanging = await fleet.busiest()
        failed = len(fleet.replacements())
        fleet.processes("prefill", hanging)[0].suspend()
        fault.happens()

        async def placed_again():
            return len(fleet.replacements()) > failed

        fault.measured["placed_again_s"] = await seconds_until(placed_again, 6, "nobody was placed again")
        fault.measured["forgotten_s"] = await fleet.until_forgotten("prefill", hanging)
        fault.measured["answered_s"] = round(await fault.load.until_answered(fault.at_s, placed=True), 2)
        assert fault.summary()["errors"] == []
        known = set(await fleet.fresh("decode"))
        fleet.processes("decode", await fleet.busiest("decode", at_least=1))[0].kill()
        killed_s = time.monotonic()

        async def replaced():
            return set(await fleet.fresh("decode")) - known

        with fault.load.paused():  # what starts has the cores to itself
            await seconds_until(replaced, 90, "decode waits for a prefill replica that hangs")
        fault.measured["decode_ready_s"] = round(time.monotonic() - killed_s, 1)
    assert fault.measured["placed_again_s"] <= 3.0


async def test_a_process_that_is_stopped_for_good_keeps_its_place_no_longer_than_its_health_is_asked(fleet):
    """What it was given, another one needs; `drain_s` is for those that have something to finish."""
    await fleet.until_whole()
    hanging, *_ = await fleet.fresh("decode")
    processes = fleet.processes("decode", hanging)
    processes[0].suspend()

    async def ended():
        return not any(map(lives, processes))

    ended_s = await seconds_until(ended, 75, "a process that answers nobody is waited for")
    tell("decode replica stopped for good", ended_s=ended_s, drain_s=100)
    await fleet.until_whole()
    await fleet.until_at_rest()


def lives(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
