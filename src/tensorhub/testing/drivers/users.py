"""What users of a simulated cluster do: groups that publish, fetch, leave and come back; orders for
the whole model.

Responsible for the calls and their times. Not responsible for faults (`injecting`), though a user's
own mistakes (differing calls, hardly any time) are made here once a fault asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tensorhub.errors import StateError, TensorHubError
from tensorhub.messages import Done
from tensorhub.runtime.worker.coordinator_client import Answer
from tensorhub.runtime.worker.pins import SAID_AGAIN_S
from tensorhub.testing.drivers.archiving import SimArchive
from tensorhub.testing.drivers.injecting import StruckUsers
from tensorhub.testing.drivers.parts import ARCHIVE, Whole
from tensorhub.testing.drivers.timeline import Timeline
from tensorhub.testing.sim.assertion import HOLDING
from tensorhub.testing.sim.handle import CallRecord, HandleShell
from tensorhub.testing.sim.layouts import Layout, described, is_of_other_layout
from tensorhub.testing.sim.pulling import Reading
from tensorhub.testing.sim.sites import MODEL, MODELS, SITES
from tensorhub.testing.sim.worker import SimHandle, SimWorker
from tensorhub.testing.sim.world import World
from tensorhub.types import HandleState, Location, Purpose, Selector
from tensorhub.worker.calls import CloseCall, FillCall, PublishCall, UnpublishCall

TIMEOUTS_S = (3.0, 10.0, 30.0)
NO_TIME_S = (0.0, 0.05, 0.5)
LARGE_GROUP = 8
READERS = 4
STAGED = 0.3  # of the fills of memory that holds a version, besides those that are drawn as such
REVIVE_S = 20.0
# What a group does next, and a worker asks of the whole model: how often, on average over all
# seeds.
CALLS = {"publish": 4, "fill": 5, "stage": 2, "prefetch": 1, "unpublish": 1, "rare": 1}
ORDERS = {"rollback": 1, "retain": 3, "pin": 2, "unpin": 1}
NEEDED = ("publish", "fill")  # without them nothing happens at all


@dataclass(eq=False)
class UserGroup:
    """One group of a user: its ranks, whichever processes they are in now."""

    name: str
    world_size: int
    spot: bool
    ranks: list[SimHandle] = field(default_factory=list)
    differs: bool = False  # its next call is not the same on all ranks
    cut: Layout | None = None  # None: the one that all have
    turns: int = 0
    model: str = MODEL

    def register(self, worker: SimWorker, rank: int) -> SimHandle:
        """That rank's memory, in this process."""
        return worker.register(
            self.name, rank, self.world_size, model=self.model, spot=self.spot, cut=self.cut
        )

    @property
    def publishes(self) -> bool:
        """Whether it has all of the model, each part on equal ranks."""
        return self.cut is None or self.cut.publishes

    @property
    def is_refused(self) -> bool:
        """Whether it would leave something unread, and may not."""
        return self.cut is not None and self.cut.is_refused

    def fits(self, other: UserGroup) -> bool:
        """Whether each of the two can read its peer's publications."""
        if self.is_refused or other.is_refused or self.model != other.model:
            return False
        return self.world_size == other.world_size or (
            self.cut is not None and other.cut is not None
        )


