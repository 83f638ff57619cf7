"""What lets a call go on wakes it at once, and few others; a coordinator that is busy is not one that was stopped."""

from __future__ import annotations

from collections import Counter

import pytest

from benches.scale.core import Core
from tensorhub.coordinator import Connected, Disconnected, Persisted, Received, Send, Tick, limits
from tensorhub.coordinator.entities import Operation
from tensorhub.coordinator.handovers import Handovers
from tensorhub.coordinator.readers import RETRY_S_MAX
from tensorhub.messages import (
    AddSource,
    DropSource,
    ErrorInfo,
    Fill,
    Heartbeat,
    Held,
    Join,
    Leave,
    LeaveRequest,
    Outcome,
    Prepared,
    ReadFailed,
    Register,
    Registered,
    Resolve,
    Start,
    TellDigests,
)
from tensorhub.model.digests import root_of
from tensorhub.testing import CHUNK_BYTES, CHUNKS, StepwiseCluster
from tensorhub.testing.flow.thin import MODEL
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.types import Endpoint, Location, Medium, OpKey, OpKind, Options, Purpose
from tests.coordinator.test_read_only import Lobby

LEASE_S = Options().lease_s
ENOUGH = ErrorInfo("StateError", "enough", False)


class Hall(Lobby):
    """With workers of any transports."""

    def arrives(self, session: int, life: str, *transports: str) -> None:
        """For the first time, or again."""
        self.step(Connected(session, life, "worker"))
        self.say(session, Join(life, Location(), tuple(Endpoint(each, "x") for each in transports), 1, 0))

    def replicates(self, session: int, name: str) -> OpKey:
        key = OpKey("m", name, self.core.cluster.models["m"].groups[name].epoch, 0)
        self.say(session, Fill(key, 0, name, OpKind.REPLICATE, "latest", None, 1, False, False, 1000.0))
        return key

    def holds(self, session: int, name: str) -> None:
        """It has a copy of the version that is there."""
        self.register(session, name)
        self.say(session, Prepared(self.replicates(session, name), 0))

    def lease(self, name: str) -> str:
        """By which this group reads."""
        (operation,) = [o for o in self.core.cluster.undecided.values() if o.key.group == name]
        (lease,) = operation.parts[0].leases
        return lease


@pytest.fixture
def hall() -> Hall:
    """A trainer that everybody reaches has published, and another worker has a copy that rdma alone reaches."""
    hall = Hall()
    hall.arrives(2, "trainer", "tcp", "rdma")
    hall.register(2, "t")
    hall.publish(2, "t", 1, 0)
    hall.arrives(3, "copier", "rdma")
    hall.holds(3, "c")
    return hall


def a_reader_lacks_a_source(hall: Hall) -> None:
    """Its only source has left, and the other holder has no transport in common with it."""
    hall.arrives(4, "reader", "tcp")
    hall.register(4, "r")
    key = hall.replicates(4, "r")
    lease = hall.lease("r")
    hall.say(2, Leave("done"))
    hall.say(4, ReadFailed(key, 0, lease, "lost", ""))
    assert not hall.core.cluster.leases


def test_a_reader_that_is_back_with_the_transport_of_a_source_is_given_that_source(hall: Hall) -> None:
    a_reader_lacks_a_source(hall)
    hall.arrives(5, "reader", "tcp", "rdma")
    (added,) = [heard for heard in hall.heard[5] if isinstance(heard, AddSource)]
    assert added.grant.source == "copier"


def test_a_source_that_is_back_with_the_transport_of_a_reader_is_given_to_that_reader(hall: Hall) -> None:
    a_reader_lacks_a_source(hall)
    hall.arrives(5, "copier", "rdma", "tcp")
    (added,) = [heard for heard in hall.heard[4] if isinstance(heard, AddSource)]
    assert added.grant.source == "copier"


