"""Layouts that differ: what ranks register, and what is kept of it."""

from __future__ import annotations

import pytest

from tensorhub.coordinator import limits
from tensorhub.errors import RegistrationError
from tensorhub.messages import Outcome, ReadyAgain, Refused, RegisterAgain, Registered, Start, Write
from tensorhub.model.manifest import id_of
from tensorhub.types import OpKind
from tests.coordinator.layout_world import MANIFEST, PARTS, Rank, World, lies_of
from tests.coordinator.test_bridges import A, B

CATALOGUE, ARRANGEMENT = map(id_of, PARTS)


def own(rank: int) -> tuple[str, tuple[bytes, ...]]:
    """The layout of a rank that has its own part of the model."""
    return f"own/{rank}", (*PARTS, f"coordinates {rank}".encode())


def test_a_group_s_layout_is_known_with_its_last_rank_and_is_that_of_all_together() -> None:
    world = World()
    first = world.arrive("t", 0, 2, "own/0")
    group = world.member(first).group
    layouts = [group.layout_id]
    world.arrive("t", 1, 2, "own/1")
    layouts.append(group.layout_id)
    assert layouts == [None, "ranks/" + id_of(b"own/0\nown/1")]
    other = world.group("other", [("own/0", ()), ("own/1", ())])
    turned = world.group("turned", [("own/1", ()), ("own/0", ())])
    assert world.member(other[0]).group.layout_id == group.layout_id
    assert world.member(turned[0]).group.layout_id != group.layout_id


def test_equal_ids_are_the_layout_of_the_group() -> None:
    world = World()
    first = world.arrive("t", 0, 2, "world/2")
    assert world.member(first).group.layout_id == "world/2"
    world.arrive("t", 1, 2, "world/2")
    assert world.member(first).group.layout_id == "world/2"
    alone = world.arrive("alone", 0, 1, "own/9")
    assert world.member(alone).group.layout_id == "own/9"


def test_one_rank_is_asked_for_each_part_and_the_others_wait() -> None:
    world = World()
    ranks = [world.arrive("t", rank, 3, *own(rank)) for rank in range(3)]
    (asked,) = ranks[0].take(RegisterAgain)
    assert (asked.whole, asked.part_ids) == (True, (CATALOGUE, ARRANGEMENT, id_of(own(0)[1][2])))
    assert [rank.take(RegisterAgain) for rank in ranks[1:]] == [[], []]
    world.register(ranks[0], parts=own(0)[1])
    world.pass_time(0.1)
    for rank in ranks[1:]:
        (again,) = rank.take(RegisterAgain)
        assert (again.whole, again.part_ids) == (False, ())
        world.register(rank, whole=False)
        (again,) = rank.take(RegisterAgain)
        assert (again.whole, again.part_ids) == (False, (id_of(own(rank.rank)[1][2]),))
        world.register(rank, whole=False, parts=own(rank.rank)[1][2:])
        assert rank.take(Registered)
    assert world.member(ranks[2]).said.parts == own(2)[1]


