"""Orders stops from a process of its own, through the board, at moments that it is told: the governor's part.

Run as a program with the path of a board, it reads `STEP DELAY_S` from each line of its input, waits until
the step has begun and then for the delay, orders the stop, and answers with when it did (CLOCK_MONOTONIC).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from prefill_node.board.board import Board
from prefill_node.board.messages import StopOrder

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

_SPIN_S = 0.0005
_GIVE_UP_S = 60.0


class Signaller:
    """The process, as seen by the one that measures."""

    def __init__(self, board: Board) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu.signaller", str(board.path)]
        self._process = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._out.readline()

    def order(self, step_id: int, delay_s: float) -> None:
        """Have a step stopped so long after it has reached its first boundary."""
        self._in.write(f"{step_id} {delay_s}\n")
        self._in.flush()

    def ordered_s(self) -> float:
        """When the last order was written on the board; waits for it."""
        return float(self._out.readline())

    def __enter__(self) -> Self:
        """It listens."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """It ends with its input."""
        self._in.close()
        self._process.wait(timeout=_GIVE_UP_S)


def main() -> None:
    """Serve orders until the input ends."""
    with Board.attach(Path(sys.argv[1])) as board:
        print("ready", flush=True)
        for line in sys.stdin:
            step, delay = line.split()
            _await_step(board, int(step))
            _sleep_exactly(float(delay))
            now_s = time.monotonic()
            board.order_stop(StopOrder(int(step), "urgent", "rescue", now_s))
            print(now_s, flush=True)


def _await_step(board: Board, step_id: int) -> None:
    until_s = time.monotonic() + _GIVE_UP_S
    while board.progress(0)[0] < step_id:
        if time.monotonic() > until_s:
            raise TimeoutError(f"step {step_id} has not begun")
        time.sleep(0)


def _sleep_exactly(seconds: float) -> None:
    until_s = time.monotonic() + seconds
    time.sleep(max(0.0, seconds - _SPIN_S))
    while time.monotonic() < until_s:
        pass


if __name__ == "__main__":
    main()
