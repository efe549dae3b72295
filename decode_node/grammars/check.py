"""Holds what an answer must conform to against limits of time and memory, before it reaches an engine.

A short grammar can take minutes and gigabytes to compile, and an engine that compiles it serves nobody
meanwhile, or dies. So it is compiled first, with what the engine compiles it with, in a fork of a child
process, one at a time, for tenants in turn. What does not compile is refused, too, before its prompt is
computed; so is what no answer can conform to: an engine fails an answer for which it finds no token.
The child starts with the first request that has a grammar; verdicts are kept. What else is wrong with one is
vLLM's to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from vllm.exceptions import VLLMServerError, VLLMValidationError
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.request import get_structured_output_key

from decode_node.answers import error_response
from decode_node.fair_places import FairPlaces
from decode_node.grammars.backends import GrammarBackend
from decode_node.grammars.child_process import Child
from sampling.engine_limits import MOST_TOKEN_IDS
from slo.errors import TOO_MANY_GRAMMARS
from slo.request import TENANT_XARG, Party
from slo.tiers import SYSTEM
from telemetry import logs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ray.serve.llm.openai_api_models import ErrorResponse
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

_Value = TypeVar("_Value")
_START_S: Final = 60.0
_STARTS: Final = 3
_WALL: Final = 20.0
"""A child that computes for its limit may take so many times as long on a busy machine."""
_MAX_VERDICTS: Final = 4096
_MOST_PENDING: Final = 32
"""Grammars of one tenant that wait for a verdict; at the default limit they take 64 s of computing."""
_ANY_OBJECT: Final = '{"type": "object"}'
"""As vLLM has xgrammar and llguidance read `json_object`."""
_MAX_SILENCES: Final = 3
"""A grammar that so many children in a row say nothing of is refused: it may be what ends them."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What compiling one grammar may take."""

    timeout_s: float = 2.0
    max_mib: int = 1024


DEFAULT_LIMITS: Final = GrammarLimits()


class GrammarNotCheckedError(VLLMServerError):  # type: ignore[misc] # vLLM ships no types for it
    """The child has died or said nothing; the request may be good, and is another replica's."""


class TooManyGrammarsError(Exception):
    """A tenant has as many grammars waiting for a verdict as it may."""

    def __init__(self) -> None:
        super().__init__(
            f"this tenant has {_MOST_PENDING} new grammars that wait to be checked, as many as it may; "
            "send it again"
        )

    def response(self) -> ErrorResponse:
        """What a request is answered with."""
        return error_response(429, TOO_MANY_GRAMMARS, str(self))


class _Key(NamedTuple):
    """What has a verdict: a grammar as its backend takes it, and the only tokens that its request allows."""

    kind: str
    text: str
    allowed: list[int] | None

    @property
    def digest(self) -> bytes:
        """Short, as texts may be large."""
        allowed = "" if self.allowed is None else ",".join(map(str, self.allowed))
        return sha256(f"{self.kind}\0{allowed}\0{self.text}".encode()).digest()


@dataclass(slots=True)
class _Pending:
    """A grammar of a tenant that has no verdict yet.

    Attributes:
        verdict: The task that finds it.
        waiting: How many requests wait for it.
        has_begun: Whether the child has it, or had.
    """

    verdict: asyncio.Task[str]
    waiting: int = 0
    has_begun: bool = False


