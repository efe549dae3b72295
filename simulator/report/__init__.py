"""Plots and an HTML page of what a simulation found.

Takes findings, gives figures and files. Nothing here simulates.
"""

from simulator.report.attainment import attainment_figure
from simulator.report.blocking import blocking_figure, granularity_figure
from simulator.report.capacity import capacity_figure
from simulator.report.distributions import ttft_figure
from simulator.report.goodput import goodput_figure
from simulator.report.page import html, write_report
from simulator.report.plots import Plot, capacity_plot, granularity_plot, plots, save
from simulator.report.tables import takeaway
from simulator.report.timeline import timeline_figure

__all__ = [
    "Plot",
    "attainment_figure",
    "blocking_figure",
    "capacity_figure",
    "capacity_plot",
    "goodput_figure",
    "granularity_figure",
    "granularity_plot",
    "html",
    "plots",
    "save",
    "takeaway",
    "timeline_figure",
    "ttft_figure",
    "write_report",
]
