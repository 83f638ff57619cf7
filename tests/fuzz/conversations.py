"""Targets: what whoever has the secret may say to a coordinator, in any order, over any
connections.
"""

from __future__ import annotations

import itertools
import typing
from dataclasses import replace
from typing import Any

from tensorhub.coordinator import (
    CloseSession,
    Connected,
    Coordinator,
    Disconnected,
    Event,
    LookFor,
    Persist,
    Persisted,
    PersistFailed,
    Received,
    Send,
    Silent,
    Tick,
)
from tensorhub.messages import (
    FromWorker,
    Join,
    Leave,
    Register,
    Retain,
    Rollback,
)
from tensorhub.protocol import codec
from tensorhub.testing import DEVICE, MANIFEST, SimHandle, StepwiseCluster
from tensorhub.types import Location, OpKey, Options
from tests.fuzz.source import Source

STEPS_MAX = 300  # of one input
KINDS = sorted(typing.get_args(FromWorker), key=lambda kind: kind.__name__)
BLOB = MANIFEST.encode()


def pools_of(coordinator: Coordinator, registrations: tuple[str, ...]) -> dict[str, list[Any]]:
    """What there is now, by the name of the field that may have it."""
    cluster = coordinator.cluster
    models = list(cluster.models.values())
    groups = [group for model in models for group in model.groups.values()]
    versions = [version for model in models for version in model.versions.values()]
    holdings = [
        h
        for member in cluster.members.values()
        for h in (member.holding, *member.leaving)
        if h is not None
    ]
    keys = [
        OpKey(g.model.name, g.name, g.epoch, max(0, g.sequence + n))
        for g in groups
        for n in (0, 1, -1)
    ]
    return {
        "registration": [*cluster.members, *registrations],
        "model": ["actor", "actor", "critic"],
        "group": ["g", "two", *[group.name for group in groups]],
        "rank": [0, 0, 1],
        "shard": [0, 0, 1],
        "world_size": [1, 1, 2],
        "lease": list(cluster.leases),
        "content_id": [version.info.content_id for version in versions],
        "pin": [pin for model in models for pin in model.pins],
        "generation": [7, *[holding.generation for holding in holdings]],
        "key": keys,
        "version": [1, 2, 3, *[version.number for version in versions]],
        "to": [1, *[version.number for version in versions]],
        "selector": [
            "latest",
            "latest-1",
            "available",
            1,
            *[version.number for version in versions],
        ],
        "manifest": [BLOB, BLOB, b"junk"],
        "copy": [*cluster.members],
        "medium": [DEVICE[0]],
        "purpose": [DEVICE[1]],
        "layout_id": ["", "", "tp"],
        "timeout_s": [60.0, 1.0],
        "seq": [0, 1, 2],
    }


# --------------------------------------------------------------------------------------------------
# on its own


