"""The caller's tensors as bytes: what may be registered, views that write through, and replaced
storage.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tensorhub.errors import ManifestMismatch, RegistrationError
from tensorhub.memory import describing
from tensorhub.memory.describing import describe
from tensorhub.memory.tensors import RegisteredMemory, view
from tensorhub.model.dtypes import ITEMSIZE
from tensorhub.model.manifest import Manifest, RegionSpec, TensorSpec, build_manifest
from tests.memory.views import views


def manifest_of(tensors: Mapping[str, Any]) -> Manifest:
    return build_manifest(describe(tensors), 4096, "xxh3-64")


# -------------------------------------------------------------------------------------------------
# describing


def test_what_is_described() -> None:
    weight, array = (
        nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16)),
        np.zeros((4,), np.complex64),
    )
    one, two = describe({"w": weight, "a": array})
    assert (one.name, one.dtype, one.shape, one.nbytes) == ("w", "bfloat16", (2, 3), 12)
    assert (two.name, two.dtype, two.shape, two.nbytes) == ("a", "complex64", (4,), 32)
    assert one.address == weight.data_ptr()
    assert two.address == array.ctypes.data


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
def test_a_scale_and_a_zero_point_are_a_part_of_a_quantized_tensor(dtype: torch.dtype) -> None:
    tensor = quantized(dtype, 0.25, 7)
    memory = RegisteredMemory({"w": tensor})
    (description,) = memory.descriptions
    assert (description.quantization, description.nbytes) == (
        (0.25, 7),
        8 * ITEMSIZE[description.dtype],
    )
    memory.check_current()
    memory._given = {
        "w": quantized(dtype, 0.25, 8).set_(tensor.untyped_storage(), 0, (2, 4), (4, 1))
    }
    with pytest.raises(
        RegistrationError, match=r"'w': its quantization is \(0.25, 8\), not \(0.25, 7\)"
    ):
        memory.check_current()


@pytest.mark.parametrize("of", [torch.from_numpy, lambda array: array])
def test_padded_rows_are_described_with_their_padding(of: Any) -> None:
    buffer = of(np.zeros((5, 4, 10), np.float32))
    for part, strides, extent in (
        (buffer[:, :, 1:8], (160, 40, 4), 4 * (4 * 40 + 3 * 10 + 7)),
        (buffer[1:3, :2], (160, 40, 4), 4 * (40 + 10 + 10)),
        (buffer[::2], (320, 40, 4), 4 * (80 * 2 + 30 + 10)),
        (buffer[:, 0], (160, 4), 4 * (40 * 4 + 10)),
        # of one index, how far it is to the next is no matter
        (buffer[:, 3:, :5], (160, 20, 4), 4 * (160 + 5)),
        (buffer[0, 1], (), 40),
        (buffer[:0, :, :3], (), 0),
    ):
        (found,) = describe({"part": part})
        assert (found.strides, found.extent, found.nbytes) == (
            strides,
            extent,
            4 * int(np.prod(part.shape)),
        )
        (region,) = build_manifest([found], 4096, "none").regions
        assert region.nbytes == extent
    for part in (buffer[:, :, ::2], buffer[:, :, :1], buffer[0].T):
        with pytest.raises(RegistrationError, match="contiguous"):
            describe({"part": part})


def test_padded_rows_overlap_what_is_between_them_and_are_mapped_in_place_only() -> None:
    buffer = torch.zeros(4, 8)
    with pytest.raises(RegistrationError, match="'left' and 'right'"):
        manifest_of({"left": buffer[:, :4], "right": buffer[:, 4:]})
    memory = RegisteredMemory({"left": buffer[:, 2:6]})
    own = build_manifest(memory.descriptions, 4096, "none")
    (region,) = memory.map(own).regions
    assert isinstance(region, memoryview)
    region[:4] = np.float32(3).tobytes()
    assert (region.nbytes, float(buffer[0, 2])) == (4 * (3 * 8 + 4), 3.0)
    packed = manifest_of({"left": torch.zeros(4, 4)})
    with pytest.raises(ManifestMismatch, match="'left' has padded rows here"):
        memory.map(packed)
    tied = RegisteredMemory({"a": buffer[:, :4], "b": torch.zeros(4, 8)[:, :4]})
    with pytest.raises(ManifestMismatch, match="tied elsewhere only"):
        tied.map(build_manifest(describe({"a": buffer[:, :4], "b": buffer[:, :4]}), 4096, "none"))


class Wrapper(torch.Tensor):
    """Has the shape of a tensor and no memory, as DTensor."""

    @staticmethod
    def __new__(cls) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, (3,))
        return made

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("no operations")


def freed() -> torch.Tensor:
    tensor = torch.zeros(8)
    tensor.untyped_storage().resize_(0)
    return tensor


def readonly() -> np.ndarray[Any, Any]:
    array = np.zeros(3)
    array.flags.writeable = False
    return array


@contextlib.contextmanager
def deprecated() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to give quantized tensors up
        yield


def empty_quantized(dtype: torch.dtype) -> torch.Tensor:
    with deprecated():
        return torch.empty(3, dtype=dtype)


def quantized(
    dtype: torch.dtype = torch.qint8, scale: float = 0.5, zero_point: int = 3
) -> torch.Tensor:
    with deprecated():
        made: torch.Tensor = torch._empty_affine_quantized(
            (2, 4), scale=scale, zero_point=zero_point, dtype=dtype
        )
        return made


def per_channel() -> torch.Tensor:
    with deprecated():
        return torch.quantize_per_channel(
            torch.zeros(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8
        )


BAD: dict[str, tuple[Any, str]] = {
    "list": ([1.0], "a builtins.list is neither a torch.Tensor nor a numpy.ndarray"),
    "numpy scalar": (np.float32(1), "a numpy.float32 is neither"),
    "transposed": (
        torch.zeros(2, 3).T,
        r"register `.T` of it, .* in sources=; or register `.contiguous\(\)`, which is a copy",
    ),
    "expanded": (
        torch.zeros(1).expand(3),
        r"register the tensor that it is expanded from; or .*, which is a copy",
    ),
    "channels last": (
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "not contiguous",
    ),
    "meta": (torch.zeros(3, device="meta"), "meta device and has no bytes"),
    "sparse": (torch.eye(3).to_sparse(), r"register `.to_dense\(\)`"),
    "conjugated": (torch.zeros(3, dtype=torch.complex64).conj(), r"register `.resolve_conj\(\)`"),
    "negated": (torch._neg_view(torch.zeros(3)), r"register `.resolve_neg\(\)`"),
    "unquantized": (
        empty_quantized(torch.qint8),
        r"has no scale; make it with `torch.quantize_per_tensor`",
    ),
    "per channel": (
        per_channel(),
        r"scheme is torch.per_channel_affine.*register `.int_repr\(\)`, `.q_per_channel_scales",
    ),
    "packed": (
        empty_quantized(torch.quint4x2),
        r"quint4x2 packs several elements into a byte.*register `.int_repr\(\)`",
    ),
    "scale": (quantized(scale=float("inf")), "its scale inf is not a positive"),
    "zero point": (
        quantized(torch.qint32, zero_point=2**40),
        "its zero point 1099511627776 is not within",
    ),
    "quantized strided": (quantized()[:, 0], "is not contiguous"),
    "freed": (freed(), "its storage was freed"),
    "lazy": (nn.UninitializedParameter(), "has no memory to look at .*uninitialized parameter"),
    "wrapper": (Wrapper(), "Wrapper has no memory"),
    "fortran": (np.zeros((2, 3), order="F"), r"numpy.ascontiguousarray"),
    "strided": (np.zeros(8)[::2], "not C-contiguous"),
    "masked": (np.ma.masked_array(np.ones(2), [True, False]), r"register `.data` and `.mask`"),
    "readonly": (readonly(), r"cannot be written to; register a copy"),
    "object": (np.array([None]), "dtype object is not one of torch's"),
    "big endian": (np.zeros(3, ">f4"), "dtype >f4 is not one of torch's"),
    "record": (np.zeros(3, "i4,i4"), "is not one of torch's"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_tensor_is_named_with_the_reason(kind: str) -> None:
    tensor, why = BAD[kind]
    with pytest.raises(RegistrationError, match=f"'layer.w': .*{why}"):
        describe({"good": torch.zeros(1), "layer.w": tensor})


def test_a_tensor_on_another_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(torch.Tensor):
        is_meta = False
        device = torch.device("cuda", 1)

    class Further(Elsewhere):
        device = torch.device("xpu", 0)

    there, further = torch.zeros(1).as_subclass(Elsewhere), torch.zeros(1).as_subclass(Further)
    monkeypatch.setattr(describing, "fault_here", lambda: "cupy is not installed")
    with pytest.raises(RegistrationError, match=r"'w': it is on cuda:1, and cupy is not installed"):
        describe({"w": there})
    with pytest.raises(
        RegistrationError, match=r"'w': it is on xpu:0; tensors on the CPU and on CUDA"
    ):
        describe({"w": further})
    monkeypatch.setattr(describing, "fault_here", lambda: None)
    assert describe({"w": there})[0].name == "w"
    with pytest.raises(
        RegistrationError,
        match=r"2 memories: 'v' is on cpu, 'w' is on cuda:1. Register those of each",
    ):
        describe({"v": torch.zeros(1), "w": there})


@pytest.mark.parametrize("name", ["", "n" * 513, 7, None, "\ud800"])
def test_bad_names_are_refused(name: Any) -> None:
    with pytest.raises(RegistrationError, match="name"):
        describe({name: torch.zeros(1)})


@pytest.mark.parametrize("tensors", [{}, [torch.zeros(1)], torch.zeros(1), None])
def test_a_registration_needs_a_mapping_with_tensors(tensors: Any) -> None:
    with pytest.raises(RegistrationError, match="tensors: "):
        RegisteredMemory(tensors)


# --------------------------------------------------------------------------------------------------
# viewing

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes_go_through_to_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    backing = torch.zeros(3 * ITEMSIZE[name], dtype=torch.uint8)
    data = view(backing.view(dtype))
    assert (data.nbytes, data.format, data.readonly) == (len(backing), "B", False)
    data[:] = bytes(range(1, len(backing) + 1))
    assert backing.tolist() == list(range(1, len(backing) + 1))


def test_a_view_larger_than_2_gib() -> None:
    nbytes = 2**31 + 4096
    tensor = torch.empty(nbytes, dtype=torch.uint8)  # pages that nobody touches take no memory
    data = view(tensor)
    assert data.nbytes == nbytes
    data[-1] = 77
    assert tensor[-1] == 77


# --------------------------------------------------------------------------------------------------
# mapping


def test_the_bytes_of_a_tied_source_reach_every_tensor_of_the_reader() -> None:
    tied = torch.arange(6.0).view(2, 3)
    source = {"head": tied, "body": torch.ones(2), "embedding": tied, "third": tied}
    one = torch.zeros(2, 3)
    reader = {"embedding": torch.zeros(2, 3), "head": one, "third": one, "body": torch.zeros(2)}
    mapped = RegisteredMemory(reader).map(manifest_of(source))
    assert (len(mapped.regions), len(mapped.copies)) == (2, 1)
    for target, data in zip(
        views(mapped), views(RegisteredMemory(source).map(manifest_of(source))), strict=True
    ):
        target[:] = data
    assert not reader["embedding"].any()
    mapped.unpack()
    assert all(torch.equal(tensor, source[name]) for name, tensor in reader.items())


def test_a_tied_reader_cannot_map_an_untied_source() -> None:
    """R13: the second tensor's bytes would overwrite the first one's."""
    one = torch.zeros(2)
    with pytest.raises(ManifestMismatch, match="'a' and 'b' share memory here only") as caught:
        RegisteredMemory({"a": one, "b": one}).map(
            manifest_of({"a": torch.zeros(2), "b": torch.zeros(2)})
        )
    assert len(caught.value.differences) == 1


def test_what_cannot_be_mapped_is_named() -> None:
    memory = RegisteredMemory(
        {"a": torch.zeros(2, dtype=torch.uint8), "b": torch.zeros(2, dtype=torch.uint8)}
    )
    packed = [TensorSpec(name, "uint8", (2,), ((0, 2),), 0, 2 * at) for at, name in enumerate("ab")]
    with pytest.raises(
        ManifestMismatch, match="region 0 has 600 bytes, of which only 4 are of tensors"
    ):
        memory.map(Manifest(tuple(packed), (RegionSpec(600),), 4096, "none", ""))
    with pytest.raises(ManifestMismatch, match="'c' is missing here"):
        memory.map(manifest_of({"c": torch.zeros(2)}))
    with pytest.raises(ManifestMismatch, match="'a' has 8 bytes at the source and 2 here"):
        memory.map(manifest_of({"a": torch.zeros(2)}))


# --------------------------------------------------------------------------------------------------
# replaced


def test_every_replaced_tensor_is_named() -> None:
    tensors = {
        name: nn.Parameter(torch.zeros(2, 2))
        for name in ("same", "data", "shape", "stride", "freed", "dtype")
    }
    arrays = {"array": np.zeros((2, 3))}
    memory = RegisteredMemory({**tensors, **arrays})
    other = torch.ones(2, 2)
    tensors["data"].data = other
    tensors["shape"].data = tensors["shape"].data.view(4)
    tensors["stride"].data = tensors["stride"].data.T
    tensors["freed"].untyped_storage().resize_(0)
    tensors["dtype"].data = tensors["dtype"].data.view(torch.complex64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy means to give it up
        arrays["array"].shape = (3, 2)
    with pytest.raises(RegistrationError) as caught:
        memory.check_current()
    message = str(caught.value)
    assert message.startswith("6 tensor(s) were replaced")
    assert "'same'" not in message
    for line in (
        "'data': its storage is another one",
        "'shape': its shape is torch.Size([4]), not torch.Size([2, 2])",
        "'stride': its stride is (1, 2), not (2, 1)",
        "'freed': its storage is another one",
        "its dtype is torch.complex64, not torch.float32",
        "'array': its shape is (3, 2), not (2, 3)",
    ):
        assert line in message
    assert "copy_" in message


def test_an_entry_that_becomes_another_tensor_is_noticed() -> None:
    tensors: dict[str, Any] = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}
    memory = RegisteredMemory(tensors)
    tensors["b"] = tensors["b"].detach()
    memory.check_current()
    tensors["a"] = torch.zeros(2)
    tensors["c"] = None
    with pytest.raises(
        RegistrationError, match=r"(?s)2 tensor.*'a': its storage.*'c': a builtins.NoneType"
    ):
        memory.check_current()
    tensors.clear()
    memory.check_current()


def test_replaced_memory_can_still_be_read() -> None:
    tensors = {"w": nn.Parameter(torch.arange(100_000.0))}
    memory = RegisteredMemory(tensors)
    (region,) = views(memory.map(manifest_of(tensors)))
    expected = bytes(region)
    storage = weakref.ref(tensors["w"].untyped_storage())
    tensors["w"].data = torch.zeros(1)
    assert storage() is not None
    assert bytes(region) == expected


def test_versions_tell_of_writes() -> None:
    with torch.inference_mode():
        uncounted = torch.zeros(2)
    tensors: dict[str, Any] = {
        "p": nn.Parameter(torch.zeros(4)),
        "q": torch.zeros(1),
        "i": uncounted,
        "n": np.zeros(3),
    }
    memory = RegisteredMemory(tensors)
    before = memory.versions()
    assert memory.versions() == before
    with torch.no_grad():
        tensors["p"].add_(1)
    after = memory.versions()
    assert after[0] != before[0]
    assert after[1:] == before[1:]


def test_versions_tell_of_memory_that_is_freed() -> None:
    """As sharded training frees and takes it again; a tensor that only gets other bytes leaves the
    registered ones.
    """
    with torch.inference_mode():
        inference = torch.ones(3)
    replaced, large = torch.ones(3), torch.ones(8)
    memory = RegisteredMemory(
        {"a": torch.ones(3), "part": large[:4], "inference": inference, "replaced": replaced}
    )
    before = memory.versions()
    replaced.data = torch.zeros(3)
    assert memory.versions()[:3] == before[:3]
    assert memory.versions()[3] != -1
    for tensor in (memory._tensors["a"], large, inference):
        tensor.untyped_storage().resize_(0)
    assert memory.versions()[:3] == (-1, -1, -1)


def test_memory_that_is_freed_is_not_sampled() -> None:
    """Its address is nobody's any more."""
    tensor = torch.ones(1_000_000)
    memory = RegisteredMemory({"w": tensor})
    is_unwritten = memory.watch()
    assert is_unwritten is not None
    assert is_unwritten()
    tensor.untyped_storage().resize_(0)
    assert not is_unwritten()
    assert memory.watch() is None


def test_a_write_beside_a_tensor_in_its_storage_is_not_taken_for_one_to_it() -> None:
    both = torch.zeros(2, 8)  # double buffering in one allocation
    memory = RegisteredMemory({"w": both[0]})
    before = memory.versions()
    both[1] = 1
    assert memory.versions() == before
