"""One authenticated connection of a coordinator: its queue of messages to the peer, and sending
them.

Responsible for the bounded queue to a peer, for one send for all that has gathered there in a turn
of the loop, and for the turns and the room of long answers. Not responsible for reading messages
(`hearing`).

A long answer to a full session waits until there is room for it. An answer to a read-only session
never waits: it is encoded when it is queued, and `ReadOnlyAnswers` counts its bytes.
"""

from __future__ import annotations

import contextlib
import select
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import anyio.lowlevel

from tensorhub.errors import ProtocolError, StateError
from tensorhub.logs import Tally, get_logger
from tensorhub.messages import (
    Announce,
    Compare,
    Description,
    ErrorInfo,
    Events,
    Explained,
    FromCoordinator,
    FromWorker,
    Join,
    ManifestReply,
    PublicationReply,
    Refused,
    Updates,
)
from tensorhub.protocol import codec
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.protocol.pot import Pot
from tensorhub.protocol.stream import MessageStream
from tensorhub.protocol.tags import SINCE
from tensorhub.runtime.control.pulse import Pulse
from tensorhub.types import Options

OUTBOX_MESSAGES_MAX = 8192  # that a session may be behind; beyond, it is cut off
SAID_AT_ONCE_MAX = 64  # messages in one send

# what has its room taken before it is sent
LongAnswer = Description | ManifestReply | PublicationReply | Compare | Events | Explained | Updates

log = get_logger("tensorhub.coordinator")

_unknown = Tally(log.warning, "message_unknown")


class ReadOnlyAnswers:
    """Counts the bytes of every answer that is queued to a read-only session. If there are too
    many, the session that has taken nothing for the longest time is cut off.
    """

    def __init__(self, nbytes_max: int) -> None:
        self.nbytes_max = nbytes_max
        self.nbytes = 0
        # the session that has taken nothing for the longest time is first
        self._by_session: dict[Session, int] = {}
        self._cut: dict[Session, int] = {}  # those that are cut off, and have not ended yet
        self._fewer = anyio.Event()

    def __repr__(self) -> str:
        return (
            f"<ReadOnlyAnswers: {self.nbytes} of {self.nbytes_max} bytes, to "
            f"{len(self._by_session)} sessions>"
        )

    async def wait_room(self) -> None:
        """Until the sessions that are cut off have ended, if there are too many bytes."""
        while self.nbytes > self.nbytes_max:
            self._fewer = anyio.Event()
            await self._fewer.wait()

    def add(self, session: Session, nbytes: int) -> None:
        """So many bytes more are queued to this session."""
        self.nbytes += nbytes
        if session in self._cut:
            self._cut[session] += nbytes
            return
        self._by_session[session] = self._by_session.get(session, 0) + nbytes
        while self.nbytes - sum(self._cut.values()) > self.nbytes_max:
            slowest = next(iter(self._by_session))
            self._cut[slowest] = self._by_session.pop(slowest)
            slowest.cut_off("read-only sessions do not take their answers")

    def took_some(self, session: Session) -> None:
        """The peer of this session has taken something. The bytes are given back once it has taken
        everything.
        """
        nbytes = self._by_session.pop(session, 0)
        if session.unread and nbytes:
            self._by_session[session] = nbytes
        else:
            self._give_back(nbytes)

    def ended(self, session: Session) -> None:
        """Nothing is queued to this session any more."""
        self._give_back(self._by_session.pop(session, 0) + self._cut.pop(session, 0))

    def _give_back(self, nbytes: int) -> None:
        self.nbytes -= nbytes
        self._fewer.set()


@dataclass(slots=True)
class Kind:
    """What all full sessions share, or all read-only ones: so read-only sessions never keep full
    ones waiting.
    """

    frame_bytes_max: int
    pot: Pot  # for their frames that are not whole or not heard yet
    # for what is long, and on its way to them; to read-only sessions, for everything
    answers: Pot | ReadOnlyAnswers
    turn: anyio.Lock = field(default_factory=anyio.Lock)  # to be answered at length
    page_turn: anyio.Lock = field(default_factory=anyio.Lock)  # to be sent a page of digests
    # to be heard, in each round of all sessions; None: for every one
    places: anyio.Semaphore | None = None


