"""Each promise about the coordinator's records is broken in turn, and is then said to be broken.

A broken record is told by the check of one entity alone, as if a step had noted nothing else: of
the entity that is wrong, or of one that it refers to.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tensorhub.coordinator import Coordinator, invariants
from tensorhub.coordinator.entities import Member
from tensorhub.coordinator.layout_holdings import LayoutHoldings
from tensorhub.coordinator.states import (
    LeaseState,
    OperationState,
    PartState,
    ReplicaState,
    VersionState,
    WorkerState,
)
from tensorhub.machine import InvariantBroken, Timers
from tensorhub.testing import CHUNK_BYTES, CHUNKS, SimHandle, StepwiseCluster
from tensorhub.types import OpKind, Purpose
from tests.coordinator import test_coverage
from tests.coordinator.test_bridges import A, B
from tests.coordinator.test_layouts import reading as reading_another_layout

# ------------------------------------------------------------------------------------------- what
# is broken: records by name


class Scene(SimpleNamespace):
    """Some of a coordinator's records, by name."""

    def __init__(self, core: Coordinator, **records: Any) -> None:
        cluster = core.cluster
        (model,) = cluster.models.values()
        super().__init__(cluster=cluster, model=model, **records)

    def find(self, path: str) -> Any:
        return reduce(getattr, path.split("."), self)


class Stage(StepwiseCluster):
    """A cluster whose records are looked at."""

    def of(self, handle: SimHandle) -> Member:
        return self.coordinator.cluster.members[handle.id]

    def published(self, *more: str, retain: int = 0) -> list[SimHandle]:
        """A trainer that has published, and others."""
        handles = [self.handle(name) for name in ("trainer", *more)]
        self.run()
        if retain:
            handles[0].worker.asks.retain(retain)
            self.run()
        handles[0].publish(1)
        self.run()
        return handles

    def scene(self, member: Member, **records: Any) -> Scene:
        """Of what that member holds."""
        holding = member.holding or member.leaving[0]
        return Scene(
            self.coordinator,
            member=member,
            worker=member.worker,
            group=member.group,
            holding=holding,
            replica=holding.replica,
            version=holding.version,
            layout=holding.layout,
            **records,
        )

    def reading(self, source: Member, reader: SimHandle, **records: Any) -> Scene:
        """Of a source, and of one that reads from it."""
        part = self.of(reader).part
        assert part is not None
        (lease,) = part.leases.values()
        return self.scene(
            source,
            reader=part.member,
            part=part,
            operation=part.operation,
            filling=part.holding,
            lease=lease,
            session=self.coordinator.cluster.sessions[source.worker.session or 0],
            **records,
        )


@cache
def reading() -> Scene:
    """A reader reads from one of two that have it."""
    stage = Stage()
    trainer, keeper, reader = stage.published("keeper", "reader")
    keeper.replicate()
    stage.run()
    reader.replicate()
    stage.run("read")
    return stage.reading(stage.of(keeper), reader, publisher=stage.of(trainer))


@cache
def leaving() -> Scene:
    """The only source leaves, and waits for its reader."""
    stage = Stage()
    trainer, reader = stage.published("reader")
    reader.replicate(1)
    stage.run("read")
    trainer.unpublish()
    stage.run("read")
    source = stage.of(trainer)
    return stage.reading(source, reader, withdrawal=source.leaving[0].withdrawal)


@cache
def publishing(*but: str) -> Scene:
    """One of two ranks has called; or both have, and what is to happen then does not."""
    stage = Stage()
    ranks = stage.group("trainer", 2)
    stage.run()
    for rank in ranks if but else ranks[:1]:
        rank.publish(1)
    stage.run(*but)
    member = stage.of(ranks[0])
    operation = member.group.operation
    assert operation is not None
    return Scene(
        stage.coordinator, part=member.part, operation=operation, version=operation.version
    )


def recording() -> Scene:
    """A publish is being recorded."""
    return publishing("store")


@cache
def waiting() -> Scene:
    """A reader waits for a version."""
    stage = Stage()
    reader = stage.handle("reader")
    stage.run()
    reader.replicate()
    stage.run()
    part = stage.of(reader).part
    assert part is not None
    return Scene(stage.coordinator, operation=part.operation)


