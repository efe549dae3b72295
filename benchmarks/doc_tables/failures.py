"""The tables of what clients see of failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from benchmarks.report import markdown, result

_FLEET: Final = {
    "every 16th pull fails": (
        "Every sixteenth pull: its peer has another name by now",
        (
            "{failed_pulls} pulls failed; the slowest first token came after "
            "{slowest_first_token_s:.1f} s, before the fault after {fault_free_first_token_s:.1f} s"
        ),
    ),
    "prefill replica killed between prefill and pull": (
        "Prefill replica, killed with its engine between prefill and pull",
        (
            "left out by the router after {forgotten_s:.1f} s; {replacements} prefills placed again, "
            "the last given up after {given_up_s:.1f} s, done again after {again_s:.1f} s, answered "
            "after {lost_answered_s:.1f} s"
        ),
    ),
    "prefill replica stopped for 3 s": (
        "Prefill replica, stopped for 3 s",
        "{replacements} prefills placed again; the slowest first token after {slowest_first_token_s:.1f} s",
    ),
    "prefill engine stopped": (
        "EngineCore of a prefill replica, stopped",
        (
            "noticed after {noticed_s:.1f} s, left out {forgotten_s:.1f} s later; the slowest first "
            "token after {slowest_first_token_s:.1f} s; replaced after another {whole_s:.0f} s"
        ),
    ),
    "prefill replica drained": (
        "Prefill replica, drained",
        (
            "known to the router after {told_s:.1f} s, done after {drained_s:.1f} s; the slowest "
            "first token after {slowest_first_token_s:.1f} s"
        ),
    ),
    "prefill replica stopped for good, then decode replica killed": (
        "Prefill replica, stopped for good; then a decode replica, killed",
        (
            "prefills placed again after {placed_again_s:.1f} s; the new decode replica is ready "
            "after {decode_ready_s:.0f} s"
        ),
    ),
    "decode replica drained": (
        "Decode replica, drained with six streams of a minute",
        (
            "known to the router after {told_s:.1f} s; the last of its {running} streams ends after "
            "{drained_s:.0f} s, {cut} are cut"
        ),
    ),
    "all prefill replicas killed": (
        (
            "Both prefill replicas, killed while prompts are waited for, 16 answers of 300 tokens and"
            " a new one"
        ),
        (
            "the new one's first token after {first_token_s:.1f} s, the slowest after "
            "{slowest_first_token_s:.1f} s; the longest wait between tokens {longest_gap_s:.1f} s"
        ),
    ),
    "router killed": (
        "Router, killed",
        "first answer after {answered_s:.1f} s; placed by a router again after {placed_again_s:.1f} s",
    ),
    "router stopped for 15 s": (
        "Router, stopped for 15 s",
        (
            "a tenant with `max_concurrent: 1` is admitted {admitted_s:.1f} s after it goes on, a "
            "request answered that it has placed {placed_again_s:.1f} s after it"
        ),
    ),
    "SLO monitor killed": (
        "SLO monitor, killed",
        "back after {back_s:.1f} s",
    ),
    "Serve's controller killed": (
        "Serve's controller, killed",
        "back after {back_s:.1f} s, the slowest first token after {slowest_first_token_s:.1f} s",
    ),
    "GCS killed": (
        "GCS of `slackserve serve`, killed under four streams",
        (
            "{cut} of {streams} streams cut; {later} requests that were sent in the next "
            "{lasted_s:.0f} s were answered"
        ),
    ),
    "ingress killed": (
        "One of two ingresses of one host, killed",
        (
            "of {under_way} requests under way the {failed} that it had end with their connection; no"
            " later one fails, the first is answered after {answered_s:.1f} s"
        ),
    ),
    "prefill replicas full": (
        "Nothing: many prompts of 3,900 tokens at once on replicas that take four each",
        "the last is answered after {slowest_s:.0f} s, no prefill is placed again",
    ),
}
"""By fault: what is said of it, and of what was measured, with the names of `engines/failures.json`."""

_NODES: Final = {
    "upgrade under load": (
        "Upgrade to other code",
        "the new monitor runs after {monitor_s:.0f} s, everything is new after {upgraded_s:.0f} s",
    ),
    "node killed": (
        "Node of one of two decode replicas, killed under eight streams of 1,500 tokens",
        (
            "{whole} of {streams} streams whole, the next answer after {answered_s:.1f} s; another "
            "node has its replica after {back_s:.0f} s"
        ),
    ),
    "node left": (
        "Node of one of two decode replicas, left with `slackserve leave` and then ended, the same streams",
        "{whole} of {streams} streams whole; left after {left_s:.0f} s",
    ),
    "head killed, control plane in Redis": (
        (
            "Head with all its processes, killed under four streams of 8,000 tokens, its state in "
            "Redis; another one started after 10 s"
        ),
        (
            "{whole} of {streams} streams whole, the first new answer after {answered_s:.1f} s; "
            "controller and monitor are back after {back_s:.0f} s"
        ),
    ),
    "node left, head killed": (
        "Node left while the head is away for 10 s",
        "{whole} of {streams} streams whole; left after {left_s:.0f} s",
    ),
    "partition between the tiers": (
        "Each tier on a host of its own, which lose all of each other's packets for 20 s",
        (
            "{given_up} prefills given up by decode, which computed those prompts itself; first "
            "answer after {answered_s:.1f} s, the slowest first token after "
            "{slowest_first_token_s:.1f} s; {whole} of {streams} streams of 8,000 tokens whole; "
            "through prefill again {back_s:.0f} s after the network was back"
        ),
    ),
}
_LOST: Final = {
    "decode engine_killed in mid-stream": "EngineCore, killed in mid-stream",
    "decode replica_killed in mid-stream": "Replica process, killed in mid-stream",
    "decode engine_stopped in mid-stream": "EngineCore, stopped in mid-stream",
    "decode replica_stopped in mid-stream": "Replica process, stopped in mid-stream",
    "decode replica_killed before the first token": "Replica process, killed before the first token",
    "decode replica_stopped before the first token": "Replica process, stopped before the first token",
}


def fleet() -> str:
    """What clients see when something of a fleet on one host fails."""
    return _told("What failed", _FLEET)


def nodes() -> str:
    """What clients see of nodes that fail, are left, or lose each other."""
    return _told("What happened", _NODES)


def decode_lost() -> str:
    """What a decode replica's failure costs the answers that it had."""
    found = result("engines/failures")
    rows = [
        [
            told,
            f"{row['answers']} of 16",
            f"{row['longest_gap_s']:.1f} s",
            f"{row['slowest_first_token_s']:.1f} s",
        ]
        for fault, told in _LOST.items()
        for row in [found[fault]]
    ]
    undisturbed = found["decode engine_killed in mid-stream"]
    usual = f"{undisturbed['undisturbed_s']:.1f} s", f"{undisturbed['undisturbed_first_token_s']:.1f} s"
    columns = ["What failed", "Whole answers", "Longest wait for a token", "Slowest first token"]
    return markdown(columns, [*rows, ["Nothing", "16 of 16", *usual]])


def _told(what: str, faults: Mapping[str, tuple[str, str]]) -> str:
    found = result("engines/failures")
    rows = [
        [told, _answers(found[fault]), seen.format_map(found[fault])]
        for fault, (told, seen) in faults.items()
    ]
    return markdown([what, "Answers, errors", "What took how long"], rows)


def _answers(row: Mapping[str, Any]) -> str:
    """The answers that clients had and how many of them failed, where they were counted."""
    return f"{row['answers']:,}, {len(row.get('errors', ()))}" if "answers" in row else ""


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "failures": fleet,
    "failures-nodes": nodes,
    "failures-decode": decode_lost,
}
