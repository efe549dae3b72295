"""A board in a directory of its own, for the tests that need one."""

from pathlib import Path

import pytest

from prefill_node.board.board import Board


def pytest_collection_modifyitems(items):
    """The Makefile looks for tests that need the machine to themselves everywhere but here."""
    for item in items:
        alone = {"serial", "e2e"} & {mark.name for mark in item.iter_markers()}
        if alone and item.path.is_relative_to(Path(__file__).parent):
            raise pytest.UsageError(f"{item.nodeid} is marked {alone.pop()}: it would not be run; move it")


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
