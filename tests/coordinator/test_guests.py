"""What sessions that may change nothing take of a coordinator, and how they give way: to workers, and to one another."""

from __future__ import annotations

from collections import Counter

import pytest

from tensorhub.coordinator import Connected, Disconnected, Persisted, Received, Silent, Tick, limits as real, operations
from tensorhub.coordinator.entities import Model, Operation
from tensorhub.coordinator.limits import GUEST_IDLE_S, NOTED_PER_STEP, TIMERS_PER_STEP, WOKEN_PER_STEP
from tensorhub.coordinator.operations import Operations
from tensorhub.errors import CoordinatorUnavailable, RegistrationError
from tensorhub.messages import (
    WATCHES_MAX,
    Abandon,
    AddSource,
    Announce,
    CutReader,
    Deregister,
    Describe,
    Description,
    Dismissed,
    DropSource,
    ErrorInfo,
    Fenced,
    Fill,
    Heartbeat,
    HeartbeatAck,
    Join,
    Leave,
    LeaveGranted,
    LeaveRequest,
    Outcome,
    Prepared,
    ReaderCut,
    ReadFailed,
    Refused,
    Register,
    Registered,
    Retain,
    Rollback,
    Start,
    Unwatch,
    Watch,
    Welcome,
)
from tensorhub.testing import CHUNKS
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.types import Endpoint, Location, Medium, OpKey, OpKind, Options, Purpose
from tests.coordinator.test_limits import Desk, refusal

HERE, THERE = "10.0.0.1", "10.0.0.2"


class Lobby(Desk):
    """With guests."""

    def guest(self, session: int, origin: str = HERE, *, joins: bool = True, incarnation: str = "") -> None:
        self.step(Connected(session, incarnation or f"read-only-{session}", "worker", True, origin))
        if joins:
            self.joins(session)

    def joins(self, session: int) -> None:
        self.say(session, Join(f"g{session}", Location(), (Endpoint("tcp", "x"),), 1, 0))

    def newcomer(self, session: int, origin: str = HERE, role: str = "worker") -> None:
        self.step(Connected(session, f"life{session}", role, False, origin))

    def fetches(self, session: int, name: str, model: str = "m") -> object:
        """Registers what it fetches into."""
        use = (False, False, Medium.DEVICE, Purpose.USE, "", 1, 1, b"", None)
        name = f"read-only-{name}"
        return self.say(session, Register(next(self.requests), name, model, name, 0, 0, 1, *use))

    def asks(
        self, session: int, name: str, model: str = "m", timeout_s: float = 1000.0, selector: int | str = "latest"
    ) -> OpKey:
        """Registers, and calls fetch."""
        registered = self.fetches(session, name, model)
        assert isinstance(registered, Registered)
        key = OpKey(model, f"read-only-{name}", registered.epoch, registered.sequence)
        self.say(session, Fill(key, 0, key.group, OpKind.FETCH, selector, None, 1, False, False, timeout_s))
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
        return [member.holding.active_readers for name in names if (member := self.core.cluster.members[name]).holding]

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


# ------------------------------------------------------------------------------------------------ names and models


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


def test_a_guest_that_is_back_is_away_no_more() -> None:
    """Else it would be lost, though it is connected, when too many others are away."""
    lobby = Lobby()
    lobby.guest(1, incarnation="read-only")
    lobby.step(Disconnected(1))
    assert [worker.incarnation for worker in lobby.core.cluster.guests.away] == ["read-only"]
    lobby.guest(2, incarnation="read-only")
    assert not lobby.core.cluster.guests.away


def test_a_name_that_guests_wait_for_counts_as_soon_as_a_worker_retains_it() -> None:
    lobby = Lobby()
    lobby.guest(1)
    lobby.asks(1, "a", "n")
    assert lobby.core.cluster.guest_models == {"n"}
    lobby.connect(100)
    lobby.stores = False
    lobby.say(100, Retain(1, "n", 2))  # the counts are checked while it is being recorded, too
    assert not lobby.core.cluster.guest_models


