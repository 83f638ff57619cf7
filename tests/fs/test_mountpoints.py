"""Where versions may be mounted; nothing is mounted here."""

from __future__ import annotations

from pathlib import Path

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
