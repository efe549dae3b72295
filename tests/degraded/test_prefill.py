"""Prefill replicas and their processes fail under load; no client gets an error, or a wrong token."""

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from datetime import datetime
from itertools import pairwise

import psutil
import pytest
import ray
from fleet import actor, tell
from processes import of_kind
from waiting import seconds_until

from slo.request import job_of

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def assert_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive, f"left behind: {[' '.join(process.cmdline()) for process in alive]}"


async def test_every_16th_pull_fails(fleet):
    failed = len(fleet.replacements())
    async with fleet.under_load("every 16th pull fails") as fault:
        await asyncio.sleep(8)
        fault.happens()
        fault_free_s = fault.load.slowest_s()
        with fleet.faulty(wrong_peer_every=16):
            await asyncio.sleep(15)
        fault.measured["failed_pulls"] = len(fleet.replacements()) - failed
        fault.measured["fault_free_first_token_s"] = round(fault_free_s, 2)
    assert fault.measured["failed_pulls"] >= 2
    assert fault.load.slowest_s(fault.at_s) <= fault_free_s + 2 + fault_free_s


async def test_a_prefill_replica_is_killed_between_prefill_and_pull(fleet, spans):
    async with fleet.under_load("prefill replica killed between prefill and pull") as fault:
        lost = await fleet.busiest()
        processes = fleet.processes("prefill", lost)
        failed = len(fleet.replacements())
        with fleet.faulty(hold_pulls=True):
            before = ended(fleet, "prefill_ended", lost)

            async def awaits_pull():
                computed = ended(fleet, "prefill_ended", lost) - before
                await asyncio.sleep(0.3)  # after which an answer of one token has ended, too
                return bool(computed - ended(fleet, "request_ended"))

            await seconds_until(awaits_pull, 20, f"{lost} has computed nothing that is still to be pulled")
            killed_at = datetime.now().astimezone()
            for process in reversed(processes):  # at once, as with their host
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            fault.happens()
            assert_gone(processes)
        fault.measured["forgotten_s"] = await fleet.until_forgotten("prefill", lost)
        fault.measured["answered_s"] = round(await fault.load.until_answered(fault.at_s, placed=True), 2)
        await asyncio.sleep(5)
        fault.measured["replacements"] = len(fleet.replacements()) - failed
        waited = [one for one in fault.load.since(fault.at_s) if one.started_s < fault.at_s]
        fault.measured["waited_s"] = round(max(one.ended_s for one in waited) - fault.at_s, 2)
        fault.measured |= phases(fleet, killed_at)
    assert fault.measured["replacements"] > 0, "nobody had lost anything; was the right process killed?"
    placed_again = {job_of_line(line) for line in fleet.replacements()[failed:]}
    assert placed_again & ended(fleet, "prefill_ended", lost), "no pull was under way"
    assert fault.measured["waited_s"] <= 5
    await seconds_until(lambda: asyncio.to_thread(is_linked, spans), 20, "no trace shows the lost prefill")


def ended(fleet, event, replica=""):
    """The jobs of which a replica, or any, has logged this."""
    return set(re.findall(rf" {replica}.* {event} .*job_id=(\S+)", fleet.log))


def job_of_line(line):
    return re.search(r"job_id=(\S+)", line)[1]


LOGGED = re.compile(r"(\d{4}-\S+ \S+) .* (prefill_failed|prefill_ended|request_ended) .*job_id=(\S+)")
PHASES = {"prefill_failed": "given_up_s", "prefill_ended": "again_s", "request_ended": "lost_answered_s"}


def phases(fleet, killed_at):
    """Until when, after the death, the last of the lost prefills was given up, done again, and answered."""
    told = [found.groups() for found in map(LOGGED.search, fleet.log.splitlines()) if found]
    later = [(after_s(at, killed_at), event, job_of(job)) for at, event, job in told]
    lost = {job for at_s, event, job in later if event == "prefill_failed" and at_s > 0}
    return {
        name: max((at_s for at_s, told, job in later if told == event and job in lost), default=None)
        for event, name in PHASES.items()
    }


