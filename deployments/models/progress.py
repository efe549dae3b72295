"""Progress of a model's preparation, drawn on a terminal.

Owns: the look of the bar. Does not own: the steps (see `model_conversion` and `model_store`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from deployments.models.conversion import ProgressCallback


@contextmanager
def rich_progress(console: Console | None = None) -> Iterator[ProgressCallback]:
    """Give a progress callback that draws a bar, on standard error unless a console is given.

    The bar appears with the first call, so a model that is ready draws nothing, and goes when the block ends.
    """
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console or Console(stderr=True),
        transient=True,
    )
    task = bar.add_task("", total=1.0)

    def report(stage: str, fraction: float) -> None:
        bar.start()
        bar.update(task, description=stage, completed=fraction)

    try:
        yield report
    finally:
        bar.stop()
