"""A simulated cluster whose users are somebody else's tasks: the driver that shares their clock, and their workers.

Theory of operation. The simulation's queue of events is driven by a task of the caller's own loop, in that loop's virtual
time: when every other task waits, the next event happens; if it is due later, the loop's clock moves on, to a timer of the
caller's code if that comes first. So caller and simulation take turns, in one order, and a seed is a trace.

Not responsible for what a caller sees (`running`), nor for what the public classes stand on (`facades`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine
from itertools import count
from random import Random
from typing import Any

import anyio
import anyio.abc

from tensorhub.errors import StateError, TensorHubError
from tensorhub.memory.regions import Memory
from tensorhub.messages import (
    Announce,
    FromWorker,
    Pin,
    Unpin,
    Welcome,
)
from tensorhub.runtime.worker.coordinator_client import Answer, CoordinatorClient
from tensorhub.runtime.worker.pins import Arguments, Pins
from tensorhub.runtime.worker.version_watches import VersionWatches
from tensorhub.testing.drivers.tensor_handle import TensorHandle
from tensorhub.testing.drivers.timed import TimedCluster
from tensorhub.testing.drivers.timed_worker import TimedWorker
from tensorhub.testing.drivers.virtual import idle
from tensorhub.testing.sim.assertion import GuaranteeBroken
from tensorhub.testing.sim.faults import Fault
from tensorhub.testing.sim.handle import CallRecord, HandleShell
from tensorhub.testing.sim.host_copies import CopyRequest, SimHostCopies
from tensorhub.testing.sim.worker import SimHandle, SimWorker
from tensorhub.types import Location, Options
from tensorhub.worker.registration_session import Shard

USERS_OWN = frozenset(
    {Fault.HOOK, Fault.CANCEL, Fault.DIFFER, Fault.HASTE, Fault.OVERWRITE, Fault.LIE}
)  # what only users do
INSTANT_S = 1e-9
OVER = "the simulation is over"


class WorkerCrashed(Exception):
    """This simulated process has died: its code ends here, as if it had been killed. Leaves the `connect` block."""


class Tasks:
    """Tasks of one worker, which end with it."""

    def __init__(self, cluster: HostedCluster) -> None:
        self._cluster = cluster
        self._scopes: dict[anyio.CancelScope, None] = {}

    def start_soon(self, func: Callable[[*Arguments], Coroutine[Any, Any, None]], *args: *Arguments) -> None:
        self._cluster.tasks.start_soon(self._run, func, args)

    async def _run(self, function: Callable[..., Awaitable[None]], arguments: tuple[Any, ...]) -> None:
        with anyio.CancelScope() as scope:
            self._scopes[scope] = None
            try:
                await function(*arguments)
            finally:
                del self._scopes[scope]

    def cancel(self) -> None:
        for scope in list(self._scopes):
            scope.cancel()


class HostedWorker(TimedWorker):
    """A process whose user is one `connect` block. It has the runtime's own questions, pins and watches."""

    def __init__(self, cluster: HostedCluster, name: str, location: Location, options: Options, life: int) -> None:
        super().__init__(cluster.world, name, location, ("tcp",), timeline=cluster.timed.timeline)
        self.lives = life
        self.incarnation = f"{name}.{life}"
        self.host_bytes = options.host_memory_bytes
        self.copies = SimHostCopies(self, options.op_timeout_s)
        self.scope = anyio.CancelScope()  # of the code that runs in it
        self.is_preempted = False
        self.has_crashed = False
        self.welcome_came = anyio.Event()
        self.tasks = Tasks(cluster)
        self._idents = count(1)
        self.coordinator = CoordinatorClient(self, cluster.world.numbers, lambda: f"{self.incarnation}-{next(self._idents)}")
        self.version_watches = VersionWatches(self)
        self.kept_pins = Pins(self.coordinator, options.op_timeout_s)
        self.kept_pins.tasks = self.tasks
        self._hosted = cluster

    # -- its end

    @property
    def is_gone(self) -> bool:
        """Whether it ended by other than its own will."""
        return self.has_crashed or self.is_preempted

    def crash(self) -> None:
        self.has_crashed = True
        super().crash()
        self.scope.cancel()
        self.let_go()
        self._hosted.died(self.name)

    def leave(self) -> None:
        """It has said goodbye: what it holds goes with it."""
        self.cluster.driver.note(f"{self.name} leaves")
        super().crash()
        self.let_go()

    def let_go(self) -> None:
        """It is no more: nobody waits for an answer any longer."""
        self.tasks.cancel()
        asked: list[CallRecord | CopyRequest] = [*self.copies.wanted.values()]
        for handle in [handle for handle in self.handles if isinstance(handle, TensorHandle)]:
            handle.registration_error = (
                StateError(OVER) if self._hosted.is_over else WorkerCrashed(f"{self.name} has crashed")
            )
            asked += [handle.last_call] if handle.last_call is not None else []
            handle.on_answer()
        for tell in [tell for each in asked for tell in each.on_end]:
            tell()

    def disconnect(self) -> None:
        super().disconnect()
        self.coordinator.lost()

    # -- registering

    def new_handle(self, shard: Shard) -> SimHandle:
        return TensorHandle(self.cluster, self, shard, self._memory)

    _memory: Memory | None = None

    def take_memory(self, shard: Shard, memory: Memory) -> TensorHandle:
        """Register a caller's own memory."""
        self._memory = memory
        try:
            handle = self.take(shard)
        finally:
            self._memory = None
        assert isinstance(handle, TensorHandle)
        return handle

    def drop_memory(self, handle: SimHandle) -> None:
        """Its caller has not got it."""
        if handle in self.handles:
            handle.give_up()

    # -- saying and hearing

    @property
    def online(self) -> bool:
        return self.link is not None and self.link.welcomed

    def say(self, message: FromWorker) -> None:
        """What its user promises is noted as it is said."""
        self._hosted.sync()
        match message:
            case Pin() if self.link is not None:
                self.pins[message.pin] = (message.model, message.version)
            case Unpin() if self.link is not None:
                self.pins.pop(message.pin, None)
            case _:
                pass
        super().say(message)

    def say_pins(self) -> None:
        self.kept_pins.welcomed()

    def _end_pins(self) -> None:
        """Its user does."""

    def _announced(self, message: Announce) -> None:
        self.version_watches.announced(message)

    def _answered(self, message: Answer) -> None:
        super()._answered(message)
        self.coordinator.answered(message)

    def _welcomed(self, message: Welcome) -> None:
        super()._welcomed(message)
        self.welcome_came.set()

    def say_watches(self) -> None:
        super().say_watches()
        self.version_watches.welcomed()

    def forget_versions(self) -> None:
        self.version_watches.state_lost({handle.shard.model for handle in self.router.handles.values()})


