"""A decode engine that ends streams for good gives back all that they had, and answers the others as ever.

Room for eleven blocks of 128 tokens, and for 24 in host memory.
"""

import pytest
from decode_engine import BLOCK, OPTIONS, DecodeEngine, asked, check_same, crowd, swapping
from engines import random_prompt

from benchmarks.harness.offline_engine import stepped_engine
from decode_node.engine.setup import DecodeSetup
from decode_node.requests.dropping import DROPPED
from slo.decode.victims import IMMUNE_AFTER, HostRoom

pytestmark = [pytest.mark.slow, pytest.mark.long]

LIMIT_S = 300.0
LOW = {"tier": "background", "may_drop": True}


@pytest.fixture(scope="module")
def decode(models):
    setup = DecodeSetup(drop_after_s=LIMIT_S).encode()
    with stepped_engine(models("llama"), **OPTIONS, **swapping(24), additional_config=setup) as llm:
        engine = DecodeEngine(llm)
        engine.llm.generate([[1, 2, 3]], use_tqdm=False)  # its workers say how fast they are
        swaps = engine.scheduler._swaps
        # A tiny model computes again as fast as blocks are moved; a larger one does not.
        engine.scheduler._relief._host = lambda: HostRoom(
            swaps.free_slots, 0.0, engine.scheduler._view.block_tokens
        )
        yield engine


def named(decode, name):
    """What the engine calls it."""
    return next(one for one in decode.scheduler.requests if one.startswith(f"{name}-"))


def check_dropped(decode, name):
    assert (decode.answers[name].finish_reason, decode.answers[name].stop_reason) == ("error", DROPPED)
    assert not [one for one in decode.scheduler.requests if one.startswith(f"{name}-")]


def test_one_that_waits_in_host_memory_for_too_long_leaves_nothing_there(decode):
    expected = decode.alone(crowd())
    decode.forget()
    for name, (arguments, options) in crowd(**LOW).items():
        decode.add(name, *arguments, **options)
    scheduler = decode.scheduler
    decode.step_until(lambda: any(scheduler._swaps.tokens_of(name) for name in scheduler.requests))
    gone = next(name for name in scheduler.requests if scheduler._swaps.tokens_of(name))
    counted = len(scheduler._report.figures.preempted)
    scheduler._book.accounts[gone].parked_s -= LIMIT_S
    admitted, scheduler._admitted = scheduler._admitted, lambda now_s: []
    decode.step()
    scheduler._admitted = admitted
    dropped = [one for one in scheduler._report.figures.preempted[counted:] if one[-1] == "drop"]
    assert dropped == [("background", "parked", "drop")]
    assert not scheduler._swaps.tokens_of(gone)
    name = gone.rpartition("-")[0]
    check_dropped(decode, name)
    decode.finish()
    assert scheduler._swaps.used == 0
    assert len(decode.answers) == 6, "each has ended once"
    check_same({other: answer for other, answer in expected.items() if other != name}, decode.answers)


def test_one_at_its_limit_makes_way_for_higher_tiers(decode):
    tops = {
        f"top{seed}": asked(random_prompt(2 * BLOCK - 6, seed=seed), 200, tier="premium") for seed in (1, 2)
    }
    expected = decode.alone(tops)
    decode.forget()
    decode.add("low", random_prompt(3 * BLOCK - 4, seed=3), 400, **LOW)
    for name, (arguments, options) in tops.items():
        decode.add(name, *arguments, **options)
    scheduler = decode.scheduler
    scheduler._book.accounts[named(decode, "low")].preemptions_before = IMMUNE_AFTER
    counted = len(scheduler._report.figures.preempted)
    decode.finish()
    assert scheduler._report.figures.preempted[counted:] == [("background", "immune", "drop")]
    check_dropped(decode, "low")
    assert 0 < len(decode.answers["low"].token_ids) < 400
    assert not decode.preempted
    check_same(expected, decode.answers)
