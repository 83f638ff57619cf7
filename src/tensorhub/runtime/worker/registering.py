"""What callers do with a worker: they register memory, fetch into memory, and close.

`Hub` stands on `CallersWorker`. Not responsible for how a handle is run, nor for connections:
`runtime.worker.worker` does that, and a simulated worker in a simulation. Lives in the worker
runtime's loop.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import anyio

from tensorhub.compaction.layout import pack_tiny
from tensorhub.errors import CoordinatorUnavailable, StateError, TensorHubError, VersionUnavailable
from tensorhub.layouts.arrangement import Coordinates
from tensorhub.layouts.identity import ALONE, layout_id_of
from tensorhub.layouts.joining import coordinates_of
from tensorhub.layouts.pieces import Declaration
from tensorhub.layouts.preview import Known
from tensorhub.layouts.published import Published
from tensorhub.layouts.views import without_shape
from tensorhub.memory.regions import FilledMemory, Memory
from tensorhub.model.manifest import Manifest, TensorDescription, build_manifest, id_of
from tensorhub.runtime.data.channels import own_deltas
from tensorhub.runtime.ending import Parting
from tensorhub.runtime.worker.archived_copies import ArchivedCopies
from tensorhub.runtime.worker.calling import CallersHandle, ProgressListener
from tensorhub.runtime.worker.coordinator_client import CoordinatorClient
from tensorhub.runtime.worker.pins import Pins
from tensorhub.runtime.worker.ports import ArchiveSettings, CallersArchiver, CallersCopies
from tensorhub.runtime.worker.prefetcher import Prefetcher
from tensorhub.runtime.worker.version_watches import VersionWatches
from tensorhub.types import (
    READ_ONLY,
    FetchReport,
    HandleState,
    Incarnation,
    OpKind,
    Options,
    Selector,
    VersionInfo,
    as_timeout_s,
)
from tensorhub.worker.calls import FillCall
from tensorhub.worker.registration_session import Shard
from tensorhub.worker.router import Router


@dataclass(frozen=True, slots=True)
class Described:
    """Memory as it would be published. `coordinates`: None where the manifest says it all, or
    shapes are not known.
    """

    manifest: Manifest
    declared: Declaration
    coordinates: Coordinates | None = None


def coordinates_known(manifest: Manifest, declared: Declaration) -> Coordinates | None:
    """What these tensors hold, if each view says how large its tensor is. RegistrationError: views
    do not fit.
    """
    unknown = without_shape(declared.sources)
    known = replace(
        manifest, tensors=tuple([each for each in manifest.tensors if each.name not in unknown])
    )
    sources = {name: entry for name, entry in declared.sources.items() if name not in unknown}
    found = coordinates_of(known, replace(declared, sources=sources))
    return None if unknown else found


class CallersWorker(ABC):
    """One worker of one cluster."""

    name: str
    incarnation: Incarnation
    options: Options
    read_only = False  # its token is, as far as the coordinator has said
    prefetches: bool  # each new version, for the handles that follow their model
    version_watches: VersionWatches
    coordinator: CoordinatorClient
    pins: Pins
    copies: CallersCopies
    archived: ArchivedCopies
    router: Router[Any]  # of its handles, of any kind

    @abstractmethod
    def start_handle(self, shard: Shard, memory: Memory) -> CallersHandle:
        """Take memory into use, and tell the coordinator of it."""

    @abstractmethod
    def drop_handle(self, handle: CallersHandle) -> None:
        """Give up a registration that its caller has not got, or that has served. Its place is free
        at once.
        """

    async def archive(self, settings: ArchiveSettings) -> CallersArchiver:
        """Begin to archive a model. Raises as `Archiver.begin`."""
        raise StateError("this worker has no archives")

    @abstractmethod
    def new_registration(self) -> str:
        """An id that no registration ever had."""

    @abstractmethod
    def fresh_group(self) -> str:
        """A name that no group ever had."""

    @property
    def lease_s(self) -> float:
        """The coordinator's, once it has welcomed this worker."""
        return self.options.lease_s

    def timeout_s(self, timeout: float | None) -> float:
        """The seconds that a call has: those given, or the default. Raises StateError."""
        return as_timeout_s(timeout, self.options.op_timeout_s)

    async def register(
        self,
        model: str,
        memory: Memory,
        described: Described,
        *,
        group: str | None,
        rank: int,
        world_size: int,
        spot: bool,
        timeout_s: float,
    ) -> CallersHandle:
        """Take memory into use, in place, and tell the coordinator of it."""
        group = group if group is not None else self.fresh_group()
        before = self.router.rank_at(model, group, rank)
        if before is not None and before.member.state is HandleState.CLOSED:
            # its caller has heard so, though its memory is still being given back
            self.router.leave(before.member.shard)
        self.router.check_free(model, group, rank)
        shard = Shard(
            self.new_registration(),
            model,
            group,
            rank,
            world_size,
            spot,
            described.manifest.layout_id,
            described.manifest,
            rank,
            declared=described.declared,
            coordinates=described.coordinates,
        )
        handle = self.start_handle(shard, memory)
        try:
            with anyio.move_on_after(timeout_s):
                await handle.registered.wait()
            if not handle.registered.is_set():
                raise CoordinatorUnavailable(
                    f"register {model!r}: the coordinator did not answer within {timeout_s:g} s"
                )
            if handle.registration_error is not None:
                raise handle.registration_error
        except BaseException:
            self.drop_handle(handle)
            raise
        if self.prefetches:
            handle.follow(
                Prefetcher(handle, self.version_watches, self.copies, self.options.op_timeout_s).run
            )
        return handle

    async def known(self, model: str, selector: Selector, timeout_s: float) -> Known:
        """What there is to plan with."""
        deadline = anyio.current_time() + timeout_s
        reply = await self.coordinator.publication(model, selector, timeout_s)
        published, parts = await self.parts_of(reply.publication, deadline)
        left_s = max(0.0, deadline - anyio.current_time())
        (info,) = await self.coordinator.describe(model, left_s, version=reply.version.version)
        use = own_deltas(self.options)
        return Known(reply.version, reply.layout_id, published, parts, info, use)

    async def parts_of(
        self, publication: bytes, deadline: float
    ) -> tuple[Published, dict[str, bytes]]:
        """What a publication is made of."""
        published, parts = Published.decode(publication), dict[str, bytes]()
        for part_id in published.part_ids:
            parts[part_id] = await self.coordinator.part(
                part_id, max(0.0, deadline - anyio.current_time())
            )
        return published, parts

    def describe_reader(
        self, descriptions: Iterable[TensorDescription], declared: Declaration
    ) -> Manifest:
        """As if this worker had registered these tensors, to fill them."""
        plain = build_manifest(
            descriptions, self.options.chunk_bytes, "none", f"world/{declared.world_size}"
        )
        manifest = pack_tiny(plain, self.options.pack_bytes)
        return replace(manifest, layout_id=layout_id_of(manifest, declared))

    def describe_memory(self, memory: Memory, declared: Declaration) -> Described:
        """As this worker would publish it. Any thread may ask: of very many tensors it takes
        seconds. RegistrationError, StateError: it cannot be published.
        """
        digest = self.options.digest if self.options.integrity else "none"
        if memory.device is not None and digest not in ("xxh3-64", "none"):
            raise StateError(
                f"Options.digest = {digest!r} is made by the CPU, and these tensors are on "
                f"{memory.device.name}: "
                "register host tensors, or use 'xxh3-64'"
            )
        plain = f"world/{declared.world_size}"
        manifest = build_manifest(
            memory.descriptions, self.options.chunk_bytes, digest, plain, metadata=memory.metadata
        )
        # files are read in place
        manifest = pack_tiny(manifest, 0 if memory.digests_first else self.options.pack_bytes)
        layout_id = layout_id_of(manifest, declared)
        if layout_id == plain:
            return Described(manifest, declared)
        manifest = replace(manifest, layout_id=layout_id)
        return Described(manifest, declared, coordinates_known(manifest, declared))

    async def fetch(
        self,
        model: str,
        selector: Selector,
        memory: Memory,
        *,
        rank: int | None,
        timeout_s: float,
        progress: ProgressListener | None,
    ) -> tuple[VersionInfo, FetchReport]:
        """Fill memory that serves no reader, and is the caller's when this returns: a group of its
        own, for one call. `rank` None: with the whole model from all ranks, or with the tensors
        that a `FilledMemory` takes.
        """
        self.version_watches.report_loss(model)
        apart = READ_ONLY if self.read_only else ""
        group, registration = apart + self.fresh_group(), apart + self.new_registration()
        if rank is None and await self._is_in_one_piece(model, timeout_s):
            rank = 0
        shard = Shard(registration, model, group, 0, 1, True, "", None, rank or 0)
        if rank is None:
            names = memory.patterns if isinstance(memory, FilledMemory) else None
            layout_id = f"own/{id_of(repr(('fetch', names)).encode(errors='surrogatepass'))}"
            declared = Declaration(partial=names is not None)
            shard = replace(shard, layout_id=layout_id, declared=declared, names=names)
        handle = self.start_handle(shard, memory)
        handle.show_progress(progress)
        try:
            found = await handle.fetch(FillCall(OpKind.FETCH, selector), timeout_s)
            self.version_watches.heard_of(model)
            return found
        except TensorHubError as error:
            error.memory = "intact"  # the torn memory is discarded
            raise
        finally:
            self.drop_handle(handle)

    async def _is_in_one_piece(self, model: str, timeout_s: float) -> bool:
        """Whether a rank has all of the model's publication, as it was published: then its own
        chunks are read. (The one rank of another layout may have fused tensors, which are no
        tensors of the whole model.)
        """
        try:
            (info,) = await self.coordinator.describe(model, timeout_s, workers_max=1)
        except VersionUnavailable:
            return False
        return bool(info.versions) and all(version.layout_id == ALONE for version in info.versions)

    async def close_handles(self, handles: Iterable[CallersHandle], parting: Parting) -> None:
        """End their calls and close them, whatever is lost with them."""
        async with anyio.create_task_group() as tasks:
            for handle in list(handles):
                tasks.start_soon(self._close_quietly, handle, parting)

    @staticmethod
    async def _close_quietly(handle: CallersHandle, parting: Parting) -> None:
        await handle.end_call(StateError(f"{parting.reason} while the call was running"))
        with contextlib.suppress(TensorHubError):
            await handle.close(
                parting.within_s / 5 if parting.hand_over else parting.within_s / 2, abandon=True
            )