@cache
def staying() -> Scene:
    """The only holder of a version that is retained, and pinned, is to leave."""
    stage = Stage()
    (trainer,) = stage.published(retain=1)
    trainer.worker.asks.pin(1)
    stage.run()
    trainer.unpublish()
    stage.run()
    member = stage.of(trainer)
    (pin,) = member.group.model.pins.values()
    assert member.holding is not None
    return stage.scene(member, pin=pin, withdrawal=member.holding.withdrawal)


@cache
def told() -> Scene:
    """A holder does not know yet that its version is retained."""
    stage = Stage()
    (trainer,) = stage.published()
    trainer.worker.asks.retain(1)
    stage.run("down")
    return stage.scene(stage.of(trainer))


@cache
def handing_over(*but: tuple[str, str]) -> Scene:
    """A copy is made of what is retained, or is there."""
    stage = Stage()
    (trainer,) = stage.published(retain=1)
    stage.host_bytes = CHUNKS * CHUNK_BYTES
    stage.worker("keeper")
    trainer.unpublish()
    stage.run(*but)
    member, model = stage.of(trainer), stage.of(trainer).group.model
    copies = [*model.copies.values()]
    return stage.scene(copies[0] if copies else member, trainer=member)


def being_copied() -> Scene:
    return handing_over(("down", "keeper"))


def copied() -> Scene:
    return handing_over()


@cache
def stranded() -> Scene:
    """A reader waits for another source."""
    stage = Stage()
    trainer, reader = stage.published("reader")
    reader.replicate()
    stage.run("read")
    trainer.worker.crash()
    stage.advance(30.0)
    part = stage.of(reader).part
    assert part is not None
    assert part.holding is not None
    assert part.holding.is_stranded
    return stage.scene(part.member)


@cache
def rolling_back() -> Scene:
    """A rollback is being recorded."""
    stage = Stage()
    (trainer,) = stage.published()
    trainer.worker.asks.rollback(1)
    stage.run("store")
    assert stage.coordinator.cluster.pending_writes
    return stage.scene(stage.of(trainer))


@cache
def across() -> Scene:
    """Two ranks read another layout, and are not known to read everything."""
    world, readers = test_coverage.reading()
    part = world.part(readers[0])
    return Scene(
        world.core, operation=part.operation, version=part.operation.version, layout=part.layout
    )


@cache
def bridging() -> Scene:
    """A rank fills its memory from two of another layout, and another one from that rank."""
    world, readers = reading_another_layout(groups=2)
    for reader in readers:
        world.ready(reader, A, B)
    part, follower = map(world.part, readers)
    lease = next(iter(part.leases.values()))
    return Scene(
        world.core,
        lease=lease,
        holding=lease.holding,
        follower=follower,
        following=next(iter(follower.leases.values())),
        version=part.operation.version,
        layout=part.layout,
    )


# --------------------------------------------------------------------------------------------------
# how


Made = Callable[[Scene], Any]


class Broken(NamedTuple):
    """Attributes have other values, by their paths. `about`: the entity whose check says so; "": the
    check of all counts.
    """

    what: str  # is promised
    scene: Callable[[], Scene]
    about: str
    values: Mapping[str, Any]


def the(path: str) -> Made:
    return lambda scene: scene.find(path)


def twice(path: str) -> Made:
    """The first item of a dict, under two keys."""
    return lambda scene: dict.fromkeys([1, "other"], next(iter(scene.find(path).values())))


def moved(path: str) -> Made:
    """The first item of a dict, under another key."""
    return lambda scene: {77: next(iter(scene.find(path).values()))}


def others(scene: Scene) -> dict[str, LayoutHoldings[Any]]:
    return {"other": LayoutHoldings("other")}


class Holder:
    number = 0


def held(scene: Scene) -> LayoutHoldings[Any]:
    """Of one shard, with a holder."""
    made = LayoutHoldings[Any](scene.version.layout_id)
    made.lay_out(1)
    made[0].add(Holder(), 1, 1)
    return made