class GrammarCheck:
    """Refuses what takes too much to compile or does not compile, and what no answer can conform to.

    Args:
        limits: How much that is.
        backend: What the engine compiles with.
    """

    def __init__(self, limits: GrammarLimits, backend: GrammarBackend) -> None:
        self._limits = limits
        self._backend = backend
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()  # why each is refused; empty for a good one
        self._silences: OrderedDict[bytes, int] = OrderedDict()  # in a row, of those without a verdict
        self._pending: dict[tuple[str, bytes], _Pending] = {}  # by tenant and digest
        self._child: Child | None = None
        self._places = FairPlaces(1)

    def stand_before(
        self,
        client: Any,
        refuse: Callable[[SamplingParams, ErrorResponse], Exception],
        waits: Callable[[SamplingParams], None] = lambda _: None,
    ) -> None:
        """Check what the engine is asked to generate by.

        Args:
            client: vLLM's, of the engine.
            refuse: Gives what is raised to have the request with these parameters answered so.
            waits: Hears of the request with these parameters that it waits for a verdict.
        """
        generate = client.generate

        async def checked(
            prompt: Any, params: SamplingParams, *rest: Any, **options: Any
        ) -> AsyncGenerator[Any, None]:
            if params.structured_outputs is not None:
                tenant = (params.extra_args or {}).get(TENANT_XARG, "")
                given = params.structured_outputs, tenant, params.allowed_token_ids
                try:
                    await self.check(*given, lambda: waits(params))
                except TooManyGrammarsError as error:
                    raise refuse(params, error.response()) from None
            async with contextlib.aclosing(generate(prompt, params, *rest, **options)) as outputs:
                async for output in outputs:
                    yield output

        client.generate = checked

    async def check(
        self,
        params: StructuredOutputsParams,
        tenant: str = "",
        allowed: Sequence[int] | None = None,
        waits: Callable[[], None] = lambda: None,
    ) -> None:
        """Compile a grammar within the limits.

        Args:
            params: What has the grammar.
            tenant: Whose request it is; empty for the server's own.
            allowed: The only tokens that the request allows.
            waits: Called if nobody knows the verdict yet.

        Raises:
            VLLMValidationError: when that takes too much, fails, or cannot be known for this model, or when
                no answer can conform to it.
            GrammarNotCheckedError: when nobody knows.
            TooManyGrammarsError: when the tenant has too many others that wait.
        """
        key = self._key(params, allowed)
        if key is None:
            return
        known = key.digest
        if known in self._verdicts:
            refusal = self._verdicts[known]
            self._verdicts.move_to_end(known)
        else:
            waits()
            refusal = await self._verdict(key, tenant)
        if refusal:
            raise VLLMValidationError(refusal, parameter="structured_outputs")

    def _key(self, params: StructuredOutputsParams, allowed: Sequence[int] | None) -> _Key | None:
        """What has a verdict; None for what costs nothing, and for what vLLM refuses unread.

        Raises:
            VLLMValidationError: for any JSON object, of a backend that does not know it: vLLM lets it pass.
        """
        try:
            kind, text = get_structured_output_key(params)
        except ValueError:  # vLLM says so itself
            return None
        if not allowed or len(allowed) > MOST_TOKEN_IDS:  # likewise
            allowed = None
        if kind is StructuredOutputOptions.JSON_OBJECT:
            if not self._backend.knows_any_object:
                msg = (
                    f"{self._backend.name}, which this server keeps answers to grammars with, knows no JSON "
                    'object without a schema; give a schema, such as {"type": "object", "properties": {...}}'
                )
                raise VLLMValidationError(msg, parameter="structured_outputs")
            if allowed is None:
                return None
            kind, text = StructuredOutputOptions.JSON, _ANY_OBJECT
        grammar = self._backend.grammar(kind, text)
        return grammar and _Key(*grammar, None if allowed is None else sorted(set(allowed)))

    async def _verdict(self, key: _Key, tenant: str) -> str:
        """Why a grammar is refused, found out once for all of a tenant who ask; empty for a good one.

        Raises:
            GrammarNotCheckedError: when nobody knows.
            TooManyGrammarsError: when the tenant has too many others that wait.
        """
        place = tenant, key.digest
        one = self._pending.get(place) or self._asked(key, place)
        one.waiting += 1
        try:  # a client that leaves does not stop the child in its work
            return await asyncio.shield(one.verdict)
        finally:
            one.waiting -= 1
            if not one.waiting and not one.has_begun:
                one.verdict.cancel()
                self._forget(place, one)

    def _asked(self, key: _Key, place: tuple[str, bytes]) -> _Pending:
        tenant, _ = place
        if sum(whose == tenant for whose, _ in self._pending) >= _MOST_PENDING:
            raise TooManyGrammarsError
        # Not in the context of the request that happens to be first: others may wait for it.
        task = asyncio.get_running_loop().create_task(self._judge(key, place), context=contextvars.Context())
        one = self._pending[place] = _Pending(task)

        def over(task: asyncio.Task[str]) -> None:
            self._forget(place, one)
            if not task.cancelled():
                task.exception()  # seen, so that nobody complains when all who asked have left

        task.add_done_callback(over)
        return one

    def _forget(self, place: tuple[str, bytes], one: _Pending) -> None:
        if self._pending.get(place) is one:
            del self._pending[place]

    async def _judge(self, key: _Key, place: tuple[str, bytes]) -> str:
        """Why a grammar is refused, which it also is when children keep dying of it; empty for a good one.

        Raises:
            GrammarNotCheckedError: when the child has died, or says nothing.
        """
        tenant, known = place
        async with self._turn(tenant):
            self._pending[place].has_begun = True
            if known in self._verdicts:
                return self._verdicts[known]
            if self._child is not None and self._child.has_ended:
                await self.close()
            child = self._child or await self._start()
            answer = await child.ask(key, self._limits.timeout_s * _WALL)
            if answer != "ok":
                logs.event("grammar_refused", kind=key.kind, bytes=len(key.text), answer=answer or "none")
            silences = self._silences.pop(known, 0)
            if answer == "":
                await self.close()
                if (silences := silences + 1) < _MAX_SILENCES:
                    _keep(self._silences, known, silences)
                    raise GrammarNotCheckedError(
                        "what the answer must conform to could not be checked; try again"
                    )
            return _keep(self._verdicts, known, self._refusal(answer, key))

    @contextlib.asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait until the child has nothing to do and it is the tenant's turn."""
        party = Party(tenant, SYSTEM)  # the tiers of a tenant have no turns of their own here
        told = self._places.join(party, 1.0)
        try:
            await asyncio.wait([told])  # which leaves it as it is when this is cancelled
            yield
        finally:
            self._places.leave(party, told)

    def _refusal(self, answer: str, key: _Key) -> str:
        """Why a grammar is refused of which the child says this; empty for a good one."""
        word, _, why = answer.partition(" ")
        match word:
            case "ok":
                return ""
            case "wrong":
                return f"what the answer must conform to does not compile: {json.loads(why)}"
            case "nothing":
                what = "no token" if key.allowed is None else "none of allowed_token_ids"
                return f"no answer can conform to what it must conform to: {what} can begin one"
        limits = self._limits
        return (
            "what the answer must conform to takes too long or too much memory to compile; "
            f"limits.grammar_timeout_s allows {limits.timeout_s:g} s, "
            f"limits.max_grammar_mib {limits.max_mib} MiB"
        )

    async def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            await child.end()

    async def _start(self) -> Child:
        """A child that is ready; one that ends before that is started again."""
        start = {
            "backend": self._backend.name,
            "vocabulary": await asyncio.to_thread(_vocabulary, self._backend),
            "max_s": self._limits.timeout_s,
            "max_bytes": self._limits.max_mib << 20,
        }
        for _ in range(_STARTS):
            self._child = child = await Child.started()
            if await child.ask(start, _START_S) == "ready":
                return child
            await self.close()
            logs.event(
                "grammar_child_not_started", returncode=child.process.returncode, said=await child.said()
            )
        raise RuntimeError("the process that checks grammars does not start")


def _keep(kept: OrderedDict[bytes, _Value], known: bytes, value: _Value) -> _Value:
    """Keep what is known of a grammar, for the oldest of too many."""
    kept[known] = value
    if len(kept) > _MAX_VERDICTS:
        kept.popitem(last=False)
    return value


def _vocabulary(backend: GrammarBackend) -> Any:
    """The vocabulary that masks are made for.

    Raises:
        VLLMValidationError: when the backend knows no way to read it: nobody knows what a grammar takes.
    """
    try:
        return backend.vocabulary()
    except (ValueError, AttributeError, TypeError, RuntimeError) as error:
        message = f"this model's answers cannot be held to anything: its vocabulary cannot be read ({error})"
        raise VLLMValidationError(message, parameter="structured_outputs") from error
