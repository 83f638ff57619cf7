"""The caps of read-only sessions, and what a coordinator does for many of their calls at a time."""

from __future__ import annotations

import pytest

from tensorhub.coordinator import Connected, Disconnected, Received, Tick, limits as real
from tensorhub.coordinator.limits import IDLE_S
from tensorhub.errors import CoordinatorUnavailable, RegistrationError
from tensorhub.messages import (
    WATCHES_MAX,
    Announce,
    Describe,
    Dismissed,
    Fill,
    Heartbeat,
    HeartbeatAck,
    Join,
    Outcome,
    Refused,
    Register,
    Registered,
    Unwatch,
    Watch,
    Welcome,
)
from tensorhub.types import Endpoint, Location, Medium, OpKey, OpKind, Options, Purpose
from tests.coordinator.test_limits import Desk, refusal


class Lobby(Desk):
    """With read-only sessions."""

    def reader(self, session: int, *, joins: bool = True, incarnation: str = "") -> None:
        self.step(Connected(session, incarnation or f"read-only-{session}", "worker", True))
        if joins:
            self.joins(session)

    def joins(self, session: int) -> None:
        self.say(session, Join(f"r{session}", Location(), (Endpoint("tcp", "x"),), 1, 0))

    def observer(self, session: int) -> None:
        self.step(Connected(session, f"life{session}", "observer"))

    def fetches(self, session: int, name: str, model: str = "m") -> object:
        """Registers what it fetches into."""
        use = (False, False, Medium.DEVICE, Purpose.USE, "", 1, 1, b"", None)
        name = f"read-only-{name}"
        return self.say(session, Register(next(self.requests), name, model, name, 0, 0, 1, *use))

    def asks(
        self,
        session: int,
        name: str,
        model: str = "m",
        timeout_s: float = 1000.0,
        selector: int | str = "latest",
    ) -> OpKey:
        """Registers, and calls fetch."""
        registered = self.fetches(session, name, model)
        assert isinstance(registered, Registered)
        key = OpKey(model, f"read-only-{name}", registered.epoch, registered.sequence)
        self.say(
            session,
            Fill(key, 0, key.group, OpKind.FETCH, selector, None, 1, False, False, timeout_s),
        )
        return key

    def ticks(self) -> int:
        """How often it was time for another step at once."""
        steps = 0
        while (due := self.core.next_deadline()) is not None and due <= self.now:
            self.step(Tick())
            steps += 1
        return steps

    def readers(self, *names: str) -> list[int]:
        """How many read from each of these at a time, so far as is known here."""
        return [
            member.holding.traffic.active_readers
            for name in names
            if (member := self.core.cluster.members[name]).holding
        ]

    def wait(self, seconds: float, beating: tuple[int, ...] = ()) -> None:
        """So long, with heartbeats of these sessions."""
        until = self.now + seconds
        while self.now < until:
            self.now += min(2.0, until - self.now)
            for session in beating:
                self.step(Received(session, Heartbeat(1)))
            self.step(Tick())

    def is_open(self, session: int) -> bool:
        return session in self.core.cluster.sessions


# --------------------------------------------------------------------------------------------------
# names


def test_eight_readers_that_watch_all_they_can_leave_every_model_to_trainers() -> None:
    lobby = Lobby()
    for session in range(1, 9):
        lobby.step(Connected(session, f"read-only-{session}", "worker", True))
        for number in range(2 * WATCHES_MAX):
            lobby.core.step(Received(session, Watch(f"m{session}.{number}")), lobby.now)
    lobby.core.check_invariants()
    assert not lobby.core.cluster.models
    lobby.connect(100)
    assert isinstance(lobby.register(100, "a"), Registered)


def test_a_reader_that_is_back_is_away_no_more() -> None:
    """Else it would be lost, though it is connected, when too many others are away."""
    lobby = Lobby()
    lobby.reader(1, incarnation="read-only")
    lobby.step(Disconnected(1))
    assert [worker.incarnation for worker in lobby.core.cluster.read_only.away] == ["read-only"]
    lobby.reader(2, incarnation="read-only")
    assert not lobby.core.cluster.read_only.away


def test_a_name_that_was_watched_before_there_was_such_a_model_is_announced() -> None:
    lobby = Lobby()
    lobby.reader(1)
    assert lobby.say(1, Watch("m")) == Announce("m", None, 0)
    lobby.connect(2)
    lobby.register(2, "a")
    assert isinstance(lobby.publish(2, "a", 1, 0), Outcome)
    last = lobby.heard[1][-1]
    assert isinstance(last, Announce)
    assert last.newest is not None
    assert last.newest.version == 1


# --------------------------------------------------------------------------------------------------
# many calls


# --------------------------------------------------------------------------------------------------
# caps


