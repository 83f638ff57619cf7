"""Versions of an archive, which the coordinator did not know or has forgotten: when they come back,
and that their copies are ordinary holdings (R2, G3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from tensorhub.coordinator import (
    Durable,
    Event,
    Persist,
    Persisted,
    PersistFailed,
    Publication,
    Restoration,
    Send,
    limits,
)
from tensorhub.coordinator.actions import BOUNDS_MAX, STAND_IN, bounded, counts_in
from tensorhub.coordinator.entities import Model, Version
from tensorhub.coordinator.restoring import LINEAGE_MAX
from tensorhub.coordinator.states import VersionState
from tensorhub.errors import StateError, TensorHubError, VersionConflict
from tensorhub.messages import (
    Announce,
    Done,
    Held,
    LeaveGranted,
    Outcome,
    Refused,
    Register,
    Registered,
    Restore,
    Restored,
    Retain,
    RetainedAck,
    Rollback,
    Start,
    Watch,
)
from tensorhub.model.digests import root_of
from tensorhub.model.manifest import ID_BYTES, id_of
from tensorhub.testing import CHUNKS
from tensorhub.types import VERSION_MAX, Medium, Purpose, VersionInfo
from tests.coordinator.layout_world import MANIFEST, Rank, World, list_of, root
from tests.coordinator.test_bridges import A, B, cut, wide

ROOT = root_of(list_of(CHUNKS))
GONE = "another cluster"


def restored(number: int, *, lineage: int = 0, content: str = "", shards: int = 1) -> Restored:
    """A version of plain tensors; of several shards, as `cut` says."""
    ids = b""
    for shard in range(shards):
        last = bytes.fromhex(id_of(cut(shard)[1][-1])) if shards > 1 else bytes(ID_BYTES)
        ids += bytes.fromhex(id_of(MANIFEST)) + last
    info = VersionInfo("m", number, content or f"content {lineage}-{number}", 12, shards, lineage)
    layout_id = "ranks/t" if shards > 1 else "world/1"
    return Restored(info, layout_id, ids, ROOT * shards)


def as_recorded(world: World, *numbers: int) -> list[Restored]:
    """Those versions of the first lineage, as they were published here."""
    made = {e.number: e for e in world.stored if isinstance(e, Publication) and e.lineage == 0}
    return [restored(number, content=made[number].content_id) for number in numbers]


def restore(
    world: World,
    *versions: Restored,
    cluster: str = GONE,
    lineage: int = 0,
    mark: int | None = None,
    by: Rank | None = None,
) -> TensorHubError | None:
    """What an archive's worker is answered."""
    rank = by or world.ranks.get("archive0") or world.arrive("archive", registers=False)
    mark = max(each.version.version for each in versions) if mark is None else mark
    world.say(rank, Restore(next(world.numbers), "m", cluster, lineage, mark, versions))
    refused = rank.take(Refused)
    assert len(refused) + len(rank.take(Done)) == 1
    return refused[0].error.error() if refused else None


def announce(world: World, version: Restored, shard: int = 0, *, root: bytes = ROOT) -> bool:
    """The archive's worker has a copy of that shard: whether it counts."""
    rank, info = world.ranks["archive0"], version.version
    name = f"archived {info.version} {shard}"
    blobs = cut(shard)[1] if info.world_size > 1 else ()
    what = (info.version, info.content_id, 1, info.world_size, info.nbytes, MANIFEST)
    held = Held(*what, root=root, manifest_id=id_of(MANIFEST), part_ids=tuple(map(id_of, blobs)))
    where = ("m", f"archive/{name}", 0, shard, 1, True, False, Medium.HOST, Purpose.ARCHIVE)
    use = ("", 1, CHUNKS, MANIFEST, held, id_of(MANIFEST))
    world.say(rank, Register(next(world.numbers), name, *where, *use, parts=blobs))
    return rank.take(Registered)[-1].keep


def model_of(world: World) -> Model:
    return world.core.cluster.models["m"]


def version_of(world: World, number: int) -> Version:
    return model_of(world).versions[number]


def known(world: World) -> list[int]:
    return sorted(model_of(world).versions)


def rolled_back(world: World, to: int) -> None:
    by = world.ranks["t0"]
    world.say(by, Rollback(next(world.numbers), f"to {to}", "m", to))
    assert not by.take(Refused)


def published(numbers: Iterable[int]) -> tuple[World, Rank]:
    """A trainer that has published these, and holds the last."""
    world = World()
    trainer = world.arrive("t")
    publish(world, trainer, numbers)
    return world, trainer


