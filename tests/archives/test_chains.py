from __future__ import annotations

from types import SimpleNamespace

import pytest

from tensorhub.archives.catalogue import Anchor, Key, Shard, Version, VersionCatalogue
from tensorhub.archives.chains import base_for

ANCHOR_BYTES = 8000


@pytest.fixture
def catalogue() -> VersionCatalogue:
    return VersionCatalogue(SimpleNamespace(url="file:///archive"), "actor")  # type: ignore[arg-type]


def add(catalogue: VersionCatalogue, key: Key, base: Key | None, frames: int = 0) -> None:
    anchor = Anchor("anchors/1", {}, {}) if base is None else None
    shards = (Shard("m", 1, (frames // 2, 0)), Shard("m", 1, (frames - frames // 2,)))
    catalogue.versions[key] = Version(
        "actor", key, "c", ANCHOR_BYTES, "xxh3-64", "p", "l", shards, "d", "i", None, base, anchor
    )


def archived(catalogue: VersionCatalogue, sizes: list[int]) -> list[int | None]:
    """The numbers of bases, where each version's frames would have so many bytes; None: an
    anchor.
    """
    found = list[int | None]()
    for number, size in enumerate(sizes):
        base = base_for(catalogue, Key(0, number))
        add(catalogue, Key(0, number), base, size)
        found.append(None if base is None else base.number)
    return found


def test_a_chain_begins_anew_with_a_delta_of_the_anchor(catalogue: VersionCatalogue) -> None:
    assert archived(catalogue, [10] * 12) == [None, 0, 1, 2, 0, 4, 5, 0, 7, 8, 0, 10]


@pytest.mark.parametrize(
    ("size", "deltas"), [(150, 3), (190, 3), (191, 2), (285, 2), (286, 1), (9000, 1)]
)
def test_an_anchor_comes_next_before_a_chain_has_a_part_of_its_bytes(
    catalogue: VersionCatalogue, size: int, deltas: int
) -> None:
    """A fourteenth. What the next delta takes is expected to be as much as the last took."""
    bases = archived(catalogue, [size] * (deltas + 2))
    assert [number for number, base in enumerate(bases) if base is None] == [0, deltas + 1]


def test_the_base_is_the_version_before(catalogue: VersionCatalogue) -> None:
    assert base_for(catalogue, Key(0, 0)) is None
    for number in (1, 2, 5):
        add(catalogue, Key(0, number), None)
    assert base_for(catalogue, Key(0, 9)) == Key(0, 5)
    assert base_for(catalogue, Key(0, 2)) == Key(0, 1)
    # a rollback has ended 2 and 5
    assert base_for(catalogue, Key(1, 2)) == Key(0, 1)


def test_a_broken_chain_is_not_gone_on(catalogue: VersionCatalogue) -> None:
    add(catalogue, Key(0, 2), Key(0, 1), 10)
    assert base_for(catalogue, Key(0, 3)) is None