@pytest.mark.parametrize("is_back_first", [False, True])
def test_a_reader_behind_one_that_finds_no_source_is_moved_to_one_that_it_reaches_itself(is_back_first: bool) -> None:
    """Else it waits for what will not come: the one between has no transport in common with the only holder."""
    hall = Hall()
    for session, name, *transports in (
        (2, "trainer", "tcp"),
        (3, "copier", "tcp", "rdma"),
        (4, "between", "tcp", "cma"),
        (5, "reader", "cma", "rdma"),
    ):
        hall.arrives(session, name, *transports)
        hall.register(session, name)
    hall.publish(2, "trainer", 1, 0)
    hall.say(3, Prepared(hall.replicates(3, "copier"), 0))
    hall.step(Disconnected(3))
    between = hall.replicates(4, "between")
    hall.replicates(5, "reader")
    (start,) = [heard for heard in hall.heard[5] if isinstance(heard, Start)]
    assert [grant.source for grant in start.grants] == ["between"]
    if is_back_first:
        hall.arrives(6, "copier", "rdma")
    lease = hall.lease("between")
    hall.say(2, Leave("done"))
    hall.say(4, ReadFailed(between, 0, lease, "lost", ""))
    if not is_back_first:
        hall.arrives(6, "copier", "rdma")
    added, dropped = hall.heard[5][-2:]
    assert isinstance(added, AddSource)
    assert added.grant.source == "copier"
    assert isinstance(dropped, DropSource)
    assert dropped.lease == start.grants[0].lease
    (found,) = [heard for heard in hall.heard[4] if isinstance(heard, AddSource)]  # once the reader is filled from elsewhere
    assert found.grant.source == "reader"


def test_of_a_chain_whose_source_comes_back_only_the_first_one_is_given_another() -> None:
    """The others are filled through it, as before."""
    core, readers = Core(12, 1, 1000), 12
    core.connect()
    core.begin_version(1)
    books, (trainer, *_) = core.coordinator.cluster, core.everybody
    (lease,) = [lease for lease in books.leases.values() if lease.holding.complete]
    core.step(Disconnected(trainer.number))
    first = core.everybody[int(lease.part.member.worker.name[1:])]
    assert first.key is not None
    core.step(Received(first.number, ReadFailed(first.key, 0, lease.id, "lost", "")))
    assert len(books.models[MODEL].versions[1].starving) == readers
    core.now += RETRY_S_MAX
    given = Counter[int]()
    core.step(Connected(readers + 1, trainer.incarnation, "worker"))
    core.everybody.append(trainer)
    for message in (trainer.join(), trainer.register(1)):
        for action in core.coordinator.step(Received(readers + 1, message), core.now):
            assert isinstance(action, Send)
            given[action.session] += isinstance(action.message, AddSource)
    assert +given == {first.number: 1}
    assert not books.models[MODEL].versions[1].starving
    core.coordinator.check_invariants()


def test_a_reader_that_asks_what_it_missed_is_not_given_the_source_that_it_was_told_to_leave(hall: Hall) -> None:
    hall.arrives(4, "reader", "tcp", "rdma")
    hall.register(4, "r")
    key = hall.replicates(4, "r")
    (source,) = [heard.grants[0] for heard in hall.heard[4] if isinstance(heard, Start)]
    leaves = {"trainer": (2, "t"), "copier": (3, "c")}[source.source]
    hall.say(leaves[0], LeaveRequest(7, leaves[1], 1, 60.0, False, False))
    added, dropped = hall.heard[4][-2:]
    assert isinstance(added, AddSource)
    assert isinstance(dropped, DropSource)
    before = len(hall.heard[4])
    hall.say(4, Resolve(key, 0))
    start, again = hall.heard[4][before:]
    assert isinstance(start, Start)
    assert start.grants == (added.grant,)
    assert again == dropped


def test_whoever_is_back_over_a_connection_of_which_nobody_has_heard_the_end_is_asked_again() -> None:
    """It counts all the time: nothing but its registration shows that it may not have heard the question."""
    hall, digested = Hall(), make_manifest(CHUNKS, "xxh3-64").encode()
    hall.arrives(2, "trainer", "tcp")
    hall.register(2, "t", digested)
    published = hall.publish(2, "t", 1, 0)
    assert isinstance(published, Outcome)
    assert published.version is not None
    hall.arrives(3, "reader", "tcp")
    hall.register(3, "r", digested)
    hall.say(3, Prepared(hall.replicates(3, "r"), 0, root_of(b"its digests")))
    question = TellDigests("t", 1, "")
    assert question in hall.heard[2]
    hall.arrives(4, "trainer", "tcp")
    held = Held(1, published.version.content_id, 1, 1, 1, digested, published=True)
    use = (True, False, Medium.DEVICE, Purpose.USE, "", 1, 1, digested, held)
    hall.say(4, Register(99, "t", "m", "t", 0, 0, 1, *use))
    assert question in hall.heard[4]


