"""Runs a preset: every arm, its goodput, its attainment over the rates, its blocking, a timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any, Final, TypeAlias

from simulator.arms.arms import ARMS
from simulator.findings import ArmFindings, Findings, Life, Point, Span, State
from simulator.replica.job import Job
from simulator.study.goodput import Experiment, blocking, percentiles_ms, point
from simulator.study.presets import Preset
from simulator.study.run import run

LEVELS: Final = (0.9, 0.99)
LOADS: Final = (0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.1, 1.3, 1.5, 1.7, 2.0)
SHOWN_ATTAINMENT: Final = 0.85
"""A curve ends with its first point below this."""
TIMELINE_S: Final = 6.0
Progress: TypeAlias = Callable[[int, int], None]
"""Called with the number of simulations that are done and the number of all."""


@dataclass(frozen=True)
class Study:
    """One preset, several arms.

    Attributes:
        arms: Names out of `simulator.arms.arms.ARMS`.
        requests: Requests of each stream.
        seed: The first stream's seed; the second has the next.
    """

    preset: Preset
    arms: Sequence[str]
    requests: int = 4000
    seed: int = 1
    workers: int | None = None

    def findings(self, command: str, progress: Progress = lambda *_: None) -> Findings:
        """Simulate everything."""
        preset = self.preset
        experiment = Experiment(preset.hardware, preset.workload, self.requests, (self.seed, self.seed + 1))
        capacity_rps = experiment.capacity_rps()
        rates_rps = preset.rates_rps or [load * capacity_rps for load in LOADS]
        until = 0.0 if preset.rates_rps else SHOWN_ATTAINMENT
        tuned = {name: range(len(ARMS[name].settings)) for name in self.arms}
        cases = [(name, index, level) for name in tuned for index in tuned[name] for level in LEVELS]
        done, total = 0, len(cases) + 4 * len(tuned)

        def wait(futures: Sequence[Future[Any]]) -> list[Any]:
            nonlocal done
            for _ in as_completed(futures):
                done += 1
                progress(done, total)
            return [future.result() for future in futures]

        with ProcessPoolExecutor(self.workers, initializer=_adopt, initargs=(experiment,)) as pool:
            searches = [pool.submit(_goodput, *case, capacity_rps) for case in cases]
            found = dict(zip(cases, wait(searches), strict=True))
            best = {  # goodput, and the first setting that reaches it
                (name, level): max(
                    ((found[name, index, level], index) for index in tuned[name]), key=itemgetter(0)
                )
                for name in tuned
                for level in LEVELS
            }
            settings = sorted({(name, best[name, level][1]) for name in tuned for level in LEVELS})
            total += len(settings) - 2 * len(tuned)
            curves = [pool.submit(_curve, *case, rates_rps, until) for case in settings]
            own_rps = {name: best[name, 0.9][0] or LOADS[0] * capacity_rps for name in tuned}
            lead = self.arms[-1]
            shown_rps = best[lead, 0.99][0] or own_rps[lead]
            looks = [
                pool.submit(_look, name, best[name, 0.9][1], rate_rps)
                for name in tuned
                for rate_rps in (own_rps[name], shown_rps)
            ]
            points = list(zip(settings, wait(curves), strict=True))
            seen: list[ArmFindings] = wait(looks)
        return Findings(
            preset.name,
            preset.title,
            preset.description,
            preset.assumptions,
            self.seed,
            self.requests,
            preset.objective_ms,
            shown_rps,
            [
                replace(
                    at_shown,
                    points=_best_by_rate(
                        [
                            *(point for (arm, _), curve in points if arm == name for point in curve),
                            *at_own.points,
                            *at_shown.points,
                        ]
                    ),
                    goodput_rps={f"{level:.2f}": best[name, level][0] for level in LEVELS},
                    blocking=at_own.blocking,
                )
                for name, at_own, at_shown in zip(tuned, seen[::2], seen[1::2], strict=True)
            ],
            command,
        )


_experiments: list[Experiment] = []
"""In a worker process, the experiment: sent once, as it may hold a whole trace."""


def _adopt(experiment: Experiment) -> None:
    _experiments[:] = [experiment]


def _goodput(arm: str, index: int, level: float, capacity_rps: float) -> float:
    return _experiments[0].goodput_rps(ARMS[arm], ARMS[arm].settings[index], level, capacity_rps)


def _curve(arm: str, index: int, rates_rps: Sequence[float], until: float) -> list[Point]:
    """Attainment over the rates, up to where many are late: deep overload takes longest to simulate."""
    setting = ARMS[arm].settings[index]
    points: list[Point] = []
    for rate_rps in rates_rps:
        points.append(point(rate_rps, _experiments[0].runs(ARMS[arm], rate_rps, setting), setting))
        if points[-1].attainment < until:
            break
    return points


def _look(arm: str, index: int, rate_rps: float) -> ArmFindings:
    """An arm at one rate, seen closely."""
    experiment, setting = _experiments[0], ARMS[arm].settings[index]
    runs = experiment.runs(ARMS[arm], rate_rps, setting)
    arrivals = experiment.workload.stream(rate_rps, experiment.requests, experiment.seeds[0])
    traced = run(ARMS[arm], experiment.hardware, arrivals[: experiment.requests // 4], setting, traced=True)
    return ArmFindings(
        arm=arm,
        title=ARMS[arm].title,
        points=[point(rate_rps, runs, setting)],
        goodput_rps={},
        blocking=blocking(runs),
        ttft_ms=percentiles_ms(job for served in runs for job in served.jobs),
        timeline=_timeline(traced.jobs, traced.ended_s),
    )


def _best_by_rate(points: Iterable[Point]) -> list[Point]:
    """Of the points at one rate, that with the best setting; in order of rate."""
    best: dict[float, Point] = {}
    for item in sorted(points, key=lambda item: (item.rate_rps, -item.attainment)):
        best.setdefault(item.rate_rps, item)
    return [*best.values()]


def _timeline(jobs: Sequence[Job], ended_s: float) -> list[Life]:
    """The requests that a few seconds in the middle of a stream touch, as spans."""
    start_s = jobs[len(jobs) // 2].arrival.at_s
    lives = []
    for job in jobs:
        end_s = min(job.first_token_s, ended_s)
        arrival = job.arrival
        if not job.history or arrival.at_s >= start_s + TIMELINE_S or end_s <= start_s:
            continue
        changes = pairwise([*job.history, (State.WAITING, end_s)])
        spans = tuple(Span(state, from_s, to_s) for (state, from_s), (_, to_s) in changes if to_s > from_s)
        due_s = None if arrival.ttft_s is None else arrival.at_s + arrival.ttft_s
        lives.append(Life(arrival.number, arrival.kind, arrival.tokens, arrival.at_s, due_s, end_s, spans))
    return lives
