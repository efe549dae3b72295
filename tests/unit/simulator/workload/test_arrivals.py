"""Streams of requests: mixes, traces, tiers."""

import statistics
import time
from dataclasses import replace

import pytest

from simulator.workload.arrivals import (
    Arrival,
    Kind,
    LengthClass,
    Mix,
    Trace,
    TraceError,
    assign_tiers,
    read_azure,
    read_mooncake,
    read_trace,
)
from slo.tiers import BACKGROUND, PREMIUM, STANDARD

CHAT = Kind(3.0, 640, 0.25, PREMIUM)
SEARCH = Kind(1.0, 5000, 4.0, sigma=0.5)
MIX = Mix({"chat": CHAT, "search": SEARCH})


def test_a_mix_has_the_rate_the_shares_and_the_mean_lengths_that_were_asked_for():
    stream = MIX.stream(8.0, 8000, 1)
    assert len(stream) / stream[-1].at_s == pytest.approx(8.0, rel=0.05)
    chat = [arrival.tokens for arrival in stream if arrival.kind == "chat"]
    assert len(chat) / len(stream) == pytest.approx(0.75, abs=0.02)
    assert statistics.mean(chat) == pytest.approx(640, rel=0.05)
    assert {arrival.tier for arrival in stream if arrival.kind == "chat"} == {PREMIUM}


def test_a_stream_follows_from_its_seed():
    assert MIX.stream(2.0, 50, 7) == MIX.stream(2.0, 50, 7)
    assert MIX.stream(2.0, 50, 7) != MIX.stream(2.0, 50, 8)


def test_at_another_rate_the_same_requests_come():
    slow, fast = MIX.stream(1.0, 100, 3), MIX.stream(10.0, 100, 3)
    assert [a.tokens for a in slow] == [a.tokens for a in fast]
    assert [a.at_s for a in slow] == pytest.approx([10 * a.at_s for a in fast])


def test_bursts_keep_the_rate():
    stream = Mix({"chat": CHAT}, burst=10).stream(5.0, 10_000, 1)
    times = [arrival.at_s for arrival in stream]
    assert len(stream) / times[-1] == pytest.approx(5.0, rel=0.1)
    assert len(set(times)) == pytest.approx(1000, rel=0.15)


def test_lengths_stay_in_their_range():
    uniform = Kind(1.0, 0, 1.0, range_tokens=(100, 200), is_uniform=True)
    lengths = [a.tokens for a in Mix({"u": uniform}).stream(1.0, 500, 1)]
    assert min(lengths) >= 100
    assert max(lengths) <= 200
    assert len(set(lengths)) > 50


@pytest.mark.parametrize("mean", [1, 2, 8, 200])
def test_answers_have_the_mean_length_that_was_asked_for(mean):
    kind = Kind(1.0, 600, None, output_tokens=mean)
    lengths = [a.output_tokens for a in Mix({"k": kind}).stream(1.0, 20_000, 1)]
    assert statistics.mean(lengths) == pytest.approx(mean, rel=0.02)
    assert min(lengths) == 1


def test_how_long_answers_are_changes_neither_prompts_nor_times():
    kinds = [Kind(1.0, 600, 1.0, output_tokens=mean) for mean in (1, 200)]
    short, long = (Mix({"k": kind}).stream(1.0, 50, 1) for kind in kinds)
    assert [replace(arrival, output_tokens=1) for arrival in long] == short


def test_objectives_relative_to_the_prefill_time():
    kind = Kind(1.0, 1000, None, ttft_scale=(1.0, 1.3))
    for arrival in Mix({"k": kind}, prefill_s=lambda tokens: tokens * 1e-3).stream(1.0, 100, 1):
        assert arrival.tokens * 1e-3 <= arrival.ttft_s <= 1.3 * arrival.tokens * 1e-3
    with pytest.raises(ValueError, match="k: an objective relative to the prefill time"):
        Mix({"k": kind}).stream(1.0, 1, 1)


