"""A benchmark that is asked for help, or for what it does not have, measures nothing and keeps its result."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_PARSING = {"parse_args", "parse_known_args"}


def _modules():
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "benchmarks/*.py"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    return {name: ast.parse((ROOT / name).read_text()) for name in listed.stdout.split()}


def _functions(module):
    return {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}


def _calls(node):
    """The names of what is called, in the order of the lines."""
    found = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    return [ast.unparse(each.func).rpartition(".")[2] for each in sorted(found, key=_place)]


def _place(call):
    return call.lineno, call.col_offset


MODULES = _modules()
PARSERS = _PARSING | {
    name
    for module in MODULES.values()
    for name, function in _functions(module).items()
    if name != "main" and _PARSING & set(_calls(function))
}
"""What reads the arguments of a command: argparse, and our own functions that call it."""


def _started(module):
    """What a module does as a command: its `main`, or all that follows when it has none."""
    for node in module.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            return _functions(module)["main"] if "main" in _calls(node) else node
    return None


COMMANDS = {name: start for name, module in MODULES.items() if (start := _started(module)) is not None}


def test_the_commands_are_found():
    assert len(COMMANDS) > 40
    assert "benchmarks/gpu/predicted.py" in COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_reads_its_arguments_before_anything_else(name):
    first = _calls(COMMANDS[name])[0]
    assert first in {"ArgumentParser", *PARSERS}, f"{name} calls {first} before it reads its arguments"
    assert PARSERS & set(_calls(COMMANDS[name]))
