"""`docs/logs.md` and the code name the same events, at the same levels, with the same fields.

The events are read from the source: calls of `logs.event`, and of the monitor's own log. A name that is an
argument is followed to the calls that give it.
"""

import ast
import dataclasses
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from router.messages import Placed
from slo.errors import Rejected

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "logs.md").read_text()
ROOMS = (
    "decode_node",
    "deployments",
    "engine_host",
    "kv_transfer",
    "prefill_node",
    "router",
    "sampling",
    "slo",
    "telemetry",
)
MONITORS = ROOT / "deployments" / "monitor"
LEVELS = {"debug": "DEBUG", "info": "INFO", "warning": "WARNING", "error": "ERROR", "exception": "ERROR"}
DECISIONS = {"request_placed": Placed, "request_rejected": Rejected}
"""Events with all the fields of a decision."""


@cache
def modules():
    return {
        path: ast.parse(path.read_text()) for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))
    }


def functions(path):
    """Each function of a module, with the class that it is in."""
    for node in ast.walk(modules()[path]):
        for each in node.body if isinstance(node, ast.ClassDef | ast.Module) else ():
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                yield each, node.name if isinstance(node, ast.ClassDef) else None


def called(call):
    """The name of what is called, and of what it is called on."""
    match call.func:
        case ast.Attribute(attr=name, value=ast.Name(id=owner) | ast.Attribute(attr=owner)):
            return name, owner
        case ast.Name(id=name):
            return name, None
    return None, None


def calls_of(function, owner, path):
    """Where a function is called: in its own module, or on something that is named after its class."""
    for where, tree in modules().items():
        for call in (each for each in ast.walk(tree) if isinstance(each, ast.Call)):
            name, on = called(call)
            is_named = owner is not None and on is not None and on.strip("_") == owner.lower()
            if name == function.name and (is_named or (where == path and on != "logs")):
                yield where, call


def values(node, path, function, owner):
    """What an expression may be, as the text that it makes."""
    match node:
        case ast.Constant(value=str(value)):
            return {value}
        case ast.IfExp():
            return values(node.body, path, function, owner) | values(node.orelse, path, function, owner)
        case ast.JoinedStr():
            made = {""}
            parts = (part.value if isinstance(part, ast.FormattedValue) else part for part in node.values)
            for part in parts:
                made = {one + two for one in made for two in values(part, path, function, owner)}
            return made
        case ast.Name(id=name):
            return values_of_name(name, path, function, owner)
    pytest.fail(f"{path}:{node.lineno}: nobody can tell which event this is: {ast.unparse(node)}")


def values_of_name(name, path, function, owner):
    parameters = [each.arg for each in function.args.args if each.arg not in {"self", "cls"}]
    if name in parameters:
        at = parameters.index(name)
        return {
            value
            for where, call in calls_of(function, owner, path)
            for caller, of in functions(where)
            if call in ast.walk(caller) and len(call.args) > at
            for value in values(call.args[at], where, caller, of)
        }
    return {
        value
        for each in ast.walk(function)
        if isinstance(each, ast.Assign)
        and any(isinstance(to, ast.Name) and to.id == name for to in each.targets)
        for value in values(each.value, path, function, owner)
    }


def levels(call):
    given = next((each.value for each in call.keywords if each.arg == "level"), None)
    return {"INFO"} if given is None else set(re.findall(r"logging\.([A-Z]+)", ast.unparse(given)))


@cache
def logged():
    """The levels and the fields of each event in the code; None among these for more that are handed on."""
    found = defaultdict(lambda: (set(), set()))
    for path in modules():
        for function, owner in functions(path):
            for call in (each for each in ast.walk(function) if isinstance(each, ast.Call)):
                if called(call) == ("event", "logs"):
                    fields = {each.arg for each in call.keywords} - {"level"}
                    names = values(call.args[0], path, function, owner)
                    assert names, f"{path}:{call.lineno}: nobody says which event this is"
                    for name in names:
                        found[name][0].update(levels(call))
                        found[name][1].update(fields)
                elif path.is_relative_to(MONITORS) and called(call)[1] == "_LOGGER":
                    name = call.args[0].value.split()[0]
                    found[name][0].add(LEVELS[called(call)[0]])
                    found[name][1].update({None} if len(call.args) > 1 or " " in call.args[0].value else ())
    for name, decision in DECISIONS.items():
        found[name][1].update(field.name for field in dataclasses.fields(decision))
        found[name][1].discard(None)
    return dict(found)


def rows():
    """Cells of the row of each event, by its name; the last one has its fields."""
    found = {}
    for section in PAGE.split("\n## ")[1:]:
        for line in section.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if re.fullmatch(r"`[a-z_]+`", cells[0]) and not section.startswith("Fields of requests"):
                name = cells[0].strip("`")
                assert name not in found, f"{name} has two rows"
                found[name] = cells
    return found


def test_the_page_has_every_event_and_no_other():
    assert sorted(rows()) == sorted(logged())


@pytest.mark.parametrize("name", sorted(logged()))
def test_an_event_has_its_levels_and_fields_there(name):
    in_code, fields = logged()[name]
    _, *cells, shown = rows()[name]
    match cells:
        case [when]:
            levels_there = {"INFO"}
        case [level, when, advice]:
            levels_there = set(level.split(", "))
            assert advice
    assert when
    assert levels_there == in_code
    there = set(re.findall(r"`(\w+)`", shown))
    assert there >= fields - {None} if None in fields else there == fields
    assert bool(there) == (shown not in {"none", "as text"})


def test_every_event_is_logged_in_a_way_that_is_read_here():
    """Nobody gives `event` or the module another name, or logs where no function is."""
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in {"telemetry", "telemetry.logs"}:
                names = {(each.name, each.asname) for each in node.names}
                renamed = {name for name, other in names if name == "event" or (name == "logs" and other)}
                assert not renamed, path
        inside = {call for function, _ in functions(path) for call in ast.walk(function)}
        calls = {node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not {call.lineno for call in calls - inside if called(call) == ("event", "logs")}, path
