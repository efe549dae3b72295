"""How many tokens one request has taken, by its engine's own count.

Owns what the engine is asked for so that a stream says so, and that the client sees no more of it than it
has asked for itself. Where a tenant's tokens are limited a stream says so in every event: a request that ends
early has taken what its last ones say. Of a cancelled one whose events do not say it, or that has none, its
decode replica tells the router.
Any other stream says so once, at its end: its events cannot be counted instead, as one of them may bring
several tokens. Of one that has not come to its end `deployments.http.continuing.delivered` may know it.
"""

from __future__ import annotations

import re
from typing import Any, Final

from vllm.entrypoints.generate.base.protocol import StreamOptions

from decode_node.answers import choice_of, ends_answer
from deployments.http.body.asks import answers_per_prompt, prompts
from slo.admission.tenant_limits import NO_USAGE, Usage

_COUNTS: Final = re.compile(
    r',"usage":\{"prompt_tokens":(\d+),"total_tokens":\d+,"completion_tokens":(\d+)'
    r'(?:,"\w+":(?:null|\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}))*\}'
)
"""At the end of an event; inside a JSON string the quotes would be escaped. The details of a prompt with
media have an object in them."""
_TOTALS: Final = '"choices":[]'
"""The event before the end of a stream, with the usage of all its answers."""
_FINGERPRINT: Final = re.compile(r',"system_fingerprint":"(?:[^"\\]|\\.)*"')
"""In that event; a client that has not asked for it has it in the last one of each answer."""


class TokenMeter:
    """Counts what one request takes.

    Args:
        body: A chat or text completion. A stream is told to say its usage.
        admitted: The most that it may take; None when nothing limits it.
        shows_all: Whether the client sees all counts, whatever it asks for.

    Attributes:
        is_silent_at_times: Whether a stream may generate tokens of which no event tells anything.
    """

    def __init__(self, body: Any, admitted: Usage | None, *, shows_all: bool = False) -> None:
        self._admitted = admitted
        self._answers_per_prompt = answers_per_prompt(body)
        self._answers_in_all = self._answers_per_prompt * prompts(body)
        self._answers: dict[int, Usage] = {}
        self._streams = bool(body.stream)
        self.is_silent_at_times = _is_silent_at_times(body)
        self._whole: Usage | None = None
        self._total_tokens: int | None = None
        self._prompt_tokens: int | None = None
        self._shows_totals = self._shows_counts = True
        if self._streams:
            asked = body.stream_options
            self._shows_totals = shows_all or (asked is not None and bool(asked.include_usage))
            self._shows_counts = shows_all or (self._shows_totals and bool(asked.continuous_usage_stats))
            continuous = admitted is not None or self._shows_counts
            body.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=continuous)

    def answered(self, usage: Any) -> None:
        """Take the usage of an answer that came as a whole; None of one that was refused or never began."""
        if usage is None:
            self._whole = NO_USAGE
        else:
            self._prompt_tokens = usage.prompt_tokens
            answers = self._answers_per_prompt
            self._whole = Usage(usage.prompt_tokens * answers, usage.completion_tokens or 0)

    def read(self, event: str) -> str:
        """Take the counts of an event of the stream; returns it as the client asked for it, or nothing."""
        if _TOTALS in event:
            if (totals := _COUNTS.search(event)) is not None:
                self._prompt_tokens, self._total_tokens = int(totals[1]), int(totals[2])
            return event if self._shows_totals else ""
        told = self._told(event)
        return _FINGERPRINT.sub("", told) if self._shows_totals and ends_answer(told) else told

    def _told(self, event: str) -> str:
        """An event of an answer, whose counts are taken, as the client asked for it."""
        if (counts := _COUNTS.search(event)) is None:
            return event
        self._answers[choice_of(event)] = Usage(int(counts[1]), int(counts[2]))
        return event if self._shows_counts else event[: counts.start()] + event[counts.end() :]

    @property
    def prompt_tokens(self) -> int | None:
        """The tokens of all its prompts of which anybody has said them, each counted once; None for none."""
        if self._prompt_tokens is None and self._answers:
            of_each = {at // self._answers_per_prompt: one.prompt_tokens for at, one in self._answers.items()}
            return sum(of_each.values())
        return self._prompt_tokens

    @property
    def output_tokens(self) -> int | None:
        """The tokens of all its answers so far; None when nobody has counted them."""
        if self._whole is not None:
            return self._whole.output_tokens
        if self._total_tokens is not None or not self._answers:
            return self._total_tokens
        return sum(answer.output_tokens for answer in self._answers.values())

    def used(self, *, is_cancelled: bool) -> Usage | None:
        """What it has taken so far of what it may; None when its replica says it, or nothing limits it.

        Of one that fails no replica says it, as its own may have died: it has taken what its events say.
        """
        if self._admitted is None:
            return None
        if self._whole is not None or not self._streams:
            return self._whole
        seen = self._answers.values()
        output_tokens = self._total_tokens
        if output_tokens is None:
            if is_cancelled and seen and self.is_silent_at_times:
                return None
            output_tokens = sum(answer.output_tokens for answer in seen)
        if len(seen) < self._answers_in_all:  # of some prompts the length is not known
            return Usage(self._admitted.prompt_tokens, output_tokens)
        return Usage(sum(answer.prompt_tokens for answer in seen), output_tokens)


def _is_silent_at_times(body: Any) -> bool:
    """Whether a stream may generate tokens of which no event tells anything.

    So it does while it reasons unseen, and while a parser waits for the rest of a call. Some parsers read
    calls where `tool_choice` is "none", too, and leave them out.
    """
    return getattr(body, "include_reasoning", None) is False or bool(getattr(body, "tools", None))
