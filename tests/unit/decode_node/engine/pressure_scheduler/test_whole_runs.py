"""From the first request to the last: with ample memory as vLLM, under pressure to everybody's end."""

import random

import pytest
from pressure_steps import LOW, MIDDLE, TOP, knows_steps

from decode_node.scheduler import CarryingScheduler

pytestmark = pytest.mark.slow


def test_with_ample_memory_the_steps_are_those_of_vllm(stepped):
    engines = [stepped(2000), stepped(2000, CarryingScheduler)]
    rng = random.Random(1)
    plan = [
        (f"r{i}", rng.randrange(5, 300), rng.randrange(1, 80), rng.choice([LOW, MIDDLE, TOP]))
        for i in range(40)
    ]
    for at in range(200):
        for engine in engines:
            if at % 3 == 0 and at // 3 < len(plan):
                name, prompt, tokens, tier = plan[at // 3]
                engine.add(name, prompt, tokens, tier=tier)
            engine.step()
    ours, vllms = [[output.num_scheduled_tokens for output in engine.outputs] for engine in engines]
    assert ours == vllms
    assert [list(one) for one in ours] == [list(one) for one in vllms], "in the same order"
    for engine in engines:
        engine.finish()
        assert not engine.preempted


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_all_end_once_with_all_their_tokens(stepped, seed):
    rng = random.Random(seed)
    engine = stepped(rng.choice([40, 60, 90]), max_num_seqs=rng.choice([4, 64]))
    knows_steps(engine, fixed_s=rng.choice([0.001, 0.02]), stream_s=rng.choice([1e-4, 0.005]), prompt_s=1e-4)
    for number in range(60):
        tpot_s = rng.choice([None, 0.01, 0.05])
        engine.add(
            f"r{number}",
            rng.randrange(1, 300),
            rng.randrange(1, 250),
            tier=rng.choice([LOW, MIDDLE, TOP]),
            tpot_s=tpot_s,
            tenant=rng.choice(["", "a"]),
        )
        for _ in range(rng.randrange(6)):
            engine.step()
    engine.finish()
    assert len(engine.finished) == 60
    scheduler = engine.scheduler
    assert not scheduler._book.accounts
    assert not scheduler._book.parked
    assert not scheduler._book.restoring
    assert not scheduler._book.paced
    assert not scheduler._book.untimed
    assert not scheduler._relief._chosen
    figures = scheduler._report.figures
    assert len(figures.preempted) == len(engine.preempted)
    assert len(figures.restored) <= len(figures.preempted)
