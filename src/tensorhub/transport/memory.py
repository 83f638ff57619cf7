"""The caller's tensors as bytes: described when they are registered, viewed in place, checked before use.

A GPU's tensors are bytes, too, which only the device can address (`DeviceBytes`). All of one registration are in one memory.

Responsible for what a tensor must be so that its memory can be lent out, for writable views of that memory,
and for noticing that it was replaced (R15). Not responsible for who may read or write when: the worker's
Owner decides that.

torch and numpy are never imported here. Whoever hands over a tensor has imported its library already.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from math import prod
from operator import eq, is_
from typing import Any, Protocol

from tensorhub.cuda.cupy_device import cuda_device, fault_here
from tensorhub.cuda.device import Device, DeviceBytes
from tensorhub.errors import ManifestMismatch, RegistrationError
from tensorhub.manifest import (
    ITEMSIZE,
    QUANTIZED,
    Manifest,
    Quantization,
    TensorDescription,
    TensorSpec,
    name_fault,
    quantization_fault,
)

PADDING_MAX = 256  # bytes beside each tensor of a packed region; publishers take less

# Address, shape, strides, dtype, quantization.
Fingerprint = tuple[int, tuple[int, ...], tuple[int, ...], object, Quantization | None]


def _is_torch(value: object) -> bool:
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def _is_numpy(value: object) -> bool:
    return isinstance(value, getattr(sys.modules.get("numpy"), "ndarray", ()))


# ------------------------------------------------------------------------------------------------- describing


def describe(tensors: Mapping[str, Any]) -> tuple[TensorDescription, ...]:
    """What is registered, in the mapping's order: torch's tensors, on the CPU or on one GPU, or numpy arrays, in place.

    One RegistrationError names every tensor that cannot be used, why, and what to do about it.
    """
    found, faults = [], []
    places = dict[str, str]()  # each device, with the first tensor's name there
    for name, tensor in _snapshot(tensors).items():
        fault = name_fault(name) or _fault(tensor)
        if fault:
            faults.append(f"{name!r}: {fault}")
        else:
            found.append(_describe(name, tensor))
            places.setdefault(_place(tensor), name)
    if faults:
        raise RegistrationError(f"{len(faults)} tensor(s) cannot be registered:\n  " + "\n  ".join(faults))
    if len(places) > 1:
        where = ", ".join(f"{name!r} is on {place}" for place, name in places.items())
        raise RegistrationError(
            f"the tensors are in {len(places)} memories: {where}. Register those of each device by themselves, as a model "
            "name of their own, or move them to one device before"
        )
    return tuple(found)


def _place(tensor: Any) -> str:
    return str(tensor.device) if _is_torch(tensor) else "cpu"


def device_of(tensors: Mapping[str, Any]) -> Device | None:
    """The GPU that tensors which `describe` accepts are on; None: the CPU can address them."""
    device = next((tensor.device for tensor in tensors.values() if _place(tensor) != "cpu"), None)
    return None if device is None else cuda_device(device.index)


def _snapshot(tensors: object) -> dict[str, Any]:
    if not isinstance(tensors, Mapping):
        raise RegistrationError(f"tensors: give a mapping of names to tensors, not {_kind(tensors)}")
    if not tensors:
        raise RegistrationError("tensors: there are none; give at least one")
    return dict(tensors)


def _describe(name: str, tensor: Any) -> TensorDescription:
    dtype, shape = _dtype(tensor), tuple(tensor.shape)
    quantization = _quantization(tensor) if _is_torch(tensor) else None
    return TensorDescription(name, dtype, shape, _address(tensor), prod(shape) * ITEMSIZE[dtype], quantization)


def _quantization(tensor: Any) -> Quantization | None:
    return (tensor.q_scale(), tensor.q_zero_point()) if tensor.is_quantized else None


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.") if _is_torch(tensor) else str(tensor.dtype.name)


def _address(tensor: Any) -> int:
    address: int = tensor.data_ptr() if _is_torch(tensor) else tensor.__array_interface__["data"][0]
    return address


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _fault(tensor: Any) -> str | None:
    """Why this tensor's memory cannot be lent out, and what to do; None if it can."""
    if _is_torch(tensor):
        try:
            return _torch_fault(tensor)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            # Lazy, functional and wrapper tensors refuse the questions themselves.
            return f"a {_kind(tensor)} has no memory to look at ({str(error).splitlines()[0]:.200})"
    if _is_numpy(tensor):
        return _numpy_fault(tensor)
    return f"a {_kind(tensor)} is neither a torch.Tensor nor a numpy.ndarray"


