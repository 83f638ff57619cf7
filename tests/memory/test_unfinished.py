"""What a fetch has left unfinished: where it can be kept, and that nothing of another user is
touched.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from tensorhub.errors import StateError
from tensorhub.memory.unfinished import Unfinished, stem_of

KEY = b"k" * 32


def test_a_record_for_which_the_disk_has_no_room_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished = Unfinished(tmp_path, "out")

    def is_full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", is_full)
    assert unfinished.recall(KEY, 2, 8) == [None, None]
    unfinished.note([1, 2])
    assert not unfinished.keep()
    assert list(tmp_path.iterdir()) == []


def test_a_filesystem_that_gives_all_files_to_one_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    first = Unfinished(tmp_path, "out")
    first.recall(KEY, 1, 8)
    first.note([7])
    assert first.keep()
    again = Unfinished(tmp_path, "out")
    assert again.recall(KEY, 1, 8) == [7]
    again.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("has_locks", [True, False])
@pytest.mark.parametrize("end", [".part", ".tmp"])
def test_what_another_user_has_made_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, has_locks: bool
) -> None:
    theirs = tmp_path / (stem_of("out") + end)
    if end == ".part":
        theirs.write_bytes(b"theirs")
    elif has_locks:
        theirs.mkdir()
    else:
        pytest.skip("without locks the directory has another name")
    os.chown(theirs, 12345, 12345)
    if not has_locks:

        def no_locks(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(StateError, match="another user's"):
        Unfinished(tmp_path, "out")
    assert theirs.exists()


def test_without_locks_each_fetch_has_a_directory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    first, second = Unfinished(tmp_path, "out"), Unfinished(tmp_path, "out")
    assert first.directory != second.directory
    assert {first.directory, second.directory} == set(tmp_path.iterdir())
    for each in (first, second):
        each.recall(KEY, 1, 8)
        assert not each.keep()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", [".part", ".tmp"])
def test_no_link_is_followed(tmp_path: Path, end: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / (stem_of("out") + end)).symlink_to(
        tmp_path / "elsewhere", target_is_directory=end == ".tmp"
    )
    with pytest.raises((StateError, OSError)):
        Unfinished(tmp_path, "out")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    "found", [b"", KEY[:5], KEY, KEY + b"\1", KEY + b"\1" + b"\0" * 7, b"x" * 1000]
)
def test_a_damaged_record_says_nothing(tmp_path: Path, found: bytes) -> None:
    (tmp_path / (stem_of("out") + ".part")).write_bytes(found)
    unfinished = Unfinished(tmp_path, "out")
    assert unfinished.recall(KEY, 2, 8) == [None, None]
    unfinished.note([None, 5])
    assert unfinished.keep()
    again = Unfinished(tmp_path, "out")
    assert again.recall(KEY, 2, 8)[1] == 5
    again.remove()