def after_s(logged_at, at):
    return (datetime.fromisoformat(logged_at.replace(",", ".")).astimezone() - at).total_seconds()


def is_linked(spans):
    """Whether a prefill that was asked for again is linked, in its trace, to the one that was lost."""
    asked = {(span.trace_id, span.span_id) for span in spans.spans if span.name == "prefill_call"}
    again = [span for span in spans.spans if span.name == "prefill_call" and span.links]
    return any(set(span.links) <= asked and span.links[0][0] == span.trace_id for span in again)


async def test_a_prefill_replica_is_stopped_for_a_while(fleet):
    async with fleet.under_load("prefill replica stopped for 3 s") as fault:
        stopped = fleet.processes("prefill", await fleet.busiest())[0]
        failed = len(fleet.replacements())
        stopped.suspend()
        fault.happens()
        await asyncio.sleep(3)
        stopped.resume()
        await asyncio.sleep(5)
        fault.measured["replacements"] = len(fleet.replacements()) - failed


async def test_a_prefill_engine_is_stopped(fleet):
    async with fleet.under_load("prefill engine stopped") as fault:
        lost = await fleet.busiest()
        processes = fleet.processes("prefill", lost)
        told = fleet.log.count("engine_hung")
        next(of_kind("engine", processes)).suspend()
        fault.happens()

        async def noticed():
            return fleet.log.count("engine_hung") > told

        fault.measured["noticed_s"] = await seconds_until(noticed, 10, "nobody noticed that the engine hangs")
        fault.measured["forgotten_s"] = await fleet.until_forgotten("prefill", lost)
        await fault.load.until_answered(time.monotonic(), placed=True)
    assert_gone(processes[1:])


async def test_a_prefill_replica_drains(fleet):
    """Shut one of two down the way Serve does when it scales down or upgrades."""
    async with fleet.under_load("prefill replica drained") as fault:
        leaving = await fleet.busiest()
        handle, pid = actor("Prefill:", leaving)
        fault.happens()
        shutdown = handle.perform_graceful_shutdown.remote()

        async def told():
            replica = (await fleet.replicas("prefill")).get(leaving)
            return replica is None or replica["draining"]

        async def outstanding():
            replica = (await fleet.replicas("prefill")).get(leaving)
            return 0 if replica is None else replica["outstanding"]

        try:
            fault.measured["told_s"] = await seconds_until(told, 5, "the router did not hear of it")
            left = [await outstanding()]
            while not (await asyncio.to_thread(ray.wait, [shutdown], timeout=0.05))[0]:
                left.append(await outstanding())
                assert time.monotonic() - fault.at_s < 40, "the replica did not end"
            fault.measured["drained_s"] = round(time.monotonic() - fault.at_s, 2)
        finally:
            os.kill(pid, signal.SIGKILL)  # as Serve does then
        await fault.load.until_answered(time.monotonic(), placed=True)
    assert all(later <= earlier for earlier, later in pairwise(left)), left
    assert re.search(r"prefill_drained .*is_empty=True", fleet.log)


async def test_full_replicas_are_not_taken_for_silent(fleet):
    await fleet.until_whole()
    failures = len(fleet.replacements())
    async with fleet.deployment.http() as client:
        client.headers["x-slo-tier"] = "premium"

        async def ask(number):
            prompt = random.Random(number).choices(range(200), k=3900)
            started_s = time.monotonic()
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
            (await client.post("/v1/completions", json=body)).raise_for_status()
            return time.monotonic() - started_s

        # On any machine some seconds of work for each replica: what is predicted to take half a minute is
        # refused by rule, and beside each other, on the same cores, both take several times as long as alone.
        alone_s = min([await ask(number) for number in range(3)])
        took_s = await asyncio.gather(*[ask(3 + number) for number in range(max(20, round(10 / alone_s)))])
    tell("prefill replicas full", answers=len(took_s), slowest_s=round(max(took_s), 2))
    assert max(took_s) > 3.0, "nobody had to wait for a place"
    assert len(fleet.replacements()) == failures
