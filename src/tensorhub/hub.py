"""The public async API: `serve`, `connect`, the hub and its handles. A bridge to the library's own thread, no logic.

Every call may be made from asyncio or trio, and from several tasks; one call at a time runs on one handle. A call without
a timeout gets `Options.op_timeout_s`. Errors: see `tensorhub.errors`; each says in `memory` what the caller's tensors are.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Self, TypeVar, overload

from tensorhub.errors import StateError, TensorHubError, text_of
from tensorhub.fetched import Fetched
from tensorhub.protocol.secret import check_open_access, resolve_token
from tensorhub.runtime.handle import Handle, ProgressListener
from tensorhub.runtime.loop_thread import AsyncSide, LoopThread, Side, Waiter
from tensorhub.runtime.server import CoordinatorServer
from tensorhub.runtime.store import MemoryStore, SqliteStore, Store
from tensorhub.runtime.worker import Worker
from tensorhub.transport.allocated import AllocatedMemory
from tensorhub.transport.memory import Memory, RegisteredMemory
from tensorhub.types import (
    LATEST,
    VERSION_MAX,
    FetchReport,
    HandleState,
    Location,
    ModelInfo,
    OpKind,
    Options,
    Selector,
    VersionInfo,
    as_seconds,
    check_name,
    check_selector,
)
from tensorhub.worker.calls import FillCall

T = TypeVar("T")
BeforeWrite = Callable[[VersionInfo], Awaitable[None]]


def refuse_unbuilt(**settings: object) -> None:
    for name, value in settings.items():
        if value not in (None, False):
            raise NotImplementedError(f"{name}={value!r} is not built yet: leave it out")


# ------------------------------------------------------------------------------------------------------ coordinator


class Coordinator:
    """A coordinator embedded in this process, on a thread and loop of its own."""

    def __init__(self, server: CoordinatorServer) -> None:
        self._server = server

    @property
    def address(self) -> str:
        """What `connect` takes: "tcp://host:port"."""
        return self._server.address

    def __repr__(self) -> str:
        return f"<Coordinator at {self.address}>"


def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    token: str | bytes | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    ha: object = None,
    tls: object = None,
    options: Options | None = None,
) -> contextlib.AbstractAsyncContextManager[Coordinator]:
    """Run a coordinator for the length of the block.

    `port` 0 takes a free one. `token`: the cluster's secret; None takes TENSORHUB_TOKEN, then a token file, else access is
    open, which only loopback allows. `state_dir`: where versions' marks are kept (SQLite, synced); without one, a
    coordinator that restarts is a new cluster.

    Raises StateError (port in use, state_dir in use or unusable), AuthenticationFailed (open access beyond loopback).
    """
    refuse_unbuilt(ha=ha, tls=tls)
    return serve_on(AsyncSide(), host, port, token, state_dir, options or Options())


@contextlib.asynccontextmanager
async def serve_on(
    side: Side,
    host: str,
    port: int,
    token: str | bytes | None,
    state_dir: str | os.PathLike[str] | None,
    options: Options,
) -> AsyncIterator[Coordinator]:
    """What `serve` is, for either kind of caller."""
    secret = resolve_token(token)
    check_open_access(secret, host)
    store: Store = MemoryStore() if state_dir is None else SqliteStore(state_dir)
    try:
        server: list[CoordinatorServer] = []

        async def main(thread: LoopThread) -> None:
            server.append(CoordinatorServer(options=options, secrets_accepted=(secret,), store=store))
            await server[0].run(host, port, thread.ready)

        async with LoopThread("tensorhub-coordinator", main, side):
            yield Coordinator(server[0])
    finally:
        store.close()


# -------------------------------------------------------------------------------------------------------------- hub


def connect(
    address: str | Sequence[str],
    *,
    name: str | None = None,
    location: Location | None = None,
    token: str | bytes | None = None,
    transports: Sequence[str] | None = None,
    tls: object = None,
    prefetch: bool = False,
    options: Options | None = None,
) -> contextlib.AbstractAsyncContextManager[Hub]:
    """Join a cluster as a worker for the length of the block; leaving closes every handle.

    `address`: a coordinator's "tcp://host:port", or several. `name`: for people; default: host and process id. `transports`:
    names in order of preference, and only these.

    Raises CoordinatorUnavailable, AuthenticationFailed (another secret), ProtocolError (not a TensorHub coordinator, or of
    another version), TransportUnavailable, StateError (an address that is none).
    """
    refuse_unbuilt(tls=tls, prefetch=prefetch)
    return connect_on(AsyncSide(), address, name, location or Location(), token, transports, options or Options())


@contextlib.asynccontextmanager
async def connect_on(
    side: Side,
    address: str | Sequence[str],
    name: str | None,
    location: Location,
    token: str | bytes | None,
    transports: Sequence[str] | None,
    options: Options,
) -> AsyncIterator[Hub]:
    """What `connect` is, for either kind of caller."""
    for part, place in (("site", location.site), ("rack", location.rack), ("host", location.host)):
        if place != "":
            check_name(part, place)
    called = check_name("worker", name) if name is not None else f"{location.host}-{os.getpid()}"
    secret = resolve_token(token)
    addresses = [address] if isinstance(address, str) else list(address)
    worker: list[Worker] = []

    async def main(thread: LoopThread) -> None:
        worker.append(
            Worker(addresses, name=called, location=location, secret=secret, transports=transports, options=options)
        )
        await worker[0].run(thread.ready)

    async with LoopThread(f"tensorhub-{called}", main, side) as thread:
        hub = Hub(worker[0], thread)
        try:
            yield hub
        finally:
            with side.shield():
                await hub.close()


class Hub:
    """A worker's view of its cluster. Made by `connect`."""

    def __init__(self, worker: Worker, thread: LoopThread) -> None:
        self._worker = worker
        self._thread = thread
        self._watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Hub of {self._worker!r}>"

    @property
    def name(self) -> str:
        """This worker's name, as `describe` and reports show it."""
        return self._worker.name

    def _timeout_s(self, timeout: float | None) -> float:
        if timeout is None:
            return self._worker.options.op_timeout_s
        seconds = as_seconds(timeout)
        if seconds is None:
            raise StateError(f"timeout={timeout!r}: give seconds, 0 or more, or None for the default")
        return seconds

    async def register(
        self,
        model: str,
        tensors: Mapping[str, Any],
        *,
        group: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        spot: bool = False,
    ) -> Weights:
        """Register `tensors` (contiguous CPU tensors by name), used in place and never copied, as one rank's weights.

        `group`: one string for all ranks of a replica, unique per replica within the model; required if `world_size` > 1;
        None makes a fresh one. Does not wait for other ranks.

        Raises RegistrationError, which names each tensor that cannot be registered and what to do.
        """
        memory = RegisteredMemory(tensors)
        return await self.register_memory(model, memory, group=group, rank=rank, world_size=world_size, spot=spot)

    async def register_memory(
        self,
        model: str,
        memory: Memory,
        *,
        group: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        spot: bool = False,
    ) -> Weights:
        """What `register` is made of, for memory that is not tensors, as a file's; internal, and may change."""
        check_name("model", model)
        if group is not None:
            check_name("group", group)
        elif world_size != 1:
            raise StateError("world_size > 1 needs group=: one string on all ranks, unique per replica within the model")
        if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size <= 2**20:
            raise StateError(f"rank={rank!r}, world_size={world_size!r}: ranks are integers from 0 to world_size - 1")
        _check_flag("spot", spot)
        make = partial(
            self._worker.register,
            model,
            memory,
            group=group,
            rank=rank,
            world_size=world_size,
            spot=spot,
            timeout_s=self._timeout_s(None),
        )
        return Weights(self, await self._thread.call(make, undo=self._worker.drop_handle))

    def newest(self, model: str) -> VersionInfo | None:
        """The newest visible version that this worker has heard of, without I/O; None if it has heard of none.

        The first question about a model begins to watch it.
        """
        if not self._worker.watches(model):
            check_name("model", model)
            self._thread.post(partial(self._worker.watch, model))
        return self._worker.newest(model)

    async def wait_for(self, model: str, *, at_least: int, timeout: float | None = None) -> VersionInfo:
        """The newest version of `model`, once it is `at_least`. Raises OperationTimeout, CoordinatorUnavailable."""
        check_name("model", model)
        _check_version(at_least)
        return await self._thread.call(self._worker.wait_for, model, at_least, self._timeout_s(timeout))

    def watch(self, model: str) -> Watcher:
        """Iterate over newest versions, the known one first; a slow consumer gets only the newest of those it missed.

        After a rollback the newest version is an older one than before.
        """
        check_name("model", model)
        self._thread.check_usable()
        watcher = Watcher(self._worker, self._thread, model)
        self._watchers.add(watcher)
        return watcher

    @overload
    async def describe(self, model: str, timeout: float | None = None) -> ModelInfo: ...
    @overload
    async def describe(self, model: None = None, timeout: float | None = None) -> tuple[ModelInfo, ...]: ...
    async def describe(self, model: str | None = None, timeout: float | None = None) -> ModelInfo | tuple[ModelInfo, ...]:
        """What the coordinator knows of one model, or (None) of all. Raises VersionUnavailable for an unknown model."""
        if model is not None:
            check_name("model", model)
        found = await self._thread.call(self._worker.describe, model, self._timeout_s(timeout))
        return found if model is None else found[0]

    async def retain(self, model: str, *, latest: int, timeout: float | None = None) -> None:
        """Keep the newest `latest` versions of `model` fetchable, lost ones counted; the last call wins, 0 keeps none.

        A worker that is not spot and would be the last to hold a kept version is not let go: its `unpublish`, `mutate`,
        `update` and `close` wait for another holder and, at their deadline, raise RetentionError with the version still
        published. `close(abandon=True)` and leaving the hub do not wait. Durable on return. The model need not exist yet.
        Raises StateError (`latest` is no number from 0), OperationTimeout, CoordinatorUnavailable.
        """
        check_name("model", model)
        _check_latest(latest)
        await self._thread.call(self._worker.retain, model, latest, self._timeout_s(timeout))

    @contextlib.asynccontextmanager
    async def pin(self, model: str, version: int, timeout: float | None = None) -> AsyncIterator[None]:
        """Keep one version fetchable for the length of the block, whatever `retain` says; pins of one version count.

        It outlives a coordinator with a `state_dir`, and ends with this worker; a rollback ends it too.
        Raises VersionUnavailable (not published, or nobody holds it now), StateError, OperationTimeout,
        CoordinatorUnavailable; at the end of the block LeaseLost, if this worker was taken for dead and the version could
        not be pinned again.
        """
        check_name("model", model)
        _check_version(version)
        timeout_s = self._timeout_s(timeout)
        ident = await self._thread.call(self._worker.pin, model, version, timeout_s, undo=self._worker.drop_pin)
        try:
            yield
        except BaseException:
            with self._thread.side.shield(), contextlib.suppress(TensorHubError):
                await self._thread.call(self._worker.unpin, ident, timeout_s)
            raise
        await self._thread.call(self._worker.unpin, ident, timeout_s)

    async def rollback(self, model: str, *, to: int, timeout: float | None = None) -> None:
        """Begin a new lineage of `model` after version `to`, for a trainer that restarts from that checkpoint.

        The versions up to `to` stay; later ones are retired: their holders' handles become empty, their readers get
        VersionUnavailable, publishes in progress VersionConflict. The next number to publish is `to` + 1. Durable on return.
        Raises VersionConflict (nothing was published, or `to` is above the newest number), OperationTimeout,
        CoordinatorUnavailable.
        """
        check_name("model", model)
        _check_version(to)
        await self._thread.call(self._worker.rollback, model, to, self._timeout_s(timeout))

    async def fetch(
        self,
        model: str,
        selector: Selector = LATEST,
        *,
        rank: int = 0,
        names: str | Sequence[str] | None = None,
        device: object = "cpu",
        timeout: float | None = None,
    ) -> Fetched:
        """Allocate the tensors of a version (a number, "latest" or "latest-1") and fill them; nobody reads them from here.

        `rank`: which shard of a version of several ranks. `names`: only these tensors, by name or glob ("layers.0.*"),
        one or several; what is not wanted is not read. `device`: a torch device, for the tensors in the end; they arrive,
        and are verified, in host memory.

        Raises VersionUnavailable, ManifestMismatch (no such rank, a name that no tensor has, a dtype that this torch
        lacks), StateError (arguments; no torch; a device that cannot be used; no memory), OperationTimeout, GroupAborted,
        CoordinatorUnavailable.
        """
        memory = AllocatedMemory(names, device)
        info, report = await self.fetch_into(model, selector, memory, rank=rank, timeout=timeout)
        return Fetched(memory.tensors(), info, report)

    async def fetch_into(
        self,
        model: str,
        selector: Selector,
        memory: Memory,
        *,
        rank: int = 0,
        timeout: float | None = None,
        progress: ProgressListener | None = None,
    ) -> tuple[VersionInfo, FetchReport]:
        """What `fetch` is made of, for memory that is made elsewhere; internal, and may change.

        `memory.map` is called once the version is known, in the library's thread; the memory is the caller's again when
        this returns or raises. `progress(bytes verified, bytes wanted)` is called in the library's thread a few times a
        second and at the end; it must return at once.
        """
        check_name("model", model)
        check_selector(selector)
        if type(rank) is not int or not 0 <= rank < 2**20:
            raise StateError(f"rank={rank!r}: ranks are integers from 0 to world_size - 1")
        timeout_s = self._timeout_s(timeout)
        fetch = partial(self._worker.fetch, model, selector, memory, rank=rank, timeout_s=timeout_s, progress=progress)
        return await self._thread.call(fetch)

    async def close(self) -> None:
        """Close every handle and leave the cluster; `connect` does it at the end of its block."""
        if not self._is_closed:
            self._is_closed = True
            for watcher in list(self._watchers):
                watcher.end()
            with contextlib.suppress(StateError):
                await self._thread.call(self._worker.close)


