"""The caller's tensors as bytes: viewed in place, and compared before each use with the caller's
present tensors.

A GPU's tensors are bytes, too, which only the device can address (`DeviceBytes`). The tensors of
one registration are all in the memory of one device, or all in host memory.

Responsible for noticing that a tensor was replaced (R15), and that no tensor was written. Not
responsible for the form of tensors (`describing`), for other memory (`regions`), nor for the right
to read or write (`worker.owner`).

torch and numpy are never imported here. A caller with a tensor has imported its library already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress, starmap
from math import prod
from operator import attrgetter, eq, is_, methodcaller, not_
from types import SimpleNamespace
from typing import Any

from tensorhub.cuda.device import DeviceBytes
from tensorhub.errors import RegistrationError, some
from tensorhub.layouts.sharding import is_dtensor
from tensorhub.layouts.views import Sources, entries_of
from tensorhub.memory.addresses import Bytes, bytes_at
from tensorhub.memory.describing import (
    check_any,
    describe,
    device_of,
    dtype_of,
    fault_of,
    is_torch,
    local_of,
    place_of,
    quantization_of,
    shardings_of,
)
from tensorhub.memory.pages import read_only
from tensorhub.memory.regions import CallersMemory, MappedRegions, mapped, mismatch
from tensorhub.memory.resolving import is_module, resolve, resolve_all
from tensorhub.model.dtypes import ITEMSIZE, Quantization
from tensorhub.model.manifest import Manifest, TensorDescription, TensorSpec

CHANGES_NAMED_MAX = 20  # tensors, in an error
SAMPLE_BYTES = 2**20  # of all tensors together, about
SHARE_BYTES_MIN = 64  # of each tensor, however many there are
PIECES = 1024  # of all tensors together, about
PIECES_OF_TENSOR_MAX = 16

# Address, shape, strides, dtype, quantization; whether torch has yet to conjugate or negate what
# the bytes say.
Fingerprint = tuple[int, tuple[int, ...], tuple[int, ...], object, Quantization | None, bool]


# --------------------------------------------------------------------------------------------------
# viewing


def view(tensor: Any) -> memoryview:
    """The writable bytes of a tensor that `describe` accepts, in place. The view keeps the memory
    alive.
    """
    nbytes = prod(tensor.shape) * ITEMSIZE[dtype_of(tensor)]
    return bytes_at(place_of(tensor), nbytes, _storage(tensor))


def _storage(tensor: Any) -> object:
    """What keeps the tensor's present bytes alive, even after `tensor.data = ...`."""
    return tensor.untyped_storage() if is_torch(tensor) else tensor


# ------------------------------------------------------------------------------------------------
# registering

_OF_TORCH = (
    methodcaller("data_ptr"),
    attrgetter("shape"),
    methodcaller("stride"),
    attrgetter("dtype"),
    methodcaller("is_neg"),
)
_count = attrgetter("_version")
_NO_COUNT = SimpleNamespace(_version=0)


