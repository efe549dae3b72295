"""Compiles grammars in processes that may die of them; see `decode_node.grammars.check`.

Reads the tokenizer and then one grammar after the other from stdin, a JSON value a line, and answers each
with a line. Each is compiled in a fork, which the kernel's own timer ends when it takes too long. Imports
nothing of the engine, so that it starts in seconds and is small.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import xgrammar

_NICENESS = 10
"""Engines go first."""


def main() -> None:
    """Serve until stdin ends."""
    os.nice(_NICENESS)
    start = json.loads(sys.stdin.readline())
    tokenizer = xgrammar.TokenizerInfo.deserialize_json(start["tokenizer"])
    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)
    limit = _data_bytes() + start["max_bytes"]
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # nobody reads it from here on
    _say("ready")
    for line in sys.stdin:
        kind, text = json.loads(line)
        if (pid := os.fork()) == 0:
            signal.setitimer(
                signal.ITIMER_PROF, start["max_s"]
            )  # counts computing; nobody catches its signal
            os._exit(_compiled(compiler, kind, text))
        _, status = os.waitpid(pid, 0)
        _say("ok" if status == 0 else "too much")


def _say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def _compiled(compiler: Any, kind: str, text: str) -> int:
    """0 unless memory did not suffice: what is wrong with a grammar vLLM says in its own words."""
    try:
        _compile(compiler, kind, text)
    except Exception as error:  # noqa: BLE001 - see above
        # Of memory that C++ does not get xgrammar makes an error of this text, and no MemoryError.
        return int(isinstance(error, MemoryError) or str(error).startswith("std::bad_alloc"))
    return 0


def _compile(compiler: Any, kind: str, text: str) -> None:
    """As vLLM's xgrammar backend does."""
    match kind:
        case "json":
            compiler.compile_json_schema(text)
        case "regex":
            compiler.compile_regex(text)
        case "structural_tag" if "structures" in (tag := json.loads(text)):
            items = [
                xgrammar.StructuralTagItem(
                    begin=each["begin"], schema=json.dumps(each["schema"]), end=each["end"]
                )
                for each in tag["structures"]
            ]
            compiler.compile_structural_tag(items, tag["triggers"])
        case "structural_tag":
            compiler.compile_structural_tag(text)
        case _:
            compiler.compile_grammar(text)


def _data_bytes() -> int:
    """Private memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


if __name__ == "__main__":
    main()
