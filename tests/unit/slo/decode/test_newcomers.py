"""Which newcomers the streams of an engine bear, when steps take what the model says."""

import pytest
from known_times import times

from slo.decode.composition import Paced
from slo.decode.newcomers import Newcomers, Starting
from slo.decode.restore import STARVES_AFTER_S


def bears(newcomers, streams, tpot_s=None, at_s=1.0):
    """Whether one more of a hundred tokens, that waits since 0 and loses nothing by it, may start."""
    return newcomers.bears(streams, Starting(Paced("new", 100, tpot_s), 0.0, 50), at_s)


def test_a_newcomer_without_an_objective_takes_what_the_others_can_do_without():
    newcomers = Newcomers(times())
    four = [Paced(f"s{i}", 100, 0.018) for i in range(4)]
    free = [Paced(f"f{i}", 100) for i in range(36)]
    assert bears(newcomers, [*four, *free]), "left out of four steps in five"
    assert not bears(newcomers, [*four, *free], tpot_s=0.018)
    assert not bears(newcomers, [*four, *free, *free])
    assert bears(newcomers, [*four, *free, *free], at_s=STARVES_AFTER_S + 1), "it has waited for long enough"


@pytest.mark.parametrize(
    ("left_s", "computes", "loses"),
    [
        (5.0, (0, 0), False),
        (0.06, (0, 0), True),
        (0.28, (0, 0), False),
        (0.28, (200, 2), True),
        (-0.01, (0, 0), False),
    ],
    ids=["time enough", "few steps", "some steps", "its prompt takes that long", "too late already"],
)
def test_who_would_have_its_first_token_too_late_for_waiting(left_s, computes, loses):
    """A step with it takes 19 ms, of which it has three to spare and one to get its token."""
    known = times()
    known._prompt_s = 0.001
    streams = [Paced(f"s{i}", 100, 0.018) for i in range(13)]
    tokens, steps = computes
    newcomer = Starting(Paced("new", 100), 0.0, 50, False, 9.0 + left_s, tokens, steps)
    assert Newcomers(known).bears(streams, newcomer, 9.0) is loses


@pytest.mark.parametrize(
    ("tpot_s", "credit_s", "to_come", "loses"),
    [
        (None, float("inf"), 100, False),
        (0.05, 0.0, 100, False),
        (0.05, -3.05, 100, True),
        (0.05, -3.2, 100, False),
        (0.05, 0.0, 1, True),
        (0.01, -0.07, 100, True),
    ],
    ids=["no objective", "time enough", "3.1 s to gain", "too late already", "short", "at the pace of rows"],
)
def test_who_would_be_late_in_the_mean_for_waiting(tpot_s, credit_s, to_come, loses):
    streams = [Paced(f"s{i}", 100, 0.018) for i in range(13)]
    newcomer = Starting(Paced("new", 100, tpot_s, credit_s), 0.0, to_come, has_first=True)
    assert Newcomers(times()).bears(streams, newcomer, 9.0) is loses


def test_to_one_of_the_top_tier_others_yield_and_it_waits_for_its_first_token_while_its_own_fill_the_pace():
    newcomers = Newcomers(times())
    top = [Paced(f"s{i}", 100, 0.018, rank=2) for i in range(12)]
    low = [Paced(f"f{i}", 100, 0.03) for i in range(30)]

    def starts(streams, **newcomer):
        given = {"to_come": 50, "is_top": True, "first_due_s": 9.0} | newcomer
        return newcomers.bears(streams, Starting(Paced("new", 100, 0.018, rank=2), 0.0, **given), 1.0)

    assert starts([*top[:11], *low])
    assert not starts(top)
    assert not starts([*top[:11], *low], is_top=False)
    assert starts(top, first_due_s=1.05), "it would be too late"
    assert starts(top, has_first=True)


def test_steps_until_a_first_token_is_due_may_have_everybody_and_a_prompt():
    known = times()
    known._prompt_s = 0.001
    top = [Paced(f"s{i}", 100, 0.018, rank=2) for i in range(12)]
    low = [Paced(f"f{i}", 100, rank=1) for i in range(60)]
    newcomer = Starting(Paced("new", 100, 0.018, rank=2), 0.0, 50, first_due_s=1.15, is_top=True)
    assert not Newcomers(known).bears(top, newcomer, 1.0)
    assert Newcomers(known).bears([*top, *low], newcomer, 1.0), "the next would be the last in time"
    assert Newcomers(known).bears(top, newcomer, 1.0, prompt_tokens=100)


def test_nobody_waits_for_the_objective_of_a_tier_below_its_own():
    """Steps with two streams take 7 ms, more than one alone may take that wants 6.5."""
    newcomers, usual = Newcomers(times()), Paced("new", 100, 0.04, rank=1)
    for rank, starts in ((0, True), (1, False), (2, False)):
        held = [Paced("held", 100, 0.0065, rank=rank), Paced("usual", 100, 0.04, rank=1)]
        assert newcomers.bears(held, Starting(usual, 0.0, 50), 1.0) is starts


def test_a_newcomer_waits_while_it_would_make_the_tightest_too_late():
    newcomers = Newcomers(times())
    four = [Paced(f"s{i}", 100, 0.018) for i in range(4)]
    assert bears(newcomers, four)
    assert not bears(newcomers, [Paced(f"s{i}", 100, 0.018) for i in range(13)])
    assert bears(newcomers, [Paced(f"s{i}", 100) for i in range(50)]), "nobody has an objective"
    assert bears(newcomers, [Paced("s", 100, 0.001)]), "it cannot be met anyway"
