"""The tables of real engines: the serving path, the embedded model, hostile clients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import mean
from typing import Any, Final

from benchmarks.report import markdown, result

_VALIDATED: Final = {"slackserve": "SlackServe", "slackserve-off": "without preemption"}


def serving_path() -> str:
    """What the path adds to the first token, before and now."""
    found = result("engines/serving_path")
    before, now = (found[arm]["by_prompt_tokens"] for arm in ("before", "after"))
    rows = [
        [
            f"{int(tokens):,}",
            *(
                f"{before[tokens]['added_ms'][point]:.1f} → {now[tokens]['added_ms'][point]:.1f}"
                for point in ("p50", "p90", "p99")
            ),
        ]
        for tokens in now
    ]
    return markdown(["Prompt tokens", "p50, ms", "p90", "p99"], rows)


def serving_path_stages() -> str:
    """Medians of each stage of the path by concurrency, before and now."""
    found = result("engines/serving_path")
    before, now = (found[arm]["stages_ms_by_concurrency"] for arm in ("before", "after"))
    rows = [
        [stage, *(f"{before[many][stage]['p50']:.1f} → {now[many][stage]['p50']:.1f}" for many in now)]
        for stage in now["1"]
    ]
    return markdown(["Stage", *now], rows)


def validation() -> str:
    """What a real server did and what the simulator foretells, by arm and load."""
    rows = []
    for row in result("engines/validation")["rows"]:
        real, ours, what = row["measured"], row["simulated"], row["of"]
        figures = real, ours, row["faster"]
        if what.startswith("in time"):
            cells = [*(f"{each:.1%}" for each in figures), f"{100 * (ours - real):+.1f} points"]
        elif what == "stops":
            cells = [*(f"{each:.0f}" for each in figures), f"{ours - real:+.0f}"]
        else:
            cells = [*(f"{each * 1e3:,.0f} ms" for each in figures), f"{ours / real - 1:+.1%}"]
        rows.append([_VALIDATED[row["arm"]], f"{row['load']:g}", what, *cells])
    columns = ["Measured", "Simulated", "The same, prefills 5 % shorter", "Simulated is off by"]
    return markdown(["Server", "Load", "", *columns], rows)


def serving_path_embedded() -> str:
    """What the path adds to the first token of the embedded model."""
    rows = [
        [
            f"{int(tokens):,}",
            f"{row['bare_ttft_ms']['p50']:,.0f}",
            *(f"{each:.0f}" for each in row["added_ms"].values()),
        ]
        for tokens, row in result("engines/serving_path_embedded")["after"]["by_prompt_tokens"].items()
    ]
    return markdown(["Prompt tokens", "Bare engine, p50, ms", "added, p50", "p90", "p99"], rows)


_EMBEDDED: Final = {
    "short_ttft_s": "TTFT of 64 tokens, alone",
    "long_ttft_s": "TTFT of 2,000 tokens, alone",
    "tpot_s": "Time per output token of four streams",
    "idle_cores": "Cores that the idle deployment keeps busy",
}


def embedded(file: str, arms: tuple[str, str]) -> str:
    """The embedded model served in two ways."""
    rows = []
    for of, medians in result(f"engines/{file}")["medians"].items():
        *two, ratio = medians.values()
        shown = "{:.2f}" if of == "idle_cores" else "{:.2f} s" if two[0] >= 1 else "{:.3f} s"
        rows.append([_EMBEDDED[of], *(shown.format(each) for each in two), f"{ratio:.2f}"])
    return markdown(["What", *arms, "Ratio"], rows)


def predictions() -> str:
    """How far off predicted first tokens and passes of the embedded model are."""
    rows = []
    for file, machine in (("predictions", "Xeon with AVX-512"), ("predictions_epyc", "EPYC with AVX2")):
        found = result(f"engines/{file}")
        *thirds, whole = [row["mape"] for row in found["first_tokens"][:4]]
        why = ", ".join(f"{count} {name.split()[-1]}" for name, count in found["refused"].items())
        rows.append(
            [
                machine,
                f"{sum(found['refused'].values())}" + (f" ({why})" if why else ""),
                f"{whole:.1%}",
                ", ".join(f"{third:.0%}" for third in thirds),
                f"{found['monitor']['error']['mape']:.1%}",
            ]
        )
    return markdown(["", "Refused", "First tokens off by", "in thirds of the time", "Passes off by"], rows)


_OWNERS: Final = {
    "all": "all",
    "ray": "Ray, and Ray Serve's controller",
    "ingress": "ingress",
    "router": "router",
    "prefill": "prefill replica",
    "decode": "decode replica",
    "monitor": "SLO monitor, an actor",
    "engines": "both engines",
    "command": "the command",
}


def footprint() -> str:
    """Cores kept busy while idle, the server's and those of an application that does nothing."""
    server, empty = (result("engines/footprint")["idle_cores"]["medians"][arm] for arm in ("server", "empty"))
    rows = [
        [title, *(f"{found[name]:.3f}" if name in found else "" for found in (server, empty))]
        for name, title in _OWNERS.items()
    ]
    return markdown(["Cores kept busy by", "SlackServe", "an empty Ray Serve application"], rows)


