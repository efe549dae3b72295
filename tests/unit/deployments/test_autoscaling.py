"""Serve's policy: what it makes of answers, silence and errors."""

import asyncio
import logging
from types import SimpleNamespace

import pytest
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.config import AutoscalingPolicy

from deployments import autoscaling
from deployments.autoscaling import TierAutoscaler
from deployments.config import ConfigError
from deployments.config.settings import parse
from slo.autoscaling.need import DecodeDemand, FleetDemand, PrefillDemand

RULES = {"code": "new", "min_replicas": 1, "max_replicas": 4, "start_s": 60.0, "keep_s": 300.0, "busy": 0.8}


def demand(work, memory, streams, replicas=1):
    prefill = PrefillDemand(work, 0.0, replicas=replicas)
    return FleetDemand(prefill, DecodeDemand(memory, streams, replicas=replicas))


BUSY = demand(2.0, 1.2, 30)


def context(running=1, target=1, bounds=(1, 16)):
    return SimpleNamespace(
        app_name="app",
        current_num_replicas=running,
        target_num_replicas=target,
        capacity_adjusted_min_replicas=bounds[0],
        capacity_adjusted_max_replicas=bounds[1],
    )


@pytest.fixture
def monitor(monkeypatch):
    """Answers what is put into `demand`; an exception is raised."""
    known = SimpleNamespace(demand=None, asked=0)

    async def demand(model):
        assert model == "tiny"
        known.asked += 1
        if isinstance(known.demand, Exception):
            raise known.demand
        return known.demand

    def find(application, code):
        assert (application, code) == ("app", "new")
        return SimpleNamespace(demand=SimpleNamespace(remote=demand))

    monkeypatch.setattr(autoscaling, "find_monitor", find)
    return known


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test turns."""
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(autoscaling, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


async def settled(policy, **replicas):
    """Its decision once it has heard an answer."""
    policy(context(**replicas))
    await policy._asking
    return policy(context(**replicas))[0]


async def test_it_sizes_its_tier_by_what_the_monitor_says(monitor):
    monitor.demand = BUSY
    assert await settled(TierAutoscaler("prefill", "tiny", **RULES)) == 3, "2 of work, and what waits by then"
    assert await settled(TierAutoscaler("decode", "tiny", **RULES)) == 2


async def test_it_asks_once_a_second_at_most(monitor):
    monitor.demand = BUSY
    policy = TierAutoscaler("prefill", "tiny", **RULES)
    for _ in range(10):
        policy(context())
        await asyncio.sleep(0.01)
    assert monitor.asked == 1


@pytest.mark.parametrize("answer", [None, RuntimeError("the monitor has died")])
async def test_without_an_answer_nothing_changes(monitor, answer):
    monitor.demand = answer
    assert await settled(TierAutoscaler("prefill", "tiny", **RULES), running=3, target=3) == 3


async def test_that_nobody_answers_is_a_warning_once(monitor, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "ray.serve")
    monkeypatch.setattr(autoscaling, "_ASK_S", 0.0)
    monkeypatch.setattr(autoscaling, "_WARN_AFTER_S", 0.05)
    policy = TierAutoscaler("prefill", "tiny", **RULES)

    async def warned():
        for _ in range(3):
            await settled(policy)
            await asyncio.sleep(0.04)
        warnings = [record.message for record in caplog.records if "demand_unknown" in record.message]
        caplog.clear()
        return len(warnings)

    monitor.demand = RuntimeError("the monitor has died")
    assert await warned() == 1
    assert await warned() == 0
    monitor.demand = BUSY
    assert await warned() == 0
    monitor.demand = RuntimeError("the monitor has died again")
    assert await warned() == 1


async def test_that_replicas_do_not_start_is_a_warning_once(monitor, caplog):
    caplog.set_level(logging.WARNING, "ray.serve")
    monitor.demand = BUSY
    policy = TierAutoscaler("prefill", "tiny", **(RULES | {"start_s": 0.02}))

    async def warned(running):
        for _ in range(4):
            policy(context(running=running, target=4))
            await asyncio.sleep(0.03)
        warnings = [record.message for record in caplog.records if "replicas_overdue" in record.message]
        caplog.clear()
        return warnings

    (warning,) = await warned(3)
    assert "running=3" in warning
    assert await warned(3) == []
    assert await warned(4) == []
    assert len(await warned(2)) == 1


def serves(pool, version, capacity=None):
    """What Serve is told of a prefill tier, as one version of its deployment, of percents of its capacity."""
    from deployments import replicas
    from kv_transfer.connector import KVRole

    config = parse({"prefill": pool})
    size = replicas._size(SimpleNamespace(name="tiny", config=config), config.prefill, KVRole.PREFILL)
    return DeploymentInfo(
        deployment_config=DeploymentConfig(**size),
        replica_config=SimpleNamespace(ray_actor_options={}),
        start_time_ms=0,
        deployer_job_id="",
        version=version,
        target_capacity=capacity,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool", "at_first"),
    [
        ({"replicas": 1, "max_replicas": 8}, 1),
        ({"replicas": 3, "max_replicas": 8}, 3),
        ({"replicas": 3, "min_replicas": 1, "max_replicas": 8}, 3),
    ],
)
async def test_a_tier_starts_with_its_replicas_and_keeps_its_size_when_it_is_deployed_again(
    monitor, pool, at_first, clock, monkeypatch
):
    """In Serve's own account: a configuration that has changed, in whatever key, is registered anew."""
    # Serve pickles the class by value, and reading that in one process gives the class other functions.
    monkeypatch.setattr(AutoscalingPolicy, "get_policy", lambda _: TierAutoscaler)
    state = DeploymentAutoscalingState(DeploymentID("prefill", "app"))

    def decides(target):
        return state.get_decision_num_replicas(target)

    target = decides(state.register(serves(pool, "1"), -1))
    clock.s += 5
    assert decides(target) == at_first
    assert decides(at_first) == at_first, "while none is up yet"
    state.update_running_replica_ids([ReplicaID(f"{n}", state._deployment_id) for n in range(8)])
    assert state.register(serves(pool, "2"), 8) == 8
    assert decides(8) == 8
    state.update_running_replica_ids([])
    assert decides(8) == 8, "all are being replaced"


