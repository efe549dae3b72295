"""What becomes of the requests that are not in time, at the goodput of `held_out`.

At the rate up to which 90 % of all requests are in time, found on each stream: how much work is offered, how
many of the late requests ever get a first token, and how many of the prompts' tokens belong to requests that
do not. What is late when the last request was due counts as not served, as it is not simulated further.

    python -m benchmarks.cores.held_out_served [--streams 3]
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping
from typing import Any, Final

from benchmarks.cores.held_out import FIRST_SEED, LEVELS, MODELS, Case, arm_of, offered
from benchmarks.report import print_rows, result, write
from simulator.study.run import run

ARMS: Final = ("sedf-resume", "slackserve-chunked", "slackserve")
FIGURE: Final = "all 90%"


def served(row: Mapping[str, Any], stream: int, requests: int) -> dict[str, float]:
    """Of one arm on one stream at the rate that was found for it."""
    case = Case(row["model"], row["arm"], 0, 0.0, FIRST_SEED + stream, requests)
    replica, mix = offered(case, LEVELS[0])
    arrivals = mix.stream(row["streams"][stream], requests, case.seed)
    jobs = run(arm_of(row["arm"]), replica, arrivals, row["setting"]).jobs
    late = [job for job in jobs if not job.is_on_time]
    never = [job for job in late if math.isinf(job.first_token_s)]
    alone_s = sum(replica.cost.prefill_s(job.num_tokens) for job in jobs)
    tokens = sum(job.num_tokens for job in jobs)
    return {
        "load": alone_s / (arrivals[-1].at_s - arrivals[0].at_s),
        "late": len(late) / len(jobs),
        "never served of the late": len(never) / max(1, len(late)),
        "tokens never served": sum(job.num_tokens for job in never) / tokens,
    }


def main() -> None:
    """Simulate, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=3)
    streams = parser.parse_args().streams
    held_out = result("cores/held_out")
    rows = []
    for model in MODELS:
        for arm in ARMS:
            (row,) = (
                each
                for each in held_out["rows"]
                if (each["model"], each["arm"], each["figure"]) == (model, arm, FIGURE)
            )
            found = [served(row, stream, held_out["requests"]) for stream in range(streams)]
            means = {name: statistics.fmean(each[name] for each in found) for name in found[0]}
            rows.append({"model": model, "arm": arm, **means})
    print_rows("at the goodput of all requests, 90 % in time", rows)
    print(write("cores/held_out_served", {"streams": streams, "rows": rows}))


if __name__ == "__main__":
    main()
