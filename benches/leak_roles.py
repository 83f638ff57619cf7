"""Who takes part in the leak run, each in a process of its own: what one cycle is for each of them.

Whatever may fail on purpose or by chance is counted by its error, and the cycle goes on: that
nothing piles up must not depend on success.
"""

import contextlib
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import numpy as np
import numpy.typing as npt

import tensorhub
from benches.leak_probe import sample
from benches.remotes import obey
from tensorhub import logs
from tensorhub.api.embedded import Coordinator
from tensorhub.api.hub import Hub
from tensorhub.api.weights import Weights
from tensorhub.coordinator import cluster, entities, limits, membership, publishes
from tensorhub.errors import TensorHubError
from tensorhub.runtime.control import tables
from tensorhub.runtime.control.link import CoordinatorLink
from tensorhub.runtime.data import channels
from tensorhub.runtime.loop_thread import LoopThread
from tensorhub.runtime.worker import version_watches
from tensorhub.runtime.worker.worker import Worker

MIB = 2**20
LEASE_S = 3.0
SETTLE_S = 120.0
PERIOD = 8  # cycles after which all is as before: what is compared is taken at multiples of it
BOUND = 32  # of the books that the code bounds, in these processes
FRESH_NAMES = 4  # of models that come and go, in one cycle of one process
OPTIONS = tensorhub.Options(
    lease_s=LEASE_S, op_timeout_s=30, chunk_bytes=16_384, host_memory_bytes=MIB, drain_grace_s=0.02
)
Hook = Callable[[Hub], None] | None
"""Called by the follower after each of its cycles: a test injects a leak there."""

Tensors = dict[str, npt.NDArray[np.uint8]]


def run_role(
    pipe: Connection, backend: str, role: Callable[..., Awaitable[None]], *arguments: object
) -> None:
    """The process' main function; trio's and asyncio's alike."""
    anyio.run(partial(role, pipe, *arguments), backend=backend)


def tensors() -> Tensors:
    return {name: np.zeros(32_768, np.uint8) for name in ("a", "b")}