TABLE = [
    Broken("only lost workers are forgotten", reading, "worker", {"cluster.workers": {}}),
    Broken(
        "only lost workers are forgotten",
        reading,
        "worker",
        {"cluster.workers": {}, "worker.members": {}},
    ),
    Broken("lost workers are forgotten", reading, "worker", {"worker.state": WorkerState.LOST}),
    Broken(
        "a lost incarnation never comes back",
        reading,
        "worker",
        {"cluster.lost": lambda scene: {scene.worker.incarnation: None}},
    ),
    Broken(
        "every worker has a lease deadline",
        reading,
        "worker",
        {"cluster.timers": lambda scene: Timers()},
    ),
    Broken("a live worker is connected", reading, "worker", {"worker.session": None}),
    Broken("a live worker is connected", reading, "member", {"worker.session": None}),
    Broken("a worker's session is its own", reading, "worker", {"worker.session": 99}),
    Broken(
        "a worker's session is its own",
        reading,
        "worker",
        {"session.worker": the("publisher.worker")},
    ),
    Broken("a read-only worker lends no memory", copied, "worker", {"worker.read_only": True}),
    Broken("a read-only worker serves no reader", reading, "worker", {"worker.read_only": True}),
    Broken("a worker's members are members", reading, "worker", {"cluster.members": {}}),
    Broken(
        "a worker's members are members",
        reading,
        "worker",
        {"worker.members": moved("worker.members")},
    ),
    Broken(
        "a worker is that of its members",
        reading,
        "worker",
        {"member.worker": the("publisher.worker")},
    ),
    Broken("a reader that yields is known to", reading, "reader.worker", {"lease.yields": True}),
    Broken("a reader that yields is known to", reading, "operation", {"lease.yields": True}),
    Broken("a reader that yields is known to", reading, "lease", {"lease.yields": True}),
    Broken("a reader that yields is known to", reading, "lease", {"reader.worker.slowness": 1}),
    Broken(
        "who is no member any more is forgotten everywhere",
        reading,
        "member",
        {"cluster.members": {}},
    ),
    Broken(
        "who is no member any more is forgotten everywhere",
        reading,
        "member",
        {"cluster.members": {}, "member.holding": None, "group.members": {}},
    ),
    Broken(
        "who is no member any more is forgotten everywhere",
        reading,
        "member",
        {"cluster.members": {}, "member.holding": None, "worker.members": {}},
    ),
    Broken("a member belongs to its worker", reading, "member", {"worker.members": {}}),
    Broken("a member belongs to its group", reading, "member", {"group.members": {}}),
    Broken("a member's group exists", reading, "member", {"model.groups": {}}),
    Broken("what is held is a candidate", leaving, "member", {"member.holding": the("holding")}),
    Broken(
        "what is held is a candidate",
        reading,
        "member",
        {"version.holdings": lambda scene: LayoutHoldings("")},
    ),
    Broken(
        "what is withdrawn takes no readers",
        reading,
        "member",
        {"member.leaving": lambda scene: [scene.holding]},
    ),
    Broken(
        "what is withdrawn is no candidate",
        reading,
        "member",
        {
            "member.leaving": lambda scene: [scene.holding],
            "member.holding": None,
            "holding.leaving": True,
        },
    ),
    Broken("a reader's leases are leases", reading, "reader", {"cluster.leases": {}}),
    Broken("copies that retain a version are known", copied, "member", {"model.copies": {}}),
    Broken(
        "copies that retain a version are known",
        copied,
        "trainer",
        {"model.copies": lambda scene: {scene.trainer.registration: scene.trainer}},
    ),
    Broken("a model's versions are its own", reading, "member", {"model.name": "other"}),
    Broken("what is complete is verified", leaving, "member", {"holding.verified": False}),
    Broken("what is filled is known to be", reading, "reader", {"filling.is_fed": False}),
    Broken("what is filled is known to be", reading, "operation", {"filling.is_fed": False}),
    Broken("what is filled is known to be", reading, "operation", {"lease.dropping": True}),
    Broken("a holding is one member's", leaving, "member", {"holding.member": the("reader")}),
    Broken(
        "a source's readers are counted", leaving, "member", {"lease.state": LeaseState.FENCING}
    ),
    Broken(
        "a source's readers are counted", leaving, "member", {"holding.traffic.active_readers": 2}
    ),
    Broken(
        "a source's readers that yield are counted",
        leaving,
        "member",
        {"holding.traffic.yielding": 1},
    ),
    Broken("a source's leases are on itself", reading, "member", {"lease.id": "other"}),
    Broken("a source's leases are on itself", reading, "member", {"lease.holding": the("filling")}),
    Broken(
        "a holding's leases have not ended",
        leaving,
        "member",
        {"lease.state": LeaseState.RELEASED, "holding.traffic.active_readers": 0},
    ),
    Broken("no version above the mark is visible", reading, "model", {"model.mark": 0}),
    Broken("no version above the mark is visible", reading, "model", {"model.mark": None}),
    Broken("lineages only grow", reading, "model", {"model.history.lineage": -1}),
    Broken(
        "two publications never share a content id",
        reading,
        "model",
        {"model.versions": twice("model.versions")},
    ),
    Broken(
        "a version is filed under its number",
        reading,
        "model",
        {"model.versions": moved("model.versions")},
    ),
    Broken("only who has to acknowledge is waited for", told, "model", {"holding.told": False}),
    Broken(
        "only who has to acknowledge is waited for",
        told,
        "model",
        {"model.notices.unaware": moved("model.notices.unaware")},
    ),
    Broken(
        "copies are filed by registration",
        copied,
        "model",
        {"model.copies": moved("model.copies")},
    ),
    Broken(
        "handovers are filed by their copy",
        being_copied,
        "model",
        {"model.handovers": moved("model.handovers")},
    ),
    Broken("a handover ends", being_copied, "model", {"cluster.timers": lambda scene: Timers()}),
    Broken(
        "pinned versions are known",
        staying,
        "model",
        {"model.pins": lambda scene: {"": replace(scene.pin, number=2)}},
    ),
    Broken(
        "pinned versions are known",
        staying,
        "model",
        {"model.pins": lambda scene: {"": replace(scene.pin, content_id="other")}},
    ),
    Broken(
        "a lost worker's pins end with it",
        staying,
        "model",
        {"cluster.lost": lambda scene: {scene.pin.incarnation: None}},
    ),
    Broken(
        "withdrawals are filed by registration",
        staying,
        "model",
        {"model.withdrawals": moved("model.withdrawals")},
    ),
    Broken(
        "only discarded and retired versions are forgotten",
        reading,
        "version",
        {"model.versions": {}},
    ),
    Broken(
        "only discarded and retired versions are forgotten",
        reading,
        "version",
        {"model.versions": {}, "version.state": VersionState.RETIRED},
    ),
    Broken(
        "only discarded and retired versions are forgotten",
        reading,
        "version",
        {"cluster.models": {}},
    ),
    Broken(
        "only discarded and retired versions are forgotten",
        publishing,
        "version",
        {"model.versions": {}},
    ),
    Broken(
        "a forgotten version has no operations",
        publishing,
        "version",
        {"model.versions": {}, "version.state": VersionState.DISCARDED},
    ),
    Broken(
        "discarded and retired versions are forgotten",
        reading,
        "version",
        {"version.state": VersionState.RETIRED},
    ),
    Broken(
        "what is bound to it is undecided",
        reading,
        "version",
        {"operation.state": OperationState.ABORTED},
    ),
    Broken("what is bound to it is undecided", reading, "version", {"operation.version": None}),
    Broken(
        "a version above the mark is invisible",
        publishing,
        "version",
        {"version.state": VersionState.UNAVAILABLE},
    ),
    Broken("no version is of a later lineage", reading, "version", {"model.history.lineage": -1}),
    Broken(
        "what has changed is counted, and has woken who waits",
        reading,
        "version",
        {"layout.has_grown": True},
    ),
    Broken(
        "what has changed is counted, and has woken who waits",
        reading,
        "version",
        {"layout.uncounted": lambda scene: {scene.holding: None}},
    ),
    Broken(
        "a version has each of its shards, once all ranks published",
        reading,
        "version",
        {"version.info": lambda scene: replace(scene.version.info, world_size=2)},
    ),
    Broken(
        "a version has each of its shards, once all ranks published",
        recording,
        "version",
        {"version.info": lambda scene: replace(scene.version.info, world_size=3)},
    ),
    Broken(
        "no other layout holds what is not published",
        publishing,
        "version",
        {"version.others": others},
    ),
    Broken(
        "shards without a complete holder are counted", reading, "version", {"layout.broken": 1}
    ),
    Broken("shards without a source are counted", leaving, "version", {"layout.sourceless": 2}),
    Broken(
        "what describes a shard is what was published with it",
        reading,
        "version",
        {"version.manifest_ids": bytes(32)},
    ),
    Broken(
        "layouts are filed by their ids",
        across,
        "version",
        {"version.others": moved("version.others")},
    ),
    Broken(
        "a layout without a holder or a fill is forgotten",
        reading,
        "version",
        {"version.others": others},
    ),
    Broken("manifests are of shards", across, "version", {"layout.manifests": {77: b"other"}}),
    Broken(
        "where a shard lies is known of who holds it in another layout",
        bridging,
        "version",
        {"layout.parts": {}},
    ),
    Broken(
        "a staged version has one undecided publish",
        reading,
        "version",
        {"version.state": VersionState.STAGED},
    ),
    Broken("only a publish stages", publishing, "version", {"operation.kind": OpKind.UPDATE}),
    Broken("a staged version has no sources", recording, "version", {"version.holdings": held}),
    Broken(
        "available means that every shard is held",
        reading,
        "version",
        {"version.state": VersionState.UNAVAILABLE},
    ),
    Broken(
        "available means that every shard is held",
        leaving,
        "version",
        {"version.state": VersionState.AVAILABLE},
    ),
    Broken(
        "available means that every shard is held",
        reading,
        "group",
        {"version.state": VersionState.UNAVAILABLE},
    ),
    Broken(
        "a layout with sources is not abandoned", reading, "version", {"layout.abandoned": True}
    ),
    Broken(
        "a layout with sources is not abandoned", reading, "replica", {"layout.abandoned": True}
    ),
    Broken(
        "a holding is filed under its version and layout", reading, "version", {"member.shard": 1}
    ),
    Broken(
        "a holding is filed under its version and layout",
        reading,
        "version",
        {"holding.version": None},
    ),
    Broken("a leaving holding is no candidate", reading, "version", {"holding.leaving": True}),
    Broken("committed holdings are complete", reading, "version", {"holding.complete": False}),
    Broken("a holding is what its member holds", reading, "version", {"member.holding": None}),
    Broken("holders are members", reading, "version", {"cluster.members": {}}),
    Broken(
        "torn and gone replicas have no candidates",
        reading,
        "version",
        {"replica.state": ReplicaState.TORN},
    ),
    Broken("a shard's holdings are counted", reading, "version", {"holding.peers.complete": 3}),
    Broken("a shard's holdings are counted", reading, "version", {"holding.peers.sources": 3}),
    Broken("a shard's holdings are counted", reading, "version", {"holding.peers.live_sources": 3}),
    Broken(
        "only those who are there are known",
        leaving,
        "version",
        {"holding.peers.steady": lambda scene: {scene.holding: None}},
    ),
    Broken("sources are kept in order", reading, "version", {"holding.traffic.depth": 7}),
    Broken("sources are kept in order", reading, "reader.group", {"filling.traffic.depth": 7}),
    Broken("sources are kept in order", reading, "worker", {"worker.slowness": 1}),
    Broken("sources that are not spot are known", reading, "version", {"group.spot": True}),
    Broken("holders are told what is retained", reading, "model", {"model.retain": 1}),
    Broken("holders are told what is retained", reading, "version", {"model.retain": 1}),
    Broken("who must not leave at will was told so", reading, "version", {"holding.told": True}),
    Broken("who must not leave at will was told so", reading, "group", {"holding.told": True}),
    Broken("copies are members that retain a version", copied, "model", {"cluster.members": {}}),
    Broken(
        "copies are members that retain a version",
        copied,
        "model",
        {"member.said": lambda scene: replace(scene.member.said, purpose=Purpose.SEED)},
    ),
    Broken("a group with members exists", reading, "group", {"model.groups": {}}),
    Broken(
        "a group that is gone serves no reader",
        reading,
        "group",
        {"model.groups": {}, "group.members": {}},
    ),
    Broken("groups that are not spot are known", reading, "group", {"model.steady": {}}),
    Broken("groups that are not spot are known", reading, "member", {"model.steady": {}}),
    Broken(
        "a group with a spot rank is spot",
        reading,
        "group",
        {"group.spot": True, "model.steady": {}},
    ),
    Broken(
        "groups whose memory serves others are known",
        reading,
        "group",
        {"model.serving": {}, "model.steady": {}},
    ),
    Broken("ranks are in range", reading, "group", {"group.world_size": 0}),
    Broken("ranks are in range", reading, "group", {"group.members": moved("group.members")}),
    Broken(
        "a group is that of its members", reading, "group", {"member.group": the("reader.group")}
    ),
    Broken("a group's members are members", reading, "group", {"cluster.members": {}}),
    Broken(
        "ranks are told their epoch",
        reading,
        "group",
        {"cluster.renumbered": lambda scene: {scene.group: None}},
    ),
    Broken(
        "a group has one torn replica at most",
        reading,
        "group",
        {"replica.state": ReplicaState.TORN, "group.replicas": lambda scene: 2 * [scene.replica]},
    ),
    Broken("a replica is its group's", reading, "group", {"replica.group": the("reader.group")}),
    Broken("gone replicas are forgotten", reading, "replica", {"replica.state": ReplicaState.GONE}),
    Broken("a replica has memory", reading, "replica", {"replica.holdings": {}}),
    Broken(
        "a replica that no rank leaves serves again",
        reading,
        "replica",
        {"replica.state": ReplicaState.DRAINING},
    ),
    Broken(
        "a replica's holdings are filed by rank",
        reading,
        "replica",
        {"replica.holdings": moved("replica.holdings")},
    ),
    Broken(
        "a holding is one replica's",
        reading,
        "group",
        {"holding.replica": the("filling.replica")},
    ),
    Broken(
        "a replica's committed holdings are complete",
        reading,
        "replica",
        {"holding.complete": False},
    ),
    Broken(
        "a ready replica's holdings are committed", reading, "replica", {"holding.committed": False}
    ),
    Broken(
        "what is quarantined is no source",
        reading,
        "replica",
        {"holding.trust.quarantined": True},
    ),
    Broken(
        "torn and gone replicas hold nothing",
        reading,
        "replica",
        {"replica.state": ReplicaState.TORN},
    ),
    Broken(
        "a replica's holding is what its member holds", reading, "replica", {"member.holding": None}
    ),
    Broken(
        "a decided operation is over",
        reading,
        "operation",
        {"operation.state": OperationState.COMMITTED},
    ),
    Broken(
        "a decided operation is over",
        recording,
        "operation",
        {"operation.state": OperationState.COMMITTED, "operation.group.operation": None},
    ),
    Broken(
        "no rank reads for a decided operation",
        reading,
        "operation",
        {"operation.state": OperationState.ABORTED, "reader.group.operation": None},
    ),
    Broken(
        "an undecided operation is its group's",
        reading,
        "operation",
        {"reader.group.operation": None},
    ),
    Broken(
        "no operation is decided twice",
        reading,
        "operation",
        {"reader.group.decided": lambda scene: {scene.operation.key: {}}},
    ),
    Broken("some rank has called", reading, "operation", {"operation.parts": {}}),
    Broken(
        "no operation is bound to a version that is no more",
        reading,
        "operation",
        {"model.versions": {}},
    ),
    Broken(
        "a version knows the operations that are bound to it",
        reading,
        "operation",
        {"version.bound": {}},
    ),
    Broken(
        "prepared means that every rank voted",
        reading,
        "operation",
        {"operation.state": OperationState.PREPARED},
    ),
    Broken(
        "prepared means that every rank voted",
        recording,
        "operation",
        {"part.state": PartState.CALLED},
    ),
    Broken(
        "a prepared operation is bound, and being recorded",
        recording,
        "operation",
        {"operation.record": None},
    ),
    Broken(
        "a prepared operation is bound, and being recorded",
        recording,
        "operation",
        {"cluster.records": {}},
    ),
    Broken(
        "a prepared operation is bound, and being recorded",
        recording,
        "operation",
        {"operation.version": None},
    ),
    Broken("every wait ends", reading, "operation", {"cluster.timers": lambda scene: Timers()}),
    Broken("running means bound and gathered", reading, "operation", {"operation.version": None}),
    Broken(
        "running means bound and gathered", reading, "operation", {"reader.group.world_size": 2}
    ),
    Broken("who writes reads everything", across, "operation", {"operation.writing": True}),
    Broken(
        "a publish stages a version, others take a visible one",
        reading,
        "operation",
        {"operation.kind": OpKind.PUBLISH},
    ),
    Broken("what waits is filed", waiting, "operation", {"operation.filed_in": []}),
    Broken(
        "who waits is found by what it waits for",
        waiting,
        "operation",
        {"operation.key": lambda scene: replace(scene.operation.key, sequence=77)},
    ),
    Broken(
        "a part is its operation's, filed by rank",
        reading,
        "operation",
        {"operation.parts": moved("operation.parts")},
    ),
    Broken(
        "a part is its operation's, filed by rank", reading, "operation", {"part.operation": None}
    ),
    Broken("a part's leases are active", reading, "operation", {"lease.state": LeaseState.FENCING}),
    Broken("who has voted reads no more", reading, "operation", {"part.state": PartState.VOTED}),
    Broken(
        "only running operations read",
        reading,
        "operation",
        {"operation.state": OperationState.GATHERING},
    ),
    Broken("a lease is of the bound version", reading, "operation", {"holding.version": None}),
    Broken(
        "a reader has one source that brings everything",
        reading,
        "operation",
        {"part.leases": twice("part.leases")},
    ),
    Broken("a withdrawal ends", leaving, "model", {"cluster.timers": lambda scene: Timers()}),
    Broken("a withdrawal ends", leaving, "lease", {"cluster.timers": lambda scene: Timers()}),
    Broken("a withdrawal ends", staying, "member", {"cluster.timers": lambda scene: Timers()}),
    Broken("a withdrawal waits for readers", leaving, "model", {"holding.leaving": False}),
    Broken(
        "a withdrawal waits for readers", leaving, "model", {"holding.traffic.active_readers": 0}
    ),
    Broken("who waits for another holder is looked at", staying, "model", {"model.pressing": {}}),
    Broken(
        "who waits to leave a retained version serves on",
        staying,
        "model",
        {"holding.leaving": True},
    ),
    Broken(
        "who waits to leave a retained version serves on",
        staying,
        "member",
        {"model.retain": 0, "model.pins": {}},
    ),
    Broken("only ended leases are forgotten", reading, "lease", {"cluster.leases": {}}),
    Broken(
        "a forgotten lease is known nowhere",
        reading,
        "lease",
        {"cluster.leases": {}, "lease.state": LeaseState.RELEASED},
    ),
    Broken(
        "a lease that is known has not ended", reading, "lease", {"lease.state": LeaseState.FENCED}
    ),
    Broken("a source knows its leases", reading, "lease", {"holding.readers": {}}),
    Broken("a model knows its leases", reading, "lease", {"model.leases": {}}),
    Broken("a reader knows its leases", reading, "lease", {"reader.reads": {}}),
    Broken("a reader knows its leases", reading, "lease", {"part.leases": {}}),
    Broken(
        "an active lease is of a running operation",
        reading,
        "lease",
        {"operation.state": OperationState.GATHERING},
    ),
    Broken(
        "an active lease is of the bound version", reading, "lease", {"operation.version": None}
    ),
    Broken(
        "no holding is filled from itself",
        reading,
        "lease",
        {"lease.holding": the("filling"), "filling.readers": the("holding.readers")},
    ),
    Broken(
        "no holding is filled from itself",
        bridging,
        "lease",
        {
            "lease.holding": the("follower.holding"),
            "follower.holding.readers": the("holding.readers"),
        },
    ),
    Broken(
        "a part has no lease that is being fenced",
        reading,
        "lease",
        {"lease.state": LeaseState.FENCING},
    ),
    Broken("parts are of known manifests, or durable", reading, "", {"layout.parts": {77: ()}}),
    Broken(
        "only selections that a reader needs are known",
        reading,
        "",
        {"version.selections": {(0, "other"): None}},
    ),
    Broken(
        "layouts are found by their descriptions", reading, "", {"layout.described_as": "other"}
    ),
    Broken("layouts are found by their descriptions", across, "", {"layout.described_as": "other"}),
    Broken("manifests are counted", reading, "", {"layout.manifests": {0: b"other"}}),
    Broken("manifests are counted", reading, "", {"member.begun": b"other"}),
    Broken("no update is observed that is over", reading, "", {"cluster.undecided": {}}),
    Broken("lists of digests are counted", reading, "", {"cluster.list_bytes": 1}),
    Broken("selections are counted", reading, "", {"cluster.selections": 1}),
    Broken("a worker's manifests are counted", reading, "", {"worker.members": {}}),
    Broken("only of those who are there", reading, "", {"cluster.workers": {}}),
    Broken("models are known by name", reading, "", {"cluster.model_names": []}),
    Broken(
        "operations are known by key",
        reading,
        "",
        {"cluster.undecided": moved("cluster.undecided")},
    ),
    Broken("pins are counted", staying, "", {"cluster.pins": {}}),
    Broken("what a session has asked for is counted", reading, "", {"session.pending_writes": 1}),
    Broken("what a session has asked for is counted", told, "", {"model.notices.unanswered": []}),
    Broken("what a session watches is known", reading, "", {"session.watched": {"other"}}),
    Broken(
        "a name without a watcher is forgotten", reading, "", {"cluster.watchers": {"m": set()}}
    ),
    Broken("watches are counted", reading, "", {"cluster.watched": 1}),
    Broken("read-only sessions are known", reading, "", {"session.read_only": True}),
    Broken("their watches are counted", reading, "", {"cluster.read_only.watches": 1}),
    Broken("their registrations are counted", reading, "", {"worker.read_only": True}),
    Broken(
        "read-only workers without a session are known",
        reading,
        "",
        {"cluster.read_only.away": lambda scene: {scene.worker: None}},
    ),
    Broken("partial leases are counted", reading, "", {"lease.partial": True}),
]


