"""What several commands do with their options.

They name one of several models or applications, refuse what would count for nothing and infinite numbers, and
find out before the work whether its result can be written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

ModelOption = Annotated[
    str | None, typer.Option("--model", help="Of several models, which one; by default the first.")
]
ApplicationOption = Annotated[
    str | None, typer.Option("--application", help="Of several Serve applications, which one.")
]


def finite(value: float | None) -> float | None:
    """A number that an option was given, or its default.

    Raises:
        typer.BadParameter: when it is infinite, which bounds without an upper one let pass.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value:g} is no finite number")
    return value


def refuse_given(ctx: typer.Context, parameters: Iterable[str], when: str, refusal: type[Exception]) -> None:
    """Refuse what was given though it counts for nothing.

    Args:
        ctx: The command's call.
        parameters: Names of its function's parameters.
        when: With or without which option that is so.
        refusal: What is raised, naming the options.
    """
    sources = {name: ctx.get_parameter_source(name) for name in parameters}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if not given:
        return
    names = {parameter.name: parameter for parameter in ctx.command.params}
    told = ", ".join(max(names[name].opts, key=len) for name in given)
    raise refusal(f"{told}: counts for nothing {when}; leave it out")


def check_file(option: str, path: Path | None, refusal: type[Exception]) -> None:
    """Refuse a file that cannot be written, whether it exists or not."""
    if path is None:
        return
    if path.is_dir():
        raise refusal(f"{option}: {path} is a directory; give a file")
    if not path.exists():
        if not path.parent.is_dir():
            raise refusal(f"{option}: {path} cannot be written: there is no directory {path.parent}")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise refusal(f"{option}: {path} cannot be written: no file can be created in its directory")
    elif not os.access(path, os.W_OK):
        raise refusal(f"{option}: {path} cannot be written")


def check_file_and_directory(option: str, path: Path, refusal: type[Exception]) -> None:
    """Create a file's directory; refuse a file that cannot be written there."""
    check_directory(option, path.parent, refusal)
    check_file(option, path, refusal)


def check_directory(option: str, path: Path | None, refusal: type[Exception]) -> None:
    """Create a directory, with those above it; refuse one in which no file can be created."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refusal(f"{option}: {error.filename} cannot be created: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise refusal(f"{option}: no file can be created in {path}")