def call_soon() -> Callable[[Callable[[], None]], object]:
    """What has the loop that runs now call something in its next turn."""
    native: Any = anyio.lowlevel.current_token().native_token
    found: Callable[[Callable[[], None]], object] = (
        getattr(native, "call_soon", None) or native.run_sync_soon
    )
    return found


class Turn:
    """What all sessions of a loop share for sending. When the loop's current turn ends, each
    session with new messages sends them. A message to many sessions is encoded once: its body goes
    into each session's own frame.
    """

    def __init__(self) -> None:
        self._call_soon = call_soon()
        self.pulse = Pulse()  # how late turns come
        self._sessions: dict[Session, None] = {}  # to speak to
        self._message: Announce | None = None  # what was encoded last, and its body by version
        self._bodies: dict[int, bytes] = {}

    def __repr__(self) -> str:
        return f"<Turn of {len(self._sessions)} sessions>"

    def speaks_to(self, session: Session) -> None:
        """Once, however often this is called before."""
        if not self._sessions:
            self._call_soon(self._speak)
        self._sessions[session] = None

    def _speak(self) -> None:
        sessions, self._sessions = self._sessions, {}
        for session in sessions:
            session.speak()

    def encoded(self, message: FromCoordinator, version: int) -> bytes:
        """The body of its frame, for a peer of that version of the protocol."""
        if not isinstance(message, Announce):
            return codec.written_for(version).encode(message)
        if message is not self._message:
            self._bodies, self._message = {}, message
        if (body := self._bodies.get(version)) is None:
            body = self._bodies[version] = codec.written_for(version).encode(message)
        return body


