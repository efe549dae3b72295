"""The section `tiers` of a deployment: tiers of its own, and what else must know them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from deployments.config import ConfigError
from deployments.config.settings import SlackServeConfig, parse
from prefill_node.engine_setup import EngineSetup, shares_of
from slo.queue.order import Aim
from slo.tiers import DEFAULT_TIERS

PAGE = Path(__file__).parents[4] / "docs" / "configuration.md"
OWN = {"fast": {"ttft_ms": 100, "share": 0.5}, "slow": {"default": True}}


def example():
    """The tiers that the documentation shows."""
    block = PAGE.read_text().split("### Tiers of your own")[1].split("```yaml\n")[1].split("```")[0]
    return parse(yaml.safe_load(block))


def test_the_documented_tiers_of_ones_own():
    tiers = example().tiers.tier_set()
    assert tiers.names == ("text", "image", "search", "file")
    assert tiers.default == "search"
    assert tiers.service_tiers() == {
        "auto": "search",
        "default": "search",
        "priority": "text",
        "flex": "file",
        "batch": "file",
    }
    text, file = tiers["text"], tiers["file"]
    assert (text.ttft_s, text.tpot_s, text.target, text.sheddable) == (0.3, 0.04, 0.99, False)
    assert (text.weight, text.share) == (8.0, 0.4)
    assert (file.ttft_s, file.ttft_scale, file.tpot_s, file.sheddable) == (None, 4.0, None, True)


def test_the_documented_defaults_are_the_real_ones():
    section = PAGE.read_text().split("\n## `tiers`\n")[1].split("\n### ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    documented = {row[0].strip(" `"): [cell.strip(" `") for cell in row[2:6]] for row in rows}
    own = parse({"tiers": {"own": {"default": True}}}).tiers.tier_set()["own"]
    policies = [*DEFAULT_TIERS.clients.values(), own]
    assert [float(value) for value in documented["target"]] == [policy.target for policy in policies]
    assert [float(value) for value in documented["weight"]] == [policy.weight for policy in policies]
    assert [float(value) for value in documented["share"]] == [policy.share for policy in policies]
    assert documented["sheddable"] == [str(policy.sheddable).lower() for policy in policies]
    shown = ["empty" if not aliases else f"[{', '.join(aliases)}]" for aliases in aliases_of(policies)]
    assert documented["service_tiers"] == shown
    assert documented["ttft_ms"] == ["200", "500", "none", "none"]
    assert documented["tpot_ms"] == ["30", "80", "none", "none"]


def aliases_of(policies):
    return [policy.service_tiers for policy in policies]


def test_a_key_has_a_highest_tier_of_the_deployment(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY_OF_A", "key-of-a-1")
    key = {"tenant": "a", "key_env": "KEY_OF_A"}
    capped = parse({"tiers": OWN, "api_keys": [{**key, "highest_tier": "slow"}]})
    assert capped.key_source().ring().tenant("key-of-a-1", 0.0).highest_tier == "slow"
    free = parse({"tiers": OWN, "api_keys": [key]})
    assert free.key_source().ring().tenant("key-of-a-1", 0.0).highest_tier is None
    for tiers, name, hint in (
        (OWN, "premium", "known are fast, slow"),
        ({}, "premum", "did you mean 'premium'"),
    ):
        with pytest.raises(ConfigError, match=f"api_keys: tenant 'a': there is no tier '{name}'; {hint}"):
            parse({"tiers": tiers, "api_keys": [{**key, "highest_tier": name}]})
    path = tmp_path / "keys.yaml"
    path.write_text("- {tenant: b, key: key-of-b-1, highest_tier: premium}\n")
    with pytest.raises(ConfigError, match="tenant 'b': there is no tier 'premium'; known are fast, slow"):
        parse({"tiers": OWN, "api_keys_file": str(path)}).key_source().ring()


def test_the_engine_has_the_weights_shares_and_ranks_of_these_tiers():
    tiers = example().tiers.tier_set()
    sent = EngineSetup(shares=shares_of(tiers)).encode()
    received = EngineSetup.of(SimpleNamespace(additional_config=json.loads(json.dumps(sent))))
    fairness = received.fairness()
    assert {tier: fairness.standing.deficit(tier) for tier in tiers.names} == {
        tier: tiers[tier].share for tier in tiers.names
    }
    assert received.shares["text"] == (8.0, 0.4)
    assert list(received.shares) == list(tiers.names)


def test_the_engine_aims_at_the_targets_of_these_tiers_if_it_is_to():
    config = example()
    aiming = config.preemption.model_copy(update={"aim": Aim.TARGETS})
    sent = EngineSetup(targets=aiming.targets(config.tiers.tier_set())).encode()
    received = EngineSetup.of(SimpleNamespace(additional_config=json.loads(json.dumps(sent))))
    assert received.class_targets().state.allowed == pytest.approx(
        {"text": 0.01, "image": 0.03, "search": 0.05, "file": 0.1}
    )
    assert config.preemption.targets(config.tiers.tier_set()) == {}
    assert EngineSetup().class_targets() is None


def test_the_monitor_measures_against_the_targets_of_the_tiers():
    config = example()
    settings = config.monitor.settings(config.preemption, config.tiers.tier_set())
    assert settings.targets == {"text": 0.99, "image": 0.97, "search": 0.95, "file": 0.9}


@pytest.mark.parametrize(
    ("tiers", "problem"),
    [
        ({"fast": {"ttft": 5}, "slow": {"default": True}}, "tiers.fast: unknown key 'ttft'"),
        ({"Fast": {"default": True}}, "'Fast' is not a tier's name"),
        ({"system": {"default": True}}, "the server uses the name itself"),
        ({"fast": {"default": True, "service_tiers": ["auto"]}}, "always asks for the default tier"),
        ({"fast": {"default": True, "ttft_ms": 5, "ttft_scale": 2}}, "not both"),
        ([], "tiers"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(tiers, problem):
    with pytest.raises(ConfigError) as caught:
        parse({"tiers": tiers})
    assert problem in str(caught.value)


def test_what_was_given_can_be_parsed_again():
    for config in (example(), parse({"tiers": {"premium": {"weight": 5}, "standard": {"ttft_ms": None}}})):
        again = parse(config.model_dump(exclude_unset=True))
        assert again.tiers.tier_set() == config.tiers.tier_set()


def test_a_configuration_without_tiers_has_the_default_ones():
    assert SlackServeConfig().tiers.tier_set() == DEFAULT_TIERS