ALLOWED: Mapping[str, tuple[Callable[[], Scene], str, Mapping[str, Any]]] = {
    "a reader reads from a reader": (bridging, "following", {}),
    "a reader that is being shut out is not known to yield": (
        reading,
        "reader.worker",
        {"lease.state": LeaseState.FENCING, "lease.yields": True},
    ),
    "a reader that is being shut out is not counted": (
        leaving,
        "member",
        {
            "lease.state": LeaseState.FENCING,
            "lease.yields": True,
            "holding.traffic.active_readers": 0,
            "model.withdrawals": {},
        },
    ),
    "a call that will be looked at is filed later": (
        waiting,
        "operation",
        {
            "operation.filed_in": [],
            "cluster.woken": lambda scene: {scene.operation.key: scene.operation},
        },
    ),
    "a reader waits for a source": (stranded, "version", {}),
    "readers complete one another": (
        reading,
        "lease",
        {
            "lease.holding": the("filling"),
            "filling.readers": the("holding.readers"),
            "lease.partial": True,
        },
    ),
    "a reader leaves one that it feeds": (
        reading,
        "lease",
        {
            "lease.holding": the("filling"),
            "filling.readers": the("holding.readers"),
            "lease.dropping": True,
        },
    ),
    "a version that is gone need not be held": (
        reading,
        "group",
        {"version.state": VersionState.RETIRED},
    ),
    "a group has several copies": (
        reading,
        "group",
        {"group.replicas": lambda scene: 2 * [scene.replica]},
    ),
    "ranks that read everything write": (
        across,
        "operation",
        {"operation.writing": True, "operation.covers": True},
    ),
    "what an operator asks for is no worker's debt": (rolling_back, "", {}),
    "stored parts need no manifest": (
        reading,
        "",
        {"layout.stored": True, "layout.parts": {77: ()}},
    ),
    "a worker that may write is away": (reading, "", {"worker.session": None}),
}  # as `Broken`