def halved(arrival):
    return replace(arrival, tokens=arrival.tokens // 2)


def test_objectives_follow_from_the_lengths_that_are_offered():
    kinds = {"k": Kind(1.0, 1000, None, ttft_scale=(2.0, 2.0)), "fixed": Kind(1.0, 1000, 0.5)}
    offered = Mix(kinds, prefill_s=float, fit=halved).stream(1.0, 100, 1)
    drawn = Mix(kinds, prefill_s=float).stream(1.0, 100, 1)
    assert [a.tokens for a in offered] == [a.tokens // 2 for a in drawn]
    assert all(a.ttft_s == (2.0 * a.tokens if a.kind == "k" else 0.5) for a in offered)


CLASSES = (
    LengthClass(2048, "text", 0.25, PREMIUM),
    LengthClass(float("inf"), "file", 6.0, STANDARD),
)
RECORDS = [(0.0, 100, 10, (1,)), (1.0, 5000, 20, (1, 2)), (3.0, 90_000, 30, ()), (4.0, 500, 5, (3,))]


def trace(**about):
    return Trace(RECORDS, CLASSES, lambda tokens: tokens * 1e-4, **about)


def test_a_trace_is_stretched_to_the_rate_and_goes_round():
    stream = trace().stream(4.0, 400, 1)
    assert len(stream) / stream[-1].at_s == pytest.approx(4.0, rel=0.05)
    assert [a.at_s for a in stream] == sorted(a.at_s for a in stream)
    assert stream[0].at_s == 0.0


def test_a_round_of_a_trace_shares_blocks_as_it_was_recorded_and_none_with_the_round_before():
    """Else every prompt of the second round would be in the prefix cache."""
    first, second = (trace().stream(4.0, 8, 1)[part] for part in (slice(4), slice(4, 8)))
    for arrivals in (first, second):
        blocks = {arrival.tokens: arrival.blocks for arrival in arrivals}
        assert blocks[5000][0] == blocks[100][0] != blocks[500][0]
        assert [len(blocks[tokens]) for tokens in (100, 5000, 90_000, 500)] == [1, 2, 0, 1]
    assert not {block for a in first for block in a.blocks} & {block for a in second for block in a.blocks}
    recorded = {tokens: blocks for _, tokens, _, blocks in RECORDS}
    assert all(arrival.blocks == recorded[arrival.tokens] for arrival in first)


def test_a_prompt_has_the_objective_of_its_length_but_at_least_twice_its_own_time():
    by_tokens = {a.tokens: a for a in trace().stream(1.0, 4, 1)}
    assert (by_tokens[100].kind, by_tokens[100].ttft_s) == ("text", 0.25)
    assert (by_tokens[5000].kind, by_tokens[5000].ttft_s) == ("file", 6.0)
    assert by_tokens[90_000].ttft_s == pytest.approx(18.0)


def test_of_a_trace_too_what_is_offered_has_the_objective_and_what_is_recorded_the_class():
    by_tokens = {a.tokens: a for a in trace(fit=halved).stream(1.0, 4, 1)}
    assert (by_tokens[2500].kind, by_tokens[2500].ttft_s) == ("file", 6.0)
    assert by_tokens[45_000].ttft_s == pytest.approx(9.0)
    assert trace(fit=lambda arrival: replace(arrival, tokens=1)).stream(1.0, 4, 1)[0].tokens == 1


@pytest.mark.parametrize("longest_tokens", [50, 100])
def test_a_trace_of_which_too_little_is_offered_is_refused(longest_tokens):
    with pytest.raises(TraceError, match=rf"two prompts of up to {longest_tokens} tokens"):
        trace(longest_tokens=longest_tokens)


def test_prompts_beyond_the_context_are_left_out():
    assert {a.tokens for a in trace(longest_tokens=6000).stream(1.0, 20, 1)} == {100, 500, 5000}


def test_mooncakes_format_with_its_steps_of_time_spread(tmp_path):
    path = tmp_path / "t.jsonl"
    row = '{{"timestamp": {}, "input_length": {}, "output_length": 5, "hash_ids": [0, {}]}}\n'
    path.write_text(row.format(0, 10, 1) + row.format(0, 20, 2) + row.format(3000, 30, 3))
    assert read_mooncake(path) == [(0.0, 10, 5, (0, 1)), (1.5, 20, 5, (0, 2)), (3.0, 30, 5, (0, 3))]


def test_azures_format(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.6805900,396,109\n"
    )
    first, second = read_azure(path)
    assert (first[1:], second[1:]) == ((374, 44, ()), (396, 109, ()))
    assert second[0] - first[0] == pytest.approx(4.0)


def test_requests_that_were_not_recorded_in_order_are_put_in_order(tmp_path):
    path = tmp_path / "t.jsonl"
    row = '{{"timestamp": {}, "input_length": {}, "output_length": 5}}\n'
    path.write_text(row.format(6000, 30) + row.format(3000, 20) + row.format(0, 10))
    assert read_mooncake(path) == [(0.0, 10, 5, ()), (3.0, 20, 5, ()), (6.0, 30, 5, ())]
    path.write_text(row.format(3000, 20) + row.format(0, 10) + row.format(3000, 30))
    assert [record[1] for record in read_mooncake(path)] == [10, 20, 30]


@pytest.mark.parametrize(
    "at",
    ["2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:00.0099300", "2024-05-10 02:00:00.00993+02:00"],
)
def test_azures_times_are_in_utc_unless_they_say_otherwise(tmp_path, monkeypatch, at):
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        path = tmp_path / "t.csv"
        path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00+00:00,1,1\n{at},2,2\n")
        first, second = read_azure(path)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert second[0] - first[0] == pytest.approx(0.00993, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("t.txt", "", "give a .jsonl trace"),
        ("t.jsonl", '{"timestamp": 0}\n', "line 1"),
        ("t.jsonl", "[1]\n", "line 1"),
        ("t.jsonl", "", "at least two requests"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "line 2"),
        ("t.csv", "time,tokens\n1,2\n", "line 2"),
    ],
)
def test_a_trace_that_cannot_be_read_is_named(tmp_path, name, text, hint):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize("name", ["t.jsonl", "t.csv"])
def test_a_trace_that_is_no_text_is_named(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"\xff\xfe{}\n")
    with pytest.raises(TraceError, match=rf"{name}: this is not a text file in UTF-8"):
        read_trace(path)


def test_a_trace_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TraceError, match="there is no such file"):
        read_trace(tmp_path / "none.csv")


def test_tiers_by_share():
    stream = MIX.stream(1.0, 4000, 1)
    shares = {PREMIUM: 0.2, STANDARD: 0.5, BACKGROUND: 0.3}
    tiers = [arrival.tier for arrival in assign_tiers(stream, shares, 1)]
    for tier, share in shares.items():
        assert tiers.count(tier) / len(tiers) == pytest.approx(share, abs=0.03)
    assert all(isinstance(arrival, Arrival) for arrival in assign_tiers(stream, shares, 1))
