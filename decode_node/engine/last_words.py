"""What the clients' processes are told of requests that an engine ends in the midst of their answers.

An output like any other, in which `stop_reason` says what has become of the request; `decode_node.requests`
reads it. Owns nothing but the words that have not been told yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

if TYPE_CHECKING:
    from vllm.v1.request import Request


class LastWords:
    """Those of one engine."""

    def __init__(self) -> None:
        self._untold: list[tuple[Request, str]] = []

    def say(self, request: Request, word: str) -> None:
        """A request ends with this word; `tell` passes it on."""
        self._untold.append((request, word))

    def tell(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Add what has not been told to a step's outputs."""
        for request, word in self._untold:
            last = EngineCoreOutput(
                request.request_id,
                [],
                finish_reason=request.get_finished_reason(),
                stop_reason=word,
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(last)
        self._untold.clear()
