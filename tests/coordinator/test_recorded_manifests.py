"""After a coordinator's restart a version's tensors are those with which it was published, whoever
comes back first.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub.coordinator import Publication
from tensorhub.coordinator.entities import Version
from tensorhub.layouts.published import Published
from tensorhub.messages import BegunWith, Fill, Held, Outcome, Registered, Start
from tensorhub.messages.values import Begun
from tensorhub.model.manifest import ID_BYTES, id_of
from tensorhub.testing import CHUNKS
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.types import OpKey, OpKind, VersionInfo
from tests.coordinator.layout_world import MANIFEST, Rank, World
from tests.coordinator.test_bridges import cut
from tests.coordinator.test_layouts_over_time import back, held_by
from tests.coordinator.test_selection_digests import copied

ANOTHER = make_manifest(CHUNKS + 1, "xxh3-64").encode()


class Restarted:
    """A coordinator that has restarted, and the ranks of a publisher and of a copy, which come back
    one by one.

    `older`: a coordinator has recorded the version that did not say what was published.
    """

    def __init__(self, *, older: bool = False) -> None:
        world, self.trainers, self.copies = copied()
        self.info: VersionInfo = world.version.info
        if older:
            world.stored = [
                replace(e, manifest_ids=b"") if isinstance(e, Publication) else e
                for e in world.stored
            ]
        self.world: World = world.restarted()

    def back(
        self, ranks: list[Rank], manifest: bytes = MANIFEST, coordinates: bytes = b""
    ) -> list[bool]:
        """All ranks of a group say that they hold what was published, with that manifest. Whether
        that counts, of each.
        """
        return come_back(self.world, ranks, self.info, manifest, coordinates)


def come_back(
    world: World, ranks: list[Rank], info: VersionInfo, manifest: bytes, coordinates: bytes = b""
) -> list[bool]:
    world.manifest, same = manifest, list[tuple[Rank, Held]]()
    for rank in ranks:
        parts = (*rank.parts[:-1], coordinates) if coordinates else tuple(rank.parts)
        known, rank.parts = rank.parts, parts
        held = replace(held_by(rank, info, is_publisher=True), published=rank.group == "t")
        same.append((back(world, rank, held), held))
        rank.parts = known
    for each, held in (*same, *same):  # what they hold is heard once all are there
        world.answer_questions(each, held)
    world.manifest = MANIFEST
    return [each.take(Registered)[-1].keep for each, _ in same]


def test_the_record_names_the_manifest_and_the_parts_of_each_shard() -> None:
    one, two, parts = (bytes([number]) * ID_BYTES for number in (1, 2, 3))
    info = VersionInfo("m", 1, "content", 1, 2)
    key = OpKey("m", "t", 1, 0)
    version = Version(info, "layout", key, one + bytes(ID_BYTES) + two + parts)
    assert version.recorded(0) == (one.hex(), "")
    assert version.recorded(1) == (two.hex(), parts.hex())
    assert version.recorded(2) is None
    assert Version(info, "layout", key).recorded(0) is None


def test_who_says_that_other_tensors_were_published_is_not_believed_also_if_he_comes_first() -> (
    None
):
    restarted = Restarted()
    assert restarted.back(restarted.copies, ANOTHER) == [False, False]
    assert not restarted.world.version.manifests
    assert restarted.back(restarted.trainers) == [True, True]
    assert set(restarted.world.version.manifests.values()) == {MANIFEST}


def test_of_what_an_older_coordinator_has_recorded_the_first_holder_says_the_tensors() -> None:
    restarted = Restarted(older=True)
    assert restarted.back(restarted.copies, ANOTHER) == [True, True]
    assert set(restarted.world.version.manifests.values()) == {ANOTHER}


def test_other_parts_than_were_published_are_forgotten_and_readers_wait_for_somebody_who_knows_them() -> (
    None
):
    restarted = Restarted()
    assert restarted.back(restarted.copies, coordinates=b"of another part of the model") == [
        True,
        True,
    ]
    world = restarted.world
    (reader,) = world.group("r", [("own/r0", ())])
    world.fill([reader])
    assert not reader.take(Start)
    assert restarted.back(restarted.trainers) == [True, True]
    (start,) = reader.take(Start)
    found = world.core.cluster.manifests.find(start.publication)
    assert found is not None
    assert Published.decode(found).shards == tuple(
        [tuple(map(id_of, cut(rank)[1])) for rank in range(2)]
    )


def test_a_version_that_nobody_holds_for_a_while_is_known_by_what_was_published_too() -> None:
    """Without a restart: all manifests are forgotten meanwhile."""
    world, trainers, copies = copied()
    info = world.version.info
    world.lose(*trainers, *copies)
    assert not world.version.manifests
    for copy in copies:
        copy.group = "incarnated again"
    assert come_back(world, copies, info, ANOTHER) == [False, False]
    assert come_back(world, copies, info, MANIFEST) == [True, True]


@pytest.mark.parametrize(
    "manifest", [MANIFEST, ANOTHER], ids=["what was published", "another manifest"]
)
def test_who_goes_on_with_other_tensors_than_were_published_is_refused(manifest: bytes) -> None:
    world, _, _ = copied()
    fillers = world.group("f", [cut(0), cut(1)])
    world.fill(fillers)
    key, info = world.operation(fillers[0]).key, world.version.info
    world = world.restarted()
    fillers = [back(world, filler, None) for filler in fillers]
    begun = Begun(key, info.version, info.content_id, id_of(manifest), written=True)
    for filler in fillers:
        world.say(filler, BegunWith(filler.name, manifest))
        call = (
            OpKind.UPDATE,
            "latest",
            None,
            filler.generation,
            False,
            False,
            1000.0,
            (key,),
            begun,
        )
        world.say(filler, Fill(world.key(filler), filler.rank, filler.name, *call))
    errors = [outcome.error for filler in fillers for outcome in filler.take(Outcome)]
    if manifest is MANIFEST:
        assert not errors
        assert set(world.version.manifests.values()) == {MANIFEST}
    else:
        assert [error is not None and error.kind for error in errors] == [
            "ManifestMismatch",
            "GroupAborted",
        ]
        assert not world.version.manifests
