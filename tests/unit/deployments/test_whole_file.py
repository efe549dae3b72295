"""A file that cannot be written as a whole stays as it was."""

import errno
import os
import shutil
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


class SilentFile:
    """One of a file server that does not answer any more."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, _):
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


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


@pytest.mark.parametrize("is_another_named_so", [False, True])
def test_a_file_without_a_name_is_written_itself(kept, is_another_named_so):
    with kept.open() as file:
        kept.unlink()
        others = [kept.with_name(f"{kept.name} (deleted)")] if is_another_named_so else []
        for other in others:
            other.write_text("another's")
        write_whole(Path(f"/dev/fd/{file.fileno()}"), LONG)
        assert file.read() == LONG
    assert {path: path.read_text() for path in kept.parent.iterdir()} == dict.fromkeys(others, "another's")


def fails(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("owner", "call", "number"),
    [
        (Path, "replace", errno.EBUSY),
        (Path, "replace", errno.ENOSYS),
        (os, "chown", errno.EPERM),
        (os, "chown", errno.ENOTSUP),
        (shutil, "copymode", errno.ENOSYS),
    ],
)
def test_a_file_that_cannot_be_replaced_is_written_over(kept, monkeypatch, owner, call, number):
    monkeypatch.setattr(owner, call, fails(number))
    write_whole(kept, LONG)
    assert kept.read_text() == LONG
    assert [*kept.parent.iterdir()] == [kept]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_what_was_there_stays_where_the_room_ends_late(kept, monkeypatch, number):
    monkeypatch.setattr(Path, "replace", fails(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        write_whole(kept, LONG)
    assert kept.read_text() == "before"
    assert [*kept.parent.iterdir()] == [kept]


def test_what_was_there_stays_where_the_other_file_cannot_be_written(kept, monkeypatch):
    real_open = Path.open

    def opened(path, *args, **kwargs):
        file = real_open(path, *args, **kwargs)
        if path != kept:
            file = SilentFile(file)
        return file

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(TimeoutError):
        write_whole(kept, LONG)
    assert kept.read_text() == "before"
    assert [*kept.parent.iterdir()] == [kept]


def test_what_is_left_beside_a_file_costs_nobody_its_text(kept, monkeypatch):
    for call in ("replace", "unlink"):
        monkeypatch.setattr(Path, call, fails(errno.EPERM))
    write_whole(kept, LONG)
    assert kept.read_text() == LONG


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_in_a_directory_that_takes_no_other_is_written_over(kept):
    kept.parent.chmod(0o500)
    write_whole(kept, LONG)
    assert kept.read_text() == LONG
