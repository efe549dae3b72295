"""Holds what an answer must conform to against limits of time and memory, before it reaches an engine.

A short grammar can take minutes and gigabytes to compile, and an engine that compiles it serves nobody
meanwhile, or dies. So it is compiled first in a fork of a child process. The child starts with the first
request that has a grammar; verdicts are kept. What is wrong with a grammar is vLLM's to say.

The child is started by `subprocess`, which calls nobody's fork handlers: uvloop's way to start one does, and
gRPC's handlers start threads in the child that now and then crash before it runs its program.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import xgrammar
from vllm.exceptions import VLLMServerError, VLLMValidationError
from vllm.v1.structured_output.request import get_structured_output_key
from vllm.v1.structured_output.utils import (
    choice_as_grammar,
    convert_lark_to_ebnf,
    grammar_is_likely_lark,
)

from telemetry import logs

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

_Value = TypeVar("_Value")
_CHILD: Final = Path(__file__).with_name("grammar_child.py")
_START_S: Final = 60.0
_STARTS: Final = 3
_SAID_BYTES: Final = 2000
"""Of what a child that does not start has written about it."""
_END_S: Final = 5.0
_WALL: Final = 20.0
"""A child that computes for its limit may take so many times as long on a busy machine."""
_MAX_VERDICTS: Final = 4096
_MAX_SILENCES: Final = 3
"""A grammar that so many children in a row say nothing of is refused: it may be what ends them."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What compiling one grammar may take."""

    timeout_s: float = 0.5
    max_mib: int = 1024


DEFAULT_LIMITS: Final = GrammarLimits()


class GrammarNotCheckedError(VLLMServerError):  # type: ignore[misc] # vLLM ships no types for it
    """The child has died or said nothing; the request may be good, and is another replica's."""


class GrammarCheck:
    """Refuses what takes too much to compile.

    Args:
        limits: How much that is.
        tokenizer: The engine's; masks are made for its vocabulary.
        vocab_size: The model's.
    """

    def __init__(self, limits: GrammarLimits, tokenizer: Any, vocab_size: int) -> None:
        self._limits = limits
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._verdicts: OrderedDict[bytes, bool] = OrderedDict()  # by digest: texts may be large
        self._silences: OrderedDict[bytes, int] = OrderedDict()  # in a row, of those without a verdict
        self._wanted: Counter[bytes] = Counter()  # how many wait for a verdict, by digest
        self._child: _Child | None = None
        self._one_at_a_time = asyncio.Lock()

    def stand_before(self, client: Any) -> None:
        """Check what the engine is asked to generate by."""
        generate = client.generate

        async def checked(
            prompt: Any, params: SamplingParams, *rest: Any, **options: Any
        ) -> AsyncGenerator[Any, None]:
            if params.structured_outputs is not None:
                await self.check(params.structured_outputs)
            async with contextlib.aclosing(generate(prompt, params, *rest, **options)) as outputs:
                async for output in outputs:
                    yield output

        client.generate = checked

    async def check(self, params: StructuredOutputsParams) -> None:
        """Compile a grammar within the limits.

        Raises:
            VLLMValidationError: when that takes too much.
            GrammarNotCheckedError: when nobody knows.
        """
        key = _key(params)
        if key is None:
            return
        known = _digest(key)
        if known not in self._verdicts:
            self._wanted[known] += 1
            try:  # a client that leaves does not stop the child in its work
                is_good = await asyncio.shield(self._judge(key))
            finally:
                self._wanted[known] -= 1
                if not self._wanted[known]:
                    del self._wanted[known]
        else:
            is_good = self._verdicts[known]
            self._verdicts.move_to_end(known)
        if not is_good:
            limits = self._limits
            message = (
                "what the answer must conform to takes too long or too much memory to compile; "
                f"limits.grammar_timeout_s allows {limits.timeout_s:g} s, "
                f"limits.max_grammar_mib {limits.max_mib} MiB"
            )
            raise VLLMValidationError(message, parameter="structured_outputs")

    async def _judge(self, key: tuple[str, str]) -> bool:
        """Whether a grammar compiles within the limits, or not when children keep dying of it.

        Raises:
            GrammarNotCheckedError: when the child has died, or says nothing.
        """
        known = _digest(key)
        async with self._one_at_a_time:
            if known in self._verdicts:
                return self._verdicts[known]
            if known not in self._wanted:
                return False  # all who asked have left meanwhile
            if self._child is not None and self._child.has_ended:
                await self.close()
            child = self._child or await self._start()
            answer = await child.ask(key, self._limits.timeout_s * _WALL)
            if answer != "ok":
                logs.event("grammar_refused", kind=key[0], bytes=len(key[1]), answer=answer or "none")
            silences = self._silences.pop(known, 0)
            if answer == "":
                await self.close()
                if (silences := silences + 1) < _MAX_SILENCES:
                    _keep(self._silences, known, silences)
                    raise GrammarNotCheckedError(
                        "what the answer must conform to could not be checked; try again"
                    )
            return _keep(self._verdicts, known, answer == "ok")

    async def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            await child.end()

    async def _start(self) -> _Child:
        """A child that is ready; one that ends before that is started again."""
        start = {
            "tokenizer": await asyncio.to_thread(_tokenizer_info, self._tokenizer, self._vocab_size),
            "max_s": self._limits.timeout_s,
            "max_bytes": self._limits.max_mib << 20,
        }
        for _ in range(_STARTS):
            self._child = child = await _Child.started()
            if await child.ask(start, _START_S) == "ready":
                return child
            await self.close()
            logs.event(
                "grammar_child_not_started", returncode=child.process.returncode, said=await child.said()
            )
        raise RuntimeError("the process that checks grammars does not start")