def test_parts_count_as_manifests(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = (*PARTS, b"x" * 1000)
    world = World()
    monkeypatch.setattr(limits, "MANIFEST_BYTES_MAX", len(MANIFEST) + 1000)
    rank = world.arrive("t", 0, 1, "own/0", parts)
    world.answer_questions(rank)
    (refused,) = rank.take(Refused)
    assert isinstance(refused.error.error(), RegistrationError)
    assert "MANIFEST_BYTES_MAX" in refused.error.message
    monkeypatch.setattr(limits, "MANIFEST_BYTES_MAX", 2**20)
    monkeypatch.setattr(limits, "MANIFEST_BYTES_OF_WORKER_MAX", len(MANIFEST) + 1000)
    world.register(rank, parts=parts)
    (refused,) = rank.take(Refused)
    assert "MANIFEST_BYTES_OF_WORKER_MAX" in refused.error.message


def test_a_rank_names_all_its_parts_or_none() -> None:
    world = World()
    rank = world.arrive("t", 0, 1, "own/0", PARTS)
    world.answer_questions(rank)
    (refused,) = rank.take(Refused)
    assert "name all, or none" in refused.error.message


# ------------------------------------------------------------------------- where readers have what
# they read


def reading(groups: int = 1) -> tuple[World, list[Rank]]:
    """Groups of one rank and one layout that have been told what to read of a version of two
    ranks.
    """
    world = World()
    world.publish(world.group("t", [own(0), own(1)]), 1)
    readers = [world.arrive(f"r{number}", 0, 1, "own/r") for number in range(groups)]
    for reader in readers:
        world.fill([reader])
        assert reader.take(Start)
    return world, readers


def test_where_a_reader_has_it_is_asked_for_once_and_kept_with_its_layout() -> None:
    world, (first, second) = reading(groups=2)
    lies = lies_of(first)
    world.say_ready(first, [A, B], lies)
    (asked,) = first.take(ReadyAgain)
    assert asked.part_ids == tuple(map(id_of, lies))
    world.say_ready(second, [A, B], lies)
    assert not second.take(ReadyAgain)  # the first one was asked
    assert not first.take(Write)
    world.say_ready(first, [A, B], lies, lies)
    assert first.take(Write)
    (layout,) = world.version.others.values()
    assert layout.parts == {0: lies}
    assert world.member(first).arranged == lies
    world.pass_time(0.1)
    (again,) = second.take(ReadyAgain)
    assert again.part_ids == ()  # it is known now
    world.say_ready(second, [A, B], lies)
    assert second.take(Write)
    assert not second.take(ReadyAgain)


@pytest.mark.parametrize("lies", [(), (b"catalogue",), (b"catalogue", b"arranged")], ids=len)
def test_who_may_be_read_says_where_it_has_it(lies: tuple[bytes, ...]) -> None:
    world, (reader,) = reading()
    world.say_ready(reader, [A, B], lies, lies)
    (outcome,) = reader.take(Outcome)
    assert outcome.error is not None
    assert "does not say where in its memory that lies" in outcome.error.message


def test_readers_of_one_layout_have_it_in_the_same_places() -> None:
    world, (first, second) = reading(groups=2)
    world.ready(first, A, B)
    other = (*lies_of(second)[:2], b"elsewhere")
    world.say_ready(second, [A, B], other, other)
    (outcome,) = second.take(Outcome)
    assert outcome.error is not None
    assert "elsewhere than others of the layout own/r" in outcome.error.message
    assert not first.take(Outcome)


def test_where_readers_have_it_counts_as_manifests(monkeypatch: pytest.MonkeyPatch) -> None:
    world, (reader,) = reading()
    kept, lies = world.core.cluster.manifests, lies_of(reader)
    monkeypatch.setattr(limits, "MANIFEST_BYTES_MAX", kept.nbytes + len(lies[0]))
    world.say_ready(reader, [A, B], lies, lies)
    (outcome,) = reader.take(Outcome)
    assert outcome.error is not None
    assert "MANIFEST_BYTES_MAX" in outcome.error.message
    assert outcome.error.retryable
    monkeypatch.setattr(limits, "MANIFEST_BYTES_MAX", 2**20)
    monkeypatch.setattr(limits, "MANIFEST_BYTES_OF_WORKER_MAX", len(MANIFEST) + 10)
    world.fill([reader])
    world.say_ready(reader, [A, B], lies, lies)
    (outcome,) = reader.take(Outcome)
    assert outcome.error is not None
    assert "MANIFEST_BYTES_OF_WORKER_MAX" in outcome.error.message


def test_a_fetch_need_not_say_it() -> None:
    world = World()
    world.publish(world.group("t", [own(0), own(1)]), 1)
    fetch = world.arrive("f", 0, 1, "own/f", serves=False)
    world.fill([fetch], kind=OpKind.FETCH)
    world.say_ready(fetch, [A, B])
    assert fetch.take(Write)
