"""The replica that all arms run on, and what any replica in virtual time can do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Protocol

from simulator.cost.passes import CostModel, Granularity
from simulator.cost.prediction_noise import NoisyPredictor, PredictionNoise
from simulator.replica.job import Job
from slo.predict.prefill_time import PrefillPredictor, Sample, fit
from slo.tiers import DEFAULT_TIERS, Tier, TierSet

_CALIBRATION: Final = (
    *((tokens, 0) for tokens in (32, 128, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)),
    *((tokens, context) for tokens in (128, 2048) for context in (2048, 16_384)),
)
"""Lengths and contexts that are measured, tokens."""


class ReplicaModel(Protocol):
    """One prefill replica, whoever's."""

    @property
    def blocking_s(self) -> list[float]:
        """Of each stop, from the decision to standstill."""
        ...

    @property
    def busy_s(self) -> float:
        """Device time spent so far."""
        ...

    def arrive(self, job: Job) -> None:
        """Take a request."""
        ...

    def release(self, job: Job) -> None:
        """The KV of a prefilled request has left."""
        ...


@dataclass(frozen=True, slots=True)
class Hardware:
    """The replica that all arms run on.

    Attributes:
        cost: Times of its passes; each arm has its own granularity.
        tiers: Whose requests it serves.
        checkpoint_bytes_per_token: What a checkpoint keeps, hidden states and residual.
        noise: How far the predictions of all arms are off; None for hardly.
        on_host: Whether it has no accelerator: nothing is launched ahead, and chunks are cut as on CPU.
    """

    cost: CostModel
    kv_tokens: int = 400_000
    tiers: TierSet = DEFAULT_TIERS
    noise: PredictionNoise | None = None
    on_host: bool = False

    @property
    def weights(self) -> dict[Tier, float]:
        """Value of a request on time, by tier."""
        return self.tiers.weights

    @property
    def checkpoint_bytes_per_token(self) -> int:
        """Hidden states and residual in 16 bits."""
        return 2 * 2 * self.cost.shape.hidden

    def at(self, granularity: Granularity) -> CostModel:
        """The costs with boundaries elsewhere."""
        return replace(self.cost, granularity=granularity, _by_tokens={})

    def predictor(self) -> PrefillPredictor:
        """What `slackserve calibrate` would find, with the noise."""
        measure = self.cost.prefill_s
        samples = [Sample(new, measure(new, behind), behind) for new, behind in _CALIBRATION]
        found = fit(samples, has_floor=self.cost.launch_s > 0).predictor
        return found if self.noise is None else NoisyPredictor.of(found, self.noise)
