"""Bytes that are sampled of many tensors: how many, where, and what is noticed of them."""

from __future__ import annotations

import pytest
import torch

from tensorhub.memory.tensors import PIECES, SAMPLE_BYTES, SHARE_BYTES_MIN, Sample, _spread

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)


@pytest.mark.parametrize("nbytes", [0, 1, 1000, SAMPLE_BYTES, SAMPLE_BYTES + 1, 10**9])
def test_pieces_are_within_the_tensor_and_reach_both_its_ends(nbytes: int) -> None:
    places = list(_spread(nbytes, SAMPLE_BYTES, 16))
    assert all(0 <= start <= start + size <= nbytes for start, size in places)
    assert sum(size for _, size in places) == min(nbytes, SAMPLE_BYTES)
    if places:
        assert (places[0][0], sum(places[-1])) == (0, nbytes)


@pytest.mark.parametrize("count", [1, 100, PIECES, 20_000])
def test_what_is_taken_is_bounded(count: int) -> None:
    tensors = [torch.zeros(2_000) for _ in range(count)]
    sample = Sample(tensors)
    assert sample.take().nbytes <= max(SAMPLE_BYTES, SHARE_BYTES_MIN * count)
    assert len(sample._pieces) <= max(PIECES, count)


def test_the_last_byte_of_any_tensor_is_noticed() -> None:
    tensors = [torch.zeros(size) for size in (5, 100_000, 3_000_000)]
    sample = Sample(tensors)
    for tensor in tensors:
        for place in 0, -1:
            taken = sample.take()
            assert sample.is_still(taken)
            tensor.numpy()[place] += 1
            assert not sample.is_still(taken)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_has_bytes_and_its_count_stays(dtype: torch.dtype) -> None:
    try:
        tensor = torch.zeros(8, dtype=torch.uint8).view(dtype)
    except RuntimeError as error:
        pytest.skip(f"no view of bytes: {error}")
    before = tensor._version
    sample = Sample([tensor])
    assert sample.is_still(sample.take())
    assert tensor._version == before
