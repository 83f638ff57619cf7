"""Who reads from whom: read leases, their sources, and what becomes of readers whose source leaves.

Leases schedule and count; they protect nothing (R3): only an owner's own fence does. Not responsible for what it means that
a reader has no source (`operations`), nor for when a source may leave (`withdrawals`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from tensorhub.coordinator import bridges, limits, replicas
from tensorhub.coordinator.bridges import Source
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Holding, Member, Operation, RankPart, ReadLease, Replica, Version, Worker
from tensorhub.coordinator.holders import Holders
from tensorhub.coordinator.states import LeaseState, ReplicaState, WorkerState
from tensorhub.coordinator.ways import Way
from tensorhub.messages import AddSource, CutReader, DropSource, Fenced, Flow, Grant, Need, ReaderCut, Revoked
from tensorhub.scheduler.choice import Wanted, finish_s
from tensorhub.scheduler.links import SECONDS_MIN, distance
from tensorhub.types import SAME_HOST_TRANSPORTS

RETRY_S_FIRST = 0.05  # before a source that has failed is tried again; doubles each time
RETRY_S_MAX = 2.0
PATCHES_MAX = 4  # partial copies that one reader reads from while nobody holds all of it


@dataclass(eq=False, repr=False)
class Readers:
    """Changes leases and holdings; nobody else does."""

    _cluster: Cluster
    # Who is fed no more in this step. What is filled from it seems to be fed until `settle`.
    _dry: dict[Holding, None] = field(default_factory=dict, init=False)

    # -- granting

    def grant(self, part: RankPart) -> list[Grant]:
        """New leases on the best sources for this reader, as far as there are candidates now."""
        return [self.lend(part, *source) for source in self.sources(part)]

    def sources(
        self, part: RankPart, needs: Sequence[Need] | None = None, *, other_than: Holding | None = None
    ) -> list[Source]:
        """From whom it reads best; if it bridges, as far as it needs that (None: all). Empty: there is no candidate now."""
        version = part.operation.bound
        if part.bridges:
            wanted = part.needs or () if needs is None else needs
            return bridges.choose(part, wanted, lambda need: self.choose(part, version, need, other_than=other_than))
        holding = self.choose(part, version, other_than=other_than)
        return [] if holding is None else [(None, holding)]

    def lend(self, part: RankPart, need: Need | None, holding: Holding) -> Grant:
        """A new lease on a source that was chosen for this reader. Everything comes through it, or all of this need."""
        if part.holding is not None:
            part.holding.depth = holding.depth + 1
        return self._lend(part, holding, partial=False, need=need)

    def _lend(self, part: RankPart, holding: Holding, *, partial: bool, need: Need | None = None) -> Grant:
        ident = self._cluster.new_id()
        flow = Flow(ident, 0, 0.0)
        lease = ReadLease(ident, part, holding, partial, is_of_whole=holding.complete, flow=flow, need=need)
        manifest = holding.version.manifests.get(holding.shard)
        if need is not None and manifest:
            lease.root, lease.manifest_id = (
                bridges.enclosing_root(part, need, holding),
                self._cluster.manifests.id_of(manifest),
            )
        lease.story.note(self._cluster.cause, self._cluster.now, "granted")
        self._cluster.leases[lease.id] = holding.readers[lease.id] = part.leases[lease.id] = lease
        if need is not None and holding.shard not in replicas.proven(holding.version, holding.layout, need.shard):
            holding.version.unproven.add(need.shard)
        model = holding.member.group.model
        model.leases[lease.id] = part.member.reads[lease.id] = lease
        holding.peers.patches += partial
        if part.member.worker.read_only:
            self._admit(holding, part.member.worker)
        holding.active_readers += 1
        readers = holding.active_readers
        self._cluster.reckon(holding)
        if part.holding is not None:
            self._cluster.reckon(part.holding)
            if holding.is_fed and (need is None or part.holding.is_filled_by(_is_fed)):
                if (
                    partial and self._dry
                ):  # the source may be filled from this reader: that is not known before all are settled
                    self._dry[part.holding] = None
                else:
                    self._spread(part.holding)
        holding.readers_most = max(readers, holding.readers_most if readers > 1 else 0)
        self._cluster.note(lease, part.member, part.operation, holding.member, model)
        return self.to_grant(lease)

    def _admit(self, holding: Holding, guest: Worker) -> None:
        """Count one more read-only reader. If there are too many, another one makes room."""
        victim = holding.guests.at_whose_expense(guest.origin, guest) if holding.guests.is_used_up else None
        if victim is not None:
            active = (lease for lease in holding.readers.values() if lease.state is LeaseState.ACTIVE)
            lease = next(lease for lease in active if lease.part.member.worker is victim)
            self._cut(lease, "others read there")
            self.tell_to_cut(lease)
            self._cluster.wake(lease.part.operation)
        holding.guests.add(guest.origin, guest)

    @staticmethod
    def _has_room(holding: Holding, worker: Worker) -> bool:
        """Whether this worker may read there, if need be in another guest's place."""
        guests = holding.guests
        is_full = worker.read_only and guests.is_used_up
        return not is_full or guests.at_whose_expense(worker.origin, worker) is not None

    def learn(self, part: RankPart, flows: Iterable[Flow]) -> None:
        """A reader reports what has come from its sources. A read-only reader is not believed."""
        reader = part.member.worker
        for flow in flows:
            lease = part.leases.get(flow.lease)
            if lease is None or reader.read_only:
                continue
            nbytes, seconds = flow.nbytes - lease.flow.nbytes, flow.seconds - lease.flow.seconds
            if nbytes < 0 or seconds < SECONDS_MIN:
                continue  # or too little yet
            apart = distance(reader.location, lease.holding.member.worker.location)
            sharers = lease.holding.readers_most if lease.is_of_whole and len(part.leases) == 1 else None
            self._cluster.links.heard(reader.incarnation, apart, nbytes, seconds, sharers, self._cluster.now)
            lease.flow = flow
            self._cluster.note(lease)

    def assign_sources(self, part: RankPart) -> list[Grant]:
        """New leases for a reader whose leases do not bring it everything: on a source or, while nobody holds the whole
        shard, on other readers' partial copies. They wait together for what all of them lack (R9).
        """
        for lease in list(part.leases.values()):
            if lease.is_dry or (lease.holding.leaving and part.member.worker.read_only):
                self._move(lease)
        version = part.operation.version
        if version is None or not part.needs_source:
            return []
        if part.bridges:
            return self._bridge(part, version)
        if not version.holdings.is_whole(part.shard):
            patches = self._partial_holdings(part, version, version.holdings[part.shard])
            return [self._lend(part, holding, partial=True) for holding in patches]
        is_fed = any(lease.holding.is_fed for lease in part.leases.values() if not lease.dropping)
        return [] if is_fed else self.grant(part)

    def _bridge(self, part: RankPart, version: Version) -> list[Grant]:
        """The same for a reader that bridges: what it lacks of each class, and of its own layout."""
        fed = [lease.need for lease in part.leases.values() if lease.holding.is_fed and not lease.dropping]
        lacking = [] if None in fed else [need for need in part.lacking() if need not in fed]
        grants = [self.lend(part, *source) for source in self.sources(part, lacking)] if lacking else []
        own, origin = part.layout.of(part.shard), part.origin
        if origin is None or grants or part.is_abandoned or part.can_be_whole or not part.needs_source:
            return grants
        grants += [self._lend(part, each, partial=True) for each in self._partial_holdings(part, version, own)]
        for need in lacking if not origin.origin_id else ():
            if not origin.is_class_whole(need.shard):
                for shard in origin.classes[need.shard]:
                    patches = self._partial_holdings(part, version, origin[shard], need)
                    grants += [self._lend(part, each, partial=True, need=need) for each in patches]
        return grants

    def _partial_holdings(
        self, part: RankPart, version: Version, there: Holders[Holding], need: Need | None = None
    ) -> list[Holding]:
        """Partial copies that it may read and does not read yet. Every reader reads from the next one in the list, so that a
        chunk that one of them has comes to all of them; the others are the best ones.
        """
        if part.is_abandoned:
            return []  # its last holder left on purpose: nobody waits for it (R12)
        mine = part.holding if need is None else None
        read = [lease.holding for lease in part.leases.values() if not lease.dropping and lease.need == need]
        neighbour = next((h for h in there.after(mine) if h is not mine and self._reachable(h, part)), None)
        found = [neighbour] if neighbour is not None and neighbour not in read else []
        rates = self._cluster.links.rates(self._cluster.now)
        while len(read) + len(found) < PATCHES_MAX:
            passed = [neighbour, mine, *read, *found]
            refuses = lambda h, passed=passed: h in passed or not self._reachable(h, part)  # noqa: E731
            best = [self._best(part, there, refuses, need, stranded=stranded) for stranded in (False, True)]
            candidates = [h for h in best if h is not None]
            if not candidates:
                break
            found.append(min(candidates, key=lambda h: _estimate(h, part, _wanted(there, need), rates)))
        return found

    @staticmethod
    def to_grant(lease: ReadLease) -> Grant:
        """The lease as its reader sees it."""
        holding = lease.holding
        worker = holding.member.worker
        return Grant(
            lease=lease.id,
            source=worker.name,
            incarnation=worker.incarnation,
            registration=holding.member.registration,
            generation=holding.generation,
            endpoints=worker.endpoints,
            location=worker.location,
            complete=holding.complete,
            selection="" if lease.need is None else lease.need.selection,
            shard=0 if lease.need is None else lease.need.shard,
            root=lease.root,
            manifest_id=lease.manifest_id,
        )

    def choose(
        self, part: RankPart, version: Version, need: Need | None = None, *, other_than: Holding | None = None
    ) -> Holding | None:
        """The source from which it would have everything first, or None if there is none now. What has failed it comes after
        all that have failed less.

        The core never assumes that shard k reads shard k; with equal layouts it does. Of equals it is the newest: the
        publisher, which is the oldest, is chosen last, so that its unpublish is short.
        """
        below: dict[Holding, None] | None = None
        holders, others = _holders(part, version, need)
        encloses = need is not None and bridges.must_enclose(part, need)
        # Others cannot say all their digests.
        only_whole = encloses and any(there.complete for there in (*holders, *others))

        def refuses(holding: Holding) -> bool:
            nonlocal below
            if holding is other_than or holding is part.holding or not holding.is_fed or not self._reachable(holding, part):
                return True
            if (need is not None and holding.is_no_origin) or (only_whole and not holding.complete):
                return True
            if holding.complete or need is not None or part.holding is None or not part.holding.readers:
                return False
            if not (part.holding.is_fed or holding.peers.patches or part.bridges or self._dry):
                return False  # each is filled from one other: what is filled from this reader is no more fed than it is
            below = self._below(part.holding) if below is None else below
            return holding in below

        untried: Callable[[Holding], bool] = lambda h: h.member.worker.incarnation in part.failures or refuses(h)  # noqa: E731
        best = [h for there in holders if (h := self._best(part, there, untried, need)) is not None]
        best = best or [h for there in others if (h := self._best(part, there, untried, need)) is not None]
        found = best[0] if best else None
        if len(best) > 1:
            rates = self._cluster.links.rates(self._cluster.now)
            found = min(best, key=lambda h: _estimate(h, part, _wanted(h.peers, need), rates))
        if found is not None and need is not None and encloses:
            publishers = [h for h in bridges.publishers_of(part, need) if not untried(h) and not _is_nearer(found, h, part)]
            if publishers and found not in publishers:
                rates = self._cluster.links.rates(self._cluster.now)
                found = min(publishers, key=lambda h: _estimate(h, part, _wanted(h.peers, need), rates))
        if found is None and part.failures:
            workers = (self._cluster.workers.get(incarnation) for incarnation in part.failures)
            theirs = [m.holding for w in workers if w is not None for m in w.members.values() if m.holding is not None]
            failed = [
                h for h in theirs if any(h in there for there in (*holders, *others)) and not (h.is_stranded or refuses(h))
            ]
            rates = self._cluster.links.rates(self._cluster.now)
            order = lambda h: (  # noqa: E731
                part.failures[h.member.worker.incarnation],
                _estimate(h, part, _wanted(h.peers, need), rates),
            )
            found = min(failed, key=order, default=None)
        return found

    def _below(self, holding: Holding) -> dict[Holding, None]:
        """What must not be read to fill this: it is filled from this itself, and they would wait for each other."""
        return self._follow(holding)

    def _follow(self, holding: Holding) -> dict[Holding, None]:
        """What is filled from it. That may be long, so it counts as work of this step."""
        found = _filled_by(holding)
        self._cluster.followed += len(found)
        return found

    def _best(
        self,
        part: RankPart,
        there: Holders[Holding],
        refuses: Callable[[Holding], bool],
        need: Need | None = None,
        *,
        stranded: bool = False,
    ) -> Holding | None:
        """That one of these from which it would have everything first."""
        reader, rates = part.member.worker, self._cluster.links.rates(self._cluster.now)
        return there.best(reader.location, reader.transports, _wanted(there, need), rates, refuses, stranded=stranded)

    @staticmethod
    def offered_in_vain(part: RankPart, version: Version, way: Way) -> list[str]:
        """The transports of this shard's sources, if there are sources, and the reader has none of those."""
        (layout, origin), reader = way, part.member.worker
        if part.member.holding is not None and part.member.holding.version is version:
            return []
        own = [layout[part.shard]] if layout is not None and part.shard in layout else []
        offers = [own]
        if origin is not None:  # it needs one for each class then
            offers = [[*own, *(origin[shard] for shard in each)] for each in origin.classes.values()]
        for each in offers:
            theirs = set[str]()
            for source in (holding.member for there in each for holding in there if holding.is_source):
                if source is not part.member and reader.reaches(source.worker):
                    break  # of very many sources mostly the first
                theirs |= source.worker.transports
            else:
                return sorted(theirs)
        return []

    def _reachable(self, holding: Holding, part: RankPart) -> bool:
        reader, source = part.member.worker, holding.member.worker
        if not holding.takes_readers or source.state is not WorkerState.LIVE:
            return False
        if part.retry_at.get(source.incarnation, 0.0) > self._cluster.now:
            return False
        return bool(reader.reaches(source)) and self._has_room(holding, reader)

    # -- who is filled

    def verified(self, holding: Holding, *, is_so: bool) -> None:
        """It has every chunk, or some have to be read again after all."""
        holding.verified = is_so
        self._feed(holding)

    def completed(self, holding: Holding) -> None:
        """It has all that was published."""
        holding.complete, holding.verified, holding.depth = True, True, 0
        self._feed(holding)

    def _feed(self, holding: Holding | None) -> None:
        """What a holding has, or is filled from, has changed: so may have what is filled from it."""
        if holding is None:
            return
        self._cluster.reckon(holding)
        if holding.verified or holding.is_filled_by(_is_surely_fed):
            self._spread(holding)
        elif holding.is_fed:
            self._dry[holding] = None
            self._become_fed(holding, is_so=False)

    def settle(self) -> None:
        """Whoever is fed no more may have found another source by now. If not, what is filled from it is not fed either."""
        while self._dry:
            holding, _ = self._dry.popitem()
            if holding.is_fed:
                continue
            dry = [each for each in self._follow(holding) if not each.verified]
            for each in dry:
                if each.is_fed:
                    self._become_fed(each, is_so=False)
            for each in dry:  # as it was published, and without patches, each was filled from one of the others
                if (each.peers.patches or each.bridges) and each.is_filled_by(_is_fed):
                    self._spread(each)

    def _spread(self, holding: Holding) -> None:
        """It is fed: so is all that is filled from it."""
        todo = [] if holding.is_fed else [holding]
        while todo:
            each = todo.pop()
            if not each.is_fed:
                self._become_fed(each, is_so=True)
                todo += [reader for reader in each.filled if not reader.bridges or reader.is_filled_by(_is_fed)]

    def _become_fed(self, holding: Holding, *, is_so: bool) -> None:
        """Who reads there needs another source from now on, or needs none any more; who lacks one may read what is fed."""
        holding.is_fed = is_so
        if is_so:
            holding.layout.has_grown = True
            self._cluster.reckon(holding)
        self._cluster.note(holding.member)
        for lease in holding.readers.values():
            self._cluster.wake(lease.part.operation)

    # -- a lease's end

    def release(self, lease: ReadLease, why: str) -> None:
        """Its reader reads no more."""
        if lease.state in (LeaseState.ACTIVE, LeaseState.FENCING):
            self._become(lease, LeaseState.RELEASED, why)
            self._forget(lease)

    def release_all(self, part: RankPart, why: str) -> None:
        for lease in list(part.leases.values()):
            self.release(lease, why)

    def failed(self, part: RankPart, lease_id: str, reason: str, detail: str) -> ReadLease | None:
        """The reader gave this source up. It gets another one, or after a while the same. Returns the lease that is over."""
        lease = part.leases.get(lease_id) or self._cluster.leases.get(lease_id)
        if lease is None or lease.part is not part:
            return None
        self.release(lease, reason)
        if reason != "dropped":
            self.avoid(part, lease.holding, reason, detail)
        return lease

    def left(self, member: Member, lease_id: str) -> None:
        """This reader reads no more under a lease of an operation that is over."""
        lease = member.reads.get(lease_id)
        if lease is not None:
            self.release(lease, "left after its operation's end")

    def avoid(self, part: RankPart, holding: Holding, reason: str, detail: str) -> None:
        """A read there has failed this reader: the source is tried again after a while, and last."""
        source = holding.member.worker
        incarnation = source.incarnation
        text = f"worker {source.name!r}: {detail or reason}"
        part.faults.pop(incarnation, None)
        part.faults[incarnation] = (reason, text[: limits.FAULT_CHARS_MAX])
        if len(part.faults) > limits.FAULTS_MAX:
            del part.faults[next(iter(part.faults))]
        failures = part.failures[incarnation] = part.failures.get(incarnation, 0) + 1
        wait_s = min(RETRY_S_FIRST * 2 ** min(failures - 1, 16), RETRY_S_MAX)
        retry_at = part.retry_at[incarnation] = self._cluster.now + wait_s
        self._cluster.timers.hasten("retry", part.operation.name, retry_at)

    def set_retry_timer(self, operation: Operation) -> None:
        """Look again when the first source that has failed a reader may be tried again."""
        times = [when for part in operation.parts.values() for when in part.retry_at.values()]
        later = [when for when in times if when > self._cluster.now]
        if later:
            self._cluster.timers.set("retry", operation.name, min(later))

    def fence(self, lease: ReadLease, why: str) -> None:
        """The lease must not count any more. It is FENCED once the owner has confirmed."""
        if lease.state is LeaseState.ACTIVE:
            self._become(lease, LeaseState.FENCING, why)
            lease.part.leases.pop(lease.id, None)
            self._reader_less(lease.holding)
            self._feed(lease.part.holding)

    def confirm_fenced(self, lease: ReadLease, why: str) -> None:
        if lease.state is LeaseState.FENCING:
            self._become(lease, LeaseState.FENCED, why)
            self._forget(lease)

    def reader_lost(self, member: Member) -> None:
        """The reader is gone: its sources are told to cut it off, even if the reader itself was told to stop before."""
        for lease in list(member.reads.values()):
            self.fence(lease, "reader lost")
            owner = lease.holding.member
            if self._cluster.members.get(owner.registration) is owner:
                self.tell_to_cut(lease)
            else:
                self.confirm_fenced(lease, "its owner is gone too")

    def tell_to_cut(self, lease: ReadLease) -> None:
        self._cluster.tell(lease.holding.member, CutReader(lease.id, lease.part.member.worker.incarnation))

    def _forget(self, lease: ReadLease) -> None:
        holding, part = lease.holding, lease.part
        model = holding.member.group.model
        for known in (self._cluster.leases, model.leases, holding.readers, part.leases, part.member.reads):
            known.pop(lease.id, None)
        self._cluster.note(model, part.member)
        self._reader_less(lease.holding)
        self._feed(part.holding)
        if lease.part.wants_source:
            self._cluster.wake(lease.part.operation)

    def _reader_less(self, holding: Holding) -> None:
        """A lease counts no more. If it was the last one, the owner may take back the memory that it has asked for."""
        model, registration = holding.member.group.model, holding.member.registration
        withdrawal = model.withdrawals.get(registration)
        if withdrawal is not None and not holding.active_readers:
            model.pressing[registration] = withdrawal
            self._cluster.touch(model)

    # -- a holding's beginning and end

    def add_holding(self, holding: Holding) -> None:
        """From now on it may be read."""
        holding.replica.holdings[holding.rank] = holding
        holding.verified = holding.is_fed = holding.complete
        holding.layout.add(holding, holding.member.nbytes, holding.member.chunks)
        self._cluster.reckon(holding)
        member, parts = holding.member, None
        if not holding.bridges and not holding.layout.manifests.get(holding.shard):  # else it may have other regions
            parts = bridges.as_known(member, holding.version, member.parts)
        self._cluster.learn(holding.version, holding.layout, holding.shard, holding.member.manifest, parts)
        holding.member.holding = holding
        if holding.bridges:
            self._feed(holding)  # it may need nothing
        self._cluster.note(holding.member, holding.replica)
        self._cluster.touch(holding.member.group.model)

    def move_holding(self, holding: Holding, replica: Replica) -> None:
        """A holding that was there before becomes a part of its group's new replica."""
        before, holding.replica = holding.replica, replica
        before.holdings.pop(holding.rank, None)
        replica.holdings[holding.rank] = holding
        self._cluster.reckon(holding)
        self._cluster.note(holding.member, before, replica)
        self.settle_replica(before)

    def order_out(self, holding: Holding, reason: str) -> None:
        """Its version is retired: nobody reads it any more, and its owner is to fence and forget it."""
        self.leave(holding, reason)
        self.cut_readers(holding, reason, moved=False)
        owner = holding.member
        self._cluster.tell(owner, Revoked(owner.registration, holding.version.info.content_id, reason))

    def overwrite(self, holding: Holding) -> None:
        """Its owner is about to fence and overwrite it (R7): readers are moved or cut, never waited for."""
        self.leave(holding, "overwritten")
        self.cut_readers(holding, "the source takes another version", moved=True)

    def confirm_cut(self, worker: Worker, message: ReaderCut) -> None:
        """The owner has cut this lease's reader off."""
        lease = self._cluster.leases.get(message.lease)
        if lease is not None and lease.holding.member.worker is worker:
            self.confirm_fenced(lease, "the owner has cut its reader off")

    def withdrawn(self, worker: Worker, message: Fenced) -> None:
        """The owner says that its fence stands."""
        member = worker.members.get(message.registration)
        if member is not None:
            self.confirm_withdrawn(member, message.generation)

    def confirm_withdrawn(self, member: Member, generation: int) -> None:
        """The owner's fence stands: nothing can be read under that generation any more."""
        if member.holding is not None and member.holding.generation == generation:
            self.leave(member.holding, "fenced by its owner")  # a local fence, without our grant
        for holding in [h for h in member.leaving if h.generation == generation]:
            self._end(holding)

    def lose(self, holding: Holding) -> None:
        """Its worker is LOST, and may still serve its bytes: readers without another source keep their lease."""
        self.leave(holding, "worker lost", on_purpose=False)
        for lease in list(holding.readers.values()):
            if lease.state is LeaseState.FENCING:
                self.confirm_fenced(lease, "owner lost")
            else:
                self.move(lease)
        self._end(holding, cut=False)

    def quarantine(self, holding: Holding) -> None:
        """Its bytes have changed: nobody reads it any more. It stays its owner's holding until the owner takes it back."""
        holding.quarantined = True
        self.leave(holding, "its bytes have changed", on_purpose=False)
        self.cut_readers(holding, "the source's bytes have changed", moved=True)

    def tear(self, holding: Holding) -> None:
        """Its fill was broken off: nobody may read it, its owner changes the generation by itself."""
        self.leave(holding, "fill broken off", on_purpose=False)
        self.cut_readers(holding, "the source's own fill was broken off", moved=True)

    def leave(self, holding: Holding, why: str, *, on_purpose: bool = True) -> None:
        if holding.leaving:
            return
        holding.leaving = True
        version, member, replica = holding.version, holding.member, holding.replica
        holding.layout.remove(holding)
        member.group.model.unaware.pop(member.registration, None)
        layout = holding.layout
        if on_purpose and holding.committed and version.visible and not layout.have_sources():
            layout.abandoned = True
        if layout.abandoned or (holding.complete and not layout.are_whole()):
            self._reconsider_readers(version)
        if holding.bridges:
            self._feed(holding)
        if member.holding is holding:
            member.holding = None
        member.leaving.append(holding)
        self._cluster.note(member, replica)
        if replica.state is ReplicaState.READY and on_purpose:
            self._cluster.become(replica, ReplicaState.DRAINING, why)
        self._cluster.touch(member.group.model)

    def _reconsider_readers(self, version: Version) -> None:
        """Its readers, also those that have not begun, may have to end, or to complete one another."""
        for operation in (*version.bound.values(), *version.guests_bound.values()):
            self._cluster.wake(operation)

    def move(self, lease: ReadLease) -> None:
        """Give the reader another source, if there is one, and let it leave this one. A guest is given it in its turn: there
        may be many of them, and each looks at all sources.
        """
        if lease.part.member.worker.read_only:
            self._cluster.wake(lease.part.operation)
        else:
            self._move(lease)

    def _move(self, lease: ReadLease) -> None:
        if lease.state is not LeaseState.ACTIVE or lease.dropping:
            return
        part = lease.part
        needs = part.lacking(without=lease) if part.bridges else []
        is_spare = part.bridges and not needs and not lease.partial
        sources = [] if is_spare else self.sources(part, needs, other_than=lease.holding)
        if is_spare or (sources and (not part.bridges or bridges.are_enough(sources, needs))):
            grants = [self.lend(part, *source) for source in sources]
            lease.dropping = True
            self._feed(part.holding)
            self._cluster.changed(part.operation)
            self._cluster.note(lease)
            for grant in grants:
                self._cluster.tell(part.member, AddSource(part.operation.key, part.rank, grant))
            self.tell_to_drop(lease, "the source leaves")

    def tell_to_drop(self, lease: ReadLease, why: str) -> None:
        part = lease.part
        self._cluster.tell(part.member, DropSource(part.operation.key, part.rank, lease.id, why))

    def _cut(self, lease: ReadLease, why: str) -> None:
        if not lease.dropping:
            self.tell_to_drop(lease, why)
        self.fence(lease, why)

    def cut_readers(self, holding: Holding, why: str, *, moved: bool) -> None:
        for lease in list(holding.readers.values()):
            if lease.state is LeaseState.ACTIVE:
                if moved:
                    self.move(lease)
                self._cut(lease, why)
                if lease.part.wants_source:
                    self._cluster.wake(lease.part.operation)

    def _end(self, holding: Holding, *, cut: bool = True) -> None:
        """Nothing of it is left: its leases are fenced, and its replica goes with its last holding."""
        if cut:
            self.cut_readers(holding, "the source is gone", moved=True)
            for lease in list(holding.readers.values()):
                self.confirm_fenced(lease, "the owner's fence stands")
        if holding in holding.member.leaving:
            holding.member.leaving.remove(holding)
        replica = holding.replica
        self._cluster.note(holding.member, replica)
        if replica.holdings.get(holding.rank) is holding:
            del replica.holdings[holding.rank]
        self.settle_replica(replica)

    def new_replica(self, version: Version, member: Member) -> Replica:
        """What this rank's group holds of the version, or will."""
        group = member.group
        replica = Replica(self._cluster.new_id(), version, group, member.medium, member.purpose)
        group.replicas.append(replica)
        return replica

    def new_or_torn_replica(self, version: Version, member: Member) -> Replica:
        """The same; where a fill of this group was broken off, what that has left."""
        torn = next((r for r in member.group.replicas if r.state is ReplicaState.TORN), None)
        if torn is None:
            return self.new_replica(version, member)
        torn.version = version
        return torn

    def make_ready(self, replica: Replica, why: str) -> None:
        """Every shard of it is complete and counts (G4); it is GONE at once if no memory is left by now."""
        self._cluster.become(replica, ReplicaState.READY, why)
        self.settle_replica(replica)
        self._cluster.touch(replica.group.model)

    def settle_replica(self, replica: Replica) -> None:
        """A replica without memory is GONE (a TORN one stays as long as its group has ranks)."""
        group = replica.group
        torn = replica.state is ReplicaState.TORN and group.members
        if not replica.holdings and replica.state is not ReplicaState.GONE and not torn:
            self._cluster.become(replica, ReplicaState.GONE, "no memory left")
            group.replicas.remove(replica)

    def _become(self, lease: ReadLease, state: LeaseState, why: str) -> None:
        holding, guest = lease.holding, lease.part.member.worker
        if lease.state is LeaseState.ACTIVE:  # no state leads back there
            holding.active_readers -= 1
            holding.peers.patches -= lease.partial
            if guest.read_only:
                if holding.guests.is_used_up:  # there is room for one more
                    self._cluster.wake_all(holding.version.starving)
                    self._cluster.wake_all(holding.member.group.model.guests_unbound)
                holding.guests.add(guest.origin, guest, -1)
            self._cluster.reckon(holding)
        self._cluster.become(lease, state, why)
        self._cluster.note(lease.part.operation, lease.holding.member)


