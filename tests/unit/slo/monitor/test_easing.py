"""How soon less is shed again, after it was too little."""

from slo.monitor.easing import Easing, EasingRules
from slo.monitor.policy import ClusterPolicy
from slo.tiers import BACKGROUND, STANDARD

RULES = EasingRules(after_s=30.0, at_most_s=480.0)
TIGHT, LOOSE, LOOSER = (ClusterPolicy(1, {BACKGROUND: level}) for level in (1.0, 0.75, 0.5))
TIGHTER = ClusterPolicy(1, {BACKGROUND: 1.0, STANDARD: 0.25})


def failed(known, times=1):
    """After as many steps from the tight policy to the loose one, each taken back at once."""
    for _ in range(times):
        known = known.after_easing(TIGHT, RULES).after_tightening(LOOSE, 35.0, RULES)
    return known


def test_what_has_not_failed_is_tried_after_the_usual_time():
    known = Easing()
    assert known.waits_s(LOOSE, RULES) == 30
    known = failed(known)
    assert known.waits_s(TIGHT, RULES) == 30, "which was not too loose"
    assert known.after_tightening(TIGHT, 10.0, RULES) == known, "the same step back, by one more"


def test_each_time_that_it_fails_it_is_tried_after_twice_as_long_up_to_a_limit():
    waits = [failed(Easing(), times).waits_s(LOOSE, RULES) for times in range(1, 7)]
    assert waits == [60, 120, 240, 480, 480, 480]
    assert failed(Easing()).waits_s(LOOSER, RULES) == 60, "what is looser even less so"


def test_each_time_that_it_holds_it_is_tried_after_half_as_long():
    known, waits = failed(Easing(), 3), []
    for _ in range(3):
        waits.append(known.waits_s(LOOSE, RULES))
        known = known.after_easing(TIGHT, RULES).after_easing(LOOSE, RULES)
    assert waits == [240, 120, 60]
    assert known.waits_s(LOOSE, RULES) == 30


def test_an_overload_long_after_it_held_is_another_one():
    known = failed(Easing(), 3).after_easing(TIGHT, RULES).after_tightening(LOOSE, 481.0, RULES)
    assert known.waits_s(LOOSE, RULES) == 30


def test_it_is_forgotten_once_much_less_is_asked_for():
    known = failed(Easing().asking(2.0), 2)
    assert known.asking(1.7).waits_s(LOOSE, RULES) == 120
    assert known.asking(1.7).asking(3.0).waits_s(LOOSE, RULES) == 120
    assert known.asking(1.5).waits_s(LOOSE, RULES) == 30
    assert known.asking(1.5).asking(2.0).waits_s(LOOSE, RULES) == 30
    step = known.after_easing(TIGHT, RULES)
    assert step.asking(1.5).after_tightening(LOOSE, 5.0, RULES).waits_s(LOOSE, RULES) == 60, "and known anew"
    assert known.after_easing(TIGHTER, RULES).waits_s(LOOSE, RULES) == 120


def test_it_is_forgotten_once_much_less_is_asked_for_of_what_was_short():
    known = failed(Easing().asking(0.6, 2.0), 2)
    assert known.asking(0.1, 1.7).waits_s(LOOSE, RULES) == 120, "there was enough of prefill"
    assert known.asking(0.6, 1.5).waits_s(LOOSE, RULES) == 30
    known = failed(Easing().asking(2.0, 0.6), 2)
    assert known.asking(1.7, 0.1).waits_s(LOOSE, RULES) == 120, "there was enough of decode"
    assert known.asking(1.5, 0.6).waits_s(LOOSE, RULES) == 30
    known = failed(Easing().asking(1.5, 1.2), 2)
    assert known.asking(0.5, 1.2).waits_s(LOOSE, RULES) == 120, "decode is as short as before"
    assert known.asking(1.0, 0.9).waits_s(LOOSE, RULES) == 30
