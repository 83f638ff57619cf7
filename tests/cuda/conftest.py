"""What tests of GPUs have in common."""

from __future__ import annotations

import pytest

from tensorhub.cuda.cupy_device import CudaDevice, cuda_device


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def device() -> CudaDevice:
    return cuda_device(0)
