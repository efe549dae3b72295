"""Runs a preset: every arm, its goodput, its attainment over the rates, its blocking, a timeline."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from simulator.arms.arms import ARMS
from simulator.findings import ArmFindings, Findings, Life, Span, State
from simulator.study.goodput import Experiment, blocking, percentiles_ms, point
from simulator.study.run import run

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from simulator.findings import Blocking, Point
    from simulator.replica.job import Job
    from simulator.study.presets import Preset

LEVELS: Final = (0.9, 0.99)
LOADS: Final = (0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.1, 1.3, 1.5, 1.7, 2.0)
SHOWN_ATTAINMENT: Final = 0.85
"""A curve ends with its first point below this."""
TIMELINE_S: Final = 6.0
Progress: TypeAlias = Callable[[int, int], None]
"""Called with the number of simulations that are done and the number of all."""


@dataclass(frozen=True, slots=True)
class Look:
    """An arm at one rate, seen closely."""

    point: Point
    blocking: Blocking | None
    ttft_ms: Mapping[str, Sequence[float]]
    timeline: Sequence[Life]


class Study:
    """One preset, several arms.

    Args:
        preset: What is simulated.
        arms: Names out of `simulator.arms.arms.ARMS`.
        requests: Requests of each stream.
        seed: The first stream's seed; the second has the next.
        workers: Processes.
    """

    def __init__(
        self,
        preset: Preset,
        arms: Sequence[str],
        requests: int = 4000,
        seed: int = 1,
        workers: int | None = None,
    ) -> None:
        self._preset = preset
        self._arms = arms
        self._seed = seed
        self._experiment = Experiment(preset.hardware, preset.workload, requests, (seed, seed + 1))
        self._workers = workers
        self._capacity_rps = self._experiment.capacity_rps()

    def findings(self, command: str, progress: Progress = lambda *_: None) -> Findings:
        """Simulate everything."""
        goodputs = [
            (arm, setting, level) for arm in self._arms for setting in ARMS[arm].settings for level in LEVELS
        ]
        until = 0.0 if self._preset.rates_rps else SHOWN_ATTAINMENT
        total = len(goodputs) + 4 * len(self._arms)
        with ProcessPoolExecutor(self._workers, initializer=_adopt, initargs=(self._experiment,)) as pool:
            done = _Count(total, progress)
            ahead = [pool.submit(_goodput, *case, self._capacity_rps) for case in goodputs]
            done.wait(ahead)
            found = dict(zip(map(_key, goodputs), (future.result() for future in ahead), strict=True))
            best = {
                (arm, level): max(
                    (found[_key((arm, s, level))], -i) for i, s in enumerate(ARMS[arm].settings)
                )
                for arm in self._arms
                for level in LEVELS
            }
            curves = [
                (arm, ARMS[arm].settings[index])
                for arm in self._arms
                for index in sorted({-best[arm, level][1] for level in LEVELS})
            ]
            behind = [pool.submit(_curve, *case, self._rates_rps(), until) for case in curves]
            done.more(len(curves) - 2 * len(self._arms))
            boost = self._arms[-1]
            rates = {arm: (best[arm, 0.9][0] or LOADS[0] * self._capacity_rps) for arm in self._arms}
            shown_rps = best[boost, 0.99][0] or rates[boost]
            looks = [
                pool.submit(_look, arm, ARMS[arm].settings[-best[arm, 0.9][1]], rate)
                for arm in self._arms
                for rate in (rates[arm], shown_rps)
            ]
            done.wait(behind)
            done.wait(looks)
            seen = [future.result() for future in looks]
            points = [(arm, future.result()) for (arm, _), future in zip(curves, behind, strict=True)]
        arms = []
        for index, arm in enumerate(self._arms):
            at_goodput, at_shown = seen[2 * index], seen[2 * index + 1]
            mine = [point for name, curve in points if name == arm for point in curve]
            arms.append(
                ArmFindings(
                    arm=arm,
                    title=ARMS[arm].title,
                    points=_best_by_rate([*mine, at_goodput.point, at_shown.point]),
                    goodput_rps={f"{level:.2f}": best[arm, level][0] for level in LEVELS},
                    blocking=at_goodput.blocking,
                    ttft_ms=at_shown.ttft_ms,
                    timeline=at_shown.timeline,
                )
            )
        preset = self._preset
        return Findings(
            preset.name,
            preset.title,
            preset.description,
            preset.assumptions,
            self._seed,
            self._experiment.requests,
            preset.objective_ms,
            shown_rps,
            arms,
            command,
        )

    def _rates_rps(self) -> Sequence[float]:
        return self._preset.rates_rps or [load * self._capacity_rps for load in LOADS]


class _Count:
    def __init__(self, total: int, progress: Progress) -> None:
        self._done = 0
        self._total = total
        self._progress = progress

    def more(self, number: int) -> None:
        self._total += number

    def wait(self, futures: Sequence[Any]) -> None:
        for _ in as_completed(futures):
            self._done += 1
            self._progress(self._done, self._total)


_experiments: list[Experiment] = []
"""In a worker process, the experiment: sent once, as it may hold a whole trace."""


def _adopt(experiment: Experiment) -> None:
    _experiments[:] = [experiment]


def _key(case: tuple[str, Mapping[str, float], float]) -> tuple[str, tuple[tuple[str, float], ...], float]:
    arm, setting, level = case
    return arm, tuple(setting.items()), level


def _goodput(arm: str, setting: Mapping[str, float], level: float, capacity_rps: float) -> float:
    return _experiments[0].goodput_rps(ARMS[arm], setting, level, capacity_rps)


def _curve(arm: str, setting: Mapping[str, float], rates_rps: Sequence[float], until: float) -> list[Point]:
    """Attainment over the rates, up to where many are late: deep overload takes longest to simulate."""
    points: list[Point] = []
    for rate_rps in rates_rps:
        points.append(point(rate_rps, _experiments[0].runs(ARMS[arm], rate_rps, setting), setting))
        if points[-1].attainment < until:
            break
    return points


def _look(arm: str, setting: Mapping[str, float], rate_rps: float) -> Look:
    experiment = _experiments[0]
    runs = experiment.runs(ARMS[arm], rate_rps, setting)
    arrivals = experiment.workload.stream(rate_rps, experiment.requests, experiment.seeds[0])
    traced = run(ARMS[arm], experiment.hardware, arrivals[: experiment.requests // 4], setting, traced=True)
    jobs = [job for served in runs for job in served.jobs]
    return Look(
        point(rate_rps, runs, setting),
        blocking(runs),
        percentiles_ms(jobs),
        _timeline(traced.jobs, traced.ended_s),
    )


def _best_by_rate(points: Iterable[Point]) -> list[Point]:
    """Of the points at one rate, that with the best setting; in order of rate."""
    best: dict[float, Point] = {}
    for item in points:
        known = best.get(item.rate_rps)
        if known is None or item.attainment > known.attainment:
            best[item.rate_rps] = item
    return [best[rate] for rate in sorted(best)]


def _timeline(jobs: Sequence[Job], ended_s: float) -> list[Life]:
    """The requests that a few seconds in the middle of a stream touch, as spans."""
    start_s = jobs[len(jobs) // 2].arrival.at_s
    lives = []
    for job in jobs:
        end_s = min(job.first_token_s, ended_s)
        if job.history and job.arrival.at_s < start_s + TIMELINE_S and end_s > start_s:
            lives.append(_life(job, end_s))
    return lives


def _life(job: Job, end_s: float) -> Life:
    assert job.history is not None
    changes = [*job.history, (State.WAITING, end_s)]
    spans = [Span(state, from_s, to_s) for (state, from_s), (_, to_s) in pairwise(changes) if to_s > from_s]
    arrival = job.arrival
    due_s = None if arrival.ttft_s is None else arrival.at_s + arrival.ttft_s
    return Life(arrival.number, arrival.kind, arrival.tokens, arrival.at_s, due_s, end_s, tuple(spans))
