"""The report: one HTML file with everything in it.

Owns how plots and tables become a page. Plots are pictures inside the page, one for wide and one for narrow
screens; nothing is loaded from elsewhere, and no script runs.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from simulator.findings import Findings
from simulator.report.canvas import NARROW_IN, WIDE_IN
from simulator.report.plots import Plot, plots, svg_bytes
from simulator.report.tables import (
    MAIN_LEVEL,
    blocking_table,
    goodput_table,
    kinds_table,
    takeaway,
    work_table,
)
from simulator.report.wording import level, rate


def html(findings: Findings, more: Sequence[Plot] = ()) -> str:
    """The page; everything that comes from the findings is escaped."""
    environment = Environment(
        loader=PackageLoader("simulator.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    at_rps, kinds = kinds_table(findings)
    return environment.get_template("report.html").render(
        findings=findings,
        takeaway=takeaway(findings),
        pictures={plot.name: picture(plot) for plot in plots(findings)},
        more=[picture(plot) for plot in more],
        goodput=goodput_table(findings),
        kinds=kinds,
        kinds_rate=rate(at_rps),
        work=work_table(findings),
        blocking=blocking_table(findings),
        main_level=level(MAIN_LEVEL),
        enough=float(MAIN_LEVEL),
    )


def write_report(findings: Findings, directory: Path, more: Sequence[Plot] = ()) -> Path:
    """Write `report.html` and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "report.html"
    path.write_text(html(findings, more), encoding="utf-8")
    return path


def picture(plot: Plot) -> dict[str, str]:
    """A plot with addresses that hold the images themselves, as `picture.html` takes it."""
    images = {
        name: f"data:image/svg+xml;base64,{b64encode(svg_bytes(plot.draw(width_in))).decode()}"
        for name, width_in in (("wide", WIDE_IN), ("narrow", NARROW_IN))
    }
    return {"name": plot.name, "heading": plot.heading, "caption": plot.caption, **images}
