"""What a real engine tells the governor of its classes."""

import pytest
from engines import engine, random_prompt

from prefill_node.engine_setup import EngineSetup

LONG = random_prompt(700, seed=1)
SHORT = random_prompt(64, seed=3)


def test_what_the_classes_have_missed_stands_on_the_board(models):
    setup = EngineSetup(mode="resume", targets={"chat": 0.9, "files": 0.99})
    with engine(models("llama"), setup=setup) as running:
        running.add("met", SHORT, deadline_s=60, tier="chat")
        running.finish()
        running.add("late", LONG, deadline_s=0, tier="files")
        running.finish()
        running.add("next", SHORT, deadline_s=60, tier="chat")
        running.step()
        targets = running.board.view().targets
        assert targets.allowed == pytest.approx({"chat": 0.1, "files": 0.01})
        counts = targets.counts
        assert (counts["chat"].missed, counts["files"].missed) == pytest.approx((0, 1), abs=0.2)
        assert counts["chat"].ended > 0.8
        assert counts["files"].work_s > 0
