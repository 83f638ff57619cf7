"""A simulated cluster under a caller's own orchestrator: connect, start processes, break things,
heal.

`RunningCluster` is what a caller sees. See docs/operating.md.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import TracebackType
from typing import Any, Literal, TypeVar

import anyio
import anyio.abc

from tensorhub.api.hub import Hub
from tensorhub.api.opening import Opening
from tensorhub.errors import CoordinatorUnavailable, StateError
from tensorhub.protocol.certificates import TLS
from tensorhub.testing.drivers.facades import WorkerFacade
from tensorhub.testing.drivers.hosted import (
    OVER,
    USERS_OWN,
    HostedCluster,
    HostedUser,
    WorkerCrashed,
)
from tensorhub.testing.drivers.timeline import Party
from tensorhub.testing.drivers.virtual import check_virtual, ordered_tasks
from tensorhub.testing.sim.assertion import GuaranteeBroken
from tensorhub.testing.sim.faults import Fault
from tensorhub.testing.sim.network import COORDINATOR
from tensorhub.testing.sim.worker import SimWorker
from tensorhub.types import Location, Options, check_flag, check_name

T = TypeVar("T")


@dataclass(eq=False)
class _Process:
    """Code that was started under a worker's name."""

    name: str
    main: Callable[..., Awaitable[object]]
    arguments: tuple[Any, ...]
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)
    replaced: anyio.Event = field(default_factory=anyio.Event)  # it was started again
    has_died: bool = False
    is_restarting: bool = False
    is_stopped: bool = False  # so it is not started again when it has ended


class _Opening(Opening[Hub]):
    """Its block is cancelled where the process crashes."""

    def __init__(
        self, opens: Callable[[], Coroutine[Any, Any, Hub]], block: AbstractAsyncContextManager[Hub]
    ) -> None:
        super().__init__(lambda _: opens(), "connect")
        self._block = block

    async def __aenter__(self) -> Hub:
        return await self._block.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._block.__aexit__(kind, error, trace)


