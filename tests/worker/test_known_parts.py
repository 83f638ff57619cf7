"""What a worker keeps of the layouts of publications: the newest, and no more than it may."""

from __future__ import annotations

from typing import cast

import pytest

from tensorhub.errors import ProtocolError
from tensorhub.layouts.publication import Publication
from tensorhub.layouts.reading import ReshardedManifest
from tensorhub.model.manifest import id_of
from tensorhub.worker import known_parts
from tensorhub.worker.known_parts import (
    PUBLICATIONS_KEPT_MAX,
    READINGS_KEPT_MAX,
    KnownParts,
    KnownReadings,
)


def test_the_newest_publications_are_kept() -> None:
    known = KnownParts()
    made = {str(n): cast(Publication, object()) for n in range(PUBLICATIONS_KEPT_MAX + 1)}
    first, second, *_, last = made
    for name in [*list(made)[:-1], first]:
        known.keep(name, made[name])
    assert all(known.publication(name) is made[name] for name in made if name != last)
    known.keep(last, made[last])
    assert [name for name in made if known.publication(name) is None] == [second]


def test_the_newest_plans_are_kept() -> None:
    known = KnownReadings()
    made = {str(n): cast(ReshardedManifest, object()) for n in range(READINGS_KEPT_MAX + 1)}
    for name, plan in made.items():
        known.keep(name, "m", plan)
    first, *rest = made
    assert known.get(first, "m") is None
    assert all(known.get(name, "m") is made[name] for name in rest)
    assert known.get(rest[0], "another") is None


def test_the_parts_that_were_used_last_are_kept_up_to_so_many_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_parts, "PARTS_BYTES_MAX", 12)
    known, parts = KnownParts(), [letter * 4 for letter in (b"a", b"b", b"c", b"d")]

    def kept() -> list[bytes]:
        return [part for part in parts if known.get(id_of(part)) is not None]

    for part in (*parts[:3], parts[2]):
        known.add(id_of(part), part)
    assert known.get(id_of(parts[0])) == parts[0]
    known.add(id_of(parts[3]), parts[3])
    assert kept() == [parts[0], parts[2], parts[3]]
    large = b"e" * 13
    known.add(id_of(large), large)  # one is kept, however large it is
    assert (kept(), known.get(id_of(large))) == ([], large)


def test_bytes_that_their_id_does_not_name_are_no_part() -> None:
    known = KnownParts()
    with pytest.raises(ProtocolError, match="not what its id, x, names"):
        known.add("x", b"part")
    assert known.get("x") is None
