"""Messages of peers, in turns: a few messages of one session, then of the next, for a while; then
the loop's other tasks run.

Responsible for the order in which sessions are read, and for not reading from a peer that does not
take its answers. Not responsible for acting on a message (`server`), nor for answers (`session`).

A full session needs no task to be read: a readable socket puts it into the queue of turns. Its task
does all waiting: for room for a large frame or for an answer, for a peer that does not take its
answers, and for the end.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable
from weakref import WeakSet

import anyio
import anyio.lowlevel

from tensorhub.coordinator import Event, Received
from tensorhub.logs import Tally, get_logger
from tensorhub.messages import (
    Advice,
    Describe,
    Explain,
    FromWorker,
    GetEvents,
    GetManifest,
    GetPart,
    GetPublication,
    GetUpdates,
    Join,
    Register,
)
from tensorhub.protocol.secret import loopback_address
from tensorhub.runtime.control.session import ReadOnlyAnswers, Session, call_soon

ANSWERS_UNREAD_MAX = 64  # that a peer has not taken; until it does, it is not heard
MESSAGES_PER_TURN = 4  # of one session; then the next one has a turn
ADVICE = (
    "set Options.advertise or Options.listen_host there, or have it connect by an address "
    "that is not loopback"
)
# for the turns of all sessions, one message at least; then the loop does everything else
TURNS_S = 0.005

log = get_logger("tensorhub.coordinator")
_out_of_reach = Tally(log.warning, "worker_out_of_reach")

# whose answer takes time to make
LongQuestion = Describe | GetManifest | GetPart | GetPublication | GetEvents | Explain | GetUpdates


class Hearing:
    """Of one server, on the loop that runs now. `step`: takes what was heard."""

    def __init__(self, step: Callable[[Event], None], now: Callable[[], float]) -> None:
        self.now = now
        self._step = step
        self._reach = Reach()
        self._call_soon = call_soon()
        # turns, which are told until when they may last
        self._queue: deque[Callable[[float], object]] = deque()
        self._is_called = False  # the next ones will be given

    def __repr__(self) -> str:
        return f"<Hearing: {len(self._queue)} turns wait>"

    def queue(self, turn: Callable[[float], object]) -> None:
        """Give this turn after those that wait."""
        self._queue.append(turn)
        if not self._is_called:
            self._is_called = True
            self._call_soon(self._go_round)

    def _go_round(self) -> None:
        until = self.now() + TURNS_S
        while self._queue:
            self._queue.popleft()(until)
            if self.now() > until:
                break
        self._is_called = bool(self._queue)
        if self._is_called:
            self._call_soon(self._go_round)

    async def catch_up(self) -> None:
        """Until every session that waits now has had a turn."""
        is_reached = anyio.Event()
        self.queue(lambda _: is_reached.set())
        await is_reached.wait()

    def take(self, session: Session, message: FromWorker) -> None:
        """Pass on what this session has said."""
        if isinstance(message, Join) and not session.is_ending:
            session.has_joined, session.join, session.scope.deadline = True, message, math.inf
            self._reach.joined(message)
            session.messages.limit_received(session.kind.frame_bytes_max, session.kind.pot)
        elif isinstance(message, Register) and message.serves:
            self._reach.registered(session)
        self._step(Received(session.number, message))

    async def hear(self, session: Session) -> None:
        """Pass on what the peer says, for as long as it takes what it is told. Returns at its
        end.
        """
        messages, kind = session.messages, session.kind
        ear = _Ear(self, session) if kind.places is None else None
        while True:
            message = await ear.listen() if ear is not None else None
            if message is None:
                message = await messages.receive()
            if message is None:
                return
            if isinstance(message, LongQuestion):
                await self._answer_at_length(session, message)
            else:
                await session.wait_taken(
                    0 if isinstance(kind.answers, ReadOnlyAnswers) else ANSWERS_UNREAD_MAX
                )
                async with kind.places or contextlib.nullcontext():
                    self.take(session, message)
                    if ear is None:
                        # the session keeps its place until all other sessions have had a turn
                        await anyio.lowlevel.checkpoint()
            del message  # it may be large, and nothing else may come for a while

    async def _answer_at_length(self, session: Session, message: LongQuestion) -> None:
        """Make and encode a long answer, for one session at a time; all other sessions have a turn
        before the next long answer. So no peer can have many long answers made and leave them
        unread.
        """
        while True:
            await session.wait_taken(0)
            async with session.kind.turn:
                if isinstance(session.kind.answers, ReadOnlyAnswers):
                    await session.kind.answers.wait_room()
                if session.unread == 0:  # nothing is in the way: the answer is encoded at once
                    self.take(session, message)
                    if isinstance(session.kind.answers, ReadOnlyAnswers):
                        await anyio.lowlevel.checkpoint()
                    elif session.unread:
                        await session.wait_moved()
                    return


class _Ear:
    """Hears one session without a task, while `listen` waits."""

    __slots__ = ("_failure", "_hearing", "_is_open", "_is_queued", "_is_shut", "_left", "_session")

    def __init__(self, hearing: Hearing, session: Session) -> None:
        self._hearing = hearing
        self._session = session
        self._is_open = False  # False: its task hears what comes
        self._is_queued = False  # it waits for a turn
        self._is_shut = anyio.Event()  # not open any more
        self._left: FromWorker | None = None  # for the task
        self._failure: Exception | None = None  # for the task to raise

    async def listen(self) -> FromWorker | None:
        """Hear the session until its task has to go on: with this message; None: with the next one,
        or the end. Raises what `receive` raises, and whatever comes of a message.
        """
        self._is_open, self._is_shut = True, anyio.Event()
        self._session.messages.tell_news(self._news)
        self._news()  # something may lie there already
        try:
            await self._is_shut.wait()
        finally:
            self._is_open = False
            self._session.messages.tell_news(None)
        if self._failure is not None:
            raise self._failure
        left, self._left = self._left, None
        return left

    def _news(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            self._hearing.queue(self._have_turn)

    def _have_turn(self, until: float) -> None:
        self._is_queued = False
        if not self._is_open:
            return
        try:
            self._is_open = self._hear_some(until)
        # also an error that the peer did not cause: the task raises it, the loop does not log it
        except Exception as error:
            self._is_open, self._failure = False, error
        if not self._is_open:
            self._is_shut.set()

    def _hear_some(self, until: float) -> bool:
        """Whether the session can be heard on without its task."""
        hearing, session = self._hearing, self._session
        messages = session.messages
        for _ in range(MESSAGES_PER_TURN):
            message = messages.receive_nowait() if session.unread <= ANSWERS_UNREAD_MAX else None
            if message is None:
                return messages.awaits_bytes and session.unread <= ANSWERS_UNREAD_MAX
            if isinstance(message, LongQuestion):
                self._left = message
                return False
            hearing.take(session, message)
            if hearing.now() > until:
                break
        self._news()
        return True


class Reach:
    """Warns, here and at the worker, if workers of one coordinator are on several hosts, and one
    worker registers memory at an address that only its own host reaches.

    A worker listens for readers on the address by which it has reached its coordinator. On the
    coordinator's own machine, or behind a tunnel, that is 127.0.0.1. While all workers are on one
    host, nothing is wrong with it, and nothing is said.
    """

    def __init__(self) -> None:
        self._host: str | None = None  # of the first worker
        self._has_several = False  # hosts, from some time on
        # those that have registered such memory while there was one host
        self._unreachable = WeakSet[Session]()

    def joined(self, join: Join) -> None:
        """A worker of that host is here."""
        if self._host is None:
            self._host = join.location.host
        if join.location.host != self._host and not self._has_several:
            self._has_several = True
            for session in self._unreachable:
                self._warn(session)
            self._unreachable.clear()

    def registered(self, session: Session) -> None:
        """Note that a worker has registered memory, which other workers may read."""
        if session.join is None or not loopback_address(session.join.endpoints):
            return
        if self._has_several:
            self._warn(session)
        else:
            self._unreachable.add(session)

    def _warn(self, session: Session) -> None:
        assert session.join is not None
        join = session.join
        reason = (
            f"it advertises {loopback_address(join.endpoints)}, and there are workers on other "
            f"hosts than {join.location.host!r}"
        )
        _out_of_reach.count(source=join.name, reason=reason, advice=ADVICE)
        session.say(Advice(f"this worker is out of reach: {reason}", ADVICE.replace(" there", "")))
