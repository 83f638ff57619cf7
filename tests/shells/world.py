"""One seed: a cluster of real hubs under faults, users that call, and what must hold of it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import numpy as np
import numpy.typing as npt
import trio

import tensorhub
from tensorhub.api.embedded import Coordinator
from tensorhub.api.hub import Hub
from tensorhub.api.weights import Weights
from tensorhub.errors import StateError, TensorHubError
from tensorhub.logs import repeats
from tensorhub.runtime.control.store import SqliteStore
from tensorhub.transport import cma
from tensorhub.types import Location, Options
from tests.shells.network import Network, network
from tests.shells.strands import Clock, Scheduler, Stuck, strands

SIZES = (9_000, 4_096, 1, 20_000)  # bytes of the tensors of a rank: 9 chunks
SLACK_S = 30.0  # a call may take that much longer than its deadline: fences and leases
CALM_S = 60.0  # without faults, everything is well within that
MODEL = "m"
# events of the library that are no defect of it
FAIR_ERRORS = {"state_not_written", "coordinator_lost_its_state", "leadership_lost"}

Tensors = dict[str, npt.NDArray[np.uint8]]


class Broken(AssertionError):
    """A promise is broken."""


@lru_cache(256)
def pattern(rank: int, version: int) -> Tensors:
    """The bytes of a version."""
    return {
        f"t{place}": np.random.default_rng([version, rank, place]).integers(0, 256, size, np.uint8)
        for place, size in enumerate(SIZES)
    }


def holds(tensors: Tensors, rank: int, version: int) -> bool:
    return all(np.array_equal(tensors[name], its) for name, its in pattern(rank, version).items())


@dataclass
class User:
    """A process: its hub and one registration."""

    name: str
    group: str
    rank: int
    ranks: int
    tensors: Tensors = field(default_factory=dict)
    hub: Hub | None = None
    weights: Weights | None = None


class World:
    """What one seed does."""

    def __init__(self, seed: int, scheduler: Scheduler, net: Network, directory: Path) -> None:
        self.seed, self.scheduler, self.net, self.directory = seed, scheduler, net, directory
        self.rng = random.Random(f"world {seed}")
        self.trace: list[str] = []
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []  # of the library
        choose = self.rng.choice
        self.ranks = choose((1, 1, 2))
        self.transports = choose((["tcp"], ["tcp"], ["cma"], ["shm", "tcp"], None))
        if cma.fault_here() is not None and self.transports == ["cma"]:
            self.transports = ["tcp"]
        self.options = Options(
            op_timeout_s=8.0,
            lease_s=choose((0.6, 2.0)),
            drain_grace_s=choose((0.0, 0.2, 1.0)),
            chunk_bytes=4096,
            pack_bytes=choose((0, 4096)),
            integrity=choose((True, True, False)),
            host_memory_bytes=choose((0, 2**20)),
            connect_timeout_s=1.0,
            coordinator_wait_s=choose((0.0, 5.0)),
            stall_timeout_s=1.0,
            readers_max=choose((1, 3, 64)),
            stale_weights="ignore",
        )
        self.apart = self.rng.random() < 0.3  # readers in another site: several connections, deltas
        self.port = net.port()
        self.coordinator: Coordinator | None = None
        self.trainers = [User(f"trainer-{rank}", "trainer", rank, self.ranks) for rank in self._all]
        self.readers = [
            User(f"reader-{name}-{rank}", f"reader-{name}", rank, self.ranks)
            for name in range(self.rng.randint(1, 3))
            for rank in self._all
        ]
        self.version = 0  # the last that was tried
        self.until = 0.0  # the faults' end

    @property
    def _all(self) -> range:
        return range(self.ranks)

    def note(self, text: str) -> None:
        self.trace.append(f"{self.scheduler.now - 1000:10.6f} {text}")

    def broken(self, text: str) -> None:
        self.note(f"BROKEN {text}")
        self.faults.append(text)

    # ---------------------------------------------------------------------------------------------
    # calls

    async def call(
        self,
        what: str,
        make: Callable[[], Awaitable[Any]],
        deadline_s: float,
        *,
        calm: bool = False,
    ) -> Any:
        """Make a call; it may be cancelled at any point. Its result, or None."""
        scheduler, began = self.scheduler, self.scheduler.now
        scope, is_over = trio.CancelScope(), False
        if not calm and self.rng.random() < 0.25:
            token = trio.lowlevel.current_trio_token()

            def cancel() -> None:
                if not is_over:
                    token.run_sync_soon(scope.cancel)

            scheduler.after_points(int(10 ** self.rng.uniform(0, 4)), cancel)
        result, outcome = None, "cancelled"
        self.note(f"{what} ...")
        try:
            with scope:
                result = await make()
                outcome = f"-> {result!r:.80}"
                self.counts[f"{what.split(maxsplit=1)[0]} done"] += 1
        except TensorHubError as error:
            outcome = f"{type(error).__name__}: {error} [{error.memory}]"
            self.counts[type(error).__name__] += 1
            if calm:
                self.broken(f"{what}: without faults it raised {outcome}")
        finally:
            is_over = True
        if outcome == "cancelled":
            self.counts["cancelled"] += 1
        self.note(f"{what} {outcome}")
        if scheduler.now - began > deadline_s + SLACK_S:
            self.broken(f"{what} took {scheduler.now - began:.1f} s; it had {deadline_s:g}")
        return result

    def look(self, user: User) -> None:
        """The content that a memory's stamp names is in the memory."""
        if user.weights is None:
            return
        try:
            stamp = user.weights.stamp()
        except StateError:
            return
        self.counts["stamps"] += 1
        if not holds(user.tensors, user.rank, stamp.version):
            self.broken(f"{user.name} has other bytes than version {stamp.version}, its stamp")

    # ---------------------------------------------------------------------------------------------
    # who is there

    async def serve(self) -> None:
        serving = tensorhub.serve(
            port=self.port, token="", state_dir=self.directory, options=self.options
        )
        while self.coordinator is None:
            with contextlib.suppress(TensorHubError):  # a store that cannot be opened
                self.coordinator = await serving
            serving = tensorhub.serve(
                port=self.port, token="", state_dir=self.directory, options=self.options
            )

    async def stop_serving(self) -> None:
        if self.coordinator is not None:
            await self.coordinator.close()
            self.coordinator = None

    async def join(self, user: User, *, calm: bool = False) -> None:
        """Connect and register, again and again until it holds."""
        where = Location(site="b") if self.apart and "reader" in user.name else Location()
        while user.weights is None and (calm or self.scheduler.now < self.until):
            if user.hub is None:
                connecting = tensorhub.connect(
                    f"tcp://127.0.0.1:{self.port}",
                    name=user.name,
                    token="",
                    location=where,
                    transports=self.transports,
                    options=self.options,
                    prefetch=False,
                )

                async def connect(connecting: Any = connecting) -> Hub:
                    user.hub = await connecting
                    return user.hub

                await self.call(f"connect {user.name}", connect, 6.0, calm=calm)
            if user.hub is not None:
                user.tensors = {name: np.zeros_like(its) for name, its in pattern(0, 0).items()}

                async def register(hub: Hub = user.hub) -> Weights:
                    user.weights = await hub.register(
                        MODEL,
                        user.tensors,
                        group=user.group,
                        rank=user.rank,
                        world_size=user.ranks,
                    )
                    return user.weights

                await self.call(f"register {user.name}", register, 8.0, calm=calm)
            if user.weights is None:
                await anyio.sleep(0.1)

    async def leave(self, user: User, *, calm: bool = False) -> None:
        hub, user.weights, user.hub = user.hub, None, None
        if hub is not None:
            await self.call(f"leave {user.name}", hub.close, 10.0, calm=calm)
            if not calm:  # it may have been cancelled: the thread ends all the same
                with trio.CancelScope(shield=True):
                    await hub.close()
            self._check_left(user.name, hub)

    def _check_left(self, name: str, hub: Hub) -> None:
        """A worker that has left keeps nothing."""
        worker: Any = hub._worker
        kept = {
            "questions": worker.coordinator._waiting,
            "handles": worker.router.handles,
            "requests of copies": worker.copies._asked,
            "accesses": worker._owner._inside,
            "lanes": worker._owner._lanes,
        }
        for what, entries in kept.items():
            if entries:
                self.broken(f"{name} has left, and keeps {what}: {entries}")

    # ---------------------------------------------------------------------------------------------
    # users

    async def publish(self, version: int, *, calm: bool = False) -> bool:
        """All ranks of the trainer publish a version."""
        how = self.rng.choice(("mutate", "mutate", "apart"))
        done: list[bool] = []

        async def one(user: User) -> None:
            weights = user.weights
            if weights is None:
                return
            timeout = 20.0 if calm else self.rng.choice((0.3, 2.0, 8.0))

            def write() -> None:
                for name, its in pattern(user.rank, version).items():
                    user.tensors[name][:] = its

            async def mutate() -> bool:
                async with weights.mutate(version, timeout):
                    write()
                return True

            async def by_hand() -> bool:
                if weights.version is not None:
                    await weights.unpublish(timeout)
                if weights.state != "empty":
                    return False
                write()
                await weights.publish(version, timeout)
                return True

            make = by_hand if how == "apart" else mutate
            if await self.call(f"{how} {version} {user.name}", make, 2 * timeout, calm=calm):
                done.append(True)
            self.look(user)

        async with anyio.create_task_group() as tasks:
            for user in self.trainers:
                tasks.start_soon(one, user)
        return len(done) == len(self.trainers)

    async def train(self) -> None:
        while self.scheduler.now < self.until:
            for user in self.trainers:
                await self.join(user)
            self.version += 1
            await self.publish(self.version)
            await anyio.sleep(self.rng.expovariate(2.0))
            if self.rng.random() < 0.03:
                await self.leave(self.rng.choice(self.trainers))

    async def update(
        self, user: User, selector: Any, timeout: float, *, staged: bool, calm: bool = False
    ) -> None:
        weights = user.weights
        assert weights is not None

        async def hook(info: Any) -> None:
            await anyio.sleep(0.01)

        before = hook if self.rng.random() < 0.3 else None
        report = await self.call(
            f"update {selector} {'staged ' if staged else ''}{user.name}",
            lambda: weights.update(selector, before_write=before, staged=staged, timeout=timeout),
            timeout,
            calm=calm,
        )
        self.look(user)
        if report is not None and not holds(user.tensors, user.rank, report.version):
            self.broken(f"{user.name} got other bytes than those of version {report.version}")
        if calm and report is not None and report.version != self.version:
            self.broken(f"{user.name} got version {report.version} as {selector}")

    async def read(self, group: list[User]) -> None:
        """The ranks of one reader call alike."""
        rng = self.rng
        while self.scheduler.now < self.until:
            for user in group:
                await self.join(user)
            users = [user for user in group if user.weights is not None]
            draw, timeout = rng.random(), rng.choice((0.05, 0.5, 3.0, 8.0))
            selector = rng.choice(("latest", "latest", "available", "latest-1", self.version))
            staged = bool(self.options.host_memory_bytes) and rng.random() < 0.3
            async with anyio.create_task_group() as tasks:
                for user in users:
                    tasks.start_soon(self._one_call, user, draw, selector, timeout, staged)
            await anyio.sleep(rng.expovariate(4.0))

    async def _one_call(
        self, user: User, draw: float, selector: Any, timeout: float, staged: bool
    ) -> None:
        weights, hub = user.weights, user.hub
        if weights is None or hub is None:
            return
        if draw < 0.7:
            await self.update(user, selector, timeout, staged=staged)
        elif draw < 0.76 and self.options.host_memory_bytes:
            await self.call(
                f"prefetch {user.name}", lambda: weights.prefetch(selector, timeout), timeout
            )
        elif draw < 0.80:
            await self.call(f"unpublish {user.name}", lambda: weights.unpublish(timeout), timeout)
        elif draw < 0.84:
            await self.call(f"describe {user.name}", lambda: hub.describe(timeout=timeout), timeout)
        elif draw < 0.88:
            await self.call(
                f"retain {user.name}",
                lambda: hub.retain(MODEL, latest=self.rng.choice((0, 1, 2)), timeout=timeout),
                timeout,
            )
        elif draw < 0.92:

            async def pinned() -> None:
                async with hub.pin(MODEL, self.version, timeout):
                    await anyio.sleep(0.2)

            await self.call(f"pin {user.name}", pinned, 2 * timeout)
        elif draw < 0.96:
            user.weights = None
            await self.call(
                f"close {user.name}", lambda: weights.close(abandon=True), self.options.op_timeout_s
            )
            if weights.state != "closed":
                user.weights = weights
        elif draw < 0.98:
            hub.newest(MODEL)
            await self.call(
                f"wait_for {user.name}",
                lambda: hub.wait_for(MODEL, at_least=self.version, timeout=timeout),
                timeout,
            )
        else:
            await self.leave(user)

    # ---------------------------------------------------------------------------------------------
    # faults

    async def disturb(self) -> None:
        rng, net = self.rng, self.net
        every_s = rng.choice((0.1, 0.5, 2.0, 1000.0))
        while self.scheduler.now < self.until:
            await anyio.sleep(min(rng.expovariate(1 / every_s), self.until - self.scheduler.now))
            links = net.open_links()
            draw = rng.random()
            if draw < 0.5 and links:
                net.count("reset")
                rng.choice(links).reset()
            elif draw < 0.7 and links:
                net.count("half-open")
                rng.choice(links).half_open(rng.choice((1, 2, 3)))
            elif draw < 0.8 and links:
                net.count("all reset")
                for link in links:
                    link.reset()
            elif draw < 0.95:
                net.count("coordinator restarted")
                self.note("the coordinator stops")
                await self.stop_serving()
                await anyio.sleep(rng.choice((0.0, 0.3, 2.0)))
                await self.serve()
                self.note("the coordinator is back")

    async def watch(self) -> None:
        """Look at every memory, again and again."""
        while True:
            await anyio.sleep(self.rng.expovariate(5.0))
            for user in (*self.trainers, *self.readers):
                self.look(user)

    # ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        await self.serve()
        self.until = self.scheduler.now + self.rng.choice((1.5, 4.0, 8.0))
        self.net.is_faulty = True
        groups: dict[str, list[User]] = {}
        for user in self.readers:
            groups.setdefault(user.group, []).append(user)
        async with anyio.create_task_group() as watching:
            watching.start_soon(self.watch)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.train)
                tasks.start_soon(self.disturb)
                for group in groups.values():
                    tasks.start_soon(self.read, group)
            self.net.heal()
            self.note("no faults from here on")
            with trio.move_on_after(CALM_S) as calm:
                await self._calm()
            if calm.cancelled_caught:
                self.broken(f"without faults, this lasts longer than {CALM_S:g} s")
            watching.cancel_scope.cancel()
        if not self.faults:
            await self._check_nothing_kept()
        await self.stop_serving()

    async def _calm(self) -> None:
        """Everyone gets the next version, and leaves."""
        await anyio.sleep(2 * self.options.lease_s + 1.0)
        users = [*self.trainers, *self.readers]
        for user in users:
            await self.join(user, calm=True)
        hub = users[0].hub
        assert hub is not None
        await self.call("retain", lambda: hub.retain(MODEL, latest=0), 8.0, calm=True)
        for user in self.trainers:  # what is in doubt is decided by the next call
            if user.weights is not None and user.weights.state not in ("empty", "ready"):
                with contextlib.suppress(TensorHubError):
                    await user.weights.unpublish(5.0)
        for _ in range(20):  # a number may have been used by an attempt of before
            self.version += 1
            if await self._publishes():
                break
        else:
            self.broken("without faults, nothing can be published")
        async with anyio.create_task_group() as tasks:
            for user in self.readers:
                tasks.start_soon(self._update_calmly, user)
        self.rng.shuffle(users)
        for user in users:
            await self.leave(user, calm=True)

    async def _publishes(self) -> bool:
        faults = len(self.faults)
        done = await self.publish(self.version, calm=True)
        told, self.faults = self.faults[faults:], self.faults[:faults]
        self.last_errors = told
        return done

    async def _update_calmly(self, user: User) -> None:
        assert user.weights is not None
        for _ in range(3):
            try:
                await user.weights.update("latest", timeout=10.0)
                break
            except TensorHubError as error:
                self.note(f"{user.name}, without faults: {error}")
        await self.update(user, "latest", 20.0, staged=False, calm=True)

    async def _check_nothing_kept(self) -> None:
        assert self.coordinator is not None
        await anyio.sleep(3 * self.options.lease_s)
        server = self.coordinator._candidate.server
        assert server is not None
        core, _, _ = server.show()
        core.check_invariants()
        core.check_counts()
        cluster = core.cluster
        kept = {
            "sessions": server._sessions,
            "sessions of the core": cluster.sessions,
            "workers": cluster.workers,
            "members": cluster.members,
            "leases": cluster.leases,
            "undecided operations": cluster.undecided,
        }
        for what, entries in kept.items():
            if entries:
                self.broken(f"the coordinator keeps {what}: {entries}")


