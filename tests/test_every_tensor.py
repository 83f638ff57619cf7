"""Every kind of tensor through a real publication, replicated and fetched: no byte, dtype, shape or
scale is lost.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

import tensorhub
from tensorhub import errors, sync
from tensorhub.memory.tensors import view
from tensorhub.types import Options
from tests.rig import OPTIONS

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
QUANTIZED = (torch.qint8, torch.quint8, torch.qint32)
PACKED = (torch.quint4x2, torch.quint2x4)  # refused: tests/memory/test_tensors.py
SHAPES = [(), (0,), (1,), (3, 0, 2), (1, 1, 1), (7, 5), (300, 1000)]


@dataclass
class Hubs:
    trainer: sync.Hub
    reader: sync.Hub
    models: Iterator[str]

    def through(self, source: dict[str, Any], target: dict[str, Any]) -> tensorhub.Fetched:
        """Publish `source`, replicate it into `target`, fetch it."""
        model = next(self.models)
        published, replica = (
            self.trainer.register(model, source),
            self.reader.register(model, target),
        )
        published.publish(1)
        replica.replicate()
        fetched = self.reader.fetch(model)
        replica.close()
        published.close()
        return fetched


@contextmanager
def connected(options: Options) -> Iterator[Hubs]:
    with (
        sync.serve(token="", options=options) as coordinator,
        sync.connect(coordinator.address, name="trainer", token="", options=options) as trainer,
        sync.connect(coordinator.address, name="reader", token="", options=options) as reader,
    ):
        yield Hubs(trainer, reader, (f"model {number}" for number in count()))


@pytest.fixture(scope="module")
def hubs() -> Iterator[Hubs]:
    with connected(OPTIONS) as hubs:
        yield hubs


@contextmanager
def without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        # complex32 is experimental, and quantized tensors are to be given up
        warnings.simplefilter("ignore")
        yield


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bytes at all: what is no number is a content too."""
    elements = int(np.prod(shape))
    most = 2 if dtype is torch.bool else 256
    bits = np.random.default_rng(seed).integers(0, most, elements * dtype.itemsize, np.uint8)
    if dtype in QUANTIZED:
        made = empty_quantized(dtype, shape, 0.1 + seed, seed)
    else:
        with without_warnings():
            made = torch.empty(shape, dtype=dtype)
    view(made)[:] = bits.tobytes()
    return made


def empty_quantized(
    dtype: torch.dtype, shape: tuple[int, ...], scale: float, zero_point: int
) -> torch.Tensor:
    with without_warnings():
        made: torch.Tensor = torch._empty_affine_quantized(
            shape, scale=scale, zero_point=zero_point, dtype=dtype
        )
        return made


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    with without_warnings():
        return torch.empty_like(tensor)


def identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    """In every bit, and in all that a tensor is besides: NaNs of one pattern are equal, and 0.0 is
    not -0.0.
    """
    same_quantizer = one.is_quantized == other.is_quantized and (
        not one.is_quantized
        or (one.q_scale(), one.q_zero_point()) == (other.q_scale(), other.q_zero_point())
    )
    return (one.dtype, one.shape, bytes(view(one))) == (
        other.dtype,
        other.shape,
        bytes(view(other)),
    ) and same_quantizer


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in PACKED], ids=str)
def test_every_dtype_in_every_shape(hubs: Hubs, dtype: torch.dtype) -> None:
    source = {f"{shape}": random_tensor(dtype, shape, seed) for seed, shape in enumerate(SHAPES)}
    target = {name: empty_like(tensor) for name, tensor in source.items()}
    fetched = hubs.through(source, target)
    for name, tensor in source.items():
        assert identical(target[name], tensor), f"replicated {name}"
        assert identical(fetched[name], tensor), f"fetched {name}"


def test_a_reader_of_another_scale_is_told_so(hubs: Hubs) -> None:
    with without_warnings():
        source, target = (
            torch.quantize_per_tensor(torch.zeros(4), scale, 0, torch.quint8)
            for scale in (0.5, 0.25)
        )
    with pytest.raises(
        errors.ManifestMismatch,
        match=r"'w' has \(scale, zero point\) \(0.5, 0\) at the source and \(0.25, 0\)",
    ):
        hubs.through({"w": source}, {"w": target})


def test_quantized_tensors_that_share_memory(hubs: Hubs) -> None:
    with without_warnings():
        one = torch.quantize_per_tensor(torch.randn(6), 0.1, 1, torch.qint8)
    other = empty_quantized(torch.qint8, (0,), 0.5, 2).set_(
        one.untyped_storage(), 0, (2, 3), (3, 1)
    )
    fetched = hubs.through(
        {"one": one, "other": other}, {"one": empty_like(one), "other": empty_like(other)}
    )
    assert identical(fetched["one"], one)
    assert identical(fetched["other"], other)
    assert fetched["one"].data_ptr() == fetched["other"].data_ptr()


@pytest.mark.parametrize(
    "kind", ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex128"]
)
def test_numpy_arrays_and_torch_tensors_read_each_other(hubs: Hubs, kind: str) -> None:
    array = np.random.default_rng(7).integers(0, 2, (4, 5)).astype(kind)
    tensor = torch.from_numpy(array.copy())
    fetched = hubs.through(
        {"w": array, "0-d": np.array(3, kind)},
        {"w": torch.zeros_like(tensor), "0-d": tensor.new_zeros(())},
    )
    assert torch.equal(fetched["w"], tensor)
    assert fetched["0-d"].shape == ()
    into = {"w": np.zeros_like(array)}
    hubs.through({"w": tensor}, into)
    assert np.array_equal(into["w"], array)


@pytest.mark.gpu
def test_pinned_memory(hubs: Hubs) -> None:
    source, target = torch.randn(1000, 300).pin_memory(), torch.zeros(1000, 300).pin_memory()
    fetched = hubs.through({"w": source}, {"w": target})
    assert target.is_pinned()
    assert torch.equal(target, source)
    assert torch.equal(fetched["w"], source)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_tensor_of_5_gib() -> None:
    """Each element says where it is, so that no byte beyond 2**32 can be in another's place."""
    elements = 5 * 2**30 // 8
    source = {"before": torch.arange(5), "w": torch.arange(elements), "after": torch.arange(-5, 0)}
    target = {
        "w": torch.empty(elements, dtype=torch.int64),
        "before": torch.zeros(5).long(),
        "after": torch.zeros(5).long(),
    }
    with connected(Options(op_timeout_s=500.0)) as hubs:
        published, replica = hubs.trainer.register("m", source), hubs.reader.register("m", target)
        published.publish(1)
        report = replica.replicate()
        assert all(torch.equal(target[name], tensor) for name, tensor in source.items())
        print(f"\n5 GiB replicated in {report.seconds:.1f} s: {report.phases}")  # noqa: T201
        replica.close()
        target.clear()
        del replica
        fetched = hubs.reader.fetch("m")
        report = fetched.report
        print(f"5 GiB fetched in {report.seconds:.1f} s: {report.phases}")  # noqa: T201
        assert report.bytes_read == fetched.info.nbytes == 5 * 2**30 + 80
        assert all(torch.equal(fetched[name], tensor) for name, tensor in source.items())
