"""A request that the engine drops for want of memory, and who may be dropped."""

import asyncio

import pytest
from played_replicas import ANSWER, DROPS, FIRST, SECOND, STREAMED, WHOLE, A, Counts, Play, serve
from waiting import until

from decode_node.carrying import PRESSURE_SCHEDULER, SCHEDULER
from decode_node.requests.dropping import MAY_DROP_XARG
from decode_node.requests.local_prefills import LocalPrefills, turns_by_tier
from slo.tiers import BACKGROUND, PREMIUM, STANDARD

LOW = {"tier": BACKGROUND, "ttft_budget_s": None, "droppable": {BACKGROUND}}


@pytest.mark.parametrize(
    ("plays", "streamed"),
    [
        ([[SECOND], (DROPS, [])], STREAMED[:2]),
        ([(DROPS, [SECOND])], STREAMED[:2]),
        ([(DROPS, [])], STREAMED[:1]),
    ],
    ids=["later", "with a token", "at once"],
)
async def test_one_that_the_engine_drops_ends_with_our_error_after_what_it_has(plays, streamed):
    counts = Counts()
    steps = Play({A: plays}, scheduler=PRESSURE_SCHEDULER)
    *pieces, refused = await serve(steps, counts, leaves=True, **LOW)
    assert pieces == streamed, "no [DONE]"
    assert (refused.error.code, refused.error.type) == (429, "dropped")
    assert "promised nothing" in refused.error.message
    (whole,) = await serve(Play({A: plays}), request=WHOLE, **LOW)
    assert (whole.error.code, whole.error.type) == (429, "dropped")
    assert steps.asked == [], "it is not placed again"
    assert counts == {}


async def test_one_that_is_dropped_before_its_kv_was_pulled_releases_it():
    steps = Play({A: [(DROPS, [])]})
    await serve(steps, **LOW)
    assert steps.released == [(A, "job")]


async def test_one_whose_prompt_the_engine_computes_may_be_dropped_too():
    steps, local = Play({}), LocalPrefills(1)
    steps.at_home = [[FIRST], (DROPS, [])]
    here = {"prefill_replica": None, "local_prefill": "cheaper_on_decode", "local": local}
    *pieces, refused = await serve(steps, **here, **LOW)
    assert pieces == STREAMED[:1]
    assert (refused.error.code, refused.error.type) == (429, "dropped")
    assert (local.computing, local.outstanding.total()) == (0, 0)


@pytest.mark.parametrize(("scheduler", "waits"), [(PRESSURE_SCHEDULER, False), (SCHEDULER, True)])
async def test_a_prompt_that_the_engine_holds_back_keeps_no_other_tier_from_being_computed(scheduler, waits):
    held, other = [Play({}, scheduler=scheduler) for _ in range(2)]
    held.at_home, other.at_home = [None], ANSWER
    local = LocalPrefills(1, by_tier=turns_by_tier(held._engine_client.vllm_config))
    here = {"prefill_replica": None, "local_prefill": "no_prefill_replica", "local": local}
    low = asyncio.create_task(serve(held, tier=BACKGROUND, **here))
    await until(lambda: held.given)
    top = asyncio.create_task(serve(other, tier=PREMIUM, **here))
    same = asyncio.create_task(serve(peer := Play({}, scheduler=scheduler), tier=BACKGROUND, **here))
    await asyncio.sleep(0.05)
    assert local.outstanding.total() == (3 if waits else 2)
    assert not peer.given
    if not waits:
        assert await top == STREAMED
    for task in (low, top, same):
        task.cancel()
    await asyncio.gather(low, top, same, return_exceptions=True)
    assert (local.computing, local.outstanding.total()) == (0, 0)


async def test_the_engine_is_told_who_may_be_dropped():
    for given, expected in (
        (LOW, True),
        ({**LOW, "droppable": ()}, False),
        ({**LOW, "tier": STANDARD}, False),
        ({**LOW, "ttft_budget_s": 9.0}, False),
        ({**LOW, "tpot_s": 0.5}, False),
    ):
        steps = Play({A: ANSWER})
        assert await serve(steps, **given) == STREAMED
        assert bool(steps.given[0].get(MAY_DROP_XARG)) is expected, given
