"""Describes tensors, and says which cannot be registered. A DTensor is its local part, in place.

Responsible for naming the obstacle and the remedy. Not responsible for which tensors there are
(`resolving`), nor for their bytes (`tensors`).

torch and numpy are never imported here. A caller with a tensor has imported its library already.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

from tensorhub.cuda.cupy_device import cuda_device, fault_here
from tensorhub.cuda.device import Device
from tensorhub.errors import RegistrationError
from tensorhub.layouts.sharding import Sharding, is_dtensor, sharding_of
from tensorhub.model.dtypes import ITEMSIZE, QUANTIZED, Quantization, quantization_fault
from tensorhub.model.manifest import TensorDescription, name_fault


def is_torch(value: object) -> bool:
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def is_numpy(value: object) -> bool:
    return isinstance(value, getattr(sys.modules.get("numpy"), "ndarray", ()))


def describe(
    tensors: Mapping[str, Any], *, also_wrong: Sequence[str] = ()
) -> tuple[TensorDescription, ...]:
    """These, in the mapping's order: torch's tensors, on the CPU or on one GPU, or numpy arrays, in
    place.

    One RegistrationError names every tensor that cannot be used, why, and the remedy. `also_wrong`:
    further faults of the caller's tensors.
    """
    found, faults = [], []
    places = dict[str, str]()  # each device, with the first tensor's name there
    for name, tensor in tensors.items():
        fault = name_fault(name) or fault_of(tensor)
        if fault:
            faults.append(f"{name!r}: {fault}")
        else:
            local = local_of(tensor)
            found.append(description_of(name, local, place_of(local)))
            places.setdefault(_place(local), name)
    faults += also_wrong
    if faults:
        raise RegistrationError(
            f"{len(faults)} tensor(s) cannot be registered:\n  " + "\n  ".join(faults)
        )
    if len(places) > 1:
        where = ", ".join(f"{name!r} is on {place}" for place, name in places.items())
        raise RegistrationError(
            f"the tensors are in {len(places)} memories: {where}. Register those of each device by "
            f"themselves, as a model "
            "name of their own, or move them to one device before"
        )
    return tuple(found)


def check_any(tensors: Collection[object], world_size: int) -> None:
    """RegistrationError: there are none, and no other rank either. (A rank of several may have
    none: a pipeline's stage without an adapter.)
    """
    if not tensors and world_size == 1:
        raise RegistrationError(
            "tensors: there are none; give at least one (only a rank of several may have none)"
        )


def local_of(tensor: Any) -> Any:
    """What this process has of it, in place: of a DTensor its local part, of any other tensor all
    of it.
    """
    # Not `to_local()`: of a parameter that is a new object each time.
    return tensor._local_tensor if is_torch(tensor) and is_dtensor(tensor) else tensor


def shardings_of(
    tensors: Mapping[str, Any], said: Collection[str]
) -> tuple[dict[str, Sharding | None], list[str]]:
    """How the DTensors among these are cut, but for those of which something else is `said`; and
    why some cannot be used.
    """
    found: dict[str, Sharding | None] = {}
    faults = []
    for name, tensor in tensors.items():
        if is_torch(tensor) and is_dtensor(tensor) and name not in said:
            try:
                found[name] = sharding_of(tensor)
            except RegistrationError as error:
                faults.append(f"{name!r}: {error}")
    return found, faults


def _place(tensor: Any) -> str:
    return str(tensor.device) if is_torch(tensor) else "cpu"


def device_of(tensors: Mapping[str, Any]) -> Device | None:
    """The GPU that tensors which `describe` accepts are on; None: the CPU can address them."""
    device = next((tensor.device for tensor in tensors.values() if _place(tensor) != "cpu"), None)
    return None if device is None else cuda_device(device.index)


def description_of(name: str, tensor: Any, address: int) -> TensorDescription:
    """As if its bytes were there."""
    dtype, shape = dtype_of(tensor), tuple(tensor.shape)
    quantization = quantization_of(tensor) if is_torch(tensor) else None
    strides = () if _is_contiguous(tensor) else row_pitch(shape, _strides(tensor), ITEMSIZE[dtype])
    return TensorDescription(
        name, dtype, shape, address, prod(shape) * ITEMSIZE[dtype], quantization, strides or ()
    )


def _is_contiguous(tensor: Any) -> bool:
    return bool(tensor.is_contiguous() if is_torch(tensor) else tensor.flags.c_contiguous)


def _strides(tensor: Any) -> tuple[int, ...]:
    """In bytes."""
    if is_torch(tensor):
        return tuple([each * tensor.element_size() for each in tensor.stride()])
    return tuple(tensor.strides)


def row_pitch(
    shape: Sequence[int], strides: Sequence[int], itemsize: int
) -> tuple[int, ...] | None:
    """These strides, in bytes, if rows are whole and merely padded: those of a dimension of one
    index as if it were packed. None: they are something else, as of a transposed or an expanded
    tensor.
    """
    found, packed = list[int](), itemsize  # the innermost first; the least that the next one can be
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        is_row = packed == itemsize
        if size > 1 and (stride < packed or stride % itemsize or (is_row and stride != packed)):
            return None
        found.append(stride if size > 1 else packed)
        packed = found[-1] * max(size, 1)
    return tuple(reversed(found))


def quantization_of(tensor: Any) -> Quantization | None:
    return (tensor.q_scale(), tensor.q_zero_point()) if tensor.is_quantized else None


def dtype_of(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.") if is_torch(tensor) else str(tensor.dtype.name)


def place_of(tensor: Any) -> int:
    address: int = tensor.data_ptr() if is_torch(tensor) else tensor.__array_interface__["data"][0]
    return address


def kind_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def fault_of(tensor: Any) -> str | None:
    """Why this tensor's memory cannot be lent out, and what to do; None if it can."""
    if is_torch(tensor):
        try:
            return _torch_fault(local_of(tensor))
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            # Lazy, functional and wrapper tensors refuse the questions themselves.
            return (
                f"a {kind_of(tensor)} has no memory to look at ({str(error).splitlines()[0]:.200})"
            )
    if is_numpy(tensor):
        return _numpy_fault(tensor)
    return f"a {kind_of(tensor)} is neither a torch.Tensor nor a numpy.ndarray"


def _torch_fault(tensor: Any) -> str | None:
    if tensor.is_meta:
        return (
            "it is on the meta device and has no bytes; materialize it first "
            "(`.to_empty(device='cpu')`)"
        )
    if tensor.device.type == "cuda" and (fault := fault_here()) is not None:
        return f"it is on {tensor.device}, and {fault}"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"it is on {tensor.device}; tensors on the CPU and on CUDA devices can be registered"
    if str(tensor.layout) != "torch.strided" or tensor.is_nested:
        return (
            "it is sparse, nested or of another special layout; register `.to_dense()` or its parts"
        )
    if tensor.is_conj():
        return "its conjugation is still to be done; register `.resolve_conj()`"
    if tensor.is_neg():
        return "its negation is still to be done; register `.resolve_neg()`"
    if dtype_of(tensor) not in ITEMSIZE:
        return f"{tensor.dtype} is unknown to this version of TensorHub"
    if tensor.is_quantized and (fault := _quantized_fault(tensor)):
        return fault
    if fault := stride_fault(tensor):
        return fault
    nbytes = description_of("", tensor, 0).extent
    if tensor.untyped_storage().nbytes() < tensor.storage_offset() * tensor.element_size() + nbytes:
        return (
            "its storage was freed or is smaller than its shape; "
            "register it while it has its memory"
        )
    if nbytes and not tensor.data_ptr():
        return f"a {kind_of(tensor)} has no memory of its own; register the tensors that it wraps"
    return None


def stride_fault(tensor: Any) -> str | None:
    """What to do where a tensor of torch is neither contiguous nor a tensor with padded rows."""
    if tensor.is_contiguous() or row_pitch(tensor.shape, tensor.stride(), 1) is not None:
        return None
    advice = "register `.contiguous()`, which is a copy: use it in place of this tensor"
    if tensor.dim() == 2 and tensor.T.is_contiguous():
        advice = f"register `.T` of it, with `.T` behind its view in sources=; or {advice}"
    elif 0 in tensor.stride():
        advice = f"register the tensor that it is expanded from; or {advice}"
    return f"it is not contiguous (shape {tuple(tensor.shape)}, stride {tensor.stride()}); {advice}"


def _quantized_fault(tensor: Any) -> str | None:
    """Only one scale and one zero point, of all elements, are carried along with the bytes."""
    dtype = dtype_of(tensor)
    if dtype not in QUANTIZED:
        return (
            f"{dtype} packs several elements into a byte in torch's own way; register `.int_repr()`"
        )
    try:
        scheme = str(tensor.qscheme())
    except RuntimeError:
        return "it is quantized and has no scale; make it with `torch.quantize_per_tensor`"
    if scheme != "torch.per_tensor_affine":
        parts = "`.int_repr()`, `.q_per_channel_scales()` and `.q_per_channel_zero_points()`"
        return (
            f"its scheme is {scheme}, and only per_tensor_affine is carried along; register "
            f"{parts} as tensors"
        )
    return quantization_fault(dtype, quantization_of(tensor))


def _numpy_fault(array: Any) -> str | None:
    if hasattr(array, "mask"):
        return "it is masked, and its mask would stay behind; register `.data` and `.mask`"
    if array.dtype.name not in ITEMSIZE or not array.dtype.isnative:
        return f"dtype {array.dtype} is not one of torch's; convert it (`.astype(...)`)"
    if (
        not array.flags.c_contiguous
        and row_pitch(array.shape, array.strides, array.itemsize) is None
    ):
        return (
            f"it is not C-contiguous (shape {array.shape}); use `numpy.ascontiguousarray(...)`, "
            f"which is a copy, in its place"
        )
    if not array.flags.writeable:
        return "it cannot be written to; register a copy (`.copy()`)"
    return None
