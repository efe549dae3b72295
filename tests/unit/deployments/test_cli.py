"""What the command line draws."""

import io

from rich.console import Console

from deployments.cli import preparation_progress


class TestPreparationProgress:
    def test_it_draws_the_stage_and_clears_it(self) -> None:
        console = Console(file=io.StringIO(), force_terminal=True, width=100)

        with preparation_progress(console) as report:
            report("Unpacking the weights", 0.5)

        assert isinstance(console.file, io.StringIO)
        assert "Unpacking the weights" in console.file.getvalue()

    def test_it_draws_nothing_without_a_step(self) -> None:
        console = Console(file=io.StringIO(), force_terminal=True)

        with preparation_progress(console):
            pass

        assert isinstance(console.file, io.StringIO)
        assert console.file.getvalue() == ""
