"""Where the bytes of one handle's memory are, and the bytes of a staged update of it.

Responsible for mapping them, once per manifest. Also takes host memory and gives it back, in a
thread and within the budget. Not responsible for permission to read or write the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import anyio
import anyio.to_thread

from tensorhub.compaction.packing import Packed, PackedOnDevice
from tensorhub.cuda.device import Device, DeviceBytes
from tensorhub.errors import StateError, TensorHubError, text_of
from tensorhub.logs import get_logger
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.memory.host import HostMemory, Pin
from tensorhub.memory.on_demand import OnDemandMemory
from tensorhub.memory.regions import FilledMemory, MappedRegions, Memory, Pieces
from tensorhub.model.manifest import Manifest
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.runtime.threads import run_in_thread
from tensorhub.types import ContentId, Purpose, RegistrationId
from tensorhub.worker.calls import CopyLocally, StartPull, staging_of

log = get_logger("tensorhub.worker")


class HostRoom(Protocol):
    """What a handle needs of its worker's host copies. A copy is named by the registration that it
    belongs to, or staged.
    """

    async def make_room(self, ident: str, purpose: Purpose, nbytes: int) -> None:
        """Reserve host memory, once those that must make room for it are gone. StateError: there is
        none.
        """

    def freed(self, ident: str) -> None:
        """That memory was given back."""

    def end_prefetch(self, registration: str, *, frees: bool) -> None:
        """See `worker.calls.EndPrefetch`."""


@dataclass(slots=True)
class _Staging:
    """The memory that a staged update fills: open at the owner under a private id."""

    memory: HostMemory
    mapped: MappedRegions
    chunks: ChunkMemory


def with_packs(mapped: MappedRegions, manifest: Manifest) -> MappedRegions:
    """The regions, where each packed region has bytes of its own beside those of its tensors."""
    packs = {
        index: _pack(manifest.regions[index].nbytes, pieces)
        for index, pieces in mapped.scattered.items()
    }
    if not packs:
        return mapped
    regions = [
        packs[index].buffer if index in packs else region
        for index, region in enumerate(mapped.regions)
    ]
    return replace(mapped, regions=tuple(regions), scattered={}, packs=tuple(packs.values()))


def _pack(nbytes: int, pieces: Pieces) -> Packed | PackedOnDevice:
    """Where the tensors are. (Those of one registration are all in one memory, but for those
    without bytes.)
    """
    on_device = [(offset, piece) for offset, piece in pieces if isinstance(piece, DeviceBytes)]
    if on_device:
        return PackedOnDevice(on_device[0][1].device, nbytes, on_device)
    return Packed(
        nbytes, [(offset, piece) for offset, piece in pieces if isinstance(piece, memoryview)]
    )


def pinning(device: Device | None) -> Pin | None:
    """What page-locks host memory for that device, where it can be: else copies are slower, and
    that is all.
    """
    if device is None:
        return None

    def pin(view: memoryview) -> Callable[[], None]:
        try:
            return device.pin(view)
        except StateError as error:
            log.warning("memory_not_pinned", nbytes=view.nbytes, reason=str(error))
            return lambda: None

    return pin


class MappedMemory:
    """Of one handle."""

    def __init__(
        self, memory: Memory, registration: RegistrationId, owner: SharedOwner, room: HostRoom
    ) -> None:
        self._memory = memory
        self._registration = registration
        self._owner = owner
        self._room = room
        self._staging_id = RegistrationId(staging_of(registration))
        self._staging: _Staging | None = None
        # of the manifest with this grid
        self._mapped: tuple[str, MappedRegions, ChunkMemory] | None = None

    def __repr__(self) -> str:
        return (
            f"<MappedMemory of "
            f"{self._memory!r}{' and what is staged' if self._staging is not None else ''}>"
        )

    async def prepare(self, manifest: Manifest) -> ChunkMemory:
        """Find the manifest's chunks, which are about to be opened. TensorHubError: there is no
        memory for them.
        """
        if isinstance(self._memory, HostMemory) and not self._is_mapped(manifest):  # it is made now
            await self._unmap()
        return self._map_safely(manifest)[1]

    def map_to_publish(self, manifest: Manifest) -> None:
        """Take the memory that a publish needs beside the tensors, before the coordinator hears of
        it. TensorHubError: there is none.
        """
        self._map_safely(manifest)

    def _map(self, manifest: Manifest) -> tuple[MappedRegions, ChunkMemory]:
        """Where the manifest's regions and chunks are; kept, because the next version most likely
        has the same manifest.
        """
        if self._mapped is None or not self._is_mapped(manifest):
            mapped = with_packs(self._memory.map(manifest), manifest)
            self._mapped = (
                manifest.grid_id,
                mapped,
                ChunkMemory(manifest, mapped.regions, mapped.unwanted, mapped.left_out),
            )
        return self._mapped[1:]

    async def pack(self, manifest: Manifest) -> None:
        """Copy the tiny tensors' bytes to where readers find them; the memory is fenced, and is
        about to be published.
        """
        mapped = self._map(manifest)[0]
        if mapped.packs:
            await anyio.to_thread.run_sync(mapped.pack)

    def _is_mapped(self, manifest: Manifest) -> bool:
        return self._mapped is not None and self._mapped[0] == manifest.grid_id

    def _map_safely(self, manifest: Manifest) -> tuple[MappedRegions, ChunkMemory]:
        """As `_map`; what goes wrong there costs this call, and no other handle anything."""
        try:
            return self._map(manifest)
        except TensorHubError:
            raise
        except Exception as error:
            log.exception("memory_not_mapped", registration=self._registration)
            raise StateError(
                f"{self._memory!r} cannot hold this version: {text_of(error)}"
            ) from error

    async def _unmap(self) -> None:
        """Let go of the former mapping: host memory is back in the system before more is taken."""
        if self._mapped is not None:
            self._owner.release(self._mapped[2])
            self._mapped = None
        if isinstance(self._memory, HostMemory | OnDemandMemory):
            self._owner.forget(self._registration)
            await run_in_thread(self._memory.free)

    async def free(self) -> None:
        await self._unmap()
        self._room.freed(self._registration)

    async def free_staging(self) -> None:
        if self._staging is not None:
            # only this handle's own copying, which has ended, reads it
            await self._owner.fence_async(self._staging_id)
            self._owner.forget(self._staging_id)
            memory, self._staging = self._staging.memory, None
            await run_in_thread(memory.free)
        self._room.freed(self._staging_id)

    async def destination(
        self, action: StartPull | CopyLocally
    ) -> tuple[RegistrationId, MappedRegions, ChunkMemory]:
        """Where the chunks go, and under which id the owner knows it: the memory itself, or that of
        the staged update.
        """
        if not action.staged:
            if self._is_mapped(action.manifest) or not isinstance(self._memory, FilledMemory):
                return self._registration, *self._map_safely(action.manifest)
            # In a thread, for memory that is made only now: a file of its size.
            mapped, chunks = await anyio.to_thread.run_sync(self._map_safely, action.manifest)
            return self._registration, mapped, chunks
        if self._staging is None:
            await self._stage(action)
        staging = self._staging
        assert staging is not None
        return self._staging_id, staging.mapped, staging.chunks

    async def _stage(self, action: StartPull | CopyLocally) -> None:
        manifest = action.manifest
        memory = HostMemory(pin=pinning(self._memory.device))
        mapped = await anyio.to_thread.run_sync(memory.map, manifest)
        chunks = ChunkMemory(manifest, mapped.regions)
        self._staging = _Staging(memory, mapped, chunks)
        content_id = ContentId(action.version.content_id)
        self._owner.open(self._staging_id, action.generation, content_id, chunks, complete=False)
