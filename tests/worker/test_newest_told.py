"""By what it was told before, a worker knows a coordinator on an older copy of its state (G3)."""

from __future__ import annotations

import pytest

from tensorhub.messages import Announce, Watch
from tensorhub.types import VersionInfo
from tensorhub.worker.newest_told import NewestTold


def news(lineage: int | None, number: int | None) -> Announce:
    """Of a version that was published in the first lineage."""
    newest = None if number is None else VersionInfo("m", number, f"c{number}", 1, 1)
    return Announce("m", newest, lineage)


@pytest.mark.parametrize(
    ("before", "after", "goes_back"),
    [
        ((0, 4), (0, 4), False),
        ((0, 4), (0, 5), False),
        ((0, None), (0, 0), False),
        ((0, 4), (1, 2), False),  # by a rollback; so below
        ((0, 4), (1, None), False),
        ((0, 4), (0, 3), True),
        ((0, 0), (0, None), True),
        ((1, 2), (0, 4), True),  # the rollback is lost
        ((1, None), (0, 4), True),
        ((None, 4), (None, 3), False),  # an older release does not say the lineage
        ((0, 4), (None, 3), False),
        ((None, 4), (1, 3), False),
    ],
)
def test_neither_lineages_nor_numbers_of_one_go_back(
    before: tuple[int | None, int | None], after: tuple[int | None, int | None], goes_back: bool
) -> None:
    told = NewestTold()
    assert not told.goes_back(news(*before))
    assert told.goes_back(news(*after)) is goes_back
    assert not told.goes_back(news(*after))


def test_each_coordinator_is_told_what_was_said_last_until_that_is_forgotten() -> None:
    told = NewestTold()
    assert told.watch("m") == Watch("m")
    for answer, said in (
        (news(1, 4), Watch("m", 1, 4)),
        (news(2, None), Watch("m", 2)),
        (news(None, 4), Watch("m", 0, 4)),
    ):
        told.goes_back(answer)
        assert told.watch("m") == said
        assert told.watch("another") == Watch("another")
    told.forget("another")
    assert told.watch("m") != Watch("m")
    for forgotten in (("m",), ()):
        told.goes_back(news(0, 9))
        told.forget(*forgotten)
        assert told.watch("m") == Watch("m")
        assert not told.goes_back(news(0, 1))
