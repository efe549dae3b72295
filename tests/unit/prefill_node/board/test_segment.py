"""The file behind a board, and where things stand in it."""

import contextlib
import errno
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prefill_node.board import layout
from prefill_node.board.board import Board, BoardUnavailableError, remove_stale_boards


@contextlib.contextmanager
def process(code, *arguments):
    """A Python process running `code`, killed at the end."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def test_a_board_is_made_and_joined(board, other, directory):
    assert board.path.parent == directory
    assert board.path.stat().st_mode & 0o777 == 0o600
    assert (other.path, other.ranks) == (board.path, 3)


def test_it_stands_in_shared_memory_by_default():
    with Board.create(1) as board:
        assert str(board.path).startswith("/dev/shm/slackserve-board-")
    assert not board.path.exists()


def test_without_its_name_it_serves_those_who_have_joined(board, other):
    board.unlink()
    other.unlink()
    assert not board.path.exists()
    board.reach(0, 4, 1)
    assert other.progress(0) == (4, 1)


def test_the_creator_takes_the_name_away_with_it(directory):
    board = Board.create(1, directory)
    board.close()
    board.close()
    assert not board.path.exists()
    with pytest.raises(ValueError, match="released"):
        board.progress(0)


def test_a_process_that_joined_and_ended_leaves_the_board_to_the_others(board):
    code = (
        "import sys, pathlib; from prefill_node.board.board import Board; "
        "Board.attach(pathlib.Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(board.path)], check=True)
    Board.attach(board.path).close()


CREATE_AND_WAIT = """
import sys, pathlib, time
from prefill_node.board.board import Board
print(Board.create(2, pathlib.Path(sys.argv[1])).path, flush=True)
time.sleep(60)
"""


def test_what_a_crash_left_is_removed_with_the_next_start(directory):
    with process(CREATE_AND_WAIT, directory) as crashing:
        left = crashing.stdout.readline().strip()
        assert remove_stale_boards(directory) == []
        crashing.send_signal(signal.SIGKILL)
        crashing.wait()
    assert Path(left).exists()
    with Board.create(1, directory) as board:
        assert list(directory.glob("slackserve-board-*")) == [board.path]


def test_living_boards_and_other_files_are_not_removed(board, directory):
    other_file = directory / "psm_1234"
    other_file.touch()
    with Board.create(1, directory) as second:
        assert remove_stale_boards(directory) == []
        assert board.path.exists()
        assert second.path.exists()
    assert other_file.exists()


def test_what_another_user_has_put_there_is_left_and_keeps_nobody_from_starting(directory, monkeypatch):
    """Its file may be open to everybody; where others' names cannot be removed, as in /dev/shm, it stays."""
    foreign, unlink = directory / "slackserve-board-0", Path.unlink
    foreign.touch(0o666)

    def sticky(path, **options):
        if path == foreign:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        unlink(path, **options)

    with monkeypatch.context() as user:
        user.setattr(Path, "unlink", sticky)
        files = len(list(Path("/proc/self/fd").iterdir()))
        assert remove_stale_boards(directory) == []
        assert len(list(Path("/proc/self/fd").iterdir())) == files
        with Board.create(1, directory) as board:
            assert {*directory.iterdir()} == {foreign, board.path}
    foreign.unlink()


def spoil(path, at, word):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(word.to_bytes(8, sys.byteorder))


def test_a_board_that_is_gone_cannot_be_joined(directory):
    with pytest.raises(BoardUnavailableError, match=r"board .*gone: cannot be opened .*restart the replica"):
        Board.attach(directory / "gone")


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 4096])
def test_another_file_cannot_be_joined(content, directory):
    path = directory / "foreign"
    path.write_bytes(content)
    with pytest.raises(BoardUnavailableError, match="is no board"):
        Board.attach(path)


def test_a_board_of_another_version_cannot_be_joined(board):
    spoil(board.path, 8, layout.VERSION + 1)
    with pytest.raises(BoardUnavailableError, match=r"has layout 2, this process expects 1; restart"):
        Board.attach(board.path)


def test_a_board_of_another_size_cannot_be_joined(board):
    spoil(board.path, 16, 5)
    with pytest.raises(BoardUnavailableError, match="for 5 ranks it should have"):
        Board.attach(board.path)


def test_without_room_none_is_made_and_nothing_is_left(directory, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BoardUnavailableError, match=r"No space left.*make room or give the container more"):
        Board.create(1, directory)


def test_without_its_directory_none_is_made(directory):
    with pytest.raises(BoardUnavailableError, match="no new one can be made"):
        Board.create(1, directory / "missing")


def test_no_two_fields_overlap_and_no_two_writers_share_a_cache_line():
    line = layout.CACHE_LINE
    fields = [
        (0, layout.HEADER_BYTES),
        (layout.TARGET_AT, line),
        (layout.ORDER_SEQUENCE_AT, line),
        (layout.EVENTS_READ_AT, line),
        (layout.VIEW_SEQUENCE_AT, line),
        (layout.EVENTS_WRITTEN_AT, line),
        (layout.ORDER_SLOTS_AT, 2 * layout.ORDER_SLOT_BYTES),
        (layout.VIEW_SLOTS_AT, 2 * layout.VIEW_SLOT_BYTES),
        (layout.EVENTS_AT, layout.EVENTS_BYTES),
    ]
    for rank in range(5):
        fields.append((layout.progress_word(rank) * 8, line))
        first, second = layout.vote_words(rank)
        assert second == first + 1
        fields.append((first * 8, line))
    fields.append((layout.segment_bytes(5), 0))
    assert all(at % line == 0 for at, _ in fields)
    assert all(at + size == following for (at, size), (following, _) in itertools.pairwise(fields))


def test_the_table_of_the_layout_is_true():
    for offset in (layout.ORDER_SLOTS_AT, layout.VIEW_SLOTS_AT, layout.EVENTS_AT, layout.RANKS_AT):
        assert f"\n| {offset:,} | " in layout.__doc__
