"""What ranks hold together: shard classes, bytes that nobody holds or one rank holds twice, what
readers leave, ties.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, strategies as st

from tensorhub.errors import ManifestMismatch
from tensorhub.layouts import Coordinates, Publication, arrange, source
from tensorhub.layouts.catalogue import catalogue_of
from tensorhub.layouts.pieces import packed
from tensorhub.layouts.sharding import Cut, cut
from tests.layouts.worlds import LocalTensor, pieces_of, world


def local(name: str, *shape: int, region: int = 0, offset: int = 0) -> LocalTensor:
    return LocalTensor(name, "uint8", shape, packed(shape, 1), region, offset)


def sharded(*shards: tuple[int, int], names: tuple[str, ...] = ("a", "b")) -> list[Coordinates]:
    """Each with part i of n of some tensors of (12, 2)."""
    made = []
    for part, parts in shards:
        shardings = {name: cut((12, 2), [Cut(0, parts, part)]) for name in names}
        locals_ = [local(name, 12 // parts, 2, region=n) for n, name in enumerate(names)]
        made.append(arrange(pieces_of(locals_, world_size=8, shardings=shardings)))
    return made


@given(st.randoms(use_true_random=False))
def test_classes_are_the_ranks_that_hold_the_same(random: Random) -> None:
    made = world(random)
    seen: list[int] = []
    for each in made.publication.classes:
        seen += each.ranks
        first = list(made.publication.ranks[each.ranks[0]].pieces())
        assert all(list(made.publication.ranks[rank].pieces()) == first for rank in each.ranks)
    assert sorted(seen) == list(range(len(made.publication.ranks)))


def test_bytes_that_no_rank_holds_are_named() -> None:
    with pytest.raises(ManifestMismatch) as caught:
        Publication(tuple(sharded((0, 3), (2, 3)) + sharded((0, 2), (1, 2), names=("c",)))).check()
    assert caught.value.differences == (
        "of tensor 'a', [4:8, 0:2] (8 bytes) is held by no rank",
        "of tensor 'b', [4:8, 0:2] (8 bytes) is held by no rank",
    )


def test_who_has_not_said_which_part_its_plain_tensor_is_may_be_to_blame() -> None:
    said = pieces_of(
        [local("w", 8, 2)], rank=0, world_size=2, sources={"w": source("w", shape=(12, 2))[0:8]}
    )
    unsaid = pieces_of([local("w", 4, 2)], rank=1, world_size=2)
    with pytest.raises(
        ManifestMismatch, match=r"is held by no rank \(rank 1 has a plain tensor of that name"
    ):
        Publication((arrange(said), arrange(unsaid))).check()


def test_a_byte_in_two_pieces_of_one_rank_is_named() -> None:
    w = source("w", shape=(12, 2))
    pieces = pieces_of(
        [local("x", 8, 2), local("y", 8, 2, region=1)], sources={"x": w[0:8], "y": w[4:12]}
    )
    with pytest.raises(
        ManifestMismatch,
        match=r"rank 0 holds parts \[0:8, 0:2\] and \[4:12, 0:2\] of tensor 'w', which overlap",
    ):
        Publication((arrange(pieces),)).check()


def test_the_same_byte_on_two_ranks_is_no_fault() -> None:
    Publication(tuple(sharded((0, 2), (1, 2), (0, 1)))).check()


def test_ranks_with_tensors_of_their_own_make_one_publication() -> None:
    """Expert or pipeline parallelism: no rank knows all names."""
    publication = Publication(
        tuple(sharded((0, 1), names=("a",)) + sharded((0, 1), names=("b",)))
    ).check()
    assert publication.catalogue.names == ("a", "b")
    publication.check_readers(sharded((0, 1)))


def test_what_a_reading_group_leaves_is_named_unless_it_may() -> None:
    publication = Publication(tuple(sharded((0, 1)))).check()
    readers = [*sharded((0, 2)), *sharded((1, 2), names=("a",))]
    with pytest.raises(ManifestMismatch, match=r"partial=True") as caught:
        publication.check_readers(readers)
    assert caught.value.differences == (
        "of tensor 'b', [6:12, 0:2] (12 bytes) is read by no rank of the group",
    )
    publication.check_readers(readers, partial=True)
    publication.check_readers(sharded((0, 2), (1, 2)))


def test_a_tensor_without_elements_need_not_be_read() -> None:
    whole, empty = local("w", 4), local("e", 0, 3, region=1)
    publication = Publication((arrange(pieces_of([whole, empty])),)).check()
    publication.check_readers([arrange(pieces_of([whole]), publication.catalogue)])
    with pytest.raises(ManifestMismatch, match=r"'w' .* is read by no rank of the group"):
        publication.check_readers([arrange(pieces_of([empty]), publication.catalogue)])
    assert list(publication.unread(["w"])) == []
    assert len(list(publication.unread(["e"]))) == 1


@pytest.mark.parametrize("more", [0, 1])
def test_rank_local_tensors_are_each_ranks_own(more: int) -> None:
    """Of equal shapes as well."""
    ranks = [
        arrange(pieces_of([local("w", 5 + rank * more)], rank=rank, world_size=2))
        for rank in range(2)
    ]
    publication = Publication(tuple(ranks)).check()
    assert publication.catalogue.names == ("w",) * (1 + more)
    publication.check_readers(ranks)
    with pytest.raises(
        ManifestMismatch, match="'w', local to rank 1 of 2, is read by no rank of the group"
    ):
        publication.check_readers(ranks[:1])
    publication.check_readers(ranks[:1], partial=True)


# --------------------------------------------------------------------------------------------------
# ties


def tied(tied: bool, names: tuple[str, ...] = ("embed", "head")) -> Coordinates:
    return arrange(
        pieces_of([local(name, 12, 2, region=0 if tied else n) for n, name in enumerate(names)])
    )


def test_tied_readers_of_tied_tensors_are_in_order() -> None:
    publication = Publication((tied(True),)).check()
    assert publication.ties == {0: 0, 1: 0}
    publication.check_readers([tied(True)])
    publication.check_readers([tied(False)])


def test_what_shares_memory_at_the_reader_only_is_refused() -> None:
    publication = Publication((tied(False),)).check()
    with pytest.raises(
        ManifestMismatch, match="tensors 'embed' and 'head' share memory at the reader only"
    ):
        publication.check_readers([tied(True)])


@pytest.mark.parametrize("which", [0, 1])
def test_a_tie_on_one_rank_only_is_none(which: int) -> None:
    halves = [cut((12, 2), [Cut(0, 2, part)]) for part in range(2)]
    ranks = []
    for part in range(2):
        same = part == which
        shardings = dict.fromkeys(("embed", "head"), halves[part])
        locals_ = [local(name, 6, 2, region=0 if same else n) for n, name in enumerate(shardings)]
        ranks.append(arrange(pieces_of(locals_, world_size=2, shardings=shardings)))
    publication = Publication(tuple(ranks)).check()
    with pytest.raises(ManifestMismatch, match="share memory at the reader only"):
        publication.check_readers([tied(True)])


def test_ties_hold_for_each_view() -> None:
    """Two views in one place, of tied tensors: fine if they are of the same part."""
    publication = Publication((tied(True),)).check()

    def reader(part: slice) -> Coordinates:
        entries = {"x": source("embed")[0:6], "y": source("head")[part]}
        shapes = dict.fromkeys(("embed", "head"), (12, 2)).get
        pieces = pieces_of([local("x", 6, 2), local("y", 6, 2)], sources=entries, shape_of=shapes)
        return arrange(pieces, publication.catalogue)

    publication.check_readers([reader(slice(0, 6))], partial=True)
    with pytest.raises(ManifestMismatch, match="share memory at the reader only"):
        publication.check_readers([reader(slice(6, 12))], partial=True)


def test_every_fault_is_in_one_error() -> None:
    many = catalogue_of(
        (f"t{n}", piece.kind) for n in range(30) for piece in sharded((0, 1))[0].pieces()
    )
    publication = Publication((arrange([], many),))
    with pytest.raises(ManifestMismatch, match=r"30 fault\(s\).*and 20 more") as caught:
        publication.check()
    assert len(caught.value.differences) == 30
