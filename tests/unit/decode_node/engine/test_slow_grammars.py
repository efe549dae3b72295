"""A grammar that takes the engine too long ends its own request, on vLLM's real scheduler without a model."""

from functools import partial

import pytest
from decode_steps import Stepped
from real_schedulers import build
from vllm.v1.engine import FinishReason
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from decode_node import scheduler as decode_scheduler
from decode_node.engine.pressure_scheduler import PressureScheduler
from decode_node.grammars.bounded import MOST_S, TOKEN_S, TOO_SLOW, BoundedGrammar
from decode_node.scheduler import AsyncCarryingScheduler, CarryingScheduler

pytestmark = pytest.mark.slow


class Played(StructuredOutputGrammar):
    """Accepts everything; each call takes `takes_s` of a clock of its own."""

    def __init__(self, takes_s, terminates=False):
        self.takes_s, self.now_s, self.terminates = takes_s, 0.0, terminates

    def _passes(self):
        self.now_s += self.takes_s

    def accept_tokens(self, request_id, tokens):
        self._passes()
        return True

    def validate_tokens(self, tokens):
        self._passes()
        return tokens

    def fill_bitmask(self, bitmask, batch_index):
        self._passes()

    def rollback(self, num_tokens):
        pass

    def is_terminated(self):
        return self.terminates

    def reset(self):
        pass


class Timed(BoundedGrammar):
    """One whose time is what its grammar plays."""

    def __init__(self, grammar):
        super().__init__(grammar, clock=lambda: grammar.now_s)


@pytest.fixture(params=[CarryingScheduler, AsyncCarryingScheduler, PressureScheduler])
def engine(request, tiny_model, monkeypatch):
    monkeypatch.setattr(decode_scheduler, "BoundedGrammar", Timed)
    return Stepped(build(request.param, tiny_model, 100))


def test_the_request_of_one_ends_with_a_word_for_it_and_the_others_go_on(engine):
    engine.add("slow", 20, 100, grammar=Played(TOKEN_S + MOST_S / 9.5))
    engine.add("fast", 20, 100, grammar=Played(TOKEN_S * 0.99))
    engine.add("free", 20, 100)
    engine.finish()
    assert engine.why == {"slow": TOO_SLOW, "fast": None, "free": None}
    assert [len(engine.tokens[name]) for name in ("slow", "fast", "free")] == [11, 100, 100]
    assert engine.reasons["slow"] is FinishReason.ERROR


def test_what_many_tokens_have_not_taken_is_not_saved_up(engine):
    grammar = Played(0.0)
    engine.add("slow", 20, 2000, grammar=grammar)
    while len(engine.tokens["slow"]) < 1000:
        engine.step()
    grammar.takes_s = 1.1 * MOST_S
    engine.finish()
    assert (len(engine.tokens["slow"]), engine.why["slow"]) == (1002, TOO_SLOW)


def test_an_answer_that_ends_with_the_token_that_took_too_long_is_whole(engine):
    engine.add("slow", 20, 3, grammar=Played(MOST_S / 1.5))
    engine.finish()
    assert (engine.reasons["slow"], engine.why["slow"]) == (FinishReason.LENGTH, None)


@pytest.mark.parametrize("call", ["validate_tokens", "fill_bitmask"])
def test_what_it_takes_to_say_what_may_come_counts(engine, call):
    grammar = Played(0.0)
    request = engine.add("slow", 20, 100, grammar=grammar)
    engine.step()
    grammar.takes_s = 2 * MOST_S
    bounded = request.structured_output_request.grammar
    calls = {
        "validate_tokens": partial(bounded.validate_tokens, [1]),
        "fill_bitmask": partial(bounded.fill_bitmask, None, 0),
    }
    calls[call]()
    grammar.takes_s = 0.0
    engine.finish()
    assert (len(engine.tokens["slow"]), engine.why["slow"]) == (2, TOO_SLOW)


def test_what_vllm_asks_of_it_is_answered_by_its_grammar(engine):
    request = engine.add("one", 20, 100, grammar=Played(0.0, terminates=True))
    engine.step()
    bounded = request.structured_output_request.grammar
    assert bounded.is_terminated()
    assert bounded.validate_tokens([1, 2]) == [1, 2]
