"""The worker's shell: one connection to the coordinator, one listener for readers, and the handles of this process.

Responsible for staying connected (R11: a lost worker comes back as a new incarnation behind the same handles), for the
heartbeat, for passing messages to the right handle, and for what is known of each model's newest version. Decides nothing
about memory: each handle's `Member` does. Runs in the library's own loop (R14), on asyncio or trio.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import anyio
import anyio.abc
import anyio.to_thread
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from tensorhub.errors import (
    CoordinatorUnavailable,
    LeaseLost,
    OperationTimeout,
    RegistrationError,
    StateError,
    TensorHubError,
)
from tensorhub.manifest import Digest, Manifest, build_manifest
from tensorhub.messages import (
    AddSource,
    Announce,
    Check,
    CutReader,
    Deregister,
    Describe,
    Description,
    Dismissed,
    Done,
    DropSource,
    EpochChanged,
    FromCoordinator,
    FromWorker,
    Grant,
    Heartbeat,
    HeartbeatAck,
    Join,
    Leave,
    ManifestReply,
    MustStay,
    OrderedOut,
    Outcome,
    Pin,
    ReaderCut,
    Refused,
    Registered,
    Retain,
    Rollback,
    Start,
    Unpin,
    Watch,
    Welcome,
    Withdrawable,
    Write,
)
from tensorhub.protocol.codec import FROM_COORDINATOR
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.protocol.secret import check_open_access
from tensorhub.protocol.stream import MessageStream
from tensorhub.runtime import clock
from tensorhub.runtime.acceptor import ServeSettings, serve_readers
from tensorhub.runtime.handle import Handle, ProgressListener
from tensorhub.runtime.lanes import ChannelOpener
from tensorhub.runtime.logs import get_logger
from tensorhub.runtime.serving import SharedOwner
from tensorhub.runtime.tcp_channel import TcpTransport
from tensorhub.transport import tcp
from tensorhub.transport.base import Channel, Cutter, Destination, ReadFailure, ReadRight, Transport
from tensorhub.transport.memory import Memory
from tensorhub.transport.registry import Local, Registry
from tensorhub.types import (
    ContentId,
    Endpoint,
    FetchReport,
    Incarnation,
    LeaseId,
    Location,
    ModelInfo,
    OpKind,
    Options,
    RegistrationId,
    Selector,
    VersionInfo,
    parse_address,
)
from tensorhub.worker.calls import FillCall
from tensorhub.worker.enrolment import Shard
from tensorhub.worker.member import Member

OUTBOX_MESSAGES_MAX = 8192
BEATS_PER_LEASE = 4
RECONNECT_S_FIRST = 0.05
RECONNECT_S_MAX = 2.0
CLOSE_S = 5.0  # for the last words of a worker that closes

log = get_logger("tensorhub.worker")

TRANSPORTS = Registry()
TRANSPORTS.add("tcp", TcpTransport, place=90)

Answer = Done | Refused | Description


@dataclass(slots=True)
class _Pin:
    """One version that this worker keeps."""

    model: str
    version: int
    held: bool = False  # the coordinator has agreed once
    lost: TensorHubError | None = None  # why it did not agree again
    again: anyio.CancelScope = field(default_factory=anyio.CancelScope)  # of the task that says it again


class Worker:
    """One worker of one cluster. `await run(ready)` stays connected until cancelled or `close` is called."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        name: str,
        location: Location,
        secret: bytes,
        transports: Sequence[str] | None,
        options: Options,
    ) -> None:
        """Raises StateError for an address that is none, TransportUnavailable for a transport that cannot be had."""
        self._addresses = [parse_address(address) for address in addresses]
        if not self._addresses:
            raise StateError("no coordinator address is given")
        self.name = name
        self.location = location
        self.options = options
        self._secret = secret
        self._wanted = transports
        self.incarnation = Incarnation(secrets.token_hex(16))
        self._transports: tuple[Transport, ...] = ()
        self._make_transports()
        self._owner = SharedOwner()
        self._handles: dict[str, Handle] = {}  # by registration
        self._by_rank: dict[tuple[str, str, int], Handle] = {}  # by (model, group, rank)
        self._asked: dict[int, Handle] = {}  # requests of handles that are not answered yet
        self._answers: dict[int, tuple[anyio.Event, list[Answer]]] = {}  # of this worker's own questions
        self._manifests: dict[str, Manifest] = {}
        self._pins: dict[str, _Pin] = {}
        self._numbers = itertools.count(1)
        self._generations = itertools.count(1)
        self._newest: dict[str, VersionInfo | None] = {}  # of the watched models
        self._listeners: dict[str, list[Callable[[VersionInfo | None], None]]] = {}
        self._outbox: MemoryObjectSendStream[FromWorker] | None = None  # of the session, while there is one
        self._endpoints: tuple[Endpoint, ...] = ()
        self._lease_s = options.lease_s
        self._unanswered = 0  # heartbeats since anything was heard in this session
        self._closing = False
        self._closed = anyio.Event()
        self._welcome_came = anyio.Event()
        self._local_host = ""
        self._outbox_done = anyio.Event()  # all that was queued for the present session is said, or never will be
        self._time_moved = anyio.Event()
        self._tasks: anyio.abc.TaskGroup
        self._serving = anyio.CancelScope()

    def __repr__(self) -> str:
        online = "online" if self._outbox is not None else "offline"
        return f"<Worker {self.name} {self.incarnation[:8]} {online} handles={len(self._handles)}>"

    def _make_transports(self) -> None:
        self._transports = TRANSPORTS.make(Local(self.incarnation, self._secret, self.options), self._wanted)

    # --------------------------------------------------------------------------------------------- life

    async def run(self, ready: Callable[[], None]) -> None:
        """Connect (raising if that fails the first time), call `ready`, and stay connected until closed."""
        messages = await self._connect_any()
        try:
            listener = self._listen()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await messages.aclose()
            raise
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._serve_readers, listener)
                self._tasks.start_soon(self._keep_time)
                self._tasks.start_soon(self._keep_connected, messages, ready)
                with anyio.move_on_after(self.options.connect_timeout_s):
                    await self._welcome_came.wait()
                if not self._welcome_came.is_set():
                    raise CoordinatorUnavailable(f"the coordinator at {self._shown()} does not answer")
                await self._closed.wait()
                self._tasks.cancel_scope.cancel()
        finally:
            listener.close()

    async def close(self) -> None:
        """Close every handle, say goodbye, and let `run` return. Bounded in time."""
        self._closing = True
        with anyio.move_on_after(CLOSE_S, shield=True):
            await self._leave()
        self._closed.set()

    def _listen(self) -> socket.socket:
        """The data listener, on the address by which this worker reached its coordinator."""
        host = self.options.listen_host or self._local_host
        check_open_access(self._secret, host)
        try:
            listener = tcp.listen(host)
        except OSError as error:
            raise StateError(f"readers cannot be listened for on {host!r} ({error}): set Options.listen_host") from error
        self._endpoints = (Endpoint("tcp", tcp.address_of(listener)),)
        return listener

    async def _serve_readers(self, listener: socket.socket) -> None:
        """Serve readers as the present incarnation; again as the next one after a change."""
        while True:
            settings = ServeSettings(
                incarnation=self.incarnation,
                secrets=(self._secret,),
                readers_max=self.options.readers_max,
                handshake_timeout_s=self.options.connect_timeout_s,
                stall_timeout_s=self.options.stall_timeout_s,
            )
            with anyio.CancelScope() as self._serving:
                await serve_readers(listener, self._owner, settings)

    async def _leave(self) -> None:
        async with anyio.create_task_group() as tasks:
            for handle in list(self._handles.values()):
                tasks.start_soon(self._close_quietly, handle)
        if self._outbox is not None:
            self.say(Leave("closed"))
            await self._outbox.aclose()
            await self._outbox_done.wait()

    async def _close_quietly(self, handle: Handle) -> None:
        await handle.end_call(StateError("the hub was closed while the call was running"))
        with contextlib.suppress(TensorHubError):
            await handle.close(CLOSE_S / 2, abandon=True)

    # --------------------------------------------------------------------------------------------- connection

    def _shown(self) -> str:
        return ", ".join(f"tcp://{host}:{port}" for host, port in self._addresses)

    async def _connect_any(self) -> MessageStream[FromCoordinator]:
        """A session with the first coordinator that takes one."""
        problems: list[str] = []
        for host, port in self._addresses:
            try:
                return await self._connect(host, port)
            except (OSError, ConnectionLost, OperationTimeout) as error:
                problems.append(f"tcp://{host}:{port}: {error}")
        text = f"no coordinator can be reached ({'; '.join(problems)}): is one running there? (tensorhub serve)"
        raise CoordinatorUnavailable(text)

    async def _connect(self, host: str, port: int) -> MessageStream[FromCoordinator]:
        with anyio.move_on_after(self.options.connect_timeout_s) as scope:
            stream = await anyio.connect_tcp(host, port)
        if scope.cancelled_caught:
            raise OperationTimeout(f"no answer within {self.options.connect_timeout_s:g} s")
        self._local_host = str(stream.extra(anyio.abc.SocketAttribute.local_address)[0])
        messages = MessageStream(stream, FROM_COORDINATOR, self.options.frame_bytes_max)
        try:
            handshake = ClientHandshake("worker", self.incarnation, self._secret, secrets.token_bytes(NONCE_BYTES))
            await messages.handshake(handshake, self.options.connect_timeout_s)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await messages.aclose()
            raise
        return messages

    async def _keep_connected(self, first: MessageStream[FromCoordinator], ready: Callable[[], None]) -> None:
        """Hold a session; after its end, another one."""
        messages: MessageStream[FromCoordinator] | None = first
        wait_s = RECONNECT_S_FIRST
        while True:
            if messages is not None and await self._hold_session(messages, ready):
                wait_s = RECONNECT_S_FIRST
            if self._closing:
                return
            await anyio.sleep(wait_s)
            wait_s = min(wait_s * 2, RECONNECT_S_MAX)
            messages = None
            try:
                messages = await self._connect_any()
            except TensorHubError as error:
                log.warning("coordinator_unreachable", reason=str(error))

    async def _hold_session(self, messages: MessageStream[FromCoordinator], ready: Callable[[], None]) -> bool:
        """One session, to its end. True if it was welcomed."""
        outbox, to_say = anyio.create_memory_object_stream[FromWorker](OUTBOX_MESSAGES_MAX)
        welcomed = anyio.Event()
        self._unanswered = 0
        self._outbox_done = anyio.Event()
        try:
            async with messages, outbox, to_say, anyio.create_task_group() as tasks:
                tasks.start_soon(self._talk, messages, to_say, tasks.cancel_scope)
                tasks.start_soon(self._beat, welcomed)
                outbox.send_nowait(Join(self.name, self.location, self._endpoints, os.getpid()))
                async for message in messages:
                    self._unanswered = 0
                    if isinstance(message, Welcome):
                        self._welcome_came.set()
                        self._lease_s = message.lease_s
                        welcomed.set()
                        self._outbox = outbox
                        self._welcomed(message)
                        ready()
                    elif isinstance(message, Dismissed):
                        if not self._closing:
                            log.warning("worker_dismissed", reason=message.reason)
                            self._reincarnate()
                        break
                    else:
                        self._receive(message)
                tasks.cancel_scope.cancel()
        except* (ConnectionLost, TensorHubError) as group:
            log.warning("coordinator_lost", reason=str(group.exceptions[0]))
        finally:
            self._outbox_done.set()
            if self._outbox is outbox:
                self._outbox = None
                for handle in list(self._handles.values()):
                    handle.apply(handle.member.disconnected(clock.now()))
            for event, _ in self._answers.values():
                event.set()
        return welcomed.is_set()

    async def _talk(
        self,
        messages: MessageStream[FromCoordinator],
        to_say: MemoryObjectReceiveStream[FromWorker],
        scope: anyio.CancelScope,
    ) -> None:
        async for message in to_say:
            await messages.send(message)
        self._outbox_done.set()
        scope.cancel()  # the outbox was closed: all is said

    async def _beat(self, welcomed: anyio.Event) -> None:
        """Renew the lease, and give up a session in which nothing comes back: nobody hears, or the way is cut.

        Counts beats, not seconds, so that a process that was stopped itself does not blame the other side.
        """
        with anyio.move_on_after(self.options.connect_timeout_s):
            await welcomed.wait()
        if not welcomed.is_set():
            raise ConnectionLost(f"no welcome came within {self.options.connect_timeout_s:g} s")
        for sequence in itertools.count():
            await anyio.sleep(self._lease_s / BEATS_PER_LEASE)
            self._unanswered += 1
            if self._unanswered > BEATS_PER_LEASE:
                raise ConnectionLost(f"nothing was heard for {self._lease_s:g} s")
            self.say(Heartbeat(sequence))

    def _welcomed(self, message: Welcome) -> None:
        log.info("worker_welcomed", incarnation=self.incarnation, epoch=message.epoch, known=message.known)
        for model in self._newest:
            self.say(Watch(model))
        for handle in list(self._handles.values()):
            handle.apply(handle.member.connected(clock.now()))
        for ident, pin in self._pins.items():
            if pin.held and pin.lost is None:
                pin.again.cancel()
                pin.again = anyio.CancelScope()
                self._tasks.start_soon(self._say_pin_again, ident, pin)

    def _reincarnate(self) -> None:
        """This incarnation is lost for good; the same memory goes on as a new one."""
        self.incarnation = Incarnation(secrets.token_hex(16))
        self._make_transports()
        self._serving.cancel()

    # --------------------------------------------------------------------------------------------- messages

    def say(self, message: FromWorker) -> None:
        """Queue a message for the coordinator; without a session it is not said."""
        if self._outbox is None:
            return
        try:
            self._outbox.send_nowait(message)
        except anyio.WouldBlock:
            log.warning("coordinator_too_slow", messages=OUTBOX_MESSAGES_MAX)
            self._outbox.close()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the session is ending

    def _receive(self, message: FromCoordinator) -> None:
        match message:
            case Announce():
                self._announced(message)
            case CutReader():
                self._tasks.start_soon(self._cut, message)
            case Registered() | ManifestReply() | Withdrawable():
                self._tell(self._asked.pop(message.request, None), message)
            case MustStay():
                self._tell(self._asked.get(message.request), message)  # the answer is still to come
            case Done() | Refused():
                handle = self._asked.pop(message.request, None)
                if handle is not None:
                    self._tell(handle, message)
                else:
                    self._answered(message)
            case Description():
                self._answered(message)
            case OrderedOut():
                self._tell(self._handles.get(message.registration), message)
            case Start() | Write() | AddSource() | DropSource() | Outcome():
                handle = self._by_rank.get((message.key.model, message.key.group, message.rank))
                if handle is not None and isinstance(message, Start | Outcome):
                    handle.note_bound()
                self._tell(handle, message)
            case EpochChanged():
                for (model, group, _), handle in list(self._by_rank.items()):
                    if (model, group) == (message.model, message.group):
                        self._tell(handle, message)
            case HeartbeatAck() | Welcome() | Dismissed():
                pass
            case _:
                assert_never(message)

    @staticmethod
    def _tell(
        handle: Handle | None,
        message: Registered
        | Refused
        | Done
        | EpochChanged
        | Start
        | Write
        | AddSource
        | DropSource
        | Outcome
        | MustStay
        | Withdrawable
        | ManifestReply
        | OrderedOut,
    ) -> None:
        if handle is not None:
            handle.apply(handle.member.receive(message, clock.now()))

    async def _cut(self, message: CutReader) -> None:
        await anyio.to_thread.run_sync(self._owner.cut, Incarnation(message.reader))
        self.say(ReaderCut(message.lease))

    def _announced(self, message: Announce) -> None:
        self._newest[message.model] = message.newest
        for listener in list(self._listeners.get(message.model, ())):
            listener(message.newest)

    async def _keep_time(self) -> None:
        """Wake the members at their deadlines."""
        while True:
            self._time_moved = anyio.Event()
            deadlines = [d for h in self._handles.values() if (d := h.member.next_deadline()) is not None]
            if not deadlines:
                await self._time_moved.wait()
                continue
            with anyio.move_on_after(max(0.0, min(deadlines) - clock.now())):
                await self._time_moved.wait()
            for handle in list(self._handles.values()):
                actions = handle.member.tick(clock.now())
                if actions:
                    handle.apply(actions)

    # --------------------------------------------------------------------------------------------- questions

    def _answered(self, message: Answer) -> None:
        waiting = self._answers.get(message.request)
        if waiting is not None:
            waiting[1].append(message)
            waiting[0].set()

    async def _ask(self, make: Callable[[int], FromWorker], what: str, timeout_s: float) -> Answer:
        """Ask the coordinator; again after a lost connection, until the deadline."""
        with anyio.move_on_after(timeout_s):
            while True:
                request = next(self._numbers)
                event, answers = anyio.Event(), list[Answer]()
                self._answers[request] = (event, answers)
                try:
                    if self._outbox is not None:
                        self.say(make(request))
                        await event.wait()
                    else:
                        await anyio.sleep(RECONNECT_S_FIRST)
                finally:
                    del self._answers[request]
                if answers:
                    if isinstance(answers[0], Refused):
                        raise answers[0].error.error()
                    return answers[0]
        if self._outbox is None:
            raise CoordinatorUnavailable(f"{what}: the coordinator could not be reached within {timeout_s:g} s")
        raise OperationTimeout(f"{what}: the coordinator did not answer within {timeout_s:g} s")

    async def describe(self, model: str | None, timeout_s: float) -> tuple[ModelInfo, ...]:
        """What the coordinator knows of one model, or of all."""
        answer = await self._ask(lambda request: Describe(request, model), "describe", timeout_s)
        assert isinstance(answer, Description)
        return answer.models

    async def check_number(self, model: str, version: int, timeout_s: float) -> None:
        """Raise VersionConflict if `version` could not be published now."""
        await self._ask(lambda request: Check(request, model, version), f"version {version} of {model!r}", timeout_s)

    async def rollback(self, model: str, to: int, timeout_s: float) -> None:
        """Begin a new lineage after version `to`; durable on return."""
        ident = secrets.token_hex(12)  # the same on each retry: a second one would retire what was published since
        await self._ask(lambda request: Rollback(request, ident, model, to), f"rollback of {model!r} to {to}", timeout_s)

    async def retain(self, model: str, latest: int, timeout_s: float) -> None:
        """Keep the newest `latest` versions; durable on return."""
        await self._ask(lambda request: Retain(request, model, latest), f"retain of {model!r}", timeout_s)

    # --------------------------------------------------------------------------------------------- pins

    async def pin(self, model: str, version: int, timeout_s: float) -> str:
        """Keep one version until `unpin`; durable on return. The id of the pin."""
        ident = secrets.token_hex(12)
        self._pins[ident] = pin = _Pin(model, version)
        try:
            await self._say_pin(ident, pin, timeout_s)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.unpin(ident, 0)  # it may have come through
            raise
        pin.held = True
        return ident

    async def _say_pin(self, ident: str, pin: _Pin, timeout_s: float) -> None:
        what = f"pin of version {pin.version} of {pin.model!r}"
        await self._ask(lambda request: Pin(request, ident, pin.model, pin.version), what, timeout_s)

    async def _say_pin_again(self, ident: str, pin: _Pin) -> None:
        """After a lost connection; perhaps as a new incarnation, or to a coordinator that knows nothing."""
        with pin.again:
            try:
                await self._say_pin(ident, pin, self.options.op_timeout_s)
            except (CoordinatorUnavailable, OperationTimeout):
                pass  # it is said on the next connection
            except TensorHubError as error:
                pin.lost = error
                log.warning("pin_lost", model=pin.model, version=pin.version, reason=str(error))

    async def unpin(self, ident: str, timeout_s: float) -> None:
        """End a pin: within `timeout_s` if the coordinator can be reached, else later. Raises LeaseLost if it was lost."""
        pin, ended = self.drop_pin(ident)
        with anyio.move_on_after(timeout_s):
            await ended.wait()
        if pin.lost is not None:
            raise LeaseLost(
                f"the pin of version {pin.version} of {pin.model!r} was lost while its worker was taken for dead, or its "
                f"coordinator had lost its state: {pin.lost}"
            )

    def drop_pin(self, ident: str) -> tuple[_Pin, anyio.Event]:
        """Have the coordinator told, as soon as can be, that a pin is over; the event is set when it has heard."""
        pin, ended = self._pins.pop(ident), anyio.Event()
        pin.again.cancel()
        if not self._closed.is_set():
            self._tasks.start_soon(self._say_unpin, ident, pin, ended)
        return pin, ended

    async def _say_unpin(self, ident: str, pin: _Pin, ended: anyio.Event) -> None:
        while True:
            with contextlib.suppress(TensorHubError):
                what = f"end of the pin of version {pin.version} of {pin.model!r}"
                await self._ask(lambda request: Unpin(request, ident, pin.model), what, self.options.op_timeout_s)
                ended.set()
                return
            await anyio.sleep(RECONNECT_S_MAX)

    # --------------------------------------------------------------------------------------------- versions

    def watch(self, model: str) -> None:
        """From now on, know this model's newest version."""
        if model not in self._newest:
            self._newest[model] = None
            self.say(Watch(model))

    def newest(self, model: str) -> VersionInfo | None:
        """The last known newest version. From any thread."""
        return self._newest.get(model)

    def watches(self, model: str) -> bool:
        """Whether this model's newest version is kept known. From any thread."""
        return model in self._newest

    def listen(self, model: str, listener: Callable[[VersionInfo | None], None]) -> None:
        """Have `listener` called, in this loop, with each newest version from now on; at once with the known one.

        After a rollback that is an older one than before, or None.
        """
        self._listeners.setdefault(model, []).append(listener)
        self.watch(model)
        known = self._newest.get(model)
        if known is not None:
            listener(known)

    def unlisten(self, model: str, listener: Callable[[VersionInfo | None], None]) -> None:
        listeners = self._listeners.get(model, [])
        if listener in listeners:
            listeners.remove(listener)

    async def wait_for(self, model: str, at_least: int, timeout_s: float) -> VersionInfo:
        """The newest version of `model` once it is `at_least`."""
        found, reached = list[VersionInfo](), anyio.Event()

        def listener(info: VersionInfo | None) -> None:
            if info is None or info.version < at_least:
                found.clear()  # rolled back before it was seen
            else:
                found[:] = [info]
                reached.set()

        self.listen(model, listener)
        try:
            with anyio.move_on_after(timeout_s):
                while not found:
                    reached = anyio.Event()
                    await reached.wait()
        finally:
            self.unlisten(model, listener)
        if not found:
            newest = self._newest.get(model)
            known = "nothing is published yet" if newest is None else f"the newest is {newest.version}"
            text = f"version {at_least} of {model!r} was not published within {timeout_s:g} s; {known}"
            if self._outbox is None:
                raise CoordinatorUnavailable(f"{text} (the coordinator cannot be reached)")
            raise OperationTimeout(text)
        return found[0]

    # --------------------------------------------------------------------------------------------- registering

    async def register(
        self,
        model: str,
        memory: Memory,
        *,
        group: str | None,
        rank: int,
        world_size: int,
        spot: bool,
        timeout_s: float,
    ) -> Handle:
        """Take memory into use, in place, and tell the coordinator of it."""
        layout_id = f"world/{world_size}"
        digest: Digest = "xxh3-64" if self.options.integrity else "none"
        manifest = build_manifest(memory.descriptions, self.options.chunk_bytes, digest, layout_id, metadata=memory.metadata)
        shard = Shard(
            registration=secrets.token_hex(12),
            model=model,
            group=group if group is not None else self._fresh_group(),
            rank=rank,
            world_size=world_size,
            spot=spot,
            layout_id=layout_id,
            manifest=manifest,
            number=rank,
        )
        place = (model, shard.group, rank)
        if place in self._by_rank:
            raise RegistrationError(
                f"rank {rank} of group {shard.group!r} of {model!r} is registered by this worker already: "
                "close it first, or take another group name (two sets of one model in one process need two groups)"
            )
        handle = self._start_handle(shard, memory)
        try:
            with anyio.move_on_after(timeout_s):
                await handle.registered.wait()
            if not handle.registered.is_set():
                raise CoordinatorUnavailable(f"register {model!r}: the coordinator did not answer within {timeout_s:g} s")
            if handle.registration_error is not None:
                raise handle.registration_error
        except BaseException:
            self.drop_handle(handle)
            raise
        return handle

    async def fetch(
        self,
        model: str,
        selector: Selector,
        memory: Memory,
        *,
        rank: int,
        timeout_s: float,
        progress: ProgressListener | None,
    ) -> tuple[VersionInfo, FetchReport]:
        """Fill memory that serves nobody, and is the caller's when this returns: a group of its own, for one call."""
        shard = Shard(
            registration=secrets.token_hex(12),
            model=model,
            group=self._fresh_group(),
            rank=0,
            world_size=1,
            spot=True,
            layout_id="",
            manifest=None,
            number=rank,
        )
        handle = self._start_handle(shard, memory)
        handle.progress = progress
        try:
            return await handle.fetch(FillCall(OpKind.FETCH, selector), timeout_s)
        except TensorHubError as error:
            error.memory = "intact"  # what was torn is nobody's
            raise
        finally:
            self.drop_handle(handle)

    def _fresh_group(self) -> str:
        return f"{self.name[:400]}-{secrets.token_hex(4)}"

    def _start_handle(self, shard: Shard, memory: Memory) -> Handle:
        handle, place = self._make_handle(shard, memory), (shard.model, shard.group, shard.rank)
        self._by_rank[place] = self._handles[shard.registration] = handle
        self._tasks.start_soon(self._run_handle, handle, place)
        if self._outbox is not None:
            handle.apply(handle.member.connected(clock.now()))
        return handle

    def drop_handle(self, handle: Handle) -> None:
        """Give up a registration that its caller has not got, or that has served. Its place is free at once."""
        shard = handle.member.shard
        self._leave_place(handle, (shard.model, shard.group, shard.rank))
        handle.stop()
        self.say(Deregister(next(self._numbers), handle.member.shard.registration, abandon=True))  # if it came through

    def _make_handle(self, shard: Shard, memory: Memory) -> Handle:
        def request() -> int:
            number = next(self._numbers)
            self._asked[number] = handle
            return number

        member = Member(shard, requests=request, generations=self._mint_generation, manifests=self._manifests)
        handle = Handle(member, memory, self._owner, self)
        handle.deadline_moved = lambda: self._time_moved.set()
        return handle

    def _mint_generation(self) -> int:
        """A generation word: the high half a nonce, the low half a counter (R3)."""
        return secrets.randbits(31) << 32 | (next(self._generations) & 0xFFFFFFFF)

    def _leave_place(self, handle: Handle, place: tuple[str, str, int]) -> None:
        if self._by_rank.get(place) is handle:
            del self._by_rank[place]

    async def _run_handle(self, handle: Handle, place: tuple[str, str, int]) -> None:
        try:
            await handle.run()
        finally:
            self._leave_place(handle, place)
            self._handles.pop(handle.member.shard.registration, None)
            for request in [number for number, asker in self._asked.items() if asker is handle]:
                del self._asked[request]

    # --------------------------------------------------------------------------------------------- reading

    def open_channel(self, content_id: ContentId) -> ChannelOpener:
        """What opens the best transport to a granted source; for one content."""

        def open_one(grant: Grant, destination: Destination, cutter: Cutter) -> tuple[str, Channel]:
            right = ReadRight(
                LeaseId(grant.lease),
                Incarnation(grant.incarnation),
                RegistrationId(grant.registration),
                grant.generation,
                content_id,
            )
            for transport in self._transports:
                for endpoint in grant.endpoints:
                    if endpoint.transport == transport.name and transport.reaches(self.location, grant.location):
                        return transport.name, transport.open(endpoint, right, destination, cutter)
            offered = ", ".join(endpoint.transport for endpoint in grant.endpoints) or "none"
            mine = ", ".join(transport.name for transport in self._transports)
            raise ReadFailure("unreachable", f"no transport in common: {grant.source} offers {offered}, here are {mine}")

        return open_one
