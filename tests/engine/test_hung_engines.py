"""An engine with a stopped process is noticed and killed, with all that it has; a busy one is not."""

import asyncio
import os
import signal
import time
from types import SimpleNamespace

import psutil
import pytest
from engines import random_prompt
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from benchmarks.harness.offline_engine import async_engine
from engine_host.processes import shared_memory_of, unlink_shared_memory
from engine_host.watchdog import EngineWatchdog
from prefill_node.engine_setup import EngineSetup
from telemetry.engine_tap import EngineTap
from telemetry.instruments import Instruments

KINDS = {"core": "VLLM::EngineCore", "worker": "VLLM::Worker"}
pytestmark = [pytest.mark.slow, pytest.mark.long]


async def ask(engine, name, *, max_tokens):
    """Take one answer of an engine; its number of tokens."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    async for output in engine.generate(
        TokensPrompt(prompt_token_ids=random_prompt(2000, seed=hash(name))), sampling, name
    ):
        tokens = len(output.outputs[0].token_ids)
    return tokens


def watched(engine, board, ranks):
    """A watchdog on an engine as the replicas have it."""
    instruments = Instruments(*EngineTap.METRICS)
    tap = EngineTap("prefill", instruments)
    tap.attach(SimpleNamespace(_engine_client=engine))

    def progress():
        reached = () if board is None else tuple(board.boundaries_reached(rank) for rank in range(ranks))
        return tap.steps, *reached

    watchdog = EngineWatchdog(engine, progress, lambda: 0.1)
    watchdog.start()
    return watchdog


def runs(process):
    """Not so one that has ended and that the system's first process has not taken off its list yet."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def running(*names):
    """The processes below this one that have one of the names and have not ended."""
    processes = filter(runs, psutil.Process().children(recursive=True))
    return [one for one in processes if any(name in " ".join(one.cmdline()) for name in names)]


async def test_an_engine_that_does_not_end_when_it_is_killed(models, monkeypatch):
    """As one does that waits in the kernel for a device; here nobody kills it."""
    monkeypatch.setattr("engine_host.watchdog.kill_engine", lambda _: None)
    with async_engine(models("llama"), max_model_len=4096, disable_log_stats=False) as (engine, _):
        watchdog = watched(engine, None, 1)
        assert await ask(engine, "first", max_tokens=4) == 4
        (core,) = running(KINDS["core"])
        call = asyncio.create_task(ask(engine, "lost", max_tokens=2000))
        await asyncio.sleep(0.5)
        os.kill(core.pid, signal.SIGSTOP)
        with pytest.raises(Exception, match="EngineCore"):
            await asyncio.wait_for(call, 10)
        assert engine.errored
        assert core.status() == psutil.STATUS_STOPPED
        await watchdog._task
        with pytest.raises(Exception, match="EngineCore"):
            await asyncio.wait_for(ask(engine, "next", max_tokens=1), 1)


@pytest.mark.parametrize(
    ("kind", "ranks", "setup", "within_s"),
    [
        ("core", 1, EngineSetup(mode="resume"), 10),
        ("worker", 2, EngineSetup(mode="resume"), 15),
        ("core", 1, None, 10),  # as on decode
    ],
)
async def test_a_stopped_process(models, kind, ranks, setup, within_s):
    with async_engine(
        models("llama"), setup=setup, ranks=ranks, max_model_len=4096, disable_log_stats=False
    ) as (engine, board):
        watchdog = watched(engine, board, ranks)
        ours = running(*KINDS.values())
        assert unlink_shared_memory(engine)
        assert not any(shared_memory_of(process) for process in ours), "shared memory with a name"
        busy = [ask(engine, f"busy-{number}", max_tokens=40) for number in range(4)]
        assert await asyncio.gather(*busy) == [40] * 4
        engine.output_processor.has_unfinished_requests = lambda: True  # a client that is wrong
        await asyncio.sleep(8)  # idle for longer than any limit
        del engine.output_processor.has_unfinished_requests
        assert not engine.errored
        stopped = running(KINDS[kind])[-1]
        call = asyncio.create_task(ask(engine, "lost", max_tokens=2000))
        await asyncio.sleep(0.5)
        os.kill(stopped.pid, signal.SIGSTOP)
        started_s = time.monotonic()
        with pytest.raises(Exception, match="EngineCore"):
            await asyncio.wait_for(call, within_s)
        noticed_s = time.monotonic() - started_s
        assert engine.errored
        assert noticed_s < within_s
        _, left = psutil.wait_procs(ours, timeout=30)
        assert not [*filter(runs, left)], f"left behind: {left}"
        print(f"noticed_s={noticed_s:.1f}")  # noqa: T201 - the measurement
        await watchdog._task
