"""The section `preemption` of a deployment's configuration, and the rules that it becomes."""

import pytest

from deployments.config import ConfigError, PreemptionConfig, SlackServeConfig, parse
from slo.order import QueueOrder
from slo.preemption import Limits, PreemptionMode, PreemptionPolicy, PreemptionRules


def preemption(**values):
    return parse({"preemption": values}).preemption


def test_it_is_on_unless_told_otherwise():
    rules = SlackServeConfig().preemption.rules()
    assert rules == PreemptionRules(PreemptionMode.RESUME, PreemptionPolicy.RESCUE, 1.2, Limits())
    assert SlackServeConfig().preemption.order is QueueOrder.SEDF


@pytest.mark.parametrize(
    ("mode", "given", "expected"),
    [
        ("resume", {}, 8),
        ("recompute", {}, 1),
        ("off", {}, 8),
        ("resume", {"max_preemptions": 3}, 3),
        ("recompute", {"max_preemptions": 3}, 3),
        ("recompute", {"max_preemptions": 0}, 0),
        ("recompute", {"max_suspended_s": 5}, 1),
    ],
)
def test_how_often_a_request_is_stopped_depends_on_what_a_stop_costs(mode, given, expected):
    limits = preemption(mode=mode, limits=given).rules().limits
    assert limits.max_preemptions == expected


def test_every_setting_reaches_the_rules():
    config = preemption(
        mode="recompute",
        policy="aggressive",
        margin=2,
        limits={
            "max_preemptions": 5,
            "max_suspended_s": 1.5,
            "max_suspended_steps": 3,
            "max_suspended_mib": 64,
        },
    )
    rules = config.rules()
    assert rules.mode is PreemptionMode.RECOMPUTE
    assert rules.policy is PreemptionPolicy.AGGRESSIVE
    assert rules.margin == 2
    assert rules.limits.max_preemptions == 5
    assert rules.limits.max_suspended_s == 1.5
    assert rules.limits.max_suspended_steps == 3
    assert rules.limits.max_suspended_bytes == 64 * 1024 * 1024


@pytest.mark.parametrize("mode", PreemptionMode)
@pytest.mark.parametrize("policy", PreemptionPolicy)
def test_every_mode_and_policy_has_rules(mode, policy):
    rules = preemption(mode=mode.value, policy=policy.value).rules()
    assert (rules.mode, rules.policy) == (mode, policy)


def test_the_defaults_are_those_of_the_decision_rules():
    config = PreemptionConfig()
    assert config.rules().limits == Limits.default_for(PreemptionMode.RESUME)
    assert config.margin == PreemptionRules().margin


@pytest.mark.parametrize(
    ("values", "key", "hint"),
    [
        ({"polcy": "rescue"}, "preemption: unknown key 'polcy'", "did you mean 'policy'?"),
        (
            {"limits": {"max_preemption": 1}},
            "preemption.limits: unknown key 'max_preemption'",
            "did you mean 'max_preemptions'?",
        ),
        ({"mode": "pause"}, "preemption.mode", "'resume', 'recompute' or 'off'"),
        ({"policy": "greedy"}, "preemption.policy", "'conservative', 'aggressive' or 'rescue'"),
        ({"order": "fifo"}, "preemption.order", "sedf"),
        ({"granularity": "operator"}, "preemption.granularity", "'layer' or 'sublayer'"),
        ({"margin": 0.99}, "preemption.margin", "greater than or equal to 1"),
        ({"margin": float("inf")}, "preemption.margin", "finite number"),
        ({"margin": float("nan")}, "preemption.margin", "finite number"),
        ({"launch_ahead": 0}, "preemption.launch_ahead", "greater than or equal to 1"),
        ({"launch_ahead": 65}, "preemption.launch_ahead", "less than or equal to 64"),
        ({"join_tokens": 0}, "preemption.join_tokens", "greater than or equal to 1"),
        ({"vote_timeout_s": 0}, "preemption.vote_timeout_s", "greater than 0"),
        ({"limits": {"max_preemptions": -1}}, "preemption.limits.max_preemptions", "greater than or equal"),
        ({"limits": {"max_suspended_s": 0}}, "preemption.limits.max_suspended_s", "greater than 0"),
        ({"limits": {"max_suspended_steps": -1}}, "preemption.limits.max_suspended_steps", "greater than"),
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