def test_a_reader_that_registers_again_has_nobody_elses_call_looked_at(looked: list[Operation]) -> None:
    lobby = Lobby()
    lobby.connect(2)
    lobby.register(2, "t")
    lobby.publish(2, "t", 1, 0)
    lobby.reader(1)
    keys = [lobby.asks(1, str(number)) for number in range(3)]
    lobby.say(2, Leave("done"))
    for key in keys:
        (lease,) = lobby.core.cluster.undecided[str(key)].parts[0].leases
        lobby.say(1, ReadFailed(key, 0, lease, "lost", ""))
    assert len(lobby.core.cluster.models["m"].versions[1].starving) == 3
    looked.clear()
    use = (False, False, Medium.DEVICE, Purpose.USE, "", 1, 1, b"", None)
    lobby.say(1, Register(99, "read-only-0", "m", "read-only-0", 0, 0, 1, *use))
    assert isinstance(lobby.heard[1][-1], Registered)
    assert not looked


def test_a_leave_goes_on_when_the_other_holder_is_counted_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease was over, and it was not suspected yet: very many deadlines had come at once."""
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.worker.asks.retain(1)
    trainer.publish(1)
    reader.replicate()
    cluster.run()
    monkeypatch.setattr(limits, "TIMERS_PER_STEP", 0)
    cluster.now += cluster.options.lease_s
    asked = trainer.unpublish()
    cluster.run()
    assert not asked.has_ended()
    for _ in range(2):  # the second one answers what was said to the first
        reader.worker.beat()
        cluster.run()
    assert asked.has_ended()


def test_a_leave_goes_on_when_a_worker_with_room_for_a_copy_is_heard_again() -> None:
    """It has nothing of that model."""
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.host_bytes = CHUNKS * CHUNK_BYTES
    other = cluster.worker("other")
    cluster.run()
    trainer.worker.asks.retain(1)
    trainer.publish(1)
    cluster.run()
    other.stopped_until = cluster.now + 0.6 * cluster.options.lease_s
    cluster.advance(0.55 * cluster.options.lease_s)
    asked = trainer.unpublish()
    cluster.run()
    assert not asked.has_ended()
    cluster.advance(0.3 * cluster.options.lease_s)
    assert asked.has_ended()
    assert asked.error is None


# ------------------------------------------------------------------------------------------------- a busy coordinator


def test_a_reader_that_joins_has_no_handovers_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 8,192 models a Join took some milliseconds longer, and read-only workers may come as often as they like."""
    lobby, asked = Lobby(), list[object]()
    monkeypatch.setattr(Handovers, "back", lambda self, worker: asked.append(worker))
    lobby.reader(1)
    lobby.connect(2)
    assert len(lobby.core.cluster.workers) == 2
    assert not asked


def beat_until(lobby: Lobby, end: float, *sessions: int) -> None:
    while lobby.now < end:
        lobby.now += 0.5
        for session in sessions:
            lobby.step(Received(session, Heartbeat(1, lobby.now)))
        lobby.ticks()


def test_deadlines_that_wait_for_their_turn_are_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read-only workers can have very many at one time. No dead worker was lost while they were heeded."""
    monkeypatch.setattr(limits, "TIMERS_PER_STEP", 1)
    lobby, calls = Lobby(), 100
    lobby.connect(2)
    lobby.reader(1)
    for number in range(calls):
        lobby.asks(1, str(number), timeout_s=10.0 - lobby.now)
    beat_until(lobby, 9.5, 1, 2)
    lobby.step(Disconnected(2))
    lobby.now = 10.0
    while lobby.core.cluster.undecided:
        lobby.now += 0.03
        lobby.step(Tick())
    assert lobby.now > 10.0 + LEASE_S / 4  # so late was the last one
    assert lobby.core.cluster.listens_since == 0.0
    beat_until(lobby, 9.5 + LEASE_S + 0.5, 1)
    assert "life2" not in lobby.core.cluster.workers


def test_a_reader_whom_many_sources_have_failed_counts_as_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at it passes over all of these: a step would be long with as many looks as at others."""
    lobby, many = Lobby(), 3 * limits.WOKEN_PER_STEP
    lobby.reader(1)
    keys = [lobby.asks(1, str(number)) for number in range(many)]
    for key in keys:
        lobby.core.cluster.undecided[str(key)].parts[0].attempts.failures = {f"life{number}": 1 for number in range(15)}
    lobby.connect(2)
    lobby.register(2, "t")
    lobby.core.step(Received(2, lobby.publication("t")), lobby.now)
    (record,) = lobby.core.cluster.records
    lobby.core.step(Persisted(record), lobby.now)
    before = len(lobby.core.cluster.woken)
    lobby.core.step(Tick(), lobby.now)
    assert before - len(lobby.core.cluster.woken) == limits.WOKEN_PER_STEP / 16
