"""The worker's shell: one connection to the coordinator, one listener for readers, and the handles
of this process.

Responsible for the worker's identity (R11: a lost worker comes back as a new incarnation behind the
same handles), for passing each message to the handle that it concerns, and for registering. The
link, channels, questions, pins and watches are modules of their own. Decides nothing about memory:
each handle's `Member` does. Runs in the library's own loop (R14).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import assert_never

import anyio
import anyio.abc
import anyio.to_thread

from tensorhub import deltas, messages
from tensorhub.errors import (
    CoordinatorUnavailable,
    StateError,
    TensorHubError,
)
from tensorhub.logs import get_logger
from tensorhub.memory.regions import Memory
from tensorhub.model.manifest import Manifest
from tensorhub.protocol.certificates import Certificates
from tensorhub.protocol.secret import check_open_access
from tensorhub.runtime import clock
from tensorhub.runtime.control.accepting import RETRY_S
from tensorhub.runtime.control.link import CoordinatorLink
from tensorhub.runtime.data.acceptor import ServeSettings, serve_readers
from tensorhub.runtime.data.channels import Channels
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.runtime.ending import Parting
from tensorhub.runtime.wakeup import Wakeup
from tensorhub.runtime.worker.archived_copies import ArchivedCopies
from tensorhub.runtime.worker.calling import CallersHandle
from tensorhub.runtime.worker.coordinator_client import CoordinatorClient
from tensorhub.runtime.worker.deadlines import Deadlines
from tensorhub.runtime.worker.digest_reporter import DigestReporter
from tensorhub.runtime.worker.handle import Handle
from tensorhub.runtime.worker.host_copies import HostCopyRunner
from tensorhub.runtime.worker.pins import Pins
from tensorhub.runtime.worker.ports import ArchiveSettings, CallersArchiver
from tensorhub.runtime.worker.registering import CallersWorker
from tensorhub.runtime.worker.timings_told import TimingsTold
from tensorhub.runtime.worker.version_watches import VersionWatches
from tensorhub.transport import sockets, unix
from tensorhub.types import (
    FOREVER_S,
    Endpoint,
    HandleState,
    Incarnation,
    Location,
    OpKind,
    Options,
    Purpose,
    RegistrationId,
    format_address,
    parse_address,
    release,
)
from tensorhub.worker.known_parts import KnownParts
from tensorhub.worker.local_copies import LocalCopies
from tensorhub.worker.member import Member
from tensorhub.worker.member_memory import Content
from tensorhub.worker.registration_session import Shard
from tensorhub.worker.router import (
    Anew,
    Answered,
    Deliver,
    Examine,
    LoseState,
    Reply,
    Resume,
    Router,
)

log = get_logger("tensorhub.worker")


class Worker(CallersWorker):
    """One worker of one cluster. `await run(ready)` stays connected until cancelled or `close` is
    called.
    """

    copies: HostCopyRunner

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        name: str,
        location: Location,
        secrets_accepted: Sequence[bytes],
        transports: Sequence[str] | None,
        options: Options,
        prefetch: bool = False,
        certificates: Certificates | None = None,
    ) -> None:
        """`secrets_accepted`: the first is presented. Raises StateError (a wrong address),
        TransportUnavailable.
        """
        self.name = name
        self.location = location
        self.options = options
        self._secrets = secrets_accepted
        self._certificates = certificates  # None: no TLS
        self.prefetches = prefetch  # each new version, for the handles that follow their model
        self.incarnation = Incarnation(secrets.token_hex(16))
        self.channels = Channels(secrets_accepted, options, location, transports, certificates)
        self.channels.become(self.incarnation)
        self._numbers = itertools.count(1)
        self.link = CoordinatorLink(
            addresses, secrets_accepted, options, self, certificates=certificates
        )
        self.coordinator = CoordinatorClient(self.link, self._numbers)
        self.pins = Pins(self.coordinator, options.op_timeout_s)
        self.version_watches = VersionWatches(self.link)
        self._owner = SharedOwner(self.channels.sides())
        self._digest_reporter = DigestReporter(self._tell_made)
        self._owner.on_made = self._digest_reporter.made
        self._owner.on_suspicion = self._suspect
        # threads add, a task takes: what may have changed, and of what deltas are wanted
        self._noticed: deque[messages.DigestAgain | RegistrationId] = deque()
        self._notice: Wakeup | None = None
        if options.deltas != "off":
            self._owner.deltas.on_wanted = self._note
        self.timings = TimingsTold(self.link)
        self._owner.served_times.on_served = self.timings.reader_served
        self.router: Router[Handle] = Router(self._numbers)
        self._manifests: dict[str, Manifest] = {}
        self._parts = KnownParts()
        self._found_copies = LocalCopies()
        self.copies = HostCopyRunner(self)
        self.archived = ArchivedCopies(self, self.copies, self._owner)
        self.copies.budget.on_recall = lambda each: self._owner.deltas.end(RegistrationId(each))
        self._owner.deltas.on_dropped = self.copies.budget.take_back
        self._generations = itertools.count(1)
        self._endpoints: tuple[Endpoint, ...] = ()
        self._listeners: list[socket.socket] = []
        self._listened_at = ""  # the host
        self._closed = anyio.Event()
        self._deadlines = Deadlines(self.router.handles, lambda: self.link.fault)
        self._tasks: anyio.abc.TaskGroup
        self._digesting: anyio.CapacityLimiter  # of second digests: one at a time
        self._beside: anyio.CapacityLimiter  # of early digests
        self._serving = anyio.CancelScope()

    def __repr__(self) -> str:
        online = "online" if self.link.online else "offline"
        token = " read-only" if self.read_only else ""
        return (
            f"<Worker {self.name} {self.incarnation[:8]} {online}{token} "
            f"handles={len(self.router.handles)}>"
        )

    # ---------------------------------------------------------------------------------------------
    # life

    async def run(self, ready: Callable[[], None]) -> None:
        """Connect (raising if no coordinator comes in time), call `ready`, and stay connected until
        closed.
        """
        try:
            await self._run(ready)
        finally:
            self._owner.end_reading()
            self.channels.close()

    async def _run(self, ready: Callable[[], None]) -> None:
        received = await self.link.connect_first()
        try:
            self._listeners = self._listen()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await received.aclose()
            raise
        self._digesting, self._beside = anyio.CapacityLimiter(1), anyio.CapacityLimiter(1)
        try:
            async with anyio.create_task_group() as self._tasks:
                self.pins.tasks = self.copies.tasks = self._tasks
                self._tasks.start_soon(self._serve_readers)
                self._tasks.start_soon(self._deadlines.keep)
                self._tasks.start_soon(self.copies.keep_time)
                self._tasks.start_soon(self.archived.run)
                self._tasks.start_soon(self._digest_reporter.run)
                self._tasks.start_soon(self._act_on_notices)
                self._tasks.start_soon(self.timings.run)
                self._tasks.start_soon(self.channels.keep_swept)
                self._tasks.start_soon(self.link.keep, received, ready)
                with anyio.move_on_after(self.options.connect_timeout_s):
                    await self.link.welcome_came.wait()
                if not self.link.welcome_came.is_set():
                    why = self.link.refusal or "it does not answer"
                    raise CoordinatorUnavailable(
                        f"the coordinator at {self.link.addresses} takes no connection: {why}"
                    )
                try:
                    await self._closed.wait()
                finally:
                    for handle in self.router.handles.values():
                        handle.end()
                self._tasks.cancel_scope.cancel()
        finally:
            self.copies.end()
            for listener in self._listeners:
                listener.close()

    async def close(self, parting: Parting) -> None:
        """Close every handle, say goodbye, and let `run` return. Within that time."""
        self.link.begin_closing()
        self.copies.machine.stop()
        with anyio.move_on_after(parting.within_s * 0.9, shield=True):
            if parting.hand_over:
                with anyio.move_on_after(parting.within_s * 0.7):
                    await self._hand_over(parting)
            await self.close_handles(self.router.handles.values(), parting)
            await self.link.close(messages.Leave("closed"))
        self.pins.tasks = None
        self._closed.set()

    def _listen(self) -> list[socket.socket]:
        """The data listeners: on the address by which this worker reached its coordinator, and on a
        Unix socket for processes on this host that share memory with it.
        """
        options = self.options
        host, advertised = options.listen_host or self.link.local_host, options.advertise
        check_open_access(self._secrets[0], host)
        if advertised is not None:  # a forwarder to loopback makes it reachable from other hosts
            check_open_access(self._secrets[0], parse_address(f"tcp://{advertised}")[0])
        sides = self._owner.sides
        local = unix.listen() if any(side.shares_memory for side in sides) else None
        try:
            listener, nth = sockets.listen_at_one(host, options.listen_ports)
        except BaseException as error:
            if local is not None:
                local.close()
            if not isinstance(error, OSError):
                raise
            where = f"{host!r}, port {options.listen_port or 'any'}"
            text = (
                f"readers cannot be listened for on {where} ({error}): set Options.listen_host "
                f"and listen_port"
            )
            raise StateError(text) from error
        there = sockets.address_of(listener)
        if advertised is not None:
            its_host, its_port = parse_address(f"tcp://{advertised}")
            there = format_address(its_host, its_port + nth)
        here = unix.address_of(local) if local is not None else None
        offered = [(side, side.endpoint(there, here)) for side in sides]
        able = self.channels.strided  # a worker reads and serves by the same transports
        self._endpoints = tuple(
            [
                Endpoint(side.name, address, side.strides and side.name in able)
                for side, address in offered
                if address is not None
            ]
        )
        self._listened_at = host
        return [listener] if local is None else [listener, local]

    def _listen_anew(self) -> None:
        """If the machine has another address since: readers would not find this worker."""
        here = self.options.listen_host or self.link.local_host
        if here == self._listened_at or sockets.is_here(self._listened_at):
            return
        try:
            new = self._listen()
        except StateError as error:  # and again with the next session
            log.warning("readers_not_served", reason=str(error))
            return
        self._listeners = new
        self._serving.cancel()  # and the old ones are closed

    async def _serve_readers(self) -> None:
        """Serve readers as the present incarnation; again as the next one after a change."""
        while True:
            listeners = self._listeners
            settings = ServeSettings(
                incarnation=self.incarnation,
                secrets=self._secrets,
                shared_memory_uids=self.options.shared_memory_uids,
                readers_max=self.options.readers_max,
                handshake_timeout_s=self.options.connect_timeout_s,
                stall_timeout_s=self.options.stall_timeout_s,
                certificates=self._certificates,
            )
            try:
                with anyio.CancelScope() as self._serving:
                    async with anyio.create_task_group() as tasks:
                        for listener in listeners:
                            tasks.start_soon(serve_readers, listener, self._owner, settings)
            except* StateError as group:  # this process lacks descriptors now
                log.warning("readers_not_served", reason=str(group.exceptions[0]))
                await anyio.sleep(RETRY_S)
            for listener in listeners:
                if listener not in self._listeners:
                    listener.close()

    async def _hand_over(self, parting: Parting) -> None:
        """Close every handle as its caller would: readers move to other sources, and retained
        versions to other workers.
        """
        callers, until = self.callers(), clock.now() + parting.within_s * 0.6

        async def close(handle: Handle) -> None:
            await handle.end_call(StateError(f"{parting.reason} while the call was running"))
            with contextlib.suppress(TensorHubError):
                left_s = max(0.0, until - clock.now())
                if handle in callers:
                    await self.copies.close(handle, left_s, abandon=False)
                else:
                    await handle.close(left_s)

        for handles in (
            callers,
            [each for each in self.router.handles.values() if each not in callers],
        ):
            async with anyio.create_task_group() as tasks:
                for handle in handles:
                    tasks.start_soon(close, handle)

    # ---------------------------------------------------------------------------------------------
    # the link

    def introduce(self) -> messages.Join:
        """See `SessionHandler`."""
        self._listen_anew()
        return messages.Join(
            self.name,
            self.location,
            self._endpoints,
            os.getpid(),
            self.options.host_memory_bytes,
            release(),
            self.router.cluster,
            self.router.epoch,
            self.router.term,
        )

    def welcomed(self, message: messages.Welcome) -> None:
        """See `SessionHandler`: say everything that is wanted and held, anew."""
        log.info(
            "worker_welcomed",
            incarnation=self.incarnation,
            epoch=message.epoch,
            known=message.known,
            release=message.release,
        )
        self.read_only = message.read_only
        for step in self.router.welcomed(message):
            match step:
                case LoseState():
                    step.handle.apply(step.handle.member.state_lost(clock.now()))
                case Resume():
                    step.handle.apply(step.handle.member.connected(clock.now(), message.lease_s))
                case Anew.FORGET_VERSIONS:
                    log.error("coordinator_lost_its_state", coordinator=self.link.addresses)
                    self.version_watches.state_lost(
                        {handle.member.shard.model for handle in self.router.handles.values()}
                    )
                case Anew.WATCH:
                    self.version_watches.welcomed()
                case Anew.PIN:
                    self.pins.welcomed()
                case _:
                    assert_never(step)

    def lost(self) -> None:
        """See `SessionHandler`."""
        for handle in list(self.router.handles.values()):
            handle.apply(handle.member.disconnected(clock.now()))
        self.coordinator.lost()

    def dismissed(self) -> None:
        """See `SessionHandler`: this incarnation is lost for good; its memory goes on under a new
        incarnation.
        """
        self.incarnation = Incarnation(secrets.token_hex(16))
        self.channels.become(self.incarnation)
        self._serving.cancel()

    def received(self, message: messages.FromCoordinator) -> None:
        """See `SessionHandler`: pass the message to its handle or module."""
        for routed in self.router.route(message):
            match routed:
                case Deliver():
                    routed.handle.receive(routed.message)
                case Examine():
                    self._tasks.start_soon(routed.handle.look, routed.question, self._digesting)
                case messages.MakeCopy():
                    self.copies.ordered(routed)
                case Answered():
                    self.coordinator.answered(routed.message)
                case Reply():
                    self.link.say(routed.message)
                case messages.Announce():
                    self.version_watches.announced(routed)
                case messages.CutReader():
                    self._tasks.start_soon(self._cut, routed)
                case messages.DropCopy():
                    self.copies.dropped(routed)
                case _:
                    assert_never(routed)

    def _tell_made(self, registration: RegistrationId, if_all: bool) -> bool:
        handle = self.router.handles.get(registration)
        return handle is None or handle.tell_made(if_all=if_all)

    def _suspect(self, registration: RegistrationId, generation: int, chunk: int) -> None:
        """Note that a chunk of that registration may have changed. From any thread."""
        self._note(messages.DigestAgain("", registration, generation, chunk))

    def _note(self, what: messages.DigestAgain | RegistrationId) -> None:
        self._noticed.append(what)
        if self._notice is not None:
            self._notice.set()

    async def _act_on_notices(self) -> None:
        """Look at suspicious chunks as if the coordinator had asked; begin with wanted deltas."""
        self._notice = Wakeup()
        while True:
            while self._noticed:
                what = self._noticed.popleft()
                question = what if isinstance(what, messages.DigestAgain) else None
                named = what if isinstance(what, str) else what.registration
                handle = self.router.handles.get(RegistrationId(named))
                if handle is None:
                    continue
                if question is not None:
                    await handle.look(question, self._digesting)
                elif deltas.fault_here() is None:
                    handle.begin_deltas(self.copies.budget.lend)
            await self._notice.wait()

    async def _cut(self, message: messages.CutReader) -> None:
        await anyio.to_thread.run_sync(self._owner.cut, Incarnation(message.reader))
        self.link.say(messages.ReaderCut(message.lease))

    # ---------------------------------------------------------------------------------------------
    # registering

    def callers(self) -> list[Handle]:
        """The handles of its callers that are not closed."""
        shards = ((handle, handle.member.shard) for handle in self.router.handles.values())
        used = [handle for handle, shard in shards if shard.serves and shard.purpose is Purpose.USE]
        return [handle for handle in used if handle.member.state is not HandleState.CLOSED]

    async def archive(self, settings: ArchiveSettings) -> CallersArchiver:
        from tensorhub.runtime.worker.archiver import Archiver

        archiver = Archiver(self, self._owner, self._tasks, settings)
        await archiver.begin()
        return archiver

    @property
    def lease_s(self) -> float:
        return self.link.lease_s

    def new_registration(self) -> str:
        return secrets.token_hex(12)

    def fresh_group(self) -> str:
        return f"{self.name[:400]}-{secrets.token_hex(4)}"

    def start_handle(self, shard: Shard, memory: Memory, adopted: Content | None = None) -> Handle:
        """`adopted`: what the memory holds from the beginning."""
        handle = self._make_handle(shard, memory)
        self.router.add(shard, handle)
        self.copies.began(handle)
        if adopted is not None:
            handle.apply(handle.member.adopt(adopted, clock.now()))
        self._tasks.start_soon(self._run_handle, handle)
        if self.link.online:
            handle.apply(handle.member.connected(clock.now(), self.link.lease_s))
        return handle

    def drop_handle(self, handle: CallersHandle) -> None:
        """Give up a registration that its caller has not got, or that has served. Its place is free
        at once.
        """
        shard = handle.member.shard
        running = self.router.handles.get(shard.registration)
        self.router.leave(shard)
        if running is not None:
            running.give_up()

    def _make_handle(self, shard: Shard, memory: Memory) -> Handle:
        member = Member(
            shard,
            requests=partial(self.router.new_request, shard),
            generations=self._mint_generation,
            manifests=self._manifests,
            copies=self._found_copies,
            parts=self._parts,
            in_file=memory.digests_first,
        )
        page_bytes = messages.digests_bytes_max(self.options.frame_bytes_max)
        handle = Handle(
            member, memory, self._owner, self.link, self.channels, self.copies, page_bytes
        )
        handle.beside = self._beside
        handle.deadline_moved = partial(self._deadlines.moved, shard.registration)
        handle.first_fill_begins = self._first_fill_begins
        handle.call_took = self.timings.call_took
        return handle

    def _first_fill_begins(self, handle: Handle, kind: OpKind, timeout_s: float) -> None:
        self._tasks.start_soon(self._tell_waiting, handle, kind, timeout_s)

    async def _tell_waiting(self, handle: Handle, kind: OpKind, timeout_s: float) -> None:
        """A first fill may wait for a version that never comes, as of a name that is mistyped: say
        so while it waits.
        """
        model = handle.member.shard.model
        with contextlib.suppress(TensorHubError):
            is_new = await self.coordinator.nothing_published(
                model, min(timeout_s, self.options.op_timeout_s)
            )
            if is_new and handle.interpreter.is_busy:
                hint = (
                    "nothing is published under this name yet: it waits for the first version. "
                    "Is the name right?"
                )
                up_to_s = round(timeout_s, 1) if timeout_s < FOREVER_S / 2 else "no limit"
                log.warning("call_waits", model=model, call=kind.value, up_to_s=up_to_s, hint=hint)

    def _mint_generation(self) -> int:
        """A generation word: the high half a nonce, the low half a counter (R3)."""
        return secrets.randbits(31) << 32 | (next(self._generations) & 0xFFFFFFFF)

    async def _run_handle(self, handle: Handle) -> None:
        try:
            await handle.run()
        finally:
            shard = handle.member.shard
            self.router.remove(shard)
            self._found_copies.remove(shard.registration)
            self.copies.ended(shard.registration)
            self.archived.ended(handle)