@pytest.mark.slow
async def test_a_smaller_tier_that_serves_controller_finds_again_is_not_raised_to_its_start(
    monitor, clock, monkeypatch
):
    """In Serve's own account: it knows the target, and its replicas once they have answered it."""
    monkeypatch.setattr(AutoscalingPolicy, "get_policy", lambda _: TierAutoscaler)
    state = DeploymentAutoscalingState(DeploymentID("prefill", "app"))
    target = state.register(serves({"replicas": 6, "min_replicas": 1, "max_replicas": 8}, "1"), 1)
    assert state.get_decision_num_replicas(target) == 1, "while its replica is being asked"
    state.update_running_replica_ids([ReplicaID("0", state._deployment_id)])
    for after_s in (1, 10, 60):
        clock.s += after_s
        assert state.get_decision_num_replicas(target) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("capacity", "most"), [(None, 8), (50, 4), (0, 0)])
async def test_a_tier_keeps_within_what_an_upgrade_in_steps_leaves_it_and_tells_no_other_size(
    monitor, clock, monkeypatch, caplog, capacity, most
):
    """In Serve's own account, which would cut what is more than that."""
    from deployments import replicas

    monkeypatch.setattr(replicas, "running_code", lambda: RULES["code"])
    caplog.set_level(logging.INFO, "ray.serve")
    monkeypatch.setattr(AutoscalingPolicy, "get_policy", lambda _: TierAutoscaler)
    monitor.demand = demand(9.0, 9.0, 30)
    state = DeploymentAutoscalingState(DeploymentID("prefill", "app"))
    pool = {"replicas": 3, "min_replicas": 1, "max_replicas": 8}
    target = state.register(serves(pool, "1", capacity), 2)
    state.update_running_replica_ids([ReplicaID(f"{n}", state._deployment_id) for n in range(target)])
    for _ in range(10):
        clock.s += 1
        target = state.get_decision_num_replicas(target)
        await asyncio.sleep(0.01)
    assert target == most
    told = [record.message for record in caplog.records if "tier_scaled" in record.message]
    assert len(told) == (1 if most else 0)
    assert all(f"replicas={most}" in one for one in told)