class RunningCluster:
    """A simulated cluster, and its faults by order. Made by `SimulatedCluster.running`.

    Parties are called by their worker's name; the coordinator by "coordinator". Seconds are virtual
    ones, which pass when every task waits. A fault by order happens at once, and raises StateError
    for an unknown name.
    """

    def __init__(self, simulation: HostedCluster, tasks: anyio.abc.TaskGroup) -> None:
        self._simulation = simulation
        self._world = simulation.world
        self._tasks = tasks
        self._processes: dict[str, _Process] = {}
        self._names = 0
        simulation.restarts = self._restart_one
        simulation.preempts = self.preempt
        simulation.died = self._died

    def __repr__(self) -> str:
        names = ", ".join(self._simulation.users())
        return f"<RunningCluster {self.seed} at {self.now:.3f} s: {names}>"

    @property
    def seed(self) -> int:
        """What decides everything here."""
        return self._world.seed

    @property
    def now(self) -> float:
        """Virtual seconds since the block began."""
        return self._simulation.loop_now()

    @property
    def address(self) -> str:
        """What stands for the coordinator's address, for code that hands it on to `connect`."""
        return "tcp://simulated:0"

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers that are connected, or try to be."""
        return tuple(self._simulation.users())

    @property
    def faults(self) -> dict[str, int]:
        """How often each kind of fault has happened by chance."""
        return dict(self._world.injector.happened)

    @property
    def end_hash(self) -> str:
        """Of all that has happened so far, in its order, and of what memory holds: equal for equal
        runs.
        """
        return self._world.end_hash

    def trace(self) -> str:
        """The last things that happened, one a line."""
        return "\n".join(self._world.timeline.trace_lines())

    # -- the caller's code

    def connect(
        self,
        address: str | Sequence[str] = "",
        *,
        name: str | None = None,
        location: Location | None = None,
        token: str | bytes | os.PathLike[str] | None = None,
        tls: TLS | Literal[False] | None = None,
        transports: Sequence[str] | None = None,
        prefetch: bool = False,
        options: Options | None = None,
    ) -> Opening[Hub]:
        """As `tensorhub.connect`, as a simulated process of its own, with the real `Hub` and its
        errors.

        `address`, `token`, `tls` and `transports` are not looked at. `name`: one at a time of each.
        `location`: default: a host of its own. Of `options`, `op_timeout_s`, `chunk_bytes`,
        `integrity` and `host_memory_bytes` count.

        Raises as `tensorhub.connect`, and WorkerCrashed out of the block when the process crashes,
        or is preempted: the code in the block is cancelled. Without a block it is raised by each
        call of the hub and its handles then.
        """
        check_flag("prefetch", prefetch)
        options = options or Options()
        if prefetch and not options.host_memory_bytes:
            raise StateError("prefetch=True needs host memory: set Options.host_memory_bytes")
        if name is None:
            self._names += 1
            name = f"worker-{self._names}"
        place = location or Location(host=name)
        join = partial(
            WorkerFacade.join,
            self._simulation,
            check_name("worker", name),
            place,
            options,
            prefetch=prefetch,
        )
        return _Opening(partial(self._hub, join), self._block(join))

    def _join(self, join: Callable[[], WorkerFacade]) -> WorkerFacade:
        self._simulation.check_over()
        self._simulation.sync()
        return join()

    async def _hub(self, join: Callable[[], WorkerFacade]) -> Hub:
        facade = self._join(join)
        try:
            await self._welcomed(facade)
        except BaseException:
            if facade.worker.alive and not self._simulation.is_over:
                facade.user.leave()
            raise
        return Hub(facade, facade.thread)

    @contextlib.asynccontextmanager
    async def _block(self, join: Callable[[], WorkerFacade]) -> AsyncIterator[Hub]:
        facade, simulation = self._join(join), self._simulation
        user, worker = facade.user, facade.worker
        try:
            await self._welcomed(facade)
            with user.scope:
                hub = Hub(facade, facade.thread)
                try:
                    yield hub
                finally:
                    with anyio.CancelScope(shield=True):
                        await hub.close()
        except Exception as error:
            if user.is_gone:
                raise WorkerCrashed(f"{worker.name} has crashed") from error
            raise
        finally:
            if worker.alive and not simulation.is_over:
                simulation.sync()
                user.leave()
        if user.is_gone:
            raise WorkerCrashed(f"{worker.name} has crashed")

    async def _welcomed(self, facade: WorkerFacade) -> None:
        simulation = self._simulation
        seconds = (
            self._world.options.connect_timeout_s if self._world.timeline.coordinator.alive else 0.0
        )
        with anyio.move_on_after(seconds):
            await facade.user.welcome_came.wait()
        simulation.check_running(facade.worker)
        if not facade.user.welcome_came.is_set():
            raise CoordinatorUnavailable(f"the coordinator at {self.address} does not answer")

    def start(self, name: str, main: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Run `main(*arguments)` as the process of the worker `name`, which it connects itself.

        It ends where that worker crashes (by being cancelled), and can be started again: by
        `restart`, by the fault of that name, by `heal`. What it raises otherwise ends the cluster's
        block. Leaving that block stops it.
        """
        before = self._processes.get(name)
        if before is not None and not before.ended.is_set():
            raise StateError(f"{name!r} runs already")
        process = self._processes[name] = _Process(name, main, arguments)
        if before is not None:
            before.replaced.set()
        self._tasks.start_soon(self._run, process)

    @staticmethod
    async def _run(process: _Process) -> None:
        try:
            with process.scope:
                await process.main(*process.arguments)
        except WorkerCrashed:
            process.has_died = True
        finally:
            process.ended.set()

    async def wait(self, name: str) -> None:
        """Wait until the code that was started under that name has ended of itself, through crashes
        and restarts.
        """
        while True:
            process = self._process(name)
            await process.ended.wait()
            if not process.has_died:
                return
            await process.replaced.wait()

    def _process(self, name: str) -> _Process:
        process = self._processes.get(name)
        if process is None:
            raise StateError(
                f"nothing was started as {name!r}; there are {', '.join(self._processes) or 'none'}"
            )
        return process

    # -- processes die

    def crash(self, name: str) -> None:
        """The process is killed, its memory is gone. Code in its `connect` block is cancelled."""
        self._now()
        user = self._simulation.users().get(name)
        if user is not None:
            user.worker.crash()
        else:
            self._process(name)
        self._died(name)

    def _died(self, name: str) -> None:
        process = self._processes.get(name)
        if process is not None and not process.ended.is_set():
            process.has_died = True
            process.scope.cancel()

    def preempt(self, name: str, notice_s: float = 2.0) -> None:
        """The process is told to end (its code is cancelled, and its hub closes) and is killed
        after `notice_s`.
        """
        user = self._user(name)
        user.is_preempted = True
        user.scope.cancel()
        self._died(name)
        self._world.note(f"{name} is preempted")
        self._world.timeline.after(notice_s, user.worker, user.worker.crash)

    def restart(self, name: str) -> None:
        """Run again the code that was started under that name and has died."""
        self._now()
        process = self._process(name)
        if not process.has_died or process.is_restarting:
            raise StateError(f"{name!r} has not crashed")
        process.is_restarting = True
        if not process.ended.is_set():
            self._tasks.start_soon(self._restart_when_ended, process)
        else:
            self.start(name, process.main, *process.arguments)

    async def _restart_when_ended(self, process: _Process) -> None:
        await process.ended.wait()
        if self._processes[process.name] is process and not process.is_stopped:
            self.start(process.name, process.main, *process.arguments)

    def _dead(self) -> list[str]:
        return [
            name
            for name, process in self._processes.items()
            if process.has_died and not process.is_restarting
        ]

    def _restart_one(self, random: Random) -> bool:
        dead = self._dead()
        if dead:
            self.restart(random.choice(dead))
        return bool(dead)

    def pause(self, name: str, seconds: float) -> None:
        """The process is stopped: nothing of TensorHub runs there, and a call waits. (The caller's
        own code goes on.)
        """
        party, until = self._party(name), self._now() + seconds
        party.stopped_until = max(party.stopped_until, until)

    # -- the coordinator

    def restart_coordinator(self, down_s: float = 1.0, *, lose_state: bool = False) -> None:
        """The coordinator dies, and is back after `down_s` with its durable state. `lose_state`: as
        a new cluster, without a state_dir.
        """
        self._now()
        if not self._world.timeline.coordinator.alive:
            raise StateError("the coordinator is down already")
        self._world.process.crash(kept=not lose_state, down_s=down_s, lost=lose_state)

    def fail_store(self, seconds: float) -> None:
        """Every write of the coordinator's store fails."""
        self._world.injector.failing_store_until = self._now() + seconds

    def slow_store(self, seconds: float) -> None:
        """Every write of the coordinator's store takes seconds."""
        self._world.injector.slow_store_until = self._now() + seconds

    # -- connections

    def partition(self, a: str, b: str, seconds: float) -> None:
        """Nothing passes between two parties; nothing is lost."""
        self._check_parties(a, b)
        self._world.note(f"{a} and {b} are cut off for {seconds:g} s")
        self._world.timeline.partitions.block(a, b, self._now() + seconds)

    def slow(self, a: str, b: str, seconds: float) -> None:
        """What two workers read from each other takes a hundred times as long."""
        self._check_parties(a, b)
        self._world.timeline.partitions.slow(a, b, self._now() + seconds)

    def cut(self, name: str) -> None:
        """The worker's connection to the coordinator breaks; it connects again."""
        self._worker(name).disconnect()

    def delay(self, name: str, seconds: float) -> None:
        """Messages on their way between this worker and the coordinator are held up."""
        link = self._worker(name).link
        if link is not None:
            link.held_until = self._now() + seconds

    def drop(self, name: str) -> None:
        """The worker's connection to the coordinator loses everything from now on, until one end
        notices.
        """
        link = self._worker(name).link
        if link is not None:
            link.loses_up = link.loses_down = True

    def reorder(self, seconds: float) -> None:
        """What a connection that breaks has on its way arrives after the next one is up."""
        self._world.injector.late_tails_until = self._now() + seconds

    def duplicate(self, messages: int = 1) -> None:
        """The next control messages arrive twice."""
        self._world.injector.doubles_left += messages

    # -- reads

    def stall(self, name: str, seconds: float) -> None:
        """This source accepts its readers, and sends nothing."""
        self._world.injector.stall(self._worker(name), self._now() + seconds)

    def corrupt(self, name: str, frames: int = 1) -> None:
        """The next chunks that this reader gets are damaged on their way."""
        self._worker(name)
        self._world.injector.damaged[name] = frames

    def busy_device(self, name: str, seconds: float) -> None:
        """An access of the worker's own (a digest, a copy) to what it holds lasts that long: it can
        not be fenced sooner.
        """
        worker = self._worker(name)
        self._now()
        for handle in worker.handles:
            handle.hold_access()
            self._world.timeline.after(seconds, worker, handle.end_access)

    # -- the end of faults

    def heal(self) -> None:
        """Nothing goes wrong by chance any more, all broken parts are mended, and started processes
        that have died run again.
        """
        self._end_faults()
        for name in self._dead():
            self.restart(name)

    def _end_faults(self) -> None:
        self._now()
        self._world.injector.end()

    def stop(self) -> None:
        """End what was started: each is cancelled, in the order in which it was started."""
        for process in self._processes.values():
            process.is_stopped = True
            process.scope.cancel()

    # -- names

    def _now(self) -> float:
        self._simulation.check_over()
        self._simulation.sync()
        return self._world.now

    def _user(self, name: str) -> HostedUser:
        self._now()
        user = self._simulation.users().get(name)
        if user is None:
            raise StateError(
                f"no worker {name!r} is connected; there are {', '.join(self.workers) or 'none'}"
            )
        return user

    def _worker(self, name: str) -> SimWorker:
        return self._user(name).worker

    def _party(self, name: str) -> Party:
        return self._world.timeline.coordinator if name == COORDINATOR else self._worker(name)

    def _check_parties(self, *names: str) -> None:
        for name in names:
            self._party(name)


