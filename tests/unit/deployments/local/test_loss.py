"""When `slackserve serve` gives up a Ray that has ended, or that does not let it stop."""

import errno
import fcntl
import io
import math
import mmap
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.live import Live

from deployments.local import loss

HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"
"""What has a terminal hide its cursor, and show it."""


class EndedError(Exception):
    """Nothing comes after it, as after the end of a process."""


class Stuck(SimpleNamespace):
    """A deployment that does not end by itself."""

    @property
    def is_stopping(self):
        """Whether somebody stops it, by the clock."""
        return self.stopping()


@pytest.fixture
def end(monkeypatch):
    """Ends what loses parts of Ray or is stopped, by a clock; gives when all is killed, and the code."""
    clock = SimpleNamespace(now_s=0.0)

    def sleep(seconds):
        clock.now_s += seconds

    def end_once(gcs_s=math.inf, raylet_s=math.inf, stop_s=math.inf, console=None, stopping_s=math.inf):
        stop = SimpleNamespace(is_set=lambda: clock.now_s >= stop_s)
        stop.wait = lambda seconds: stop.is_set() or sleep(seconds) or stop.is_set()
        deployment = Stuck(
            is_lost=lambda: clock.now_s >= min(gcs_s, raylet_s),
            can_answer=lambda: clock.now_s < raylet_s,
            stopping=lambda: clock.now_s >= stopping_s,
            kill=lambda: killed.append(clock.now_s) or 3,
            logs="/elsewhere/logs",
        )
        killed = []
        try:
            loss.end_if_stuck(deployment, stop, console or Console(file=io.StringIO()))
        except EndedError as ended:
            return *killed, *ended.args
        assert not killed
        return None

    def end_at_once(code):
        raise EndedError(code)

    monkeypatch.setattr(loss, "end_at_once", end_at_once)
    monkeypatch.setattr(loss, "end_within", lambda *_: None)
    monkeypatch.setattr(loss, "time", SimpleNamespace(monotonic=lambda: clock.now_s, sleep=sleep))
    return end_once


@pytest.mark.parametrize(
    ("lost", "earliest_s", "latest_s"),
    [
        ({"gcs_s": 100.0}, 145.0, 146.5),
        ({"raylet_s": 100.0}, 100.0, 101.5),
        ({"gcs_s": 100.0, "raylet_s": 110.0}, 110.0, 111.5),
    ],
)
def test_answers_go_on_for_a_while_without_the_gcs_but_not_without_the_raylet(
    end, lost, earliest_s, latest_s
):
    killed_s, code = end(**lost)
    assert earliest_s <= killed_s <= latest_s
    assert code == 2


def test_a_signal_to_all_processes_is_a_stop_also_where_the_raylet_ends_before_it_comes(end):
    killed_s, code = end(raylet_s=100.0, stop_s=100.5)
    assert killed_s >= 110.0
    assert code == 0


def test_it_says_where_this_ray_has_logged(end):
    said = io.StringIO()
    end(raylet_s=1.0, console=Console(file=said, width=200))
    assert said.getvalue().splitlines() == [
        "Ray has ended; its logs are in /elsewhere/logs.",
        "Stopped; 3 processes had to be killed.",
    ]


class Closed(io.StringIO):
    """What a terminal is to those who write when it is there no more."""

    def write(self, _):
        raise OSError(errno.EIO, "Input/output error")


def test_where_nobody_can_be_told_all_is_killed_as_well(end):
    killed_s, code = end(raylet_s=100.0, console=Console(file=Closed()))
    assert killed_s <= 101.5
    assert code == 2


NOBODY_READS = """
import threading
from types import SimpleNamespace
from rich.console import Console
from deployments.local import loss
loss._SAY_S = 0.2
lost = SimpleNamespace(is_lost=lambda: True, can_answer=lambda: False, is_stopping=False, logs="")
lost.kill = lambda: 0
given = lost, threading.Event(), (console := Console(stderr=True))
threading.Thread(target=loss.end_if_stuck, args=given, daemon=True).start()
console.print("something")
"""


def test_it_ends_also_where_nobody_reads_what_it_says():
    ours, its = os.pipe()
    try:
        os.write(its, b"x" * fcntl.fcntl(its, fcntl.F_SETPIPE_SZ, mmap.PAGESIZE))  # it takes no more
        ended = subprocess.run([sys.executable, "-c", NOBODY_READS], stderr=its, check=False, timeout=30)
    finally:
        os.close(ours)
        os.close(its)
    assert ended.returncode == 2


def test_a_start_that_is_ended_while_it_is_drawn_leaves_the_terminal_its_cursor(end):
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True)
    live = Live("starting", console=console, auto_refresh=False)
    live.start()
    try:
        end(stop_s=1.0, console=console)
        assert drawn.getvalue().rindex(SHOWN) > drawn.getvalue().rindex(HIDDEN)
    finally:
        live.stop()


def test_a_start_that_fails_as_ray_has_ended_ends_by_itself(end):
    """What stops it ends the raylet, too, and tells what has failed."""
    assert end(gcs_s=100.0, raylet_s=103.0, stopping_s=102.0) is None