async def test_a_tier_of_which_no_replica_is_found_again_starts_anew(monitor, clock):
    policy = TierAutoscaler("prefill", "tiny", starts_with=3, **RULES)
    decided = []
    for _ in range(10):
        decided.append(policy(context(running=0, target=1))[0])
        clock.s += 1
    assert decided == [1] * 5 + [3] + [1] * 4, "once; Serve's target is that then"


async def test_a_tier_that_loses_its_replicas_does_not_start_anew(monitor):
    policy = TierAutoscaler("prefill", "tiny", starts_with=3, **RULES)
    assert policy(context(running=2, target=2))[0] == 2
    assert policy(context(running=0, target=2))[0] == 2


async def test_a_larger_tier_that_serves_controller_finds_again_is_not_cut_to_its_start(monitor):
    """After Serve's controller has died it knows the target, and none of the replicas for a moment."""
    policy = TierAutoscaler("prefill", "tiny", starts_with=3, **(RULES | {"max_replicas": 8}))
    assert policy(context(running=0, target=7))[0] == 7


async def test_while_its_replicas_are_found_again_a_tier_is_not_short_of_them(monitor, clock):
    """What will wait until another replica is up would count as if none of them served."""
    monitor.demand = demand(7.0, 6.0, 30, replicas=8)
    policy = TierAutoscaler("prefill", "tiny", starts_with=3, **(RULES | {"max_replicas": 16}))
    for found in (0, 0, 1, 7, 8):
        assert await settled(policy, running=found, target=8) == 8, found
        clock.s += 1
    assert await settled(policy, running=3, target=8) > 8, "five are lost"


async def test_what_came_while_no_replica_served_is_no_reason_to_have_fewer(monitor, clock):
    """Nobody predicts what a prompt takes then: all of it counts as nothing."""
    policy = TierAutoscaler("prefill", "tiny", **RULES)
    monitor.demand = demand(3.0, 1.2, 30, replicas=4)
    assert await settled(policy, running=4, target=4) == 4
    monitor.demand = demand(0.0, 0.0, 0)
    for _ in range(400):
        clock.s += 1
        assert await settled(policy, running=0, target=4) == 4
    monitor.demand = demand(3.0, 1.2, 30, replicas=4)
    clock.s += 1
    assert await settled(policy, running=4, target=4) == 4


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_replicas_that_the_router_cannot_use_are_not_taken_to_have_nothing_to_do(monitor, clock, role):
    """Serve counts them, and the router is cut off from all."""
    policy = TierAutoscaler(role, "tiny", **RULES)
    monitor.demand = demand(3.0, 3.0, 30, replicas=4)
    assert await settled(policy, running=4, target=4) == 4
    for replicas, kept in ((0, 4), (4, 1)):
        monitor.demand = demand(0.0, 0.0, 0, replicas=replicas)
        for _ in range(700):
            clock.s += 1
            size = await settled(policy, running=4, target=4)
        assert size == kept