# --------------------------------------------------------------------------------------------------
# is told


NOTICED = (InvariantBroken, AttributeError, KeyError)  # the latter: what is named is not there


def check(scene: Scene, about: str) -> None:
    if not about:
        invariants.check_counts(scene.cluster)
        return
    scene.cluster.noted = {scene.find(about): None}
    invariants.check_noted(scene.cluster)


@contextlib.contextmanager
def changed(scene: Scene, values: Mapping[str, Any]) -> Iterator[None]:
    """All values are found before the first of them is changed."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        found = [
            (scene.find(path.rpartition(".")[0]), path.rpartition(".")[2], made)
            for path, made in [
                (path, value(scene) if callable(value) else value) for path, value in values.items()
            ]
        ]
        for thing, name, made in found:
            patch.setattr(thing, name, made)
        yield


@pytest.mark.parametrize("broken", TABLE, ids=lambda broken: f"{broken.what}-{broken.about}")
def test_a_broken_promise_is_told(broken: Broken) -> None:
    scene = broken.scene()
    check(scene, broken.about)
    with changed(scene, broken.values), pytest.raises(InvariantBroken) as caught:
        check(scene, broken.about)
    assert str(caught.value).startswith(f"{broken.what}: ")
    if broken.about and not {"cluster.workers", "cluster.models"} & broken.values.keys():
        # else nothing leads to the record any more
        with changed(scene, broken.values), pytest.raises(NOTICED):
            invariants.check(scene.cluster)
    check(scene, broken.about)


@pytest.mark.parametrize(("scene", "about", "values"), ALLOWED.values(), ids=ALLOWED.keys())
def test_what_may_be_breaks_no_promise(
    scene: Callable[[], Scene], about: str, values: Mapping[str, Any]
) -> None:
    with changed(scene(), values):
        check(scene(), about)


def test_each_promise_is_broken_once_at_least() -> None:
    tree = ast.parse(Path(invariants.__file__).read_text())
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    promised = {
        each.args[1].value
        for each in calls
        if ast.unparse(each.func) == "demand" and isinstance(each.args[1], ast.Constant)
    }
    assert promised == {broken.what for broken in TABLE}
