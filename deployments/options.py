"""What several commands do with their options.

They name one of several models or applications, read times and keys, refuse what would count for nothing and
infinite numbers, find out before the work whether its result can be written, and say so where it then cannot.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from deployments.whole_file import write_whole

UrlOption = Annotated[str, typer.Option(help="The server, with or without /v1.")]
KeyOption = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as bearer token.")]
CacertOption = Annotated[
    Path | None, typer.Option(help="Trust the certificates in this file, and no others.")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Of several models, which one; by default the first.")
]
ApplicationOption = Annotated[
    str | None, typer.Option("--application", help="Of several Serve applications, which one.")
]

_MAX_S: Final = 86_400
_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600}


def seconds(text: str) -> float:
    """A length of time as people write it: `60s`, `5m`, `1.5h`, or a number of seconds.

    Raises:
        typer.BadParameter: when it is not one, or more than a day.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if found is None or (value := float(found[1]) * _UNITS[found[2]]) <= 0:
        raise typer.BadParameter(f"{text!r} is no length of time; write 60s, 5m or 1h")
    if value > _MAX_S:
        raise typer.BadParameter(f"{text!r} is too long; give at most 24h")
    return value


def parse_key(text: str | None, refusal: type[Exception]) -> str | None:
    """An API key without blanks around it, such as the line break that ends a file; None for none.

    Raises:
        Exception: of the kind `refusal`, when no header can have it.
    """
    key = (text or "").strip()
    if (stray := next((each for each in key if not each.isprintable()), None)) is not None:
        raise refusal(f"--api-key, or OPENAI_API_KEY: no header can have {stray!r}; give the key alone")
    return key or None


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


@contextmanager
def writing(option: str, path: Path, refusal: type[Exception]) -> Iterator[None]:
    """Write the result of the work; refuse its place where that cannot be written after all.

    Raises:
        Exception: of the kind `refusal`, as on a disk that is full.
    """
    try:
        yield
    except OSError as error:
        raise refusal(f"{option}: {path} cannot be written: {error.strerror or error}") from None


def write_result(option: str, path: Path, text: str, refusal: type[Exception]) -> None:
    """Write the result of the work into one file; where it cannot be, what was there stays.

    Raises:
        Exception: of the kind `refusal`.
    """
    with writing(option, path, refusal):
        write_whole(path, text)