class RegisteredMemory(CallersMemory):
    """The caller's tensors, as they were when they were registered: those of a module or of a
    mapping (see `resolve`).

    RegistrationError as for `resolve` and `describe`. The module or mapping is kept, to be
    compared, never to be adopted. A DTensor is its local part. `sources`: see `Hub.register`; what
    it says is looked at once, now.
    """

    def __init__(self, given: Any, sources: Sources | None = None, world_size: int = 1) -> None:
        resolved = resolve_all(given)
        self._objects, self._carried, self.left_out = (
            resolved.tensors,
            resolved.carried,
            resolved.left_out,
        )
        check_any(self._objects, world_size)
        self._given = given  # the caller's own, to see when it has other tensors
        self._is_module = is_module(given)
        self._is_flat = not self._is_module and all(map(self._objects.__contains__, self._given))
        self.entries, wrong_entries = entries_of(self._objects, sources)
        self.shardings, wrong_shardings = shardings_of(self._objects, self.entries)
        self.descriptions = describe(self._objects, also_wrong=[*wrong_shardings, *wrong_entries])
        self._tensors = {name: local_of(tensor) for name, tensor in self._objects.items()}
        self._dtensors = {
            name: tensor
            for name, tensor in self._objects.items()
            if tensor is not self._tensors[name]
        }
        self.device = device_of(self._tensors)
        self._by_name = {description.name: description for description in self.descriptions}
        # Lanes may still read the old bytes when the caller has replaced them, so what holds them
        # is kept.
        self._storages: dict[str, Any] = {
            name: _storage(tensor) for name, tensor in self._tensors.items()
        }
        # Where torch has the bytes that were registered: a tensor may have others by now, and these
        # may be freed.
        self._read_storage_addresses = [
            getattr(storage, "data_ptr", int) for storage in self._storages.values()
        ]
        self._storage_addresses = [read() for read in self._read_storage_addresses]
        self._held = list(zip(self._objects.values(), self._storages.values(), strict=True))
        self._places = [_place(*each) for each in self._held]
        self._of_torch = [is_torch(tensor) for tensor in self._tensors.values()]
        with_counts = [
            is_torch(tensor) and not tensor.is_inference() for tensor in self._tensors.values()
        ]
        self._with_counts = list(compress(self._objects.values(), with_counts))
        # The views of one storage share one count: a write elsewhere in it would look like one to
        # its tensors here. A DTensor counts by itself, and its local part does not count. (Not the
        # writes of `torch._foreach_...`.)
        self._counted = [
            counts
            and (each.name in self._dtensors or tensor.untyped_storage().nbytes() == each.nbytes)
            for tensor, counts, each in zip(
                self._tensors.values(), with_counts, self.descriptions, strict=True
            )
        ]
        self._fingerprints = list(map(_fingerprint, self._tensors.values(), self._of_torch))
        self._columns = list(self._columns_now())
        self._counts = [
            tensor if own else _NO_COUNT
            for tensor, own in zip(self._objects.values(), self._counted, strict=True)
        ]
        self._sample: Sample | None = None  # made when it is first needed
        self._is_writable = False  # found so by the last check

    def __repr__(self) -> str:
        nbytes = sum(description.nbytes for description in self.descriptions)
        return f"<RegisteredMemory of {len(self.descriptions)} tensors, {nbytes} bytes>"

    # -- replaced?

    def check_unreplaced(self) -> None:
        """RegistrationError, naming each tensor that was registered and has other memory. Writes
        are fine.
        """
        self._compare(self._objects)

    def check_current(self) -> None:
        """As `check_unreplaced`, for what the caller's module or mapping has by now. In his thread:
        it may run his code.

        A module's tensors must be those that were registered, no more and no less. A mapping may
        lose and gain entries: the caller may let go of it.
        """
        self._compare(self._given if self._is_flat else resolve(self._given, self._carried))

    def _compare(self, now: Mapping[str, Any]) -> None:
        same_objects = all(
            starmap(is_, zip(map(now.get, self._objects), self._objects.values(), strict=True))
        )
        same_parts = all(
            local_of(tensor) is self._tensors[name] for name, tensor in self._dtensors.items()
        )
        is_complete = not self._is_module or len(now) == len(self._tensors)
        if same_objects and same_parts and is_complete and self._is_unchanged():
            return
        if changed := list(self._changes(now)):
            more = (
                f"\n  and {len(changed) - CHANGES_NAMED_MAX} more"
                if len(changed) > CHANGES_NAMED_MAX
                else ""
            )
            raise RegistrationError(
                f"{len(changed)} tensor(s) were replaced since they were registered:\n  "
                + "\n  ".join(changed[:CHANGES_NAMED_MAX])
                + f"{more}\nReaders would get what is in the registered ones. Write into these "
                f"(`copy_`, `load_state_dict` "
                "without `assign=True`; no `.data =`, `.to()` or `.half()` since), or close this "
                "handle and register anew."
            )

    def _is_unchanged(self) -> bool:
        """Whether each registered tensor has the fingerprint that it had."""
        # One at a time: a list of them all, each time, would have Python's collector walk the whole
        # process now and then.
        return all(
            all(map(eq, map(read, tensors), known)) for read, tensors, known in self._columns
        )

    def _columns_now(self) -> Iterator[tuple[Callable[[Any], object], list[Any], list[object]]]:
        """A question, the tensors that it is asked of, and their answers: together, all that a
        fingerprint says.

        What a dtype rules out is not asked: a publish asks thousands of tensors before it does
        anything else.
        """
        tensors = self._tensors.values()
        of_torch = list(compress(tensors, self._of_torch))
        asked: list[tuple[Callable[[Any], object], list[Any]]] = [
            (read, of_torch) for read in _OF_TORCH
        ]
        asked.append(
            (methodcaller("is_conj"), [tensor for tensor in of_torch if tensor.is_complex()])
        )
        asked.append((quantization_of, [tensor for tensor in of_torch if tensor.is_quantized]))
        asked.append((_numpy_fingerprint, list(compress(tensors, map(not_, self._of_torch)))))
        return ((read, those, list(map(read, those))) for read, those in asked)

    def _changes(self, now: Mapping[str, Any]) -> Iterator[str]:
        for (name, tensor), was in zip(self._objects.items(), self._fingerprints, strict=True):
            if self._is_module and name not in now:
                yield f"{name!r}: the module has it no more"
                continue
            # A new object with the registered memory is no change: a mapping may make its tensors
            # when asked.
            for entry in (tensor, now.get(name, tensor)):
                fault = None if entry is tensor else fault_of(entry)
                local = entry if fault else local_of(entry)
                what = [fault] if fault else _differences(_fingerprint(local, is_torch(local)), was)
                if what and name in self._dtensors and local is entry:
                    what.append("it was a DTensor")
                elif what and name not in self._dtensors and is_torch(entry) and is_dtensor(entry):
                    what.append("it is a DTensor now")
                if what:
                    yield f"{name!r}: {', '.join(what)}"
                    break
        if self._is_module:
            yield from (
                f"{name!r}: the module did not have it" for name in now if name not in self._tensors
            )

    # -- may be written?

    @property
    def filled(self) -> list[TensorDescription]:
        """Those that are not left alone (`[]` in `sources`)."""
        return [each for each in self.descriptions if self.entries.get(each.name) != ()]

    def check_writable(self, *, again: bool = False) -> None:
        """See `Memory.check_writable`. Read-only memory may be registered, since it may be
        published.
        """
        if self.device is not None or (self._is_writable and not again):
            return
        filled = self.filled
        found = read_only([(each.address, each.extent) for each in filled])
        if found:
            each = [
                f"{filled[index].name!r}{f' (a mapping of {path})' * bool(path)}"
                for index, path in found.items()
            ]
            raise RegistrationError(
                f"{len(found)} tensor(s) are in memory of this process that cannot be written, so "
                f"that they can be "
                f"published and not filled: {some(each)}. Register copies (`.clone()`), or map the "
                f"file with copy-on-write "
                "(numpy.memmap: mode='c'; mmap: ACCESS_COPY)"
            )
        self._is_writable = True

    # -- written?

    def versions(self, tensors: Iterable[int] | None = None) -> tuple[int, ...]:
        """torch's count of writes, per tensor: equal before and after, no torch operation has
        written.

        Writes through numpy, `.data` and views of bytes are not counted. 0: this tensor has no
        count (a numpy array, an inference tensor, or a part of a larger storage). -1: its bytes are
        gone (`untyped_storage().resize_(0)`).
        """
        if tensors is not None:
            return tuple([self._version(number) for number in tensors])
        counts = tuple(map(_count, self._counts))
        addresses = [read() for read in self._read_storage_addresses]
        if addresses == self._storage_addresses:
            return counts
        there = map(eq, addresses, self._storage_addresses)
        return tuple(
            [count if is_there else -1 for count, is_there in zip(counts, there, strict=True)]
        )

    def _version(self, number: int) -> int:
        is_there = self._read_storage_addresses[number]() == self._storage_addresses[number]
        return _count(self._counts[number]) if is_there else -1

    def moved(self, tensors: Iterable[int] | None = None) -> list[int]:
        """See `Memory.moved`. Memory that torch frees and allocates again at its old address is not
        noticed here.
        """
        numbers = range(len(self._held)) if tensors is None else tensors
        return [number for number in numbers if _place(*self._held[number]) != self._places[number]]

    def count_write(self) -> None:
        """Have torch count a write to each tensor, so that autograd refuses what it has kept of the
        bytes before.

        (Inference tensors have no count.)
        """
        if self._with_counts:
            sys.modules["torch"].autograd.graph.increment_version(self._with_counts)

    def watch(self) -> Callable[[], bool] | None:
        """See `CallersMemory.watch`: no count has moved, and sampled bytes are equal.

        None if a tensor has no count of its own, since a write may be anywhere in it; if its bytes
        are gone; or if there is nothing to write.
        """
        versions = self.versions()
        if not versions or -1 in versions or not all(self._counted):
            return None
        sample = self._sample = self._sample or Sample(list(self._tensors.values()))
        taken = sample.take()
        return lambda: self.versions() == versions and sample.is_still(taken)

    def map(self, manifest: Manifest) -> MappedRegions:
        """See `Memory.map`."""
        padded = {
            index
            for index in range(len(manifest.regions))
            if self._has_padded_rows(manifest, index)
        }
        # by address: a tied reader of an untied source would overwrite itself (R13)
        taken: dict[int, str] = {}

        def find(tensors: Sequence[TensorSpec]) -> list[Bytes]:
            found = self._views(tensors, taken)
            if len(found) > 1 and tensors[0].region in padded:
                raise mismatch(
                    f"tensor {tensors[0].name!r} has padded rows, and is tied elsewhere only"
                )
            return found

        return mapped(manifest, find, padded)

    def _has_padded_rows(self, manifest: Manifest, region: int) -> bool:
        """Whether a tensor of it has padded rows here. The region is then all that is between its
        first byte and its last one: of another layout's, its bytes would be elsewhere.
        """
        tensors = manifest.by_region[region]
        extents = {
            mine.extent
            for tensor in tensors
            if (mine := self._by_name.get(tensor.name)) and mine.strides
        }
        if extents and (
            extents != {manifest.regions[region].nbytes} or any(tensor.offset for tensor in tensors)
        ):
            raise mismatch(
                f"tensor {tensors[0].name!r} has padded rows here, and its region is another one"
            )
        return bool(extents)

    def _views(self, tensors: Sequence[TensorSpec], taken: dict[int, str]) -> list[Bytes]:
        """The bytes of one alias class, once for each place that they have here; enters these in
        `taken`.
        """
        nbytes = self._find(tensors[0]).extent
        names: dict[int, str] = {}  # by address, the first tensor's there
        for tensor in tensors:
            address = self._find(tensor).address
            names.setdefault(address, tensor.name)
            if nbytes and address in taken:
                raise mismatch(
                    f"tensors {taken[address]!r} and {tensor.name!r} share memory here only"
                )
        if nbytes:
            taken.update(names)
        return [
            self._bytes_at(address, nbytes, self._storages[name]) for address, name in names.items()
        ]

    def _bytes_at(self, address: int, nbytes: int, storage: object) -> Bytes:
        if self.device is None or not nbytes:
            return bytes_at(address, nbytes, storage)
        return DeviceBytes(self.device, address, nbytes, storage)

    def _find(self, tensor: TensorSpec) -> TensorDescription:
        mine = self._by_name.get(tensor.name)
        if mine is None:
            raise mismatch(f"tensor {tensor.name!r} is missing here")
        if mine.nbytes != tensor.nbytes:
            sizes = f"{tensor.nbytes} bytes at the source and {mine.nbytes} here"
            raise mismatch(f"tensor {tensor.name!r} has {sizes}")
        return mine


