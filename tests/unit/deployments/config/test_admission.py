"""The sections `admission`, `fairness` and the limits of keys: their defaults, their page, their refusals."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from deployments.config import ConfigError
from deployments.config.admission import AdmissionConfig, FairnessConfig, TenantLimitsConfig
from deployments.config.settings import parse
from prefill_node.engine_setup import EngineSetup, shares_of
from slo.admission.rules import AdmissionRules
from slo.admission.tenant_limits import NO_LIMIT
from slo.queue.fairness import STARVATION_TIMEOUT_S
from slo.queue.prefill import Prefill
from slo.request import JobId
from slo.tiers import BACKGROUND, PREMIUM

PAGE = (Path(__file__).parents[4] / "docs" / "configuration.md").read_text()


def documented(section):
    """Key and default of each row of a section's table in docs/configuration.md."""
    text = PAGE.split(f"\n## `{section}`\n")[1].split("\n## ")[0]
    rows = (line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `"))
    return {row[0].strip(" `"): row[2].strip(" `") for row in rows}


@pytest.mark.parametrize("name", ["fairness", "admission"])
def test_the_documented_defaults_are_the_real_ones(name):
    config = getattr(parse({}), name)
    real = {key: f"{value:g}" for key, value in config.model_dump().items() if key != "default_limits"}
    shown = documented(name)
    assert shown.pop("default_limits", "no limits") == "no limits"
    assert shown == real


def test_every_limit_of_a_key_is_documented():
    shown = documented("api_keys")
    assert set(TenantLimitsConfig.model_fields) <= set(shown)


def test_the_defaults_are_those_of_the_decision_rules():
    assert AdmissionConfig().rules() == AdmissionRules()
    assert FairnessConfig().starvation_timeout_s == STARVATION_TIMEOUT_S
    assert AdmissionConfig().default_limits.limit() == NO_LIMIT


def test_the_engine_starts_from_the_same_defaults():
    assert EngineSetup().starvation_timeout_s == STARVATION_TIMEOUT_S


def test_shares_and_rules_reach_the_engine_as_plain_values():
    tiers = parse({"tiers": {"background": {"share": 0.1, "weight": 0.5}}}).tiers.tier_set()
    sent = EngineSetup(shares=shares_of(tiers), starvation_timeout_s=5.0).encode()
    received = EngineSetup.of(SimpleNamespace(additional_config=json.loads(json.dumps(sent))))
    fairness = received.fairness()
    waiting = Prefill(JobId("a"), 0.5, math.inf, 1.0, arrived_s=0.0, tier=BACKGROUND)
    fairness.step_ended({PREMIUM: 10}, 1.0, 1.0)
    assert fairness.standing.deficit(BACKGROUND) == pytest.approx(0.1)
    assert fairness.boost_of(waiting, 4.9) is None
    assert fairness.boost_of(waiting, 5.1).guard == pytest.approx(0.5 * 4**0.255)
    assert fairness.boost_of(waiting, 10.1).guard == math.inf


@pytest.mark.parametrize(
    ("values", "key", "hint"),
    [
        ({"admission": {"presure": 0.5}}, "unknown key 'presure'", "did you mean 'pressure'?"),
        ({"admission": {"pressure": 0}}, "admission.pressure", "greater than 0"),
        ({"admission": {"max_refusal": 0.5}}, "admission: unknown key 'max_refusal'", ""),
        ({"admission": {"reserved": 1}}, "admission.reserved", "less than 1"),
        ({"admission": {"calm_s": -1}}, "admission.calm_s", "greater than or equal to 0"),
        ({"admission": {"default_limits": {"weight": 0}}}, "default_limits.weight", "greater than 0"),
        ({"admission": {"default_limits": {"burst_tokens": 9}}}, "default_limits", "goes with tokens_per_s"),
        ({"fairness": {"starvation_timeout_s": 0}}, "fairness.starvation_timeout_s", "greater than 0"),
        ({"fairness": {"ageing_per_s": 0.1}}, "fairness: unknown key 'ageing_per_s'", ""),
    ],
)
def test_what_cannot_work_is_refused_by_name(values, key, hint):
    with pytest.raises(ConfigError) as caught:
        parse(values)
    assert key in str(caught.value)
    assert hint in str(caught.value)
