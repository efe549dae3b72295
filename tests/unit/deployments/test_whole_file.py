"""A file that cannot be written as a whole stays as it was."""

import errno
import os
import stat
from pathlib import Path

import pytest
from small_disk import small_disk

from deployments.whole_file import write_whole

LONG = "x" * 10_000


@pytest.fixture
def kept(tmp_path):
    path = tmp_path / "kept.json"
    path.write_text("before")
    return path


def test_a_file_is_written_and_written_over(tmp_path):
    path = tmp_path / "new.json"
    for text in ("é", "another"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert [*tmp_path.iterdir()] == [path]


def test_what_was_there_stays_where_there_is_no_room(kept):
    with small_disk(1000), pytest.raises(OSError, match="File too large"):
        write_whole(kept, LONG)
    assert kept.read_text() == "before"
    assert [*kept.parent.iterdir()] == [kept]


def test_links_and_modes_stay(kept, tmp_path):
    kept.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(kept)
    write_whole(link, LONG)
    assert link.is_symlink()
    assert kept.read_text() == LONG
    assert stat.S_IMODE(kept.stat().st_mode) == 0o640


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_whose_a_file_is_stays(kept):
    os.chown(kept, 12345, 23456)
    write_whole(kept, LONG)
    there = kept.stat()
    assert (there.st_uid, there.st_gid) == (12345, 23456)


def test_a_new_file_has_the_mode_that_any_has(tmp_path):
    (tmp_path / "usual").touch()
    write_whole(tmp_path / "new", LONG)
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("usual", "new")}
    assert len(modes) == 1


def test_a_device_is_not_replaced():
    with pytest.raises(OSError, match="No space left on device"):
        write_whole(Path("/dev/full"), LONG)
    assert Path("/dev/full").is_char_device()


def test_a_file_that_cannot_be_replaced_is_written_over(kept, monkeypatch):
    def mounted(*_):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "replace", mounted)
    write_whole(kept, LONG)
    assert kept.read_text() == LONG
    assert [*kept.parent.iterdir()] == [kept]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_in_a_directory_that_takes_no_other_is_written_over(kept):
    kept.parent.chmod(0o500)
    write_whole(kept, LONG)
    assert kept.read_text() == LONG