def _torch_fault(tensor: Any) -> str | None:
    if tensor.is_meta:
        return "it is on the meta device and has no bytes; materialize it first (`.to_empty(device='cpu')`)"
    if tensor.device.type == "cuda" and (fault := fault_here()) is not None:
        return f"it is on {tensor.device}, and {fault}"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"it is on {tensor.device}; tensors on the CPU and on CUDA devices can be registered"
    if str(tensor.layout) != "torch.strided" or tensor.is_nested:
        return "it is sparse, nested or of another special layout; register `.to_dense()` or its parts"
    if tensor.is_conj():
        return "its conjugation is still to be done; register `.resolve_conj()`"
    if tensor.is_neg():
        return "its negation is still to be done; register `.resolve_neg()`"
    if _dtype(tensor) not in ITEMSIZE:
        return f"{tensor.dtype} is unknown to this version of TensorHub"
    if tensor.is_quantized and (fault := _quantized_fault(tensor)):
        return fault
    if not tensor.is_contiguous():
        shape = f"shape {tuple(tensor.shape)}, stride {tensor.stride()}"
        return f"it is not contiguous ({shape}); register `.contiguous()`"
    nbytes = tensor.numel() * tensor.element_size()
    if tensor.untyped_storage().nbytes() < tensor.storage_offset() * tensor.element_size() + nbytes:
        return "its storage was freed or is smaller than its shape; register it while it has its memory"
    if nbytes and not tensor.data_ptr():
        return f"a {_kind(tensor)} has no memory of its own; register the tensors that it wraps"
    return None


def _quantized_fault(tensor: Any) -> str | None:
    """Only one scale and one zero point, of all elements, are carried along with the bytes."""
    dtype = _dtype(tensor)
    if dtype not in QUANTIZED:
        return f"{dtype} packs several elements into a byte in torch's own way; register `.int_repr()`"
    try:
        scheme = str(tensor.qscheme())
    except RuntimeError:
        return "it is quantized and has no scale; make it with `torch.quantize_per_tensor`"
    if scheme != "torch.per_tensor_affine":
        parts = "`.int_repr()`, `.q_per_channel_scales()` and `.q_per_channel_zero_points()`"
        return f"its scheme is {scheme}, and only per_tensor_affine is carried along; register {parts} as tensors"
    return quantization_fault(dtype, _quantization(tensor))


def _numpy_fault(array: Any) -> str | None:
    if hasattr(array, "mask"):
        return "it is masked, and its mask would stay behind; register `.data` and `.mask`"
    if array.dtype.name not in ITEMSIZE or not array.dtype.isnative:
        return f"dtype {array.dtype} is not one of torch's; convert it (`.astype(...)`)"
    if not array.flags.c_contiguous:
        return f"it is not C-contiguous (shape {array.shape}); use `numpy.ascontiguousarray(...)`"
    if not array.flags.writeable:
        return "it cannot be written to; register a copy (`.copy()`)"
    return None


# ---------------------------------------------------------------------------------------------------- viewing


def view(tensor: Any) -> memoryview:
    """The writable bytes of a tensor that `describe` accepts, in place. The view keeps the memory alive."""
    nbytes = prod(tensor.shape) * ITEMSIZE[_dtype(tensor)]
    return bytes_at(_address(tensor), nbytes, _storage(tensor))


def _storage(tensor: Any) -> object:
    """What keeps the tensor's present bytes alive, even after `tensor.data = ...`."""
    return tensor.untyped_storage() if _is_torch(tensor) else tensor


def bytes_at(address: int, nbytes: int, storage: object) -> memoryview:
    """The writable bytes there, which `storage` keeps; the view keeps `storage`."""
    if not nbytes:
        return memoryview(bytearray())
    buffer = (ctypes.c_char * nbytes).from_address(address)
    buffer.storage = storage  # type: ignore[attr-defined]
    return memoryview(buffer).cast("B")


