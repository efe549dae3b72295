"""Goodput on streams that were held out, and what is made of it."""

from dataclasses import replace

import pytest

from benchmarks.cores import held_out, held_out_axes
from benchmarks.cores.held_out import Case, against, compare, earlier, goodputs, offered, ratio_interval
from simulator.arms.arms import ARMS
from simulator.study.presets import PRESETS


def test_goodput_falls_with_what_is_asked():
    found = goodputs(Case("8b", "slackserve", 0, 0.0, 1000, 200))
    assert found["all 90%"] >= found["worst class 90%"] >= found["worst class 99%"] > 0
    assert found["all 90%"] >= found["all 99%"]
    assert found == goodputs(Case("8b", "slackserve", 0, 0.0, 1000, 200))


def test_every_arm_has_its_best_setting():
    found = {
        Case("8b", arm, setting, 0.0, seed, 100): {"all 90%": 4.0 if arm == "slackserve" else 1.0 + setting}
        for arm in held_out.NAMES
        for setting in range(len(ARMS[arm].settings))
        for seed in (1000, 1001)
    }
    rows = {row["arm"]: row for row in compare(found)}
    assert rows["sedf-resume"]["setting"] == dict(ARMS["sedf-resume"].settings[-1])
    assert rows["sedf-resume"]["ours over it"] == pytest.approx(4.0 / len(ARMS["sedf-resume"].settings))
    assert (rows["slackserve"]["low"], rows["slackserve"]["high"]) == (1.0, 1.0)


def test_a_ratio_of_pairs_is_narrower_than_the_streams_differ():
    other = [float(value) for value in range(5, 25)]
    low, ratio, high = ratio_interval([1.1 * value for value in other], other)
    assert (low, ratio, high) == pytest.approx((1.1, 1.1, 1.1))
    low, ratio, high = ratio_interval(other[::-1], other)
    assert ratio == pytest.approx(1.0)
    assert (low < 0.8, high > 1.2) == (True, True)


def test_an_arm_that_aims_has_the_level_as_the_target_of_each_kind():
    case = Case("8b", "targets", 0, 0.0, 1000, 200)
    replica, mix = offered(case, 0.99)
    assert set(replica.tiers.targets.values()) == {0.99}
    assert set(replica.tiers.targets) == {kind.tier for kind in mix.kinds.values()}
    alike, _ = offered(replace(case, arm="slackserve"), 0.99)
    assert alike is PRESETS["flowprefill-8b"].hardware


def test_objectives_and_charges_are_those_of_the_case():
    case = Case("8b", "targets", 0, 0.0, 1000, 200, bias=0.7, scale=0.5, charged_s=1e-4)
    replica, mix = offered(case, 0.9)
    assert (replica.cost.check_s, replica.noise.bias) == (1e-4, 0.7)
    assert mix.kinds["text"].ttft_s == pytest.approx(0.125)
    for peer in ("sedf-resume", "slackserve-chunked"):
        assert offered(replace(case, arm=peer), 0.9)[0].cost.check_s == 0


def test_earlier_rows_stand_beside_new_ones_if_the_streams_are_the_same():
    streams = {"streams": 10, "requests": 2000, "first_seed": 1000}
    new = [{"model": "8b", "sigma": 0.0, "figure": "all 90%", "arm": "targets", "streams": [2.0] * 10}]
    rows = against([*earlier("cores/held_out", streams, new), *new], "targets")
    assert {row["arm"] for row in rows} == {*held_out.NAMES, "targets"}
    assert {(row["model"], row["figure"]) for row in rows} == {("8b", "all 90%")}
    known = next(row for row in rows if row["arm"] == "sedf-resume")
    assert known["ours over it"] == pytest.approx(2.0 / known["goodput_rps"])
    with pytest.raises(ValueError, match="its streams differ"):
        earlier("cores/held_out", {**streams, "streams": 9}, new)


def test_the_break_even_lies_between_the_charges_about_it():
    assert held_out_axes.break_even_s([(0.0, 1.1), (1e-4, 0.9)]) == pytest.approx(5e-5)
    assert held_out_axes.break_even_s([(0.0, 1.1), (1e-4, 1.05)]) is None


@pytest.mark.parametrize(
    ("model", "level", "settings"),
    [
        ("8b", 0.9, {"sedf-resume": 2048.0, "sedf-chunked": 1024.0, "targets": None}),
        ("14b", 0.99, {"sedf-resume": 1024.0, "sedf-chunked": 768.0, "targets": None}),
    ],
)
def test_the_peers_have_the_settings_that_were_best_for_that_model_and_level(model, level, settings):
    assert held_out_axes.best_settings(model, level) == settings


def test_what_is_charged_is_charged_to_ours_alone():
    settings = held_out_axes.best_settings("8b", 0.9)
    groups = held_out_axes.along(Case("8b", "targets", 0, 0.0, 0, 100), 2, "charged_s", 1e-4, settings)
    assert {name: [case.charged_s for case in cases] for name, cases in groups.items()} == {
        "sedf-resume": [0.0, 0.0],
        "sedf-chunked": [0.0, 0.0],
        "targets": [1e-4, 1e-4],
    }
    assert [case.seed for case in groups["targets"]] == [1000, 1001]


def test_preemption_is_removed_first():
    parts = held_out_axes.without_parts(Case("8b", "targets", 0, 0.0, 0, 100), 1)
    assert [*parts][:3] == ["targets", "targets-chunked 1024", "targets-chunked 2048"]
