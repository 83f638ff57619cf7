"""The archive worker of a simulated cluster, and its bucket, which survives every crash.

As `runtime.worker.archiver` and `archived_copies` do it, on the real machines (`HostCopies`,
`Loading`, `Owner`) in virtual time: the newest version comes into a seed copy, is written some time
later, and is announced by copies that are loaded as readers ask. After a crash, or where the
coordinator has given a copy up, versions are restored, and announced anew. Reads of the bucket may
fail, until faults end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from tensorhub.archives.catalogue import Key
from tensorhub.archives.retention import Keep
from tensorhub.coordinator import Publication
from tensorhub.messages import Done, Refused, Restore, Restored
from tensorhub.model.accesses import Refusal
from tensorhub.model.digests import pack, root_of
from tensorhub.runtime.worker.coordinator_client import Answer
from tensorhub.testing.drivers.timeline import Timeline
from tensorhub.testing.sim.host_copies import CopyRequest
from tensorhub.testing.sim.judges.archives import published_in
from tensorhub.testing.sim.layouts import tags_in
from tensorhub.testing.sim.memory import digest_of
from tensorhub.testing.sim.sites import MODEL
from tensorhub.testing.sim.worker import SimHandle, SimWorker
from tensorhub.testing.sim.world import World
from tensorhub.types import HandleState, Medium, Purpose, VersionInfo
from tensorhub.worker.host_copy_actions import Unload
from tensorhub.worker.loading import Loading
from tensorhub.worker.member_memory import Content
from tensorhub.worker.registration_session import Shard

SEED_S = 30.0
REMOVE_S = 10.0
AGAIN_S = 2.0  # after a version could not be had: until it is asked for again
AWAY_S = (0.1, 2.0, 8.0)  # from a crash until it is back
LEAVES_S = 2.0  # for a reader of what is to be unloaded


class Processes(Protocol):
    """The users who start it."""

    is_over: bool  # nothing fails any more

    def new_process(self, shards: int = 0) -> SimWorker:
        """A new worker, with host memory for so many shards."""


@dataclass(frozen=True)
class Stored:
    """One shard in the bucket."""

    content: Content
    cells: tuple[str, ...]
    digests: tuple[int, ...]


@dataclass(frozen=True)
class Version:
    """One version in the bucket."""

    publication: Publication
    shards: tuple[Stored, ...]

    @property
    def info(self) -> VersionInfo:
        return replace(self.shards[0].content.version, lineage=self.publication.lineage)

    @property
    def key(self) -> Key:
        return Key(self.publication.lineage, self.publication.number)

    @property
    def restored(self) -> Restored:
        known = self.publication
        roots = b"".join(each.content.root for each in self.shards)
        return Restored(self.info, known.layout_id, known.manifest_ids, roots)


class ArchivedCopy:
    """One registration, whose memory is loaded on demand."""

    handle: SimHandle

    def __init__(self, archive: SimArchive, stored: Stored) -> None:
        self._archive = archive
        self._stored = stored
        self.loading = Loading(stored.content.manifest.sizes)
        self._reads = False  # it loads, or waits for room
        self._has_room = False
        self._is_leaving = False  # its room is wanted

    @property
    def is_there(self) -> bool:
        return self.handle.worker.registered(self.handle.id) is self.handle

    def want(self, chunks: Sequence[tuple[int, int]]) -> Refusal | None:
        refusal = self.loading.want(chunks, self._archive.now)
        self._begin()
        return refusal

    def _begin(self) -> None:
        more = self.loading.has_more(self._archive.now)
        if more and not (self._reads or self._is_leaving):
            self._reads = True
            self._archive.after(0.0, self._read)

    def _read(self) -> None:
        self._reads = self.is_there and not self._is_leaving
        if not self._reads:
            return
        if not self._has_room:
            nbytes = self._stored.content.manifest.nbytes
            copies = self.handle.worker.copies
            room = copies.make_room(self.handle.id, Purpose.ARCHIVE, nbytes)
            when_done([room], lambda: self._room_ended(room))
            return
        batch = self.loading.take(self._archive.now)
        self._reads = bool(batch)
        if batch:
            self._archive.after(self._archive.load_s, self._came, batch)

    def _room_ended(self, room: CopyRequest) -> None:
        self._has_room = room.error is None
        if self._has_room:
            manifest = self._stored.content.manifest
            self.handle.worker.copies.take(self.handle.id, manifest.nbytes)
            self._archive.after(0.0, self._read)
            return
        self._reads = False
        while batch := self.loading.take(self._archive.now):
            self.loading.failed(batch, Refusal(str(room.error)), self._archive.now)
        self._archive.wake(self.handle)

    def _came(self, batch: list[int]) -> None:
        handle, now, stored = self.handle, self._archive.now, self._stored
        content = handle.member.content
        if self._archive.fails():
            self._archive.took("bucket not read")
            self.loading.failed(batch, Refusal("the bucket cannot be read"), now)
        elif content is None:
            self.loading.returned(batch)
        else:
            for chunk in batch:
                handle.cells[chunk] = stored.cells[chunk]
            named = [(chunk, stored.digests[chunk]) for chunk in batch]
            if handle.worker.owner.mark_available(handle.id, content.generation, named):
                self._archive.took("loaded from the bucket")
                self.loading.arrived(batch, now)
                handle.unwanted -= {*batch}
            else:
                self.loading.returned(batch)
        self._archive.wake(handle)
        self._read()

    def unload(self, action: Unload, asked_at: float) -> None:
        """Give back what is loaded, once its turn is over."""
        now, owner = self._archive.now, self.handle.worker.owner
        is_read = not owner.is_quiet(self.handle.id)
        left_s = self.loading.turn_left_s(asked_at, now, is_read=is_read)
        if action.in_turn and left_s > 0:
            self._archive.after(left_s, self.unload, action, asked_at)
            return
        self._is_leaving = True
        self._empty(now + LEAVES_S)

    def _empty(self, until: float) -> None:
        handle = self.handle
        if not self.is_there:
            return  # its room goes with its memory
        running = handle.worker.owner.unload(handle.id) if not self._reads else frozenset()
        if self._reads or running:
            if self._archive.now >= until:
                handle.shut_readers(running)
            self._archive.after(0.1, self._empty, until)
            return
        handle.half_fill(())
        handle.unwanted = frozenset(range(len(handle.cells)))
        self.loading.emptied()
        self._has_room = self._is_leaving = False
        self._archive.took("archived copy unloaded")
        handle.worker.copies.unloaded(handle.id)
        self._begin()


class SimArchive:
    """The archive of one cluster, in whichever process it runs now."""

    worker: SimWorker

    def __init__(
        self, users: Processes, world: World, timeline: Timeline, random: Random, shards: int
    ) -> None:
        self._users, self._world, self._timeline = users, world, timeline
        self._random = random
        self._shards = shards * random.choice((2, 2, 3))  # for which it has memory
        self._keep = random.choice((None, Keep(1), Keep(2), Keep(3)))
        self.serves = random.random() < 0.7  # it restores versions of another cluster
        self._write_s = random.choice((0.01, 0.3, 2.0))
        self.load_s = random.choice((0.005, 0.05, 0.5))
        self._fault_rate = random.choice((0.0, 0.0, 0.3))
        self._bucket: dict[Key, Version] = {}
        self.cluster = ""  # whose versions these are
        self.start()

    def __repr__(self) -> str:
        return f"<SimArchive in {self.worker}: {[*map(str, self._bucket)]}>"

    def start(self) -> None:
        """In a new process."""
        self.worker = worker = self._users.new_process(shards=self._shards)
        self._copies: dict[tuple[Key, int], ArchivedCopy] = {}
        self._restoring = 0, [*self._bucket.values()][:0]  # a request, and what it names
        self._is_busy = False  # it seeds, writes or removes
        self._retains = False  # the rules of retention are still to be applied
        self.has_ended = False
        self._seen: VersionInfo | None = None  # the newest that it has tried to archive
        self._again_at = 0.0  # when it asks for that version again
        worker.copies.on_unload = self._unload
        worker.copies.machine.budget.last_used = self._last_used
        self.after(0.0, self._turn)

    # -- what its parts need

    @property
    def now(self) -> float:
        return self._timeline.now

    def after(self, seconds: float, act: Callable[..., None], *args: object) -> None:
        delay = seconds * (0.5 + self._random.random()) + self._timeline.wake()
        self._timeline.after(delay, self.worker, act, *args)

    def fails(self) -> bool:
        return not self._users.is_over and self._random.random() < self._fault_rate

    def took(self, path: str) -> None:
        self._world.took(path)

    def wake(self, handle: SimHandle) -> None:
        self._world.data.chunks_offered(handle)

    def _copy_of(self, ident: str) -> ArchivedCopy | None:
        return next((each for each in self._copies.values() if each.handle.id == ident), None)

    def _unload(self, action: Unload) -> None:
        copy = self._copy_of(action.registration)
        if copy is not None:
            copy.unload(action, self.now)

    def _last_used(self, ident: str) -> float:
        copy = self._copy_of(ident)
        return copy.loading.used_at if copy is not None else 0.0

    # -- what becomes of it

    def crashed(self) -> None:
        """Its process is no more; another one begins some time."""
        self._timeline.after(self._random.choice(AWAY_S), None, self.start)

    def welcomed(self) -> None:
        """What was not answered over its last connection is said again."""
        self._restoring = 0, []

    @property
    def is_settled(self) -> bool:
        """Whether it has nothing to do."""
        done = self.worker.is_online and not (self._is_busy or self._restoring[0])
        is_home = self.cluster == self._world.ident == self.worker.router.cluster
        seen = self.has_newest or self.worker.newest[MODEL] == self._seen
        return self.has_ended or (done and is_home and seen and not self._lost())

    @property
    def has_newest(self) -> bool:
        newest = self.worker.newest[MODEL]
        return newest is None or self._has(newest)

    @property
    def numbers(self) -> list[int]:
        """Of the versions that the bucket shows."""
        return [*self._world.guarantees.archived.in_effect]

    def _has(self, info: VersionInfo) -> bool:
        return any(each.info.content_id == info.content_id for each in self._bucket.values())

    def _in_effect(self) -> list[Version]:
        shown = self._world.guarantees.archived.in_effect.values()
        return [its for _, its in sorted(self._bucket.items()) if its.info.content_id in shown]

    def _lost(self) -> list[Version]:
        """Those in effect of which a copy is missing."""
        return [
            each
            for each in self._in_effect()
            if not all(
                (each.key, shard) in self._copies and self._copies[each.key, shard].is_there
                for shard in range(len(each.shards))
            )
        ]

    # -- what it does

    def _turn(self) -> None:
        self.after(0.2, self._turn)
        if self.worker.is_online and not (self.has_ended or self._is_busy or self._restoring[0]):
            self._step()

    def _step(self) -> None:
        worker, newest = self.worker, self.worker.newest[MODEL]
        cluster = worker.router.cluster
        self.cluster = self.cluster if self._bucket else cluster
        if self.cluster != cluster and not self.serves:
            self.has_ended = True
        elif self.cluster != cluster:
            self._restore(self._in_effect())
        elif lost := self._lost():
            self._restore(lost)
        elif not (newest is None or self.has_newest) and (
            newest != self._seen or self.now >= self._again_at
        ):
            self._seed(newest)
        elif self._retains and self._keep is not None:
            self._retains = False
            self._retain(self._keep)

    def _seed(self, info: VersionInfo) -> None:
        self._is_busy, copies = True, self.worker.copies
        shards = range(info.world_size)
        wanted = [copies.seed(info, shard, SEED_S, info.version) for shard in shards]

        def seeded() -> None:
            found = self._held(info)
            self._is_busy = found is not None
            self._seen, self._again_at = info, self.now + AGAIN_S  # perhaps in vain
            if found is not None:
                self.after(self._write_s, self._write, info, found)

        when_done(wanted, seeded)

    def _held(self, info: VersionInfo) -> list[tuple[SimHandle, int]] | None:
        """Its seeds that hold that, with their generations; None: one does not."""
        found: list[tuple[SimHandle, int]] = []
        for shard in range(info.world_size):
            seed = self.worker.copies.machine.seeded(info, shard)
            handle = self.worker.registered(seed[0]) if seed is not None else None
            if seed is None or handle is None or handle.member.state is not HandleState.READY:
                return None
            found.append((handle, seed[1].generation))
        return found

    def _write(self, info: VersionInfo, held: list[tuple[SimHandle, int]]) -> None:
        """The manifest is there, unless the seeds have changed meanwhile."""
        self._is_busy, judges = False, self._world.guarantees
        publications = published_in(self._world.store)
        known = next((each for each in publications if each.content_id == info.content_id), None)
        if self._held(info) != held or known is None:
            return
        shards = [self._stored(handle) for handle, _ in held]
        whole = tuple([each for each in shards if each is not None])
        if len(whole) == len(shards):
            version = Version(known, whole)
            self._world.note(f"archived {info}")
            self.took("archived")
            judges.archived.wrote(version.key, info.content_id, (each.cells for each in whole))
            self._bucket[version.key] = version
            self._retains = True

    def _stored(self, handle: SimHandle) -> Stored | None:
        """What it holds, unless other bytes than the publisher's are believed there."""
        contents, content = self._world.guarantees.contents, handle.member.content
        assert content is not None
        tags = {tag for cell in handle.cells for tag, _ in tags_in(cell)}
        content_id = content.version.content_id
        if contents.is_spoilt(handle, content_id) or not contents.written.isdisjoint(tags):
            return None
        cells = tuple(handle.cells)
        digests = tuple([digest_of(cell) for cell in cells])
        root = root_of(pack(digests, 8))
        return Stored(replace(content, generation=0, retained=False, root=root), cells, digests)

    def _restore(self, versions: list[Version]) -> None:
        request = next(self._world.numbers)
        self._restoring = request, versions
        newest = versions[-1].key if versions else Key(0, 0)
        said = tuple([each.restored for each in versions[::-1]])
        place = self.cluster, newest.lineage, newest.number
        self.worker.say(Restore(request, MODEL, *place, said))

    def answered(self, message: Answer) -> None:
        """Perhaps what it has restored is durable."""
        request, versions = self._restoring
        world, cluster = self._world, self.worker.router.cluster
        if message.request != request:
            return
        self._restoring = 0, []
        if isinstance(message, Refused):
            error = message.error.error()
            self.has_ended = not error.retryable
            is_other = self.cluster != cluster and any(published_in(world.store))
            in_vain = is_other or world.ident != cluster
            world.guarantees.archived.not_restored(error, (self, versions), in_vain=in_vain)
        elif isinstance(message, Done) and world.ident == cluster:
            self.took("restored" if self.cluster != cluster else "archive announced")
            self.cluster = cluster
            model = world.coordinator.cluster.models.get(MODEL)
            known = model.versions.values() if model is not None else ()
            contents = {each.info.content_id for each in known}
            for each in versions:
                if each.info.content_id in contents:
                    self._announce(each)
                else:  # it was rolled back
                    self._forget(each.key, unwanted=False)

    def _announce(self, version: Version) -> None:
        for shard, stored in enumerate(version.shards):
            before = self._copies.get((version.key, shard))
            if before is None or not before.is_there:
                self._copies[version.key, shard] = self._adopt(stored, shard)

    def _adopt(self, stored: Stored, shard: int) -> ArchivedCopy:
        copy, content = ArchivedCopy(self, stored), stored.content
        ident = f"r{next(self._world.registrations)}a"
        its = Shard(ident, MODEL, f"archive/{ident}", 0, 1, False, "", content.manifest, shard)
        its = replace(its, medium=Medium.HOST, purpose=Purpose.ARCHIVE)
        self.worker.copies.machine.adopted(its)

        def begin(handle: SimHandle) -> None:
            copy.handle = handle
            handle.adopt(content, stored.digests, copy)

        self.worker.take(its, begin)
        return copy

    def _retain(self, keep: Keep) -> None:
        """Have the copies of unwanted versions leave, then delete their objects."""
        model = self._world.coordinator.cluster.models.get(MODEL)
        retained = model.retained() if model is not None else ()
        pinned = frozenset(key for key in self._bucket if key.number in retained)
        unwanted = self._bucket.keys() - replace(keep, pinned=pinned).chosen(self._bucket)
        self._remove(sorted(unwanted))

    def _remove(self, keys: Sequence[Key]) -> None:
        """One after the other, and nothing else meanwhile."""
        self._is_busy = bool(keys)
        if not keys:
            return
        key, *later = keys
        copies, machine = self.worker.copies, self.worker.copies.machine
        idents = [copy.handle.id for (its, _), copy in self._copies.items() if its == key]
        left = [copies.want(machine.remove(ident, REMOVE_S)) for ident in idents]

        def ended() -> None:
            if key in self._bucket and not any(each.error for each in left):
                self._forget(key, unwanted=True)
            self._remove(later)

        when_done(left, ended)

    def _forget(self, key: Key, *, unwanted: bool) -> None:
        self._world.note(f"the archive removes {key}")
        self.took("removed from the bucket")
        del self._bucket[key]
        self._world.guarantees.archived.removed(key, unwanted=unwanted)
        for each in [each for each in self._copies if each[0] == key]:
            del self._copies[each]


def when_done(requests: Sequence[CopyRequest], act: Callable[[], None]) -> None:
    """Call it once all of these have ended."""
    left = [each for each in requests if not each.done]

    def ended() -> None:
        left.pop()
        if not left:
            act()

    for each in left:
        each.on_end.append(ended)
    if not left:
        act()
