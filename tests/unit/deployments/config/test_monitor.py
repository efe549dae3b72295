"""The section `monitor`, and that its documentation is true."""

from pathlib import Path

import pytest

from deployments.config import ConfigError
from deployments.config.monitor import MonitorConfig
from deployments.config.preemption import PreemptionConfig
from deployments.config.settings import SlackServeConfig, parse
from slo.monitor.settings import MonitorSettings
from slo.preemption.types import PreemptionPolicy
from slo.tiers import BACKGROUND, DEFAULT_TIERS, PREMIUM, STANDARD


def monitor(**values):
    return parse({"monitor": values}).monitor


def test_the_defaults_are_those_of_the_decision_rules():
    assert MonitorConfig().settings(PreemptionConfig(), DEFAULT_TIERS) == MonitorSettings(
        exported_at=("127.0.0.1", 9465)
    )


def test_every_key_reaches_the_rules():
    tiers = parse({"tiers": {"premium": {"target": 0.999}}}).tiers.tier_set()
    settings = monitor(
        host="0.0.0.0",
        port=9466,
        window_s=60,
        shed=False,
        correct=False,
        direct=False,
    ).settings(PreemptionConfig(policy="rescue", margin=2.5), tiers, ("tiny",))
    assert settings.models == ("tiny",)
    assert settings.targets == {PREMIUM: 0.999, STANDARD: 0.95, BACKGROUND: 0.9}
    assert (settings.steers, settings.corrects, settings.directs) == (False, False, False)
    assert settings.window_s == 60
    assert settings.exported_at == ("0.0.0.0", 9466)
    assert (settings.preemption, settings.margin) == (PreemptionPolicy.RESCUE, 2.5)


@pytest.mark.parametrize(
    ("values", "key", "hint"),
    [
        ({"prot": 1}, "monitor: unknown key 'prot'", "did you mean 'port'?"),
        ({"port": 70000}, "monitor.port", "65535"),
        ({"node": "tail"}, "monitor.node", "'head' or 'any'"),
        ({"act_at_burn": 3}, "monitor: unknown key 'act_at_burn'", ""),
        ({"window_s": 1}, "monitor.window_s", "greater than or equal to 12"),
        ({"quantile": 0.5}, "monitor: unknown key 'quantile'", ""),
    ],
)
def test_what_cannot_work_is_refused_by_name(values, key, hint):
    with pytest.raises(ConfigError) as caught:
        parse({"monitor": values})
    assert key in str(caught.value)
    assert hint in str(caught.value)


def test_the_documented_defaults_are_the_real_ones():
    page = (Path(__file__).parents[4] / "docs" / "configuration.md").read_text()
    section = page.split("\n## `monitor`\n")[1].split("\n## ")[0]
    rows = (line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `"))
    documented = {row[0].strip(" `"): row[2].strip(" `") for row in rows}
    config = SlackServeConfig().monitor
    assert documented == {key: written(value) for key, value in config.model_dump().items()}


def written(value):
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
