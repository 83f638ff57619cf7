"""A cluster in virtual time under faults: the real machines, on a network, a store and memory that
a seed drives.

Theory of operation. One queue of events by time; a step takes the earliest, lets it happen, and
checks what it touched. All chance comes from one `Random(seed)`, and nothing iterates over what has
no order, so a seed is a trace: `end_hash` tells one from another.

Responsible for putting the parts together: the world, its shells, the coordinator's process, the
faults (`injecting`), and the messages between processes (`control_network`, `data_network`). Not
responsible for the calls of users.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from random import Random

from tensorhub.testing.drivers.control_network import ControlNetwork
from tensorhub.testing.drivers.coordinator_process import CoordinatorProcess
from tensorhub.testing.drivers.data_network import DataNetwork
from tensorhub.testing.drivers.disk import DiskStore
from tensorhub.testing.drivers.injecting import Injector, StruckUsers, has_standby
from tensorhub.testing.drivers.timeline import Timeline
from tensorhub.testing.sim.assertion import GuaranteeBroken, demand
from tensorhub.testing.sim.faults import FORGETTING, Fault, FaultPlan
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.testing.sim.ports import HandlePort, SimWorkerPort
from tensorhub.testing.sim.world import World
from tensorhub.types import Options
from tensorhub.worker.calls import Fence, Say

FULL_CHECK_EVERY = 100
GAP = 0.1  # how often a shell does something else between two actions


class TimedCluster(World):
    """One seed's cluster, which is still to be populated."""

    process: CoordinatorProcess
    fence_grace_s = 1.0

    def __init__(
        self,
        seed: int,
        faults: Collection[Fault] | None,
        options: Options | None,
        events: int = 1000,
        timeline: Timeline | None = None,
        disk: Random | None = None,
    ) -> None:
        """`faults`: the kinds that may be drawn; None: all. `events`: after as many, less goes
        wrong. `options`: the coordinator's, and times of all connections; None: drawn.
        `timeline`: of that seed, if it is not a plain one. `disk`: of the store, if it is on one.
        """
        self.seed = seed
        self.allowed = None if faults is None else [kind for kind in Fault if kind in faults]
        self.timeline = timeline = timeline or Timeline(seed)
        self._touched: dict[HandlePort, None] = {}
        # handles with an action on its way; never iterated over
        self._doing: set[HandlePort] = set()
        # when the deadline of which machine will be looked at
        self._wakes: dict[object, float] = {}
        random = timeline.random
        chunks = random.choice((1, 2, 3, 5, 8))
        drawn = Options(
            lease_s=random.choice((2.0, 5.0, 10.0)),
            drain_grace_s=random.choice((0.0, 0.5, 5.0)),
            stall_timeout_s=random.choice((1.0, 4.0, 10.0)),
            connect_timeout_s=random.choice((1.0, 5.0)),
        )
        plan = FaultPlan(random, self.allowed, seed)
        super().__init__(
            options or drawn,
            chunks=chunks,
            manifest=make_manifest(chunks, "xxh3-64"),
            store=DiskStore(disk, shared=has_standby(plan)) if disk is not None else None,
        )
        self.forgets = lambda: not FORGETTING.isdisjoint(plan.weights)
        self.injector = Injector(self, timeline, plan, events)
        self.is_unharmed = lambda: not self.injector.happened
        self.data = DataNetwork(self, timeline, self.injector, seed)
        self.control = network = ControlNetwork(self, timeline, self.injector, self.touch)
        self.process = process = CoordinatorProcess(
            self, timeline, self.injector, network.coordinator_died
        )
        self.injector.coordinator = process
        process.tick_soon()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.seed} at {self.now:.3f} s, {self.timeline.events} "
            f"events, {self.injector.plan!r}>"
        )

    def populate(self, users: StruckUsers) -> None:
        """From now on these call, and are struck."""
        self.users = self.injector.users = users

    def take_event(self) -> None:
        """Let the next thing happen, and check what it touched."""
        event = self.timeline.next_event()
        assert event is not None, "users and heartbeats never end"
        self.now = self.timeline.now
        event.act(*event.args)
        touched, self._touched = self._touched, {}
        for handle in touched:
            self.guarantees.check_handle(handle)
        if self.timeline.events % FULL_CHECK_EVERY == 0:
            self.check()

    def run_until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Go on until that holds, looked at twice a second; False: it did not within so many
        seconds.
        """
        end = self.now + seconds
        while not holds():
            if self.now >= end:
                return False
            until = self.now + 0.5
            self.timeline.at(until, None, self._nothing)
            while self.now < until:
                self.take_event()
        return True

    def _nothing(self) -> None:
        """Time has passed."""

    # -- telling

    @property
    def end_hash(self) -> str:
        """Of all that has happened, in its order, and what memory holds."""
        handles = self.all_handles()
        return self.timeline.end_hash(
            *(f"{handle.name}{handle.member.state}{handle.cells}" for handle in handles)
        )

    def report(self, error: BaseException, command: str) -> str:
        """What a failing run says; `command` runs it again."""
        told = (
            f"{type(error).__name__}: {error}"
            if not isinstance(error, GuaranteeBroken)
            else str(error)
        )
        return "\n".join([*self.timeline.trace_lines(), repr(self), told, f"reproduce: {command}"])

    # -- checking

    def check(self) -> None:
        """Everything that holds between two events."""
        super().check()
        for handle in self.live_handles():
            self.guarantees.check_in_time(handle)

    def check_agreement(self) -> None:
        """At rest, the coordinator and workers agree."""
        super().check_agreement()
        for worker in self.workers.values():
            for name in worker.newest if worker.alive else ():
                model, told = self.coordinator.cluster.models.get(name), worker.newest[name]
                newest = model.newest_visible() if model is not None else None
                ok = told == (newest.info if newest is not None else None)
                demand(
                    ok,
                    "liveness: {} was told that {} is the newest, which is {}",
                    worker,
                    told,
                    newest,
                )

    # -- telling

    def note(self, line: str) -> None:
        self.timeline.note(line)

    def took(self, path: str) -> None:
        self.timeline.paths[path] += 1

    # -- what is to be checked

    def touch(self, handle: HandlePort) -> None:
        """Have it checked after this event."""
        self._touched[handle] = None

    # -- going on

    def handle_moved(self, handle: HandlePort) -> None:
        self._touched[handle] = None
        if handle.interpreter.has_more:
            self._do_soon(handle, 0.0)
        self._wake_in_time(handle)

    def _wake_in_time(self, handle: HandlePort) -> None:
        self.wake_at(
            handle.member.next_deadline(), handle, handle.worker, lambda: self._tick(handle)
        )

    def _tick(self, handle: HandlePort) -> None:
        self._touched[handle] = None
        handle.apply(handle.member.tick(handle.worker.now))

    def wake_at(
        self, due: float | None, machine: object, worker: SimWorkerPort, tick: Callable[[], None]
    ) -> None:
        if due is not None and self._wakes.get(machine) != due:
            self._wakes[machine] = due
            when = max(worker.when(due), self.timeline.now)
            self.timeline.at(when, worker, self._wake, machine, due, tick)

    def _wake(self, machine: object, due: float, tick: Callable[[], None]) -> None:
        if self._wakes.get(machine) == due:
            del self._wakes[machine]
            tick()

    def _do_soon(self, handle: HandlePort, seconds: float) -> None:
        if handle not in self._doing:
            self._doing.add(handle)
            self.timeline.after(seconds, handle.worker, self._do, handle)

    def _do(self, handle: HandlePort) -> None:
        """Its shell carries out its actions, up to one that takes time."""
        self._doing.discard(handle)
        self._touched[handle] = None
        todo = handle.todo
        while handle.interpreter.has_more:
            action, left = todo[0] if todo else None, len(todo)
            handle.do_next()
            self._wake_in_time(handle)
            if todo and todo[0] is action and len(todo) >= left:
                return  # it takes time, and whoever ends it comes back here
            if todo and not isinstance(action, Say) and self.timeline.random.random() < GAP:
                self._do_soon(handle, self.timeline.wake())
                return

    def fence_begun(self, handle: HandlePort, fence: Fence) -> None:
        worker, now = handle.worker, self.timeline.now
        ends = [worker.now + self.fence_grace_s, *([] if fence.until is None else [fence.until])]
        for when in map(worker.when, ends):
            self.timeline.at(max(when, now), worker, self.access_ended, handle)
        if not worker.owner.is_quiet(handle.id):
            self.injector.fence_waits(handle)

    def clock_changed(self, worker: SimWorkerPort) -> None:
        there = next(each for each in self.workers.values() if each is worker)
        for handle in there.handles:
            self._wakes.pop(handle, None)
            self._wake_in_time(handle)
            call, fence = handle.last_call, handle.todo[0] if handle.todo else None
            if call is not None and not call.done:
                call.until = max(call.began, worker.when(call.deadline))
            if handle.fencing_since is not None and isinstance(fence, Fence):
                self.fence_begun(handle, fence)
        copies = there.copies
        self._wakes.pop(copies, None)
        self.wake_at(copies.machine.next_deadline(), copies, worker, copies.tick)

    def access_ended(self, handle: HandlePort) -> None:
        if handle.fencing_since is not None:
            self._do_soon(handle, 0.0)