def test_models_that_only_guests_wait_for_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "MODELS_MAX", 1)
    lobby = Lobby()
    lobby.guest(1)
    for name in "abc":
        assert isinstance(lobby.fetches(1, name, model=name), Registered)
    assert lobby.core.cluster.guest_models == {"a", "b", "c"}
    lobby.connect(2)
    assert isinstance(lobby.register(2, "x", model="a"), Registered)  # from now on it is a worker's
    assert lobby.core.cluster.guest_models == {"b", "c"}
    assert "MODELS_MAX" in str(refusal(lobby.register(2, "y", model="b")))
    assert "MODELS_MAX" in str(refusal(lobby.say(2, Retain(1, "b", 1))))
    lobby.say(2, Deregister(99, "x", True))
    assert lobby.core.cluster.guest_models == {"a", "b", "c"}
    lobby.say(2, Retain(1, "b", 1))
    assert lobby.core.cluster.guest_models == {"a", "c"}
    lobby.step(Disconnected(1))
    lobby.wait(11.0, (2,))
    assert list(lobby.core.cluster.models) == ["b"]
    assert not lobby.core.cluster.guest_models


def test_a_name_that_was_watched_before_there_was_such_a_model_is_announced() -> None:
    lobby = Lobby()
    lobby.guest(1)
    assert lobby.say(1, Watch("m")) == Announce("m", None)
    lobby.connect(2)
    lobby.register(2, "a")
    assert isinstance(lobby.publish(2, "a", 1, 0), Outcome)
    last = lobby.heard[1][-1]
    assert isinstance(last, Announce)
    assert last.newest is not None
    assert last.newest.version == 1


# ------------------------------------------------------------------------------------------------------ many calls


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[Operation]:
    """Each operation that was looked at, in order."""
    looked: list[Operation] = []
    settle = Operations.settle

    def noting(self: Operations, operation: Operation) -> None:
        looked.append(operation)
        settle(self, operation)

    monkeypatch.setattr(Operations, "settle", noting)
    return looked


def test_however_many_guests_wait_a_workers_step_looks_at_a_few_and_each_has_its_turn(looked: list[Operation]) -> None:
    """A step of a trainer was once as long as all that waits: half a minute for two read-only sessions' calls."""
    lobby, many = Lobby(), 3 * WOKEN_PER_STEP
    lobby.guest(1)
    for number in range(many):
        lobby.asks(1, str(number))
    lobby.connect(2)
    lobby.register(2, "t")  # some are looked at now, in vain; the others still wait for that when there is something
    looked.clear()
    lobby.core.step(Received(2, lobby.publication("t")), lobby.now)
    (record,) = lobby.core.cluster.records
    lobby.core.step(Persisted(record), lobby.now)
    assert len(looked) <= 2 * WOKEN_PER_STEP + 4
    assert lobby.ticks() >= 2
    assert {operation.key.group for operation in looked} == {"t", *(f"read-only-{number}" for number in range(many))}
    assert lobby.readers("t") == [many]
    model = lobby.core.cluster.models["m"]
    core = lobby.core.cluster
    assert not [*model.unbound, *model.guests_unbound, *core.woken, *core.woken_guests]


def test_a_workers_waiting_call_is_looked_at_in_the_same_step(looked: list[Operation]) -> None:
    lobby = Lobby()
    lobby.guest(1)
    for number in range(2 * WOKEN_PER_STEP):
        lobby.asks(1, str(number))
    lobby.connect(2)
    lobby.connect(3)
    lobby.register(2, "t")
    lobby.register(3, "r")
    key = OpKey("m", "r", lobby.core.cluster.models["m"].groups["r"].epoch, 0)
    lobby.say(3, Fill(key, 0, "r", OpKind.REPLICATE, "latest", None, 1, False, False, 1000.0))
    looked.clear()
    lobby.step(Received(2, lobby.publication("t")))
    assert isinstance(lobby.heard[3][-1], Start)