async def test_while_no_decode_replica_can_be_used_prefill_is_not_taken_to_have_nothing_to_do(monitor, clock):
    """All that comes is refused before anybody asks what its prefill takes."""
    policy = TierAutoscaler("prefill", "tiny", **RULES)
    monitor.demand = demand(3.0, 3.0, 30, replicas=4)
    assert await settled(policy, running=4, target=4) == 4
    monitor.demand = FleetDemand(PrefillDemand(0.0, 0.0, replicas=4), DecodeDemand(0.0, 0, replicas=0))
    for _ in range(700):
        clock.s += 1
        size = await settled(policy, running=4, target=4)
    assert size == 4


async def test_while_no_prefill_replica_can_be_used_decode_grows_and_does_not_shrink(monitor, clock):
    """It may compute prompts itself; what else comes is refused before anybody asks what decode it takes."""
    policy, sizes = TierAutoscaler("decode", "tiny", **(RULES | {"max_replicas": 8})), [4]
    for prefill, memory, seconds in ((2, 3.0, 10), (0, 0.0, 700), (0, 4.8, 70), (0, 0.0, 700), (2, 0.0, 290)):
        work = PrefillDemand(0.0, 0.0, replicas=prefill)
        monitor.demand = FleetDemand(work, DecodeDemand(memory, 30, replicas=sizes[-1]))
        size = sizes[-1]
        for _ in range(seconds):
            clock.s += 1
            size = await settled(policy, running=size, target=size)
        sizes.append(size)
    assert sizes == [4, 4, 4, 6, 6, 6]
    for _ in range(20):
        clock.s += 1
        size = await settled(policy, running=6, target=6)
    assert size == 1


@pytest.mark.slow
async def test_it_asks_the_monitor_of_the_code_that_the_application_was_built_by(monkeypatch):
    """Serve's controller runs for long, and imports the code of its node."""
    from deployments import replicas
    from kv_transfer.connector import KVRole

    config = parse({"prefill": {"max_replicas": 2}})
    monkeypatch.setattr(replicas, "running_code", lambda: "of the builder")
    size = replicas._size(SimpleNamespace(name="tiny", config=config), config.prefill, KVRole.PREFILL)
    kwargs = size["autoscaling_config"]["policy"]["policy_kwargs"]
    asked = []
    monkeypatch.setattr(autoscaling, "find_monitor", lambda *of: asked.append(of))
    policy = TierAutoscaler(**kwargs)
    policy(context())
    await policy._asking
    assert asked == [("app", "of the builder")]


@pytest.mark.parametrize(("given", "planned"), [({}, (1.0, 0.8)), ({"busy": 0.6}, (0.6, 0.6))])
def test_prefill_is_planned_to_be_in_use_all_the_time_and_decode_not(given, planned):
    config = parse({"autoscaling": given})
    rules = config.autoscaling.rules
    found = rules(config.prefill, is_prefill=True), rules(config.decode, is_prefill=False)
    assert tuple(each.busy for each in found) == planned


async def test_what_fails_in_it_does_not_reach_serve():
    policy = TierAutoscaler("prefill", "tiny", **RULES)
    assert policy(SimpleNamespace(target_num_replicas=3)) == (3, {}), "there is no such context"


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ({"min_replicas": 1}, "min_replicas goes with max_replicas"),
        ({"replicas": 3, "max_replicas": 2}, "3, which is not between"),
        ({"replicas": 2, "min_replicas": 3, "max_replicas": 4}, "2, which is not between"),
    ],
)
def test_bounds_that_cannot_be_kept_are_refused(pool, message):
    with pytest.raises(ConfigError, match=message):
        parse({"prefill": pool})


def test_a_tier_that_follows_the_load_needs_the_monitor():
    with pytest.raises(ConfigError, match=r"decode\.max_replicas needs monitor\.enabled"):
        parse({"decode": {"max_replicas": 2}, "monitor": {"enabled": False}})


def test_the_fewest_are_those_at_the_start_unless_said_otherwise():
    pool = parse({"prefill": {"replicas": 2, "max_replicas": 5}}).prefill
    assert (pool.fewest, pool.most) == (2, 5)
