"""The committed alerts, and promtool's word on when they fire over given series."""

import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
RULES = [ROOT / "observability" / "rules" / name for name in ("recording.yaml", "alerts.yaml")]
ALERTS = [
    rule
    for group in yaml.safe_load(RULES[1].read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
]


def count_of(alert, tier=None):
    labels = f'alertname="{alert}",alertstate="firing"' + (f',tier="{tier}"' if tier else "")
    return f"count(ALERTS{{{labels}}}) or vector(0)"


def check(directory, interval, series, alert, expected, tier=None, rules=RULES):
    """Have promtool evaluate the rules over `series` and compare how many alerts fire, by minute."""
    test = {
        "interval": interval,
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": count_of(alert, tier),
                "eval_time": f"{at_min:.0f}m",
                "exp_samples": [{"labels": "{}", "value": firing}],
            }
            for at_min, firing in expected.items()
        ],
    }
    promtool(directory, interval, test, rules)


def promtool(directory, interval, test, rules=RULES):
    """Have it evaluate the rules for one test."""
    groups = [group["name"] for path in rules for group in yaml.safe_load(path.read_text())["groups"]]
    content = {
        "rule_files": [str(path) for path in rules],
        "evaluation_interval": interval,
        "group_eval_order": groups,
        "tests": [test],
    }
    (directory / "test.yaml").write_text(yaml.safe_dump(content))
    command = ["promtool", "test", "rules", str(directory / "test.yaml")]
    tested = subprocess.run(command, capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def judged(tier, met, missed, steps, quiet_steps=0, model="m"):
    """The two series of a tier that judges so many requests in each step, and then none that misses."""
    labels = f'model="{model}",served="{model}",tier="{tier}",objective="all"'
    name = f'slackserve_slo_judged_total{{{labels},met="%s"}}'
    return {
        name % "yes": f"0+{met}x{steps + quiet_steps}",
        name % "no": f"0+{missed}x{steps} {missed * steps}+0x{quiet_steps}",
    }
