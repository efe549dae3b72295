"""Compiles grammars in processes that may die of them; see `decode_node.grammars.check`.

Reads what to compile with and then one grammar after the other from stdin, a JSON value a line, and answers
each with a line. Each is compiled in a fork, which the kernel's own timer ends when it takes too long. There
it is also found out whether a token can begin an answer; not with llguidance, which tokenizes texts for that,
and raises nothing for what is wrong.
Imports nothing of the engine, so that it starts in seconds and is small.
"""

from __future__ import annotations

import base64
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

_Compile: TypeAlias = Callable[[str, str, list[int] | None], bool]
"""Compiles a grammar of a kind and a text; whether an answer can begin, with one of these tokens if given."""
_NICENESS = 10
"""Engines go first."""
_OK, _NOTHING, _WRONG = 0, 2, 3
_VERDICTS = {_OK: "ok", _NOTHING: "nothing", _WRONG: "wrong"}
"""What is answered, by the exit code of the fork that has compiled; of what is wrong follows why, as JSON."""
_SOURCE = re.compile(r"\[[\d:]+\] \S+:\d+: ")
"""How xgrammar's errors begin: the time, and a line of its own code."""
_MOST_TOLD = 300
"""Characters of an error: it may repeat the whole text."""


def main() -> None:
    """Serve until stdin ends."""
    os.nice(_NICENESS)
    start = json.loads(sys.stdin.readline())
    compile_one = _COMPILERS[start["backend"]](start["vocabulary"])
    limit = _data_bytes() + start["max_bytes"]
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # nobody reads it from here on
    _say("ready")
    for line in sys.stdin:
        kind, text, allowed = json.loads(line)
        read, written = os.pipe()
        if (pid := os.fork()) == 0:
            signal.setitimer(
                signal.ITIMER_PROF, start["max_s"]
            )  # counts computing; nobody catches its signal
            code, why = _compiled(compile_one, kind, text, allowed)
            os.write(written, json.dumps(why).encode())  # less than a pipe holds
            os._exit(code)
        os.close(written)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with os.fdopen(read) as told:
            why = f" {told.read()}" if code == _WRONG else ""
        _say(_VERDICTS.get(code, "too much") + why)


def _say(answer: str) -> None:
    sys.stdout.write(f"{answer}\n")
    sys.stdout.flush()


def _compiled(compile_one: _Compile, kind: str, text: str, allowed: list[int] | None) -> tuple[int, str]:
    """One of `_VERDICTS` and what is wrong, or 1 if memory did not suffice."""
    try:
        begins = compile_one(kind, text, allowed)
    except Exception as error:  # noqa: BLE001 - a library raises what it likes
        # Of memory that C++ does not get xgrammar makes an error of this text, and no MemoryError.
        if isinstance(error, MemoryError) or str(error).startswith("std::bad_alloc"):
            return 1, ""
        # Of a text that is not ASCII it may cite half a character.
        said = error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
        why = " ".join(_SOURCE.sub("", said, count=1).split())
        return _WRONG, why[:_MOST_TOLD] or type(error).__name__
    return _OK if begins else _NOTHING, ""


def _xgrammar(vocabulary: str) -> _Compile:
    """As vLLM's xgrammar backend compiles."""
    import numpy as np  # noqa: PLC0415 - of the libraries only what is needed
    import xgrammar  # noqa: PLC0415 - likewise

    tokenizer = xgrammar.TokenizerInfo.deserialize_json(vocabulary)
    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)

    def compiled(kind: str, text: str) -> xgrammar.CompiledGrammar:
        match kind:
            case "json":
                return compiler.compile_json_schema(text)
            case "regex":
                return compiler.compile_regex(text)
            case "structural_tag" if "structures" in (tag := json.loads(text)):
                items = [
                    xgrammar.StructuralTagItem(
                        begin=each["begin"], schema=json.dumps(each["schema"]), end=each["end"]
                    )
                    for each in tag["structures"]
                ]
                return compiler.compile_structural_tag(items, tag["triggers"])
            case "structural_tag":
                return compiler.compile_structural_tag(text)
        return compiler.compile_grammar(text)

    def compile_one(kind: str, text: str, allowed: list[int] | None) -> bool:
        mask = np.full((tokenizer.vocab_size + 31) // 32, -1, np.int32)
        xgrammar.GrammarMatcher(compiled(kind, text)).fill_next_token_bitmask(mask[None])
        first = np.unpackbits(mask.view(np.uint8), bitorder="little", count=tokenizer.vocab_size)
        return _begins(np.flatnonzero(first).tolist(), allowed, tokenizer.stop_token_ids)

    return compile_one


def _begins(first: list[int], allowed: list[int] | None, ends: list[int]) -> bool:
    """Whether an answer can begin with one of the allowed tokens, or end at once.

    Args:
        first: Tokens that the grammar allows at first.
        allowed: All that the request allows; None for any.
        ends: Tokens that end an answer. The request may have others, so one that may end is left alone.
    """
    if not ends:
        return True
    return bool(first) if allowed is None else not {*allowed, *ends}.isdisjoint(first)


class _Tokens:
    """A vocabulary as llguidance reads one; what tokenizes texts is not needed."""

    bos_token_id = None

    def __init__(self, tokens: list[str], special: list[int], eos: list[int]) -> None:
        self.tokens = [token.encode("latin-1") for token in tokens]
        self.special_token_ids = special
        self.eos_token_id = eos[0]


def _guidance(vocabulary: dict[str, Any]) -> _Compile:
    """As vLLM's guidance backend compiles."""
    import llguidance  # noqa: PLC0415 - likewise

    wrapped = llguidance.TokenizerWrapper(_Tokens(**vocabulary))
    tokenizer = llguidance.LLTokenizer(wrapped, eos_token=vocabulary["eos"])

    def compile_one(_: str, text: str, __: list[int] | None) -> bool:
        llguidance.LLMatcher(tokenizer, text)
        return True

    return compile_one


def _outlines(vocabulary: str) -> _Compile:
    """As vLLM's outlines backend compiles."""
    import outlines_core  # noqa: PLC0415 - likewise

    known = outlines_core.Vocabulary.from_binary(base64.b64decode(vocabulary))

    def compile_one(kind: str, text: str, allowed: list[int] | None) -> bool:
        is_schema = kind == "json"
        index = outlines_core.Index(
            outlines_core.json_schema.build_regex_from_schema(text) if is_schema else text, known
        )
        first = index.get_allowed_tokens(index.get_initial_state()) or []
        return _begins(first, allowed, [known.get_eos_token_id()])

    return compile_one


_COMPILERS: dict[str, Callable[[Any], _Compile]] = {
    "xgrammar": _xgrammar,
    "guidance": _guidance,
    "outlines": _outlines,
}
CHECKED = tuple(_COMPILERS)
"""Backends whose grammars can be compiled beforehand, vLLM's names of them; the default is the first."""


def _data_bytes() -> int:
    """Private memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


if __name__ == "__main__":
    main()
