"""Tensors that are allocated when a version is known: what `Hub.fetch` fills and gives to its
caller.

Responsible for choosing tensors by name, for allocating them, and for bringing them to a device.
Tensors that are tied at the publisher are tied here. torch is imported when the first such memory
is made.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorhub.cuda.cupy_device import cuda_device, fault_here
from tensorhub.cuda.device import Device, DeviceBytes
from tensorhub.errors import InvalidType, InvalidValue, ManifestMismatch, StateError, install, shown
from tensorhub.layouts.whole import choose
from tensorhub.memory.addresses import Bytes
from tensorhub.memory.regions import FilledMemory, MappedRegions, mapped
from tensorhub.memory.tensors import view
from tensorhub.model.manifest import Manifest, TensorSpec

if TYPE_CHECKING:
    import torch


class _Place(NamedTuple):
    """The bytes of one alias class, in a manifest."""

    region: int
    offset: int
    nbytes: int


def _place(tensor: TensorSpec) -> _Place:
    return _Place(tensor.region, tensor.offset, tensor.nbytes)


class AllocatedMemory(FilledMemory):
    """See `Memory`; for one fetch. It is never published.

    `names`: a tensor's name or a glob over names (`layers.0.*`), or several; None: all tensors.
    `device`: where the tensors are in the end. Bytes arrive, and are verified, there, if it is a
    CUDA device and there is cupy; else in host memory, from which they are moved.

    Raises StateError (names that are none, no torch, a device that cannot be used).
    """

    def __init__(self, names: str | Sequence[str] | None = None, device: object = "cpu") -> None:
        self.patterns = patterns(names)
        self._torch = _import_torch()
        self._device = self._usable(device)
        is_cuda = self._device.type == "cuda" and fault_here() is None
        self._gpu: Device | None = cuda_device(self._device.index) if is_cuda else None
        self._chosen: tuple[TensorSpec, ...] = ()
        self._bytes: dict[_Place, torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"<AllocatedMemory of {len(self._chosen)} tensors on {self._device}>"

    def _usable(self, device: object) -> torch.device:
        try:
            made: torch.device = self._torch.empty(1, dtype=self._torch.uint8, device=device).device
        except Exception as error:  # each backend has its own way of saying no
            raise InvalidValue(
                f"device={shown(device)} cannot be used: {_first_line(error)}"
            ) from error
        if made.type == "meta":
            raise InvalidValue(
                "device='meta': there are no bytes there; take 'cpu' or an accelerator"
            )
        return made

    def map(self, manifest: Manifest) -> MappedRegions:
        """Allocate the wanted tensors of this manifest, anew each time.

        Raises ManifestMismatch (a name that no tensor has, a dtype that this torch lacks),
        StateError (no memory).
        """
        self._chosen = tuple(choose(self.patterns, manifest))
        for tensor in self._chosen:
            self._check_supported(tensor)
        places = {_place(tensor) for tensor in self._chosen}
        nbytes = sum(place.nbytes for place in places)
        try:
            self._bytes = {place: self._allocate(place.nbytes) for place in places}
            # torch gives memory out again before it is quiet, in the order of this stream
            if self._gpu is not None:
                self._gpu.stream_sync().wait()
        except (RuntimeError, MemoryError) as error:
            text = (
                f"{nbytes} bytes of {'host memory' if self._gpu is None else self._gpu.name} "
                f"cannot be allocated "
                f"({_first_line(error)}): free some, or fetch fewer names"
            )
            raise StateError(text, retryable=self._gpu is not None) from error

        def find(tensors: Sequence[TensorSpec]) -> list[Bytes]:
            its = self._bytes.get(_place(tensors[0]))
            return [] if its is None else [self._view(its)]

        then = None if self._device.type == "cpu" or self._gpu is not None else self._move
        return replace(mapped(manifest, find), then=then)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        device = None if self._gpu is None else self._device
        made: torch.Tensor = self._torch.empty(nbytes, dtype=self._torch.uint8, device=device)
        return made

    def _view(self, tensor: torch.Tensor) -> Bytes:
        if self._gpu is None or not tensor.numel():
            return view(tensor)
        return DeviceBytes(self._gpu, tensor.data_ptr(), tensor.numel(), tensor.untyped_storage())

    def _check_supported(self, tensor: TensorSpec) -> None:
        if not isinstance(getattr(self._torch, tensor.dtype, None), self._torch.dtype):
            text = (
                f"tensor {tensor.name!r} is {tensor.dtype}, which torch "
                f"{self._torch.__version__} lacks"
            )
            raise ManifestMismatch(text, differences=(text,))

    def _move(self) -> None:
        """Bring what has arrived to the device."""
        try:
            for place, data in self._bytes.items():
                self._bytes[place] = data.to(self._device)
            if self._device.type == "cuda":
                self._torch.cuda.synchronize(self._device)
        except (RuntimeError, MemoryError) as error:
            raise StateError(
                f"the tensors cannot be brought to {self._device}: {_first_line(error)}"
            ) from error

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that were mapped last, by name, in the order of the manifest."""
        with warnings.catch_warnings():
            # Warnings about experimental or deprecated dtypes: the publisher has seen them.
            warnings.simplefilter("ignore", UserWarning)
            return {tensor.name: self._tensor(tensor) for tensor in self._chosen}

    def _tensor(self, tensor: TensorSpec) -> torch.Tensor:
        storage = self._bytes[_place(tensor)].untyped_storage()
        strides = self._torch.empty(tensor.shape, device="meta").stride()
        made: torch.Tensor = self._empty(tensor).set_(storage, 0, tensor.shape, strides)
        return made

    def _empty(self, tensor: TensorSpec) -> Any:
        """A tensor without elements, but with all else."""
        dtype = getattr(self._torch, tensor.dtype)
        if tensor.quantization is None:
            return self._torch.empty(0, dtype=dtype, device=self._device)
        return self._torch.quantize_per_tensor(
            self._torch.empty(0, device=self._device), *tensor.quantization, dtype
        )


def patterns(names: object) -> tuple[str, ...] | None:
    """What `choose` takes. StateError for what names nothing."""
    if names is None:
        return None
    found = (
        (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Iterable) else ()
    )
    if not found or not all(isinstance(pattern, str) for pattern in found):
        raise InvalidType(
            f"names={shown(names)}: give a name, a glob, several of them, or None for all tensors"
        )
    return found


def _import_torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise StateError(
            f"fetch makes torch tensors, and torch is not installed: {install('torch')}"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
