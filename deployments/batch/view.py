"""How `slackserve batch` shows how far it is, and what came of it."""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from deployments.batch.results import ResultFiles

if TYPE_CHECKING:
    from rich.console import Console

_LINE_EVERY_S: Final = 30.0
"""Where there is no terminal."""


class BatchView:
    """Counts, and draws while it is entered: a bar on a terminal, else a line now and then.

    Args:
        total: Requests that are asked for.
    """

    def __init__(self, total: int, console: Console) -> None:
        self.failed: Counter[str] = Counter()
        self.answered = 0
        self._total = total
        self._console = console
        self._refused = ""
        self._said_s = time.monotonic()
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        """Begin to draw."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """End it."""
        self._bar.stop()

    def answer(self) -> None:
        """A request has its answer."""
        self.answered += 1
        self._refused = ""
        self._show()

    def fail(self, name: str) -> None:
        """A request has none, for a reason of this name."""
        self.failed[name] += 1
        self._show()

    def refuse(self, name: str) -> None:
        """The server does not answer one now, for a reason of this name."""
        self._refused = name
        self._show()

    def summary(self, results: ResultFiles) -> list[str]:
        """What came of it, in lines."""
        lines = [f"{self.answered:,} answered, in {results.path}"]
        if self.failed:
            reasons = ", ".join(f"{count:,} {name}" for name, count in self.failed.most_common())
            lines.append(f"{self.failed.total():,} failed, in {results.failed_path}: {reasons}")
        return lines

    def _show(self) -> None:
        done = self.answered + self.failed.total()
        failed = f"{self.failed.total():,} failed" if self.failed else ""
        waits = f"waits: {self._refused}" if self._refused else ""
        said = ", ".join(filter(None, (failed, waits)))
        self._bar.update(self._task, completed=done, description=said)
        if self._bar.disable and time.monotonic() - self._said_s >= _LINE_EVERY_S:
            self._said_s = time.monotonic()
            self._console.print(Text(f"{done:,} of {self._total:,} done{said and f', {said}'}"))
