"""Where the checkpoints of real engines lie: in KV blocks that their own step has not filled yet.

That passes resume exactly from there is what `test_exactness` sees, of KV blocks bit for bit as well.
"""

import pytest
from engines import random_prompt

from prefill_node.board.events import Stopped

LONG = random_prompt(512, seed=1)
SHORT = random_prompt(64, seed=2)
BLOCK = 128
WHOLE = 2 * 128 * 4
"""Bytes of a checkpoint for each token: hidden states and residual, 128 wide, in float32."""
LAYERS = 4


def pytest_generate_tests(metafunc):
    named = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if not any("shared_engine" in names for names in named):
        metafunc.parametrize("shared_engine", ["llama", "llama_tp2"], indirect=True)


def stop(running, boundary, prompt=LONG, name="long", **options):
    """Start a prefill and stop it; what each rank keeps of it beside KV blocks."""
    running.add(name, prompt, **options)
    running.stop_at(boundary)
    assert running.step() == []
    (stopped,) = [notice for notice in running.notices() if isinstance(notice, Stopped)]
    assert stopped.is_kept
    return stopped.checkpoint_bytes


@pytest.mark.parametrize("boundary", range(1, LAYERS))
def test_a_suspended_step_takes_only_memory_for_which_the_layers_ahead_have_no_room(running, boundary):
    expected = running.prefill("undisturbed", LONG)
    running.forget()
    of_layer = 2 * 2 * 32 * 4 / len(running.rpc("kept_bytes"))
    """Bytes of its KV cache for each token: keys and values, two heads of 32, each rank has its part."""
    room = of_layer * (LAYERS - boundary)
    for each in running.rpc("kept_bytes"):
        assert each[0] == 0, "there it starts over"
        assert each[1:] == tuple(max(0, WHOLE - of_layer * (LAYERS - layer)) for layer in range(1, LAYERS))
    assert stop(running, boundary) == max(0, WHOLE - room) * len(LONG)
    running.finish()
    assert running.answers["long"] == expected


def test_others_run_and_come_and_go_while_it_lies_there(running):
    """They take the blocks that are free, and leave in them what they like."""
    expected = running.prefill("undisturbed", LONG)
    running.forget()
    stop(running, 2, deadline_s=300)
    for number in range(12):
        other = random_prompt(700, seed=10 + number)
        stop(running, 1 + number % 3, other, f"other-{number}", deadline_s=200 - number)
        if number % 3 == 0:
            running.abort(f"other-{number}")
    running.finish()
    assert running.answers["long"].tokens == expected.tokens
    assert running.answers["long"].logprobs == expected.logprobs


def test_a_member_that_leaves_takes_its_rows_with_it(running):
    """Its blocks are another request's by the time that the rest goes on."""
    first, second = random_prompt(300, seed=3), random_prompt(400, seed=4)
    expected = running.prefill("second", second)
    running.forget()
    running.add("first", first)
    running.add("second", second)
    running.stop_at(2)
    assert running.step() == []
    running.abort("first")
    for number in range(2):  # the blocks that were freed last are the next to be taken
        running.prefill(f"other-{number}", random_prompt(1900, seed=20 + number), deadline_s=1)
    running.finish()
    assert running.answers["second"].tokens == expected.tokens
    assert running.answers["second"].logprobs == expected.logprobs


@pytest.mark.parametrize(
    ("shared_engine", "first", "last"),
    [
        ("llama_operator", 0, WHOLE),
        (
            "llama_compiled",
            2 * WHOLE - 3 * 512,
            WHOLE,
        ),  # queries, keys, values, room for the result, residual
    ],
    indirect=["shared_engine"],
)
def test_within_a_layer_and_between_compiled_pieces(running, first, last):
    """Only what is ahead of the layer in which it stopped is known to be empty."""
    told = running.rpc("kept_bytes")[0]
    assert (told[0], told[1], told[-1]) == (0, first, last)
    for boundary in range(1, running.boundaries):
        kept = stop(running, boundary, name=f"at-{boundary}")
        assert kept == pytest.approx(told[boundary] * len(LONG)), f"at boundary {boundary}"


def test_a_prompt_shorter_than_a_block_keeps_its_checkpoint_as_it_was(running):
    assert stop(running, 1, SHORT) == WHOLE * len(SHORT)
