"""What the figures show, read from the figures themselves."""

import matplotlib as mpl
import pytest
from synthetic_findings import ARMS, arm, findings

from simulator.findings import Life, Span, State
from simulator.report.bars import blocking_figure, goodput_figure, granularity_figure
from simulator.report.canvas import arm_styles, faded
from simulator.report.curves import attainment_figure, capacity_figure, ttft_figure
from simulator.report.timeline import common_window, shown_arms, shown_rows, timeline_figure

MADE = findings()
WIDTHS = (9.2, 4.1)


def words(figure) -> list[str]:
    shown = [text.get_text() for axes in figure.axes for text in axes.texts]
    legends = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    titles = [axes.get_title(loc=where) for axes in figure.axes for where in ("left", "right")]
    rows = [label.get_text() for axes in figure.axes for label in axes.get_yticklabels()]
    return [text.replace("\N{NO-BREAK SPACE}", " ").strip() for text in [*shown, *legends, *titles, *rows]]


def every_figure(width_in):
    return [
        attainment_figure(MADE.arms, width_in),
        ttft_figure(MADE.arms, MADE.objective_ms, width_in),
        timeline_figure(MADE.arms, tuple(MADE.objective_ms), width_in),
        goodput_figure(MADE.arms, width_in),
        blocking_figure(MADE.arms, width_in),
        granularity_figure([("every layer", 0.5, 1.2, 4.0), ("whole pass", 160.0, 900.0, 0.0)], width_in),
        capacity_figure([(1, 0.5, {"premium": 0.6}), (2, 0.99, {"premium": 1.0})], 0.9, 2, width_in),
    ]


@pytest.mark.parametrize("width_in", WIDTHS)
def test_words_stay_inside_and_legends_off_the_axes(width_in):
    for figure in every_figure(width_in):
        figure.canvas.draw()
        page = figure.bbox
        for legend in figure.legends:
            box = legend.get_window_extent()
            assert page.x0 <= box.x0
            assert box.x1 <= page.x1
            assert page.y0 <= box.y0
            assert not any(box.overlaps(axes.get_tightbbox()) for axes in figure.axes if axes.get_visible())
        for axes in figure.axes:
            box = axes.get_tightbbox()
            assert page.x0 - 1 <= box.x0
            assert box.x1 <= page.x1 + 1


def test_drawing_leaves_the_settings_of_the_process_alone():
    before = dict(mpl.rcParams)
    every_figure(9.2)
    assert dict(mpl.rcParams) == before


def test_attainment_names_its_levels_and_marks_goodput():
    figure = attainment_figure(MADE.arms)
    assert {"90 % in time", "99 % in time", "goodput", "5.10/s", "4.10/s"} <= set(words(figure))
    assert {title for title, *_ in ARMS.values()} <= set(words(figure))
    rings = {tuple(map(float, (line.get_xdata()[0], line.get_ydata()[0]))) for line in figure.axes[0].lines}
    assert {(5.1, 0.9), (4.1, 0.99), (1.06, 0.9)} <= rings


def test_distributions_have_a_panel_per_kind_and_name_the_objective():
    figure = ttft_figure(MADE.arms, MADE.objective_ms)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in panels] == ["chat", "code", "retrieval", "summary"]
    assert {"objective 250 ms", "objective 800 ms", "objective 4,000 ms"} <= set(words(figure))
    assert not panels[3].texts
    assert all(axes.get_xscale() == "log" for axes in panels)


def test_goodput_bars_say_how_often_the_reference():
    shown = words(goodput_figure(MADE.arms))
    assert "1.06/s" in shown
    assert "5.10/s  4.8\N{MULTIPLICATION SIGN} FCFS" in shown
    assert "never" in words(goodput_figure([arm("sedf", goodput_rps={"0.90": 0.0})]))


def test_blocking_leaves_out_arms_that_never_stop():
    shown = words(blocking_figure(MADE.arms))
    assert "SlackServe" in shown
    assert "FCFS" not in shown
    assert "mean 3.20 · p50 3.00 · p99 8.10 ms" in shown


