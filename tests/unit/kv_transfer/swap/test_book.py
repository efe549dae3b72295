"""What is moved out comes back to whom it belongs, whatever is taken, given back and forgotten meanwhile."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer.swap.book import Move, SwapBook, pool_blocks, runs

SLOTS, BLOCK, BLOCKS = 6, 4, 12


class Swapping(RuleBasedStateMachine):
    """An engine's blocks and a host's pool, in both of which each cell says whose and which it is."""

    def __init__(self):
        super().__init__()
        self.book = SwapBook(SLOTS, BLOCK)
        self.engine, self.host = [None] * BLOCKS, [None] * SLOTS
        self.running, self.parked, self.number = {}, {}, 0

    def allocate(self, count):
        taken = {block for blocks, _ in self.running.values() for block in blocks}
        free = [block for block in range(BLOCKS) if block not in taken]
        return free[:count] if len(free) >= count else None

    @rule(tokens=st.integers(1, 5 * BLOCK))
    def starts(self, tokens):
        if (blocks := self.allocate(-(-tokens // BLOCK))) is not None:
            self.number += 1
            self.running[f"r{self.number}"] = blocks, tokens
            for index, block in enumerate(blocks):
                self.engine[block] = f"r{self.number}", index

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def is_taken(self, data):
        name = data.draw(st.sampled_from(sorted(self.running)))
        blocks, tokens = self.running[name]
        free = self.book.free_slots
        if self.book.take(name, blocks, tokens):
            self.running.pop(name)
            self.parked[name] = tokens
            self.step(data.draw(st.booleans()))
        else:
            assert free < len(blocks)

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def comes_back(self, data):
        name = data.draw(st.sampled_from(sorted(self.parked)))
        tokens = self.parked[name]
        assert self.book.tokens_of(name) == tokens
        if (blocks := self.allocate(-(-tokens // BLOCK))) is None:
            return
        local = data.draw(st.integers(0, tokens // BLOCK))
        for index, block in enumerate(blocks[:local]):  # those are cached in the engine
            self.engine[block] = name, index
        self.book.give(name, blocks, tokens - local * BLOCK)
        self.running[name] = blocks, self.parked.pop(name)
        self.step(others=False)
        assert [self.engine[block] for block in blocks] == [(name, index) for index in range(len(blocks))]

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def leaves(self, data):
        name = data.draw(st.sampled_from(sorted(self.parked)))
        self.parked.pop(name)
        self.book.forget(name)
        assert self.book.tokens_of(name) == 0

    def step(self, others):
        """What a worker does before it computes; then others may write to what is free."""
        if (moves := self.book.step()) is not None:
            for block, slot in moves.out:
                self.host[slot] = self.engine[block]
            for block, slot in moves.back:
                self.engine[block] = self.host[slot]
        if others:
            kept = {block for blocks, _ in self.running.values() for block in blocks}
            self.engine = [cell if block in kept else None for block, cell in enumerate(self.engine)]

    @invariant()
    def slots_balance(self):
        held = sum(-(-tokens // BLOCK) for tokens in self.parked.values())
        assert self.book.used == pytest.approx(held / SLOTS)
        assert self.book.free_slots <= SLOTS - held

    def teardown(self):
        for name in self.parked:
            self.book.forget(name)
        self.book.step()
        assert self.book.free_slots == SLOTS


TestSwapping = Swapping.TestCase


def test_a_slot_that_came_free_is_used_from_the_next_step_on():
    book = SwapBook(1, BLOCK)
    assert book.take("a", [5], 3)
    assert book.step().out == (Move(5, 0),)
    book.give("a", [7], 3)
    assert not book.take("b", [9], 3), "what is to come back would be overwritten before"
    assert book.step().back == (Move(7, 0),)
    assert book.take("b", [9], 3)


def test_what_does_not_fit_is_not_taken_in_part():
    book = SwapBook(2, BLOCK)
    assert not book.take("a", [1, 2, 3], 2 * BLOCK + 1)
    assert not book.take("nothing", [], 0)
    assert book.free_slots == 2
    assert book.step() is None


@pytest.mark.parametrize(
    ("blocks", "missing"), [([1], 7), ([1, 2], 6), ([1, 2], 8)], ids=["too few", "in a block", "too many"]
)
def test_blocks_that_are_not_those_of_the_tokens_are_refused(blocks, missing):
    book = SwapBook(4, BLOCK)
    assert book.take("a", [1, 2], 7)
    with pytest.raises(ValueError, match=f"{missing} of 7 tokens"):
        book.give("a", blocks, missing)


def test_nothing_comes_back_of_what_is_cached_in_the_engine():
    book = SwapBook(4, BLOCK)
    book.take("a", [1, 2], 7)
    book.step()
    book.give("a", [3, 4], 0)
    assert book.step() is None
    assert (book.figures.out, book.figures.back) == (2, 0)


def test_the_pool_is_what_was_given_or_a_quarter_and_at_most_eight_gib():
    assert pool_blocks(10_000, 1000, 100, 1) == 10
    assert pool_blocks(10_000, 1000, 100, 2) == 5
    assert pool_blocks(None, 1000, 100, 1) == 25
    assert pool_blocks(None, 1 << 30, 100, 2) == 4


def test_slots_that_follow_each_other_are_one_copy():
    assert runs([Move(1, 3), Move(9, 4), Move(2, 0), Move(5, 1), Move(7, 6)]) == [(3, 2), (0, 2), (6, 1)]