def test_a_copy_has_so_many_guests_as_readers_and_who_waits_comes_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a copy leaves, all its readers are moved in one step."""
    monkeypatch.setattr(real, "GUESTS_OF_HOLDING_MAX", 4)
    lobby = Lobby()
    lobby.connect(2)
    lobby.register(2, "t")
    lobby.publish(2, "t", 1, 0)
    lobby.guest(1)
    keys = [lobby.asks(1, str(number)) for number in range(6)]
    assert lobby.readers("t") == [4]
    waiting = [operation.state.name for operation in lobby.core.cluster.undecided.values()].count("GATHERING")
    assert waiting == 2  # and nothing was begun for them
    for done in keys[:3]:
        lobby.say(1, Abandon(done, 0, ErrorInfo("StateError", "enough", False)))
    assert lobby.readers("t") == [3]
    assert all(operation.state.name == "RUNNING" for operation in lobby.core.cluster.undecided.values())
    for number in range(6, 9):
        lobby.asks(1, str(number))
    assert lobby.readers("t") == [4]
    lobby.connect(3)
    lobby.register(3, "r")
    key = OpKey("m", "r", lobby.core.cluster.models["m"].groups["r"].epoch, 0)
    lobby.say(3, Fill(key, 0, "r", OpKind.REPLICATE, "latest", None, 1, False, False, 1000.0))
    assert lobby.readers("t", "r") == [5, 2]  # who may write waits for none of them; and it is a source, too


def test_a_guest_of_another_origin_reads_at_the_expense_of_who_has_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "GUESTS_OF_HOLDING_MAX", 4)
    lobby = Lobby()
    lobby.connect(2)
    lobby.register(2, "t")
    lobby.publish(2, "t", 1, 0)
    lobby.guest(1, HERE)
    for number in range(6):
        lobby.asks(1, str(number))
    before = len(lobby.heard[1])
    lobby.guest(3, THERE)
    for name in "ab":
        lobby.asks(3, name)
        (start,) = (heard for heard in lobby.heard[3][-1:] if isinstance(heard, Start))
        assert start.grants
    assert [type(heard) for heard in lobby.heard[1][before:]] == [DropSource] * 2
    cut = [heard for heard in lobby.heard[2] if isinstance(heard, CutReader)]
    assert [each.reader for each in cut] == ["read-only-1"] * 2
    assert lobby.readers("t") == [4]
    lobby.asks(3, "c")  # it has its part
    assert isinstance(lobby.heard[3][-1], Registered)
    assert len(lobby.heard[1]) == before + 2
    for each in cut:
        lobby.say(2, ReaderCut(each.lease))
    assert len(lobby.core.cluster.leases) == 4


def test_guests_that_have_voted_and_wait_for_agreement_are_not_among_those_who_are_asked() -> None:
    """A vote makes room for the next reader. 16,384 of them were all looked at for each one that was to be counted."""
    lobby = Lobby()
    lobby.connect(2)
    lobby.register(2, "t", manifest=make_manifest(CHUNKS, "xxh3-64").encode())
    lobby.publish(2, "t", 1, 0)
    lobby.guest(1)
    keys = [lobby.asks(1, str(number), selector=1) for number in range(3)]
    for key in keys:
        lobby.say(1, Prepared(key, 0, b"root"))
    assert lobby.readers("t") == [0]
    version = lobby.core.cluster.models["m"].versions[1]
    assert not version.bound
    assert list(version.guests_bound) == keys
    lobby.say(1, Abandon(keys[0], 0, ErrorInfo("StateError", "enough", False)))
    assert list(version.guests_bound) == keys[1:]
    lobby.say(2, Rollback(1, "back", "m", 0))
    assert not version.guests_bound
    outcomes = [heard.error for heard in lobby.heard[1] if isinstance(heard, Outcome)]
    assert [error.kind for error in outcomes if error is not None] == ["StateError", *["VersionUnavailable"] * 2]


def test_readers_of_a_copy_whose_source_has_gone_are_looked_at_some_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them waited before. Until it is its turn, each is among those that are woken."""
    monkeypatch.setattr(real, "GUESTS_OF_HOLDING_MAX", 2)
    monkeypatch.setattr(real, "WOKEN_PER_STEP", 1)
    lobby = Lobby()
    for session, name in ((2, "t"), (3, "r")):
        lobby.connect(session)
        lobby.register(session, name)
    lobby.publish(2, "t", 1, 0)
    key = OpKey("m", "r", lobby.core.cluster.models["m"].groups["r"].epoch, 0)
    lobby.say(3, Fill(key, 0, "r", OpKind.REPLICATE, "latest", None, 1, False, False, 1000.0))
    lobby.guest(1)
    keys = [lobby.asks(1, str(number)) for number in range(4)]
    assert lobby.readers("t", "r") == [3, 2]
    model = lobby.core.cluster.models["m"]
    lobby.say(2, Leave("done"))  # nobody holds all of it any more: all of them lack a source
    version = model.versions[1]
    assert list(lobby.core.cluster.woken_guests) == keys
    assert not set(keys) & version.starving.keys()
    assert lobby.ticks() == len(keys)
    assert [key for key in version.starving if key in keys] == keys


