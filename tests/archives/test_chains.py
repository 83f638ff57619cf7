from __future__ import annotations

from types import SimpleNamespace

import pytest

from tensorhub.archives import chains
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


def archived(catalogue: VersionCatalogue, sizes: list[int]) -> list[int]:
    """The numbers of anchors, where each version's frames would have so many bytes."""
    found = []
    for number, size in enumerate(sizes):
        key = Key(0, number)
        base = base_for(catalogue, key)
        add(catalogue, key, base, size)
        if base is None:
            found.append(number)
        else:
            assert base == Key(0, number - 1)
    return found


@pytest.mark.parametrize(("size", "every"), [(50, 21), (100, 11), (500, 3), (4000, 2)])
def test_a_chain_ends_with_a_part_of_its_anchors_bytes(
    catalogue: VersionCatalogue, size: int, every: int
) -> None:
    assert archived(catalogue, [size] * 50) == [*range(0, 50, every)]


def test_a_chain_has_an_end_where_nothing_changes(
    catalogue: VersionCatalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chains, "CHAIN_MAX", 4)
    assert archived(catalogue, [0] * 8) == [0, 3, 6]


def test_the_base_is_the_version_before(catalogue: VersionCatalogue) -> None:
    assert base_for(catalogue, Key(0, 0)) is None
    for number in (1, 2, 5):
        add(catalogue, Key(0, number), None)
    assert base_for(catalogue, Key(0, 9)) == Key(0, 5)
    assert base_for(catalogue, Key(0, 2)) == Key(0, 1)
    assert base_for(catalogue, Key(1, 2)) == Key(0, 5)


def test_a_broken_chain_is_not_gone_on(catalogue: VersionCatalogue) -> None:
    add(catalogue, Key(0, 2), Key(0, 1), 10)
    assert base_for(catalogue, Key(0, 3)) is None
