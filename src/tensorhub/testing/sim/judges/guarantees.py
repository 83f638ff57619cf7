"""The guarantees of the design, checked from outside: by the bytes in memory, and by the ends of
calls.

Responsible for G1, G2, G4 to G6 and G8 to G10, each named in what `GuaranteeBroken` says. Which
versions callers may see (G3, R1, R12) is the affair of the reference model, which `history` feeds;
the driver of the cluster demands G7 (liveness), once faults are over. The judges use the
coordinator's own books as little as may be: its invariants are its own affair. `check_*` costs what
it looks at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import inf

from tensorhub.coordinator import Decision, Durable, Entry, Publication, Rollback
from tensorhub.errors import (
    DrainTimeout,
    IntegrityError,
    LeaseLost,
    TensorHubError,
    VersionUnavailable,
)
from tensorhub.layouts.reading import Part, ReshardedManifest
from tensorhub.messages import (
    Digests,
    Fenced,
    FromWorker,
    Grant,
    LeaveRequest,
    Outcome,
    Prepared,
    Register,
    Registered,
    Start,
    Write,
)
from tensorhub.testing.sim.assertion import (
    CHECKSUM_CONFIRMED,
    CUT_OFF_LEASES,
    HOLDING,
    LATE_S_MAX,
    LEFT_ON_PURPOSE,
    LOST_STATE,
    demand,
)
from tensorhub.testing.sim.judges.archives import ArchiveJudge, published_in
from tensorhub.testing.sim.judges.availability import AvailabilityJudge
from tensorhub.testing.sim.judges.call_history import CallHistory
from tensorhub.testing.sim.judges.contents import Contents
from tensorhub.testing.sim.judges.crossings import CrossingJudge
from tensorhub.testing.sim.judges.ports import JudgedCall, JudgedHandle, JudgedWorld
from tensorhub.testing.sim.judges.retention import RetentionJudge, abandons, is_as_published
from tensorhub.testing.sim.layouts import bytes_read, part_of, tags_in
from tensorhub.testing.sim.rendering import show_error
from tensorhub.types import HandleState, Medium, OpKey, OpKind, Purpose, VersionInfo
from tensorhub.worker.calls import Call, CloseCall, FillCall, UnpublishCall
from tensorhub.worker.filling import Filling
from tensorhub.worker.member_memory import Content

EXONERATED_MAX = 2  # sources that are not at fault: then it is the reader
TODO_MAX = 1000  # actions that one handle has still to carry out
# of memory that its owner may write
WRITABLE = (HandleState.EMPTY, HandleState.TORN, HandleState.CLOSED)
RECORD = -1  # stands for a rank: what the store says of an operation


class Guarantees:
    """The promises in one cluster, and whether they are kept."""

    def __init__(self, world: JudgedWorld) -> None:
        self._world = world
        self.contents = Contents()
        self.history = CallHistory(world, self.contents)
        self.archived = ArchiveJudge(world, self.contents, self.history)
        self.retained = RetentionJudge(world, self.contents, self.history, self.archived)
        self.crossings = CrossingJudge(world)
        self.available = AvailabilityJudge(world, self.contents)
        # by rank: what those read who were told to overwrite
        self._parts: dict[OpKey, dict[int, tuple[Part, ...]]] = {}
        # by rank: committed, and how it was learnt
        self.outcomes: dict[OpKey, dict[int, tuple[bool, str]]] = {}
        self.bound: dict[OpKey, int] = {}  # of each group call: the version that a rank returned
        self._is_state_lost = False  # once at least
        self.rolled_back: set[OpKey] = set()  # publications of these
        # which registration a group's rank has had in an epoch
        self._epochs: dict[tuple[str, str, int, int], str] = {}
        # when some owner of which content took it from its readers, or wanted to
        self._given_up: dict[str, float] = {}
        # By content and shard: its last live holder has given it up, or the replica of its last
        # holder has; and no handle has it since.
        self._left_shards: set[tuple[str, int]] = set()
        # By content, selection ("": none) and shard: the chunks of which publishers have told
        # digests.
        self._told: dict[tuple[str, str, int], set[int]] = {}
        # By registration: publishers that have told all digests of what it has voted for last;
        # none, if some are not told.
        self._tellers: dict[str, list[JudgedHandle]] = {}
        # by registration: the content that was, unless the coordinator has heard of it
        self._fenced: dict[str, str] = {}

    def state_lost(self, store: Iterable[Entry]) -> None:
        """Whatever was published before must not come back; retention in the former cluster counts
        no more.
        """
        self._is_state_lost = True
        self.contents.retired.update(entry.content_id for entry in published_in(store))
        self.contents.state_lost()
        self.archived.state_lost()
        self.history.state_lost()
        self.forget()

    def state_replaced(self, before: Iterable[Entry], found: Iterable[Entry]) -> None:
        """An older copy of the state, or a new cluster with the state: what is found there counts
        again, and may be all that does.
        """
        self.state_lost(before)
        self._epochs.clear()
        for each in Durable.of(found).publications:
            self.archived.restore(each)

    def forget(self) -> None:
        """Forget how calls have ended."""
        self.outcomes.clear()
        self.bound.clear()
        self._told.clear()

    # -- what happens

    def decided(self, entry: Entry) -> None:
        """The coordinator wants this recorded."""
        if isinstance(entry, Publication):
            self.contents.minted(entry)
        elif isinstance(entry, Decision):
            for handle in self._world.live_handles():
                if (handle.shard.model, handle.shard.group) == (entry.key.model, entry.key.group):
                    member = self._world.coordinator.cluster.members.get(handle.id)
                    part = member.part if member is not None else None
                    self.commits(
                        handle,
                        entry.content_id,
                        by_source=part is not None and part.proof.by_source,
                    )

    def commits(self, handle: JudgedHandle, content_id: str, *, by_source: bool) -> None:
        """The coordinator lets the rank commit that content: with its sources' digests only if no
        publisher has sent digests (R8).
        """
        if by_source:
            tellers = self._tellers.get(handle.id, [])
            told = (
                bool(tellers)
                and all(_publishes(each, content_id) for each in tellers)
                and self._world.is_unharmed()
            )
            demand(
                not told,
                "digests: {} commits {} unseen, and {} have told all its digests",
                handle,
                content_id,
                tellers,
            )
            self.contents.believes(handle, content_id)

    def stored(self, entry: Entry, before: Iterable[Entry]) -> None:
        """The entry is durable now. After a rollback no caller may see the versions that it
        retires.
        """
        self.retained.stored(entry)
        self.archived.stored(entry, before)
        match entry:
            case Decision() | Publication():
                self._learn(entry.key, RECORD, True, "that was recorded")
            case Rollback():
                again = any(isinstance(e, Rollback) and e.ident == entry.ident for e in before)
                demand(
                    not again,
                    "durable mark: a rollback that was asked for again was done twice: {}",
                    entry,
                )
                published = (e for e in published_in(before) if e.model == entry.model)
                gone = [e for e in published if e.number > entry.to]
                self.contents.retired.update(e.content_id for e in gone)
                self.rolled_back.update(e.key for e in gone)
                numbers = self.contents.numbers.get(entry.model, {})
                self.contents.numbers[entry.model] = {
                    n: c for n, c in numbers.items() if n <= entry.to
                }
            case _:
                pass

    def ended(self, handle: JudgedHandle, record: JudgedCall) -> None:
        """A call has returned, or raised."""
        error, key = record.error, record.key
        self.history.ended(handle, record)
        if isinstance(record.what, UnpublishCall | CloseCall):
            # also in vain: its readers may have been told
            self._given_up[handle.last_held] = self._world.now
        if isinstance(error, DrainTimeout):
            self._given_up[handle.last_held] = self._world.now  # for a while
        if error is not None:
            demand(
                self._is_state_lost or LOST_STATE not in str(error),
                "durable mark: {} hears of a new cluster, which there is not: {}",
                handle,
                error,
            )
            if isinstance(record.what, UnpublishCall | CloseCall):
                self.retained.refused(handle)
            demand(
                isinstance(error, (TensorHubError, *self._world.user_errors)),
                "bounds: every refusal is a typed error: {!r}",
                error,
            )
            if isinstance(error, IntegrityError) and CHECKSUM_CONFIRMED in str(error):
                self._blamed(handle, record, str(error))
            if isinstance(error, VersionUnavailable) and LEFT_ON_PURPOSE in str(error):
                self._left(handle, record, str(error))
            if (
                key is not None
                and getattr(error, "memory", "") != "in_doubt"
                and not isinstance(error, LeaseLost)
            ):
                # G4: an abandoned rank is not live. A holder counts as a vote, and may not know it.
                heard = () if self.retained.is_abandoned(handle) else (key,)
                for each in dict.fromkeys((*record.votes, *heard)):
                    self._learn(
                        each, handle.shard.rank, False, f"{handle.name} raised {show_error(error)}"
                    )
            return
        if key is not None and record.version is not None:
            number = record.version.version
            self._learn(key, handle.shard.rank, True, f"{handle.name} returned {number}")
            bound = self.bound.setdefault(key, number)
            demand(
                bound == number,
                "group atomicity: {} ended with version {} and with {} ({})",
                key,
                bound,
                number,
                handle.name,
            )
        match record.what:
            case FillCall():
                self.check_content(handle)
                if record.what.kind is OpKind.FETCH and record.version is not None:
                    self.contents.check_cells(handle, record.version)
            case UnpublishCall() | CloseCall():
                demand(
                    handle.worker.owner.is_quiet(handle.id),
                    "mutability: {} is read after {}",
                    handle.name,
                    record.what,
                )
                self.check_closed(handle)
                self.retained.closed(handle)
            case _:
                pass

    def _blamed(self, handle: JudgedHandle, record: JudgedCall, text: str) -> None:
        """R8: a reader is at fault, before its time is over, only if several unchanged sources have
        sent it other bytes. Or it lies itself.
        """
        # Also those that have died since: their time counts for all.
        calls = [
            h.last_call for h in self._world.all_handles() if h.shard.group == handle.shard.group
        ]
        mates = [call for call in calls if call is not None and call.key == record.key]
        several = any(len(mate.damaged) >= EXONERATED_MAX for mate in mates)
        now, rate = self._world.now, self._world.clock_rate
        late = any(  # by its own clock, or by the coordinator's
            min(mate.until, mate.began + mate.timeout_s / rate) <= now for mate in mates
        )
        demand(
            several or late or self.contents.has_outsiders or handle.lied != "",
            "digests: {} is blamed for {}: {}",
            handle,
            [mate.damaged for mate in mates],
            text,
        )

    def heard(self, message: FromWorker) -> None:
        """The coordinator is about to learn which memory its owner has given up, or wants to."""
        if isinstance(message, Digests):
            self._publisher_tells(message)
        elif isinstance(message, Prepared):
            self._votes(message)
        elif isinstance(message, LeaveRequest):
            # none: it has closed before the coordinator has read that
            handle = self._world.handle_of(message.registration)
            held = (
                handle.last_held
                if handle is not None
                else self._fenced.get(message.registration, "")
            )
            self._given_up[held] = self._world.now
        elif isinstance(message, Fenced | Register):
            content_id = self._fenced.pop(message.registration, "")
            self._given_up[content_id] = self._world.now

    def _publisher_tells(self, message: Digests) -> None:
        """From now on no rank may commit other bytes than these."""
        handle = self._world.handle_of(message.registration)
        content = handle.member.content if handle is not None else None
        if (
            handle is None
            or content is None
            or not content.published
            or content.generation != message.generation
        ):
            return
        told = self._told.setdefault(
            (content.version.content_id, message.selection, handle.shard.number), set()
        )
        told.update(chunk for first, count in message.runs for chunk in range(first, first + count))

    def _votes(self, message: Prepared) -> None:
        """A rank says that it has all of what it reads."""
        handles = [
            h
            for h in self._world.live_handles()
            if h.shard.rank == message.rank
            and h.last_call is not None
            and h.last_call.key == message.key
        ]
        for handle in handles:
            self._tellers.pop(handle.id, None)
            running = handle.member.running
            if (
                not isinstance(running, Filling)
                or running.binding is None
                or running.manifest is None
            ):
                continue
            manifest, content_id = running.manifest, running.binding.version.content_id
            wanted: list[tuple[str, tuple[int, ...], int]] = [
                ("", (handle.shard.number,), manifest.chunk_count)
            ]
            if isinstance(manifest, ReshardedManifest):
                wanted = [
                    (part.selection.selection_id, part.ranks, len(part.chunks))
                    for part in manifest.parts
                ]
            tellers = [h for h in self._world.live_handles() if _publishes(h, content_id)]
            found = [
                next(
                    (
                        h
                        for h in tellers
                        if h.shard.number in ranks and self._tells(h, content_id, selection, chunks)
                    ),
                    None,
                )
                for selection, ranks, chunks in wanted
            ]
            if None not in found:
                self._tellers[handle.id] = [each for each in found if each is not None]

    def _tells(self, handle: JudgedHandle, content_id: str, selection: str, chunks: int) -> bool:
        """Whether it has told so many digests of that."""
        return len(self._told.get((content_id, selection, handle.shard.number), ())) >= chunks

    def _left(self, handle: JudgedHandle, record: JudgedCall, text: str) -> None:
        """R12: only a call for a number ends where the last holder leaves on purpose."""
        by_number = not isinstance(record.what, FillCall) or isinstance(record.what.selector, int)
        demand(
            by_number,
            "selectors: {} gave up although its selector names what comes next: {}",
            handle,
            text,
        )
        number = re.match(r"version (\d+) of ", text)
        wanted = (
            self.contents.minted_as.get((handle.shard.model, int(number[1])), set())
            if number is not None
            else set()
        )
        # In another layout others may have held it, when those who held it as it was published had
        # left, and be lost since.
        other = handle.shard.declared is not None
        gone = any(self._given_up.get(content_id, -inf) >= record.began for content_id in wanted)
        # one shard was left before, and another shard is lost now
        gone = gone or any(content_id in wanted for content_id, _ in self._left_shards)
        going = any(
            h.last_held in wanted
            and h.last_call is not None
            and h.last_call.what is not record.what
            # its update may commit without its user
            and (not h.last_call.done or h.member.state is HandleState.IN_DOUBT)
            for h in self._world.all_handles()
        )
        demand(
            gone or going or not wanted or self.contents.has_outsiders or other,
            "selectors: nobody has left what {} waited for: {}",
            handle,
            text,
        )

    def resolved(self, handle: JudgedHandle, outcome: Outcome) -> None:
        """A rank that was in doubt hears what has become of its operation."""
        if not self._is_forgotten(outcome.key):
            self._learn(
                outcome.key, handle.shard.rank, outcome.committed, f"{handle.name} was told so"
            )

    def _learn(self, key: OpKey, rank: int, committed: bool, how: str) -> None:
        """G4, R6: no two ranks hear different outcomes, nor another outcome than the recorded
        one.
        """
        if key in self.rolled_back:
            return  # after a restart nobody remembers that it was published
        heard = self.outcomes.setdefault(key, {})
        heard[rank] = (committed, how)
        if self._is_forgotten(key):
            heard.pop(RECORD, None)
        demand(
            len({outcome for outcome, _ in heard.values()}) == 1,
            "group atomicity: {}: {}",
            key,
            heard,
        )

    def _is_forgotten(self, key: OpKey) -> bool:
        """Whether it was a publication that has had no holder for so long that the coordinator has
        forgotten it.
        """
        model = self._world.coordinator.cluster.models.get(key.model)
        known = model is not None and any(
            version.publisher == key for version in model.versions.values()
        )
        return key in self.contents.promised and not known

    def registered(self, handle: JudgedHandle, message: Registered) -> None:
        """R6: another process in a rank's place makes a new membership epoch."""
        shard = handle.shard
        place = shard.model, shard.group, shard.rank, message.epoch
        before = self._epochs.setdefault(place, shard.registration)
        demand(
            before == shard.registration,
            "two phases: {} has replaced {} in the membership epoch {}",
            handle,
            before,
            message.epoch,
        )

    # -- memory

    def served(
        self, handle: JudgedHandle, grant: Grant, chunks: Iterable[int], version: VersionInfo
    ) -> None:
        """A lane begins to read these chunks there, as that version's (G6: only verified
        chunks).
        """
        generation = grant.generation
        demand(
            generation == handle.generation,
            "incarnations: {} serves what was asked of generation {}",
            handle,
            generation,
        )
        if self.contents.is_spoilt(handle, version.content_id):
            return
        may_be_read = not grant.selection or handle.worker.owner.is_complete(handle.id, generation)
        demand(may_be_read, "content: {} is of {}, which is still being filled", grant, handle)
        truth = self.contents.held_by(handle, version.content_id)
        for chunk in chunks:
            cell = self.contents.published_as(handle, handle.cells[chunk])
            if cell != truth[chunk] and handle.was_written(chunk):
                self.contents.spoil(handle, version.content_id, chunk, cell)
                continue
            if not self.contents.lies.isdisjoint(tag for tag, _ in tags_in(cell)):
                # it has the digest that its source has told; who reads it finds out before it is
                # committed
                continue
            demand(
                cell == truth[chunk],
                "partial replicas: {} serves {} as {} of version {}",
                handle,
                cell,
                truth[chunk],
                version.version,
            )

    @staticmethod
    def asks(handle: JudgedHandle, grant: Grant, part: Part | None) -> None:
        """A lane will ask for that part of what it reads."""
        ok = not grant.selection or part is not None
        demand(ok, "content: {} is of what {} does not read", grant, handle)

    @staticmethod
    def was_read(handle: JudgedHandle, was: str) -> None:
        """A lane ends that has read its first chunk, which held that."""
        now = handle.cells[0]
        demand(now == was, "mutability: {} was written as it was read: {} is {}", handle, was, now)

    def announced(self, handle: JudgedHandle, content_id: str) -> None:
        """It is about to say to the coordinator that it holds that."""
        demand(
            handle.changed != content_id,
            "digests: {} is announced, and it knows that its bytes have changed",
            handle,
        )

    def fencing(self, handle: JudgedHandle, generation: int) -> None:
        """A fence is decided on."""
        content, record = handle.member.content, handle.last_call
        held = (
            content is not None
            and content.generation == generation
            and handle.member.state in HOLDING
        )
        if content is None or record is None or record.done or not held:
            return
        call, number = record.what, content.version.version
        if isinstance(call, FillCall) and call.staged and record.key is not None:
            demand(
                record.committed,
                "update destroys last: {}, of {}, is overwritten by {}, which is not committed",
                number,
                handle,
                call,
            )
        asks_nobody = (
            isinstance(call, UnpublishCall | CloseCall)
            and not record.granted
            and not abandons(handle)
        )
        if asks_nobody and content.retained and not self._keeps(handle, content, call):
            free_at = handle.worker.cut_off_at + CUT_OFF_LEASES * self._world.options.lease_s
            ok = handle.worker.now >= free_at - 1e-6
            demand(
                ok,
                "leaving: {}, which has to keep {}, is cut off, and leaves before {:.3f}",
                handle,
                number,
                free_at,
            )

    @staticmethod
    def _keeps(handle: JudgedHandle, content: Content, call: Call) -> bool:
        """Whether what it holds stays in its worker when it leaves: in a host copy, where it was
        all of the version.
        """
        if handle.shard.world_size > 1 or isinstance(call, CloseCall):
            return False
        copies = (h.member for h in handle.worker.handles if h.shard.purpose is Purpose.RETENTION)
        held = [copy.content for copy in copies if copy.state in HOLDING]
        return any(
            c is not None and c.version.content_id == content.version.content_id for c in held
        )

    def fenced(self, handle: JudgedHandle, generation: int) -> None:
        """No reader reads that memory any more."""
        self._given_up[handle.last_held] = self._world.now
        self._fenced[handle.id] = handle.last_held
        held = {
            (each.last_held, each.shard.number)
            for each in self._world.live_handles()
            if each.last_held == handle.last_held and each is not handle and _holds(each)
        }
        shards: Iterable[int] = (handle.shard.number,)
        if handle.shard.world_size > 1 and is_as_published(handle):
            # its replica serves no more, also where a dead rank was not known to be lost
            shards = self.contents.truth.get(handle.last_held, shards)
        self._left_shards.update({(handle.last_held, shard) for shard in shards} - held)
        self.retained.fenced(handle, generation)

    def told_to_write(self, handle: JudgedHandle | None, message: Start | Write) -> None:
        """The coordinator tells a rank that it may overwrite its memory, for the first time: R7,
        there is a source.
        """
        if (
            handle is None
            or handle.member.state is HandleState.FILLING
            or handle.staging is not None
        ):
            return  # it goes on with what it has begun before
        self._let_go(handle, message)
        running = handle.member.running
        manifest = (
            running.manifest
            if isinstance(running, Filling) and running.key == message.key
            else None
        )
        demand(
            bool(message.grants) or (manifest is not None and not manifest.chunk_count),
            "update destroys last: {} is to be overwritten with {}, and nobody is said to have it",
            handle,
            message,
        )
        if not isinstance(running, Filling) or not isinstance(manifest, ReshardedManifest):
            return
        self._reads(handle, running, manifest)
        if all(grant.selection for grant in message.grants):
            brought = [part_of(manifest, grant.shard, grant.selection) for grant in message.grants]
            lacks = [part.shard for part in manifest.parts if part not in brought]
            demand(
                not lacks,
                "update destroys last: {} is to be overwritten, and nobody is said to have {}",
                handle,
                lacks,
            )

    def _let_go(self, handle: JudgedHandle, message: Start | Write) -> None:
        """What it holds counts as left from now on, also if its call was cancelled and it stays:
        its readers may have been told (R12).
        """
        record = handle.last_call
        if record is None or record.key != message.key or handle.member.state not in HOLDING:
            return
        if isinstance(record.what, FillCall) and not record.what.staged:
            self._given_up[handle.last_held] = self._world.now

    def _reads(self, handle: JudgedHandle, running: Filling, manifest: ReshardedManifest) -> None:
        """Once all ranks of a group are to be overwritten: they read every byte together, unless
        they need not (R7).
        """
        declared, bound, size = handle.shard.declared, running.binding, handle.shard.world_size
        if bound is None or running.key is None or (declared is not None and declared.partial):
            return
        if handle.shard.purpose is Purpose.RETENTION:
            return  # a copy of one shard
        parts = self._parts.setdefault(running.key, {})
        parts[handle.shard.rank] = manifest.parts
        if len(parts) == size and handle.shard.serves:
            read = bytes_read(
                [part for each in self._parts.pop(running.key).values() for part in each]
            )
            needed = self.contents.nbytes(bound.version.content_id)
            demand(
                read >= needed,
                "update destroys last: {} is to be overwritten, and its group reads {} bytes of {}",
                handle,
                read,
                needed,
            )

    def writes(self, handle: JudgedHandle) -> None:
        """A lane writes a chunk of a fill into the memory itself."""
        state = handle.member.state
        demand(
            state is HandleState.FILLING, "mutability: {} is written while it is {}", handle, state
        )

    # -- retention

    # -- what holds between any two steps

    def check_handle(self, handle: JudgedHandle) -> None:
        """Everything about one registration."""
        if not handle.worker.alive:
            return
        handle.check_invariants()
        self.check_content(handle)
        if handle.member.state in WRITABLE and handle.idle:
            self.check_closed(handle)
        self.retained.check_known(handle)
        todo = len(handle.todo)
        demand(todo <= TODO_MAX, "bounds: {} has {} actions to carry out", handle, todo)

    def check_in_time(self, handle: JudgedHandle) -> None:
        """G10: a call ends at its deadline, also if its worker is cut off. Three exceptions: a
        stopped process ends nothing; a committed staged fill is put in place first; and memory that
        was given up is fenced first, which waits for the owner's own accesses and a moment more.
        """
        record, worker = handle.last_call, handle.worker
        if (
            record is None
            or record.done
            or (record.committed and isinstance(record.what, FillCall) and record.what.staged)
        ):
            return
        if handle.access is not None and handle.fencing_since is not None:
            return
        late_s = self._world.now - max(record.until, worker.stopped_until, handle.freed_at)
        late_s *= worker.clock.rate
        running = handle.member.running
        demand(
            late_s <= LATE_S_MAX,
            "bounds: {}: {} should have ended {:.1f} s ago: {}",
            handle,
            record.what,
            late_s,
            running,
        )

    def check_content(self, handle: JudgedHandle) -> None:
        """G1: the holder of a version, and so each stamp, names its publisher's bytes."""
        content = handle.member.in_place
        if content is not None:
            handle.last_held = content.version.content_id
            if handle.fencing_since is None and _holds(handle):
                self._left_shards.discard((handle.last_held, handle.shard.number))
            self.contents.check_cells(handle, content.version)

    def check_closed(self, handle: JudgedHandle) -> None:
        """G2: no reader can begin to read memory that its owner may write. (The rest of a broken
        fill in host memory is no such memory: its own worker may read it, under a generation that
        no further worker knows.)
        """
        if handle.shard.medium is Medium.HOST and handle.member.state is HandleState.TORN:
            return
        held = handle.worker.owner._memories.get(handle.id)
        is_closed = held is None or not held.is_open or not held.serves
        demand(is_closed, "mutability: {} can still be read under {}", handle, held)


def _holds(handle: JudgedHandle) -> bool:
    """Whether readers of the published layout can read what it holds."""
    return handle.member.state in HOLDING and is_as_published(handle)


def _publishes(handle: JudgedHandle, content_id: str) -> bool:
    """Whether it holds what it has published as that."""
    content = handle.member.content
    is_its = content is not None and content.published and content.version.content_id == content_id
    return is_its and handle.member.state is HandleState.READY
