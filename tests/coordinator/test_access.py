"""What a session with the read-only token can say, and that whatever it says, nobody else's world
changes (G11).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tensorhub.coordinator import (
    CloseSession,
    Connected,
    Disconnected,
    Received,
    Send,
    Tick,
    observing,
)
from tensorhub.coordinator.corruption_checks import INQUIRY_S
from tensorhub.coordinator.limits import IDLE_S
from tensorhub.coordinator.views import describe
from tensorhub.errors import AuthenticationFailed
from tensorhub.messages import (
    Abandon,
    Announce,
    Begun,
    BegunWith,
    Check,
    Compare,
    Compared,
    CopyRefused,
    Describe,
    Description,
    DigestAgain,
    DigestedAgain,
    Digests,
    Done,
    ErrorInfo,
    Events,
    Explain,
    Fenced,
    Fill,
    Flow,
    FromCoordinator,
    FromWorker,
    GetEvents,
    GetManifest,
    GetPublication,
    GetUpdates,
    Heartbeat,
    Held,
    Join,
    LeaveRequest,
    ManifestReply,
    Outcome,
    Pin,
    Prepared,
    Progress,
    PublicationReply,
    Publish,
    ReaderCut,
    ReadFailed,
    Refused,
    Register,
    Registered,
    Restore,
    Retain,
    RetainedAck,
    Rollback,
    Start,
    Took,
    Unpin,
    Updates,
    Watch,
    Welcome,
)
from tensorhub.model.manifest import id_of
from tensorhub.testing import CHUNKS, DEVICE, SimHandle, StepwiseCluster
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.types import Endpoint, Location, Medium, OpKey, OpKind, Purpose, release
from tests.coordinator.test_read_only import Lobby

SESSION = 7000
JOIN = Join("dashboard", Location(), (Endpoint("tcp", "nowhere"),), 1, 2**40)
MINE = "read-only-1"


class Reader:
    """A peer with the read-only token, by hand."""

    def __init__(
        self, cluster: StepwiseCluster, session: int = SESSION, incarnation: str = "read-only-x"
    ) -> None:
        self.cluster = cluster
        self.session = session
        self.incarnation = incarnation
        self.closed = False
        self.step(Connected(session, incarnation, "worker", read_only=True))

    def step(self, event: Any) -> list[FromCoordinator]:
        """What it hears, of what follows of that; what others hear is delivered."""
        heard = []
        actions = self.cluster.coordinator.step(event, self.cluster.now)
        for action in actions:
            if isinstance(action, Send) and action.session == self.session:
                heard.append(action.message)
            elif isinstance(action, Send) and action.session in self.cluster.links:
                self.cluster._send_down(action.session, action.message, self.cluster.term)
            self.closed = self.closed or (
                isinstance(action, CloseSession) and action.session == self.session
            )
        self.cluster.coordinator.check_touched()
        return heard

    def say(self, message: FromWorker) -> list[FromCoordinator]:
        return self.step(Received(self.session, message))

    def fetch(self, shard: int = 0, name: str = MINE) -> Start:
        """Register what a fetch goes to, and begin it."""
        (registered,) = self.say(registers(name, name, serves=False, manifest=b"", shard=shard))
        assert isinstance(registered, Registered)
        self.key = OpKey("actor", name, registered.epoch, registered.sequence)
        (start,) = self.say(fills(self.key, OpKind.FETCH, name))
        assert isinstance(start, Start)
        return start


def registers(registration: str, group: str, **more: Any) -> Register:
    usual = Register(
        7, registration, "actor", group, 0, 0, 1, True, False, *DEVICE, "", 1, 1, b"m", None
    )
    return dataclasses.replace(usual, **more)


def fills(key: OpKey, kind: OpKind, registration: str = MINE, resume: Begun | None = None) -> Fill:
    return Fill(key, 0, registration, kind, "latest", None, 9, False, False, 60.0, (key,), resume)


def world() -> tuple[StepwiseCluster, Reader, SimHandle]:
    """A trainer that has published version 1 and is read by nobody, and a reader that has
    joined.
    """
    cluster = StepwiseCluster(manifest=make_manifest(CHUNKS, "xxh3-64"))
    trainer = cluster.handle("trainer")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    reader = Reader(cluster)
    assert reader.say(JOIN) == [
        Welcome("c", 1, 10.0, False, read_only=True, release=release(), term="term1")
    ]
    return cluster, reader, trainer


def key(cluster: StepwiseCluster, group: str = "trainer") -> OpKey:
    found = cluster.coordinator.cluster.models["actor"].groups[group]
    return OpKey("actor", group, found.epoch, found.sequence)


# ------------------------------------------------------------------------------------------- each
# message by itself


def test_what_it_says_of_links_is_not_believed() -> None:
    cluster, reader, _ = world()
    (grant,) = reader.fetch().grants
    before = cluster.coordinator.cluster.links.rates(cluster.now)
    assert reader.say(Progress(reader.key, 0, 1, 10**6, (Flow(grant.lease, 10**6, 1.0),))) == []
    assert cluster.coordinator.cluster.links.rates(cluster.now) == before


def test_it_fetches_and_looks() -> None:
    cluster, reader, trainer = world()
    content = trainer.member.content
    assert content is not None
    trainer.worker.say(
        Digests(trainer.id, content.generation, CHUNKS, ((0, CHUNKS),), b"x" * 8 * CHUNKS, True)
    )
    cluster.run()
    (news,) = reader.say(Watch("actor"))
    assert isinstance(news, Announce)
    assert news.newest is not None
    assert isinstance(reader.say(Describe(7, None))[0], Description)
    assert isinstance(reader.say(Describe(8, None, workers_max=0))[0], Description)
    assert reader.say(Check(9, "actor", 9)) == [Done(9)]
    assert isinstance(
        reader.say(GetManifest(8, "actor", news.newest.content_id, 0))[0], ManifestReply
    )
    assert isinstance(reader.say(GetPublication(8, "actor", "latest"))[0], PublicationReply)
    assert isinstance(reader.say(GetEvents(9, 0))[0], Events)
    assert isinstance(reader.say(GetUpdates(9))[0], Updates)
    assert isinstance(reader.say(Explain(9, "no such model"))[0], Refused)
    start = reader.fetch()
    assert start.write
    assert [grant.source for grant in start.grants] == ["trainer"]
    (page,) = reader.say(Prepared(reader.key, 0))
    assert page == Compare(reader.key, 0, 0, b"x" * 8 * CHUNKS, last=True)
    (outcome,) = reader.say(Compared(reader.key, 0, CHUNKS, ()))
    assert isinstance(outcome, Outcome)
    assert outcome.committed
    assert reader.say(Unpin(9, "no pin", "actor")) == [Done(9)]
    assert not cluster.coordinator.cluster.leases
    assert not reader.closed


def test_its_timings_count_for_itself_and_its_updates_push_out_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observing, "UPDATES_MAX", {False: (1, 1), True: (1, 1)})
    cluster, reader, _ = world()
    worker = cluster.handle("worker")
    cluster.run()
    worker.replicate()
    cluster.run()
    kept, before = cluster.coordinator.observations, cluster.coordinator.observations.last_event
    mine = kept.updates(cluster.now, None)[0]
    for number in range(3):
        reader.fetch(name=f"{MINE}{number}")
        reader.say(Took(reader.key, 0, 5.0))
        reader.say(Took(mine.key, 0, 99.0))
        reader.say(Abandon(reader.key, 0, ErrorInfo("StateError", "enough", False)))
    rows = {row.key.group: (row.outcome, row.seconds) for row in kept.updates(cluster.now, None)}
    assert rows == {"worker": ("committed", mine.seconds), f"{MINE}2": ("StateError", 5.0)}
    assert kept.last_event == before


def refused_messages(cluster: StepwiseCluster) -> dict[str, list[FromWorker]]:
    """Each call that is refused, by its name in the error."""
    own = OpKey("actor", MINE, key(cluster).epoch, 0)
    fetch = registers(MINE, MINE, serves=False, manifest=b"")
    held = Held(1, "c", 9, 1, 1, b"")
    return {
        "register": [
            registers(MINE, MINE),
            registers("r77", MINE, serves=False, manifest=b""),
            registers(MINE, "trainer", serves=False, manifest=b""),
            dataclasses.replace(fetch, manifest=b"m"),
            dataclasses.replace(fetch, manifest_id="known to others"),
            dataclasses.replace(fetch, medium=Medium.HOST, purpose=Purpose.PREFETCH),
            registers(MINE, MINE, medium=Medium.HOST, purpose=Purpose.RETENTION, held=held),
        ],
        "publish": [
            Publish(own, 0, MINE, 2, 9, 60.0),
            Publish(key(cluster), 0, "r0", 2, 9, 60.0),
            fills(own, OpKind.PUBLISH),
        ],
        "replicate": [fills(own, OpKind.REPLICATE), fills(key(cluster), OpKind.REPLICATE, "r0")],
        "update": [fills(own, OpKind.UPDATE)],
        "prefetch": [fills(own, OpKind.PREFETCH)],
        "retain": [Retain(7, "actor", 5)],
        "pin": [Pin(7, "p", "actor", 1)],
        "rollback": [Rollback(7, "i", "actor", 0)],
        "restore": [Restore(7, "actor", "c", 0, 0, ())],
        "unpublish": [LeaveRequest(7, "r0", 1, 60.0, True, False)],
    }


@pytest.mark.parametrize("call", refused_messages(world()[0]))
def test_what_changes_something_is_refused_by_name_and_the_session_goes_on(call: str) -> None:
    cluster, reader, _ = world()
    before = books(cluster)
    for message in refused_messages(cluster)[call]:
        (answer,) = reader.say(message)
        assert isinstance(answer, Refused | Outcome)
        assert answer.error is not None
        error = answer.error.error()
        assert isinstance(error, AuthenticationFailed)
        assert f"this token is read-only: {call} needs" in str(error)
        assert not error.retryable
    assert books(cluster) == before
    assert not reader.closed
    assert len(reader.say(Heartbeat(1))) == 1


def test_what_is_said_of_memory_that_others_read_is_not_heard() -> None:
    cluster, reader, trainer = world()
    (held,) = holdings(cluster)
    before = books(cluster)
    for message in (
        Fenced(trainer.id, held.generation),
        RetainedAck(trainer.id, held.version.info.content_id, False, 1),
        DigestedAgain("x", trainer.id, True),
        CopyRefused("x", ""),
        ReaderCut("x"),
    ):
        assert reader.say(message) == []
    assert books(cluster) == before


def test_its_host_memory_is_none_and_it_is_no_source() -> None:
    cluster, reader, trainer = world()
    reader.fetch()
    reader.say(Prepared(reader.key, 0))
    core = cluster.coordinator.cluster
    assert core.workers[reader.incarnation].host_bytes == 0
    assert reader.incarnation not in core.hosts
    asked = trainer.close()  # retained versions would go to whoever has room
    cluster.run()
    assert asked.done
    assert all(
        holding.member.worker.incarnation != reader.incarnation for holding in holdings(cluster)
    )


def holdings(cluster: StepwiseCluster) -> list[Any]:
    versions = cluster.coordinator.cluster.models["actor"].versions.values()
    return [
        holding for version in versions for each in version.holdings.values() for holding in each
    ]


def test_it_is_never_taken_for_a_full_worker_nor_the_other_way_round() -> None:
    cluster, reader, trainer = world()
    # the handshake lets nobody be called so
    thief = Reader(cluster, SESSION + 1, trainer.worker.incarnation)
    (answer,) = thief.say(JOIN)
    assert "another kind of token" in str(answer)
    assert thief.closed
    assert cluster.coordinator.cluster.workers[trainer.worker.incarnation].session != thief.session
    full = SESSION + 2
    cluster.coordinator.step(Connected(full, reader.incarnation, "worker"), cluster.now)
    actions = cluster.coordinator.step(Received(full, JOIN), cluster.now)
    assert CloseSession in map(type, actions)
    assert cluster.coordinator.cluster.workers[reader.incarnation].session == reader.session


def test_a_reader_is_not_in_another_readers_way() -> None:
    cluster, reader, _ = world()
    reader.fetch()
    other = Reader(cluster, SESSION + 1, "read-only-y")
    other.say(JOIN)
    reader.step(Disconnected(reader.session))  # a full worker could take its place now
    for names in ((MINE, "read-only-2"), ("read-only-2", MINE)):
        (answer,) = other.say(registers(*names, serves=False, manifest=b""))
        assert isinstance(answer, Refused)
    assert [
        lease.part.member.worker.incarnation
        for lease in cluster.coordinator.cluster.leases.values()
    ] == ["read-only-x"]


# --------------------------------------------------------------------------------------------------
# a lying reader


def test_however_many_readers_doubt_a_source_it_digests_once_a_second() -> None:
    cluster, reader, trainer = world()
    questions = []
    trainer.worker.hear = lambda message: questions.append(message)  # type: ignore[method-assign]
    for number in range(20):
        each = Reader(cluster, SESSION + 1 + number, f"read-only-{number}")
        each.say(JOIN)
        (grant,) = each.fetch(name=f"read-only-g{number}").grants
        each.say(ReadFailed(each.key, 0, grant.lease, "corrupt", "", 0))
    cluster.run()
    assert sum(isinstance(message, DigestAgain) for message in questions) == 1
    cluster.now += INQUIRY_S
    (grant,) = reader.fetch().grants
    reader.say(ReadFailed(reader.key, 0, grant.lease, "corrupt", "", 0))
    cluster.run()
    assert sum(isinstance(message, DigestAgain) for message in questions) == 2
    del trainer.worker.hear
    info = describe(cluster.coordinator.cluster.models["actor"], cluster.now)[0]
    assert [shard.state for replica in info.replicas for shard in replica.shards] == ["complete"]


def test_a_manifest_that_a_reader_claims_to_have_begun_with_is_its_own() -> None:
    """After a restart nobody has said yet what the version's manifest is."""
    cluster, _, trainer = world()
    content_id = cluster.coordinator.cluster.models["actor"].versions[1].info.content_id
    trainer.worker.crash()
    cluster.run()
    cluster.restart()
    cluster.run()
    reader = Reader(cluster, SESSION + 1)
    reader.say(JOIN)
    (registered,) = reader.say(registers(MINE, MINE, serves=False, manifest=b""))
    assert isinstance(registered, Registered)
    operation = OpKey("actor", MINE, registered.epoch, registered.sequence)
    begun = Begun(operation, 1, content_id, id_of(b"forged"), written=True)
    assert reader.say(BegunWith(MINE, b"forged")) == []
    (start,) = reader.say(fills(operation, OpKind.FETCH, resume=begun))
    assert isinstance(start, Start)
    assert start.manifest_id == id_of(b"forged")
    assert cluster.coordinator.cluster.models["actor"].versions[1].manifests == {}
    assert cluster.coordinator.cluster.manifests.nbytes == 0


