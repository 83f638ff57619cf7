"""Faults are over: every call must end, every user that still can must be able to publish, and all
must fetch that version (G7).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from tensorhub.errors import (
    GroupAborted,
    LeaseLost,
    ManifestMismatch,
    OperationTimeout,
    TensorHubError,
    VersionConflict,
)
from tensorhub.testing.drivers.archiving import SimArchive
from tensorhub.testing.drivers.timed import TimedCluster
from tensorhub.testing.drivers.users import UserGroup, Users
from tensorhub.testing.sim.assertion import demand
from tensorhub.testing.sim.handle import CallRecord
from tensorhub.testing.sim.layouts import is_of_other_layout
from tensorhub.testing.sim.worker import SimHandle, SimWorker
from tensorhub.types import HandleState, Selector

TRIES = 12
REST_S = 400.0
WAITS_S = 5000.0  # a fill that waits for a version of after the faults
LEAVES_S = 50.0  # for another worker to take over retained versions
OUT_OF_REACH = 10_000  # so many numbers ahead: users that go on publishing do not come to it


class Healing:
    """The second phase of a run."""

    def __init__(self, cluster: TimedCluster, users: Users) -> None:
        self._cluster = cluster

        self._users = users
        self._run_until = cluster.run_until
        # fills that were called while things still went wrong, of a version to come
        self._waiting: list[CallRecord] = []
        self._awaited = 0  # its number
        self._reading: list[CallRecord] = []  # fills of what there is, with ample time

    def ask(self) -> None:
        """While things still go wrong: of those at rest some want what there is, and some the next
        version; they wait.
        """
        users = self._users
        self._awaited = users.next_version + OUT_OF_REACH
        ready = [
            group
            for group in users.groups
            if self._is_whole(group) and all(handle.idle for handle in group.ranks)
        ]
        ready.sort(key=lambda group: not group.publishes)  # the first of them is left alone
        for group in [group for group in ready[1:] if group.fits(ready[0])]:
            reads = all(
                handle.member.state in (HandleState.EMPTY, HandleState.TORN)
                for handle in group.ranks
            )
            for handle in group.ranks:
                if reads:
                    self._reading.append(handle.replicate("latest", WAITS_S))
                else:
                    self._waiting.append(handle.update("latest", WAITS_S, at_least=self._awaited))
        for group in users.groups:
            worker = group.ranks[0].worker
            if worker.alive:
                self._reading.append(worker.fetcher(0, model=group.model).fetch("latest", WAITS_S))

    def run(self) -> None:
        """Demand convergence. Raises GuaranteeBroken."""
        world = self._cluster
        waiting = self._running_calls()
        self._rest("after the last fault")
        self._run_until(lambda: False, 2 * world.options.lease_s)
        self._rest("two leases after the last fault")
        for record in waiting:
            world.check_over(record)
        self._end_reading()
        self._cluster.check()
        self._cluster.check_agreement()
        self._let_go()
        self._fetch_archived()
        self._meet_the_waiting()
        whole = [group for group in self._users.groups if self._is_whole(group)]
        writers = [group for group in whole if group.publishes]
        for writer in writers:
            self._publish_and_update(writer, whole)
        for writer in writers[:1]:
            self._leave_as_last(writer)
        self._cluster.check()
        # the last holder may have left although another worker refused the copy
        newest = self._users.next_version
        is_held = any(h.member.version == newest for h in world.live_handles())
        self._start_from_archive(is_held=bool(writers) and is_held)

    def _running_calls(self) -> list[CallRecord]:
        """Calls that run when the last fault ends."""
        handles = [
            handle for handle in self._cluster.live_handles() if handle.last_call is not None
        ]
        patient = [*self._waiting, *self._reading]
        return [
            h.last_call
            for h in handles
            if h.last_call is not None and not h.last_call.done and h.last_call not in patient
        ]

    def _rest(self, when: str) -> None:
        """Let everything that was asked for come to its end."""
        world = self._cluster
        is_at_rest = self._run_until(self._is_at_rest, REST_S)
        workers = [worker for worker in world.workers.values() if worker.alive]
        demand(
            is_at_rest,
            "liveness: no rest {}: {}, not welcomed: {}, busy: {}, {} not stored",
            when,
            [(h, h.member.running, h.todo) for h in world.live_handles() if not h.idle],
            [w for w in workers if w.link is None or not w.link.welcomed],
            [w for w in workers if not w.copies.machine.is_idle],
            len(world.unstored),
        )

    def _is_at_rest(self) -> bool:
        world = self._cluster
        return (
            self._cluster.timeline.coordinator.alive
            and not world.unstored
            and world.former is None
            and world.term.lease_ends == inf  # else another one leads soon
            and self._cluster.timeline.coordinator.stopped_until <= world.now
            # those that ended as well
            and all(link.read_due <= world.now for _, link in world.links.values())
            and all(
                self._is_connected(w) and w.copies.machine.is_idle
                for w in world.workers.values()
                if w.alive
            )
            and all(
                (handle.idle or self._waits(handle)) and handle.is_answered
                for handle in world.live_handles()
            )
        )

    def _is_connected(self, worker: SimWorker) -> bool:
        link = worker.link
        runs = worker.stopped_until <= self._cluster.now
        if link is None or not link.welcomed or link.is_lossy or link.read_due > self._cluster.now:
            return False
        return runs and not worker.asks.unpinned

    def _waits(self, handle: SimHandle) -> bool:
        return not handle.todo and (
            handle.last_call in self._waiting or handle.last_call in self._reading
        )

    def _end_reading(self) -> None:
        """Every rank that fills a version with a complete copy has the version by now (G7)."""
        self._run_until(lambda: not any(map(self._could_end, self._reading)), REST_S)
        for record in self._reading:
            demand(
                not self._could_end(record),
                "liveness: {} still fills, and could: {}",
                record.handle,
                record.handle.member.running,
            )
            late = isinstance(record.error, OperationTimeout) and self._has_met_all(record)
            demand(not late, "liveness: {} has waited too long: {}", record.handle, record.error)
            if not record.done and record.handle.worker.alive:
                record.handle.cancel()
        self._reading.clear()
        self._rest("after fills of what is lost were cancelled")
        self._run_until(lambda: False, 1.0)  # what was said last arrives

    def _has_met_all(self, record: CallRecord) -> bool:
        """Whether all ranks of its group were in one operation with their calls of ample time.
        Where a rank's has ended before, its user may have called again with hardly any, and a rank
        that gives up ends it for all (R6).
        """
        together = [each for each in self._reading if each.key == record.key]
        return record.key is None or len(together) == record.handle.shard.world_size

    def _could_end(self, record: CallRecord) -> bool:
        """Whether it is still a fill of all ranks, and there is all of what it wants."""
        shard = record.handle.shard
        operation = next(
            (o for o in self._cluster.coordinator.cluster.operations() if o.key == record.key), None
        )
        # A coordinator that came back after a rank's process died never hears of it: the others
        # wait for it until their deadline, as for any rank that has not called. One that has heard
        # its call ends theirs with its lease.
        heard = operation.parts if operation is not None else {}
        handles = [
            each.handle
            for each in self._reading
            if each.handle.shard.group == shard.group and not each.done
        ]
        ranks = [handle for handle in handles if handle.worker.alive or handle.shard.rank in heard]
        if record.done or not record.handle.worker.alive or len(ranks) < shard.world_size:
            return False
        model = self._cluster.coordinator.cluster.models[shard.model]
        wanted = operation.version if operation is not None else None
        if wanted is None and operation is not None and operation.resumes is not None:
            wanted = model.versions.get(operation.resumes.version)
        wanted = wanted or model.newest_visible()
        if wanted is None or wanted.abandoned or (operation is not None and operation.staying):
            return False
        # Once it writes, a fetch needs its own shard only; until then the whole version, like any
        # fill (R7, R12).
        alone = (
            not (shard.serves or shard.layout_id) and operation is not None and operation.writing
        )
        if alone and not wanted.manifests.get(shard.number):
            # the coordinator has restarted since, and nobody whose word counts has said what that
            # shard is
            return False
        if not (
            alone
            or self._cluster.guarantees.available.is_described_for(record.handle, wanted.number)
        ):
            # the same of all shards, for who reads across layouts: host copies know no more than
            # their ids
            return False
        numbers = [shard.number] if alone else [*wanted.holdings]
        content_id = wanted.info.content_id
        return all(self._is_there(number, content_id) for number in numbers) or self._is_elsewhere(
            record, content_id
        )

    def _is_elsewhere(self, record: CallRecord, content_id: str) -> bool:
        """Whether another group of the same layout, which is not the published one, holds every
        byte of it. A rank with a layout reads it there, also in the midst of a fill; a fetch of one
        published rank does not.
        """
        shard, judges = record.handle.shard, self._cluster.guarantees
        others = [
            group
            for group in self._users.groups
            if group.name != shard.group
            and group.publishes
            and shard.layout_id == group.ranks[shard.rank % len(group.ranks)].shard.layout_id
        ]
        return shard.layout_id != "" and any(
            self._is_whole(group)
            and all(self._holds_elsewhere(handle, content_id) for handle in group.ranks)
            and judges.contents.is_all(content_id, group.ranks)
            for group in others
        )

    def _holds_elsewhere(self, handle: SimHandle, content_id: str) -> bool:
        content = handle.member.content
        if (
            content is None
            or handle.member.state is not HandleState.READY
            or content.version.content_id != content_id
        ):
            return False
        has_left = self._cluster.guarantees.retained.has_left(handle, content_id) is not None
        return not content.spoiled and not has_left and is_of_other_layout(content.manifest)

    def _is_there(self, shard: int, content_id: str) -> bool:
        """Whether the ranks that serve that shard have every chunk of it, together. A replica of
        which a rank has left on purpose serves no more, whatever its remaining ranks hold.
        """
        there: set[int] = set()
        for handle in self._cluster.live_handles():
            content = handle.member.content
            if (
                content is None
                or content.version.content_id != content_id
                or handle.shard.number != shard
            ):
                continue
            runs = handle.worker.owner.has(handle.id, content.generation, len(handle.cells))
            has_left = self._cluster.guarantees.retained.has_left(handle, content_id) is not None
            if (
                handle.shard.serves
                and not content.spoiled
                and not has_left
                and not is_of_other_layout(content.manifest)
            ):
                there.update(
                    chunk for first, count in runs for chunk in range(first, first + count)
                )
        return len(there) == len(self._cluster.guarantees.contents.truth[content_id][shard])

    def _leave_as_last(self, writer: UserGroup) -> None:
        """The only holder of a retained version may leave, if another worker has room for the
        version (G5, R5).
        """
        world = self._cluster
        workers = [worker for worker in world.workers.values() if worker.alive]
        self._take_back(writer)
        writer.ranks[0].worker.asks.retain(1, writer.model)
        self._rest("after retain")
        self._users.next_version += 10
        number = self._users.next_version
        self._must(writer, number, lambda handle: handle.publish(number))
        hosts = [w for w in workers if not any(h.shard.spot for h in w.handles if h.shard.serves)]
        room = sum(worker.host_bytes // world.manifest.nbytes for worker in hosts)
        records = [handle.unpublish(LEAVES_S) for handle in writer.ranks]
        self._rest("after the last holder's leave")
        for each in records:
            ok = each.error is None or room < writer.world_size
            demand(
                ok,
                "retention: {} is kept, though others have room for what it holds: {!r}",
                each.handle,
                each.error,
            )

    def _that_wait_whole(self) -> list[CallRecord]:
        """Calls that all ranks of their group still wait with; where one rank's call has ended, the
        calls of its group are cancelled.
        """
        waiting = [
            record for record in self._waiting if not record.done and record.handle.worker.alive
        ]
        whole: list[CallRecord] = []
        for record in waiting:
            shard = record.handle.shard
            if (
                sum(other.handle.shard.group == shard.group for other in waiting)
                == shard.world_size
            ):
                whole.append(record)
            else:
                record.handle.cancel()
        return whole

    def _meet_the_waiting(self) -> None:
        """Publish the awaited versions: each call that still waits ends well (G7)."""
        waiting = self._that_wait_whole()
        names = {record.handle.shard.group for record in waiting}
        readers = [group for group in self._users.groups if group.name in names]
        writers = [
            group
            for group in self._users.groups
            if self._is_whole(group) and group.name not in names
        ]
        writers = [group for group in writers if group.publishes and any(map(group.fits, readers))]
        if not writers:
            for record in waiting:
                record.handle.cancel()
            self._waiting.clear()
            self._rest("after waiting calls were cancelled")
            return
        self._take_back(writers[0])
        self._users.next_version = self._awaited
        self._must(writers[0], self._awaited, lambda handle: handle.publish(self._awaited))
        self._waiting.clear()
        self._rest("after what was waited for was published")
        for record in waiting:
            ok = not record.handle.worker.alive or (
                record.error is None and record.number == self._awaited
            )
            demand(
                ok,
                "liveness: {} waited for {}: {!r} {}",
                record.handle,
                self._awaited,
                record.error,
                record.version,
            )

    @staticmethod
    def _is_whole(group: UserGroup) -> bool:
        return all(
            h.worker.alive and h.registered and h.registration_error is None for h in group.ranks
        ) and all(h.member.state is not HandleState.CLOSED for h in group.ranks)

    def _fetch_archived(self) -> None:
        """Every version that the bucket shows can be fetched, also if no other worker holds it (G5,
        G7), but for those of which its worker's memory has lied: they are not taken from that
        worker again.
        """
        archive, judge = self._users.archive, self._cluster.guarantees.archived
        if archive is None:
            return
        self._demand_settled(archive)
        if archive.has_ended:
            return
        reader = self._users.new_process()
        lied = {each.lied for each in archive.worker.handles}
        for number, content_id in judge.in_effect.items():
            if content_id not in lied:
                self._fetch(reader, number, number, content_id)

    def _demand_settled(self, archive: SimArchive) -> None:
        settled = self._run_until(lambda: archive.is_settled, REST_S)
        demand(settled, "liveness: {} has not come to rest", archive)

    def _fetch(self, reader: SimWorker, selector: Selector, number: int, content_id: str) -> None:
        record = reader.fetcher(0).fetch(selector)
        self._rest(f"after a fetch of {number} from the archive")
        version = record.version
        ok = version is not None and (version.version, version.content_id) == (number, content_id)
        demand(
            ok,
            "liveness: {} is archived, and {} is {}: {!r}",
            number,
            selector,
            version,
            record.error,
        )

    def _start_from_archive(self, *, is_held: bool) -> None:
        """All processes die, and the coordinator's state is lost. The newest version that the
        bucket shows is `latest` again, also after another restart, and numbers go on from there.
        """
        world, users, archive = self._cluster, self._users, self._users.archive
        if archive is None or not archive.serves or archive.has_ended:
            return
        self._demand_settled(archive)
        ok = archive.has_newest or not is_held
        demand(ok, "liveness: {} has not archived the newest version", archive)
        for worker in [*world.workers.values()]:
            if worker.alive:
                worker.crash()
        for lost in (True, False):
            world.process.crash(kept=True, down_s=0.1, lost=lost)
            self._run_until(lambda: archive.worker.alive, REST_S)
            self._demand_settled(archive)
        shown = world.guarantees.archived.in_effect
        number = max(shown, default=0)
        group = UserGroup("after", 1, spot=False)
        group.ranks.append(group.register(users.new_process(), 0))
        if shown:
            self._fetch(group.ranks[0].worker, "latest", number, shown[number])
            lower = max(0, number - 1)
            self._must(group, lower, lambda handle: handle.publish(lower), VersionConflict)
        self._must(group, number + 1, lambda handle: handle.publish(number + 1))

    def _let_go(self) -> None:
        """Nothing is retained any more."""
        world = self._cluster
        live = [worker for worker in world.workers.values() if worker.alive]
        for worker in live:
            for name in worker.newest:
                worker.asks.retain(0, name)
            for pin in list(worker.asks.pins):
                worker.asks.unpin(pin)
            worker.asks.pins.clear()
        for group in self._users.groups:
            self._users.enrol(group)
        self._run_until(lambda: False, 2.0)
        self._rest("after everything was let go")
        for model in world.coordinator.cluster.models.values():
            demand(
                not live or not model.retained(),
                "liveness: still retained: {}, pins {}",
                model.retained(),
                model.pins,
            )

    def _publish_and_update(self, writer: UserGroup, whole: list[UserGroup]) -> None:
        users = self._users
        self._take_back(writer)
        users.next_version += 10
        number = users.next_version
        self._must(writer, number, lambda handle: handle.publish(number))
        for reader in whole:
            if reader is not writer and reader.fits(writer):
                self._must(reader, number, lambda handle: handle.update("latest"))
            elif reader.is_refused and reader.model == writer.model:
                self._must(reader, number, lambda handle: handle.update("latest"), ManifestMismatch)

    def _take_back(self, writer: UserGroup) -> None:
        """Its memory is its own again."""
        for handle in writer.ranks:
            # a doubt may turn out to be torn memory
            while handle.member.state not in (HandleState.EMPTY, HandleState.CLOSED):
                record = handle.unpublish()
                self._rest("after unpublish")
                demand(record.error is None, "liveness: {}: unpublish: {!r}", handle, record.error)

    def _must(
        self,
        group: UserGroup,
        number: int,
        call: Callable[[SimHandle], CallRecord],
        refusal: type[TensorHubError] | None = None,
    ) -> None:
        """This call of all ranks has to succeed, or (`refusal`) to end with that error of all of
        them, once what happened before is paid for: each refusal (a body raised) that a rank has
        not heard of yet ends one call of that rank, and ranks may have several before them. So does
        the loss of the coordinator's state.
        """
        records: list[CallRecord] = []
        for _ in range(TRIES):
            records = [call(handle) for handle in group.ranks]
            self._rest(f"after {records[0].what} of {group.name}")
            errors = [each.error for each in records if each.error is not None]
            if not errors or (
                refusal is not None and any(isinstance(error, refusal) for error in errors)
            ):
                break
            known = all(
                isinstance(error, GroupAborted | OperationTimeout | LeaseLost) for error in errors
            )
            demand(
                known,
                "liveness: the calls of {} end, again and again, with {!r}",
                group.ranks[0],
                errors,
            )
        for each in records:
            ok = each.error is None and each.number == number
            if refusal is not None:
                ok = isinstance(each.error, refusal)
            demand(
                ok,
                "liveness: {} {} ends with {!r} {}",
                each.handle,
                each.what,
                each.error,
                each.version,
            )
