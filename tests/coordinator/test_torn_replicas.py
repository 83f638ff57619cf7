"""A torn replica is filled with another version, while somebody still reads what a lost rank had of the former one."""

from __future__ import annotations

from itertools import count

from tensorhub.coordinator import Connected, Coordinator, Event, Persist, Persisted, PersistFailed, Received, invariants
from tensorhub.coordinator.entities import ReadLease
from tensorhub.coordinator.states import ReplicaState
from tensorhub.messages import Fill, FromWorker, Join, Leave, Prepared, Publish, ReadFailed, Register
from tensorhub.testing import DEVICE, MANIFEST
from tensorhub.types import Endpoint, Location, OpKey, OpKind, Options


class Groups:
    """Groups of two ranks, each of which is a worker; and a store that answers when it is told to."""

    def __init__(self) -> None:
        idents = count()
        self.core = Coordinator(
            cluster="c", epoch=1, options=Options(), ids=lambda: f"id{next(idents)}", now=0.0, durable=None
        )
        self.sessions: dict[str, int] = {}
        self.unstored: list[int] = []

    def step(self, event: Event) -> None:
        self.unstored += [action.record for action in self.core.step(event, 0.0) if isinstance(action, Persist)]
        self.core.check_invariants()
        invariants.check_counts(self.core.cluster)

    def say(self, name: str, message: FromWorker) -> None:
        self.step(Received(self.sessions[name], message))

    def comes(self, name: str, group: str, rank: int) -> None:
        self.sessions[name] = number = len(self.sessions) + 1
        self.step(Connected(number, name, "worker"))
        self.say(name, Join(name, Location(), (Endpoint("tcp", "x"),), 1, 0))
        blob = MANIFEST.encode()
        self.say(name, Register(1, name, "m", group, rank, rank, 2, True, False, *DEVICE, "", 8192, 2, blob, None))

    def publishes(self, group: str, version: int) -> None:
        for rank in range(2):
            self.comes(f"{group}{rank}", group, rank)
        key = self.next_key(group)
        for rank in range(2):
            self.say(f"{group}{rank}", Publish(key, rank, f"{group}{rank}", version, 7, 60.0))
        self.step(Persisted(self.unstored.pop()))

    def fills(self, group: str, *names: str) -> OpKey:
        key = self.next_key(group)
        for rank, name in enumerate(names):
            self.say(name, Fill(key, rank, name, OpKind.UPDATE, "latest", None, 9 + rank, False, False, 60.0))
        return key

    def next_key(self, name: str) -> OpKey:
        group = self.core.cluster.models["m"].groups[name]
        return OpKey("m", name, group.epoch, group.sequence)

    def reads(self, name: str) -> dict[str, ReadLease]:
        """By the source's name."""
        return {lease.holding.member.worker.name: lease for lease in self.core.cluster.members[name].reads.values()}


def test_a_read_of_what_a_lost_rank_had_stays_one_of_that_version() -> None:
    groups = Groups()
    groups.publishes("trainer", 1)
    for group in ("a", "b"):
        for rank in range(2):
            groups.comes(f"{group}{rank}", group, rank)
    of_a, of_b = groups.fills("a", "a0", "a1"), groups.fills("b", "b0", "b1")
    groups.say("trainer0", Leave("bye"))
    for name, key in (("a0", of_a), ("b0", of_b)):
        groups.say(name, ReadFailed(key, 0, groups.reads(name)["trainer0"].id, "lost", ""))
    read = groups.reads("b0")["a0"]
    assert read.partial
    for rank in range(2):
        groups.say(f"a{rank}", Prepared(of_a, rank))
    groups.say("a0", Leave("its memory may still be read"))
    groups.step(PersistFailed(groups.unstored.pop(), "full"))
    (torn,) = groups.core.cluster.models["m"].groups["a"].replicas
    assert torn.state is ReplicaState.TORN
    groups.comes("again", "a", 0)
    groups.publishes("other", 2)
    groups.fills("a", "again", "a1")
    assert (torn.state, torn.version.number) == (ReplicaState.FILLING, 2)
    assert read.holding.version.number == 1
    groups.say("b0", ReadFailed(of_b, 0, read.id, "lost", ""))
    assert groups.reads("b0") == {}