def test_what_a_reader_registers_for_a_fetch_holds_nothing() -> None:
    cluster, reader, _ = world()
    reader.say(JOIN)
    held = Held(1, "content", 9, 1, 1, b"x" * 1000)
    (refused,) = reader.say(registers(MINE, MINE, serves=False, manifest=b"", held=held))
    assert isinstance(refused, Refused)
    assert MINE not in cluster.coordinator.cluster.members


def test_a_session_that_calls_nothing_ends_when_its_time_is_over_and_not_before() -> None:
    lobby = Lobby()
    lobby.reader(1)
    idle_at = lobby.core.cluster.sessions[1].called_at + IDLE_S
    lobby.wait(IDLE_S - 2.0, beating=(1,))
    for now in (idle_at - 0.001, idle_at):
        assert lobby.is_open(1)
        lobby.core.step(Tick(), now)
    assert not lobby.is_open(1)


def test_a_readers_calls_that_are_over_are_not_piled_up() -> None:
    """It ends each before it calls the next, with as long an error as it likes."""
    cluster, reader, _ = world()
    reader.say(JOIN)
    reader.fetch()
    for sequence in range(20):
        key = dataclasses.replace(reader.key, sequence=sequence)
        reader.say(Abandon(key, 0, ErrorInfo("StateError", "x" * 16_000, False)))
    (group,) = (
        g for g in cluster.coordinator.cluster.models["actor"].groups.values() if g.name == MINE
    )
    assert len(group.decided) == 1


