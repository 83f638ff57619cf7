"""Any range of a reader's memory is found at the sources, byte for byte, and nothing else is."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, strategies as st

from tensorhub.errors import ManifestMismatch
from tensorhub.layouts.ranges import Range, Ranges
from tests.layouts.worlds import experts, wanted, world


@given(st.integers(0, 2**32), st.booleans())
def test_any_range_is_what_the_reader_wants(seed: int, are_experts: bool) -> None:
    random = Random(seed)
    made = (experts if are_experts else world)(random)
    classes = made.publication.classes
    ranges = Ranges(made.reader, [each.coordinates for each in classes])
    covered = wanted(made)
    assert ranges.nbytes == sum(map(sum, covered))
    for region, expected in enumerate(made.expected):
        for _ in range(4):
            start = random.randrange(len(expected) + 1)
            end = random.randrange(start, len(expected) + 1)
            found = ranges.find(region, start, end - start)
            at = start
            for each in found:
                assert at <= each.at
                assert each.nbytes > 0
                at = each.at + each.nbytes
                source = made.memories[classes[each.source].ranks[0]].regions[each.region]
                assert source[each.offset : each.offset + each.nbytes] == expected[each.at : at]
            assert at <= end
            assert sum(each.nbytes for each in found) == sum(covered[region][start:end])


def test_one_source_with_everything() -> None:
    made = world(Random(3))
    ranges = Ranges(made.publication.ranks[0], [made.publication.ranks[0]])
    (piece, *_) = made.publication.ranks[0].pieces()
    assert ranges.find(piece.region, piece.offset, 1) == [
        Range(piece.offset, 1, 0, piece.region, piece.offset)
    ]
    assert ranges.find(10**6, 0, 1) == []


def test_what_no_source_has() -> None:
    made = world(Random(3))
    with pytest.raises(ManifestMismatch):
        Ranges(made.reader, [])
