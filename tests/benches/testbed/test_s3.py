"""The S3 server of the testbed: what is downloaded goes straight into memory, and what cannot be run says what it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benches.comparison import environments
from benches.testbed.systems.s3 import Memory
from benches.testbed.ways import WAYS


def test_parts_are_written_where_they_belong_in_any_order() -> None:
    memory = bytearray(8)
    file = Memory(memoryview(memory))
    file.seek(4)
    assert file.write(b"efgh") == 4
    assert file.tell() == 8
    file.seek(0)
    assert [file.write(b"ab"), file.write(b"cd")] == [2, 2]
    assert memory == b"abcdefgh"


def test_without_its_packages_it_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "default_directory", lambda: tmp_path)
    assert WAYS["s3"].lacks() == "not installed: give --install"
