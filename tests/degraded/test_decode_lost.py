"""Decode replicas are lost while answers come from them: the answers go on on the other one.

16 clients, half of them streaming, chat and text, greedy and with a seed.
"""

import asyncio
import contextlib
import time

import psutil
import pytest
from fleet import tell
from long_answers import LongAnswer, ask
from processes import of_kind
from serving import METRICS_EVERY_S
from waiting import seconds_until

pytestmark = [pytest.mark.e2e, pytest.mark.long]

CLIENTS = 16
TOKENS = 300


async def all_ask(http, answers):
    async with asyncio.TaskGroup() as group:
        for number, answer in enumerate(answers):
            group.create_task(ask(http, number, TOKENS, answer))


@pytest.fixture(scope="module")
def expected():
    """The answers when nothing fails, once they are known."""
    return []


async def undisturbed(fleet, expected):
    await fleet.until_whole()
    if not expected:
        expected += [LongAnswer() for _ in range(CLIENTS)]
        async with fleet.deployment.http() as http:
            await all_ask(http, expected)
        assert sum(len(one.text) >= TOKENS for one in expected) >= 4
    await fleet.until_at_rest()
    return expected


async def counted(fleet, name, **labels):
    return await asyncio.to_thread(fleet.deployment.metric, name, **labels)


async def settled(fleet):
    """How many requests were finished, once their processes have exported all of them."""
    before, now = -1.0, await counted(fleet, "slackserve_requests_total", outcome="finished")
    while now != before:
        await asyncio.sleep(2 * METRICS_EVERY_S)
        before, now = now, await counted(fleet, "slackserve_requests_total", outcome="finished")
    return now


async def lose(fleet, expected, fault, *, begun):
    """Ask with all clients, have one decode replica fail, and compare the answers with the undisturbed.

    Args:
        fault: Called with the processes of the decode replica.
        begun: How many tokens every stream has by then.
    """
    expected = await undisturbed(fleet, expected)
    before = await settled(fleet)
    answers = [LongAnswer() for _ in range(CLIENTS)]
    async with fleet.deployment.http() as http:
        asking = asyncio.create_task(all_ask(http, answers))

        async def have_begun():
            busy = [one["running"] for one in (await fleet.replicas("decode")).values()]
            return min(busy, default=0) >= 4 and all(len(one.token_ids) >= begun for one in answers[::2])

        await seconds_until(have_begun, 30, "not every stream has begun")
        lost = await fleet.busiest("decode")
        processes = fleet.processes("decode", lost)
        fault(processes)
        lost_s = time.monotonic()
        await asking
    streams = answers[::2]
    gap_s = max(one.gap_s for one in streams)
    first_s, undisturbed_s = (
        max(one.first_s - one.started_s for one in each[::2]) for each in (answers, expected)
    )
    measured = {
        "longest_gap_s": round(gap_s, 2),
        "undisturbed_s": round(max(one.gap_s for one in expected[::2]), 2),
        "slowest_first_token_s": round(first_s, 2),
        "undisturbed_first_token_s": round(undisturbed_s, 2),
        "all_ended_s": round(time.monotonic() - lost_s, 2),
    }
    for process in processes:  # what is stopped goes on, and does no harm
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    for number, (answer, other) in enumerate(zip(answers, expected, strict=True)):
        assert answer.content == other.content, f"request {number}"
        assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        assert len(answer.created) == 1
    await fleet.until_whole()
    await fleet.until_at_rest()
    assert await settled(fleet) == before + CLIENTS
    when = "in mid-stream" if begun else "before the first token"
    tell(f"decode {fault.__name__} {when}", answers=len(answers), **measured)
    return gap_s, first_s, undisturbed_s


def engine_killed(processes):
    next(of_kind("engine", processes)).kill()


def engine_stopped(processes):
    next(of_kind("engine", processes)).suspend()


def replica_killed(processes):
    processes[0].kill()


def replica_stopped(processes):
    processes[0].suspend()


@pytest.mark.parametrize(
    ("fault", "within_s"),
    [
        (engine_killed, 5),
        (replica_stopped, 12),
        pytest.param(replica_killed, 5, marks=pytest.mark.nightly),
        pytest.param(engine_stopped, 12, marks=pytest.mark.nightly),
    ],
)
async def test_answers_go_on_when_their_replica_is_lost_in_mid_stream(fleet, expected, fault, within_s):
    gap_s, *_ = await lose(fleet, expected, fault, begun=20)
    assert gap_s < within_s
    assert await counted(fleet, "slackserve_continuations_total", outcome="continued")


async def test_killed_before_the_first_token(fleet, expected):
    _, first_s, undisturbed_s = await lose(fleet, expected, replica_killed, begun=0)
    assert first_s < 3 + undisturbed_s


@pytest.mark.nightly
async def test_stopped_before_the_first_token(fleet, expected):
    _, first_s, _ = await lose(fleet, expected, replica_stopped, begun=0)
    assert first_s < 10


async def test_what_cannot_go_on_ends_at_once_with_an_error(fleet):
    """A grammar's state is not carried."""
    await fleet.until_whole()
    answer = LongAnswer()
    async with fleet.deployment.http() as http:
        grammar = {"structured_outputs": {"regex": "[a-c]{1600}"}, "allowed_token_ids": None}
        asking = asyncio.create_task(ask(http, 0, 1500, answer, **grammar))

        async def has_begun():
            return len(answer.token_ids) > 5

        await seconds_until(has_begun, 30, "the stream has not begun")
        lost = await fleet.busiest("decode", at_least=1)
        replica_killed(fleet.processes("decode", lost))
        lost_s = time.monotonic()
        await asking
        took_s = time.monotonic() - lost_s

        async def is_forgotten():
            return lost not in await fleet.replicas("decode")

        await seconds_until(is_forgotten, 5, "nobody has told the router, as no other place was asked for")
    tell("decode replica_killed under a grammar", ended_s=round(took_s, 2))
    assert answer.ends == ["decode_failed"]
    assert took_s < 2
    await fleet.until_whole()
    await fleet.until_at_rest()


async def test_all_prefill_replicas_are_killed(fleet, expected):
    """Decode computes the prompts itself, those that were waited for and new ones, streaming and not."""
    expected = await undisturbed(fleet, expected)
    answers, later = [LongAnswer() for _ in range(CLIENTS)], LongAnswer()
    async with fleet.deployment.http() as http:
        asking = asyncio.create_task(all_ask(http, answers))

        async def waited_for():
            return any(one["outstanding"] for one in (await fleet.replicas("prefill")).values())

        await seconds_until(waited_for, 10, "no prefill is waited for")
        for replica in await fleet.fresh("prefill"):
            fleet.processes("prefill", replica)[0].kill()
        lost_s = time.monotonic()
        await ask(http, 0, TOKENS, later)
        await asking
    tell(
        "all prefill replicas killed",
        first_token_s=round(later.first_s - lost_s, 2),
        slowest_first_token_s=round(max(one.first_s - one.started_s for one in answers[::2]), 2),
        longest_gap_s=round(max(one.gap_s for one in answers[::2]), 2),
    )
    assert [one.content for one in (later, *answers)] == [one.content for one in (expected[0], *expected)]
    assert later.first_s - lost_s < 5
    assert await counted(fleet, "slackserve_local_prefills_total", reason="no_prefill_replica")
    await fleet.until_whole()
    await fleet.until_at_rest()
