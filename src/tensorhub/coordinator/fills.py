"""Fill: bind to a version with a live source, write when every rank is ready, find sources until
all is verified (R7, R12).

A fill is a replicate, an update, a prefetch or a fetch. A fetch fills memory that serves no reader:
it makes no replica and no holding, only leases. A staged update fills staging memory: the previous
holdings of its ranks count until all ranks have voted, and the new replica begins with the commit.

Not responsible for the source of a reader (`readers`), nor for the end of an operation
(`decisions`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.coordinator import limits, refusals, ways
from tensorhub.coordinator.actions import Decision
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.coverage import Coverage
from tensorhub.coordinator.entities import Holding, Member, Operation, RankPart, Version
from tensorhub.coordinator.holdings import Holdings
from tensorhub.coordinator.readers import Readers
from tensorhub.coordinator.refusals import Blame
from tensorhub.coordinator.registrations import ManifestQuestions
from tensorhub.coordinator.retention import Retentions
from tensorhub.coordinator.source_choice import SourceChoice
from tensorhub.coordinator.states import OperationState, PartState, ReplicaState
from tensorhub.coordinator.testimonies import Testimonies
from tensorhub.coordinator.versions import Versions
from tensorhub.coordinator.waiting import wants_source
from tensorhub.coordinator.ways import Source, Way
from tensorhub.errors import (
    GroupAborted,
    StateError,
    TensorHubError,
    TransportUnavailable,
    VersionUnavailable,
)
from tensorhub.messages import AddSource, Fill, Grant, ReadyToWrite, Start, Write
from tensorhub.types import AVAILABLE, OpKind, host_group

# sources with unchanged bytes, of which one reader got damaged bytes: then the sources are not to
# blame
EXONERATED_MAX = 2
_GATHERING = OperationState.GATHERING  # Python 3.11 takes long to look up a member of an enum


@dataclass(eq=False, repr=False)
class Fills:
    """The handler of operations that read."""

    _cluster: Cluster
    _versions: Versions
    _readers: Readers
    _choice: SourceChoice
    _holdings: Holdings
    _retentions: Retentions
    _testimonies: Testimonies
    _manifest_questions: ManifestQuestions
    _coverage: Coverage

    # -- questions

    def target(self, operation: Operation) -> Version | None:
        """The visible version that its ranks ask for, or None while there is none. Raises
        VersionUnavailable.
        """
        begun, call = operation.resumes, first_call(operation)
        if begun is not None:
            return self._versions.resumed(operation.group.model, begun)
        at_least = _at_least(operation)
        if call.selector == AVAILABLE:
            return self._versions.available(operation, at_least)
        return self._versions.resolve(operation.group.model, call.selector, at_least, operation)

    def staying(self, operation: Operation, version: Version) -> list[Holding]:
        """What its ranks hold and must not overwrite with `version` now, since a retained version
        would be lost (G5).
        """
        old = [
            part.member.holding
            for part in operation.parts.values()
            if part.member.holding is not None
        ]
        return [h for h in old if h.version is not version and self._retentions.must_stay(h)]

    def _must_wait(self, operation: Operation, version: Version) -> bool:
        """Whether a holding has to stay; then `handovers` finds workers that take it over."""
        staying = self.staying(operation, version)
        if [id(h) for h in staying] != [id(h) for h in operation.staying]:
            operation.staying = staying
            self._cluster.touch(operation.group.model)
        return bool(staying)

    def _is_read_on(self, operation: Operation, version: Version) -> bool:
        """R7: whether a holding that `version` is to overwrite has running readers without another
        source. These readers have the grace of the readers of memory that is unpublished. Read-only
        readers have no grace here, since they must not delay a worker.
        """
        old = [
            part.member.holding
            for part in operation.parts.values()
            if part.member.holding is not None
        ]
        if operation.is_staged or not any(
            h.version is not version and h.is_read_alone for h in old
        ):
            return False
        if operation.grace_until is None:
            left_s = min(part.deadline for part in operation.parts.values()) - self._cluster.now
            operation.grace_until = self._cluster.now + min(
                self._cluster.options.drain_grace_s, max(0.0, left_s) / 2
            )
            self._cluster.timers.set("retry", operation.name, operation.grace_until)
        return self._cluster.now < operation.grace_until

    def first_sources(self, operation: Operation) -> dict[int, list[Source]] | None:
        """R7: before anything is overwritten, every shard that is to be read can be read. From
        where, by rank; None: one of them cannot be.
        """
        found = dict[int, list[Source]]()
        for part in operation.parts.values():
            if part.needs_bytes and not part.has_written:
                sources = self._readers.sources(part) if ways.serve(operation) else []
                if not (ways.are_enough(sources, part.needs or ()) if part.bridges else sources):
                    return None
                found[part.rank] = sources
        return found

    # -- an operation's steps

    def called(self, part: RankPart) -> Blame | None:
        """A group binds once its last rank has called, so that it gets the newest version.

        After a restart of the coordinator only ranks that had begun together go on together. A rank
        that calls anew (it gave up, or is another process; R6) may ask for a newer version (G3):
        then the fill that the remaining ranks have begun is over.
        """
        operation = part.operation
        begun = {p.rank: p.begun for p in operation.parts.values() if p.begun is not None}
        if len({each.content_id for each in begun.values()}) > 1:
            return Blame(
                GroupAborted(
                    f"{refusals.BEGUN} with different versions on the "
                    f"ranks {sorted(begun)}; call again"
                )
            )
        for rank, each in begun.items():
            for other in operation.parts.values():
                if isinstance(other.call, Fill) and each.key not in other.call.former:
                    text = (
                        f"{refusals.BEGUN} on rank {rank}, and rank {other.rank} has made a new "
                        f"call since; call again"
                    )
                    return Blame(GroupAborted(text))
        return None

    def advance(self, operation: Operation) -> Blame | None:
        """Bind if it can be, and go on from there."""
        if operation.state is _GATHERING:
            blame = self._bind(operation)
            if blame is not None:
                return blame
        if not operation.running or operation.unchanged:
            return None
        if self._selects_another(operation, operation.bound):
            return refusals.selects_another(operation, operation.bound)
        if not operation.writing:
            blame = self._write_if_ready(operation)
            if blame is not None:
                return blame
        return (
            self._testimonies.settle(operation)
            or refusals.outlived(operation)
            or self._feed(operation)
        )

    def _selects_another(self, operation: Operation, bound: Version) -> bool:
        """R12: whether the bound version cannot be read any more, and the selector of the call
        names another version now. In its first lease a coordinator waits for holders that may come
        back, and that may still be read (G8), unless a newer version can be read already.
        """
        call, parts = first_call(operation), operation.parts.values()
        if operation.calls_number or ways.of(bound, operation).serves:
            return False
        if operation.writing and not any(map(wants_source, parts)):
            return False
        named: Version | None
        if call.selector == AVAILABLE:
            named = self._versions.newest_available(operation, _at_least(operation)) or bound
        else:
            named = self._versions.resolve(operation.group.model, call.selector, None)
        if named is bound or not self._cluster.is_recovering:
            return named is not bound
        is_newer = named is not None and named.number > bound.number
        return named is not None and is_newer and ways.of(named, operation).serves

    def ready(self, part: RankPart, message: ReadyToWrite) -> Blame | None:
        """Its manifest fits, and its before_write has returned. If it names parts that are not
        known, it says this again.
        """
        if part.bridges and part.needs is None:
            session, parts = part.member.worker.session, None
            error = ways.check(part, message, self._cluster.selections)
            if error is None and session is not None:
                parts = (
                    self._manifest_questions.with_parts(session, message)
                    if part.member.said.serves
                    else ()
                )
                error = self._arranged(part, parts) if parts else None
            if error is not None:
                return Blame(error, part.rank)
            if parts is None:
                return None
            self._manifest_questions.came(*message.part_ids)
            part.needs = part.layout.needs[part.shard] = message.needs
            self._testimonies.expect(part)
        self._coverage.ready(part)
        part.move(self._cluster.now)
        if not part.ready:
            self._cluster.become(part, PartState.READY, "said ReadyToWrite")
        self._cluster.changed(part.operation, part)
        return None

    def _arranged(self, part: RankPart, parts: tuple[bytes, ...]) -> TensorHubError | None:
        """It has said where it reads to. Why that cannot be kept, if it cannot."""
        cluster, member, nbytes = self._cluster, part.member, sum(map(len, parts))
        others = cluster.manifest_bytes[member.worker.incarnation] - sum(map(len, member.arranged))
        who, layout, full = f"rank {part.rank} of group {member.group.name!r}", part.layout, ""
        if not layout.takes(part.shard, parts):
            return StateError(
                f"{who} has it elsewhere than others of the layout "
                f"{layout.layout_id}, which fill it too"
            )
        if others + nbytes > limits.MANIFEST_BYTES_OF_WORKER_MAX:
            full = (
                f"its worker's manifests would have {others + nbytes} bytes "
                f"(MANIFEST_BYTES_OF_WORKER_MAX)"
            )
        elif not cluster.manifests.has_room_for(*parts):
            full = f"all manifests have {cluster.manifests.nbytes} bytes (MANIFEST_BYTES_MAX)"
        if full:
            return StateError(
                f"{who} cannot read another layout: {full}; close handles first", retryable=True
            )
        cluster.keep_arranged(member, parts)
        cluster.learn(part.operation.bound, layout, part.shard, b"", parts)
        return None

    def may_commit(self, operation: Operation) -> bool:
        """A staged update has overwritten nothing yet. It gives up what it replaces now, if that
        may go (R4, R7).
        """
        if not operation.is_staged:
            return True
        if self._must_wait(operation, operation.bound):
            return False
        for part in operation.parts.values():
            if part.needs_bytes and part.member.holding is not None:
                self._holdings.overwrite(part.member.holding)
        return True

    def entry(self, operation: Operation) -> Decision | None:
        """What several ranks must agree on is recorded first."""
        return operation.decision() if operation.group.world_size > 1 else None

    def commit(self, operation: Operation) -> None:
        """What its ranks filled, and what they held already, is one replica, and counts."""
        if operation.is_staged:
            self._begin_staged(operation)
        filled = [p.holding for p in operation.parts.values() if p.holding is not None]
        if not filled:
            return  # a fetch, or nothing has changed
        for holding in filled:
            holding.committed = True
        self._cluster.reckon(*filled)
        replica = filled[0].replica
        if replica.state is not ReplicaState.FILLING:
            return  # every rank that filled it is gone
        for part in operation.parts.values():
            if not part.needs_bytes and part.member.holding is not None:
                self._holdings.move(part.member.holding, replica)
        self._holdings.make_ready(replica, "committed")

    def _begin_staged(self, operation: Operation) -> None:
        """What its ranks have staged counts from now on, under the generations that they open once
        they have copied it.
        """
        there = [
            p
            for p in operation.parts.values()
            if self._cluster.members.get(p.member.registration) is p.member
        ]
        if any(part.needs_bytes for part in there):
            self._begin_replica(operation, there)
        for part in there:
            if part.holding is not None:
                self._holdings.completed(part.holding)

    def abort(self, operation: Operation) -> None:
        """All reads end; memory that was written to is torn."""
        replica = next(
            (p.holding.replica for p in operation.parts.values() if p.holding is not None), None
        )
        for part in operation.parts.values():
            self._readers.release_all(part, "operation aborted")
            if part.holding is not None and not part.holding.leaving:
                self._holdings.tear(part.holding)
        if replica is not None and replica.state is ReplicaState.FILLING:
            self._cluster.become(replica, ReplicaState.TORN, "operation aborted")
            self._holdings.settle_replica(replica)

    # -- binding

    def _bind(self, operation: Operation) -> Blame | None:
        """R12: bind once that version has a live source, or the group holds it; wait until then.

        R7: wait also until the group may give up what it holds, so that no `before_write` pauses an
        engine for that.
        """
        try:
            version = self.target(operation)
        except VersionUnavailable as error:
            return Blame(error) if operation.resumes is None else refusals.gone(operation, error)
        if version is None:
            self._wait(operation, "version")
            return None
        way = ways.of(version, operation)
        misfit = refusals.misfit(operation, version) or self._no_way(operation, version, way)
        misfit = (
            misfit or refusals.unnamed(operation, version) or refusals.misnamed(operation, version)
        )
        if misfit is not None:
            return misfit
        # a begun prefetch goes on
        may_be_in_use = operation.kind is OpKind.PREFETCH and operation.resumes is None
        in_use = may_be_in_use and all(_uses(part, version) for part in operation.parts.values())
        holders = {
            rank: in_use or _holds(part.member, version) for rank, part in operation.parts.items()
        }
        # a rank that holds it in another layout than its group fills it again
        if not all(holders.values()):
            is_its = {rank: _holds_in(part.member, way) for rank, part in operation.parts.items()}
            holders = {rank: in_use or (holds and is_its[rank]) for rank, holds in holders.items()}
        is_unchanged = all(holders.values())
        fresh = [
            rank
            for rank, part in operation.parts.items()
            if not holders[rank] and not part.has_written
        ]
        if not (way.is_known or is_unchanged) or (fresh and not way.serves):
            waits = self._cluster.is_recovering or not operation.calls_number
            lost = "" if waits else refusals.only_elsewhere(operation, version)
            if lost:
                return Blame(VersionUnavailable(lost))
            if operation.resumes is not None and self._selects_another(operation, version):
                return refusals.selects_another(operation, version)
            self._wait(operation, "source")
            return None
        if fresh and (self._must_wait(operation, version) or self._is_read_on(operation, version)):
            self._wait(operation, "fence")
            return None
        operation.staying = []
        self._cluster.bind(operation, version)
        bridges_it = way.published is not None
        layout = self._cluster.lay_out(version, operation.group) if bridges_it else version.holdings
        if bridges_it and not is_unchanged:
            self._cluster.describe(version, version.holdings)
        self._cluster.become(operation, OperationState.RUNNING, f"bound to {version.number}")
        for rank, part in operation.parts.items():
            part.move(self._cluster.now)
            part.in_layout = layout
            part.needs_bytes = not holders[rank]
            if holders[rank]:
                self._cluster.become(part, PartState.VOTED, "holds the bound content")
            elif part.has_written and not bridges_it:
                self._cluster.become(part, PartState.READY, "has begun to write")
            if manifest := refusals.named(part):
                # Else they are of other regions. A rank of another layout says later where the
                # published bytes lie.
                parts = part.member.said.parts if manifest == part.member.said.manifest else ()
                known = ways.as_known(part.member, version, parts) if not bridges_it else None
                self._cluster.learn(version, layout, part.shard, manifest, known)
                self._cluster.keep_begun(part.member, b"")
            elif bridges_it:
                self._cluster.learn(version, layout, part.shard, part.member.said.manifest)
        if not operation.unchanged:
            self._start(operation)
        return None

    def _wait(self, operation: Operation, name: str) -> None:
        """Have people told what its ranks wait for."""
        self._cluster.observations.waits(self._cluster.now, operation, name)

    @staticmethod
    def _no_way(operation: Operation, version: Version, way: Way) -> Blame | None:
        """Which rank has no transport in common with its shard's sources, if one has none."""
        for part in operation.parts.values():
            offered = ways.offered_in_vain(part, version, way)
            if offered:
                worker = part.member.worker
                mine = ", ".join(endpoint.transport for endpoint in worker.endpoints) or "none"
                text = (
                    f"rank {part.rank} has {mine}, and version {version.number} is offered over "
                    f"{', '.join(offered)} only"
                )
                if way.published is not None:
                    able = ", ".join(sorted(worker.strided)) or "none"
                    text += (
                        f"; it reads across layouts, which of its transports {able} can: let "
                        f"both sides have tcp, too"
                    )
                return Blame(TransportUnavailable(text))
        return None

    # -- writing

    def _start(self, operation: Operation) -> None:
        """Tell all ranks to start. Start is Write, too, if nothing can keep a rank from writing: no
        rank has a hook, and a shard is overwritten by a shard with an equal manifest only.
        """
        fillers = [part for part in operation.parts.values() if part.needs_bytes]
        fresh = [part for part in fillers if not part.has_written]
        bare = operation.is_staged or not any(
            (isinstance(p.call, Fill) and p.call.hold)
            or (p.member.holding is not None and not _is_alike(p))
            for p in fresh
        )
        # what they need is not known before they have planned
        bridging = any(part.bridges for part in fillers)
        sources = self.first_sources(operation) if bare and not bridging else None
        if sources is not None:
            self._begin_write(operation)
        for part in sorted(fillers, key=lambda part: part.rank):
            self._tell_start(part, () if sources is None else self._first_grants(part, sources))

    def restate(self, part: RankPart) -> None:
        """A rank may have missed something: tell it again what it was told."""
        if not part.needs_bytes or not part.operation.running:
            return
        leases = part.leases.values()
        self._tell_start(
            part, tuple(self._readers.to_grant(lease) for lease in leases if not lease.dropping)
        )
        for lease in leases:
            if lease.dropping:
                self._readers.tell_to_drop(lease, "the source leaves")

    def _tell_start(self, part: RankPart, grants: tuple[Grant, ...]) -> None:
        operation, version = part.operation, part.operation.bound
        manifest, id_of = part.layout.manifests.get(part.shard), self._cluster.manifests.id_of
        if manifest is not None:
            manifest_id = id_of(manifest) if manifest else ""
        else:  # it is a fetch, and no full worker has said it yet
            assert part.begun is not None
            manifest_id = part.begun.manifest_id
        root = self._testimonies.root_for(part)
        part_ids = () if part.bridges else tuple(map(id_of, part.layout.parts.get(part.shard, ())))
        publication = version.holdings.described_as if part.bridges else ""
        what = (version.info, manifest_id, operation.writing, grants, root, part_ids, publication)
        start = Start(operation.key, part.rank, *what)
        self._cluster.tell(part.member, start)

    def _write_if_ready(self, operation: Operation) -> Blame | None:
        """Nothing is overwritten before every rank is ready and a source for every shard is
        there.
        """
        version = operation.bound
        if operation.is_forsaken and not ways.serve(operation):
            return refusals.abandoned(operation)
        if not all(part.ready for part in operation.parts.values()):
            return None
        if not self._coverage.is_known(operation):
            self._wait(operation, "others")
        elif (sources := self.first_sources(operation)) is None:
            self._wait(operation, "source")
        elif self._must_wait(operation, version):
            self._wait(operation, "fence")
        else:
            self._begin_write(operation)
            for _, part in sorted(operation.parts.items()):
                if part.needs_bytes:
                    grants = self._first_grants(part, sources)
                    self._cluster.tell(part.member, Write(operation.key, part.rank, grants))
        return None

    def _first_grants(self, part: RankPart, sources: dict[int, list[Source]]) -> tuple[Grant, ...]:
        """A choice that was made before the write began is still the best: a write changes holdings
        of other versions only. Ranks that bridge may read from one shard, and each rank chooses
        again: the rank before it has a share of its sources now.
        """
        chosen = sources.get(part.rank)  # none, if it has written before
        if chosen is None or part.bridges:
            return tuple(self._readers.grant(part))
        return tuple([self._readers.lend(part, *source) for source in chosen])

    def _begin_write(self, operation: Operation) -> None:
        """Every rank is ready: the old replica leaves, the new one begins. From here on an abort
        leaves torn memory.
        """
        operation.writing = True
        self._cluster.look_at_all(operation)
        for part in operation.parts.values():
            part.move(self._cluster.now)
            if part.needs_bytes:
                self._cluster.become(part, PartState.READING, "told to write")
        if operation.kind is not OpKind.FETCH and not operation.is_staged:
            self._begin_replica(operation, list(operation.parts.values()))

    def _begin_replica(self, operation: Operation, parts: list[RankPart]) -> None:
        version = operation.bound
        replica = self._holdings.new_or_torn_replica(version, parts[0].member)
        if replica.state is ReplicaState.TORN:
            self._cluster.become(replica, ReplicaState.FILLING, f"filled with {version.number}")
        for part in parts:
            old = part.member.holding
            if part.needs_bytes:
                if old is not None:
                    self._holdings.overwrite(old)
                assert isinstance(part.call, Fill)
                part.holding = Holding(
                    replica, part.member, part.call.generation, False, False, part.layout
                )
                self._holdings.add(part.holding)

    def _feed(self, operation: Operation) -> Blame | None:
        """Find sources for each reader that needs one. If the last one has left on purpose, that
        will never succeed.
        """
        for part in list(operation.parts.values() if operation.news is None else operation.news):
            reads = part.reads
            if reads and len(part.proof.exonerated) >= EXONERATED_MAX:
                return Blame(refusals.damaged(operation, part), part.rank)
            if (drifted := refusals.drifted(part)) is not None:
                return Blame(refusals.not_equal(operation, *drifted), part.rank)
            if part.holding is not None and part.holding.trust.condemned:
                return Blame(refusals.condemned(operation, part), part.rank)
            if not reads:
                continue
            for grant in self._readers.assign_sources(part):
                self._cluster.tell(part.member, AddSource(operation.key, part.rank, grant))
            if part.attempts.damaged and wants_source(part) and not self._choice.is_left(part):
                return Blame(refusals.unreadable(operation, part), part.rank)
            alone = wants_source(part) and all(lease.dropping for lease in part.leases.values())
            if alone and operation.is_forsaken and not ways.serve(operation):
                return refusals.abandoned(operation)
        return None


