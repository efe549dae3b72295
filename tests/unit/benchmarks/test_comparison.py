"""What the comparison of servers offers, and what it makes of its runs."""

import pytest

from benchmarks.comparison import load
from benchmarks.comparison.arms import Chunking, chunked
from benchmarks.comparison.table import loads_table, summary, verdict

MIX = load.mix(800, 20_000)


def run(arm, fraction=0.7, number=0, *, urgent=0.5, tokens_ps=400.0):
    return load.ArmRun(
        arm=arm,
        round=number,
        load=fraction,
        offered_tokens_ps=420.0,
        requests={"urgent": 75, "long": 25},
        urgent=urgent,
        long=1.0,
        overall=urgent * 0.75 + 0.25,
        ttft_ms={"urgent": {"p50": 500.0, "p90": 900.0}, "long": {"p50": 5000.0}},
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
    arrivals = load.offered(MIX, tokens_ps, 240, seed)
    window_s = sum(arrival.tokens for arrival in arrivals) / tokens_ps
    mean_gap_s = arrivals[-1].at_s / len(arrivals)
    assert mean_gap_s == pytest.approx(window_s / len(arrivals), rel=0.5)
    assert arrivals == sorted(arrivals, key=lambda arrival: arrival.at_s)
    assert arrivals == load.offered(MIX, tokens_ps, 240, seed)


def test_long_prompts_are_most_of_the_work():
    arrivals = load.offered(MIX, 500.0, 5000, 0)
    tokens = {kind: sum(a.tokens for a in arrivals if a.kind == kind) for kind in ("urgent", "long")}
    assert tokens["long"] > 10 * tokens["urgent"]


@pytest.mark.parametrize(("text", "tokens", "long"), [("512", 512, 0), ("512/384", 512, 384)])
def test_chunks_as_they_are_given(text, tokens, long):
    chunking = Chunking.parse(text)
    assert (chunking.tokens, chunking.long_tokens, str(chunking)) == (tokens, long, text)
    assert "--priority" in chunked("stock-priority", chunking).stock
    assert "--priority" not in chunked("stock-chunked", chunking).stock


def test_medians_over_the_rounds():
    (row,) = summary(
        [run("stock", number=number, urgent=value) for number, value in enumerate((0.1, 0.2, 0.6))]
    )
    assert row["urgent"] == {"median": 0.2, "min": 0.1, "max": 0.6}
    assert (row["rounds"], row["unserved"]) == (3, 3)


@pytest.mark.parametrize(
    ("stock", "chunks", "ours", "tokens_ps", "is_met"),
    [
        (0.2, 0.4, 0.8, 400.0, True),
        (0.2, 0.4, 0.79, 400.0, False),  # less than twice
        (0.5, 0.4, 1.0, 400.0, False),  # the best stock arm is too good for the question
        (0.2, 0.4, 0.9, 370.0, False),  # paid for with throughput
    ],
)
def test_the_verdict_is_against_the_best_stock_arm(stock, chunks, ours, tokens_ps, is_met):
    runs = [run("stock", urgent=stock), run("stock-chunked", urgent=chunks)]
    runs.append(run("slackserve", urgent=ours, tokens_ps=tokens_ps))
    (found,) = verdict(summary(runs))
    assert found["best_stock"] == ("stock-chunked" if chunks > stock else "stock")
    assert found["target_met"] is is_met


def test_no_verdict_without_both_sides():
    assert verdict(summary([run("stock")])) == []


def test_the_table_has_a_row_for_each_load_and_arm():
    runs = [run(arm, fraction) for fraction in (0.5, 0.9) for arm in ("stock", "slackserve")]
    assert loads_table(summary(runs)).row_count == 4
