"""A board in a directory of its own, for the tests that need one."""

import pytest

from prefill_node.board.board import Board


@pytest.fixture
def directory(tmp_path):
    yield tmp_path
    assert not list(tmp_path.glob("slackserve-board-*")), "a test left a board"


@pytest.fixture
def board(directory):
    with Board.create(3, directory) as board:
        yield board


@pytest.fixture
def other(board):
    """The same board, as another process sees it."""
    with Board.attach(board.path) as other:
        yield other