def test_guests_whose_source_leaves_are_moved_in_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weighs all sources: where a thousand held the version, 256 of them made a step of `unpublish` take 3.5 s."""
    monkeypatch.setattr(real, "WOKEN_PER_STEP", 1)
    lobby = Lobby()
    for session, name in ((2, "t"), (3, "r"), (4, "s")):
        lobby.connect(session)
        lobby.register(session, name)
    lobby.publish(2, "t", 1, 0)
    lobby.guest(1)
    keys = [lobby.asks(1, str(number)) for number in range(4)]
    for session, name in ((3, "r"), (4, "s")):
        key = OpKey("m", name, lobby.core.cluster.models["m"].groups[name].epoch, 0)
        lobby.say(session, Fill(key, 0, name, OpKind.REPLICATE, "latest", None, 1, False, False, 1000.0))
        lobby.say(session, Prepared(key, 0))
    assert lobby.readers("t", "r", "s") == [4, 0, 0]
    before = len(lobby.heard[1])
    lobby.say(2, LeaveRequest(1, "t", 1, 10.0, False, False))
    assert lobby.heard[1][before:] == []
    assert lobby.ticks() == len(keys)
    moves = [type(heard) for heard in lobby.heard[1][before:]]
    assert moves == [AddSource, DropSource] * len(keys)
    assert lobby.readers("r", "s") == [2, 2]
    dropped = [heard for heard in lobby.heard[1] if isinstance(heard, DropSource)]
    for drop in dropped:
        lobby.say(1, ReadFailed(drop.key, 0, drop.lease, "dropped", ""))
    assert isinstance(lobby.heard[2][-1], LeaveGranted)


def test_what_is_held_is_worked_out_once_for_all_calls_that_a_rollback_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at all holders of all versions."""
    worked_out = list[str]()

    def held_text(model: Model) -> str:
        worked_out.append(model.name)
        return "held now"

    monkeypatch.setattr(operations, "held_text", held_text)
    lobby = Lobby()
    lobby.connect(2)
    lobby.register(2, "t")
    lobby.publish(2, "t", 1, 0)
    lobby.guest(1)
    for number in range(5):
        lobby.asks(1, str(number))
    lobby.say(2, Rollback(1, "back", "m", 0))
    ended = [heard.error.message for heard in lobby.heard[1] if isinstance(heard, Outcome) and heard.error is not None]
    assert len(ended) == 5
    assert all(text.endswith("held now") for text in ended)
    assert worked_out == ["m"]


def test_guests_that_have_voted_wrongly_keep_no_version_that_nobody_holds() -> None:
    """Each was one more to look at in every step, for as long as its guest liked."""
    lobby = Lobby()
    lobby.connect(2)
    lobby.register(2, "t", manifest=make_manifest(CHUNKS, "xxh3-64").encode())
    lobby.guest(1)
    for number in range(1, 6):
        lobby.publish(2, "t", number, number - 1)
        lobby.say(1, Prepared(lobby.asks(1, str(number)), 0, b"wrong"))
        lobby.say(2, LeaveRequest(number, "t", number, 10.0, False, False))
        lobby.say(2, Fenced("t", number))
    assert sorted(lobby.core.cluster.models["m"].versions) == [4, 5]
    errors = [heard.error for heard in lobby.heard[1] if isinstance(heard, Outcome)]
    assert len(errors) == 3
    assert all(error is not None and "newer ones were published" in error.message for error in errors)