class Watcher:
    """Newest versions of one model, conflated. Iterate with `async for`; ends when the hub is closed."""

    def __init__(self, worker: Worker, thread: LoopThread, model: str) -> None:
        self._wakeup = thread.side.waiter()
        self._box: list[VersionInfo | None] = [None]
        self._last: VersionInfo | None = None
        self._has_ended = False
        listener = _Listener(self._box, self._wakeup)
        thread.post(partial(worker.listen, model, listener))
        weakref.finalize(self, thread.post, partial(worker.unlisten, model, listener))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> VersionInfo:
        while not self._has_ended:
            info = self._box[0]
            if info is not None and info != self._last:
                self._last = info
                return info
            await self._wakeup.wait()
        raise StopAsyncIteration

    def end(self) -> None:
        """Let the iteration end, also one that waits; the end of the hub does it too. From the caller's thread."""
        self._has_ended = True
        self._wakeup.set()


class _Listener:
    """Holds no reference to its watcher, so that a watcher that nobody iterates any more goes away."""

    def __init__(self, box: list[VersionInfo | None], wakeup: Waiter) -> None:
        self._box = box
        self._wakeup = wakeup

    def __call__(self, info: VersionInfo | None) -> None:
        self._box[0] = info
        self._wakeup.set()


# ---------------------------------------------------------------------------------------------------------- weights


