"""KV blocks in host memory: they come back bit for bit, and nobody notices but the clock.

Room for eleven blocks of 128 tokens, and for 24 in host memory.
"""

import pytest
import torch
from decode_engine import BLOCK, OPTIONS, DecodeEngine, asked, check_same, crowd, swapping
from engines import random_prompt
from vllm.distributed.kv_transfer import get_kv_transfer_group

from benchmarks.harness.offline_engine import stepped_engine
from slo.decode.victims import HostRoom, TakenBy

pytestmark = [pytest.mark.slow, pytest.mark.long]

SLOTS = 24


class Watch:
    """Compares what comes back with what went out, in the engine's own tensors."""

    def __init__(self, host_blocks):
        self.seen, self.compared, self.host_blocks = {}, 0, host_blocks
        self.take, self.give = host_blocks.take, host_blocks.give
        host_blocks.take, host_blocks.give = self.taking, self.giving

    def contents(self, block):
        return [layer.engine[block].clone() for layer in self.host_blocks._layers]

    def taking(self, moves):
        self.seen |= {slot: self.contents(block) for block, slot in moves}
        self.take(moves)

    def giving(self, moves):
        self.give(moves)
        for block, slot in moves:
            for before, after in zip(self.seen.pop(slot), self.contents(block), strict=True):
                assert torch.equal(before.view(torch.int32), after.view(torch.int32))
            self.compared += 1


@pytest.fixture(scope="module")
def decode(models):
    with stepped_engine(models("llama"), **OPTIONS, **swapping(SLOTS)) as llm:
        engine = DecodeEngine(llm)
        engine.watch = Watch(get_kv_transfer_group()._host_blocks)
        engine.llm.generate([[1, 2, 3]], use_tqdm=False)  # its workers say how fast they are
        assert engine.scheduler._swaps.slots == SLOTS
        assert 0 < engine.scheduler._swaps.block_s < 0.1
        # A tiny model computes again as fast as blocks are moved; a larger one does not.
        engine.scheduler._relief._host = lambda: HostRoom(
            engine.scheduler._swaps.free_slots, 0.0, engine.scheduler._view.block_tokens
        )
        yield engine


def swapped(decode):
    return [name for name in decode.scheduler.requests if decode.scheduler._swaps.tokens_of(name)]


def test_what_comes_back_is_what_went_out_bit_for_bit(decode):
    expected = decode.alone(crowd())
    compared, before = decode.watch.compared, len(decode.scheduler._report.figures.preempted)
    found = decode.together(crowd())
    check_same(expected, found)
    assert decode.watch.compared > compared
    assert {by for *_, by in decode.scheduler._report.figures.preempted[before:]} == {TakenBy.SWAP}
    assert decode.scheduler._report.figures.recomputed_tokens == 0


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.9, "seed": 7}, {"presence_penalty": 1.5, "repetition_penalty": 1.3}],
    ids=["seed", "penalties"],
)
def test_the_same_tokens_are_sampled(decode, sampling):
    expected = decode.alone(crowd(**sampling))
    found = decode.together(crowd(**sampling))
    assert decode.preempted
    for name, answer in expected.items():
        assert found[name].token_ids == answer.token_ids, name


def test_blocks_that_are_still_cached_are_not_moved_back(decode):
    prefix = random_prompt(2 * BLOCK, seed=9)
    requests = {f"{seed}": asked(prefix + random_prompt(60 + seed, seed=seed), 200) for seed in range(5)}
    expected = decode.alone(requests)
    before = decode.scheduler._swaps.figures
    before = before.out, before.back
    found = decode.together(requests)
    check_same(expected, found)
    out, back = decode.scheduler._swaps.figures.out, decode.scheduler._swaps.figures.back
    assert out - before[0] > back - before[1] > 0, "the shared prefix stays in the engine"


def test_one_whose_kv_goes_out_twice_comes_back_twice(decode):
    requests = {
        f"{length}": asked(random_prompt(length, seed=length), 400)
        for length in (100, 120, 140, 160, 180, 200)
    }
    expected = decode.alone(requests)
    found = decode.together(requests)
    assert max(decode.preempted.count(name) for name in decode.preempted) > 1
    check_same(expected, found)


def test_one_that_leaves_while_its_kv_is_in_host_memory_leaves_nothing_there(decode):
    decode.forget()
    for name, (arguments, options) in crowd().items():
        decode.add(name, *arguments, **options)
    decode.step_until(lambda: swapped(decode))
    gone = swapped(decode)[0]
    assert decode.scheduler._swaps.used > 0
    decode.llm.llm_engine.abort_request([gone.rpartition("-")[0]])
    assert gone not in decode.scheduler.requests
    decode.finish()
    assert len(decode.answers) == 5


def test_a_reset_of_the_cache_forgets_host_memory_too(decode):
    expected = decode.alone(crowd())
    decode.forget()
    for name, (arguments, options) in crowd().items():
        decode.add(name, *arguments, **options)
    decode.step_until(lambda: swapped(decode))
    compared = decode.watch.compared
    assert decode.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not swapped(decode)
    decode.step_until(lambda: decode.scheduler.running)
    assert decode.watch.compared == compared, "nothing from before came back"
    decode.finish()
    check_same(expected, decode.answers)
