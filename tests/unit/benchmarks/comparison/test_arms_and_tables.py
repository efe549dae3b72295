"""What the comparison of servers offers, and what it makes of its runs."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from statistics import StatisticsError

import pytest

from benchmarks.comparison import load
from benchmarks.comparison.arms import FIXED, Chunking, chunked
from benchmarks.comparison.run import options
from benchmarks.comparison.table import loads_table, paired, shared, spread, summary, verdict
from deployments.config.preemption import PreemptionConfig
from slo.preemption.types import PreemptionPolicy
from slo.queue.order import QueueOrder
from slo.tiers import PREMIUM, STANDARD

ROOT = Path(__file__).parents[4]
MIX = load.mix(800, 20_000)


def run(arm, fraction=0.7, number=0, *, urgent=0.5, tokens_ps=400.0, long_p99_ms=5000.0):
    return load.ArmRun(
        arm=arm,
        round=number,
        load=fraction,
        offered_tokens_ps=420.0,
        met={"urgent": [at < 100 * urgent for at in range(100)], "long": [True] * 25},
        ttfts_ms={"urgent": [500.0] * 100, "long": [long_p99_ms] * 25},
        tpot_ms={},
        prompt_tokens_ps=tokens_ps,
        wall_s=100.0,
        preemptions=3,
        refused={},
        failed={"500": 1},
        late_ms={},
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("tokens_ps", [100.0, 500.0])
def test_exactly_the_stated_work_is_offered(seed, tokens_ps):
    arrivals, window_s = load.offered(MIX, tokens_ps, 240, seed)
    assert sum(arrival.tokens for arrival in arrivals) / window_s == pytest.approx(tokens_ps)
    assert 0.5 * 240 < window_s < 2 * 240
    assert 0 < arrivals[-1].at_s < window_s, "the request behind the last would come when it ends"
    assert window_s - arrivals[-1].at_s < 0.2 * window_s
    assert arrivals == sorted(arrivals, key=lambda arrival: arrival.at_s)
    assert (arrivals, window_s) == load.offered(MIX, tokens_ps, 240, seed)


def test_long_prompts_are_most_of_the_work():
    arrivals, _ = load.offered(MIX, 500.0, 5000, 0)
    tokens = {kind: sum(a.tokens for a in arrivals if a.kind == kind) for kind in ("urgent", "long")}
    assert tokens["long"] > 10 * tokens["urgent"]


@pytest.mark.parametrize(("text", "tokens", "long"), [("512", 512, 0), ("512/384", 512, 384)])
def test_chunks_as_they_are_given(text, tokens, long):
    chunking = Chunking.parse(text)
    assert (chunking.tokens, chunking.long_tokens, str(chunking)) == (tokens, long, text)
    assert "--priority" in chunked("stock-priority", chunking).stock
    assert "--priority" not in chunked("stock-chunked", chunking).stock


def test_the_tuned_arm_of_ours_has_its_steps_and_no_preemption():
    arm = chunked("slackserve-chunked", Chunking.parse("512"))
    assert (arm.stock, arm.preemption, arm.step_tokens) == (None, "off", 512)


def test_pools_have_their_tiers_and_the_chunks_that_are_tried():
    arm = chunked("stock-pools", Chunking.parse("512"))
    assert arm.pools == (PREMIUM, STANDARD)
    assert arm.stock == chunked("stock-chunked", Chunking.parse("512")).stock


def test_suspend_and_resume_is_a_setting_of_ours():
    arm = FIXED["slackserve-sedf"]
    given = PreemptionConfig.model_validate({"mode": arm.preemption, **arm.rules})
    assert given.rules("cpu").policy is PreemptionPolicy.CONSERVATIVE
    assert (given.order, given.margin) == (QueueOrder.SEDF, 1.0)
    assert arm.settings()["order"] == "sedf"


def test_of_chunks_that_are_equally_good_those_are_chosen_that_are_sooner():
    slower, sooner = run("a"), run("b")
    sooner.ttfts_ms["urgent"] = [400.0] * 100
    assert sooner.merit() > slower.merit()
    assert run("c", urgent=0.6).merit() > sooner.merit()


class Pool:
    """Answers nothing, but keeps what it was asked."""

    def __init__(self):
        self.asked = []

    async def complete(self, body, headers):
        self.asked.append(body)


async def test_a_tier_with_a_pool_of_its_own_is_asked_there():
    premium, standard, everybody = Pool(), Pool(), Pool()
    apart = load.Pooled({"premium": premium, "standard": standard})
    for tier in ("premium", "standard", "standard"):
        await apart.complete(tier.encode(), {"x-slo-tier": tier})
    assert premium.asked == [b"premium"]
    assert standard.asked == [b"standard"] * 2
    await load.Pooled({"": everybody}).complete(b"any", {"x-slo-tier": "premium"})
    assert everybody.asked == [b"any"]


def test_what_is_attained_is_over_all_requests_with_an_interval_of_rounds():
    values = (0.1, 0.2, 0.6, 0.1, 0.5)
    (row,) = summary([run("stock", number=number, urgent=value) for number, value in enumerate(values)])
    assert row["urgent"]["attained"] == pytest.approx(0.3)
    assert row["urgent"]["by_round"] == pytest.approx(values)
    assert row["urgent"]["low"] < 0.2, "rounds differ by more than their requests"
    assert row["urgent"]["high"] > 0.4
    assert row["long"]["attained"] == row["long"]["high"] == 1.0
    assert row["long"]["low"] == pytest.approx(0.971, abs=0.001)
    assert (row["rounds"], row["unserved"], row["requests"]["urgent"]) == (5, 5, 500)
    alike = summary([run("stock", number=number, urgent=0.3) for number in range(12)])[0]["urgent"]
    assert alike["high"] - alike["low"] < 0.08


def test_of_few_rounds_each_is_shown_and_no_interval():
    """A bootstrap of two rounds gives back the two, and looks like 95 %."""
    runs = [
        run(arm, number=number, urgent=0.5 + number / 2)
        for arm in ("stock", "slackserve")
        for number in (1, 0)
    ]
    for cell in (summary(runs)[0]["urgent"], paired(runs)[0]["urgent"]):
        assert not {"low", "high"} & set(cell)
    assert spread(summary(runs)[0]["urgent"], "{:.0%}".format) == "50%, 100%"
    assert spread({"low": -0.1, "high": 0.2}, "{:+.1f}".format) == "-0.1 to +0.2"


def test_throughput_is_tokens_over_time_of_all_rounds():
    runs = [replace(run("stock", tokens_ps=100.0), wall_s=200.0), run("stock", number=1, tokens_ps=400.0)]
    runs += [run("slackserve", number=number, tokens_ps=400.0) for number in (0, 1)]
    stock, ours = summary(runs)
    assert stock["prompt_tokens_ps"] == pytest.approx(200.0)
    assert ours["prompt_tokens_ps"] / stock["prompt_tokens_ps"] == paired(runs)[0]["throughput_ratio"]


def test_arms_are_compared_in_the_rounds_that_all_served():
    runs = [run("stock", load, number) for load in (0.7, 0.9) for number in (0, 1)]
    runs += [run("slackserve", load, number) for load, number in ((0.7, 1), (0.9, 1), (0.7, 2))]
    runs.append(run("left out", 0.7, 0))
    same = shared(runs, ["stock", "slackserve"])
    assert {(each.arm, each.round) for each in same} == {("stock", 1), ("slackserve", 1)}
    apart = [run("stock", number=0), run("slackserve", number=1)]
    assert shared(apart, ["stock", "slackserve"]) == apart


def test_the_difference_is_taken_request_by_request():
    runs = [run("stock", number=number, urgent=0.5, tokens_ps=500.0) for number in range(6)]
    runs += [run("slackserve", number=number, urgent=0.6) for number in range(1, 7)]
    (row,) = paired(runs)
    assert (row["load"], row["arm"], row["rounds"]) == (0.7, "stock", 5)
    assert row["urgent"]["points"] == pytest.approx(0.1)
    assert 0 < row["urgent"]["low"] < 0.1 < row["urgent"]["high"] < 0.17, "two arms apart have 0.2"
    assert row["long"] == {"points": 0.0, "by_round": [0.0] * 5, "low": 0.0, "high": 0.0}
    assert row["throughput_ratio"] == pytest.approx(0.8)
    assert paired(runs[:6]) == []


GOALS = {"urgent_ratio", "points", "throughput", "long_p99"}


@pytest.mark.parametrize(
    ("ours", "missed"),
    [
        ({"urgent": 0.46}, set()),
        ({"urgent": 0.44}, {"urgent_ratio"}),
        ({"urgent": 0.37}, {"urgent_ratio", "points"}),
        ({"urgent": 0.9, "tokens_ps": 380.0}, {"throughput"}),
        ({"urgent": 0.9, "long_p99_ms": 8000.0}, {"long_p99"}),
    ],
)
def test_the_verdict_is_against_the_best_stock_arm(ours, missed):
    runs = [run("stock-chunked", urgent=0.2), run("stock-priority", urgent=0.4)]
    (found,) = verdict(summary([*runs, run("slackserve", **ours)]))
    assert found["best_stock"] == "stock-priority"
    assert {goal for goal in GOALS if not found["goals"][goal]} == missed


def test_no_verdict_without_both_sides():
    assert verdict(summary([run("stock")])) == []


def test_the_table_has_a_row_for_each_load_and_arm():
    runs = [run(arm, fraction) for fraction in (0.5, 0.9) for arm in ("stock", "slackserve")]
    assert loads_table(summary(runs)).row_count == 4


def test_a_stream_without_a_kind_is_refused():
    with pytest.raises(RuntimeError, match="no long requests in 5 s: give more --seconds"):
        load.offered(load.mix(500, 12_000), 0.7 * 748, 5, 5070)


def test_what_nobody_asked_for_is_not_attained():
    alone = replace(run("slackserve"), met={"urgent": [True], "long": []})
    assert alone.attained() == alone.attained("urgent") == 1.0
    with pytest.raises(StatisticsError):
        alone.attained("long")
    for made in (summary, paired):
        with pytest.raises(StatisticsError):
            made([alone, replace(alone, arm="stock")])


def test_make_measures_what_the_page_says_and_more_if_it_is_told():
    page = (ROOT / "docs/benchmarks/comparison.md").read_text()
    said = re.search(r"`python -m benchmarks\.comparison\.run ([^`]+)`", page)[1].split()
    make = ["make", "--no-print-directory", "-n", "bench-compare", "ARGS=--rounds 5 --more"]
    made = subprocess.run(make, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    given = made.partition("benchmarks.comparison.run")[2].replace("\\\n", " ").split()
    assert vars(options(given)) == vars(options(said)) | {"rounds": 5, "more": True}