class Weights:
    """One rank's registered memory. Made by `Hub.register`."""

    def __init__(self, hub: Hub, handle: Handle) -> None:
        self._hub = hub
        self._handle = handle
        self._thread = hub._thread
        self._worker = hub._worker

    def __repr__(self) -> str:
        shard = self._handle.member.shard
        return f"<Weights of {shard.model}/{shard.group}[{shard.rank}] {self.state.value} version={self.version}>"

    @property
    def model(self) -> str:
        """The model under which the memory is registered."""
        return self._handle.member.shard.model

    @property
    def version(self) -> int | None:
        """The version that the memory holds; None unless ready or draining."""
        return self._handle.member.version

    @property
    def state(self) -> HandleState:
        """empty, filling, ready, draining, torn, in_doubt or closed (each equals that string)."""
        return self._handle.member.state

    async def publish(self, version: int, timeout: float | None = None) -> VersionInfo:
        """Promise that the memory is immutable, as `version`; returns when it is visible (all ranks have called).

        Raises VersionConflict (the number was used, or is not above the mark), StateError (published already),
        RegistrationError (a tensor's storage was replaced), OperationTimeout, GroupAborted, CoordinatorUnavailable.
        """
        _check_version(version)
        return await self._thread.call(self._handle.publish, version, self._hub._timeout_s(timeout))

    async def unpublish(self, timeout: float | None = None) -> None:
        """Take the promise back; returns when the memory may be overwritten.

        Running readers are moved, or waited for within `drain_grace_s` and half the timeout, then fenced. Needs no reachable
        coordinator. Raises StateError (nothing is published), RetentionError (a retained version would be lost; it stays
        published), DrainTimeout (it is still being read when the time is up; it stays published), MutabilityViolation (it
        is taken back, but was written before), LeaseLost (it is the caller's already: the coordinator has given it up).
        """
        await self._thread.call(self._handle.unpublish, self._hub._timeout_s(timeout))

    @contextlib.asynccontextmanager
    async def mutate(self, version: int, timeout: float | None = None) -> AsyncIterator[None]:
        """Unpublish if published, run the body, publish as `version`. If the body raises, nothing is published.

        The number is checked first (VersionConflict, with the memory as it was). Raises as `unpublish`, before the body,
        and as `publish`. If one rank's body raises, the other ranks' publish ends with GroupAborted, and the number stays
        unused.
        """
        _check_version(version)
        timeout_s = self._hub._timeout_s(timeout)
        await self._thread.call(self._handle.check_idle)
        await self._thread.call(self._worker.check_number, self.model, version, timeout_s)
        where = "unpublish() in"
        try:
            await self._thread.call(self._handle.unpublish_if_published, timeout_s)
            where = "the body of"
            yield
        except BaseException as error:
            if self._handle.member.shard.world_size > 1:
                with self._thread.side.shield():
                    reason = f"{where} mutate({version}) raised {text_of(error)}"
                    await self._thread.call(self._handle.refuse, reason[:1000], timeout_s)
            raise
        await self.publish(version, timeout)

    async def replicate(self, selector: Selector = LATEST, timeout: float | None = None) -> FetchReport:
        """Fill the memory, which must hold no version, with a version: a number, "latest" or "latest-1".

        Raises VersionUnavailable, ManifestMismatch (each difference named), IntegrityError (no source's bytes have their
        digests), StateError, OperationTimeout, GroupAborted, TransportUnavailable.
        """
        call = FillCall(OpKind.REPLICATE, check_selector(selector))
        return await self._thread.call(self._handle.fill, call, self._hub._timeout_s(timeout))

    async def update(
        self,
        selector: Selector = LATEST,
        *,
        at_least: int | None = None,
        before_write: BeforeWrite | None = None,
        staged: bool = False,
        timeout: float | None = None,
    ) -> FetchReport:
        """Replace what the memory holds by a version; `report.changed` is False if it holds that content already.

        `at_least` waits for that number. `before_write` is awaited here, in the caller's task, once version and source are
        certain and before the first byte changes. Up to then an error leaves the old version published; after it the
        memory is torn. Raises as `replicate`, RetentionError (a retained version would be lost), DrainTimeout (the old
        version is still being read), both with it still published, MutabilityViolation (it was written; unpublish() first),
        and whatever `before_write` raises.
        """
        check_selector(selector)
        if at_least is not None:
            _check_version(at_least)
        if staged:
            self._needs_host_memory("update(staged=True)")
        call = FillCall(OpKind.UPDATE, selector, at_least, hold=before_write is not None, staged=staged)

        def ask(info: VersionInfo) -> None:
            job.ask_caller(partial(self._run_hook, before_write, info))

        job = self._thread.job(self._handle.fill, call, self._hub._timeout_s(timeout), ask)
        return await self._thread.run_job(job)

    async def _run_hook(self, before_write: BeforeWrite | None, info: VersionInfo) -> None:
        problem: Exception | None = None
        try:
            if before_write is not None:
                await before_write(info)
        except Exception as error:
            problem = error
        self._thread.post(partial(self._handle.hook_returned, problem))

    async def prefetch(self, selector: Selector = LATEST, timeout: float | None = None) -> NoReturn:
        """Fill host memory with a version while the current one stays in use. Not built yet."""
        check_selector(selector)
        self._needs_host_memory("prefetch()")
        raise NotImplementedError("prefetch is not built yet")

    def _needs_host_memory(self, what: str) -> None:
        if self._worker.options.host_memory_bytes == 0:
            raise StateError(f"{what} needs host memory: set Options.host_memory_bytes")
        raise NotImplementedError(f"{what} is not built yet")

    async def close(self, abandon: bool = False) -> None:
        """Withdraw what is published, as `unpublish` does, and give the registration up.

        Raises RetentionError (a retained version would be lost; `abandon` loses it) and DrainTimeout, both with everything
        as it was, and MutabilityViolation (it is closed).
        """
        _check_flag("abandon", abandon)
        await self._thread.call(partial(self._handle.close, abandon=abandon), self._hub._timeout_s(None))


def _check_version(version: object) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version <= VERSION_MAX:
        raise StateError(f"{version!r} is not a version: give an integer from 0 to 2**63 - 1")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise StateError(f"{name}={value!r}: give True or False")


def _check_latest(latest: object) -> None:
    if not isinstance(latest, int) or isinstance(latest, bool) or not 0 <= latest <= VERSION_MAX:
        raise StateError(f"latest={latest!r}: give the number of versions to keep, 0 or more")
