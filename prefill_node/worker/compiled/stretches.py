"""Cuts the code of a compiled forward pass into stretches that run one after the other.

vLLM compiles a model in pieces, with the attention of each layer between two of them, and generates a
function of plain assignments that calls them in order. Cut before and behind an attention, a pass can stop at
each cut: what goes on behind it needs the function's inputs, which a repeated step brings again, and the
values that are alive there. Owns reading that code and finding what is alive; runs nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

FUNCTION: Final = "execution_fn"
"""The name that vLLM gives the function."""
PIECES: Final = "__vllm_submods__"
_BETWEEN: Final = "__vllm_inlined_submods__"
"""How the names of what stands between compiled pieces begin."""
_WRITES_CACHE: Final = "kv_cache_update"
"""How operators end that only put keys and values in the KV cache; vLLM sets them apart like an attention."""
_INPUTS: Final = "_inputs"
_ALIVE: Final = "_alive"


class NotInPiecesError(Exception):
    """The code is not what vLLM 0.29 generates, or has nothing between its pieces; the message says what."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """A function in stretches.

    Attributes:
        source: Python with a function for each stretch, named by `stretch_name`. It takes the inputs of the
            whole function, as a tuple; what the stretch before it has returned, a list, which it empties; and
            vLLM's pieces. It returns the list of what is alive, and the last one what the function returns.
        count: How many there are.
        at_attention: Whether each begins with an attention.
        inputs: Names of the function's inputs, in order.
    """

    source: str
    count: int
    at_attention: tuple[bool, ...]
    inputs: tuple[str, ...]


def stretch_name(number: int) -> str:
    """The name of a stretch's function."""
    return f"stretch_{number}"


def cut(code: str, *, before: bool) -> Stretches:
    """Cut what `vllm.compilation.codegen.generate_execution_code` has generated behind each attention.

    Args:
        code: Python.
        before: Whether to cut before each attention as well.

    Raises:
        NotInPiecesError: when that is not possible.
    """
    module = ast.parse(code)
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    whole = next((node for node in functions if node.name == FUNCTION), None)
    if whole is None:
        raise NotInPiecesError(f"it has no function {FUNCTION}")
    statements = [node for node in whole.body if not isinstance(node, ast.Delete)]
    *assignments, last = statements
    if not isinstance(last, ast.Return) or not all(_is_assignment(node) for node in assignments):
        raise NotInPiecesError("it is more than assignments and a return")
    heavy = {node.name for node in functions if not _only_writes_cache(node)}
    places = [number for number, node in enumerate(assignments) if _is_between(node, heavy)]
    if not places:
        raise NotInPiecesError("nothing stands between its pieces")
    starts = {0, *(place + 1 for place in places), *(places if before else ())}
    bounds = [*sorted(starts), len(statements)]
    parts = [statements[start:end] for start, end in pairwise(bounds)]
    inputs = tuple(argument.arg for argument in whole.args.args)
    kept: list[ast.stmt] = [node for node in module.body if node is not whole]
    alive: list[str] = []
    for number, part in enumerate(parts):
        after = {name for later in parts[number + 1 :] for name in _read(later)}
        function = _stretch(number, part, inputs, alive, after)
        alive = _known_behind(part, alive, after, inputs)
        kept.append(function)
    source = ast.unparse(ast.fix_missing_locations(ast.Module(kept, [])))
    return Stretches(source, len(parts), tuple(_is_between(part[0], heavy) for part in parts), inputs)


def _is_assignment(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)


def _is_between(node: ast.stmt, heavy: set[str]) -> bool:
    """Whether a statement calls what stands between two pieces, of which vLLM inlines the code."""
    call = node.value if isinstance(node, ast.Assign) else None
    function = call.func if isinstance(call, ast.Call) else None
    return isinstance(function, ast.Name) and function.id.startswith(_BETWEEN) and function.id in heavy


def _only_writes_cache(function: ast.FunctionDef) -> bool:
    """Whether what stands between two pieces takes no time: a pass need not stop around it."""
    called = [
        node.func.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func).startswith("torch.ops.")
    ]
    return bool(called) and all(name.endswith(_WRITES_CACHE) for name in called)


def _read(statements: Iterable[ast.stmt]) -> set[str]:
    return {
        node.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


def _assigned(node: ast.stmt) -> str | None:
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    return target.id if isinstance(target, ast.Name) else None


def _known_behind(
    part: Sequence[ast.stmt], alive: Sequence[str], after: set[str], inputs: Sequence[str]
) -> list[str]:
    """The names that what comes after a part needs from it or from before it."""
    known = dict.fromkeys((*alive, *(name for node in part if (name := _assigned(node)) is not None)))
    return [name for name in known if name in after and name not in inputs]


def _stretch(
    number: int, part: Sequence[ast.stmt], inputs: Sequence[str], alive: Sequence[str], after: set[str]
) -> ast.FunctionDef:
    """The function of one stretch, which lets go of each value after its last use."""
    lines: list[str] = []
    if alive:
        lines += [f"{', '.join(alive)}, = {_ALIVE}", f"{_ALIVE}.clear()"]
    used = _read(part)
    lines += [f"{name} = {_INPUTS}[{place}]" for place, name in enumerate(inputs) if name in used]
    behind = _known_behind(part, alive, after, inputs)
    local = {*alive, *(name for node in part if (name := _assigned(node)) is not None)} - {*inputs}
    for place, node in enumerate(part):
        if isinstance(node, ast.Return):
            lines.append(ast.unparse(node))
            break
        lines.append(ast.unparse(node))
        later = _read(part[place + 1 :])
        done = sorted(name for name in local if name not in later and name not in behind)
        done = [name for name in done if name in alive or name in _assigned_up_to(part, place)]
        if done:
            lines.append(f"del {', '.join(done)}")
        local -= {*done}
    else:
        lines.append(f"return [{', '.join(behind)}]")
    body = "\n".join(f"    {line}" for line in lines)
    parsed = ast.parse(f"def {stretch_name(number)}({_INPUTS}, {_ALIVE}, {PIECES}):\n{body}").body[0]
    assert isinstance(parsed, ast.FunctionDef)
    return parsed


def _assigned_up_to(part: Sequence[ast.stmt], place: int) -> set[str]:
    return {name for node in part[: place + 1] if (name := _assigned(node)) is not None}
