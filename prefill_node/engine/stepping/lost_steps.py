"""Which suspended steps start over, so that those that are late do not keep others from being stopped.

Pure. A step that was stopped and given up is resumed when nobody on time waits, which in an overload is
never; its checkpoint and its place count against the limits of suspension until then. Owns how much of the
limits such steps may take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from slo.queue.slack import slack_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefill_node.engine.stepping.step_choice import Suspended
    from prefill_node.engine.stepping.suspension import SuspendedStep

LOST_PART: Final = 0.5
"""Of the limits, what steps that cannot be on time any more may take; the rest is for those that can."""


class SuspensionRoom(NamedTuple):
    """How much may be suspended on a replica; see `slo.preemption.types.Limits`.

    Attributes:
        steps: Steps at a time.
        kept_bytes: Bytes of their checkpoints, on each rank.
    """

    steps: int
    kept_bytes: int


def in_excess(suspended: Sequence[Suspended], now_s: float, room: SuspensionRoom) -> list[SuspendedStep]:
    """The steps to start over: of those that are late, the least advanced first, until few enough remain.

    Args:
        suspended: All suspended steps; one without a deadline is never late.
        now_s: The time.
        room: What the limits allow.
    """
    lost = [item for item in suspended if not item.overdue and _is_late(item, now_s)]
    steps, kept_bytes = len(lost), sum(item.step.checkpoint_bytes for item in lost)
    excess: list[SuspendedStep] = []
    for item in sorted(lost, key=lambda item: item.step.done * item.step.tokens):
        if steps <= LOST_PART * room.steps and kept_bytes <= LOST_PART * room.kept_bytes:
            break
        excess.append(item.step)
        steps -= 1
        kept_bytes -= item.step.checkpoint_bytes
    return excess


def _is_late(item: Suspended, now_s: float) -> bool:
    return slack_s(item.prefill.deadline_s, now_s, item.prefill.remaining_s) < 0