# -------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Of one seed."""

    seed: int
    faults: list[str]
    trace: list[str]
    counts: Counter[str]
    points: int
    order: str


class _Listener(logging.Handler):
    """An error in the library's log is a defect."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.INFO)
        self._world = world

    def createLock(self) -> None:  # noqa: N802 - as the base class
        """None: a log is no place to lose the turn."""
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self._world.note(f"    {record.name} {text:.300}")
        event = getattr(record.msg, "fields", {}).get("event")
        if record.exc_info or (record.levelno >= logging.ERROR and event not in FAIR_ERRORS):
            self._world.broken(f"logged: {text}")


@contextlib.contextmanager
def _listening(world: World) -> Iterator[None]:
    logger, handler = logging.getLogger("tensorhub"), _Listener(world)
    level, hook = logger.level, sys.unraisablehook
    repeats.forget()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    sys.unraisablehook = lambda found: world.broken(
        f"unraisable: {found.exc_value!r} in {found.object!r}"
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_, **__: world.broken(f"warning: {message!r}")
            yield
            gc.collect()
    finally:
        sys.unraisablehook = hook
        logger.removeHandler(handler)
        logger.setLevel(level)


def _descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[os.readlink(f"/proc/self/fd/{name}").partition("[")[0]] += 1
    return found


def run_seed(seed: int) -> Outcome:
    """One seed, from a fresh cluster to nothing."""
    gc.collect()
    gc.disable()  # finalizers run where the references end, so that a seed is one order of events
    descriptors = _descriptors()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
        strands(seed) as scheduler,
        network(scheduler, seed) as net,
    ):
        world = World(seed, scheduler, net, Path(directory) / "state")
        with _listening(world), _failing_store(world), _interrupted_copies(scheduler):
            try:
                trio.run(world.run, clock=Clock(scheduler))
            except Stuck:
                pass
            except BaseException as error:
                world.broken(f"raised: {''.join(traceback.format_exception(error))}")
            if scheduler.stuck:
                world.broken(f"stuck: {scheduler.stuck}")
            left = [each.name for each in scheduler.strands if each is not scheduler.main]
            if left and not world.faults:
                world.broken(f"threads are left: {left}\n{scheduler.stacks()}")
    gc.enable()
    more = _descriptors() - descriptors
    if more and not world.faults:
        world.broken(f"descriptors are left: {dict(more)}")
    world.counts.update(net.faults)
    return Outcome(
        seed, world.faults, world.trace, world.counts, scheduler.points, scheduler.order.hexdigest()
    )


def _interrupted_copies(scheduler: Scheduler) -> contextlib.AbstractContextManager[object]:
    """Another thread may go on before and after each copy of another worker's memory."""
    readv = cma._readv

    def interrupted(*given: int) -> int:
        scheduler.point()
        count = readv(*given)
        scheduler.point()
        return count

    return mock.patch.object(cma, "_readv", interrupted)


@contextlib.contextmanager
def _failing_store(world: World) -> Iterator[None]:
    """A disk that is full now and then."""
    write, share = SqliteStore.write, world.rng.choice((0.0, 0.0, 0.05))

    def failing(store: SqliteStore, entries: Any) -> None:
        if world.net.is_faulty and world.rng.random() < share:
            world.net.count("write failed")
            raise OSError("no space left on device")
        write(store, entries)

    with mock.patch.object(SqliteStore, "write", failing):
        yield
