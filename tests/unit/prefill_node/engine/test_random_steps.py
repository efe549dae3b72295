"""Prefill's scheduler on vLLM's real one: whatever comes and is stopped, all prompts are computed and end."""

import random

import pytest
from prefill_steps import BOUNDARIES, PrefillSteps
from real_schedulers import BLOCK, Clock, build
from vllm.v1.request import RequestStatus

from prefill_node.board.messages import StopOrder
from prefill_node.engine.scheduler import SlackScheduler
from prefill_node.engine_setup import EngineSetup
from slo.preemption.types import Limits

pytestmark = pytest.mark.slow

CHUNK, WINDOW = 128, 64
RUNNERS = ["first", "second"]


@pytest.fixture
def stepped(model, monkeypatch):
    """Makes an engine that runs so many requests together; the second model runner knows no others."""

    def make(runner, together, blocks=400, *, window=0, chunk=0, limits=None, budget=2048):
        clock = Clock()
        monkeypatch.setattr("prefill_node.engine.scheduler.time", clock)
        monkeypatch.setattr("vllm.config.VllmConfig.use_v2_model_runner", runner == "second")
        limits = limits or Limits()
        setup = EngineSetup(mode="resume", limits=limits, arrival_wait_s=0.0, starvation_timeout_s=0.05)
        scheduler = build(
            SlackScheduler,
            model,
            blocks,
            max_num_seqs=together,
            chunk=chunk,
            window=window,
            budget=budget,
            additional=setup.encode(),
        )
        places = {"places": together} if runner == "second" else {}
        return PrefillSteps(scheduler, clock, window=window, **places)

    return make


def tokens(rng, count):
    return [rng.randrange(250) for _ in range(count)]


@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.parametrize("runner", RUNNERS)
def test_no_more_prompts_run_together_than_the_engine_may(stepped, runner, together):
    """Each of them comes between two chunks of all before it, and all have a little left."""
    engine, rng, sizes = stepped(runner, together), random.Random(1), []
    for number in range(together + 2):
        engine.add(f"job-{number}", tokens(rng, CHUNK + 30), due_s=60 - number, chunk=CHUNK)
        sizes.append(len(engine.step().num_scheduled_tokens))
    while engine.scheduler.requests:
        sizes.append(len(engine.step().num_scheduled_tokens))
    assert max(sizes) == together
    assert min(sizes) > 0, "somebody can run at any time"
    engine.finish()
    assert len(engine.finished) == together + 2


@pytest.mark.parametrize("runner", RUNNERS)
def test_nobody_joins_whom_a_step_cannot_take_whole(stepped, runner):
    """vLLM gives a step to those first that have started."""
    engine, rng = stepped(runner, 64, budget=256), random.Random(1)
    engine.add("long", tokens(rng, 1756))
    assert engine.step().num_scheduled_tokens == {"long": 256}
    engine.add("first", tokens(rng, 100), due_s=60)
    engine.add("second", tokens(rng, 150), due_s=61)
    assert engine.step().num_scheduled_tokens == {"first": 100, "second": 150}
    engine.finish()


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_prompt_whose_window_lacks_room_for_a_longer_chunk_loses_nothing(stepped, runner):
    """What it lacks for its last tokens in all is free, but not what it lacks of its window at once."""
    engine, rng = stepped(runner, 64, window=WINDOW, budget=512), random.Random(1)
    engine.add("long", tokens(rng, 8 * CHUNK), due_s=60, chunk=CHUNK)
    memory = engine.scheduler.kv_cache_manager
    for _ in range(6):
        engine.step()
    request = engine.scheduler.requests["long"]
    _, missing = memory.blocks_of(request)
    pool = memory.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - missing)
    engine.add("next", tokens(rng, 1000), due_s=61, chunk=4 * CHUNK)
    assert (request.num_computed_tokens, missing) == (6 * CHUNK, 2 * CHUNK // BLOCK)
    output = engine.step()
    assert request.num_preemptions == 0
    assert CHUNK < output.num_scheduled_tokens["long"] < 2 * CHUNK
    pool.free_blocks(taken)
    engine.finish()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("runner", RUNNERS)
def test_whatever_comes_each_ends_once_with_what_was_computed_of_it(stepped, runner, seed):
    """Chunks, shared prefixes, little memory, limits of suspension, stops that keep nothing, aborts."""
    rng = random.Random(seed)
    together, window, chunk = rng.choice([1, 2, 4, 64]), rng.choice([0, 0, WINDOW]), rng.choice([0, CHUNK])
    blocks = rng.choice([70, 100, 180]) * (2 if window else 1)
    longest_s, most_bytes = rng.choice([0.005, 10.0]), rng.choice([10_000, 2**31])
    limits = Limits(max_suspended_s=longest_s, max_suspended_bytes=most_bytes)
    engine = stepped(runner, together, blocks, window=window, chunk=chunk, limits=limits)
    scheduler, stop_part = engine.scheduler, rng.choice([0.1, 0.4, 0.7])
    bound = rng.choice([None, CHUNK])
    prefixes = [tokens(rng, 600) for _ in range(3)]
    added = []

    def arrive():
        length = rng.choice([rng.randint(1, 100), rng.randint(100, 900)])
        common = prefixes[rng.randrange(3)][: rng.choice([0, rng.randint(1, length)])]
        name = f"job-{len(added)}"
        engine.add(
            name,
            common + tokens(rng, length - len(common)),
            due_s=rng.choice([None, 0.001, 0.02, 0.5, 60.0]),
            weight=rng.choice([1.0, 2.0, 4.0]),
            tier=rng.choice(["premium", "standard", "background"]),
            chunk=bound,
        )
        added.append(name)

    def abort():
        if scheduler.requests and rng.random() < 0.02:
            name = rng.choice([*scheduler.requests])
            scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
            engine.aborted.append(name)

    scheduler._bulletin.stop_order = lambda step: StopOrder(
        step, rng.choice(["", "never", *scheduler.requests]), "rescue", engine.clock.now_s
    )
    for _ in range(80):
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            if len(scheduler.requests) < 12:
                arrive()
        stops_at = rng.randrange(BOUNDARIES) if rng.random() < stop_part else None
        output = engine.step(stops_at, meanwhile=abort)
        assert len(output.num_scheduled_tokens) <= together
    engine.finish()
    assert engine.restored
    assert sorted([*engine.finished, *engine.aborted]) == sorted(added)
