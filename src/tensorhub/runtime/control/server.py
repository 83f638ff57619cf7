"""The coordinator's shell: sockets, a clock and a store around `coordinator.Coordinator`.

Responsible for sessions (their handshake and their end), for feeding events to the core one at a
time, and for carrying out its actions in order. Decides nothing. Runs on asyncio and trio alike.

A connection that has not authenticated belongs to the `AcceptLoop`. A session may send only small
frames before Join, which has to come soon; afterwards its lease keeps it. The server reads a few
messages of a session at a time, and only while its peer takes its answers. So neither the size nor
the rate of a peer's requests makes another peer wait.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread

from tensorhub.coordinator import (
    DOOR,
    CloseSession,
    Connected,
    Coordinator,
    Disconnected,
    Durable,
    Event,
    LookFor,
    Outlived,
    Persist,
    Persisted,
    PersistFailed,
    Send,
    Silent,
    Tick,
    WorkerLost,
)
from tensorhub.errors import StateError, TensorHubError
from tensorhub.logs import TALLY_S, Tally, get_logger
from tensorhub.messages import FromCoordinator, FromWorker
from tensorhub.protocol.certificates import Certificates
from tensorhub.protocol.codec import FROM_WORKER
from tensorhub.protocol.handshake import NONCE_BYTES, ServerHandshake
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.protocol.polled_stream import Poller
from tensorhub.protocol.pot import Pot
from tensorhub.protocol.secret import path_hint
from tensorhub.protocol.stream import MessageStream
from tensorhub.protocol.tls import Tls
from tensorhub.protocol.tls_stream import accept
from tensorhub.runtime import clock
from tensorhub.runtime.control.accepting import AcceptLoop, Turns, caps, descriptors_for
from tensorhub.runtime.control.election import Deposed, Store
from tensorhub.runtime.control.hearing import Hearing
from tensorhub.runtime.control.keyring import LOOK_S, TokenFile
from tensorhub.runtime.control.port import listening
from tensorhub.runtime.control.pulse import TURNS_TO_CORE
from tensorhub.runtime.control.session import Kind, ReadOnlyAnswers, Session, Turn
from tensorhub.transport import sockets
from tensorhub.types import Options

EPOCHS_FROM_MAX = 2**24  # a coordinator may mint 2**32
LAST_WORDS_S = 5.0  # for what a session that is to be closed still has to hear
LOST_NAMED_MAX = 16  # workers, of those that are lost within TALLY_S
SILENT_PER_STEP = 64  # sessions; each may end a worker
READ_ONLY_HEARD_MAX = 16  # messages of all read-only sessions together, in each round of turns
FIRST_FRAME_BYTES_MAX = 65_536  # of a session that has not said Join
# of a read-only one that has; who publishes nothing says nothing long
READ_ONLY_FRAME_BYTES_MAX = 2**20
# of all sessions' frames that are large, and not whole or not heard yet; one frame at least
UNDECODED_BYTES_MAX = 2**30
# the same of all read-only sessions, which are not counted there
READ_ONLY_UNDECODED_BYTES_MAX = 2**26
# of long answers, to all full sessions together, that are on their way; one frame at least
ANSWERS_BYTES_MAX = 2**30
# of all answers that are queued to read-only sessions; one frame at least
READ_ONLY_ANSWERS_BYTES_MAX = 2**26

log = get_logger("tensorhub.coordinator")


class CoordinatorServer:
    """One term of a coordinator, on one listening address. `await run(...)` serves until
    cancelled.
    """

    def __init__(
        self,
        *,
        options: Options,
        secrets_accepted: Sequence[bytes],
        store: Store,
        certificates: Certificates | None = None,
        left_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """`left_s`: see `Term`."""
        self._left_s = left_s
        self._term_over = anyio.Event()
        self.address = ""  # "tcp://host:port", once it listens
        self._options = options
        self._secrets = secrets_accepted
        self._certificates = certificates  # None: no TLS
        self._tls_turns = Turns()
        self._store = store
        self._incarnation = secrets.token_hex(16)
        self._sessions: dict[int, Session] = {}
        self._sessions_minted = 0
        self._unrecorded: list[Persist] = []
        self._record_wanted = anyio.Event()
        self._writing = anyio.Lock()  # the store takes one write at a time
        self._asked: list[int] = []  # sessions of which the core asks whether anything lies unread
        self._look_wanted = anyio.Event()
        self._lost: list[WorkerLost] = []  # of which the log says nothing yet
        self._lost_wanted = anyio.Event()
        self._outlived = ""  # what a worker remembers that the store does not
        self._is_outlived = anyio.Event()
        self._accept_loop: AcceptLoop
        self._wakes_at = math.inf  # when time is let pass for the core
        self._is_sooner = anyio.Event()  # it wants that earlier
        self._turn: Turn
        self._hearing: Hearing
        self._poller: Poller
        self._now: Callable[[], float]  # of the loop that this runs on
        self._pending_max, self._sessions_max = caps(options.sessions_max)
        self._closings = Tally(log.warning, "pending_connection_closed")
        self._refusals = Tally(log.warning, "peer_refused")
        self._turned_away = Tally(log.info, "session_refused")
        self._shortages = Tally(log.warning, "accept_failed")
        self._shortness = Tally(log.warning, "no_descriptors_for_more_sessions")
        frame_bytes_max = options.frame_bytes_max
        self._full = Kind(
            frame_bytes_max,
            Pot(max(UNDECODED_BYTES_MAX, frame_bytes_max)),
            Pot(max(ANSWERS_BYTES_MAX, frame_bytes_max)),
        )
        self._read_only = Kind(
            min(READ_ONLY_FRAME_BYTES_MAX, frame_bytes_max),
            Pot(max(READ_ONLY_UNDECODED_BYTES_MAX, READ_ONLY_FRAME_BYTES_MAX)),
            ReadOnlyAnswers(max(READ_ONLY_ANSWERS_BYTES_MAX, frame_bytes_max)),
            places=anyio.Semaphore(READ_ONLY_HEARD_MAX),
        )
        self._core: Coordinator
        self.steps = 0  # of the core
        self.steps_s = 0.0  # that they took, with their actions

    def __repr__(self) -> str:
        return f"<CoordinatorServer {self.address} sessions={len(self._sessions)}>"

    def show(self) -> tuple[Coordinator, float, float]:
        """For observers, in this loop, once it listens: the core, its time now, and how long what
        comes waits for its turn now.
        """
        return self._core, self._now(), self._turn.pulse.behind_s

    async def run(self, holder: socket.socket, ready: Callable[[], None]) -> None:
        """Read the state, listen on the port that `holder` is bound to, call `ready`, and serve.
        Raises StateError if the state or the port cannot be used; Deposed (perhaps in a group).
        """
        durable = await anyio.to_thread.run_sync(self._store.read)
        with listening(holder) as listener:
            self.address = sockets.address_of(listener)
            await self._run(listener, durable, ready)

    async def _run(
        self, listener: socket.socket, durable: Durable, ready: Callable[[], None]
    ) -> None:
        self._poller, self._turn, self._now = Poller(), Turn(), clock.of_loop()
        self._hearing = Hearing(lambda event: self._step(event), self._now)
        self._core = Coordinator(
            cluster=self._store.cluster,
            epoch=self._store.epoch,
            options=replace(self._options, sessions_max=self._sessions_max),
            ids=partial(secrets.token_hex, 12),
            now=self._now(),
            durable=durable,
            wall_offset_s=time.time() - self._now(),
            term=secrets.token_hex(8),
            epochs_from=secrets.randbelow(EPOCHS_FROM_MAX),
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_term)
            tasks.start_soon(self._keep_time)
            tasks.start_soon(self._keep_records)
            tasks.start_soon(self._keep_looking)
            tasks.start_soon(self._keep_telling)
            tasks.start_soon(self._begin_anew)
            tasks.start_soon(self._poller.keep)
            pulse = partial(self._turn.pulse.keep, catch_up=self._hearing.catch_up, late=self._late)
            tasks.start_soon(pulse, self._options.lease_s, lambda: len(self._sessions))
            if isinstance(self._secrets, TokenFile):
                tasks.start_soon(self._keep_access)
            log.info(
                "coordinator_listens",
                address=self.address,
                cluster=self._store.cluster,
                epoch=self._store.epoch,
                sessions_max=self._sessions_max,
            )
            ready()
            self._accept_loop = AcceptLoop(
                listener, self._pending_max, self._serve, self._closings, self._shortages
            )
            await self._accept_loop.run(tasks)

    # ----------------------------------------------------------------------------------------------
    # the core

    def _step(self, event: Event) -> None:
        """Feed one event, and do what follows. Never awaits: nothing comes between an event and its
        actions.
        """
        if self._left_s() <= 0.0:
            self._term_over.set()
        if self._outlived or self._term_over.is_set():
            return
        began = time.perf_counter()
        for action in self._core.step(event, self._now()):
            match action:
                case Send():
                    self._send(action.session, action.message)
                case Persist():
                    self._unrecorded.append(action)
                    self._record_wanted.set()
                case CloseSession():
                    self._tell_closed(action)
                    self._close(action.session)
                case WorkerLost():
                    self._lost.append(action)
                    self._lost_wanted.set()
                case Outlived():
                    self._outlived = action.reason
                    self._is_outlived.set()
                    return
                case LookFor():
                    self._asked.append(action.session)
                    self._look_wanted.set()
        deadline = self._core.next_deadline()
        if deadline is not None and deadline < self._wakes_at:
            self._is_sooner.set()
        self.steps += 1
        self.steps_s += time.perf_counter() - began

    def _late(self, late_s: float, is_behind: bool) -> None:
        self._core.observations.late(self._now(), late_s, is_behind=is_behind)

    def _send(self, number: int, message: FromCoordinator | None) -> None:
        session = self._sessions.get(number)
        if session is not None:
            session.say(message)

    def _tell_closed(self, action: CloseSession) -> None:
        """Log the end of a session. Refused clients come again and again, so refusals are only
        counted.
        """
        session = self._sessions.get(action.session)
        if session is None or session.has_joined:
            log.info("session_closed", session=action.session, reason=action.reason)
        else:
            self._turned_away.count(session=action.session, reason=action.reason)

    def _close(self, number: int) -> None:
        """End a session once its queue is sent; soon, if its peer does not take the queued
        messages.
        """
        session = self._sessions.get(number)
        # what it says meanwhile does not put its end off
        if session is not None and not session.is_ending:
            session.is_ending = True
            session.scope.deadline = self._now() + LAST_WORDS_S
            self._send(number, None)

    async def _keep_term(self) -> None:
        """End the server with the term: after a stop of this process an event may come first."""
        await self._term_over.wait()
        raise Deposed

    async def _keep_time(self) -> None:
        """Let time pass for the core when it wants that. Most deadlines are moved on before they
        come: this is no business of most events, and what wakes too early looks when to wake next.
        """
        while True:
            deadline = self._core.next_deadline()
            if deadline is not None and deadline <= self._now():
                self._step(Tick())
                await anyio.lowlevel.checkpoint()
                continue
            self._is_sooner, self._wakes_at = (
                anyio.Event(),
                math.inf if deadline is None else deadline,
            )
            with anyio.move_on_after(self._wakes_at - self._now()):
                await self._is_sooner.wait()

    async def _keep_records(self) -> None:
        """Write what has gathered, in one transaction; then say so."""
        while True:
            await self._record_wanted.wait()
            self._record_wanted = anyio.Event()
            batch, self._unrecorded = self._unrecorded, []
            entries = [action.entry for action in batch]
            try:
                if self._store.blocks:
                    async with self._writing:
                        await anyio.to_thread.run_sync(self._store.write, entries)
                else:
                    self._store.write(entries)
            except Deposed:
                raise
            except OSError as error:
                log.error("state_not_written", reason=str(error))
                for action in batch:
                    self._step(PersistFailed(action.record, str(error)))
            else:
                for action in batch:
                    self._step(Persisted(action.record))

    async def _keep_looking(self) -> None:
        """Tell the core which of the sessions that it asks about are silent: nothing of such a
        session lies in the kernel, and everything that was read from the kernel before has been
        passed on. Passing on takes a while, so the kernel is asked again afterwards. A session also
        counts as silent if it is not read because its peer does not take its answers.
        """
        while True:
            await self._look_wanted.wait()
            self._look_wanted = anyio.Event()
            asked, self._asked = self._asked, []
            quiet = [number for number in asked if self._has_nothing_unread(number)]
            await self._hearing.catch_up()
            for _ in range(TURNS_TO_CORE):  # for those that a task hears
                await anyio.lowlevel.checkpoint()
            for first in range(0, len(quiet), SILENT_PER_STEP):
                few = quiet[first : first + SILENT_PER_STEP]
                silent = [
                    each
                    for each in few
                    if self._waits_for_peer(each) and self._has_nothing_unread(each)
                ]
                self._step(Silent(tuple(silent)))
                await anyio.lowlevel.checkpoint()

    async def _keep_telling(self) -> None:
        """Log the lost workers, once a second: of a thousand workers that are lost together, some
        names.
        """
        while True:
            await self._lost_wanted.wait()
            await anyio.sleep(TALLY_S)
            self._lost_wanted = anyio.Event()
            lost, self._lost = self._lost, []
            names = ", ".join([each.worker for each in lost[:LOST_NAMED_MAX]])
            log.warning("worker_lost", times=len(lost), workers=names, reason=lost[0].reason)

    async def _begin_anew(self) -> None:
        """Once this coordinator is outlived, end it: the next one is of another cluster."""
        await self._is_outlived.wait()
        log.error("coordinator_outlived", cluster=self._store.cluster, reason=self._outlived)
        text = f"the cluster begins anew, as its state is older: {self._outlived}"
        try:
            async with self._writing:
                await anyio.to_thread.run_sync(self._store.begin_anew)
        except Deposed:
            raise
        except OSError as error:  # a full disk: the next term finds out anew
            raise StateError(f"{text}; but {error}") from error
        raise StateError(text)

    def _has_nothing_unread(self, number: int) -> bool:
        if number == DOOR:
            return self._nobody_comes()
        session = self._sessions.get(number)
        return session is not None and (
            not session.messages.readiness & ~select.POLLOUT or session.is_deaf()
        )

    def _waits_for_peer(self, number: int) -> bool:
        if number == DOOR:
            return self._nobody_comes()
        session = self._sessions.get(number)
        return session is not None and (session.messages.awaits_bytes or session.is_deaf())

    def _nobody_comes(self) -> bool:
        """Whether no connection waits to be accepted, nor for its handshake, nor has one still to
        say Join.
        """
        joining = any(
            each.scope.deadline < math.inf and not each.is_ending
            for each in self._sessions.values()
        )
        return not joining and self._accept_loop.is_empty

    async def _keep_access(self) -> None:
        """End the sessions of tokens that are no longer accepted, also of peers that only listen. A
        peer that has another token connects again, and goes on.
        """
        while True:
            await anyio.sleep(LOOK_S)
            accepted = tuple(self._secrets)
            for number, session in self._sessions.items():
                if session.secret not in accepted:
                    log.info(
                        "session_closed",
                        session=number,
                        reason="its token is not accepted any more",
                    )
                    session.scope.cancel()

    # ----------------------------------------------------------------------------------------------
    # one session

    async def _serve(self, connection: socket.socket, authenticated: Callable[[], None]) -> None:
        """One connection, from its first byte to its last. Whatever a peer does, it costs only this
        connection.
        """
        until, tls, peer = self._now() + self._options.connect_timeout_s, None, ""
        with contextlib.suppress(OSError):  # it has gone already
            peer = str(connection.getpeername()[0])
        handshake = ServerHandshake(
            "coordinator", self._incarnation, self._secrets, secrets.token_bytes(NONCE_BYTES)
        )
        try:
            if self._certificates is not None:
                tls = Tls(self._certificates, "server", peer="client")
                await accept(connection, tls, self._tls_turns.of(connection), until - self._now())
                handshake.binding = tls.binding
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                stream = self._poller.stream(connection, tls)
            except OSError:  # its peer has gone already
                return
            async with MessageStream(
                stream, FROM_WORKER, self._options.frame_bytes_max
            ) as messages:
                await messages.handshake(handshake, until - self._now())
                authenticated()
                await self._converse(messages, handshake)
        except ConnectionLost:
            pass
        except TensorHubError as error:
            hint = path_hint(error, self._secrets[0])
            self._refusals.count(peer=peer, kind=type(error).__name__, reason=f"{error}{hint}")

    async def _converse(
        self, messages: MessageStream[FromWorker], handshake: ServerHandshake
    ) -> None:
        self._sessions_minted += 1
        number = self._sessions_minted
        kind = self._read_only if handshake.read_only else self._full
        session = Session(
            number,
            messages,
            handshake.secret,
            kind,
            self._options,
            self._turn,
        )
        self._sessions[number] = session
        messages.limit_received(FIRST_FRAME_BYTES_MAX)
        if handshake.peer.role == "worker":
            session.scope.deadline = self._now() + self._options.connect_timeout_s
        self._tell_if_short()
        self._step(
            Connected(
                number, handshake.client_incarnation, handshake.peer.role, handshake.read_only
            )
        )
        end: BaseException | None = None
        try:
            with session.scope:
                async with anyio.create_task_group() as tasks:

                    async def talk() -> None:
                        await session.talk()
                        tasks.cancel_scope.cancel()

                    tasks.start_soon(talk)
                    await self._hearing.hear(session)
                    tasks.cancel_scope.cancel()
        except* (ConnectionLost, TensorHubError) as group:
            end = group.exceptions[0]
        finally:
            del self._sessions[number]
            if isinstance(kind.answers, ReadOnlyAnswers):
                kind.answers.ended(session)
            self._step(Disconnected(number))
        if end is not None:  # raised within `except*`, it would come as a group
            raise end

    def _tell_if_short(self) -> None:
        """Warn that sessions are refused because descriptors are short: an operator can raise the
        limit.
        """
        if self._sessions_max < min(len(self._sessions), self._options.sessions_max):
            needed = descriptors_for(self._options.sessions_max)
            self._shortness.count(
                sessions=self._sessions_max, advice=f"raise `ulimit -n` to {needed}"
            )
