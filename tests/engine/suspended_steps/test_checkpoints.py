"""Checkpoints of suspended steps lie in KV blocks that their own step has not filled yet."""

import pytest
from engines import random_prompt
from suspending import LONG, SHORT, alone, assert_same_output, suspend

from prefill_node.board.events import Started

FOUR_BLOCKS = random_prompt(512, seed=4)
WHOLE = 2 * 128 * 4
"""Bytes of a checkpoint for each token: hidden states and residual, 128 wide, in float32."""
LAYERS = 4


def test_blocks_of_an_unfinished_step_are_never_shared(running):
    prefix, tail = LONG[:512], random_prompt(100, seed=9)
    expected = alone(running, twin=prefix + tail)
    suspend(running, "long", LONG, 2, beneficiary="twin")
    running.add("twin", prefix + tail, deadline_s=10)
    assert running.step() == ["twin"]
    assert running.cached_tokens["twin"] == 0
    running.finish()
    assert running.answers["twin"] == expected["twin"]
    running.prefill("again", prefix + tail)
    assert running.cached_tokens["again"] == 512
    started = [notice for notice in running.notices() if isinstance(notice, Started)]
    assert [(each.job, each.cached_tokens) for each in started] == [("long", 0), ("twin", 0), ("again", 512)]
    assert [each.issued_s for each in started] == sorted(each.issued_s for each in started)


@pytest.mark.parametrize("boundary", range(1, LAYERS))
def test_a_suspended_step_takes_only_memory_for_which_the_layers_ahead_have_no_room(running, boundary):
    expected = alone(running, long=FOUR_BLOCKS)
    of_layer = 2 * 2 * 32 * 4 / len(running.rpc("kept_bytes"))
    """Bytes of its KV cache for each token: keys and values, two heads of 32, each rank has its part."""
    room = of_layer * (LAYERS - boundary)
    for each in running.rpc("kept_bytes"):
        assert each[0] == 0, "there it starts over"
        assert each[1:] == tuple(max(0, WHOLE - of_layer * (LAYERS - layer)) for layer in range(1, LAYERS))
    assert running.kept_bytes("long", FOUR_BLOCKS, boundary) == max(0, WHOLE - room) * len(FOUR_BLOCKS)
    running.finish()
    assert running.answers == expected


def test_a_prompt_shorter_than_a_block_keeps_its_checkpoint_as_it_was(running):
    assert running.kept_bytes("short", SHORT, 1) == WHOLE * len(SHORT)


def test_others_run_and_come_and_go_while_a_checkpoint_lies_there(running):
    """They take the blocks that are free, and leave in them what they like."""
    expected = alone(running, long=FOUR_BLOCKS)
    running.kept_bytes("long", FOUR_BLOCKS, 2, deadline_s=300)
    for number in range(12):
        other = random_prompt(700, seed=10 + number)
        running.kept_bytes(f"other-{number}", other, 1 + number % 3, deadline_s=200 - 10 * number)
        if number % 3 == 0:
            running.abort(f"other-{number}")
    running.finish()
    assert_same_output(running, expected)


def test_a_member_that_leaves_takes_its_rows_with_it(running):
    """Its blocks are another request's by the time that the rest goes on."""
    first, second = random_prompt(300, seed=3), random_prompt(400, seed=4)
    expected = alone(running, second=second)
    running.add("first", first)
    running.add("second", second)
    running.stop_at(2)
    assert running.step() == []
    running.abort("first")
    for number in range(2):  # the blocks that were freed last are the next to be taken
        running.prefill(f"other-{number}", random_prompt(1900, seed=20 + number), deadline_s=1)
    running.finish()
    assert_same_output(running, expected)