def _holders(part: RankPart, version: Version, need: Need | None) -> tuple[list[Holders[Holding]], list[Holders[Holding]]]:
    """Those of whom it reads this, of its own shard in its own layout or of the shards of a class; and those of other shards
    of that class, which it reads if it must.
    """
    if need is None or part.origin is None:
        layout = part.layout if part.bridges else version.holdings
        return [layout.of(part.shard)], []
    good = replicas.proven(version, part.origin, need.shard)
    rest = [shard for shard in part.origin.classes[need.shard] if shard not in good]
    return [part.origin.of(shard) for shard in good], [part.origin.of(shard) for shard in rest]


def _wanted(there: Holders[Holding], need: Need | None) -> Wanted:
    """What a reader of that shard reads. (The grid is the publisher's; others count their own, and a copy none.)"""
    if need is not None:
        return Wanted(need.nbytes, need.nbytes / need.chunks)
    return Wanted(there.nbytes, there.nbytes / max(1, there.chunks))


def _estimate(holding: Holding, part: RankPart, wanted: Wanted, rates: Sequence[float]) -> tuple[float, int]:
    """When it would have everything from there; the newest comes first of equals."""
    reader, worker = part.member.worker, holding.member.worker
    # Who copies out of its memory shares nothing of it with its other readers.
    readers = 0 if worker.reaches(reader) & SAME_HOST_TRANSPORTS else holding.active_readers
    apart = distance(reader.location, worker.location)
    return finish_s(apart, readers, holding.depth, wanted, rates), -holding.number


def _is_nearer(one: Holding, other: Holding, part: RankPart) -> bool:
    """Whether the first is nearer to that reader."""
    mine, theirs = (distance(part.member.worker.location, each.member.worker.location) for each in (one, other))
    return mine < theirs


def _filled_by(holding: Holding) -> dict[Holding, None]:
    """It, and what is filled from it, directly or through others: each after one that fills it."""
    todo, seen = [holding], {holding: None}
    for each in todo:
        for reader in each.filled:
            if reader not in seen:
                seen[reader] = None
                todo.append(reader)
    return seen


_is_fed = attrgetter("is_fed")


def _is_surely_fed(holding: Holding) -> bool:
    """Patches may form cycles: what is fed through them may be fed by what is asked about."""
    return holding.verified or (holding.is_fed and not holding.peers.patches)
