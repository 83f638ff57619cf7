"""What torch's dtypes take, as torch says it."""

from __future__ import annotations

import pytest

from tensorhub.errors import ManifestMismatch
from tensorhub.model.dtypes import ITEMSIZE, itemsize, shape_fault


def test_every_dtype_of_torch_has_the_itemsize_that_torch_says() -> None:
    torch = pytest.importorskip("torch")
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert len(dtypes) > 20
    assert {str(dtype): dtype.itemsize for dtype in dtypes} == {
        str(dtype): ITEMSIZE.get(str(dtype).removeprefix("torch.")) for dtype in dtypes
    }


@pytest.mark.parametrize(
    ("dtype", "fits", "too_large"),
    [
        ("uint8", (2**63 - 1,), (2**62, 2)),
        ("float32", (2**61 - 1,), (2**61,)),
        ("uint8", (0, 2**62), (0, 2**62, 2)),
    ],
)
def test_a_tensor_takes_less_than_2_63_bytes_an_empty_one_by_its_other_sizes(
    dtype: str, fits: tuple[int, ...], too_large: tuple[int, ...]
) -> None:
    assert shape_fault(fits, dtype) is None
    fault = shape_fault(too_large, dtype)
    assert fault is not None
    assert fault.startswith(f"its shape {too_large} takes 2**63 bytes or more")


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ManifestMismatch, match="float3"):
        itemsize("float3")