class Shell:
    """What drives a coordinator, as `runtime.control.server` does; the store is as fast as the
    input wants it.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.now = 0.0
        ids = itertools.count()
        self.coordinator = Coordinator(
            cluster="c", epoch=1, options=Options(), ids=lambda: f"id{next(ids)}", now=0.0
        )
        self.sessions: list[int] = []
        self.minted = 0
        self.unstored: list[int] = []

    def step(self, event: Event) -> None:
        for action in self.coordinator.step(event, self.now):
            match action:
                case Send():
                    codec.decode(codec.encode(action.message), codec.FROM_COORDINATOR)
                case Persist():
                    self.unstored.append(action.record)
                case CloseSession():
                    if action.session in self.sessions and self.source.byte() < 200:
                        self.disconnect(action.session)
                case LookFor():
                    self.step(Silent((action.session,)))
        self.coordinator.check_touched()

    def disconnect(self, session: int) -> None:
        self.sessions.remove(session)
        self.step(Disconnected(session))

    def stored(self, fails: bool) -> None:
        record = self.unstored.pop(0)
        self.step(PersistFailed(record, "disk full") if fails else Persisted(record))

    def end(self) -> None:
        """Everybody goes: in the end only what is durable is known."""
        for session in list(self.sessions):
            self.disconnect(session)
        for _ in range(10_000):
            while self.unstored:
                self.stored(fails=False)
            due = self.coordinator.next_deadline()
            if due is None:
                break
            self.now = max(self.now, due)
            self.step(Tick())
        self.coordinator.check_invariants()
        cluster = self.coordinator.cluster
        left = (
            cluster.sessions,
            cluster.workers,
            cluster.members,
            cluster.leases,
            cluster.records,
            cluster.pending_writes,
        )
        assert not any(left), left
        assert not len(cluster.timers)
        assert not list(cluster.operations())


# --------------------------------------------------------------------------------------------------
# among others

HONEST_S = 9.0  # a lease: the honest ones' heartbeats may all have to wait
CHANGE_ALL = (Rollback, Retain, Leave)  # whoever has the secret may


def bystanders(data: bytes) -> None:
    """Beside an honest trainer and reader: they keep what they have, and go on publishing and
    reading.
    """
    source, cluster = Source(data), StepwiseCluster()
    cluster.guarantees.contents.has_outsiders = True
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    fill = reader.replicate(1)
    sessions = [_babbler(cluster, number) for number in range(2)]
    for _ in range(STEPS_MAX // 2):
        if not source:
            break
        _any_step(cluster, source, sessions, (trainer, reader))
    for session in sessions:
        cluster.step(Disconnected(session))
    cluster.advance(60.0)
    assert fill.number == 1
    late = cluster.workers["trainer"].register("late", model="late")
    other = cluster.workers["reader"].register("others", model="late")
    cluster.run()
    published = late.publish(1)
    cluster.run()
    got = other.replicate()
    cluster.run()
    assert published.number == got.number == 1


def _babbler(cluster: StepwiseCluster, number: int) -> int:
    session = next(cluster.sessions)
    cluster.step(Connected(session, f"babbler.{session}", "worker"))
    cluster.step(Received(session, Join(f"babbler{number}", Location(), (), 1, 0)))
    registration = f"b{session}"
    cluster.step(
        Received(
            session,
            Register(
                7,
                registration,
                "actor",
                registration,
                0,
                0,
                1,
                True,
                False,
                *DEVICE,
                "",
                1,
                1,
                BLOB,
                None,
            ),
        )
    )
    return session


def _any_step(
    cluster: StepwiseCluster, source: Source, sessions: list[int], honest: tuple[SimHandle, ...]
) -> None:
    index, kind = source.below(len(sessions)), source.byte()
    before = {handle.id: held for handle in honest if (held := _holds(cluster, handle)) is not None}
    if sessions[index] not in cluster.coordinator.cluster.sessions or kind < 8:
        cluster.step(Disconnected(sessions[index]))
        sessions[index] = _babbler(cluster, index)
    elif kind < 100:
        choices = cluster.choices()
        if choices:
            cluster.do(source.choice(choices))
        return
    elif kind < 104:
        seconds, run = source.choice((0.1, 1.0, 4.0)), source.flag()
        if cluster.now + seconds < HONEST_S:
            cluster.advance(seconds, run=run)
        return
    else:
        registrations = tuple([f"b{session}" for session in sessions])
        message = source.value(
            KINDS[kind % len(KINDS)], pools_of(cluster.coordinator, registrations)
        )
        if isinstance(message, Join):
            message = replace(message, cluster="")  # with the secret it may end a cluster
        if not isinstance(message, CHANGE_ALL):
            cluster.step(Received(sessions[index], message))
    cluster.coordinator.check_touched()
    for handle in honest:
        assert before.get(handle.id) in (None, _holds(cluster, handle)), (kind, before)


def _holds(cluster: StepwiseCluster, handle: SimHandle) -> int | None:
    """Under which generation the coordinator counts on its memory."""
    member = cluster.coordinator.cluster.members[handle.id]
    return (
        member.holding.generation
        if member.holding is not None and member.holding.committed
        else None
    )