Bytes = memoryview | DeviceBytes
"""Of a region or a tensor, in place."""


class Pack(Protocol):
    """A packed region's bytes, beside the tensors that they belong to."""

    def pack(self) -> None:
        """Copy the tensors' bytes into the region."""

    def unpack(self) -> None:
        """Copy the region's bytes into the tensors."""


Pieces = tuple[tuple[int, Bytes], ...]
"""What is where in a region: (offset, a tensor's bytes)."""


@dataclass(frozen=True, slots=True)
class MappedRegions:
    """Where a manifest's regions are in this process.

    `regions`: one view per region, writable if they are to be filled. `copies`: (from, to) for tensors that share
    bytes at the source and are apart here. `unwanted`: regions that are not read here; their views are empty. `then`:
    what else is to be done with the bytes when they are verified; it runs in a thread, and raises TensorHubErrors.
    `scattered`: packed regions, whose tensors are apart here; their views are empty until somebody has made `packs` of them.
    """

    regions: tuple[Bytes, ...]
    copies: tuple[tuple[Bytes, Bytes], ...]
    unwanted: frozenset[int] = frozenset()
    then: Callable[[], None] | None = None
    scattered: Mapping[int, Pieces] = field(default_factory=dict)
    packs: tuple[Pack, ...] = ()

    def pack(self) -> None:
        """Bring the tensors' bytes to the packed regions: before a version of them is promised."""
        for pack in self.packs:
            pack.pack()

    @property
    def is_in_place(self) -> bool:
        """Whether `unpack` has nothing to do."""
        return not self.packs and not self.copies and self.then is None

    def unpack(self) -> None:
        """Bring the regions' bytes to the other tensors that hold them too: when verified, before READY."""
        for pack in self.packs:
            pack.unpack()
        for source, target in self.copies:
            copy_bytes(source, target)
        if self.then is not None:
            self.then()


def copy_bytes(source: Bytes, target: Bytes) -> None:
    """Copy all bytes of one writable view to another of its size, on whichever devices they are."""
    for each in source, target:
        if isinstance(each, DeviceBytes):
            queue = each.device.queue()
            queue.copy(_pointer(target), _pointer(source), source.nbytes)
            queue.mark().wait()
            return
    # ctypes lets go of the GIL meanwhile; a slice assignment of gigabytes would stop the heartbeats.
    ctypes.memmove(_pointer(target), _pointer(source), source.nbytes)


class _Buffer(ctypes.Structure):
    """Python's Py_buffer: ctypes itself gives no address of what cannot be written."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("owner", ctypes.c_void_p),
        ("nbytes", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("rest", ctypes.c_void_p * 5),
    )


def address_of(view: Bytes) -> int:
    """Where the bytes of a contiguous view are, also of one that cannot be written."""
    if isinstance(view, DeviceBytes):
        return view.address
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address: int = buffer.address or 0
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address


def _pointer(view: Bytes) -> int:
    return view.address if isinstance(view, DeviceBytes) else ctypes.addressof(ctypes.c_char.from_buffer(view))


# ------------------------------------------------------------------------------------------------ registering


class Memory(Protocol):
    """The memory of one registration: the caller's tensors, a file's bytes, or what is allocated when it is filled."""

    descriptions: tuple[TensorDescription, ...]  # as this memory would be published; empty where it never is
    metadata: bytes  # see `Manifest.metadata`
    digests_first: bool  # `digests` makes every chunk's digest, before anything is promised
    device: Device | None  # whose memory it is; None: the CPU can address it

    def check_unreplaced(self) -> None:
        """RegistrationError if this is not the memory that was registered any more."""

    def versions(self) -> tuple[int, ...]:
        """Counts of writes: equal before and after, the owner has not written, as far as can be seen."""

    def digests(self, manifest: Manifest, check: Callable[[], object]) -> Sequence[int] | None:
        """Every chunk's digest; None: each is made when it is first sent.

        Blocks. `check` is called every few MiB and ends it by raising. Memory that makes them here is never digested by
        its views: they may be of a file that somebody else truncates.
        """

    def map(self, manifest: Manifest) -> MappedRegions:
        """Find the regions of a manifest, its own or a compatible source's. ManifestMismatch if they are not here."""


