"""A rank whose tensors are parts: what it says of them, and what it does with a version of another layout."""

from __future__ import annotations

from itertools import count

import pytest

from tensorhub.errors import StateError
from tensorhub.layouts.entries import entries_of
from tensorhub.layouts.identity import layout_id_of
from tensorhub.layouts.joining import Declaration, coordinates_of, parts_of
from tensorhub.layouts.views import source
from tensorhub.manifest import Manifest, TensorDescription, build_manifest, id_of
from tensorhub.messages import Register, RegisterAgain
from tensorhub.worker.calls import PublishCall, Say
from tensorhub.worker.member import Member
from tensorhub.worker.registration_session import Shard

CHUNK_BYTES = 4096


def manifest_of(**rows: int) -> Manifest:
    """Tensors of so many rows, of 16 bytes each."""
    places = count(0x10000, 0x10000)
    tensors = [TensorDescription(name, "uint8", (n, 16), next(places), 16 * n) for name, n in rows.items()]
    return build_manifest(tensors, CHUNK_BYTES, "xxh3-64", "world/1")


def shard_of(rank: int, sources: dict[str, object], *, partial: bool = False, **rows: int) -> Shard:
    """Of 2 ranks, as it is registered."""
    entries, _ = entries_of(rows, sources)
    manifest, declared = manifest_of(**rows), Declaration(rank, 2, {}, entries, partial)
    known = all(view.shape is not None for view in sources.values())  # type: ignore[attr-defined]
    return Shard(
        f"r{rank}",
        "m",
        "g",
        rank,
        2,
        False,
        layout_id_of(manifest, declared),
        manifest,
        rank,
        declared=declared,
        coordinates=coordinates_of(manifest, declared) if known else None,
    )


def member_of(shard: Shard) -> Member:
    numbers = count(1)
    return Member(shard, requests=lambda: next(numbers), generations=lambda: next(numbers), manifests={})


def said(member: Member, actions: list[object]) -> Register:
    (say,) = actions
    assert isinstance(say, Say)
    assert isinstance(say.message, Register)
    return say.message


W = source("w", shape=(512, 16))


def test_a_rank_names_its_parts_and_says_those_that_are_asked_for() -> None:
    shard = shard_of(1, {"w": W[256:512]}, partial=True, w=256)
    member = member_of(shard)
    register = said(member, [*member.connected(0, 10)])
    assert shard.coordinates is not None
    assert register.part_ids == tuple(parts_of(shard.coordinates))
    assert (register.parts, register.partial) == ((), True)
    assert register.layout_id.startswith("own/")
    wanted = (register.part_ids[2], "another", register.part_ids[0])
    again = said(member, [*member.receive(RegisterAgain(register.request, False, wanted), 0)])
    assert [id_of(part) for part in again.parts] == [wanted[0], wanted[2]]
    assert again.part_ids == register.part_ids


def test_plain_tensors_have_no_parts() -> None:
    shard = Shard("r", "m", "g", 0, 1, False, "world/1", manifest_of(w=4), 0)
    register = said(member := member_of(shard), [*member.connected(0, 10)])
    assert (register.part_ids, register.parts, register.partial) == ((), (), False)


def test_what_does_not_say_its_shapes_cannot_be_published() -> None:
    shard = shard_of(0, {"w": source("whole")[0:256]}, w=256)
    member = member_of(shard)
    assert said(member, [*member.connected(0, 10)]).part_ids == ()
    with pytest.raises(StateError, match=r"how large 'whole' is as a whole; register it with source\('whole', shape="):
        member.begin(PublishCall(1), 10, 0)