def test_at_the_cap_of_registrations_the_reader_that_was_idle_longest_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(real, "READ_ONLY_REGISTRATIONS_MAX", 3)
    lobby = Lobby()
    for session in (1, 2, 3, 4):
        lobby.reader(session)
    for session in (1, 2, 3):
        lobby.fetches(session, f"{session}")
    lobby.say(1, Describe(1, None))
    assert isinstance(lobby.fetches(4, "4"), Registered)
    assert isinstance(lobby.heard[2][-1], Dismissed)
    assert "READ_ONLY_REGISTRATIONS_MAX" in lobby.heard[2][-1].reason
    assert lobby.core.cluster.read_only.registrations == 3
    lobby.step(Disconnected(1))  # it may come back, and is idle
    assert isinstance(lobby.fetches(4, "5"), Registered)
    assert "read-only-1" not in lobby.core.cluster.workers
    assert list(lobby.closed) == [2]


def test_one_reader_is_refused_where_it_has_all_registrations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(real, "READ_ONLY_REGISTRATIONS_MAX", 2)
    lobby = Lobby()
    lobby.reader(1)
    answers = [lobby.fetches(1, str(number)) for number in range(3)]
    assert [type(answer) for answer in answers] == [Registered] * 2 + [Refused]
    error = refusal(answers[-1])
    assert isinstance(error, RegistrationError)
    assert "READ_ONLY_REGISTRATIONS_MAX" in str(error)
    assert error.retryable
    lobby.connect(2)
    assert all(isinstance(lobby.register(2, str(number)), Registered) for number in range(3))


def test_at_the_cap_of_watches_the_reader_that_was_idle_longest_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(real, "READ_ONLY_WATCHES_MAX", 3)
    lobby = Lobby()
    for session in (1, 2, 3):
        lobby.reader(session)
    for session in (1, 2, 2, 3):
        assert isinstance(lobby.say(session, Watch(f"m{len(lobby.heard[session])}")), Announce)
    assert "READ_ONLY_WATCHES_MAX" in lobby.closed[1]
    assert lobby.core.cluster.read_only.watches == 3
    lobby.step(Disconnected(3))
    lobby.say(2, Watch("more"))
    error = refusal(lobby.say(2, Watch("one more")))  # there is no other one
    assert isinstance(error, CoordinatorUnavailable)
    assert not lobby.core.cluster.read_only.watches
    lobby.connect(4)
    for number in range(4):
        assert isinstance(lobby.say(4, Watch(f"m{number}")), Announce)


def test_at_the_cap_of_watches_a_reader_that_watches_nothing_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(real, "READ_ONLY_WATCHES_MAX", 1)
    lobby = Lobby()
    for session in (1, 2, 3):
        lobby.reader(session)
    for session in (2, 3):
        assert isinstance(lobby.say(session, Watch("m")), Announce)
    assert list(lobby.closed) == [2]


def test_readers_have_half_of_the_sessions_and_the_one_that_was_idle_longest_makes_room() -> None:
    lobby = Lobby(Options(sessions_max=8))
    for session in range(1, 5):
        lobby.reader(session)
    lobby.say(1, Watch("m"))
    lobby.step(Received(2, Heartbeat(1)))  # which is no call
    lobby.reader(5)
    assert list(lobby.closed) == [2]
    assert isinstance(refusal(lobby.heard[2][-1]), CoordinatorUnavailable)
    assert lobby.say(2, Watch("m")) is None  # what it still says is not heard
    for session in range(10, 14):
        lobby.connect(session)
        assert lobby.is_open(session)
    lobby.reader(6)
    assert "Options.sessions_max" in lobby.closed[6]  # all are taken


# --------------------------------------------------------------------------------------------------
# idle


def test_a_reader_that_wants_nothing_is_closed_and_quiet_watchers_stay() -> None:
    lobby = Lobby()
    for session in range(1, 6):
        lobby.reader(session)
    lobby.connect(10)
    lobby.say(1, Watch("m"))
    lobby.fetches(2, "f")
    everybody = (1, 2, 3, 4, 5, 10)
    lobby.wait(IDLE_S / 2, everybody)
    lobby.say(3, Describe(1, None))
    lobby.say(5, Watch("m"))
    lobby.wait(IDLE_S / 2 + 1, everybody)
    assert list(lobby.closed) == [4]
    assert lobby.closed[4] == "no registration, watch or call came for 60 s"
    lobby.say(5, Unwatch("m"))
    lobby.wait(IDLE_S - 5, everybody)
    assert list(lobby.closed) == [4, 3]
    lobby.wait(10 * IDLE_S, everybody)
    assert list(lobby.closed) == [4, 3, 5]
    lobby.reader(11, incarnation="read-only-4")  # and may come back
    assert isinstance(lobby.heard[11][-1], Welcome)


def test_an_observer_stays_as_long_as_it_beats_and_waits_for_something() -> None:
    lobby = Lobby()
    for session in (1, 2, 3):
        lobby.observer(session)
        assert lobby.say(session, Heartbeat(7)) == HeartbeatAck(7, lobby.now)
    for session in (1, 2):
        lobby.say(session, Watch("m"))
    lobby.wait(11, (1, 3))
    assert lobby.closed[2].startswith("no heartbeat, watch or call came for 1")
    lobby.wait(IDLE_S, (1, 3))
    assert set(lobby.closed) == {2, 3}
    lobby.step(Disconnected(1))
    lobby.wait(IDLE_S)
    assert set(lobby.closed) == {2, 3}


# --------------------------------------------------------------------------------------------------
# shares
