"""What fuzzing has found: each bug by itself."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

import tensorhub
from tensorhub.coordinator import Publication
from tensorhub.errors import StateError
from tensorhub.runtime.control.store import SqliteStore
from tensorhub.types import OpKey
from tests.rig import nothing_left

STATE = "state.sqlite3"


def written(state_dir: Path) -> Path:
    """The file of a store that holds one publication."""
    store = SqliteStore(state_dir)
    store.write([Publication("m", 0, 3, "content", 12, 1, "", OpKey("m", "g", 7, 1))])
    store.close()
    return state_dir / STATE


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("UPDATE publications SET nbytes = 'many'", "nbytes: 'many' is not a whole number"),
        ("UPDATE publications SET world_size = 0", "world_size: 0 is not from 1"),
        ("UPDATE publications SET content_id = x'00ff'", "content_id"),
        ("UPDATE models SET mark = 2", "version 3 of 'm' is beyond its model's mark"),
        (
            "UPDATE publications SET manifest_ids = zeroblob(31)",
            "the ids of the manifests of version 3 of 'm' are cut",
        ),
        ("UPDATE models SET retain = -1", "retain: -1 is not from 0"),
        ("DELETE FROM models", "of 'm' only versions are there"),
        ("UPDATE publications SET model = CAST(x'ff' AS TEXT)", "UTF-8"),
        ("UPDATE cluster SET epoch = 'x'", "damaged"),
        ("UPDATE cluster SET epoch = 9223372036854775807", "damaged"),
        ("UPDATE cluster SET id = x'00'", "damaged"),
    ],
)
async def test_a_store_with_other_values_in_it_says_so(
    change: str, says: str, tmp_path: Path
) -> None:
    with sqlite3.connect(written(tmp_path)) as db:
        db.execute(change)
    db.close()
    async with nothing_left():
        for _ in range(2):  # and lets go of the directory
            with pytest.raises(StateError, match=says) as caught:
                async with tensorhub.serve(state_dir=tmp_path):
                    pass
            assert str(tmp_path) in str(caught.value)


async def test_a_store_whose_pages_are_damaged_says_so(tmp_path: Path) -> None:
    path = written(tmp_path)
    content = bytearray(path.read_bytes())
    for page in range(4096, len(content), 4096):
        content[page : page + 8] = b"\xff" * 8
    path.write_bytes(content)
    with pytest.raises(StateError, match=str(tmp_path)):
        async with tensorhub.serve(state_dir=tmp_path):
            pass


def test_a_store_whose_schema_is_no_text_says_so(tmp_path: Path) -> None:
    """SQLite's own message repeats those bytes, and Python cannot read it."""
    path = written(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE", b"CREATE\xc1TABLE"))
    for _ in range(2):
        with pytest.raises(StateError, match="cannot be used"):
            SqliteStore(tmp_path)