class HostedCluster:
    """A cluster whose users are a caller's tasks: it stands for them, as far as they are users."""

    hasty_until = 0.0

    def __init__(
        self, seed: int, faults: Collection[Fault], options: Options | None, spared: Collection[str], seconds_max: float
    ) -> None:
        self.timed = timed = TimedCluster(seed, faults, options)
        self.world = timed.world
        timed.populate(self)
        timed.timeline.scheduled = self._scheduled
        self._sleeps_until = float("-inf")  # nobody is to be woken for what is earlier
        self._sooner = anyio.Event()
        self.spared = frozenset(spared)
        self.seconds_max = seconds_max
        self.is_over = False
        self.tasks: anyio.abc.TaskGroup
        self.restarts: Callable[[Random], bool] = lambda random: False
        self.preempts: Callable[[str, float], None] = lambda name, notice_s: None
        self.died: Callable[[str], None] = lambda name: None
        self._origin = anyio.current_time()
        self._lives: dict[str, int] = {}

    # -- time

    def loop_now(self) -> float:
        """The loop's time, as this cluster counts it."""
        return anyio.current_time() - self._origin

    def sync(self) -> None:
        """A caller does something, between two events."""
        timeline = self.timed.timeline
        self.world.now = timeline.now = max(timeline.now, self.loop_now())

    def _scheduled(self, when: float) -> None:
        if when < self._sleeps_until:
            self._sooner.set()

    async def drive(self) -> None:
        """Let events happen, in the callers' time, until cancelled."""
        try:
            while True:
                await idle()
                due = self.timed.timeline.next_time()
                wait_s = due - self.loop_now()
                if wait_s <= INSTANT_S:
                    self._check_time()
                    self._take_checked_event()
                    continue
                self._sleeps_until, self._sooner = due, anyio.Event()
                with anyio.move_on_after(wait_s):
                    await self._sooner.wait()
                self._sleeps_until = float("-inf")
        finally:
            self.end()

    def _take_checked_event(self) -> None:
        try:
            self.timed.take_event()
        except Exception as error:
            raise GuaranteeBroken(self.timed.report(error, f"seed {self.timed.seed}")) from error

    def _check_time(self) -> None:
        if self.world.now > self.seconds_max:
            raise StateError(
                f"the simulated code did not end within {self.seconds_max:g} virtual seconds: something waits for ever, "
                "or needs a larger seconds_max"
            )

    def end(self) -> None:
        """Nothing happens any more."""
        self.is_over = True
        for worker in self.world.workers.values():
            if isinstance(worker, HostedWorker) and worker.alive:
                worker.let_go()

    def check_over(self) -> None:
        """Raise StateError if nothing happens any more."""
        if self.is_over:
            raise StateError(OVER)

    def check_running(self, worker: SimWorker) -> None:
        """Raise unless that process can still be heard."""
        self.check_over()
        if not worker.alive:
            raise WorkerCrashed(f"{worker.name} has crashed")

    # -- workers

    def new_process(self, name: str, location: Location, options: Options) -> HostedWorker:
        """A new process, which is still to connect."""
        if name in self.processes():
            raise StateError(f"a worker {name!r} is connected already: in a simulation each needs a name of its own")
        life = self._lives.get(name, 0)
        older = [worker.lives for worker in self.world.workers.values() if worker.name == name]
        self._lives[name] = life = max([life, *older]) + 1
        worker = self.world.workers[f"{name}.{life}"] = HostedWorker(self, name, location, options, life)
        return worker

    def processes(self) -> dict[str, HostedWorker]:
        """Those that are alive, by name."""
        return {w.name: w for w in self.world.workers.values() if isinstance(w, HostedWorker) and w.alive}

    def expect_error(self, error: Exception) -> None:
        """A caller's own code has raised this: it may end a call."""
        world = self.world
        if not isinstance(error, (TensorHubError, *world.user_errors)):
            world.user_errors = (*world.user_errors, type(error))

    # -- what they are told: their handles tell them

    def hook_called(self, handle: HandleShell) -> None:
        pass

    def ended(self, handle: HandleShell, record: CallRecord) -> None:
        pass

    def rolled_back(self, to: int) -> None:
        pass

    # -- what strikes them

    def differ(self) -> None:
        """No: callers make their own mistakes."""

    def restart_one(self) -> bool:
        return self.restarts(self.timed.timeline.random)

    def preempt(self, worker: TimedWorker) -> bool:
        if not any(handle.shard.spot for handle in worker.handles):
            return False
        self.preempts(worker.name, self.timed.timeline.random.choice((0.2, 2.0)))
        return True

    def may_die(self, worker: TimedWorker) -> bool:
        return worker.name not in self.spared
