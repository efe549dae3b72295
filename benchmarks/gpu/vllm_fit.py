"""Whether a vLLM has what SlackServe's scheduler and worker build on, by reading its source.

`vllm_names.toml` lists these names. Nothing is imported, so a wheel can be read that does not run here.

    python -m benchmarks.gpu.vllm_fit DIRECTORY    # where its `vllm` package lies
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from pathlib import Path

_NAMES = Path(__file__).parent / "vllm_names.toml"


def missing(package: Path) -> list[str]:
    """What a vLLM lacks, in words; empty if it fits.

    Args:
        package: Its directory, the one with `v1` in it.
    """
    needed: dict[str, list[str]] = tomllib.loads(_NAMES.read_text())
    return [problem for place, names in needed.items() for problem in _missing(package, place, names)]


def _missing(package: Path, place: str, names: list[str]) -> list[str]:
    file, _, owner = place.partition(": ")
    path = package / file
    if not path.is_file():
        return [f"there is no {file}"]
    body = ast.parse(path.read_text()).body
    if owner:
        owners = [node for node in body if isinstance(node, ast.ClassDef) and node.name == owner]
        if not owners:
            return [f"{file} has no {owner}"]
        body = owners[0].body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    there = functions.keys() | {name for node in body for name in _defined(node)}
    problems = []
    for wanted in names:
        name, _, arguments = wanted.removesuffix(")").partition("(")
        if name not in (functions if arguments else there):
            problems.append(f"{place} has no {name}")
        elif arguments:
            taken = functions[name].args
            known = {given.arg for given in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)}
            lacking = [word for word in arguments.split(", ") if word not in known and taken.kwarg is None]
            problems += [f"{place}: {name} takes no {word}" for word in lacking]
    return problems


def _defined(statement: ast.stmt) -> set[str]:
    """Classes and variables that a statement defines or imports, and the attributes that a method sets."""
    match statement:
        case ast.ClassDef(name=name):
            return {name}
        case ast.ImportFrom(names=imported):
            return {each.asname or each.name for each in imported}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    names = set()
    for node in ast.walk(statement):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self")):
                names.add(name)
    return names


def main() -> None:
    """Print what is missing; fail if anything is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where its `vllm` package lies")
    directory = parser.parse_args().directory
    package = directory / "vllm" if (directory / "vllm").is_dir() else directory
    problems = missing(package)
    print("\n".join(problems) or "it has all that SlackServe builds on")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