def test_a_guest_that_never_had_its_turn_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "GUESTS_OF_HOLDING_MAX", 1)
    lobby = Lobby()
    lobby.connect(2)
    lobby.register(2, "t")
    lobby.publish(2, "t", 1, 0)
    lobby.guest(1)
    lobby.asks(1, "a")
    lobby.asks(1, "b", timeout_s=5.0)
    lobby.wait(6.0, (1, 2))
    (outcome,) = (heard for heard in lobby.heard[1] if isinstance(heard, Outcome))
    assert outcome.error is not None
    assert "has room for another read-only reader (GUESTS_OF_HOLDING_MAX)" in outcome.error.message


def test_calls_that_are_over_at_once_end_in_several_steps() -> None:
    lobby, many = Lobby(), 3 * TIMERS_PER_STEP
    lobby.guest(1)
    for number in range(many):
        lobby.asks(1, str(number), timeout_s=5.0)
    lobby.say(1, Heartbeat(1))
    lobby.now += 6.0
    lobby.step(Received(1, Heartbeat(1)))
    assert len(lobby.core.cluster.undecided) >= many - TIMERS_PER_STEP
    assert lobby.ticks() >= 2
    assert not lobby.core.cluster.undecided


def test_of_guests_that_are_lost_at_once_a_step_takes_as_many_as_have_not_much() -> None:
    lobby = Lobby()
    for session in (1, 2, 3):
        lobby.guest(session)
        for number in range(NOTED_PER_STEP // 2):
            lobby.fetches(session, f"{session}-{number}")
    lobby.now += 20.0
    lobby.ticks()
    assert len(lobby.core.cluster.workers) == 3  # the coordinator did not run for so long: nobody was listened to
    lobby.now += lobby.core.cluster.options.lease_s
    for left in (2, 1, 0):
        lobby.step(Silent((1, 2, 3)))
        assert len(lobby.core.cluster.workers) == left


def test_of_guests_and_their_leases_a_description_tells_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "DESCRIBED_MAX", 3)
    lobby = Lobby()
    lobby.connect(100)
    lobby.register(100, "t")
    lobby.publish(100, "t", 1, 0)
    for session in range(1, 6):
        lobby.guest(session)
        lobby.asks(session, str(session))
    for session, name in ((101, "r"), (102, "s")):
        lobby.connect(session)
        lobby.register(session, name)
        key = OpKey("m", name, lobby.core.cluster.models["m"].groups[name].epoch, 0)
        lobby.say(session, Fill(key, 0, name, OpKind.REPLICATE, "latest", None, 1, False, False, 1000.0))
    description = lobby.say(100, Describe(1, "m", None))
    assert isinstance(description, Description)
    (model,) = description.models
    assert Counter(worker.name[0] for worker in model.workers) == {"w": 3, "g": 3}
    assert Counter(lease.reader[0] for lease in model.leases) == {"w": 2, "g": 3}


# --------------------------------------------------------------------------------------------------- registrations


def test_readers_registrations_leave_half_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "REGISTRATIONS_MAX", 8)
    lobby = Lobby()
    lobby.guest(1)
    answers = [lobby.fetches(1, str(number)) for number in range(5)]
    assert [type(answer) for answer in answers] == [Registered] * 4 + [Refused]
    error = refusal(answers[-1])
    assert isinstance(error, RegistrationError)
    assert "Options.guest_share" in str(error)
    assert error.retryable
    lobby.connect(2)
    assert all(isinstance(lobby.register(2, str(number)), Registered) for number in range(4))
    assert "REGISTRATIONS_MAX" in str(refusal(lobby.register(2, "9")))


