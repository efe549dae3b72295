"""Findings that look like those of a simulation, without one."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from simulator.findings import ArmFindings, Blocking, Findings, Life, Point, Span, State

RATES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 4.5, 5.0, 5.5, 6.0, 7.0)
KINDS = {"chat": (250.0, 0.16), "code": (800.0, 0.34), "retrieval": (4000.0, 1.1), "summary": (None, 2.2)}
"""Objective, ms, and seconds of prefill."""
ARMS = {
    "fcfs": ("FCFS", 1.06, 0.3, None),
    "fcfs-chunked": ("FCFS, chunked", 1.4, 0.45, None),
    "sedf": ("S-EDF, no preemption", 2.3, 0.9, None),
    "sedf-chunked": ("S-EDF, chunked", 3.6, 2.1, (85.0, 78.0, 190.0, 260.0, 310.0)),
    "sedf-recompute": ("S-EDF, abort and recompute", 4.1, 2.6, (3.4, 3.1, 5.8, 8.4, 11.0)),
    "sedf-resume": ("S-EDF, suspend and resume", 4.77, 3.6, (3.4, 3.1, 5.8, 8.6, 11.4)),
    "slackserve": ("SlackServe", 5.1, 4.1, (3.2, 3.0, 5.5, 8.1, 10.9)),
}
"""Title, goodput at 90 % and 99 %, blocking time."""


def findings(arms: Sequence[str | ArmFindings] = tuple(ARMS), **changes) -> Findings:
    """A comparison of these arms, given by name or made with `arm`; any other field can be changed."""
    whole = Findings(
        preset="office-day",
        title="An office day on one H100",
        description="People chat, editors complete code, a search answers from documents, and summaries are "
        "written in the background. All of them share two prefill replicas of an 8B model. Prompts are "
        "log-normal, arrivals Poisson, and every stream has ten thousand requests.",
        assumptions=(
            "A prefill takes the time that was measured on one H100, interpolated by prompt length.",
            "Routing and transport take 2 ms for each request.",
            "Decode replicas never hold a prefill back.",
        ),
        seed=7,
        requests=10_000,
        objective_ms={kind: objective for kind, (objective, _) in KINDS.items()},
        cdf_rate_rps=5.0,
        arms=tuple(arm(item) if isinstance(item, str) else item for item in arms),
        command="slackserve simulate office-day --seed 7 --requests 10000 --out build/office-day",
    )
    return replace(whole, **changes)


def arm(name: str, **changes) -> ArmFindings:
    """What one arm could have done."""
    title, at_90, at_99, blocking = ARMS.get(name, (name, 2.0, 1.0, None))
    whole = ArmFindings(
        arm=name,
        title=title,
        points=tuple(_point(name, rate, at_90, at_99) for rate in RATES),
        goodput_rps={"0.90": at_90, "0.99": at_99},
        blocking=None if blocking is None else Blocking(18_204, *blocking),
        ttft_ms={kind: _percentiles(kind, at_90) for kind in KINDS},
        timeline=timeline(name),
    )
    return replace(whole, **changes)


def timeline(name: str) -> tuple[Life, ...]:
    """One server over a few seconds; in order of arrival or of deadline, and with or without stopping."""
    rng = random.Random(3)
    arrivals, at_s = [], 100.0
    for number in range(26):
        at_s += rng.expovariate(1.9)
        kind = rng.choices([*KINDS], weights=[5, 3, 2, 1])[0]
        objective, work_s = KINDS[kind]
        due_s = None if objective is None else at_s + objective / 1000
        arrivals.append((number, kind, at_s, due_s, work_s * rng.uniform(0.4, 1.3)))
    key: Callable = (lambda job: job[2]) if name.startswith("fcfs") else (lambda job: job[3] or math.inf)
    return _served(arrivals, key, stops=name not in {"fcfs", "sedf"})


def _served(arrivals: Sequence[tuple], key: Callable, *, stops: bool) -> tuple[Life, ...]:
    left = {job[0]: job[4] for job in arrivals}
    history: dict[int, list[tuple[State, float, float]]] = {job[0]: [] for job in arrivals}
    now_s, step_s, running = 100.0, 0.02, None
    while any(value > 0 for value in left.values()):
        ready = [job for job in arrivals if job[2] <= now_s and left[job[0]] > 0]
        if ready and (running not in ready or stops):
            running = min(ready, key=key)
        for job in ready:
            started = any(state is State.RUNNING for state, *_ in history[job[0]])
            state = State.RUNNING if job is running else State.SUSPENDED if started else State.WAITING
            _extend(history[job[0]], state, max(now_s, job[2]), now_s + step_s)
        if ready:
            left[running[0]] -= step_s
        now_s += step_s
    return tuple(
        Life(
            number,
            kind,
            1024,
            at_s,
            due_s,
            history[number][-1][2],
            tuple(Span(*part) for part in history[number]),
        )
        for number, kind, at_s, due_s, _ in arrivals
    )


def _extend(parts: list[tuple[State, float, float]], state: State, start_s: float, end_s: float) -> None:
    if parts and parts[-1][0] is state:
        parts[-1] = (state, parts[-1][1], end_s)
    else:
        parts.append((state, parts[-1][2] if parts else start_s, end_s))


def _point(name: str, rate: float, at_90: float, at_99: float) -> Point:
    slope = max(at_90 - at_99, 0.05) / 2.4
    attainment = 1 / (1 + math.exp((rate - at_90) / slope) / 9)
    by_kind = {kind: attainment ** (1.6 - 0.3 * place) for place, kind in enumerate(KINDS)}
    return Point(
        rate_rps=rate,
        attainment=attainment,
        by_kind=by_kind,
        by_tier={"premium": attainment, "standard": attainment**2},
        preemptions=0.31 if "resume" in name or name == "slackserve" else 0.0,
        wasted_work=0.084 if name == "sedf-recompute" else 0.0,
        prompt_tokens_ps=9_400 * rate,
        setting={"chunk_tokens": 2048} if "chunked" in name else {},
    )


def _percentiles(kind: str, at_90: float) -> list[float]:
    base_ms = KINDS[kind][1] * 600
    return [
        base_ms * (1 + (0.05 + place / 100) ** 3 * 90 / at_90**2.2) * (0.5 + place / 130)
        for place in range(101)
    ]
