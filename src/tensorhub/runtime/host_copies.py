"""A worker's copies in host memory: prefetched ones beside its handles, retention copies that the coordinator orders, seeds.

Each is a handle of its own, with a registration of its own. Responsible for making and ending them, and for the one budget
that they share (`worker.budget`). Not responsible for what they hold or who reads it: each copy's `Member` is, and the
coordinator, to which they are ordinary holders.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import anyio
import anyio.abc

from tensorhub.errors import (
    CoordinatorUnavailable,
    OperationTimeout,
    RetentionError,
    StateError,
    TensorHubError,
    VersionUnavailable,
)
from tensorhub.manifest import Manifest
from tensorhub.memory.host import HostMemory
from tensorhub.memory.tensors import Memory
from tensorhub.messages import CopyRefused, DropCopy, FromWorker, MakeCopy
from tensorhub.runtime import clock, ports
from tensorhub.runtime.handle import Handle
from tensorhub.runtime.logs import get_logger
from tensorhub.runtime.places import pinning
from tensorhub.runtime.questions import Questions
from tensorhub.types import (
    LATEST,
    FetchReport,
    HandleState,
    Medium,
    OpKind,
    Options,
    Purpose,
    Selector,
    VersionInfo,
    host_group,
)
from tensorhub.worker.budget import Budget
from tensorhub.worker.calls import CopyCall, FillCall, LocalCopy
from tensorhub.worker.enrolment import Shard

log = get_logger("tensorhub.worker")


class Desk(Protocol):
    """What the copies need of their worker."""

    options: Options
    questions: Questions

    def say(self, message: FromWorker) -> None: ...

    def is_spot(self) -> bool:
        """Whether any of its registrations is: then this process may go at any time."""

    def callers(self) -> Iterable[Handle]:
        """The handles of its callers that are not closed."""

    def start_handle(self, shard: Shard, memory: Memory) -> Handle: ...

    def drop_handle(self, handle: Handle) -> None: ...


@dataclass(slots=True)
class _Copy:
    """One host copy and its handle."""

    ident: str  # its registration
    shard: Shard
    handle: Handle
    memory: HostMemory
    fills: int = 0  # that were begun
    filling: bool = False
    ends: bool = False  # whoever closes its handle closes it, too
    lock: anyio.Lock = field(default_factory=anyio.Lock)  # of its release: no fill begins in the midst of it


@dataclass(slots=True)
class _Making:
    """A retention copy that is being made."""

    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)


class HostCopies:
    """`tasks`: the worker's, while it runs. `start_handle` of the worker makes handles with these copies as their room."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.budget = Budget(desk.options.host_memory_bytes)
        self.tasks: anyio.abc.TaskGroup | None = None
        self._prefetched: dict[str, _Copy] = {}  # by the registration of the handle that they are for
        self._ordered: dict[str, _Making] = {}  # retention copies that are being made, by id
        self._copies: dict[str, _Copy] = {}  # all of them, by their own registration
        self._closing: set[str] = set()  # registrations of handles that their callers are closing
        self._has_closed = False  # a caller has closed one
        self._room_made = anyio.Lock()  # one after the other: who makes room takes it

    def __repr__(self) -> str:
        return f"<HostCopies: {len(self._copies)}, {self.budget!r}>"

    # ---------------------------------------------------------------------------------------------- room, see HostRoom

    async def make_room(self, ident: str, purpose: Purpose, nbytes: int) -> None:
        """Reserve so many bytes for a copy, once those that it outranks are gone. StateError: there is no room for it."""
        async with self._room_made:
            for other in self.budget.plan(ident, purpose, nbytes):
                copy = self._copies.get(other)
                if copy is not None:
                    log.info("copy_evicted", registration=other, purpose=purpose.value)
                    await self._end(copy)
            self.budget.reserve(ident, purpose, nbytes)

    async def _end(self, copy: _Copy) -> None:
        await copy.handle.end_call(StateError("its host memory is needed for something that comes first", retryable=True))
        if self.budget.reservation(copy.ident) is not None:  # else a fill may have its lock, and wait for this room
            await self._release(copy)

    def freed(self, ident: str) -> None:
        self.budget.free(ident)
        copy = self._copies.get(ident)
        is_ordered = copy is not None and copy.shard.purpose is Purpose.RETENTION and ident not in self._ordered
        if is_ordered and copy is not None and copy.handle.member.state is not HandleState.CLOSED:
            self._drop(copy)  # it was ordered out

    def end_prefetch(self, registration: str) -> None:
        copy = self._prefetched.get(registration)
        if copy is not None:
            copy.handle.end_prefetch()

    def free_prefetch(self, registration: str) -> None:
        copy = self._prefetched.get(registration)
        if copy is not None and self.tasks is not None and self.budget.reservation(copy.ident) is not None:
            self.tasks.start_soon(self._release_quietly, copy, copy.fills)

    async def _release_quietly(self, copy: _Copy, fills: int) -> None:
        """`fills`: what was begun later is for another version, and goes on."""
        try:
            if copy.fills == fills:
                await copy.handle.end_call(StateError("an update has taken what was prefetched", retryable=True))
            async with copy.lock:
                if copy.fills == fills:
                    await self._give_back(copy)
        except RetentionError as error:
            log.info("copy_must_stay", registration=copy.ident, reason=str(error))
        except TensorHubError as error:
            log.warning("copy_not_released", registration=copy.ident, reason=str(error))

    async def _release(self, copy: _Copy) -> None:
        """Give the memory of a copy back, once its readers are moved or fenced."""
        async with copy.lock:
            await self._give_back(copy)

    async def _give_back(self, copy: _Copy) -> None:
        if self.budget.reservation(copy.ident) is not None and copy.handle.member.state is not HandleState.CLOSED:
            await copy.handle.release(self._desk.options.op_timeout_s)

    # ------------------------------------------------------------------------------------------------------- making

    def _start(self, shard: Shard) -> _Copy:
        ident = shard.registration
        devices = [handle.memory.device for handle in self._desk.callers() if handle.memory.device is not None]
        memory = HostMemory(partial(self._reserve, ident, shard.purpose), pinning(devices[0] if devices else None))
        copy = _Copy(ident, shard, self._desk.start_handle(shard, memory), memory)
        self._copies[ident] = copy
        return copy

    def _reserve(self, ident: str, purpose: Purpose, nbytes: int) -> None:
        """Memory of another size than was reserved for it is about to be taken: versions may differ."""
        self.budget.reserve(ident, purpose, nbytes)

    async def _registered(self, copy: _Copy, timeout_s: float) -> None:
        try:
            with anyio.move_on_after(timeout_s):
                await copy.handle.registered.wait()
            if not copy.handle.registered.is_set():
                text = f"{copy.shard.title}: the coordinator did not answer within {timeout_s:g} s"
                raise CoordinatorUnavailable(text)
            if copy.handle.registration_error is not None:
                raise copy.handle.registration_error
        except BaseException:
            self._drop(copy)
            raise

    def _drop(self, copy: _Copy) -> None:
        self._copies.pop(copy.ident, None)
        self._desk.drop_handle(copy.handle)

    def ended(self, registration: str) -> None:
        """A handle is no more: what was made for it ends too."""
        self._copies.pop(registration, None)
        copy = self._prefetched.pop(registration, None)
        if copy is not None and not copy.ends:
            self._drop(copy)

    # ----------------------------------------------------------------------------------------------------- prefetching

    async def prefetch(self, handle: ports.Handle, selector: Selector, timeout_s: float) -> FetchReport:
        """Fill this handle's host copy with a version, in place of what it held."""
        shard = handle.member.shard
        manifest = shard.manifest
        assert manifest is not None
        if handle.member.state is HandleState.CLOSED:
            raise StateError(f"{shard.title} is closed; register again")
        handle.member.tell_loss()
        copy = self._prefetched.get(shard.registration)
        if copy is None:
            if shard.world_size == 1:  # nobody else has to hear of it: before anything is said
                self._check_possible(manifest.nbytes)
            copy = self._prefetched[shard.registration] = self._start(
                replace(
                    shard,
                    registration=secrets.token_hex(12),
                    group=host_group(shard.group),
                    medium=Medium.HOST,
                    purpose=Purpose.PREFETCH,
                )
            )
            try:
                await self._registered(copy, timeout_s)
            except BaseException:
                self._prefetched.pop(shard.registration, None)
                raise
        return await self._refill(copy, selector, manifest.nbytes, timeout_s)

    def _check_possible(self, nbytes: int) -> None:
        """Raise StateError if there is no room for so many bytes to be prefetched."""
        if not self.budget.bytes_max:
            raise StateError("prefetch() needs host memory: set Options.host_memory_bytes")
        self.budget.plan("", Purpose.PREFETCH, nbytes)

    async def _refill(self, copy: _Copy, selector: Selector, nbytes: int, timeout_s: float) -> FetchReport:
        if copy.filling:
            text = f"{copy.shard.title}: a prefetch is still running on this handle; one prefetch at a time"
            raise StateError(text, retryable=True)
        copy.filling, until = True, clock.now() + timeout_s
        try:
            await self._take(copy, nbytes, timeout_s)
            try:
                copy.fills += 1
                return await copy.handle.fill(FillCall(OpKind.PREFETCH, selector), max(0.0, until - clock.now()))
            finally:
                copy.lock.release()
        except TensorHubError as error:
            error.memory = "intact"  # what was torn is not the caller's
            raise
        finally:
            copy.filling = False
            if not copy.memory.nbytes:  # nothing of it was begun, or the handle itself holds that version
                self.budget.free(copy.ident)

    async def _take(self, copy: _Copy, nbytes: int, timeout_s: float) -> None:
        """Have the copy's lock, and room for it. Both may have to wait for readers of what is being given back."""
        with anyio.move_on_after(timeout_s):
            await copy.lock.acquire()
            try:
                if self.budget.reservation(copy.ident) is None:
                    await self._take_room(copy, nbytes, timeout_s)
            except BaseException:
                copy.lock.release()
                raise
            return
        text = f"{copy.shard.title}: no host memory within {timeout_s:g} s: what it held before, or what has to make room, "
        raise OperationTimeout(f"{text}is still being read; try again")

    async def _take_room(self, copy: _Copy, nbytes: int, timeout_s: float) -> None:
        """Where there is none, the other ranks' calls end, too: they would wait for this one until their deadlines."""
        try:
            if copy.shard.purpose is Purpose.PREFETCH:
                self._check_possible(nbytes)
            await self.make_room(copy.ident, copy.shard.purpose, nbytes)
        except TensorHubError as error:
            if copy.shard.world_size > 1:
                with contextlib.suppress(TensorHubError):
                    await copy.handle.refuse(error, timeout_s)
            raise

    async def close(self, handle: ports.Handle, timeout_s: float, *, abandon: bool) -> None:
        """Close a handle with the host copies that end with it: what was prefetched for it, and with a caller's last handle
        what this worker retains, as its process may end then (R5). They are set aside first, each with its own leave, so
        that an error leaves all of it as it was.
        """
        until, registration, ending = clock.now() + timeout_s, handle.member.shard.registration, list[_Copy]()
        self._closing.add(registration)
        try:
            async with contextlib.AsyncExitStack() as aside:
                ending += await self._ending_with(handle, abandon=abandon)
                for copy in ending:
                    copy.ends = True
                    await copy.handle.end_call(StateError("its handle was closed"))
                    if not abandon:
                        await aside.enter_async_context(self._aside(copy, handle, until))
                await handle.close(max(0.0, until - clock.now()), abandon=abandon)
            for copy in ending:
                await copy.handle.close(timeout_s, abandon=True)
        finally:
            self._closing.discard(registration)
            is_closed = handle.member.state is HandleState.CLOSED
            if is_closed:
                self._has_closed = True
                self._prefetched.pop(registration, None)
            for copy in ending:
                copy.ends = False
                if is_closed and copy.ident in self._copies:
                    self._drop(copy)

    async def _ending_with(self, handle: ports.Handle, *, abandon: bool) -> list[_Copy]:
        prefetched = self._prefetched.get(handle.member.shard.registration)
        ending = [prefetched] if prefetched is not None else []
        if self._ends and not abandon and not self._desk.is_spot():
            for making in list(self._ordered.values()):
                making.scope.cancel()  # somebody else is asked for it
                await making.ended.wait()
            ending += [copy for copy in self._copies.values() if copy.shard.purpose is Purpose.RETENTION]
        return ending

    @property
    def _ends(self) -> bool:
        """Whether a caller has closed a handle, or is about to, and none is left: this process may end at any time."""
        callers = (handle.member.shard.registration for handle in self._desk.callers())
        return (self._has_closed or bool(self._closing)) and self._closing.issuperset(callers)

    @contextlib.asynccontextmanager
    async def _aside(self, copy: _Copy, handle: ports.Handle, until: float) -> AsyncIterator[None]:
        """Nobody counts on this copy in the block. It holds again what it held, unless `handle` is closed then."""
        async with copy.lock:
            try:
                if copy.handle.member.state is not HandleState.CLOSED:
                    await copy.handle.set_aside(max(0.0, until - clock.now()))
                yield
            finally:
                if handle.member.state is not HandleState.CLOSED:
                    with anyio.CancelScope(shield=True), contextlib.suppress(TensorHubError):  # it may have ended meanwhile
                        await copy.handle.take_back(self._desk.options.op_timeout_s)

    # ------------------------------------------------------------------------------------------------- retention copies

    def ordered(self, order: MakeCopy, source: Handle | None) -> None:
        """The coordinator wants a copy. `source`: the handle that holds its content, if it named one."""
        if order.copy in self._copies or order.copy in self._ordered:
            return  # said again
        if self.tasks is None or self._ends:
            self._desk.say(CopyRefused(order.copy, "this worker closes"))
            return
        self._ordered[order.copy] = _Making()
        self.tasks.start_soon(self._make_ordered, order, source, self._ordered[order.copy])

    def dropped(self, order: DropCopy) -> None:
        """The coordinator needs it no more."""
        making = self._ordered.get(order.copy)
        copy = self._copies.get(order.copy)
        if making is not None:
            making.scope.cancel()
        elif copy is not None and self.tasks is not None and not copy.ends:  # set aside, it is said anew if it stays
            self.tasks.start_soon(self._end_ordered, copy)

    async def _end_ordered(self, copy: _Copy) -> None:
        try:
            await copy.handle.close(self._desk.options.op_timeout_s)
        except TensorHubError as error:
            log.warning("copy_not_ended", registration=copy.ident, reason=str(error))

    async def _make_ordered(self, order: MakeCopy, source: Handle | None, making: _Making) -> None:
        made, reason = False, "it was not needed any more, or this worker closes"
        try:
            with making.scope:
                await self._make(order, source)
                made = True
        except TensorHubError as error:
            reason = str(error)
        finally:
            self._ordered.pop(order.copy, None)
            making.ended.set()
            copy = self._copies.get(order.copy)
            if not made:
                if copy is not None:
                    self._drop(copy)
                log.warning("copy_refused", copy=order.copy, reason=reason)
                self._desk.say(CopyRefused(order.copy, reason[:1000]))
            elif copy is not None and copy.handle.member.content is None:
                self._drop(copy)  # it was ordered out while it was made

    async def _make(self, order: MakeCopy, source: Handle | None) -> None:
        info, timeout_s = order.version, self._desk.options.op_timeout_s
        held = source.member.content if source is not None else None
        if held is not None and held.version.content_id != info.content_id:
            held = None
        if order.registration and held is None:
            raise VersionUnavailable(f"version {info.version} is not held by {order.registration!r} any more")
        manifest = held.manifest if held is not None else await self._manifest(info, order.shard, timeout_s)
        if order.registration in self.budget.plan(order.copy, Purpose.RETENTION, manifest.nbytes):
            raise StateError("there is room for it in the place of its source only, which has to stay until it is made")
        await self.make_room(order.copy, Purpose.RETENTION, manifest.nbytes)
        copy = self._start(
            self._one_shard(
                order.copy, f"copy/{order.copy}", info, order.shard, manifest, Purpose.RETENTION, spot=self._desk.is_spot()
            )
        )
        await self._registered(copy, timeout_s)
        # The bytes of a file are only read by calls of the kernel, never copied in user space (see FileMemory).
        if held is not None and source is not None and not source.memory.digests_first:
            local = LocalCopy(source.member.shard.registration, held.generation)
            await copy.handle.copy(CopyCall(held.version, manifest, local), timeout_s)
        else:
            await copy.handle.fill(FillCall(OpKind.REPLICATE, info.version), timeout_s)
        content = copy.handle.member.content
        if content is not None and content.version.content_id != info.content_id:
            raise VersionUnavailable(f"version {info.version} of {info.model!r} is another one by now")

    async def _manifest(self, info: VersionInfo, shard: int, timeout_s: float) -> Manifest:
        return Manifest.decode(await self._desk.questions.manifest(info, shard, timeout_s))

    @staticmethod
    def _one_shard(
        registration: str, group: str, info: VersionInfo, shard: int, manifest: Manifest, purpose: Purpose, *, spot: bool
    ) -> Shard:
        """A copy of one shard is a group of its own, whatever the layout of its version."""
        return Shard(
            registration=registration,
            model=info.model,
            group=group,
            rank=0,
            world_size=1,
            spot=spot,
            layout_id=manifest.layout_id,
            manifest=manifest,
            number=shard,
            medium=Medium.HOST,
            purpose=purpose,
        )

    # ---------------------------------------------------------------------------------------------------------- seeds

    async def seed(self, info: VersionInfo, shard: int, timeout_s: float) -> FetchReport:
        """Have this worker's seed of that shard of the model hold its newest version; the first time, make the seed."""
        manifest = await self._manifest(info, shard, timeout_s)
        mine = [c for c in self._copies.values() if c.shard.purpose is Purpose.SEED]
        copy = next((c for c in mine if (c.shard.model, c.shard.number) == (info.model, shard)), None)
        if copy is None:
            self.budget.plan("", Purpose.SEED, manifest.nbytes)
            ident = secrets.token_hex(12)
            copy = self._start(self._one_shard(ident, f"seed/{ident}", info, shard, manifest, Purpose.SEED, spot=False))
            await self._registered(copy, timeout_s)
        return await self._refill(copy, LATEST, manifest.nbytes, timeout_s)