def hostile_clients() -> str:
    """What hostile clients did to the others."""
    found = result("engines/hostile_clients")
    fuzz = [row for name, row in found.items() if name.startswith("test_thousands_")]
    slow = found["test_a_crowd_of_slow_clients thirty seconds"]
    over = found["test_an_overload_is_refused_and_forgotten twenty minutes"]
    statuses = [(str(status), count) for row in fuzz for status, count in row["statuses"].items()]
    failed = sum(count for status, count in statuses if status.startswith("5"))
    gap, wait = (max(row[name][1] for row in fuzz) * 1e3 for name in ("longest_gaps_s", "longest_waits_s"))
    grown = max(row["memory_grown"] for row in fuzz) - 1
    quick = max(slow["p95_s"]["quick"], slow["p95_s"]["quick again"])
    oldest = max(slow["oldest_s"].values())
    p50_ms, _, p99_ms, longest_ms = (seconds * 1e3 for seconds in over["refused_s"])
    premium_s, slowest_s = over["premium_ttft_s"], over["slowest_ttft_s"]["standard"]
    usual, again = (median * 1e3 for median, _ in over["normal_ttft_s"])
    sent = sum(count for _, count in statuses)
    rows = [
        (
            f"{sent:,} requests that nobody would send, four at a time",
            f"{failed} answers of 500 and more",
            f"another's stream paused for {gap:.0f} ms at most, `/health` took {wait:.0f} ms at most",
            f"memory at rest grew by {grown:.1%}",
        ),
        (
            "1,000 slow uploads and 1,000 slow readers within 30 s",
            f"p95 of others' short answers {slow['p95_s']['slow'] * 1e3:.0f} ms",
            f"beside as many quick clients {quick * 1e3:.0f} ms",
            f"the oldest connection was closed after {oldest:.0f} s",
            f"{sum(slow['open'].values())} stayed open",
        ),
        (
            f"Ten times what it can do for twenty minutes, {over['requests']['overload']:,} requests",
            f"{over['requests']['refused']:,} refused",
            f"refusals took {p50_ms:.0f} ms (p50), {p99_ms:.0f} ms (p99) and {longest_ms:.0f} ms (longest)",
            f"premium that was admitted waited {premium_s[1]:.0f} s (p99) and {premium_s[2]:.0f} s (longest)",
            f"standard {slowest_s:.0f} s (longest)",
            f"first token at half load before and a minute after {usual:.0f} and {again:.0f} ms",
            f"memory grew by {over['memory_grown'] - 1:.1%}",
        ),
    ]
    return markdown(["Tried", "What was seen"], [[tried, "; ".join(seen)] for tried, *seen in rows])


_LOCAL_BELOW: Final = (0, 64, 128)


def local_below() -> str:
    """Short prompts that decode computes, in virtual time, over the quick link."""
    rows = []
    for row in result("cores/local_below_simulated")["rows"]:
        if row["link"] == "25 GB/s" and row["below"] in _LOCAL_BELOW:
            times_ms = (row[of][what] for of in ("short", "long") for what in ("ttft_ms", "whole_ms"))
            rate = f"{row['rate_rps']:g}" if row["below"] == 0 else ""
            shown = (f"{each:,.0f} ms" for each in times_ms)
            rows.append([rate, str(row["below"]), f"{row['by_decode']:.0%}", *shown])
    columns = ["short: first token", "last token", "long: first token", "last token"]
    return markdown(["Requests/s", "`local_below`", "computed by decode", *columns], rows)


