"""Figures as bytes and as files, the same bytes for the same values."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from simulator.report.canvas import PNG_DPI, WIDE_IN, theme
from simulator.report.plots import plots

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from simulator.findings import Findings
    from simulator.report.plots import Plot


@theme()
def svg_bytes(figure: Figure) -> bytes:
    """A figure as SVG, without a date, its text as outlines."""
    buffer = BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


@theme()
def png_bytes(figure: Figure) -> bytes:
    """A figure as PNG."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=PNG_DPI, metadata={"Software": None})
    return buffer.getvalue()


def save(findings: Findings, directory: Path, more: Sequence[Plot] = ()) -> list[Path]:
    """Write each plot as `NAME.png` and `NAME.svg` and return their paths.

    Args:
        findings: Plots that they have no data for are left out.
        directory: Made where it does not exist.
        more: Plots beyond those of the findings.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for plot in [*plots(findings), *more]:
        for ending, write in (("png", png_bytes), ("svg", svg_bytes)):
            path = directory / f"{plot.name}.{ending}"
            path.write_bytes(write(plot.draw(WIDE_IN)))
            paths.append(path)
    return paths
