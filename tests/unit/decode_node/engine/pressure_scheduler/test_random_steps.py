"""Whatever clients, the prefill tier and memory do, blocks hold what their requests take them to hold.

Unlike in `test_whole_runs` there is a connector: KV is pulled, or fails to be, goes to host memory and back;
clients go, streams leave and come back, or are dropped; prompts begin alike.
"""

import random

import pytest
from pressed_engine import Job, PressedEngine
from pressure_steps import LOW, MIDDLE, TOP, expects, knows_steps
from real_schedulers import BLOCK_BYTES, Clock, build

from decode_node.engine.pressure_scheduler import PressureScheduler
from decode_node.engine.setup import DecodeSetup
from decode_node.requests.dropping import MAY_DROP_XARG
from decode_node.requests.leaving import MAY_LEAVE_XARG
from kv_transfer.connector import KVRole, kv_transfer_config
from slo.request import TENANT_XARG, TIER_XARG, TPOT_XARG

pytestmark = pytest.mark.slow

SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 46))]
JOBS = 60


@pytest.fixture
def pressed(tiny_model, monkeypatch):
    """Makes an engine of random sizes."""

    def make(rng):
        clock = Clock()
        monkeypatch.setattr("decode_node.engine.pressure_scheduler.time", clock)
        setup = DecodeSetup(drop_after_s=rng.choice([None, 0.02, 1.0, 300.0]))
        slots = rng.choice([0, 20, 100])
        scheduler = build(
            PressureScheduler,
            tiny_model,
            rng.choice([40, 60, 90]),
            max_num_seqs=rng.choice([4, 64]),
            chunk=rng.choice([16, 64, 0]),
            additional=setup.encode(),
            transfer=kv_transfer_config(KVRole.DECODE, "cpu", 30, swap_bytes=slots * BLOCK_BYTES),
        )
        engine = PressedEngine(scheduler, clock, rng)
        knows_steps(
            engine,
            fixed_s=rng.choice([0.001, 0.02]),
            stream_s=rng.choice([1e-4, 0.005]),
            prompt_s=rng.choice([1e-4, 1e-3]),
        )
        if rng.random() < 0.8:
            expects(engine, rng.choice([1, 100]))
        return engine

    return make


def a_job(rng, number, shared):
    """Some of them begin with the same tokens."""
    length, first = rng.randrange(1, 300), 1000 * (number + 1)
    common = shared[: rng.choice([0, rng.randint(1, length)])]
    may = {MAY_LEAVE_XARG: rng.random() < 0.6, MAY_DROP_XARG: rng.random() < 0.3}
    objective = {TPOT_XARG: rng.choice([0.01, 0.05])} if rng.random() < 0.5 else {}
    whose = {TIER_XARG: rng.choice([LOW, MIDDLE, TOP]), TENANT_XARG: rng.choice(["", "a"])}
    prompt = [*common, *range(first, first + length - len(common))]
    return Job(f"job {number}", prompt, rng.randrange(2, 250), {**may, **objective, **whose})


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_nobody_gets_anothers_kv_and_nothing_is_left(pressed, seed):
    rng = random.Random(seed)
    engine = pressed(rng)
    shared = [*range(900_000, 900_300)]

    def somebody_goes():
        """Most of them while their KV is on its way: their blocks are written to after that."""
        pulling = engine.pulling()
        if rng.random() < (0.03 if pulling else 0.001) and (waiting := pulling or engine.waiting()):
            engine.goes(rng.choice(waiting))

    for number in range(JOBS):
        engine.arrives(a_job(rng, number, shared), is_prefilled=rng.random() < 0.8)
        for _ in range(rng.randrange(6)):
            somebody_goes()
            engine.step(meanwhile=somebody_goes)
        if rng.random() < 0.1:
            engine.forgets()
    engine.finish(meanwhile=somebody_goes)
    assert engine.resumed