# ------------------------------------------------------------------------------------------------
# whatever it may say


def books(cluster: StepwiseCluster) -> dict[str, Any]:
    """All that others can see, or that would change what becomes of them; leases of readers
    aside.
    """
    core, found = cluster.coordinator.cluster, dict[str, Any]()
    full = {
        incarnation: worker for incarnation, worker in core.workers.items() if not worker.read_only
    }
    for worker in full.values():
        found[worker.incarnation] = (
            worker.state,
            worker.session,
            worker.host_bytes,
            worker.spot,
            worker.location,
        )
    found["sessions"] = {
        session.number for session in core.sessions.values() if not session.read_only
    }
    found["lost"], found["orders"], found["hosts"] = (
        list(core.lost),
        list(core.pending_writes),
        list(core.hosts),
    )
    found["decisions"], found["records"] = dict(core.decisions), list(core.records)
    for registration, member in core.members.items():
        if not member.worker.read_only:
            held = [
                (h.generation, h.complete, h.committed, h.trust.quarantined, h.version.number)
                for h in _of(member)
            ]
            found[registration] = (
                member.worker.incarnation,
                member.group.epoch,
                member.group.sequence,
                member.retained_seq,
                held,
            )
    for name in sorted(core.models):
        model = core.models[name]
        if not model.versions and not any(g for g in model.groups.values() if not _readers(g)):
            continue  # a name that was only asked for is forgotten when nobody does any more
        versions = {
            v.number: (v.state, v.info, v.lineage, dict(v.manifests))
            for v in model.versions.values()
        }
        groups = {
            g.name: (g.epoch, g.sequence, g.operation)
            for g in model.groups.values()
            if not _readers(g)
        }
        pins, rest = (
            dict(model.pins),
            (
                model.mark,
                model.history.lineage,
                model.retain,
                list(model.withdrawals),
                list(model.history.rollbacks),
            ),
        )
        found[f"model {name}"] = (versions, groups, pins, rest)
    return found


def _of(member: Any) -> list[Any]:
    return [each for each in (member.holding, *member.leaving) if each is not None]


def _readers(group: Any) -> bool:
    return bool(group.members) and all(member.worker.read_only for member in group.members.values())