class Session:
    """`secret`: by which its peer has proved itself, or to which its read-only one belongs."""

    def __init__(
        self,
        number: int,
        messages: MessageStream[FromWorker],
        secret: bytes,
        kind: Kind,
        options: Options,
        turn: Turn,
    ) -> None:
        self.number = number
        self.messages = messages
        messages.on_unknown = self._refuse_unknown
        self.secret = secret
        self.kind = kind
        self.scope = anyio.CancelScope()
        self.has_joined = False  # it has said Join before it had to end
        self.join: Join | None = None  # what it said then
        self.is_ending = False  # its last words are being said
        # messages that the peer has not taken, those that are on their way included
        self.unread = 0
        self._options = options
        self._turn = turn
        # bytes: encoded already; None: nothing more is said
        self._outbox: deque[FromCoordinator | bytes | None] = deque()
        self._has_words = anyio.Event()  # for `talk`
        self._talks = False  # `talk` is at it
        self._begun = 0  # messages that `speak` has sent in part
        self._failure: Exception | None = None  # of `speak`
        self._moved = anyio.Event()  # see `wait_moved`

    def __repr__(self) -> str:
        return (
            f"<Session {self.number}: {self.unread} unread{', ending' if self.is_ending else ''}>"
        )

    def is_deaf(self) -> bool:
        """Whether it is the peer that does not take what it is told."""
        return self.unread > 0 and not self.messages.readiness & select.POLLOUT

    async def wait_taken(self, unread_max: int) -> None:
        """Until the peer has not taken at most so many messages."""
        while self.unread > unread_max:
            await self.wait_moved()

    async def wait_moved(self) -> None:
        """Until another one is made ready for the peer, or is taken."""
        self._moved = anyio.Event()
        await self._moved.wait()

    def say(self, message: FromCoordinator | None) -> None:
        """Queue this for the peer, if its version of the protocol has it. None: end the session
        when all is said.
        """
        if SINCE.get(type(message), 0) > self.messages.version:
            return
        if len(self._outbox) >= OUTBOX_MESSAGES_MAX:
            self.cut_off(f"it has {OUTBOX_MESSAGES_MAX} messages to take")
            return
        self.unread += 1
        if message is None or isinstance(self.kind.answers, Pot):
            self._outbox.append(message)
        else:
            body = self._encoded(message)
            self._outbox.append(body)
            self.kind.answers.add(self, len(body))
        if not self._talks:
            self._turn.speaks_to(self)

    def _refuse_unknown(self, error: codec.UnknownMessage) -> None:
        _unknown.count(session=self.number, reason=str(error))
        if error.request is not None:
            self.say(Refused(error.request, ErrorInfo.of(error)))

    def cut_off(self, reason: str) -> None:
        """End the session without its last words."""
        log.warning("session_too_slow", session=self.number, reason=reason)
        self._outbox.clear()
        self.scope.cancel()

    def speak(self) -> None:
        """Send at once what is queued, as far as the peer takes it. Sending that has to wait is
        left to `talk`.
        """
        if self._talks:
            return
        try:
            bodies = self._take_words()
            if bodies and self.messages.send_nowait(*bodies):
                self._were_said(len(bodies))
            else:
                self._begun = len(bodies)
        # also an error that the peer did not cause: the task raises it, the loop does not log it
        except Exception as error:
            self._failure = error
        if self._has_to_talk:
            self._talks = True
            self._has_words.set()

    @property
    def _has_to_talk(self) -> bool:
        return bool(self._outbox or self._begun or self._failure)

    async def talk(self) -> None:
        """Send what is queued and `speak` has left, until the session ends. Raises ConnectionLost,
        ProtocolError.
        """
        while True:
            self._talks = self._has_to_talk
            if not self._talks:
                self._has_words = anyio.Event()
                await self._has_words.wait()
                self._talks = True
            if self._failure is not None:
                raise self._failure
            if (bodies := self._take_words()) or self._begun:
                self._moved.set()
                await self.messages.send_encoded(*bodies)
                begun, self._begun = self._begun, 0
                self._were_said(begun + len(bodies))
            elif isinstance(message := self._outbox.popleft(), LongAnswer):
                assert isinstance(self.kind.answers, Pot)
                await self._say_at_length(message, self.kind.answers)
                self._were_said(1)
            else:
                return
            if self._outbox:
                await anyio.lowlevel.checkpoint()

    def _were_said(self, messages: int) -> None:
        self.unread -= messages
        self._moved.set()
        if isinstance(self.kind.answers, ReadOnlyAnswers):
            self.kind.answers.took_some(self)

    def _take_words(self) -> list[bytes]:
        """The next messages, up to one that is long, or the end."""
        bodies = list[bytes]()
        while self._outbox and len(bodies) < SAID_AT_ONCE_MAX:
            message = self._outbox[0]
            if message is None or isinstance(message, LongAnswer):
                break
            bodies.append(
                message
                if isinstance(message, bytes)
                else self._turn.encoded(message, self.messages.version)
            )
            self._outbox.popleft()
        return bodies

    def _encoded(self, message: FromCoordinator) -> bytes:
        """The body of its frame."""
        if not isinstance(message, LongAnswer):
            return self._turn.encoded(message, self.messages.version)
        if isinstance(message, Description):
            late_s = self._turn.pulse.behind_s
            models: Any = tuple(
                replace(model, coordinator_behind_s=late_s) for model in message.models
            )
            message = replace(message, models=models)
        return _encoded(message, self.messages.version, self._options.frame_bytes_max)

    async def _say_at_length(self, message: LongAnswer, answers: Pot) -> None:
        """The turn stays this session's until there is room for its answer, so that no other answer
        is made meanwhile. Nothing else can be said while an answer is on its way, so the peer must
        take it within a lease.
        """
        # Pages go unasked to many at once: one is encoded and waits for room, and an answer waits
        # for no more than that.
        async with (
            self.kind.page_turn if isinstance(message, Compare) else contextlib.nullcontext()
        ):
            body = self._encoded(message)
            await answers.take(len(body))
        try:
            self._moved.set()
            with anyio.move_on_after(self._options.lease_s) as sending:
                await self.messages.send_encoded(body)
            if sending.cancelled_caught:
                text = (
                    f"an answer of {len(body)} bytes was not taken within "
                    f"{self._options.lease_s:g} s"
                )
                raise ConnectionLost(text)
        finally:
            answers.give_back(len(body))


def _encoded(message: LongAnswer, version: int, bytes_max: int) -> bytes:
    """Its body; if no frame can carry that, a refusal's."""
    encode = codec.written_for(version).encode
    if isinstance(message, Compare):
        return encode(message)
    try:
        body = encode(message)
        if len(body) <= bytes_max:
            return body
        what = (
            f"it has {len(body)} bytes, frames have {bytes_max} at most (Options.frame_bytes_max)"
        )
    except ProtocolError as error:
        what = str(error)
    return encode(
        Refused(message.request, ErrorInfo.of(StateError(f"the answer cannot be sent: {what}")))
    )
