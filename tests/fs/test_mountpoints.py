"""Where versions may be mounted; nothing is mounted here."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub.errors import InvalidValue
from tensorhub.fs import mountpoints

LINE = "40 29 0:40 / {at} ro,nosuid - fuse.tensorhub {kind} ro,user_id=0\n"


def test_a_second_mount_at_a_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hide the first one. Other mounts, as of a volume in a container, are no obstacle."""
    monkeypatch.setattr(mountpoints, "MOUNTS", mounts := tmp_path / "mounts")
    (place := tmp_path / "ä b\\c").mkdir()
    (tmp_path / "link").symlink_to(place)
    at = str(place).replace("\\", "\\134").replace(" ", "\\040")
    mounts.write_text(LINE.format(at=at, kind="tmpfs") + LINE.format(at="/mnt", kind="tensorhub"))
    mountpoints.check_free(place)
    mounts.write_text(LINE.format(at=at, kind="tensorhub"))
    for each in (place, tmp_path / "link"):
        with pytest.raises(InvalidValue, match=r"has a version mounted .*another directory"):
            mountpoints.check_free(each)


@pytest.mark.parametrize(("number", "unmounts"), [(errno.ENOTCONN, 1), (errno.ENOENT, 0)])
def test_what_a_killed_process_has_left_is_unmounted(
    monkeypatch: pytest.MonkeyPatch, number: int, unmounts: int
) -> None:
    def stat(_: Path) -> None:
        raise OSError(number, os.strerror(number))

    unmounted: list[Path] = []
    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(mountpoints, "unmount", unmounted.append)
    mountpoints.detach_stale(place := Path("/mnt/weights"))
    assert unmounted == [place] * unmounts


@pytest.mark.parametrize(("number", "asks"), [(errno.EPERM, 1), (errno.EINVAL, 0), (0, 0)])
def test_a_process_that_is_not_root_unmounts_by_fusermount_within_a_deadline(
    monkeypatch: pytest.MonkeyPatch, number: int, asks: int
) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], *, timeout: float, **_: Any) -> None:
        asked.append(command)
        raise subprocess.TimeoutExpired(command, timeout)

    libc = SimpleNamespace(umount2=lambda *_: -bool(number))
    fake = SimpleNamespace(CDLL=lambda *_, **__: libc, get_errno=lambda: number)
    monkeypatch.setattr(mountpoints, "ctypes", fake)
    monkeypatch.setattr(subprocess, "run", run)
    mountpoints.unmount(Path("/mnt/weights"))
    assert [command[-1] for command in asked] == ["/mnt/weights"] * asks