@dataclass(frozen=True, slots=True)
class _Child:
    """The process that compiles, and both ends of what is said between it and this one."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def started(cls) -> _Child:
        ours, its = socket.socketpair()
        with its:
            process = subprocess.Popen(  # noqa: ASYNC220, S603 - returns once our own program runs
                [sys.executable, "-P", str(_CHILD)],
                stdin=its.fileno(),
                stdout=its.fileno(),
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        return cls(process, *await asyncio.open_unix_connection(sock=ours))

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None or self.writer.is_closing()

    async def ask(self, value: Any, timeout_s: float) -> str:
        """Its answer to a value; nothing when it has ended, or does not answer in time."""
        try:
            async with asyncio.timeout(timeout_s):
                self.writer.write(json.dumps(value).encode() + b"\n")
                await self.writer.drain()
                return (await self.reader.readline()).decode().strip()
        except (TimeoutError, ConnectionError, RuntimeError):  # the last is uvloop's for a closed end
            return ""

    async def said(self) -> str:
        """What it has written to its standard error."""
        assert self.process.stderr is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                told = await asyncio.to_thread(self.process.stderr.read, _SAID_BYTES)
            return told.decode(errors="replace")
        return ""

    async def end(self) -> None:
        """Kill it, and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.writer.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.process.wait, _END_S)


def _keep(kept: OrderedDict[bytes, _Value], known: bytes, value: _Value) -> _Value:
    """Keep what is known of a grammar, for the oldest of too many."""
    kept[known] = value
    if len(kept) > _MAX_VERDICTS:
        kept.popitem(last=False)
    return value


def _digest(key: tuple[str, str]) -> bytes:
    return sha256("\0".join(key).encode()).digest()


def _key(params: StructuredOutputsParams) -> tuple[str, str] | None:
    """The kind and text of a grammar as xgrammar takes it; None for one that costs nothing."""
    try:
        kind, text = get_structured_output_key(params)
    except ValueError:  # vLLM says so itself
        return None
    match kind.name.lower():
        case "json_object":
            return None
        case "choice":
            return "grammar", choice_as_grammar(json.loads(text))
        case "grammar":
            with contextlib.suppress(ValueError):
                if grammar_is_likely_lark(text):
                    return "grammar", convert_lark_to_ebnf(text)
            return "grammar", text
        case name:
            return name, text


def _tokenizer_info(tokenizer: Any, vocab_size: int) -> str:
    """The vocabulary that masks are made for; none where xgrammar knows no way to read it."""
    try:
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
    except (ValueError, AttributeError, TypeError):
        info = xgrammar.TokenizerInfo([])
    return str(info.serialize_json())
