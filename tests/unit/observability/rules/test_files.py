"""The committed files are those that are generated, and sound; what can never fire is refused."""

import re
import subprocess
from fnmatch import fnmatch

import pytest
from alert_rules import ALERTS, ROOT, RULES
from promtool import needs_promtool

from observability.burn_rates import BURN_ALERTS, CannotFireError, burn_alert, burn_alerts
from observability.files import generated
from observability.promql import grown, quantile, select
from slo.tiers import BACKGROUND, DEFAULT_TIERS
from telemetry.catalogue import FLEET_LOAD, REQUESTS, SLACK_AT_FIRST_TOKEN, TTFT


def test_the_committed_files_are_those_that_are_generated():
    for path, text in generated(DEFAULT_TIERS).items():
        assert (ROOT / "observability" / path).read_text() == text, f"{path}: run `make observability`"


@needs_promtool
def test_promtool_finds_nothing_wrong():
    command = ["promtool", "check", "rules", *map(str, RULES)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_has_its_section_in_the_runbook():
    page = (ROOT / "docs" / "runbook.md").read_text()
    headings = re.findall(r"^### (SlackServe\w+)$", page, re.MULTILINE)
    assert sorted(headings) == sorted({rule["alert"] for rule in ALERTS})
    for section in re.split(r"^### ", page, flags=re.MULTILINE)[1:]:
        assert all(f"**{part}**" in section for part in ("Means.", "Look at.", "Turn.")), section[:40]


def test_the_runbook_says_of_which_alerts_somebody_is_woken():
    page = (ROOT / "docs" / "runbook.md").read_text()
    said = dict(re.findall(r"^### (SlackServe\w+)\n\n\*\*Means\.\*\* (A page\.)?", page, re.MULTILINE))
    waking = {rule["alert"] for rule in ALERTS if rule["labels"]["severity"] == "page"}
    assert {alert for alert, word in said.items() if word} == waking
    assert "Where a section names\nneither, its alert is a ticket." in page


def test_every_file_has_its_row_on_the_page():
    page = (ROOT / "docs" / "observability.md").read_text()
    named = re.findall(r"^\| `observability/(\S+)` \|", page, re.MULTILINE)
    missing = [path for path in generated(DEFAULT_TIERS) if not any(fnmatch(path, each) for each in named)]
    assert missing == []


def test_an_alert_that_cannot_fire_is_refused_and_the_file_says_so():
    with pytest.raises(CannotFireError, match="144%"):
        burn_alert(BURN_ALERTS[0], BACKGROUND, 0.9)
    group, left_out = burn_alerts(DEFAULT_TIERS)
    assert len(left_out) == 1
    assert ("SlackServeBudgetBurn1h", BACKGROUND) not in {(it.alert, it.tier) for it in group.rules}
    assert left_out[0] in RULES[1].read_text()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: select(FLEET_LOAD, tier="premium"),
        lambda: grown(REQUESTS, "5m", "tenant"),
        lambda: quantile(0.9, REQUESTS, "5m"),
        lambda: quantile(0.9, SLACK_AT_FIRST_TOKEN, "5m", "tier"),
    ],
)
def test_an_expression_that_no_metric_can_answer_is_refused(wrong):
    with pytest.raises(ValueError, match="slackserve_"):
        wrong()
    assert quantile(0.9, TTFT, "5m", "tier").startswith("histogram_quantile(0.9, sum by (tier, le)")
