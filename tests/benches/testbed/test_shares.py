"""Each word of a share says what it is."""

from __future__ import annotations

import numpy as np
import pytest

from benches.testbed.shares import Share

NBYTES = 64 * 1024
LAYOUTS = [(1, "rows"), (2, "rows"), (2, "columns"), (4, "columns")]


@pytest.mark.parametrize(("ranks", "cut"), LAYOUTS)
def test_what_is_written_is_found(ranks: int, cut: str) -> None:
    for rank in range(ranks):
        share = Share(NBYTES, rank, ranks, cut)
        assert share.versions() == [0]
        share.write(7)
        assert share.versions() == [7]
        assert share.nbytes == NBYTES


def test_all_shares_are_the_whole_in_any_layout() -> None:
    """So what one layout publishes is what another one reads."""
    wholes = []
    for cut in ("rows", "columns"):
        shares = [Share(NBYTES, rank, 2, cut) for rank in range(2)]
        whole = np.zeros(shares[0].whole, np.uint64)
        for share in shares:
            share.write(3)
            whole[share.part] = share.tensors["b"]
        wholes.append(whole)
    assert np.array_equal(wholes[0], wholes[1])


@pytest.mark.parametrize(("ranks", "cut"), LAYOUTS)
def test_one_wrong_word_is_found(ranks: int, cut: str) -> None:
    """A word of another version, of another place, of nothing."""
    share = Share(NBYTES, 0, ranks, cut)
    share.write(2)
    flat = share.tensors["b"].reshape(-1)
    for wrong, found in ((flat[5] - np.uint64(1 << 40), [1, 2]), (flat[6], [-1, 2])):
        right = flat[5]
        flat[5] = wrong
        assert share.versions() == found
        flat[5] = right
    assert share.versions() == [2]


def test_the_other_tensor_is_another_one() -> None:
    share = Share(NBYTES)
    share.write(2)
    share.tensors["a"][:] = share.tensors["b"]
    assert share.versions() == [-1, 2]