class RegisteredMemory:
    """The caller's tensors, as they were when they were registered.

    RegistrationError as for `describe`. Replaced storage is noticed for the mapping's very tensors. Those of
    a `state_dict()` are aliases, which `parameter.data = ...` leaves as they are; `dict(named_parameters())`
    holds the parameters themselves.
    """

    metadata = b""
    digests_first = False

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._mapping = tensors  # the caller's own, to see when an entry becomes another tensor
        self._tensors = _snapshot(tensors)
        self.descriptions = describe(self._tensors)
        self.device = device_of(self._tensors)
        self._by_name = {description.name: description for description in self.descriptions}
        # Lanes may still read the old bytes when the caller has replaced them, so what holds them is kept.
        self._storages: dict[str, Any] = {name: _storage(tensor) for name, tensor in self._tensors.items()}
        self._storage_addresses = list(self._storage_addresses_now())
        self._of_torch = [_is_torch(tensor) for tensor in self._tensors.values()]
        # The views of one storage share one count: a write elsewhere in it would look like one to its tensors here.
        self._counted = [
            of_torch and tensor.untyped_storage().nbytes() == description.nbytes and not tensor.is_inference()
            for tensor, of_torch, description in zip(self._tensors.values(), self._of_torch, self.descriptions, strict=True)
        ]
        self._fingerprints = list(self._fingerprints_now())

    def __repr__(self) -> str:
        nbytes = sum(description.nbytes for description in self.descriptions)
        return f"<RegisteredMemory of {len(self.descriptions)} tensors, {nbytes} bytes>"

    def check_unreplaced(self) -> None:
        """RegistrationError, naming each tensor whose memory is not the registered one. Writes are fine."""
        entries = map(self._mapping.get, self._tensors)
        same_objects = all(starmap(is_, zip(entries, self._tensors.values(), strict=True)))
        # One at a time: a list of them all, each time, would have Python's collector walk the whole process now and then.
        if same_objects and all(map(eq, self._fingerprints_now(), self._fingerprints)):
            return
        if changed := list(self._changes()):
            raise RegistrationError(
                f"{len(changed)} tensor(s) were replaced since they were registered:\n  "
                + "\n  ".join(changed)
                + "\nWrite into the registered ones (`copy_`), or close this handle and register these."
            )

    def _fingerprints_now(self) -> Iterator[Fingerprint]:
        return map(_fingerprint, self._tensors.values(), self._of_torch)

    def _changes(self) -> Iterator[str]:
        for (name, tensor), was in zip(self._tensors.items(), self._fingerprints, strict=True):
            # An entry that is gone is no change: the caller may let go of the mapping. Another object is none
            # either if it is the same memory, as from a mapping that makes its tensors when asked.
            for entry in (tensor, self._mapping.get(name, tensor)):
                fault = None if entry is tensor else _fault(entry)
                what = [fault] if fault else _compare(_fingerprint(entry, _is_torch(entry)), was)
                if what:
                    yield f"{name!r}: {', '.join(what)}"
                    break

    def versions(self) -> tuple[int, ...]:
        """torch's count of writes, per tensor: equal before and after, no torch operation has written.

        Writes through numpy, `.data` and views of bytes are not counted. 0: this tensor has no count (a numpy array, an
        inference tensor, or a part of a larger storage). -1: its bytes are gone (`untyped_storage().resize_(0)`).
        """
        there = map(eq, self._storage_addresses_now(), self._storage_addresses)
        counted = zip(self._tensors.values(), self._counted, there, strict=True)
        return tuple([(tensor._version if counts else 0) if is_there else -1 for tensor, counts, is_there in counted])

    def _storage_addresses_now(self) -> Iterator[int]:
        """Where torch has the bytes that were registered: a tensor may have others by now, and these may be freed."""
        return (storage.data_ptr() if hasattr(storage, "data_ptr") else 0 for storage in self._storages.values())

    def digests(self, manifest: Manifest, check: Callable[[], object]) -> None:
        """None: they are made when a chunk is first sent."""

    def map(self, manifest: Manifest) -> MappedRegions:
        """See `Memory.map`."""
        regions, scattered = list[Bytes](), dict[int, Pieces]()
        copies: list[tuple[Bytes, Bytes]] = []
        # By address: a tied reader of an untied source would overwrite itself (R13).
        taken: dict[int, str] = {}
        for index in range(len(manifest.regions)):
            check_padding(manifest, index)
            pieces = []
            for tensors in alias_classes(manifest, index):
                primary, *others = self._views(tensors, taken)
                pieces.append((tensors[0].offset, primary))
                copies += [(primary, other) for other in others if other.nbytes]
            if is_packed(manifest, index):
                scattered[index] = tuple(pieces)
            regions.append(memoryview(b"") if index in scattered else pieces[0][1])
        return MappedRegions(tuple(regions), tuple(copies), scattered=scattered)

    def _views(self, tensors: Sequence[TensorSpec], taken: dict[int, str]) -> list[Bytes]:
        """The bytes of one alias class, once for each place that they have here; enters these in `taken`."""
        nbytes = tensors[0].nbytes
        names: dict[int, str] = {}  # by address, the first tensor's there
        for tensor in tensors:
            address = self._find(tensor).address
            names.setdefault(address, tensor.name)
            if nbytes and address in taken:
                raise _mismatch(f"tensors {taken[address]!r} and {tensor.name!r} share memory here only")
        if nbytes:
            taken.update(names)
        return [self._bytes_at(address, nbytes, self._storages[name]) for address, name in names.items()]

    def _bytes_at(self, address: int, nbytes: int, storage: object) -> Bytes:
        if self.device is None or not nbytes:
            return bytes_at(address, nbytes, storage)
        return DeviceBytes(self.device, address, nbytes, storage)

    def _find(self, tensor: TensorSpec) -> TensorDescription:
        mine = self._by_name.get(tensor.name)
        if mine is None:
            raise _mismatch(f"tensor {tensor.name!r} is missing here")
        if mine.nbytes != tensor.nbytes:
            sizes = f"{tensor.nbytes} bytes at the source and {mine.nbytes} here"
            raise _mismatch(f"tensor {tensor.name!r} has {sizes}")
        return mine


