"""The section `preemption` of a deployment's configuration, and the rules that it becomes."""

import dataclasses
from pathlib import Path

import pytest

from deployments.config import ConfigError
from deployments.config.preemption import PreemptionConfig
from deployments.config.settings import SlackServeConfig, parse
from prefill_node.engine_setup import EngineSetup
from slo.preemption.types import Limits, PreemptionMode, PreemptionPolicy, PreemptionRules
from slo.queue.order import QueueOrder


def preemption(**values):
    return parse({"preemption": values}).preemption


def test_it_is_on_unless_told_otherwise():
    rules = SlackServeConfig().preemption.rules("cuda")
    limits = Limits(64, 600.0, 32, 2 << 30)
    expected = PreemptionRules(PreemptionMode.RESUME, PreemptionPolicy.FEASIBLE_SET, 3.0, limits)
    assert rules == dataclasses.replace(expected, patience=0.5)
    assert SlackServeConfig().preemption.order is QueueOrder.FEASIBLE_SET


@pytest.mark.parametrize(
    ("mode", "given", "expected"),
    [
        ("resume", {}, 64),
        ("recompute", {}, 1),
        ("off", {}, 64),
        ("resume", {"max_preemptions": 3}, 3),
        ("recompute", {"max_preemptions": 3}, 3),
        ("recompute", {"max_preemptions": 0}, 0),
        ("recompute", {"max_suspended_mib": 5}, 1),
    ],
)
def test_how_often_a_request_is_stopped_depends_on_what_a_stop_costs(mode, given, expected):
    limits = preemption(mode=mode, limits=given).rules("cpu").limits
    assert limits.max_preemptions == expected


@pytest.mark.parametrize(
    ("given", "accelerator", "expected"),
    [({}, "cpu", 0.0), ({}, "cuda", 0.5), ({"patience": 0.2}, "cpu", 0.2)],
)
def test_a_stop_is_put_off_on_accelerators_unless_told_otherwise(given, accelerator, expected):
    assert preemption(**given).rules(accelerator).patience == expected


def test_every_setting_reaches_the_rules():
    config = preemption(
        mode="recompute",
        policy="aggressive",
        margin=2,
        limits={"max_preemptions": 5, "max_suspended_mib": 64},
    )
    rules = config.rules("cpu")
    assert rules.mode is PreemptionMode.RECOMPUTE
    assert rules.policy is PreemptionPolicy.AGGRESSIVE
    assert rules.margin == 2
    assert rules.limits.max_preemptions == 5
    assert rules.limits.max_suspended_bytes == 64 * 1024 * 1024


@pytest.mark.parametrize("mode", PreemptionMode)
@pytest.mark.parametrize("policy", PreemptionPolicy)
def test_every_mode_and_policy_has_rules(mode, policy):
    rules = preemption(mode=mode.value, policy=policy.value).rules("cpu")
    assert (rules.mode, rules.policy) == (mode, policy)


def test_the_defaults_are_those_of_the_decision_rules():
    assert PreemptionConfig().rules("cpu") == PreemptionRules()


