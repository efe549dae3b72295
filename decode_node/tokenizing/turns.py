"""Prompts take turns before the one thread that vLLM has for them.

That thread takes them as they come, and has read a text before that is refused as too long: a prompt of a
few words would wait for all that somebody else has sent. Owns what a turn is for: one call that vLLM's
renderer has the thread do. So nobody who has a turn waits for another one, or for media, and a request with
several prompts has several. Whose turn is next is `slo.queue.turns`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from decode_node.rendering import chars_in
from slo.request import Party
from slo.tiers import SYSTEM

if TYPE_CHECKING:
    from decode_node.fair_places import FairPlaces
    from slo.request import RequestContext


def _chars(*given: Any, **options: Any) -> int:
    return chars_in((given, options))


_CALLS: Final[Mapping[str, Callable[..., int]]] = {
    "_tokenize_prompt_async": _chars,
    "_apply_chat_template_async": _chars,
    "_render_async": _chars,
    "_async_tokenizer_decode": len,
}
"""What renderers of vLLM have the thread do, and about how much each is, in characters or tokens."""
_OWN: Final = Party("", SYSTEM)
_FOR: Final[ContextVar[RequestContext | None]] = ContextVar("rendering_for", default=None)
"""Whose prompt it is: what vLLM's renderer is asked for does not say."""


@contextmanager
def rendering_for(context: RequestContext) -> Iterator[None]:
    """What is rendered meanwhile is that request's."""
    before = _FOR.set(context)
    try:
        yield
    finally:
        _FOR.reset(before)


def stand_before(renderer: Any, places: FairPlaces) -> None:
    """Have vLLM's renderer wait for a turn before each call that its thread does.

    Args:
        renderer: vLLM's.
        places: As many as it has threads for prompts.
    """
    for name, size in _CALLS.items():
        if (straight := getattr(renderer, name, None)) is not None:
            setattr(renderer, name, _in_turn(places, straight, size))


def _in_turn(
    places: FairPlaces, straight: Callable[..., Awaitable[Any]], size: Callable[..., int]
) -> Callable[..., Awaitable[Any]]:
    async def in_turn(*given: Any, **options: Any) -> Any:
        context = _FOR.get()
        party, weight = (_OWN, 1.0) if context is None else (context.party, context.tenant_weight)
        told = places.join(party, 1.0 + size(*given, **options), weight)
        try:
            if not told.done():
                await asyncio.wait([told])  # which leaves it as it is when this is cancelled
            call = asyncio.ensure_future(straight(*given, **options))
        except BaseException:
            places.leave(party, told)
            raise

        def ended(call: asyncio.Future[Any]) -> None:
            places.leave(party, told)
            if not call.cancelled():
                call.exception()  # seen, so that nobody complains of one whose caller has left

        # A thread does to its end what it has begun, for whoever has left, too.
        call.add_done_callback(ended)
        return await asyncio.shield(call)

    return in_turn