def is_packed(manifest: Manifest, region: int) -> bool:
    """Whether this region holds more than the bytes of one tensor."""
    nbytes = manifest.regions[region].nbytes
    return any(tensor.offset or tensor.nbytes != nbytes for tensor in manifest.by_region[region])


def alias_classes(manifest: Manifest, region: int) -> Iterable[Sequence[TensorSpec]]:
    """A region's tensors by the bytes that they are: those that share them together."""
    found: dict[tuple[int, int], list[TensorSpec]] = {}
    for tensor in manifest.by_region[region]:
        found.setdefault((tensor.offset, tensor.nbytes), []).append(tensor)
    return found.values()


def check_padding(manifest: Manifest, region: int) -> None:
    """ManifestMismatch if there is more between a region's tensors than packing leaves: a holder makes room for it."""
    nbytes = sum(tensors[0].nbytes for tensors in alias_classes(manifest, region))
    if manifest.regions[region].nbytes - nbytes > PADDING_MAX * len(manifest.by_region[region]):
        raise _mismatch(
            f"region {region} has {manifest.regions[region].nbytes} bytes, of which only {nbytes} are of tensors"
        )


def _mismatch(difference: str) -> ManifestMismatch:
    return ManifestMismatch(difference, differences=(difference,))


def _fingerprint(tensor: Any, of_torch: bool) -> Fingerprint:
    if of_torch:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, _quantization(tensor)
    return tensor.__array_interface__["data"][0], tensor.shape, tensor.strides, tensor.dtype, None


def _compare(now: Fingerprint, was: Fingerprint) -> list[str]:
    what = [
        f"its {word} is {new}, not {old}"
        for word, new, old in zip(("shape", "stride", "dtype", "quantization"), now[1:], was[1:], strict=True)
        if new != old
    ]
    return [*what, *(["its storage is another one"] if now[0] != was[0] else [])]