def publish(world: World, trainer: Rank, numbers: Iterable[int]) -> None:
    for number in numbers:
        if world.member(trainer).holding is not None:
            world.leave(trainer)
            world.fenced(trainer)
        world.publish([trainer], number)
        (outcome,) = trainer.take(Outcome)
        assert outcome.committed, outcome


# --------------------------------------------------------------------------------------------------
# a cold start


def test_an_empty_coordinator_knows_the_versions_lineage_and_digests_again() -> None:
    world = World()
    versions = [restored(number, lineage=number // 5) for number in range(1, 10)]
    assert restore(world, *versions, lineage=1, mark=9) is None
    model = model_of(world)
    assert (model.mark, model.history.lineage, known(world)) == (9, 1, list(range(1, 10)))
    assert {v.number: v.lineage for v in model.visible} == {n: n // 5 for n in range(1, 10)}
    assert version_of(world, 3).root(0) == ROOT
    assert all(announce(world, each) for each in versions)
    assert all(version.state is VersionState.AVAILABLE for version in model.visible)
    next_one = world.restarted()
    assert (model_of(next_one).mark, model_of(next_one).history.lineage) == (9, 1)
    assert (known(next_one), version_of(next_one, 3).root(0)) == (list(range(1, 10)), ROOT)


def test_the_next_number_is_above_the_mark_although_the_archive_lacks_the_newest() -> None:
    world = World()
    assert restore(world, restored(5), mark=7) is None
    trainer = world.arrive("t")
    world.publish([trainer], 7)
    (outcome,) = trainer.take(Outcome)
    assert outcome.error is not None
    assert "the newest number so far is 7" in outcome.error.message
    world.publish([trainer], 8)
    assert trainer.take(Outcome)[-1].committed
    assert model_of(world.restarted()).mark == 8


def test_watchers_hear_of_the_newest_at_once_and_of_nothing_older() -> None:
    world = World()
    watcher = world.arrive("w")
    world.say(watcher, Watch("m"))
    watcher.take(Announce)
    pages = [[restored(number) for number in page] for page in ([9, 8], [7, 6], [5])]
    for page in pages:
        assert restore(world, *page, mark=9) is None
    heard = [announced.newest for announced in watcher.take(Announce)]
    assert [newest.version for newest in heard if newest is not None] == [9]
    assert known(world) == [5, 6, 7, 8, 9]


def test_all_wait_for_a_copy_and_those_that_lose_theirs_are_retired() -> None:
    """Without a word of the archive's worker an old version without a holder would go at once."""
    world = World()
    versions = [restored(number) for number in range(1, 6)]
    assert restore(world, *versions) is None
    world.pass_time(20.0)
    assert known(world) == [1, 2, 3, 4, 5]
    assert announce(world, versions[0])
    assert announce(world, versions[1])
    rank = world.ranks["archive0"]
    world.lose(rank)
    trainer = world.arrive("t")
    publish(world, trainer, [6])
    assert known(world) == [5, 6]
    assert list(model_of(world).history.forgotten) == [1, 2, 3, 4]


def test_versions_that_are_read_while_the_archive_is_their_only_holder() -> None:
    world = World()
    versions = [restored(number) for number in range(1, 6)]
    assert restore(world, *versions) is None
    reader = world.arrive("r")
    world.fill([reader], "latest")
    assert not reader.take(Start)  # it waits
    assert announce(world, versions[-1])
    assert world.sources(reader) == [("archive0", "", 0)]
    world.vote(reader, root=ROOT)
    (outcome,) = reader.take(Outcome)
    assert (outcome.committed, outcome.by_source) == (True, False)


def test_its_last_live_holder_may_leave_a_retained_version_that_the_archive_keeps() -> None:
    world, trainer = published([1])
    (version,) = as_recorded(world, 1)
    assert restore(world, version, cluster="c") is None
    world.say(trainer, Retain(next(world.numbers), "m", 1))
    assert announce(world, version)
    world.leave(trainer)
    assert not trainer.take(LeaveGranted)  # the archive's worker does not know that it has to stay
    member = world.core.cluster.members["archived 1 0"]
    content = version.version.content_id
    world.say(
        world.ranks["archive0"],
        RetainedAck(member.registration, content, True, member.retained_seq),
    )
    assert trainer.take(LeaveGranted)
    world.fenced(trainer)
    assert version_of(world, 1).state is VersionState.AVAILABLE


def test_thousands_of_archived_versions_cost_the_others_nothing() -> None:
    """They are not looked at until something of them changes."""
    world = World()
    versions = [restored(number) for number in range(1, 31)]
    assert restore(world, *reversed(versions)) is None
    looked = world.core._versions._astir
    assert not looked(model_of(world))  # they wait for their copies
    assert all(announce(world, each) for each in versions)
    world.step_to_rest()
    assert not looked(model_of(world))
    reader = world.arrive("r")
    world.fill([reader], 7)
    assert [each.number for each in looked(model_of(world))] == [7]
    world.lose(reader, world.ranks["archive0"])
    assert known(world) == [29, 30]


def test_a_live_holder_comes_first() -> None:
    world, _ = published([1])
    assert world.version.manifest_ids
    version = Restored(world.version.info, "world/1", world.version.manifest_ids, ROOT)
    assert restore(world, version, cluster="c") is None
    assert announce(world, version)
    for number in range(3):
        reader = world.arrive(f"r{number}")
        world.fill([reader])
        assert world.sources(reader) != [("archive0", "", 0)]


def test_readers_of_any_layout_once_all_shards_are_there() -> None:
    world = World()
    version = restored(1, shards=2)
    assert restore(world, version) is None
    same, (other,) = world.group("s", [cut(0), cut(1)]), world.group("o", [wide(0)])
    world.fill(same)
    world.fill([other])
    assert announce(world, version, 0)
    assert not other.take(Start)
    assert announce(world, version, 1)
    assert version_of(world, 1).holdings.is_described
    holdings = [each for there in version_of(world, 1).holdings.values() for each in there]
    assert [each.trust.by_source for each in holdings if each.committed] == [False, False]
    assert other.take(Start)
    world.ready(other, A, B)
    assert world.sources(other) == [("archive0", A.selection, 0), ("archive0", B.selection, 1)]
    world.vote(other, root(A), root(B))
    assert other.take(Outcome)[-1].committed


def test_a_copy_that_is_not_what_was_published_does_not_count() -> None:
    world = World()
    version = restored(1)
    assert restore(world, version) is None
    assert not announce(world, version, root=b"?" * 32)
    other = replace(version, version=replace(version.version, content_id="another"))
    assert not announce(world, other)
    assert announce(world, version)
    holding = world.core.cluster.members["archived 1 0"].holding
    assert holding is not None
    assert not holding.trust.by_source


# --------------------------------------------------------------------------------------------------
# its own cluster


def test_forgotten_versions_come_back() -> None:
    world, _ = published(range(1, 7))
    assert known(world) == [5, 6]
    old = as_recorded(world, 4, 3, 2, 1)
    assert restore(world, *old, cluster="c", mark=6) is None
    assert known(world) == [1, 2, 3, 4, 5, 6]
    assert not model_of(world).history.forgotten
    assert announce(world, old[2])
    entries = [entry for entry in world.stored if isinstance(entry, Restoration)]
    assert [[each.number for each in entry.publications] for entry in entries] == [[4, 3, 2, 1]]
    assert restore(world, *old, cluster="c", mark=6) is None  # known: nothing is written
    assert sum(isinstance(entry, Restoration) for entry in world.stored) == 1


def test_a_rollback_to_a_forgotten_version_has_it_again() -> None:
    world, trainer = published(range(1, 7))
    rolled_back(world, 3)
    assert model_of(world).history.lost == (2, 3)
    assert model_of(world).newest_visible() is None
    assert restore(world, restored(3), cluster="c", mark=6) is None
    newest = model_of(world).newest_visible()
    assert newest is not None
    assert newest.number == 3
    assert model_of(world).history.lost == (2,)
    assert world.member(trainer).holding is None


def test_what_stands_for_a_forgotten_version_makes_room_for_it() -> None:
    world, _ = published([1, 2])
    stored = [
        replace(e, content_id=f"{STAND_IN}x") if isinstance(e, Publication) and e.number == 2 else e
        for e in world.stored
    ]
    world.stored = stored
    world = world.restarted()
    assert restore(world, restored(2), cluster="c") is None
    assert version_of(world, 2).info.content_id == "content 0-2"
    assert version_of(world.restarted(), 2).info.content_id == "content 0-2"


def test_what_was_rolled_back_never_comes_back() -> None:
    """Also if that number was not used again, or is forgotten; also after a restart."""
    world, trainer = published(range(1, 6))
    rolled_back(world, 2)
    publish(world, trainer, (6, 7, 8))
    for at in (world, world.restarted()):
        *ended, there = as_recorded(world, 5, 4, 3, 2)
        assert restore(at, *ended, there, cluster="c", lineage=1, mark=8) is None
        assert 2 in known(at)
        assert not {3, 4, 5} & set(known(at))
        assert not announce(at, ended[0])


@pytest.mark.parametrize(
    ("version", "message", "retryable"),
    [
        (restored(9), "the newest number is 3", False),
        (restored(3, lineage=1), "of lineage 1", False),
        (restored(3, content="another"), "other content in the archive", False),
    ],
)
def test_what_this_cluster_cannot_have_published_is_refused(
    version: Restored, message: str, retryable: bool
) -> None:
    world, _ = published([1, 2, 3])
    before = len(world.stored)
    error = restore(world, restored(1), version, cluster="c", lineage=1, mark=9)
    assert isinstance(error, VersionConflict)
    assert message in str(error)
    assert error.retryable is retryable
    assert (known(world), len(world.stored)) == ([2, 3], before)


def test_versions_of_another_cluster_do_not_mix_with_those_of_this_one() -> None:
    world, _ = published([1])
    error = restore(world, restored(5))
    assert isinstance(error, StateError)
    assert "this cluster (c)" in str(error)
    assert GONE in str(error)
    empty = World()
    error = restore(empty, restored(5), cluster="c")
    assert isinstance(error, VersionConflict)
    assert "the state_dir is an older one" in str(error)
    assert "m" not in empty.core.cluster.models


def test_the_origin_is_remembered_and_ends_where_it_was_taken_over() -> None:
    world = World()
    assert restore(world, restored(5)) is None
    publish(world, world.arrive("t"), range(6, 12))
    for at in (world, world.restarted()):
        assert restore(at, restored(4), mark=5) is None
        assert 4 in known(at)
        assert isinstance(restore(at, restored(7, content="theirs")), VersionConflict)
        assert isinstance(restore(at, restored(4), cluster="a third one"), StateError)


# --------------------------------------------------------------------------------------------------
# meanwhile


class Slow(World):
    """Its store is done when it is told so."""

    def __init__(self) -> None:
        self.unstored: list[int] = []
        super().__init__()

    def step(self, event: Event) -> None:
        for action in self.core.step(event, self.now):
            if isinstance(action, Persist):
                self.stored.append(action.entry)
                self.unstored.append(action.record)
            elif isinstance(action, Send) and action.session in self.sessions:
                self._hear(self.sessions[action.session], action.message)
        self.core.check_touched()
        self.core.check_invariants()

    def store(self) -> None:
        while self.unstored:
            self.step(Persisted(self.unstored.pop(0)))


def begin(world: Slow, version: Restored, by: str = "archive", cluster: str = GONE) -> Rank:
    """An archive's worker has told of it; that is not durable yet."""
    rank = world.arrive(by, registers=False)
    world.say(rank, Restore(1, "m", cluster, 0, version.version.version, (version,)))
    return rank


def test_a_publish_waits_until_the_mark_is_known() -> None:
    world = Slow()
    archive, trainer = begin(world, restored(5)), world.arrive("t")
    assert not known(world)
    world.publish([trainer], 1)
    (outcome,) = trainer.take(Outcome)
    assert outcome.error is not None
    assert outcome.error.retryable
    assert "being restored" in outcome.error.message
    world.store()
    assert archive.take(Done)
    world.publish([trainer], 6)
    world.store()
    assert trainer.take(Outcome)[-1].committed
    assert model_of(world).mark == 6


def test_nothing_is_restored_beside_a_first_publish_or_a_rollback() -> None:
    world = Slow()
    trainer = world.arrive("t")
    world.publish([trainer], 1)
    refused = begin(world, restored(5)).take(Refused)[0].error
    assert "first time" in refused.message
    assert refused.retryable
    world.store()
    world.say(trainer, Rollback(7, "back", "m", 1))
    refused = begin(world, restored(0), "another", "c").take(Refused)[0].error
    assert "a rollback is being recorded" in refused.message
    assert refused.retryable


def test_a_rollback_meanwhile_ends_what_is_being_restored() -> None:
    world = Slow()
    trainer = world.arrive("t")
    for number in (1, 2, 3, 4):
        publish_slowly(world, trainer, number)
    archive = begin(world, restored(2), cluster="c")
    world.say(trainer, Rollback(7, "back", "m", 1))
    world.store()
    assert archive.take(Done)
    assert model_of(world).mark == 1
    assert 2 not in known(world)
    assert Durable.of(world.stored).models[0].mark == 1
    assert [each.number for each in Durable.of(world.stored).publications] == [1]


def publish_slowly(world: Slow, trainer: Rank, number: int) -> None:
    if world.member(trainer).holding is not None:
        world.leave(trainer)
        world.fenced(trainer)
    world.publish([trainer], number)
    world.store()


def test_two_archives_of_one_model_agree_or_wait() -> None:
    world = Slow()
    first = begin(world, restored(5))
    second = begin(world, restored(5), "second")
    third = begin(world, restored(5), "third", "a third cluster")
    refused = third.take(Refused)[0].error
    assert "from another archive" in refused.message
    assert refused.retryable
    world.say(first, Restore(2, "m", GONE, 0, 5, (restored(4),)))
    assert first.take(Refused)[0].error.retryable
    world.store()
    assert first.take(Done)
    assert second.take(Done)
    assert known(world) == [5]


def test_what_cannot_be_made_durable_is_not_there() -> None:
    world = Slow()
    archive = begin(world, restored(5))
    world.step(PersistFailed(world.unstored.pop(), "the disk is full"))
    assert "the disk is full" in archive.take(Refused)[0].error.message
    assert "m" not in world.core.cluster.models


def test_the_worker_that_asked_is_lost_meanwhile() -> None:
    world = Slow()
    archive = begin(world, restored(5))
    world.cut_off(archive)
    world.store()
    assert known(world) == [5]


@pytest.mark.parametrize("bad", ["model", "ids", "roots", "number", "lineage", "size", "twice"])
def test_bad_words(bad: str) -> None:
    good = restored(3)
    versions: Sequence[Restored] = {
        "model": [replace(good, version=replace(good.version, model="other"))],
        "ids": [replace(good, manifest_ids=b"x" * 31)],
        "roots": [replace(good, roots=b"x")],
        "number": [restored(7)],
        "lineage": [restored(3, lineage=2)],
        "size": [replace(good, version=replace(good.version, nbytes=2**63))],
        "twice": [good, good],
    }[bad]
    world = World()
    assert isinstance(restore(world, *versions, mark=5), StateError)
    assert not world.stored
    assert isinstance(restore(world, good, cluster=""), StateError)


def test_the_last_number_leaves_room_for_a_rollback_and_no_lineage_is_the_last() -> None:
    world, last = World(), VERSION_MAX
    for lineage in (LINEAGE_MAX + 1, last):
        error = restore(world, restored(last, lineage=lineage), lineage=lineage)
        assert isinstance(error, StateError)
        assert f"lineage {lineage}" in str(error)
    assert restore(world, restored(last, lineage=LINEAGE_MAX), lineage=LINEAGE_MAX) is None
    trainer = world.arrive("t")
    rolled_back(world, 5)
    publish(world, trainer, [6])
    there = world.restarted()
    assert (known(there), model_of(there).history.lineage) == ([6], LINEAGE_MAX + 1)


def test_there_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(limits, "RESTORED_VERSIONS_MAX", 3)
    assert restore(world, *map(restored, (9, 8)), mark=9) is None
    error = restore(world, *map(restored, (9, 7, 6)), mark=9)
    assert isinstance(error, StateError)
    assert "RESTORED_VERSIONS_MAX" in str(error)
    assert restore(world, restored(7), mark=9) is None
    monkeypatch.setattr(limits, "RESTORED_VERSIONS_SHARDS_MAX", 3)
    assert isinstance(restore(World(), restored(1, shards=4)), StateError)


# --------------------------------------------------------------------------------------------------
# bounds


def test_bounds_of_lineages() -> None:
    bounds = bounded(bounded(bounded((), 1, 5), 2, 9), 3, 7)
    assert bounds == ((1, 5), (3, 7))
    assert [counts_in(bounds, 3, lineage, 6) for lineage in range(5)] == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert not counts_in((), 1, 0, 0)  # of an older state_dir
    for lineage in range(1, 200):
        before, bounds = bounds, bounded(bounds, 10 + lineage, 10 + lineage)
        assert len(bounds) <= BOUNDS_MAX
        for number in range(5, 100):
            was = counts_in(before, 10 + lineage - 1, 1, number)
            assert was or not counts_in(bounds, 10 + lineage, 1, number)
