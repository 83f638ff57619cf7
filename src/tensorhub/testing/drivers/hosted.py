"""A simulated cluster with a caller's tasks as users: the driver that shares their clock, and the
state of each user.

Theory of operation. The simulation's queue of events is driven by a task of the caller's own loop,
in that loop's virtual time: when every other task waits, the next event happens; if it is due
later, the loop's clock moves on, to a timer of the caller's code if that comes first. So caller and
simulation take turns, in one order, and a seed is a trace.

Not responsible for the caller's view (`running`), nor for the base of the public classes
(`facades`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from itertools import count
from random import Random
from typing import Any, assert_never

import anyio
import anyio.abc

from tensorhub.errors import StateError, TensorHubError
from tensorhub.memory.regions import Memory
from tensorhub.messages import Announce, FromWorker
from tensorhub.runtime.worker.coordinator_client import Answer, CoordinatorClient
from tensorhub.runtime.worker.pins import Arguments, Pins
from tensorhub.runtime.worker.version_watches import VersionWatches
from tensorhub.testing.drivers.injecting import StruckUsers
from tensorhub.testing.drivers.tensor_handle import TensorHandle
from tensorhub.testing.drivers.timed import TimedCluster
from tensorhub.testing.drivers.virtual import idle
from tensorhub.testing.sim.assertion import GuaranteeBroken
from tensorhub.testing.sim.faults import Fault
from tensorhub.testing.sim.handle import CallRecord
from tensorhub.testing.sim.host_copies import CopyRequest
from tensorhub.testing.sim.sites import MODEL
from tensorhub.testing.sim.worker import SimWorker
from tensorhub.types import Location, Options
from tensorhub.worker.registration_session import Shard
from tensorhub.worker.router import Anew

USERS_OWN = frozenset(
    {Fault.HOOK, Fault.CANCEL, Fault.DIFFER, Fault.HASTE, Fault.OVERWRITE, Fault.LIE}
)  # what only users do
INSTANT_S = 1e-9
OVER = "the simulation is over"


class WorkerCrashed(Exception):
    """This simulated process has died: its code ends here, as if it had been killed. Leaves the
    `connect` block.
    """


class Tasks:
    """Tasks of one worker, which end with it."""

    def __init__(self, cluster: HostedCluster) -> None:
        self._cluster = cluster
        self._scopes: dict[anyio.CancelScope, None] = {}

    def start_soon(
        self, func: Callable[[*Arguments], Coroutine[Any, Any, None]], *args: *Arguments
    ) -> None:
        self._cluster.tasks.start_soon(self._run, func, args)

    async def _run(
        self, function: Callable[..., Awaitable[None]], arguments: tuple[Any, ...]
    ) -> None:
        with anyio.CancelScope() as scope:
            self._scopes[scope] = None
            try:
                await function(*arguments)
            finally:
                del self._scopes[scope]

    def cancel(self) -> None:
        for scope in list(self._scopes):
            scope.cancel()


class HostedUser:
    """One `connect` block, and the worker that it uses, with the runtime's own questions, pins and
    watches.
    """

    def __init__(self, cluster: HostedCluster, worker: SimWorker, op_timeout_s: float) -> None:
        self.worker = worker
        self.scope = anyio.CancelScope()  # of the code that runs in it
        self.is_preempted = False
        self.has_crashed = False
        self.welcome_came = anyio.Event()
        self.tasks = Tasks(cluster)
        idents = count(1)
        self.coordinator = CoordinatorClient(
            self, cluster.world.numbers, lambda: f"{worker.incarnation}-{next(idents)}"
        )
        self.version_watches = VersionWatches(self)
        self.pins = Pins(self.coordinator, op_timeout_s)
        self.pins.tasks = self.tasks
        self.fault: TensorHubError | None = None  # the simulated network gives no reasons
        self._cluster = cluster

    @property
    def is_gone(self) -> bool:
        """Whether its process ended by other than its own will."""
        return self.has_crashed or self.is_preempted

    # -- what it says itself

    @property
    def online(self) -> bool:
        return self.worker.is_online

    def say(self, message: FromWorker) -> None:
        self._cluster.sync()
        self.worker.say(message)

    # -- its end

    def leave(self) -> None:
        """It has said goodbye: what its process holds goes with it."""
        self._cluster.world.note(f"{self.worker.name} leaves")
        self.worker.end()
        self.let_go()

    def let_go(self) -> None:
        """Its process is no more: no task waits for an answer any longer."""
        worker = self.worker
        self.tasks.cancel()
        asked: list[CallRecord | CopyRequest] = [*worker.copies.wanted.values()]
        for handle in [handle for handle in worker.handles if isinstance(handle, TensorHandle)]:
            handle.registration_error = (
                StateError(OVER)
                if self._cluster.is_over
                else WorkerCrashed(f"{worker.name} has crashed")
            )
            asked += [handle.last_call] if handle.last_call is not None else []
            handle.on_answer()
        for tell in [tell for each in asked for tell in each.on_end]:
            tell()

    # -- registering

    def register(self, shard: Shard, memory: Memory) -> TensorHandle:
        """A caller's own memory."""
        handle = TensorHandle(self._cluster.world, self.worker, shard, memory)
        self.worker.add(handle)
        return handle