class Users(StruckUsers):
    """All users of the cluster."""

    def __init__(
        self,
        world: World,
        timeline: Timeline,
        layouts: list[Layout],
        seeders: int,
        archive: Random | None = None,
        models: Random | None = None,
        part: Whole | None = None,
    ) -> None:
        """`layouts`: of the groups, where these differ; none: they have one layout. `seeders`: how
        many workers seed. `archive`: decides what an archive does, if there is one. `models`: of
        which of two models each group is, if there are two. `part`: of the run that is run; None:
        all of it.
        """
        self._world = world
        self._timeline = timeline
        self._random = random = timeline.random
        # called when the ranks of a group call differently
        self.differed: Callable[[], None] = lambda: None
        # whether versions are all that the seed still has to have: then groups only publish
        self.lacks_versions: Callable[[], bool] = lambda: False
        # of the clock of the worker with that name
        self.clock_rate: Callable[[str], float] = lambda name: 1.0
        self.world_size = 0  # of groups; 0: as it is drawn
        self.readers: Random | None = None  # decides what sessions do that are read-only
        self._readers: list[SimWorker] = []
        self.groups: list[UserGroup] = []
        self.published: set[str] = set()  # content ids of versions whose publish has returned
        self.next_version = 1
        self._newest = 0  # the largest number that was ever meant to be published
        self.is_over = False  # no user calls any more
        self._pause_s = random.choice((0.2, 0.5, 1.5))  # between two calls of one group, on average
        self._fetch_rate = random.choice((0.0, 0.1, 0.3))
        self._order_rate = random.choice((0.05, 0.05, 0.2))
        self._counts_on = random.random() < 0.3  # after a rollback too
        self._calls = self._habits(CALLS)
        self._orders = self._habits(ORDERS)
        self._workers = 0
        self._layouts = layouts
        self._seeders = seeders
        self._archive_random = archive
        self._models = models
        self._part = part or Whole()
        self.archive: SimArchive | None = None

    def __repr__(self) -> str:
        return f"<Users in {len(self.groups)} groups, {len(self.published)} versions>"

    def _habits(self, usual: dict[str, int]) -> tuple[str, ...]:
        """The kinds of calls of this seed, each as often as it stands there. Some kinds never come,
        so that the rest come thick and fast (a swarm, as for faults: Groce et al., "Swarm testing",
        2012).
        """
        habits: list[str] = []
        for what, often in usual.items():
            habits += [what] * (
                often * self._random.choice((1, 1, 4) if what in NEEDED else (0, 1, 1, 4))
            )
        return tuple(habits) or tuple(usual)

    def begin(self) -> None:
        """Start the processes of all users."""
        random = self._random
        drawn = random.choice((1, 1, 1, 2, 2, 3, LARGE_GROUP))
        world_size = self.world_size or drawn
        if self._layouts:
            self._lay_out(self._layouts[0].rows)
        for number in range(3 if world_size >= LARGE_GROUP else random.randint(3, 5)):
            odd = random.random() < 0.04
            group = UserGroup(f"g{number}", world_size + odd, random.random() < 0.15)
            if self._models is not None:
                group.model = self._models.choice(MODELS)
            if self._layouts:
                may_read_only = self._all_publish()
                group.cut = random.choice(
                    [cut for cut in self._layouts if cut.publishes or may_read_only]
                )
                group.world_size = group.cut.ranks
            before = self.groups[-1] if self.groups and random.random() < 0.2 else None
            for rank in range(group.world_size):
                shared = (
                    before.ranks[rank].worker
                    if before is not None and rank < len(before.ranks)
                    else None
                )
                worker = shared or self.new_process()
                group.ranks.append(group.register(worker, rank))
            self.groups.append(group)
            self._timeline.after(random.random(), None, self._turn, group)
        self._timeline.after(REVIVE_S, None, self._revive)
        for _ in range(self._seeders):
            seeder = self.new_process(shards=world_size)
            self._seed(seeder)
            if not self._part.has(seeder.name):
                seeder.crash()
        for _ in range(READERS if self.readers is not None else 0):
            reader = self.new_process(read_only=True)
            self._readers.append(reader)
            self._read(reader)
            if not self._part.has(reader.name):
                reader.crash()
        self._leave_out()
        if self._archive_random is not None and self._part.has(ARCHIVE):
            its = self._archive_random, max(group.world_size for group in self.groups)
            self._fetch_rate, self._order_rate = self._fetch_rate or 0.3, 0.2
            self._orders = (*self._orders, "rollback")
            self.archive = SimArchive(self, self._world, self._timeline, *its)

    def _leave_out(self) -> None:
        """The processes of groups that are not there have never done anything."""
        everybody = self.groups
        self.groups = [group for group in everybody if self._part.has(group.name)]
        needed = {id(handle.worker) for group in self.groups for handle in group.ranks}
        for handle in [handle for group in everybody for handle in group.ranks]:
            if handle.worker.alive and id(handle.worker) not in needed:
                handle.worker.crash()

    def _all_publish(self) -> bool:
        """Whether every group so far does: enough of them must, or hardly anything happens."""
        return all(group.publishes for group in self.groups)

    def _lay_out(self, rows: int) -> None:
        """Groups differ in which part of a tensor of so many rows each rank has."""
        self._world.chunks = rows
        self._world.manifest, _, _ = described(Layout(rows, 1), 0)

    def new_process(self, shards: int = 0, *, read_only: bool = False) -> SimWorker:
        """A new worker, somewhere; with host memory for so many shards, or for some."""
        random, name = self._random, f"w{self._workers}"
        self._workers += 1
        location = Location(site=random.choice(SITES), host=random.choice((name, "shared")))
        self._world.host_bytes = (
            shards or random.choice((0, 1, 2, 3))
        ) * self._world.manifest.nbytes
        worker = self._world.worker(name, location, read_only=read_only)
        worker.clock.rate = self.clock_rate(name)
        worker.newest = dict.fromkeys(MODELS if self._models is not None else (MODEL,))
        self._timeline.after(SAID_AGAIN_S, worker, self._end_pins, worker)
        worker.copies_refused = random.choice((0, 0, 0, 1, 3))
        return worker

    # -- what strikes them

    def differ(self) -> None:
        """The ranks of some group will not call alike."""
        self._random.choice(self.groups).differs = True

    def restart_one(self) -> bool:
        """A dead rank's place is taken by a new process. Whether there was one."""
        places = [
            (group, rank)
            for group in self.groups
            for rank, h in enumerate(group.ranks)
            if not h.worker.alive
        ]
        if places:
            self.replace(*self._random.choice(places))
        return bool(places)

    def preempt(self, worker: SimWorker) -> bool:
        """It closes what it has, with little time; then it is gone. False: it is not spot."""
        if not any(handle.shard.spot for handle in worker.handles):
            return False
        notice_s = self._random.choice((0.2, 2.0))
        for handle in list(worker.handles):
            if handle.idle and handle.shard.purpose is Purpose.USE:
                handle.close(notice_s)
        self._timeline.after(notice_s, worker, worker.crash)
        return True

    def end(self) -> None:
        """No user begins a call any more."""
        self.is_over = True
        for reader in self._readers:
            if reader.alive:
                reader.crash()  # at their cap they would make room for one another for ever
        self.hasty_until = 0.0
        self.next_version = max(self.next_version, self._newest + 1)

    # -- one group

    def _turn(self, group: UserGroup) -> None:
        """Do something, or nothing if the last call runs; and again later."""
        if self.is_over:
            return
        self._timeline.after(self._random.expovariate(1 / self._pause_s), None, self._turn, group)
        group.turns += 1
        if group not in self.groups:
            return  # it is left out
        takes, turn = self._part.takes_turn, f"{group.turns}"
        self.enrol(group)
        random = self._random
        if (
            self._fetch_rate
            and random.random() < self._fetch_rate
            and takes(group.name, turn + "f")
        ):
            self._fetch(group)
        if random.random() < self._order_rate and takes(group.name, turn + "o"):
            self._order(group)
        ranks = [
            handle
            for handle in group.ranks
            if handle.worker.alive and handle.idle and handle.registered
        ]
        live = [handle for handle in group.ranks if handle.worker.alive]
        if not ranks or (len(ranks) < len(live) and random.random() < 0.8):
            return
        if takes(group.name, turn):
            self._call(group, ranks)

    def enrol(self, group: UserGroup) -> None:
        """Register again every rank that was refused, or has closed."""
        for rank, handle in enumerate(group.ranks):
            state, worker = handle.member.state, handle.worker
            gone = handle.registration_error is not None or state is HandleState.CLOSED
            if not worker.alive or not gone or not handle.idle or handle.serving:
                continue
            if state in HOLDING or state is HandleState.IN_DOUBT:
                handle.close(1.0, abandon=True)
            else:
                worker.drop(handle)
                group.ranks[rank] = group.register(worker, rank)

    def replace(self, group: UserGroup, rank: int) -> None:
        """A new process takes a dead one's place."""
        group.ranks[rank] = group.register(self.new_process(), rank)

    def _revive(self) -> None:
        """Where hardly any group is whole, the driver starts processes again: a seed has to go
        somewhere.
        """
        if self.is_over:
            return
        self._timeline.after(REVIVE_S, None, self._revive)
        broken = [
            group for group in self.groups if not all(handle.worker.alive for handle in group.ranks)
        ]
        if broken and len(self.groups) - len(broken) < 2:
            group = self._random.choice(broken)
            for rank in [
                rank for rank, handle in enumerate(group.ranks) if not handle.worker.alive
            ]:
                self.replace(group, rank)

    def _call(self, group: UserGroup, ranks: list[SimHandle]) -> None:
        random = self._random
        what = random.choice(self._calls)
        wants = self.lacks_versions()
        if self._part.publishes(f"{group.name}.{group.turns}", wants=wants):
            what = "publish"
        if what == "publish" and not group.publishes:
            what = "fill"
        if what == "rare":
            what = random.choice(("close", "refuse", "fill"))
        number = self.next_version
        if what == "publish":
            self.next_version += 1
            self._newest = max(self._newest, number)
            if random.random() < 0.05:
                number = random.randint(0, self.next_version)
        recent = max(0, self.next_version - random.randint(1, 2))
        selector: Selector = random.choice(
            ("latest", "latest", "latest", "available", "latest-1", recent)
        )
        hold = random.random() < 0.3
        timeout_s = random.choice(
            NO_TIME_S if self._timeline.now < self.hasty_until else TIMEOUTS_S
        )
        differs, group.differs = group.differs, False
        if differs:
            self.differed()
        for handle in ranks:
            if differs and random.random() < 0.4:
                if random.random() < 0.5:
                    continue
                what, number, selector = (
                    random.choice(("publish", "fill", "unpublish")),
                    number + 1,
                    "latest-1",
                )
                if what == "publish" and not group.publishes:
                    what = "fill"
            late_s = random.random() * random.choice((0.001, 0.001, 0.5))
            self._timeline.after(
                late_s,
                handle.worker,
                self._one_call,
                handle,
                what,
                number,
                selector,
                hold,
                timeout_s,
            )

    def _one_call(
        self,
        handle: SimHandle,
        what: str,
        number: int,
        selector: Selector,
        hold: bool,
        timeout_s: float,
    ) -> None:
        if not handle.idle or self.is_over:
            return
        state, random = handle.member.state, self._random
        holds = state in HOLDING
        # Ranks that share a shard have to publish the same bytes. A rank in doubt cannot write.
        must_write = state is HandleState.IN_DOUBT and bool(self._layouts)
        try:
            match what:
                case "publish" if holds or state is HandleState.TORN or must_write:
                    handle.unpublish(timeout_s)
                case "publish":
                    handle.publish(number, timeout_s)
                case "fill" if state is HandleState.READY and random.random() < STAGED:
                    handle.stage(selector, timeout_s, hold=hold)
                case "fill" if holds or state is HandleState.IN_DOUBT or random.random() < 0.5:
                    handle.update(selector, timeout_s, hold=hold)
                case "fill":
                    handle.replicate(selector, timeout_s, hold=hold)
                case "stage":
                    handle.stage(selector, timeout_s, hold=hold)
                case "prefetch":
                    handle.prefetch(selector, timeout_s)
                case "unpublish":
                    handle.unpublish(timeout_s)
                case "close":
                    handle.close(timeout_s, abandon=random.random() < 0.3)
                case _:
                    handle.refuse()
        except StateError:
            pass  # not in this state

    def _fetch(self, group: UserGroup) -> None:
        random = self._random
        workers = [
            handle.worker
            for handle in group.ranks
            if handle.worker.alive and not handle.worker.stopped_until
        ]
        if workers:
            selector: Selector = random.choice(
                ("latest", "latest", "available", "latest-1", max(0, self.next_version - 1))
            )
            if self.archive is not None and self.archive.numbers and random.random() < 0.5:
                selector = random.choice(self.archive.numbers)
            worker, shard = random.choice(workers), random.randrange(group.world_size)
            part = None if self._layouts and random.random() < 0.5 else shard
            fetcher = worker.fetcher(part, model=group.model)
            fetcher.fetch(selector, random.choice(TIMEOUTS_S))

    def _read(self, worker: SimWorker) -> None:
        """It fetches a part of what there is, again and again, with the read-only token."""
        random = self.readers
        if self.is_over or random is None:
            return
        self._timeline.after(random.expovariate(1 / self._pause_s), worker, self._read, worker)
        selector: Selector = random.choice(("latest", "available", "latest-1"))
        fetcher = worker.fetcher(0, model=random.choice([*worker.newest]))
        fetcher.fetch(selector, random.choice(TIMEOUTS_S))

    def _seed(self, worker: SimWorker) -> None:
        """It brings the newest version that it has heard of into its host memory, again and
        again.
        """
        self._timeline.after(
            self._random.expovariate(1 / self._pause_s), worker, self._seed, worker
        )
        for newest in worker.newest.values():
            if newest is not None and not self.is_over:
                for shard in range(newest.world_size):
                    worker.copies.seed(newest, shard, self._random.choice(TIMEOUTS_S))

    def _order(self, group: UserGroup) -> None:
        """A worker asks for something that concerns the whole model."""
        random = self._random
        workers = [handle.worker for handle in group.ranks if handle.worker.alive]
        worker = random.choice(workers) if workers else None
        if worker is None or worker.link is None:
            return
        match random.choice(self._orders):
            case "rollback":
                known = worker.newest[group.model] if random.random() < 0.8 else None
                newest = known.version if known is not None else self.next_version - 1
                worker.asks.rollback(max(0, newest - random.randint(0, 4)), group.model)
            case "retain":
                worker.asks.retain(random.choice((0, 0, 1, 2)), group.model)
            case "pin":
                worker.asks.pin(max(0, self.next_version - random.randint(1, 2)), group.model)
            case "unpin":
                if worker.asks.pins:
                    worker.asks.unpin(random.choice(list(worker.asks.pins)))

    def _end_pins(self, worker: SimWorker) -> None:
        """Say again, until it is heard and done, which pins are over."""
        if worker.is_online:
            for pin in list(worker.asks.unpinned):
                worker.asks.unpin(pin)
        self._timeline.after(SAID_AGAIN_S, worker, self._end_pins, worker)

    # -- what becomes of calls

    def welcomed(self, worker: SimWorker) -> None:
        """Repeat each rollback that a user still waits for, by its name."""
        if self.archive is not None and worker is self.archive.worker:
            self.archive.welcomed()
        undone = list(worker.asks.rollbacks.values())
        worker.asks.rollbacks.clear()
        for each in undone:
            worker.asks.rollback(each.to, each.model, each.ident)

    def answered(self, worker: SimWorker, message: Answer) -> None:
        """A user that has restarted from an older checkpoint publishes the next number once
        more.
        """
        if self.archive is not None and worker is self.archive.worker:
            self.archive.answered(message)
        rollback = worker.asks.rollbacks.get(message.request)
        if (
            rollback is not None
            and isinstance(message, Done)
            and not self._counts_on
            and not self.is_over
        ):
            self.next_version = min(self.next_version, rollback.to + 1)

    def crashed(self, worker: SimWorker) -> None:
        if self.archive is not None and worker is self.archive.worker:
            self.archive.crashed()

    def hook_called(self, handle: HandleShell) -> None:
        """It takes a while."""
        self._timeline.after(
            self._random.choice((0.0, 0.01, 0.5)), handle.worker, self._hook_returns, handle
        )

    @staticmethod
    def _hook_returns(handle: HandleShell) -> None:
        if handle.hooks:
            handle.hook_returns()

    def ended(self, handle: HandleShell, record: CallRecord) -> None:
        """A call is over: which way was that?"""
        world, error = self._world, record.error
        if isinstance(error, TensorHubError):
            world.took(f"call ended with {type(error).__name__}")
            if error.memory == "in_doubt":
                world.took("left in doubt")
        match record.what:
            case PublishCall() if error is None:
                assert record.version is not None
                self.published.add(record.version.content_id)
            case UnpublishCall() | CloseCall() if not record.online:
                world.took("left offline")
            case FillCall() if error is None and record.changed:
                pull = handle.pull
                if pull is not None and is_of_other_layout(handle.grid):
                    self._was_of_other_layout(pull)
                if record.what.staged:
                    world.took("staged update done")
                if pull is not None and pull.books.retries:
                    world.took("fill completed after a failure")
                if pull is not None and pull.patched:
                    world.took("completed from partial replicas")
            case FillCall() if record.what.staged and handle.member.state is HandleState.READY:
                world.took("staged update given up, nothing written")
            case _:
                pass

    def _was_of_other_layout(self, pull: Reading) -> None:
        lanes = [lane for lane in pull.all_lanes if lane.part is not None]
        self._world.took("bridged" if lanes else "followed")
        if any(lane.failure and not lane.is_cut for lane in lanes):
            self._world.took("bridge lost a source")