_TOKEN_PATH: Final = {"after": "SlackServe", "ray": "Ray Serve LLM"}
_OF_STREAMS: Final = (("ingress", "openaiingress"), ("decode",), ("engines", "ray"))
"""Whose time a table of streamed tokens has, by what either server calls it: Ray's executor has the model's
workers as actors."""


def token_path() -> str:
    """What a streamed token takes between engine and client, by server and streams at a time."""
    found = result("engines/token_path")
    rows = []
    for streams in found["after"]["turns_by_streams"]:
        for arm, name in _TOKEN_PATH.items():
            turns = found[arm]["turns_by_streams"][streams]
            speed, of_event = (
                mean(turn[what] for turn in turns) for what in ("tokens_per_s", "tokens_per_event")
            )
            gaps = (mean(turn["gap_ms"][point] for turn in turns) for point in ("p50", "p99"))
            cpu_us = (_cpu_us_per_token(turns, parts) for parts in _OF_STREAMS)
            rows.append(
                [
                    *(streams, name, f"{speed:,.0f}", f"{of_event:.1f}"),
                    *(f"{each:.0f}" for each in gaps),
                    *(f"{each:,.0f}" for each in cpu_us),
                ]
            )
    columns = ["Tokens/s", "Tokens in an event", "Between events, p50, ms", "p99"]
    parts = ["CPU time of a token, µs: ingress", "decode replica", "engines and Ray"]
    return markdown(["Streams", "Server", *columns, *parts], rows)


def token_path_bounds() -> str:
    """The most tokens per second that one process brings through, by streams at a time."""
    by_streams = result("engines/token_path")["after"]["turns_by_streams"]
    rows = [
        [name, *(f"{1e6 / _cpu_us_per_token(turns, parts):,.0f}" for turns in by_streams.values())]
        for name, parts in zip(
            ("an ingress", "a decode replica, beside its engine"), _OF_STREAMS, strict=False
        )
    ]
    return markdown(["Tokens/s, streams at a time", *by_streams], rows)


def _cpu_us_per_token(turns: Sequence[Mapping[str, Any]], parts: Collection[str]) -> float:
    return mean(sum(turn["cpu_us_per_token"].get(part, 0.0) for part in parts) for turn in turns)


def tracing() -> str:
    """What tracing adds to the first token, by length of the prompt."""
    rows = []
    for tokens, row in result("engines/trace_overhead")["by_prompt_tokens"].items():
        of_ttft, sampled = row["part_of_ttft"], row["sampled_added_ms"]
        rows.append(
            [
                f"{int(tokens):,}",
                f"{row['off_ttft_ms']['p50']:.1f}",
                f"{row['ratio_added_ms']['p50']:+.2f}",
                f"{of_ttft['p50']:+.1%}",
                f"{of_ttft['low']:+.0%} to {of_ttft['high']:+.0%}",
                f"{sampled['p50']:+.1f} ({sampled['low']:+.1f} to {sampled['high']:+.1f})",
            ]
        )
    columns = ["TTFT without, ms", "Added at 0.01, ms", "of TTFT", "95 % interval"]
    return markdown(["Prompt tokens", *columns, "Added to a sampled request, ms"], rows)


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "hostile-clients": hostile_clients,
    "validation": validation,
    "serving-path": serving_path,
    "serving-path-stages": serving_path_stages,
    "serving-path-embedded": serving_path_embedded,
    "predictions": predictions,
    "progress-threads": lambda: embedded("progress_thread", ("Polling, as NIXL ships it", "Sleeping")),
    "embedded-before": lambda: embedded("embedded_before", ("Before", "Now")),
    "embedded-dtype": lambda: embedded("embedded_dtype", ("`float32`", "`bfloat16`")),
    "footprint": footprint,
    "local-below": local_below,
    "token-path": token_path,
    "token-path-bounds": token_path_bounds,
    "tracing": tracing,
}
