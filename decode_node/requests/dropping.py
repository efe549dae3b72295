"""Streams that a decode engine ends for good, for lack of memory for those that were promised something.

The engine ends the request with an output of its own, as when one leaves (`decode_node.requests.leaving`),
but nothing goes on after it: the client gets an error. Here stands what that output means, and how an answer
ends with it; whose streams it may be done to is `slo.decode.drop`'s.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from vllm.sampling_params import RequestOutputKind

from decode_node.requests.leaving import as_unended, ended_with

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

MAY_DROP_XARG: Final = "slackserve_may_drop"
"""Tells the engine's scheduler that a request may be ended for good."""
DROPPED: Final = "slackserve_dropped"
"""The `stop_reason` with which the engine ends one."""
WHY_DROPPED: Final = (
    "the answer was ended before it was complete: decode has too little memory for all streams, and this one "
    "is promised nothing; retry later, in another tier, or with an objective"
)
"""What its client is told."""


async def unless_dropped(
    outputs: AsyncGenerator[RequestOutput, None], kind: RequestOutputKind, refuse: Callable[[], Exception]
) -> AsyncGenerator[RequestOutput, None]:
    """The engine's outputs for one request, up to the one that says that it was dropped.

    Args:
        outputs: As the engine gives them.
        kind: What each of them has of the answer.
        refuse: Gives what is raised when the engine has dropped the request.
    """
    async with aclosing(outputs):
        async for output in outputs:
            completion = output.outputs[0]
            if not ended_with(completion, DROPPED):
                yield output
                continue
            if kind is RequestOutputKind.DELTA and completion.token_ids:
                yield as_unended(output)  # tokens that nobody had taken before come with it
            raise refuse()
