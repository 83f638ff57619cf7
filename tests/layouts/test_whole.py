"""The whole model as one memory, whatever its layout: which tensors, and where they lie."""

from __future__ import annotations

import pytest

from tensorhub.errors import ManifestMismatch
from tensorhub.layouts import Publication, arrange, source
from tensorhub.layouts.pieces import packed
from tensorhub.layouts.published import Published
from tensorhub.layouts.whole import choose, whole_manifest
from tensorhub.model.manifest import Manifest
from tests.layouts.worlds import LocalTensor, pieces_of

PUBLISHED = Published("xxh3-64", 4096, (("part",),))


def local(name: str, *shape: int, region: int) -> LocalTensor:
    return LocalTensor(name, "uint8", shape, packed(shape, 1), region)


def halves(*, names: tuple[str, ...] | None = None, with_local: bool = False) -> Manifest:
    """Of "w", which two ranks share, of "embed" and "head", which are tied, and of a rank-local
    tensor.
    """
    ranks = []
    for rank in range(2):
        sources = {
            "half": source("w", shape=(8, 2))[4 * rank : 4 * rank + 4],
            "embed": source("embed", shape=(3,)),
            "head": source("head", shape=(3,)),
        }
        tensors = [
            local("half", 4, 2, region=0),
            local("embed", 3, region=1),
            local("head", 3, region=1),
            *([local("mine", 5, region=2)] if with_local else []),
        ]
        ranks.append(arrange(pieces_of(tensors, rank=rank, world_size=2, sources=sources)))
    return whole_manifest(PUBLISHED, Publication(tuple(ranks)).check(), names)


def test_each_tensor_has_a_region_of_its_own_and_tied_ones_share_theirs() -> None:
    made = halves()
    assert [(each.name, each.shape, each.slices, each.region) for each in made.tensors] == [
        ("w", (8, 2), ((0, 8), (0, 2)), 0),
        ("embed", (3,), ((0, 3),), 1),
        ("head", (3,), ((0, 3),), 1),
    ]
    assert [region.nbytes for region in made.regions] == [16, 3]
    assert (made.digest, made.chunk_bytes) == ("xxh3-64", 4096)


def test_what_is_one_ranks_alone_cannot_be_a_part_of_the_whole_but_can_be_left_out() -> None:
    with pytest.raises(ManifestMismatch, match="'mine' is plain and local to each"):
        halves(with_local=True)
    assert [each.name for each in halves(with_local=True, names=("w", "h*")).tensors] == [
        "w",
        "head",
    ]


def test_patterns_choose_tensors_in_the_order_of_the_manifest() -> None:
    made = halves()
    assert choose(None, made) == list(made.tensors)
    assert [each.name for each in choose(("head", "w"), made)] == ["w", "head"]
    assert [each.name for each in choose(("*e*",), made)] == ["embed", "head"]
    with pytest.raises(ManifestMismatch, match="z"):
        choose(("z*",), made)
