"""A cluster in virtual time under faults: the real machines, on a network, a store and memory that a seed drives.

Theory of operation. One queue of events by time; a step takes the earliest, lets it happen, and checks what it touched.
All chance comes from one `Random(seed)`, and nothing iterates over what has no order, so a seed is a trace: `end_hash`
tells one from another. `run` has two phases: users call and faults happen, until there were enough events; then all faults
end, every call must, and everybody must be able to publish and to fetch (G7).

Responsible for putting the parts together. What users do is in `users`, what goes wrong in `injecting`, what is on its way
between processes in `control_network` and `data_network`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter, deque
from collections.abc import Callable, Collection
from random import Random
from typing import TYPE_CHECKING, Any

from tensorhub.coordinator import Action, Event, Persist, Persisted, PersistFailed, Tick
from tensorhub.messages import FromCoordinator, FromWorker, Grant, Heartbeat, HeartbeatAck
from tensorhub.testing.drivers.clock import Clock, Party, Process
from tensorhub.testing.drivers.control_network import ControlNetwork, TimedWorker
from tensorhub.testing.drivers.data_network import DataNetwork, TimedLane
from tensorhub.testing.drivers.healing import Healing
from tensorhub.testing.drivers.injecting import Injector
from tensorhub.testing.drivers.users import Users
from tensorhub.testing.sim.assertion import GuaranteeBroken, demand
from tensorhub.testing.sim.faults import KINDS_LEAST, Fault, FaultPlan
from tensorhub.testing.sim.handle import CallRecord, HandleShell
from tensorhub.testing.sim.host_copies import SimHostCopies
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.testing.sim.network import Link, Partitions, TimedLink
from tensorhub.testing.sim.ports import HandlePort
from tensorhub.testing.sim.pulling import LaneEnd, Reading, SimLane
from tensorhub.testing.sim.recovery_paths import path_of
from tensorhub.testing.sim.rendering import show
from tensorhub.testing.sim.worker import SimWorker
from tensorhub.testing.sim.world import World
from tensorhub.types import Location, Options
from tensorhub.worker.calls import Fence, Say

if TYPE_CHECKING:
    from tensorhub.testing.running import RunningCluster

FULL_CHECK_EVERY = 100
TRACE_LINES = 60
EVENTS_LEAST = 1000  # of a seed that is to have all of these
VERSIONS_LEAST = 3  # that are published in each seed
GIVEN_UP = 100  # times as many events as were asked for: nothing more comes of this seed
ASKED_BEFORE_S = 3.0  # things still go wrong, while fills run that have to end well
GAP = 0.1  # how often a shell does something else between two actions


class SimulatedCluster(World):
    """One seed's cluster. `run` raises GuaranteeBroken, which ends with a line that reproduces it."""

    fence_grace_s = 1.0

    def __init__(
        self, seed: int, *, faults: Collection[Fault] | None = None, events: int = 1000, options: Options | None = None
    ) -> None:
        """`faults`: the kinds that may be drawn; None: all. `events`: how many are delivered at least under faults.
        `options`: the coordinator's, and times of everybody's connections; None: drawn.
        """
        self.seed = seed
        self.options_given = options
        self.random = random = Random(seed)
        self.allowed = None if faults is None else [kind for kind in Fault if kind in faults]
        self.events_least = events
        self.clock = Clock()
        self.process = Process("coordinator")
        self.partitions = Partitions()
        self.events = 0
        self.paths: Counter[str] = Counter()
        self._trace: deque[tuple[float, str, str, object]] = deque(maxlen=TRACE_LINES)
        self._hash = hashlib.blake2b(digest_size=12)
        self._touched: dict[HandlePort, None] = {}
        self._doing: set[HandlePort] = set()  # whose next action is on its way; never iterated over
        self._wakes: dict[HandlePort, float] = {}  # when its deadline will be looked at
        self._copies_wake: dict[SimHostCopies, float] = {}  # the same, of a worker's host copies
        self._tick_at: float | None = None
        self._dies = False  # the coordinator, in the midst of what it has to do
        self._stored_at = 0.0  # when the store is done with what it has
        chunks = random.choice((1, 2, 3, 5, 8))
        drawn = Options(
            lease_s=random.choice((2.0, 5.0, 10.0)),
            drain_grace_s=random.choice((0.0, 0.5, 5.0)),
            stall_timeout_s=random.choice((1.0, 4.0, 10.0)),
            connect_timeout_s=random.choice((1.0, 5.0)),
        )
        super().__init__(options or drawn, chunks=chunks, manifest=make_manifest(chunks, "xxh3-64"))
        self.plan = FaultPlan(random, self.allowed)
        self.data_network = DataNetwork(self)
        self.control_network = ControlNetwork(self)
        self.injector = Injector(self, self.plan)
        self.users = Users(self)
        self._tick_soon()

    def __repr__(self) -> str:
        return f"<SimulatedCluster {self.seed} at {self.now:.3f} s, {self.events} events, {self.plan!r}>"

    # -- running

    def run(self) -> None:
        """Both phases. Raises GuaranteeBroken, or whatever a machine raises, with the reproduction line at its end."""
        try:
            self.begin()
            while not self._is_enough():
                self.take_event()
            healing = Healing(self)
            healing.ask()
            self.run_until(lambda: False, ASKED_BEFORE_S)
            self.end_faults()
            healing.run()
        except Exception as error:
            raise GuaranteeBroken(self.report(error)) from error

    def running(
        self, *, spared: Collection[str] = (), seconds_max: float = 3600.0
    ) -> contextlib.AbstractAsyncContextManager[RunningCluster]:
        """Run as an async context manager, under somebody's own code instead of simulated users: see `RunningCluster`.

        Faults of this cluster's kinds happen, as the seed draws them (those that only a user can commit are left out).
        `spared`: names of workers that never crash, nor are preempted, by chance. `seconds_max`: virtual seconds after which
        code that does not end is given up (StateError).

        Leaving the block ends all faults, closes what was started, and checks everything once more. Raises GuaranteeBroken,
        StateError (the loop's time is not virtual, a kind of fault that only a user can commit).
        """
        from tensorhub.testing.running import running

        return running(self.seed, self.allowed, self.options_given, spared, seconds_max)

    def begin(self) -> None:
        """Users call and things go wrong from now on, as events are taken."""
        self.users.begin()
        self.injector.begin()

    def end_faults(self) -> None:
        """Nothing goes wrong any more, and nobody calls by himself."""
        self.injector.end()
        self.users.end()

    def converge(self) -> None:
        """Demand that every call ends, and that everybody can publish and fetch (G7)."""
        Healing(self).run()

    def _is_enough(self) -> bool:
        """Whether there was enough of everything that a seed stands for. (Of some kinds of faults, it may be that no more
        can happen, or nothing be published; and fewer events need not be enough.)
        """
        if self.events < self.events_least:
            return False
        full = len(self.users.published) >= VERSIONS_LEAST and len(self.injector.happened) >= KINDS_LEAST
        wants_all = self.allowed is None and self.events_least >= EVENTS_LEAST
        return full or self.events >= (GIVEN_UP if wants_all else 4) * self.events_least

    def take_event(self) -> None:
        """Let the next thing happen, and check what it touched."""
        event = self.clock.next_event()
        assert event is not None, "users and heartbeats never end"
        self.now = self.clock.now
        self.events += 1
        act, party = event.act, event.party
        self._hash.update(f"{self.now!r}{act.__name__}{party.name if party is not None else ''}".encode())
        act(*event.args)
        if self._touched:
            for handle in self._touched:
                self.guarantees.check_handle(handle)
            self._touched.clear()
        if self.events % FULL_CHECK_EVERY == 0:
            self.check()

    def run_until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Go on until that holds, looked at twice a second; False: it did not within so many seconds."""
        end = self.now + seconds
        while not holds():
            if self.now >= end:
                return False
            until = self.now + 0.5
            self.at(until, None, self._nothing)
            while self.now < until:
                self.take_event()
        return True

    def _nothing(self) -> None:
        """Time has passed."""

    # -- time

    def at(self, when: float, party: Party | None, act: Callable[..., None], *args: Any) -> None:
        """See `Clock.at`."""
        self.clock.at(when, party, act, *args)

    def after(self, seconds: float, party: Party | None, act: Callable[..., None], *args: Any) -> None:
        """The same, from now on."""
        self.clock.at(self.now + seconds, party, act, *args)

    # -- telling

    def note(self, line: str) -> None:
        self._hash.update(line.encode())
        self._trace.append((self.now, line, "", None))

    def trace(self, name: str, arrow: str, message: FromWorker | FromCoordinator) -> None:
        """A message arrives."""
        self._hash.update(type(message).__name__.encode())
        if isinstance(message, Heartbeat | HeartbeatAck):
            return
        self._trace.append((self.now, name, arrow, message))
        path = path_of(message)
        if path:
            self.paths[path] += 1

    def took(self, path: str) -> None:
        """A way of recovery was taken."""
        self.paths[path] += 1

    @property
    def end_hash(self) -> str:
        """Of all that has happened, in its order, and what memory holds."""
        end = self._hash.copy()
        for handle in self.all_handles():
            end.update(f"{handle.name}{handle.member.state}{handle.cells}".encode())
        return end.hexdigest()

    @property
    def command(self) -> str:
        """What runs this seed again."""
        faults = "" if self.allowed is None else f" --faults {','.join(self.allowed)}"
        return f"tensorhub simulate --seed {self.seed}{faults} --events {self.events_least}"

    def trace_lines(self) -> list[str]:
        """The last things that happened."""
        shown = ((when, name + (f" {arrow} {show(message)}" if arrow else "")) for when, name, arrow, message in self._trace)
        return [f"{when:9.4f}  {what}" for when, what in shown]

    def report(self, error: BaseException) -> str:
        """What a failing run says."""
        lines = self.trace_lines()
        told = f"{type(error).__name__}: {error}" if not isinstance(error, GuaranteeBroken) else str(error)
        return "\n".join([*lines, repr(self), told, f"reproduce: {self.command}"])

    # -- the coordinator's process

    def step(self, event: Event) -> None:
        if not self.process.alive:
            return  # it has died in the midst of this event
        super().step(event)
        self.coordinator.check_touched()
        if self._dies:
            self._dies = False
            self.injector.was_cut_short()
        else:
            self._tick_soon()

    def _tick_soon(self) -> None:
        due = self.coordinator.next_deadline()
        if due is not None and (self._tick_at is None or due < self._tick_at):
            self._tick_at = due
            self.at(max(due, self.now), self.process, self._tick, self._tick_at)

    def _tick(self, due: float) -> None:
        if self._tick_at != due:
            return
        self._tick_at = None
        wanted = self.coordinator.next_deadline()
        if wanted is not None and wanted <= self.now:
            self.step(Tick())
        else:
            self._tick_soon()

    def crash_coordinator(self, *, kept: bool, down_s: float, lost: bool = False) -> None:
        """It dies, and is back after so long; `kept`: what was being written is durable; `lost`: nothing ever was."""
        self.note(f"the coordinator dies; kept={kept}")
        self.process.alive = False
        if kept:
            for persist in self.unstored.values():
                self.keep(persist.entry)
        self.unstored.clear()
        if lost:
            self.note("its state is lost")
            self.lose_state()
        self.control_network.coordinator_died()
        self.after(down_s, None, self._restart_coordinator)

    def gets_out(self, actions: list[Action]) -> list[Action]:
        if not self.process.alive:
            return []
        heard = self.injector.cuts_short(actions)
        self._dies = len(heard) < len(actions)
        return heard

    def rolled_back(self, to: int) -> None:
        self.users.rolled_back(to)

    def _restart_coordinator(self) -> None:
        self.note("the coordinator is back")
        self.process = Process("coordinator")
        self.coordinator = self._new_coordinator()
        self._tick_at, self._stored_at = None, self.now
        self._tick_soon()

    def to_be_stored(self, persist: Persist) -> None:
        self._stored_at = max(self._stored_at, self.now) + self.injector.store_s()
        self.at(self._stored_at, self.process, self._stored, persist)

    def hurry_store(self) -> None:
        """It is fast again: what waits for it is written now."""
        self._stored_at = self.now
        for persist in list(self.unstored.values()):
            self.to_be_stored(persist)

    def _stored(self, persist: Persist) -> None:
        if self.unstored.pop(persist.record, None) is None:
            return  # it was written sooner
        if self.injector.store_fails():
            self.note(f"the store fails: {show(persist.entry)}")
            self.step(PersistFailed(persist.record, "disk full"))
        else:
            self.note(f"stored {show(persist.entry)}")
            self.keep(persist.entry)
            self.step(Persisted(persist.record))

    def check(self) -> None:
        super().check()
        for handle in self.live_handles():
            self.guarantees.check_in_time(handle)

    def check_agreement(self) -> None:
        super().check_agreement()
        for worker in self.workers.values():
            assert isinstance(worker, TimedWorker)
            for name in worker.newest if worker.alive else ():
                model, told = self.coordinator.cluster.models.get(name), worker.newest[name]
                newest = model.newest_visible() if model is not None else None
                ok = told == (newest.info if newest is not None else None)
                demand(ok, f"liveness: {worker} was told that {told} is the newest, which is {newest}")

    # -- connections

    def new_worker(self, name: str, location: Location, transports: tuple[str, ...] = ("tcp",)) -> TimedWorker:
        return TimedWorker(self, name, location, transports)

    def new_link(self, worker: SimWorker) -> Link:
        return self.control_network.open(worker)

    def said_up(self, worker: SimWorker, link: Link) -> None:
        assert isinstance(link, TimedLink)
        self.control_network.said_up(worker, link)

    def said_down(self, worker: SimWorker, link: Link) -> None:
        assert isinstance(link, TimedLink)
        self.control_network.said_down(worker, link)

    def link_lost(self, worker: SimWorker, link: Link) -> None:
        assert isinstance(link, TimedLink)
        self.injector.link_lost(link)
        self.control_network.hung_up(worker, link)

    # -- handles

    def touch(self, handle: HandlePort) -> None:
        """Have it checked after this event."""
        self._touched[handle] = None

    def handle_moved(self, handle: HandlePort) -> None:
        self._touched[handle] = None
        if handle.todo:
            self._do_soon(handle, 0.0)
        due = handle.member.next_deadline()
        if due is not None and self._wakes.get(handle) != due:
            self._wakes[handle] = due
            self.at(max(due, self.now), handle.worker, self._wake, handle, due)

    def copies_moved(self, copies: SimHostCopies) -> None:
        due = copies.machine.next_deadline()
        if due is not None and self._copies_wake.get(copies) != due:
            self._copies_wake[copies] = due
            self.at(max(due, self.now), copies.worker, self._wake_copies, copies, due)

    def _wake_copies(self, copies: SimHostCopies, due: float) -> None:
        if self._copies_wake.get(copies) == due:
            del self._copies_wake[copies]
            copies.tick()

    def _do_soon(self, handle: HandlePort, seconds: float) -> None:
        if handle not in self._doing:
            self._doing.add(handle)
            self.after(seconds, handle.worker, self._do, handle)

    def _do(self, handle: HandlePort) -> None:
        """Its shell carries out what it can, as far as it comes."""
        self._doing.discard(handle)
        self._touched[handle] = None
        while handle.todo:
            action, left = handle.todo[0], len(handle.todo)
            handle.do_next()
            if handle.todo and handle.todo[0] is action and len(handle.todo) >= left:
                return  # it takes time, and whoever ends it comes back here
            if handle.todo and not isinstance(action, Say) and self.random.random() < GAP:
                self._do_soon(handle, self.data_network.wake())
                return

    def _wake(self, handle: HandlePort, due: float) -> None:
        if self._wakes.get(handle) != due:
            return
        del self._wakes[handle]
        self._touched[handle] = None
        handle.apply(handle.member.tick(self.now))

    def hook_called(self, handle: HandleShell) -> None:
        self.after(self.random.choice((0.0, 0.01, 0.5)), handle.worker, self._hook_returns, handle)

    def _hook_returns(self, handle: HandleShell) -> None:
        if handle.hooks:
            handle.hook_returns()

    def fence_begun(self, handle: HandleShell, fence: Fence) -> None:
        self._chunks_gone(handle)
        self.after(self.fence_grace_s, handle.worker, self._fence_again, handle)
        if fence.until is not None:
            self.at(max(fence.until, self.now), handle.worker, self._fence_again, handle)

    def _fence_again(self, handle: HandleShell) -> None:
        if handle.fencing_since is not None:
            self._do_soon(handle, 0.0)

    def access_ended(self, handle: HandlePort) -> None:
        if handle.fencing_since is not None:
            self._do_soon(handle, 0.0)

    def call_ended(self, handle: HandleShell, record: CallRecord) -> None:
        super().call_ended(handle, record)
        self.users.ended(handle, record)

    # -- lanes

    def new_lane(self, reading: Reading, grant: Grant) -> SimLane:
        lane = TimedLane(reading, grant)
        lease = self.coordinator.cluster.leases.get(grant.lease)
        reading.patched = reading.patched or (lease is not None and lease.partial)
        self.injector.spoils(lane)
        return lane

    def lane_made(self, lane: SimLane) -> None:
        self.after(self.data_network.latency(), lane.reader.worker, self.data_network.connect, lane)

    def lanes_wanted(self, reading: Reading) -> None:
        for lane in reading.lanes.values():
            assert isinstance(lane, TimedLane)
            self.data_network.wake_reader(lane)

    def chunks_offered(self, handle: LaneEnd) -> None:
        self._chunks_gone(handle)

    def _chunks_gone(self, handle: LaneEnd) -> None:
        """What its lanes wait for has come, or never will."""
        for lane in handle.serving:
            assert isinstance(lane, TimedLane)
            self.data_network.wake_owner(lane)

    def lane_closed(self, lane: SimLane) -> None:
        assert isinstance(lane, TimedLane)
        self.data_network.reader_gone(lane)

    def lane_cut(self, lane: SimLane) -> None:
        assert isinstance(lane, TimedLane)
        self.data_network.cut(lane)

    def lane_shut(self, lane: SimLane) -> None:
        assert isinstance(lane, TimedLane)
        self.data_network.shut(lane)

    def reader_died(self, lane: SimLane) -> None:
        lane.end()

    def source_died(self, lane: SimLane) -> None:
        assert isinstance(lane, TimedLane)
        lane.access = None
        lane.is_stopped = True
        self.after(self.data_network.latency(), lane.reader.worker, self.data_network.lost, lane)
