"""Who may wake the governor, and how often."""

import asyncio
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from prefill_node.board.doorbell import Doorbell, Doorkeeper

NOBODY = 65534
RING = r"""
import os, socket, sys
os.setuid(int(sys.argv[2]))
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"!", "\0" + sys.argv[1])
"""


@pytest.fixture
def board(tmp_path):
    return Path(f"slackserve-board-{tmp_path.name}-{os.getpid()}")


@pytest.fixture
async def heard(board):
    times = []
    keeper = Doorkeeper(board, lambda: times.append(time.monotonic()))
    yield times
    keeper.close()


async def test_a_ring_is_heard(board, heard):
    bell = Doorbell(board)
    bell.ring()
    await asyncio.sleep(0.05)
    assert len(heard) == 1
    bell.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ring as somebody else")
async def test_another_users_ring_is_not(board, heard):
    for user, rings in ((NOBODY, 0), (0, 1)):
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", RING, board.name, f"{user}")
        assert await process.wait() == 0
        await asyncio.sleep(0.05)
        assert len(heard) == rings


async def test_a_flood_leaves_the_loop_its_time(board, heard):
    """Somebody in the same network namespace rings without a pause."""
    stop = threading.Event()

    def flood():
        bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        while not stop.is_set():
            bell.sendto(b"!", f"\0{board.name}")
        bell.close()

    thread = threading.Thread(target=flood)
    thread.start()
    started_s, turns = time.monotonic(), 0
    while time.monotonic() - started_s < 0.5:
        await asyncio.sleep(0)
        turns += 1
    stop.set()
    await asyncio.to_thread(thread.join)
    during = [at_s for at_s in heard if at_s - started_s < 0.5]
    assert 1 <= len(during) <= 110, "at most once in five milliseconds"
    assert turns > 500
