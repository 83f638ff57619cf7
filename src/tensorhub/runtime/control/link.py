"""A worker's connection to its coordinator: one session at a time, for as long as the worker lives.

Responsible for connecting and reconnecting, for the heartbeat, for giving up a session in which
nothing comes back, and for a bounded queue of messages to the coordinator. Not responsible for the
messages: the `SessionHandler` is given those that come, and is told when each session begins and
ends.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Protocol

import anyio
import anyio.abc
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from tensorhub.errors import (
    AuthenticationFailed,
    CoordinatorUnavailable,
    OperationTimeout,
    ProtocolError,
    TensorHubError,
)
from tensorhub.logs import get_logger
from tensorhub.messages import (
    NO_REQUEST,
    PROTOCOL_VERSION,
    Advice,
    Dismissed,
    ErrorInfo,
    FromCoordinator,
    FromWorker,
    HeartbeatAck,
    Join,
    Refused,
    Welcome,
)
from tensorhub.protocol.certificates import Certificates
from tensorhub.protocol.codec import FROM_COORDINATOR, UnknownMessage, UnspokenMessage
from tensorhub.protocol.frames import WrongVersion
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.protocol.secret import path_hint
from tensorhub.protocol.stream import MessageStream
from tensorhub.protocol.tls import Tls
from tensorhub.protocol.tls_stream import TlsStream
from tensorhub.runtime.control.addresses import Addresses
from tensorhub.runtime.control.search import RECONNECT_S, REFUSED_S_MAX, Messages, Search
from tensorhub.transport.forks import close_in_children
from tensorhub.types import Incarnation, Options, parse_address
from tensorhub.worker.heartbeats import Heartbeats

OUTBOX_MESSAGES_MAX = 8192
BEHIND = (
    "it has more to do than it comes to, was stopped, or the way is slow: calls take longer by that"
)
FAULTS_TOLD_MAX = 16  # in the log, while there is no session

log = get_logger("tensorhub.worker")

# a connection to (host, port); raises OSError
Dial = Callable[[str, int], Awaitable[anyio.abc.ByteStream]]


class SessionHandler(Protocol):
    """Handles the messages that come over the link, in the loop and in order."""

    incarnation: Incarnation  # as whom to connect

    def introduce(self) -> Join: ...

    def welcomed(self, message: Welcome) -> None:
        """A session is up: from now on things can be said."""

    def received(self, message: FromCoordinator) -> None: ...

    def lost(self) -> None:
        """The session is over; nothing can be said until the next one."""

    def dismissed(self) -> None:
        """This incarnation is lost for good: be another one before the next session."""


class CoordinatorLink:
    """One worker's link. `connect_first`, then `keep` it until it is `close`d."""

    def __init__(
        self,
        addresses: Sequence[str],
        secrets_presented: Sequence[bytes],
        options: Options,
        ears: SessionHandler,
        dial: Dial = anyio.connect_tcp,
        certificates: Certificates | None = None,
    ) -> None:
        """Raises StateError for an address that is none."""
        self._dial = dial
        self._certificates = certificates  # None: no TLS
        self._addresses = Addresses(addresses)
        self._secrets = secrets_presented  # the first is presented, as it is at each connection
        self._options = options
        self._ears = ears
        self.local_host = ""  # the address by which the coordinator was reached
        self.welcome_came = anyio.Event()
        # why there is no session, with the address; None while there is one, and at first
        self.fault: TensorHubError | None = None
        self.refusal = ""  # why the coordinator took no session of this worker, the last time
        # of the session, while there is one
        self._outbox: MemoryObjectSendStream[FromWorker] | None = None
        # all that was queued for the present session is said, or never will be
        self._outbox_done = anyio.Event()
        self._beats = Heartbeats(options.lease_s)
        self._closing = False
        self._told = set[str]()  # the faults that were logged since there was a session

    def __repr__(self) -> str:
        return f"<CoordinatorLink to {self.addresses} {'online' if self.online else 'offline'}>"

    @property
    def addresses(self) -> str:
        """For people."""
        return str(self._addresses)

    @property
    def lease_s(self) -> float:
        """The coordinator's, once it has welcomed this worker."""
        return self._beats.lease_s

    @property
    def online(self) -> bool:
        """Whether the link has a session now, so that a message may reach the coordinator."""
        return self._outbox is not None

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

    def begin_closing(self) -> None:
        """Connect no more once this session ends."""
        self._closing = True

    async def close(self, last_words: FromWorker) -> None:
        """Say this, and end the session when all is said."""
        self.begin_closing()
        if self._outbox is not None:
            self.say(last_words)
            await self._outbox.aclose()
            await self._outbox_done.wait()

    # ---------------------------------------------------------------------------------------------
    # connecting

    async def connect_first(self) -> Messages:
        """A connection to the coordinator. If none can be reached yet, it is waited for,
        `Options.coordinator_wait_s` long. Raises as `Search.run`.
        """
        for_s = self._options.coordinator_wait_s

        def failed(error: TensorHubError) -> None:
            if for_s > 0 and self._is_news(error):
                log.warning(
                    "coordinator_awaited",
                    coordinator=self.addresses,
                    for_s=for_s,
                    reason=str(error),
                )

        return await Search(self._addresses, self._connect, failed, for_s, is_first=True).run()

    async def keep(self, first: Messages, ready: Callable[[], None]) -> None:
        """Hold a session; after its end, another one. `ready` is called when one is up."""
        messages, wait_s = first, RECONNECT_S
        while True:
            if await self._hold_session(messages, ready):
                wait_s = RECONNECT_S
            else:
                await anyio.sleep(wait_s)
                wait_s = min(2 * wait_s, REFUSED_S_MAX)
            if self._closing:
                return
            search = Search(self._addresses, self._connect, self._failed, inf, is_first=False)
            messages = await search.run()

    def _failed(self, error: TensorHubError) -> None:
        self.fault = error
        if self._is_news(error):
            log.warning("coordinator_unreachable", coordinator=self.addresses, reason=str(error))

    def _is_news(self, error: TensorHubError) -> bool:
        """Whether the log does not give this reason yet for the present lack of a session."""
        known = len(self._told)
        if known < FAULTS_TOLD_MAX:
            self._told.add(str(error))
        return len(self._told) > known

    async def _connect(self, address: str, version: int = PROTOCOL_VERSION) -> Messages:
        with anyio.move_on_after(self._options.connect_timeout_s) as scope:
            host, port = parse_address(address)
            stream = await self._dial(host, port)
        if scope.cancelled_caught:
            raise OperationTimeout(f"no answer within {self._options.connect_timeout_s:g} s")
        connection = stream.extra(anyio.abc.SocketAttribute.raw_socket)
        close_in_children(getattr(connection, "_sock", connection))  # asyncio wraps it
        local_host = str(stream.extra(anyio.abc.SocketAttribute.local_address)[0])
        nonce = secrets.token_bytes(NONCE_BYTES)
        handshake = ClientHandshake(
            "worker", self._ears.incarnation, self._secrets[0], nonce, version=version
        )
        try:
            if self._certificates is not None:
                tls = Tls(self._certificates, "client", peer="coordinator", host=host)
                stream = sealed = TlsStream(stream, tls)
                await sealed.open(self._options.connect_timeout_s)
                handshake.binding = tls.binding
            messages = MessageStream(stream, FROM_COORDINATOR, self._options.frame_bytes_max)
            await messages.handshake(handshake, self._options.connect_timeout_s)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await stream.aclose()
            if isinstance(error, WrongVersion) and handshake.older is not None:
                log.info("older_protocol", peer=address, version=handshake.older)
                return await self._connect(address, handshake.older)
            if isinstance(error, AuthenticationFailed | ProtocolError):
                hint = path_hint(error, self._secrets[0])
                raise type(error)(f"{error}{hint}", retryable=error.retryable) from error
            raise
        messages.on_unknown = _pass_over
        self.local_host = local_host
        return messages

    # ---------------------------------------------------------------------------------------------
    # one session

    async def _hold_session(self, messages: Messages, ready: Callable[[], None]) -> bool:
        """One session, to its end. True if it was welcomed."""
        outbox, to_say = anyio.create_memory_object_stream[FromWorker](OUTBOX_MESSAGES_MAX)
        welcomed, end = anyio.Event(), "it closed the connection"
        self._beats.connected()
        self._outbox_done = anyio.Event()
        try:
            async with messages, outbox, to_say, anyio.create_task_group() as tasks:
                tasks.start_soon(self._talk, messages, to_say, tasks.cancel_scope)
                tasks.start_soon(self._beat, welcomed)
                outbox.send_nowait(self._ears.introduce())
                async for message in messages:
                    self._beats.heard(message)
                    if isinstance(message, Welcome):
                        self._outbox, self.fault = outbox, None
                        welcomed.set()
                        self.welcome_came.set()
                        self._ears.welcomed(message)
                        if self._told:  # where warnings alone are shown, their end is shown, too
                            log.warning("coordinator_found", coordinator=self.addresses)
                            self._told.clear()
                        ready()
                    elif isinstance(message, Dismissed):
                        if not self._closing:
                            log.warning("worker_dismissed", reason=message.reason)
                            self._ears.dismissed()
                        end = message.reason
                        break
                    elif isinstance(message, Refused) and message.request == NO_REQUEST:
                        refusal = message.error.error()
                        self.refusal = str(refusal)
                        raise refusal
                    elif isinstance(message, Advice):
                        log.warning("out_of_reach", reason=message.reason, advice=message.advice)
                    elif not isinstance(message, HeartbeatAck):
                        self._ears.received(message)
                tasks.cancel_scope.cancel()
        except* (ConnectionLost, TensorHubError) as group:
            end = str(group.exceptions[0])
            log.warning("coordinator_lost", coordinator=self.addresses, reason=end)
            self._told.add(end)
        finally:
            self.fault = CoordinatorUnavailable(f"{self.addresses}: {end}")
            self._outbox_done.set()
            if self._outbox is outbox:
                self._outbox = None
                self._ears.lost()
        return welcomed.is_set()

    async def _talk(
        self,
        messages: Messages,
        to_say: MemoryObjectReceiveStream[FromWorker],
        scope: anyio.CancelScope,
    ) -> None:
        try:
            async for message in to_say:
                try:
                    await messages.send(message)
                except UnspokenMessage as error:
                    log.warning("message_unknown", reason=str(error))
                    if isinstance(request := getattr(message, "request", None), int):
                        self._ears.received(Refused(request, ErrorInfo.of(error)))
        except ConnectionLost:
            self._outbox_done.set()
            return  # what the coordinator has said last is still to be read: it may say why
        self._outbox_done.set()
        scope.cancel()  # the outbox was closed: all is said

    async def _beat(self, welcomed: anyio.Event) -> None:
        """Renew the lease, and give up a session in which nothing comes back."""
        with anyio.move_on_after(self._options.connect_timeout_s):
            await welcomed.wait()
        if not welcomed.is_set():
            raise ConnectionLost(f"no welcome came within {self._options.connect_timeout_s:g} s")
        while True:
            await anyio.sleep(self._beats.every_s)
            if self._beats.is_in_vain():
                raise ConnectionLost(f"nothing was heard for {self.lease_s:g} s")
            # with one beat, it may have been this process that was stopped
            if self._beats.late_s > self._beats.every_s:
                log.warning(
                    "coordinator_behind",
                    coordinator=self.addresses,
                    seconds=self._beats.late_s,
                    reason=BEHIND,
                )
            self.say(self._beats.next())


def _pass_over(error: UnknownMessage) -> None:
    log.warning("message_unknown", reason=str(error))