@contextlib.asynccontextmanager
async def running(
    seed: int,
    allowed: Collection[Fault] | None,
    options: Options | None,
    spared: Collection[str],
    seconds_max: float,
) -> AsyncIterator[RunningCluster]:
    """See `SimulatedCluster.running`."""
    check_virtual()
    mistakes = [kind.value for kind in allowed or () if kind in USERS_OWN]
    if mistakes:
        raise StateError(
            f"faults={', '.join(mistakes)}: only a user can commit these, "
            "and the users are yours here"
        )
    kinds = [
        kind for kind in Fault if kind not in USERS_OWN and (allowed is None or kind in allowed)
    ]
    simulation = HostedCluster(seed, kinds, options, spared, seconds_max)
    try:
        with ordered_tasks(seed):
            async with anyio.create_task_group() as simulation.tasks:
                simulation.tasks.start_soon(simulation.drive)
                try:
                    async with anyio.create_task_group() as processes:
                        cluster = RunningCluster(simulation, processes)
                        simulation.world.injector.begin()
                        yield cluster
                        cluster._end_faults()
                        cluster.stop()
                    simulation.world.check()
                finally:
                    simulation.end()
                    simulation.tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise _cause(group) from None


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What went wrong, if it was one thing; what followed of it is left out."""
    causes = [leaf for leaf in _leaves(group) if str(leaf) != OVER]
    broken = next((leaf for leaf in causes if isinstance(leaf, GuaranteeBroken)), None)
    return broken or (causes[0] if len(causes) == 1 else group)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterable[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