class HostedCluster(StruckUsers):
    """A cluster with a caller's tasks as users; faults strike the tasks through it."""

    def __init__(
        self,
        seed: int,
        faults: Collection[Fault],
        options: Options | None,
        spared: Collection[str],
        seconds_max: float,
    ) -> None:
        self.world = world = TimedCluster(seed, faults, options)
        world.populate(self)
        world.timeline.scheduled = self._scheduled
        self._sleeps_until = float("-inf")  # no task is to be woken for an earlier event
        self._sooner = anyio.Event()
        self.spared = frozenset(spared)
        self.seconds_max = seconds_max
        self.is_over = False
        self.tasks: anyio.abc.TaskGroup
        self.restarts: Callable[[Random], bool] = lambda random: False
        self.preempts: Callable[[str, float], None] = lambda name, notice_s: None
        self.died: Callable[[str], None] = lambda name: None
        self._origin = anyio.current_time()
        self._users: dict[SimWorker, HostedUser] = {}

    # -- time

    def loop_now(self) -> float:
        """The loop's time, as this cluster counts it."""
        return anyio.current_time() - self._origin

    def sync(self) -> None:
        """A caller does something, between two events."""
        timeline = self.world.timeline
        self.world.now = timeline.now = max(timeline.now, self.loop_now())

    def _scheduled(self, when: float) -> None:
        if when < self._sleeps_until:
            self._sooner.set()

    async def drive(self) -> None:
        """Let events happen, in the callers' time, until cancelled."""
        try:
            while True:
                await idle()
                due = self.world.timeline.next_time()
                wait_s = due - self.loop_now()
                if wait_s <= INSTANT_S:
                    self._take_event()
                    continue
                self._sleeps_until, self._sooner = due, anyio.Event()
                with anyio.move_on_after(wait_s):
                    await self._sooner.wait()
                self._sleeps_until = float("-inf")
        finally:
            self.end()

    def _take_event(self) -> None:
        if self.world.now > self.seconds_max:
            raise StateError(
                f"the simulated code did not end within {self.seconds_max:g} virtual seconds: "
                f"something waits for ever, "
                "or needs a larger seconds_max"
            )
        try:
            self.world.take_event()
        except Exception as error:
            raise GuaranteeBroken(self.world.report(error, f"seed {self.world.seed}")) from error

    def end(self) -> None:
        """Nothing happens any more."""
        self.is_over = True
        for user in self.users().values():
            user.let_go()

    def check_over(self) -> None:
        """Raise StateError if nothing happens any more."""
        if self.is_over:
            raise StateError(OVER)

    def check_running(self, worker: SimWorker) -> None:
        """Raise unless that process can still be heard."""
        self.check_over()
        if not worker.alive:
            raise WorkerCrashed(f"{worker.name} has crashed")

    # -- users, each with a process

    def new_user(self, name: str, location: Location, options: Options) -> HostedUser:
        """That of a new process, which is still to connect."""
        if name in self.users():
            raise StateError(
                f"a worker {name!r} is connected already: in a simulation "
                "each needs a name of its own"
            )
        world, timeout_s = self.world, options.op_timeout_s
        life = 1 + max(
            [worker.lives for worker in world.workers.values() if worker.name == name], default=0
        )
        world.host_bytes = options.host_memory_bytes
        new_handle = partial(TensorHandle, memory=None)
        worker = SimWorker(
            world, name, location, life=life, new_handle=new_handle, op_timeout_s=timeout_s
        )
        world.workers[worker.incarnation] = worker
        worker.newest[MODEL] = None
        user = self._users[worker] = HostedUser(self, worker, timeout_s)
        return user

    def users(self) -> dict[str, HostedUser]:
        """The users with a live process, by name."""
        return {worker.name: user for worker, user in self._users.items() if worker.alive}

    def expect_error(self, error: Exception) -> None:
        """A caller's own code has raised this: it may end a call."""
        world = self.world
        if not isinstance(error, (TensorHubError, *world.user_errors)):
            world.user_errors = (*world.user_errors, type(error))

    # -- what they are told; their handles tell them of calls

    def welcomed(self, worker: SimWorker) -> None:
        self._users[worker].welcome_came.set()

    def anew(self, worker: SimWorker, step: Anew) -> None:
        user = self._users[worker]
        match step:
            case Anew.FORGET_VERSIONS:
                user.version_watches.state_lost(
                    {handle.shard.model for handle in worker.router.handles.values()}
                )
            case Anew.WATCH:
                user.version_watches.welcomed()
            case Anew.PIN:
                user.pins.welcomed()
            case _:
                assert_never(step)

    def announced(self, worker: SimWorker, message: Announce) -> None:
        self._users[worker].version_watches.announced(message)

    def answered(self, worker: SimWorker, message: Answer) -> None:
        self._users[worker].coordinator.answered(message)

    def disconnected(self, worker: SimWorker) -> None:
        self._users[worker].coordinator.lost()

    def crashed(self, worker: SimWorker) -> None:
        user = self._users[worker]
        user.has_crashed = True
        user.scope.cancel()
        user.let_go()
        self.died(worker.name)

    # -- what strikes them

    def restart_one(self) -> bool:
        return self.restarts(self.world.timeline.random)

    def preempt(self, worker: SimWorker) -> bool:
        if not any(handle.shard.spot for handle in worker.handles):
            return False
        self.preempts(worker.name, self.world.timeline.random.choice((0.2, 2.0)))
        return True

    def may_die(self, worker: SimWorker) -> bool:
        return worker.name not in self.spared
