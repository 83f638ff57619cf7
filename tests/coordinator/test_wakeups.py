"""What lets a call go on wakes it at once, and few others; a coordinator that is busy is not one
that was stopped.
"""

from __future__ import annotations

from collections import Counter

import pytest

from benches.scale.core import Core
from tensorhub.coordinator import Connected, Disconnected, Received, Send, Tick, limits
from tensorhub.coordinator.readers import RETRY_S_MAX
from tensorhub.messages import (
    AddSource,
    Fill,
    Heartbeat,
    Held,
    Join,
    Outcome,
    Prepared,
    ReadFailed,
    Register,
    TellDigests,
)
from tensorhub.model.digests import root_of
from tensorhub.testing import CHUNKS
from tensorhub.testing.flow.thin import MODEL
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.types import Endpoint, Location, Medium, OpKey, OpKind, Options, Purpose
from tests.coordinator.test_read_only import Lobby

LEASE_S = Options().lease_s


class Hall(Lobby):
    """With workers of any transports."""

    def arrives(self, session: int, life: str, *transports: str) -> None:
        """For the first time, or again."""
        self.step(Connected(session, life, "worker"))
        self.say(
            session, Join(life, Location(), tuple(Endpoint(each, "x") for each in transports), 1, 0)
        )

    def replicates(self, session: int, name: str) -> OpKey:
        key = OpKey("m", name, self.core.cluster.models["m"].groups[name].epoch, 0)
        self.say(
            session, Fill(key, 0, name, OpKind.REPLICATE, "latest", None, 1, False, False, 1000.0)
        )
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
    """A trainer that everybody reaches has published, and another worker has a copy that rdma alone
    reaches.
    """
    hall = Hall()
    hall.arrives(2, "trainer", "tcp", "rdma")
    hall.register(2, "t")
    hall.publish(2, "t", 1, 0)
    hall.arrives(3, "copier", "rdma")
    hall.holds(3, "c")
    return hall


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


def test_whoever_is_back_over_a_connection_of_which_nobody_has_heard_the_end_is_asked_again() -> (
    None
):
    """It counts all the time: nothing but its registration shows that it may not have heard the
    question.
    """
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


# -------------------------------------------------------------------------------------------------
# a busy coordinator


def beat_until(lobby: Lobby, end: float, *sessions: int) -> None:
    while lobby.now < end:
        lobby.now += 0.5
        for session in sessions:
            lobby.step(Received(session, Heartbeat(1, lobby.now)))
        lobby.ticks()


def test_deadlines_that_wait_for_their_turn_are_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read-only workers can have very many at one time. No dead worker was lost while they were
    heeded.
    """
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
