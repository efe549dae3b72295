"""The option of commands that talk to one model of a running deployment."""

from __future__ import annotations

from typing import Annotated

import typer

ModelOption = Annotated[
    str | None, typer.Option("--model", help="Of several models, which one; by default the first.")
]