def test_who_has_most_registrations_gives_way_to_who_has_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "REGISTRATIONS_MAX", 8)
    lobby = Lobby()
    for session, origin in ((1, HERE), (2, HERE), (3, THERE)):
        lobby.guest(session, origin)
    assert all(isinstance(lobby.fetches(1, f"1.{number}"), Registered) for number in range(4))
    assert isinstance(lobby.fetches(2, "2.0"), Registered)  # of the same origin
    assert "Options.guest_share" in lobby.closed[1]
    assert isinstance(lobby.heard[1][-1], Dismissed)
    assert all(isinstance(lobby.fetches(2, f"2.{number}"), Registered) for number in (1, 2, 3))
    assert isinstance(lobby.fetches(3, "3.0"), Registered)  # of another one
    assert 2 in lobby.closed
    assert lobby.core.cluster.guests.registrations.total == 1


def test_readers_registrations_have_a_bound_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them may be of one model, which is described as a whole."""
    monkeypatch.setattr(real, "GUEST_REGISTRATIONS_MAX", 2)
    lobby = Lobby()
    lobby.guest(1)
    assert [type(lobby.fetches(1, str(number))) for number in range(3)] == [Registered] * 2 + [Refused]


def test_one_readers_registrations_are_bounded_since_all_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """8,192 calls of one session that leaves are half a second of one step."""
    monkeypatch.setattr(real, "REGISTRATIONS_OF_GUEST_MAX", 2)
    lobby = Lobby()
    lobby.guest(1)
    answers = [lobby.fetches(1, str(number)) for number in range(3)]
    assert [type(answer) for answer in answers] == [Registered] * 2 + [Refused]
    assert "REGISTRATIONS_OF_GUEST_MAX" in str(refusal(answers[-1]))
    lobby.connect(2)
    assert all(isinstance(lobby.register(2, str(number)), Registered) for number in range(3))


# --------------------------------------------------------------------------------------------------------- watches


def test_watches_of_guests_leave_half_to_workers_and_are_fair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "WATCHED_MAX", 8)
    lobby = Lobby()
    for session, origin in ((1, HERE), (2, HERE), (3, THERE)):
        lobby.guest(session, origin)
    for number in range(4):
        lobby.say(1, Watch(f"m{number}"))
    assert isinstance(lobby.say(2, Watch("n")), Announce)
    assert "Options.guest_share" in lobby.closed[1]
    for number in range(3):
        lobby.say(2, Watch(f"m{number}"))
    lobby.connect(4)
    for number in range(4):
        assert isinstance(lobby.say(4, Watch(f"m{number}")), Announce)
    assert isinstance(lobby.say(3, Watch("n")), Announce)
    assert "Options.guest_share" in lobby.closed[2]
    for number in range(3):
        lobby.say(3, Watch(f"m{number}"))
    error = refusal(lobby.say(3, Watch("one more")))  # it is who has most
    assert isinstance(error, CoordinatorUnavailable)
    assert "Options.guest_share" in lobby.closed[3]
    assert not lobby.core.cluster.guests.watches.total
    assert lobby.core.cluster.watched == 4


# ---------------------------------------------------------------------------------------------------------- places


def test_readers_have_half_of_the_sessions_fair_by_origin() -> None:
    lobby = Lobby(Options(sessions_max=8))
    for session in range(1, 5):
        lobby.guest(session, HERE)
    lobby.guest(5, HERE, joins=False)
    assert "Options.guest_share" in lobby.closed[5]
    assert isinstance(refusal(lobby.heard[5][-1]), CoordinatorUnavailable)
    lobby.guest(6, THERE)
    lobby.guest(7, THERE)
    assert set(lobby.closed) == {5, 1, 2}
    lobby.guest(8, THERE, joins=False)
    assert 8 in lobby.closed  # each has half
    for session in range(10, 14):
        lobby.connect(session)
    assert not lobby.closed.keys() & range(10, 14)


def test_who_has_not_joined_gives_way_where_sessions_are_used_up() -> None:
    lobby = Lobby(Options(sessions_max=6))
    lobby.guest(1)
    for session in range(2, 5):
        lobby.newcomer(session, HERE)
    for session in range(5, 7):
        lobby.newcomer(session, THERE)
    lobby.connect(7)
    assert list(lobby.closed) == [2]  # the oldest of the origin that has most
    lobby.connect(8)
    lobby.connect(9)
    assert len(lobby.closed) == 3
    assert lobby.is_open(1)
    lobby.connect(10)
    assert "Options.sessions_max" in lobby.closed[10]  # what guests have left is their share


def test_what_one_that_was_ended_still_says_is_not_heard() -> None:
    lobby = Lobby(Options(sessions_max=2))
    lobby.guest(1, HERE)
    lobby.guest(2, HERE, joins=False)
    assert 2 in lobby.closed
    lobby.guest(3, THERE, joins=False)
    assert 3 in lobby.closed  # there is but one place
    assert lobby.say(3, Watch("m")) is None
    assert not lobby.core.cluster.watchers


def test_read_only_workers_that_come_and_go_leave_workers_their_places() -> None:
    lobby = Lobby(Options(sessions_max=4))
    for session in range(1, 40):
        lobby.guest(session)
        lobby.step(Disconnected(session))
    assert len(lobby.core.cluster.workers) == 2
    lobby.guest(50, incarnation="read-only-39")  # it is back within its lease
    welcome = lobby.heard[50][-1]
    assert isinstance(welcome, Welcome)
    assert welcome.known
    for session in range(100, 102):
        lobby.connect(session)
        assert lobby.is_open(session)


# ----------------------------------------------------------------------------------------------------------- idle


def test_a_reader_that_wants_nothing_is_closed_and_quiet_watchers_stay() -> None:
    lobby = Lobby()
    for session in range(1, 6):
        lobby.guest(session)
    lobby.connect(10)
    lobby.say(1, Watch("m"))
    lobby.fetches(2, "f")
    everybody = (1, 2, 3, 4, 5, 10)
    lobby.wait(GUEST_IDLE_S / 2, everybody)
    lobby.say(3, Describe(1, None))
    lobby.say(5, Watch("m"))
    lobby.wait(GUEST_IDLE_S / 2 + 1, everybody)
    assert list(lobby.closed) == [4]
    assert lobby.closed[4] == "no registration, watch or call came for 60 s"
    lobby.say(5, Unwatch("m"))
    lobby.wait(GUEST_IDLE_S - 5, everybody)
    assert list(lobby.closed) == [4, 3]
    lobby.wait(10 * GUEST_IDLE_S, everybody)
    assert list(lobby.closed) == [4, 3, 5]
    lobby.guest(11, incarnation="read-only-4")  # and may come back
    assert isinstance(lobby.heard[11][-1], Welcome)


def test_a_thousand_quiet_readers_of_one_address_stay() -> None:
    lobby = Lobby()
    for session in range(1, 1001):
        lobby.core.step(Connected(session, f"read-only-{session}", "worker", True, HERE), lobby.now)
        lobby.core.step(Received(session, Join(f"g{session}", Location(), (), 1, 0)), lobby.now)
        lobby.core.step(Received(session, Watch("actor")), lobby.now)
    for _ in range(24):
        lobby.now += 5
        for session in range(1, 1001):
            lobby.core.step(Received(session, Heartbeat(1)), lobby.now)
        lobby.step(Tick())
    assert len(lobby.core.cluster.sessions) == 1000
    assert not lobby.closed


def test_an_observer_stays_as_long_as_it_beats_and_waits_for_something() -> None:
    lobby = Lobby()
    for session in (1, 2, 3):
        lobby.newcomer(session, role="observer")
        assert lobby.say(session, Heartbeat(7)) == HeartbeatAck(7, lobby.now)
    for session in (1, 2):
        lobby.say(session, Watch("m"))
    lobby.wait(11, (1, 3))
    assert lobby.closed[2].startswith("no heartbeat, watch or call came for 1")
    lobby.wait(GUEST_IDLE_S, (1, 3))
    assert set(lobby.closed) == {2, 3}
    lobby.step(Disconnected(1))
    lobby.wait(GUEST_IDLE_S)
    assert set(lobby.closed) == {2, 3}


# ---------------------------------------------------------------------------------------------------------- shares