class Failures:
    """What went wrong, by its error."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        try:
            yield
        except TensorHubError as error:
            self.counts[type(error).__name__] += 1

    async def told(self) -> dict[str, int]:
        return dict(self.counts)


# --------------------------------------------------------------------------------------------------
# coordinator


def _lower_bounds() -> None:
    """Let the books that the code bounds have their bounds where a run reaches them: full, they
    must not grow.
    """
    cluster.LOST_KEPT_MAX = membership.LOST_KEPT_MAX = BOUND  # type: ignore[attr-defined]
    entities.FORGOTTEN_KEPT_MAX = publishes.FORGOTTEN_KEPT_MAX = BOUND  # type: ignore[attr-defined]
    limits.DECISIONS_MAX = tables.PUBLICATIONS_KEPT_MAX = tables.PRUNED_AT = BOUND
    version_watches.IDLE_NAMES_MAX = logs.REMEMBERED = BOUND
    channels.PEERS_MAX = PERIOD  # there are few, and few new ones come


async def coordinator(pipe: Connection, durable: bool) -> None:
    _lower_bounds()
    with contextlib.ExitStack() as stack:
        state_dir = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="leaks-")))
            if durable
            else None
        )
        async with tensorhub.serve(token="", state_dir=state_dir, options=OPTIONS) as serving:
            pipe.send((True, serving.address))
            files = (
                [state_dir / "state.sqlite3", state_dir / "state.sqlite3-wal"]
                if state_dir is not None
                else []
            )
            await obey(
                pipe, {"settle": partial(_settle, serving), "sample": partial(sample, *files)}
            )


async def _settle(serving: Coordinator, workers: int) -> str:
    """Wait until just so many workers have a lease, and nothing is under way: moments that can be
    compared.
    """
    assert serving._candidate.server is not None
    core = serving._candidate.server._core
    books = core.cluster
    with anyio.fail_after(SETTLE_S):
        while (  # noqa: ASYNC110
            len(books.workers) != workers or books.leases or any(True for _ in books.operations())
        ):
            await anyio.sleep(0.05)
    return repr(core)


# --------------------------------------------------------------------------------------------------
# trainer


async def trainer(pipe: Connection, address: str) -> None:
    """It publishes every version of `m`, and with two ranks of one group those of `pair`."""
    failures = Failures()
    async with tensorhub.connect(address, name="trainer", token="", options=OPTIONS) as hub:
        weights = await hub.register("m", tensors())
        pair = [
            await hub.register("pair", tensors(), group="p", rank=rank, world_size=2)
            for rank in range(2)
        ]

        async def publish(version: int) -> None:
            async with weights.mutate(version):
                pass
            async with anyio.create_task_group() as tasks:
                for rank in pair:
                    tasks.start_soon(_mutate, rank, version)

        async def fill(first: int, versions: int) -> None:
            for version in range(first, first + versions):
                await publish(version)

        async def cycle(version: int) -> None:
            with failures.counted():
                await publish(version)
            with failures.counted():
                await weights.publish(1)  # a used number, and published already
            if version % 4 == 0:
                await hub.retain("m", latest=version // 4 % 2)
            if version % PERIOD == 5:
                await hub.rollback("m", to=version - 1)

        pipe.send((True, None))
        await obey(
            pipe, {"fill": fill, "cycle": cycle, "sample": sample, "failures": failures.told}
        )


async def _mutate(weights: Weights, version: int) -> None:
    async with weights.mutate(version):
        pass


# --------------------------------------------------------------------------------------------------
# follower


async def follower(pipe: Connection, address: str, hook: Hook, fetches: bool) -> None:
    """It follows every version in one of several ways, asks for names that come and go, and calls
    what fails.
    """
    _lower_bounds()
    failures = Failures()
    async with tensorhub.connect(address, name="follower", token="", options=OPTIONS) as hub:
        weights = await hub.register("m", tensors())
        pair = [
            await hub.register("pair", tensors(), group="f", rank=rank, world_size=2)
            for rank in range(2)
        ]

        async def cycle(version: int) -> None:
            with failures.counted():
                await _follow(hub, weights, version, fetches)
            with failures.counted():
                async with anyio.create_task_group() as tasks:
                    for rank in pair:
                        tasks.start_soon(_update, rank, failures)
            await _fail(hub, weights, version, failures)
            await _ask(hub, version, failures)
            if version % PERIOD == 7:
                # the worker connects again, and says anew what it holds
                await hub._thread.call(_reconnect, hub)
            if hook is not None:
                hook(hub)

        pipe.send((True, None))
        await obey(pipe, {"cycle": cycle, "sample": sample, "failures": failures.told})


async def _update(weights: Weights, failures: Failures) -> None:
    with failures.counted():
        await weights.update(timeout=20)


async def _follow(hub: Hub, weights: Weights, version: int, fetches: bool) -> None:
    match version % PERIOD:
        case 1:
            await weights.prefetch(timeout=10)
            await weights.update()
        case 2:
            await weights.update(staged=True)
        case 3:
            await weights.update(before_write=_nothing)
        case 4:
            async with hub.pin("m", version):
                await weights.update()
        case 5 if fetches:
            await hub.fetch("m")
        case 6:
            await weights.unpublish()
            await weights.replicate("latest")
        case 7:
            another = await hub.register("m", tensors())  # for the length of a cycle
            await another.replicate()
            await another.close(abandon=True)
        case _:
            await weights.update()


async def _nothing(_: tensorhub.VersionInfo) -> None:
    pass


async def _fail(hub: Hub, weights: Weights, version: int, failures: Failures) -> None:
    """Calls that are refused, time out or are cancelled."""
    with failures.counted():
        await weights.replicate(10**9, timeout=5)
    with failures.counted():
        await weights.update(at_least=10**9, timeout=0.005)
    with anyio.move_on_after(0.005), failures.counted():
        await weights.update(at_least=10**9, timeout=20)
    with failures.counted():
        await hub.register("pair", tensors(), group="f", rank=0, world_size=2)
    with anyio.move_on_after(0.002), failures.counted():
        await hub.wait_for("m", at_least=10**9)
    with failures.counted():
        await hub.describe(f"unknown-{version}")


async def _ask(hub: Hub, version: int, failures: Failures) -> None:
    """Names that come and go: of models, and of groups."""
    watcher = hub.watch("m")
    async for _ in watcher:
        break
    for number in range(FRESH_NAMES):
        name = f"fresh-{version}-{number}"
        hub.newest(name)
        hub.watch(name)  # begun and, as nobody iterates, ended
        with failures.counted():
            await hub.wait_for(name, at_least=1, timeout=0)
    mine = await hub.register(f"fresh-{version}-0", tensors())
    await mine.close()


def _link(hub: Hub) -> CoordinatorLink:
    assert isinstance(hub._worker, Worker)
    return hub._worker.link


async def _reconnect(hub: Hub) -> None:
    """In the hub's own thread: the session that ends is told from the one that follows, however
    soon that is.
    """
    link = _link(hub)
    ended = link._outbox
    if ended is not None:
        ended.close()
    with anyio.fail_after(SETTLE_S):
        while link._outbox is None or link._outbox is ended:  # noqa: ASYNC110
            await anyio.sleep(0.001)


# ------------------------------------------------------------------------------------- who come and
# go, and who die


async def comer(pipe: Connection, address: str) -> None:
    """One process in which hubs are opened and closed, over and over."""
    failures = Failures()

    async def fill(times: int) -> None:
        for _ in range(times):
            async with _joined(address):
                pass

    async def cycle(version: int) -> None:
        with failures.counted():
            async with _joined(address) as hub, _joined(address) as other:
                weights = await hub.register("m", tensors())
                await weights.replicate(timeout=10)
                reader = await other.register("m", tensors(), spot=True)
                await reader.replicate(timeout=10)
                await _as_gang(hub, version, failures)
                await _leave(hub, weights, version)

    pipe.send((True, None))
    await obey(pipe, {"fill": fill, "cycle": cycle, "sample": sample, "failures": failures.told})


@contextlib.asynccontextmanager
async def _joined(address: str) -> AsyncIterator[Hub]:
    async with tensorhub.connect(address, name="comer", token="", options=OPTIONS) as hub:
        yield hub


async def _as_gang(hub: Hub, version: int, failures: Failures) -> None:
    """A group of two under a name that nobody had before."""
    gang = [
        await hub.register("pair", tensors(), group=f"gang-{version}", rank=rank, world_size=2)
        for rank in range(2)
    ]
    async with anyio.create_task_group() as tasks:
        for rank in gang:
            tasks.start_soon(_update, rank, failures)


async def _leave(hub: Hub, weights: Weights, version: int) -> None:
    match version % 4:
        case 0:
            await weights.close()
        case 1:
            await weights.close(abandon=True)
        # not always: the books can be compared only once its lease has ended
        case 2 if version // PERIOD % 4 == 2:
            assert isinstance(hub._thread, LoopThread)
            hub._thread.post(hub._thread._tasks.cancel_scope.cancel)  # without goodbye
        case _:
            pass  # the hub closes it


async def mortal(pipe: Connection, address: str) -> None:
    """It follows, until it is killed."""
    failures = Failures()
    async with tensorhub.connect(address, name="mortal", token="", options=OPTIONS) as hub:
        weights = await hub.register("m", tensors(), spot=True)

        async def cycle(version: int) -> None:
            await _update(weights, failures)

        pipe.send((True, None))
        await obey(pipe, {"cycle": cycle})
