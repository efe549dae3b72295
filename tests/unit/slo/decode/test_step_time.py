"""The time of a step is found again from steps that take it."""

import random

import pytest

from slo.decode.step_time import StepShape, StepTimes

TRUE = (0.004, 0.0005, 2e-7, 3e-5, 2e-4)


def seconds(shape):
    return TRUE[0] + sum(each * of for each, of in zip(TRUE[1:], shape, strict=True))


def shapes(number, prompts=True, seed=0):
    rng = random.Random(seed)
    for _ in range(number):
        streams = rng.randint(1, 64)
        prompt = rng.choice([0, 0, 0, 128, 512]) if prompts else 0
        moved = rng.choice([0, 0, 0, 1, 2, rng.randint(0, streams)])
        yield StepShape(streams, streams * rng.randint(50, 3000), prompt, moved)


def learned(of, noise=0.0, seed=1):
    times, rng = StepTimes(), random.Random(seed)
    for shape in of:
        times.observe(shape, seconds(shape) * (1 + rng.uniform(-noise, noise)))
    return times


def test_exact_steps_give_the_times_back():
    times = learned(shapes(600))
    for shape in shapes(50, seed=9):
        assert times.predict_s(shape) == pytest.approx(seconds(shape), rel=0.02)


def test_noise_and_hiccups_move_it_little():
    times = learned(shapes(1500), noise=0.3)
    times.observe(StepShape(10, 1000), 60.0)
    for shape in shapes(50, seed=9):
        assert times.predict_s(shape) == pytest.approx(seconds(shape), rel=0.15)


def test_steps_that_were_held_up_at_first_are_soon_of_no_account():
    """An engine's first steps wait for what is built then, and another process may have its cores."""
    times, rng = StepTimes(), random.Random(4)
    for number, shape in enumerate(shapes(120, prompts=False)):
        held_up_s = 0.1 if number < 12 and rng.random() < 0.5 else 0.0
        times.observe(shape, seconds(shape) + held_up_s)
    for shape in shapes(50, prompts=False, seed=9):
        assert times.predict_s(shape) == pytest.approx(seconds(shape), rel=0.2)


def test_what_has_not_been_seen_for_long_is_remembered():
    times = learned(shapes(600))
    for shape in shapes(5000, prompts=False, seed=3):
        times.observe(shape, seconds(shape))
    assert times.prompt_token_s == pytest.approx(TRUE[3], rel=0.1)


def test_a_token_of_a_prompt_counts_as_one_of_a_stream_until_it_was_seen():
    times = learned(shapes(600, prompts=False))
    assert times.prompt_token_s == pytest.approx(TRUE[1], rel=0.1)


def test_no_part_is_negative():
    times, rng = StepTimes(), random.Random(5)
    for shape in shapes(400):
        times.observe(shape, rng.uniform(0.001, 0.1))
        parts = times.fixed_s, times.stream_s, times.context_s, times.prompt_token_s, times.moved_s
        assert min(parts) >= 0


def test_nothing_is_known_at_first():
    times = StepTimes()
    assert not times.is_known
    assert times.predict_s(StepShape(5, 100)) == 0.0


def test_what_a_step_takes_at_best_leaves_out_that_the_machine_is_slower_now():
    shape, times = StepShape(1, 1000), learned(shapes(7))
    assert times.at_best_s(shape) == 0, "too little is known"
    times = learned(shapes(600))
    for factor in (2, 0.5):
        for slow in shapes(40, prompts=False, seed=4):
            times.observe(slow, factor * seconds(slow))
        assert times.predict_s(shape) == pytest.approx(factor * seconds(shape), rel=0.2)
        assert times.at_best_s(shape) == pytest.approx(min(factor, 1) * seconds(shape), rel=0.2)


def test_it_follows_a_machine_that_gets_slower():
    times = learned(shapes(2000))
    for shape in shapes(3000, seed=4):
        times.observe(shape, 2 * seconds(shape))
    for shape in shapes(50, seed=9):
        assert times.predict_s(shape) == pytest.approx(2 * seconds(shape), rel=0.05)


@pytest.mark.parametrize("factor", [0.5, 0.75, 1.4, 2.5])
def test_an_engine_that_has_changed_is_followed_within_a_few_steps(factor):
    """A few seconds of steps, of which each fourth is timed; prompts take so many times as long, too."""
    times, rng = learned(shapes(600)), random.Random(5)
    for shape in shapes(40, prompts=False, seed=3):
        times.observe(shape, factor * seconds(shape) * (1 + rng.uniform(-0.1, 0.1)))
    for shape in shapes(50, seed=9):
        assert times.predict_s(shape) == pytest.approx(factor * seconds(shape), rel=0.1)


def test_prompts_that_take_longer_say_nothing_of_streams():
    times = learned(shapes(600))
    for number in range(40):
        shape = StepShape(20, 20_000, 512)
        times.observe(shape, seconds(shape) + (0.05 if number % 2 else 0.06))
    without = StepShape(20, 20_000)
    assert times.predict_s(without) == pytest.approx(seconds(without), rel=0.15)
