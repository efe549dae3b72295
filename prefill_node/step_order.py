"""What the scheduler tells the workers about a step beyond vLLM's own output, and what they answer.

Both travel inside vLLM's messages: a `StepOrder` as an attribute of `SchedulerOutput`, which is pickled
whole, and a `PreemptedOutput` in place of `ModelRunnerOutput`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.outputs import ModelRunnerOutput

from slo.predict.pass_shape import NOTHING, PassPart

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_ATTRIBUTE = "slackserve_step"


@dataclass(frozen=True, slots=True)
class StepOrder:
    """How the workers shall run a step.

    Attributes:
        step_id: Identity of this run; only grows. 0 for an empty step, which runs nothing.
        resume: The step whose checkpoint it goes on from; None starts at the first layer.
        discard: Steps whose checkpoints nobody will ask for any more.
        predicted_s: Seconds of the whole pass that go with its tokens, and with its attention; nothing where
            no prediction is known.
    """

    step_id: int
    resume: int | None = None
    discard: tuple[int, ...] = ()
    predicted_s: tuple[float, float] = (0.0, 0.0)

    def attach(self, output: SchedulerOutput) -> None:
        """Send it along with vLLM's own instructions."""
        setattr(output, _ATTRIBUTE, self)

    @staticmethod
    def of(output: SchedulerOutput) -> StepOrder | None:
        """What `attach` added; None in a step that cannot be stopped."""
        return getattr(output, _ATTRIBUTE, None)


@dataclass
class PreemptedOutput(ModelRunnerOutput):  # type: ignore[misc] # vLLM ships no types for it
    """A step that stopped at a boundary on purpose; a step that fails raises instead.

    Attributes:
        boundary: Where every rank stopped.
        boundaries: Boundaries of a whole forward pass.
        computed: The part of the pass that lies before `boundary`.
        resumes_at: The boundary where what is kept goes on: `boundary`, or the start of its half layer.
        done: The part of the pass that lies before `resumes_at`.
        is_kept: Whether what was computed is kept.
        checkpoint_bytes: What that takes on each rank beside KV blocks.
        stopped_s: When it stopped, CLOCK_MONOTONIC.
    """

    boundary: int = 0
    boundaries: int = 0
    computed: PassPart = NOTHING
    resumes_at: int = 0
    done: PassPart = NOTHING
    is_kept: bool = False
    checkpoint_bytes: int = 0
    stopped_s: float = 0.0
