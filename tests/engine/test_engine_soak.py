"""Thousands of arrivals, preemptions and aborts in random order: each request ends once, nothing is left."""

import random
import threading
import time

import psutil
import pytest
from engines import COMPILED, engine, random_prompt

from prefill_node.board.events import Resumed, Stopped
from prefill_node.board.messages import StopOrder

REQUESTS = 4000
"""Memory grows over the first 2,000, and then hardly: after each thousand of 7,000 the workers of an eager
engine had 2.23, 2.51, 2.62, 2.63, 2.66, 2.67 and 2.68 GB."""
MOST_WAITING = 12


class Troublemaker(threading.Thread):
    """Orders stops at random moments: of running steps and steps long gone, for anybody and nobody."""

    def __init__(self, board, seed):
        super().__init__(daemon=True)
        self._board = board
        self._rng = random.Random(seed)
        self.names = ["nobody"]
        self.over = threading.Event()

    def run(self):
        while not self.over.wait(self._rng.expovariate(1 / 0.02)):
            view = self._board.view()
            if view is not None and view.step is not None:
                stale = self._rng.random() < 0.2
                step = max(1, view.step.step_id - self._rng.randint(1, 5)) if stale else view.step.step_id
                beneficiary = self._rng.choice(["", "never-comes", *self.names[-MOST_WAITING:]])
                self._board.order_stop(StopOrder(step, beneficiary, "rescue", time.monotonic()))


def memory_of_workers():
    return sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, COMPILED], ids=["eager", "compiled"])
def test_random_arrivals_preemptions_and_aborts(models, options):
    rng = random.Random(11)
    worker = "prefill_node.worker.cpu.PreemptibleCPUWorker"
    with engine(models("llama"), tensor_parallel_size=2, worker=worker, **options) as running:
        trouble = Troublemaker(running.board, seed=12)
        trouble.start()
        ends, aborted, waiting, stops, resumes, memory = [], set(), set(), 0, 0, []
        for number in range(REQUESTS):
            name = f"job-{number}"
            deadline_s = rng.choice([None, 0.05, 1.0, 60.0])
            running.add(name, random_prompt(rng.randint(16, 600)), deadline_s=deadline_s)
            waiting.add(name)
            trouble.names.append(name)
            while len(waiting) > rng.randint(0, MOST_WAITING):
                if rng.random() < 0.1:
                    victim = rng.choice(sorted(waiting))
                    running.abort(victim)
                    aborted.add(victim)
                    waiting.discard(victim)
                    continue
                ended = running.step()
                ends += ended
                waiting.difference_update(ended)
            notices = running.notices()
            stops += sum(isinstance(notice, Stopped) for notice in notices)
            resumes += sum(isinstance(notice, Resumed) for notice in notices)
            if number in (REQUESTS // 2, REQUESTS - 1):
                memory.append(memory_of_workers())
        running.finish()
        ends += [name for name in running.answers if name not in ends]
        trouble.over.set()
        trouble.join()
        assert len(ends) == len(set(ends)), "a request ended twice"
        assert set(ends) | aborted == {f"job-{number}" for number in range(REQUESTS)}
        assert not set(ends) & aborted
        assert stops > REQUESTS // 10, f"only {stops} stops"
        assert resumes > REQUESTS // 20, f"only {resumes} resumes"
        assert memory[1] < memory[0] * 1.1, f"memory grew from {memory[0]} to {memory[1]} bytes"
        running.check_at_rest()