def test_capacity_names_the_target_and_the_choice():
    shown = words(capacity_figure([(1, 0.5, {}), (2, 0.99, {"premium": 1.0})], 0.9, 2))
    assert {"target 90 %", "2 replicas", "all requests", "premium"} <= set(shown)
    assert "1 replica" in words(capacity_figure([(1, 0.5, {})], 0.9, 1))


def test_granularity_labels_each_point():
    points = [("every layer", 0.5, 1.2, 4.0), ("whole pass", 0.0, 0.0, 0.0)]
    assert {"every layer", "whole pass", "mean", "99th percentile"} <= set(words(granularity_figure(points)))


def test_a_timeline_compares_without_order_with_order_and_with_preemption():
    assert [item.arm for item in shown_arms(MADE.arms)] == ["fcfs", "sedf", "slackserve"]
    assert [item.arm for item in shown_arms([arm("a"), arm("b"), arm("c"), arm("d")])] == ["b", "c", "d"]
    assert shown_arms([arm("fcfs", timeline=())]) == []


def test_a_timeline_counts_late_requests():
    spans = (Span(State.WAITING, 0.0, 1.0), Span(State.RUNNING, 1.0, 2.0))
    late = Life(1, "chat", 10, 0.0, 1.5, 2.0, spans)
    figure = timeline_figure([arm("fcfs", timeline=(late, Life(2, "chat", 10, 0.0, None, 2.0, spans)))])
    assert "1 of 1 late" in words(figure)


def test_timelines_share_the_seconds_that_all_of_them_cover():
    one = arm("fcfs", timeline=(_waiting(0, 2.0, 9.0), _waiting(1, 3.0, 12.0)))
    two = arm("sedf", timeline=(_waiting(0, 1.0, 8.0),))
    window = common_window([one, two])
    assert (window.start_s, window.end_s) == (2.0, 8.0)
    apart = arm("sedf", timeline=(_waiting(0, 20.0, 21.0),))
    assert common_window([one, apart]).end_s == 21.0


def test_requests_that_run_go_before_those_that_only_wait():
    waiting = tuple(_waiting(number, number / 100, 50.0) for number in range(40))
    ran = Life(99, "chat", 10, 1.0, None, 3.0, (Span(State.RUNNING, 1.0, 3.0),))
    item = arm("fcfs", timeline=(*waiting, ran))
    panel = shown_rows(item, common_window([item]))
    assert panel.lives[-1].number == 99
    assert len(panel.lives) + panel.left_out == 41
    assert panel.left_out > 0


def test_a_window_ends_before_there_are_too_many_rows():
    busy = tuple(
        Life(number, "chat", 10, number, None, number + 1, (Span(State.RUNNING, number, number + 1),))
        for number in range(60)
    )
    item = arm("fcfs", timeline=busy)
    window = common_window([item])
    panel = shown_rows(item, window)
    assert window.end_s == len(panel.lives) < 60
    assert panel.left_out == 0


@pytest.mark.parametrize("width_in", WIDTHS)
def test_long_names_are_cut_and_not_drawn_over_the_edge(width_in):
    arms = [arm(name, title=f"{name} " + "with a name that goes on " * 5) for name in ("fcfs", "slackserve")]
    for figure in (
        goodput_figure(arms, width_in),
        blocking_figure(arms, width_in),
        timeline_figure(arms, (), width_in),
    ):
        figure.canvas.draw()
        axes = figure.axes[0]
        assert axes.get_window_extent().width > figure.bbox.width * 0.8
        assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in axes.texts)


def test_an_arm_looks_the_same_whoever_it_is_compared_with():
    assert arm_styles(["new", "sedf"])["sedf"] == arm_styles(ARMS)["sedf"]
    styles = arm_styles([*ARMS, "new", "newer"])
    assert len({(style.colour, style.marker) for style in styles.values()}) == 9
    assert max(styles.values(), key=lambda style: style.width) == styles["slackserve"]


def test_a_faded_colour_is_between_it_and_white():
    assert faded("#000000", 1) == "#000000"
    assert faded("#000000", 0) == "#ffffff"


def _waiting(number: int, start_s: float, end_s: float) -> Life:
    return Life(number, "chat", 10, start_s, None, end_s, (Span(State.WAITING, start_s, end_s),))