class Sample:
    """Some bytes of many torch tensors, sampled cheaply, to see later whether any tensor has
    changed. `tensors`: strided, all on one device; their memory must exist whenever `take` is
    called.

    All samples have equal pieces, spread evenly over each tensor: about a MiB in all. A tensor that
    is no larger than its share is taken whole. torch gathers and compares the pieces where the
    tensors are, in the order of the caller's stream. So the caller does not wait for a GPU before
    there is something to compare.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._pieces = list(_sampled(tensors))

    def take(self) -> Any:
        """What these bytes are now, as a tensor on their device; None: torch cannot gather them
        there.
        """
        try:
            return sys.modules["torch"].cat(self._pieces) if self._pieces else None
        except RuntimeError:  # no memory, most likely: then nothing is known
            return None

    def is_still(self, taken: Any) -> bool:
        """Whether these bytes are what they were when that was taken; waits for the device."""
        now = self.take()
        return (
            taken is not None and now is not None and bool(sys.modules["torch"].equal(taken, now))
        )


def _sampled(tensors: Sequence[Any]) -> Iterator[Any]:
    """Each as a view of bytes, with no share in its tensor's count of writes."""
    share = max(SAMPLE_BYTES // max(len(tensors), 1), SHARE_BYTES_MIN)
    count = min(max(PIECES // max(len(tensors), 1), 1), PIECES_OF_TENSOR_MAX)
    torch = sys.modules["torch"]
    for tensor in tensors:
        storage, first = tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size()
        for start, nbytes in _spread(tensor.numel() * tensor.element_size(), share, count):
            yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
                storage, first + start, (nbytes,)
            )


def _spread(nbytes: int, share: int, count: int) -> Iterable[tuple[int, int]]:
    """(start, size) of the sampled pieces of so many bytes: from the first byte to the last."""
    if nbytes <= share:
        return [(0, nbytes)] if nbytes else []
    size, gaps = share // count, max(count - 1, 1)
    return [((nbytes - size) * index // gaps, size) for index in range(count)]


def _place(tensor: Any, storage: Any) -> tuple[int, int, int]:
    """The address of the tensor's bytes, and the address and size of its storage; `storage`: see
    `_storage`.
    """
    local = local_of(tensor)
    if is_torch(local):
        return local.data_ptr(), storage.data_ptr(), storage.nbytes()
    address = local.__array_interface__["data"][0]
    return address, address, local.nbytes


def _fingerprint(tensor: Any, of_torch: bool) -> Fingerprint:
    if of_torch:
        is_lazy = tensor.is_conj() or tensor.is_neg()
        return (
            tensor.data_ptr(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            quantization_of(tensor),
            is_lazy,
        )
    return _numpy_fingerprint(tensor)


def _numpy_fingerprint(array: Any) -> Fingerprint:
    return (
        array.__array_interface__["data"][0],
        array.shape,
        array.strides,
        array.dtype,
        None,
        False,
    )


def _differences(now: Fingerprint, was: Fingerprint) -> list[str]:
    what = [
        f"its {word} is {new}, not {old}"
        for word, new, old in zip(
            ("shape", "stride", "dtype", "quantization"), now[1:5], was[1:5], strict=True
        )
        if new != old
    ]
    if now[5] != was[5]:
        what.append(
            "its conjugation or negation is still to be done (`.resolve_conj()`, `.resolve_neg()`)"
        )
    return [*what, *(["its storage is another one"] if now[0] != was[0] else [])]