def documented_defaults():
    """Key and default of each row of the section's table in docs/configuration.md."""
    page = (Path(__file__).parents[4] / "docs" / "configuration.md").read_text()
    section = page.split("\n## `preemption`\n")[1].split("\n## ")[0]
    rows = (line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `"))
    return {row[0].strip(" `"): row[2].strip(" `") for row in rows}


def test_the_documented_defaults_are_the_real_ones():
    config = PreemptionConfig()
    limits = {f"limits.{key}": value for key, value in config.limits.model_dump().items()}
    real = {**config.model_dump(exclude={"limits"}), **limits}
    most = [
        Limits.default_for(mode).max_preemptions for mode in (PreemptionMode.RESUME, PreemptionMode.RECOMPUTE)
    ]
    real["limits.max_preemptions"] = f"{most[0]}, or {most[1]} with `recompute"
    on_cuda, on_cpu = (f"{config.stop_within_s(where) * 1e3:g}" for where in ("cuda", "cpu"))
    real["stop_within_ms"] = f"{on_cuda} on `cuda`, {on_cpu} on `cpu"
    patience = {where: config.rules(where).patience for where in ("cuda", "cpu")}
    real["patience"] = f"{patience['cuda']:g} on `cuda`, {patience['cpu']:g} on `cpu"
    real["compiled"] = str(config.compiled).lower()
    shown = {key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in real.items()}
    assert documented_defaults() == shown


@pytest.mark.parametrize("mode", PreemptionMode)
def test_the_default_limits_are_those_of_the_mode(mode):
    assert preemption(mode=mode.value).rules("cpu").limits == Limits.default_for(mode)


def test_the_engine_starts_from_the_same_defaults():
    setup = EngineSetup()
    assert setup.order == PreemptionConfig().order
    assert setup.limits == PreemptionConfig().rules("cpu").limits


@pytest.mark.parametrize(
    ("values", "key", "hint"),
    [
        ({"patience": 1}, "preemption.patience", "0.75"),
        ({"polcy": "rescue"}, "preemption: unknown key 'polcy'", "did you mean 'policy'?"),
        (
            {"limits": {"max_preemption": 1}},
            "preemption.limits: unknown key 'max_preemption'",
            "did you mean 'max_preemptions'?",
        ),
        ({"mode": "off", "compiled": True}, "preemption", "compiled is how passes run that can be stopped"),
        (
            {"aim": "targets", "order": "sedf", "policy": "rescue"},
            "preemption",
            "aim: targets is feasible_set's",
        ),
        (
            {"patience": 0.5, "policy": "rescue"},
            "preemption",
            "patience is feasible_set's; with policy: rescue",
        ),
        ({"mode": "pause"}, "preemption.mode", "'resume', 'recompute' or 'off'"),
        ({"policy": "greedy"}, "preemption.policy", "'conservative', 'aggressive', 'rescue'"),
        ({"order": "fifo"}, "preemption.order", "sedf"),
        ({"granularity": "token"}, "preemption.granularity", "'layer', 'sublayer' or 'operator'"),
        ({"margin": 0.99}, "preemption.margin", "greater than or equal to 1"),
        ({"margin": float("inf")}, "preemption.margin", "finite number"),
        ({"margin": float("nan")}, "preemption.margin", "finite number"),
        ({"launch_ahead_ms": 0}, "preemption.launch_ahead_ms", "greater than 0"),
        ({"launch_ahead_ms": 1001}, "preemption.launch_ahead_ms", "less than or equal to 1000"),
        ({"stop_within_ms": 0}, "preemption.stop_within_ms", "greater than 0"),
        ({"join_tokens": 0}, "preemption.join_tokens", "greater than or equal to 1"),
        ({"vote_timeout_s": 0}, "preemption.vote_timeout_s", "greater than 0"),
        ({"limits": {"max_preemptions": -1}}, "preemption.limits.max_preemptions", "greater than or equal"),
        ({"limits": {"max_suspended_s": 5}}, "preemption.limits: unknown key 'max_suspended_s'", ""),
        ({"limits": {"max_suspended_mib": 0.5}}, "preemption.limits.max_suspended_mib", "valid integer"),
    ],
)
def test_what_cannot_work_is_refused_by_name(values, key, hint):
    with pytest.raises(ConfigError) as caught:
        parse({"preemption": values})
    message = str(caught.value)
    assert key in message
    assert hint in message


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_the_engines_worker_class_is_not_the_users_to_choose(pool):
    with pytest.raises(ConfigError, match=rf"{pool}\.engine_kwargs.*'worker_cls'.*brings its own"):
        parse({pool: {"engine_kwargs": {"worker_cls": "mine.Worker"}}})


def test_a_configuration_cannot_be_changed_once_it_is_parsed():
    config = preemption(mode="off")
    with pytest.raises(ValueError, match="frozen"):
        config.mode = PreemptionMode.RESUME
