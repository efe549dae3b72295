"""Prompts that are suspended on a real engine, and what they give undisturbed."""

from engines import random_prompt

from slo.predict.pass_shape import PassPart
from slo.queue.chunks import StopBound

LONG = random_prompt(700, seed=1)
MIDDLE = random_prompt(500, seed=2)
SHORT = random_prompt(64, seed=3)


def alone(running, **prompts):
    """What each prompt gives when nothing disturbs it."""
    expected = {}
    for name, prompt in prompts.items():
        expected[name] = running.prefill(name, prompt)
        running.forget()
    return expected


def assert_same_output(running, expected):
    """Tokens and log-probabilities only: KV blocks that were used before hold leftovers behind the prompt."""
    for name, answer in expected.items():
        assert (running.answers[name].tokens, running.answers[name].logprobs) == (
            answer.tokens,
            answer.logprobs,
        )


def suspend(running, name, prompt, boundary, beneficiary="", **options):
    """Start a prefill and stop it."""
    running.add(name, prompt, **options)
    running.stop_at(boundary)
    running.order_stop(beneficiary)
    assert running.step() == []
    assert running.rpc("stops_left")[0] == 0


def chunks_of(tokens):
    """A bound that is met by so many, as the engine's predictor has it."""
    return StopBound(1e-3 + 1e-5 * (tokens + 1), (PassPart(1.0, 0.0),))
