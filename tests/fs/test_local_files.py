"""Which files of a local directory stand beside a version's weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensorhub.errors import InvalidValue
from tensorhub.fs import local_files
from tensorhub.fs.local_files import LocalFiles


def test_weights_of_another_version_are_left_out_with_their_index(tmp_path: Path) -> None:
    """A loader would read them by it."""
    names = (
        *("config.json", "model.safetensors", "model.safetensors.index.json"),
        *("pytorch_model.bin", "pytorch_model.bin.index.json", "index.json.txt"),
    )
    for name in names:
        (tmp_path / name).write_text(name)
    assert set(LocalFiles(tmp_path).files) == {"config.json", "index.json.txt"}


def test_what_is_no_file_any_more_keeps_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "pipe.json").write_text("{}")
    its = LocalFiles(tmp_path)
    (tmp_path / "pipe.json").unlink()
    os.mkfifo(tmp_path / "pipe.json")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(FileNotFoundError):
            its.open("pipe.json")
    assert len(os.listdir("/proc/self/fd")) < before + 10


def test_directories_that_are_none_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidValue, match="give a directory"):
        LocalFiles(tmp_path / "none")
    for number in range(3):
        (tmp_path / f"{number}.json").write_text("{}")
    with monkeypatch.context() as small:
        small.setattr(local_files, "FILES_MAX", 2)
        with pytest.raises(InvalidValue, match="has more than 2 files"):
            LocalFiles(tmp_path)

    def refuses(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    with monkeypatch.context() as closed:
        closed.setattr(os, "scandir", refuses)
        with pytest.raises(InvalidValue, match="Permission denied"):
            LocalFiles(tmp_path)
