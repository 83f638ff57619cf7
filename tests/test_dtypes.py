"""What torch's dtypes take, as torch says it."""

from __future__ import annotations

import pytest

from tensorhub.errors import ManifestMismatch
from tensorhub.model.dtypes import ITEMSIZE, itemsize


def test_every_dtype_of_torch_has_the_itemsize_that_torch_says() -> None:
    torch = pytest.importorskip("torch")
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert len(dtypes) > 20
    assert {str(dtype): dtype.itemsize for dtype in dtypes} == {
        str(dtype): ITEMSIZE.get(str(dtype).removeprefix("torch.")) for dtype in dtypes
    }


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ManifestMismatch, match="float3"):
        itemsize("float3")
