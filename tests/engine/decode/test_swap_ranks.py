"""KV blocks in host memory with tensor parallelism: each rank has its own part of them there."""

import pytest
from decode_engine import BLOCK, OPTIONS, DecodeEngine, check_same, crowd, swapping

from benchmarks.harness.offline_engine import offline_engine
from slo.decode.victims import HostRoom, TakenBy

pytestmark = [pytest.mark.slow, pytest.mark.long]

SLOTS = 24


def test_several_ranks_each_move_their_own_part(models):
    setting = OPTIONS | {"additional_config": {}} | swapping(SLOTS)
    with offline_engine(models("llama"), setting.pop("worker_cls"), ranks=2, **setting) as (llm, _):
        engine = DecodeEngine(llm)
        engine.llm.generate([[1, 2, 3]], use_tqdm=False)
        assert engine.scheduler._swaps.slots == SLOTS, "both halves of so many blocks"
        engine.scheduler._relief._host = lambda: HostRoom(engine.scheduler._swaps.free_slots, 0.0, BLOCK)
        expected = engine.alone(crowd())
        found = engine.together(crowd())
        check_same(expected, found)
        assert engine.taken_by() == {TakenBy.SWAP}
