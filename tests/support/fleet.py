"""A deployment whose parts are taken away under load, and what must hold after each loss."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray import serve
from serving import METRICS_EVERY_S
from steady_load import SteadyLoad, reference
from waiting import at_rest, seconds_until

from deployments.local.launcher import APP_NAME
from engine_host.processes import named_shared_memory, shared_memory_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from serving import Deployment

REST_S = 30.0
"""How long after it is whole again a fleet may have something left of what was lost."""
FRESH_S = 1.5
"""Who has reported within this time is there."""
TIERS = ("prefill", "decode")
RESULTS = "SLACKSERVE_FAILURES"


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def actor(part: str, suffix: str = "") -> tuple[Any, int | None]:
    """The handle and the process id of the actor with such a name; (None, None) when there is none."""
    for one in ray.util.list_named_actors(all_namespaces=True):
        if part in one["name"] and one["name"].endswith(suffix):
            with contextlib.suppress(ValueError):  # it has just ended
                handle = ray.get_actor(one["name"], namespace=one["namespace"])
                return handle, ray._private.state.actors(handle._actor_id.hex())["Pid"]
    return None, None


@dataclass
class Fault:
    """What is made to happen, and what is measured of it.

    Attributes:
        load: The clients that ask meanwhile.
        at_s: When it happened, on the monotonic clock.
        measured: What goes into the results.
    """

    load: SteadyLoad
    at_s: float = field(default_factory=time.monotonic)
    measured: dict[str, Any] = field(default_factory=dict)

    def happens(self) -> None:
        """It happens now."""
        self.at_s = time.monotonic()

    def summary(self) -> dict[str, Any]:
        """The answers that ended since then."""
        ended = self.load.since(self.at_s)
        return {
            "answers": sum(one.error is None for one in ended),
            "errors": [one.error for one in ended if one.error is not None],
            "slowest_s": round(max((one.ended_s - one.started_s for one in ended), default=0.0), 2),
            "slowest_first_token_s": round(self.load.slowest_s(self.at_s - 60), 2),
        }


class Fleet:
    """Two prefill and two decode replicas that serve, behind two ingresses.

    Args:
        deployment: The running one; this process is connected to its Ray.
        side_channels: Ports where prefill engines wait for handshakes.
        faults: What `support/faults` reads.
        shared_memory: The names in /dev/shm before it was started.
    """

    def __init__(
        self,
        deployment: Deployment,
        side_channels: range,
        faults: Path,
        shared_memory: set[Path],
    ) -> None:
        self.deployment = deployment
        self.key = deployment.keys["acme"]
        self.side_channels = side_channels
        self._faults = faults
        self._shared_memory = shared_memory
        self._expected: dict[int, list[int]] = {}

    # What is there.

    @property
    def log(self) -> str:
        """All that its processes have logged."""
        return self.deployment.log.read_text()

    def replacements(self) -> list[str]:
        """What its decode replicas have logged of prefills that were placed again."""
        return [line for line in self.log.splitlines() if "prefill_failed" in line]

    async def replicas(self, tier: str) -> dict[str, dict[str, Any]]:
        """The router's view of a tier, by replica."""
        fleet = await asyncio.to_thread(self.deployment.fleet)
        return {one["replica"]: one for one in fleet[tier]}

    async def fresh(self, tier: str) -> list[str]:
        """The replicas of a tier that report and take work."""
        replicas = await self.replicas(tier)
        return [
            name for name, one in replicas.items() if one["reported_s_ago"] < FRESH_S and not one["draining"]
        ]

    async def until_whole(self, within_s: float = 180) -> float:
        """Wait until two replicas of each tier report and take work; the seconds that it took."""

        async def whole() -> bool:
            with contextlib.suppress(KeyError):  # no router
                return all([len(await self.fresh(tier)) == 2 for tier in TIERS])
            return False

        return await seconds_until(whole, within_s, "what was lost was not replaced")

    async def until_forgotten(self, tier: str, replica: str, within_s: float = 10) -> float:
        """Wait until the router has given a replica up."""

        async def forgotten() -> bool:
            return replica not in await self.fresh(tier)

        return await seconds_until(forgotten, within_s, f"the router went on using {replica}")

    async def busiest(self, tier: str = "prefill", at_least: int = 3) -> str:
        """The replica of a tier with the most to do, once it has something."""
        count = {"prefill": "outstanding", "decode": "running"}[tier]
        while True:
            replicas = await self.replicas(tier)
            name, state = max(replicas.items(), key=lambda one: one[1][count])
            if state[count] >= at_least:
                return name
            await asyncio.sleep(0.01)

    def processes(self, tier: str, replica: str) -> list[psutil.Process]:
        """A replica's own process, and its engine's."""
        _, pid = actor(f"{tier.capitalize()}:", replica)
        assert pid is not None, f"there is no {tier} replica {replica}"
        return family(pid)

    def handle(self, name: str) -> Any:
        """Of one of its Serve deployments."""
        return serve.get_deployment_handle(name, APP_NAME)

    # What is done to it.

    @contextlib.contextmanager
    def faulty(self, **faults: Any) -> Iterator[None]:
        """Have its processes fail by themselves, see `support/faults`."""
        self._write_faults(faults)
        try:
            yield
        finally:
            self._write_faults({})

    def _write_faults(self, faults: dict[str, Any]) -> None:
        new = self._faults.with_suffix(".new")
        new.write_text(json.dumps(faults))
        new.replace(self._faults)

    @contextlib.asynccontextmanager
    async def under_load(
        self, what: str, *, may_fail: bool = False, counts: bool = True, clients: int = 16
    ) -> AsyncIterator[Fault]:
        """Clients that ask while something fails; afterwards everything is as it must be.

        Args:
            what: The fault's name in the results.
            may_fail: Whether answers may end with an error. No answer may be wrong, or short.
            counts: Whether the ingress that counts requests outlives the fault.
            clients: How many there are.
        """
        await self.until_whole()
        expected = await self._fault_free()
        await self.until_at_rest()
        counted = await self._steady_count()
        async with SteadyLoad(self.deployment.url, self.key, expected, clients) as load:
            await load.until_answered(time.monotonic(), placed=True)
            fault = Fault(load)
            yield fault
            with load.paused():  # what is started anew has the cores to itself
                fault.measured["whole_s"] = await self.until_whole()
            recovered_s = time.monotonic()
            await load.until_answered(recovered_s, placed=True)
        result = fault.summary()
        tell(what, **fault.measured, **result)
        wrong = [error for error in result["errors"] if error.startswith(("wrong", "a stream", "0 of"))]
        assert not wrong, wrong
        assert may_fail or result["errors"] == []
        await self.until_at_rest()
        if counts:
            await self._until_counted(counted + len(load.asked))

    async def _fault_free(self) -> dict[int, list[int]]:
        """What each prompt is answered with when nothing fails."""
        if not self._expected:
            self._expected = await reference(self.deployment.url, self.key)
        return self._expected

    # What must hold.

    async def until_at_rest(self) -> None:
        """Nothing is left of any request: no lease or KV block, job, suspended step, or shared memory."""

        async def rests() -> bool:
            return not await self.leftovers()

        try:
            await seconds_until(rests, REST_S, "the fleet did not come to rest")
        except AssertionError as error:
            raise AssertionError(f"{error}: {await self.leftovers()}") from None

    async def leftovers(self) -> dict[str, Any]:
        """What is left of requests although there are none; empty at rest."""
        left: dict[str, Any] = {}
        if not await asyncio.to_thread(at_rest, self.deployment):
            left["fleet"] = await asyncio.to_thread(self.deployment.fleet)
        prefill = self.handle(f"Prefill:{self.deployment.model}")
        for snapshot in await prefill.broadcast("snapshot").results_async():
            if snapshot["step"] or snapshot["queue"] or snapshot["suspended"]:
                left.setdefault("prefill", []).append(snapshot)
        if paths := named_shared_memory() - self._shared_memory - await asyncio.to_thread(self._of_others):
            left["shared_memory"] = sorted(map(str, paths))
        return left

    def _of_others(self) -> set[Path]:
        """The shared memory of processes on this machine that are not the fleet's."""
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLACKSERVE_TEST_FAULTS") != str(self._faults):
                    found |= shared_memory_of(process)
        return found

    def ended(self) -> int:
        """How many requests its ingresses have counted as ended."""
        return round(self.deployment.metric("slackserve_requests_total"))

    async def _steady_count(self) -> int:
        """Their count, once it has stopped growing."""
        counted, before = await asyncio.to_thread(self.ended), -1
        while counted != before:
            await asyncio.sleep(2 * METRICS_EVERY_S)
            counted, before = await asyncio.to_thread(self.ended), counted
        return counted

    async def _until_counted(self, expected: int) -> None:
        async def counted() -> bool:
            return await asyncio.to_thread(self.ended) >= expected

        with contextlib.suppress(AssertionError):
            await seconds_until(counted, 10, "")
        assert await asyncio.to_thread(self.ended) == expected, "a request ended twice, or never"


def tell(what: str, **measured: Any) -> None:
    """Write what was measured of a fault, one JSON object a line, to the file that the environment names."""
    if path := os.environ.get(RESULTS):
        with Path(path).open("a") as file:
            file.write(json.dumps({"fault": what, **measured}) + "\n")