def first_call(operation: Operation) -> Fill:
    """The call that says what all ranks of a fill have called."""
    call = next(iter(operation.parts.values())).call
    assert isinstance(call, Fill)
    return call


def _at_least(operation: Operation) -> int | None:
    """The oldest version that all ranks of a fill take."""
    calls = [part.call for part in operation.parts.values()]
    least = [call.at_least for call in calls if isinstance(call, Fill) and call.at_least]
    return max(least, default=None)


def _holds(member: Member, version: Version) -> bool:
    return member.holding is not None and member.holding.version is version


def _holds_in(member: Member, way: Way) -> bool:
    return member.holding is not None and member.holding.layout is way.layout


def _is_alike(part: RankPart) -> bool:
    """Whether the rank fills a shard with the manifest that it has registered."""
    return (
        not part.bridges
        and part.member.said.manifest != b""
        and part.layout.manifests.get(part.shard) == part.member.said.manifest
    )


def _uses(part: RankPart, version: Version) -> bool:
    """Whether the rank that this host copy is for holds that version itself, so that nothing is to
    be prefetched.
    """
    others = part.member.worker.members.values()
    mine = (
        m
        for m in others
        if m.rank == part.rank and host_group(m.group.name) == part.member.group.name
    )
    return any(_holds(member, version) for member in mine)
