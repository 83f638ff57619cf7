"""A small orchestrator, and tests that run it unchanged in a simulated cluster in which everything
fails.

The orchestrator takes `connect` as an argument, so that a test can pass a simulated cluster's
`connect`.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import anyio
import torch

import tensorhub
from tensorhub import CoordinatorUnavailable, Options, TensorHubError, VersionConflict
from tensorhub.testing import RunningCluster, SimulatedCluster, VirtualLoop, simulate

Connect = Callable[..., contextlib.AbstractAsyncContextManager[tensorhub.Hub]]
Process = Callable[..., Coroutine[Any, Any, None]]
# the stamp of the weights that a rollout generated with, and their values
Samples = list[tuple[tensorhub.Stamp, set[float]]]

ADDRESS = "tcp://coordinator:17337"
# small chunks, so that even small tensors can be torn
OPTIONS = Options(chunk_bytes=4096, op_timeout_s=20)


def make_model() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(8192), "b": torch.zeros(64)}


def generate(model: Mapping[str, torch.Tensor]) -> set[float]:
    """Stand for an inference: the values of all weights."""
    return {value for tensor in model.values() for value in tensor.tolist()}


async def trainer(connect: Connect, steps: int) -> None:
    async with connect(ADDRESS, name="trainer", options=OPTIONS) as hub:
        model = make_model()
        weights = await hub.register("actor", model)
        version = 1
        while version <= steps:
            await anyio.sleep(1)  # the rollouts generate
            try:
                async with weights.mutate(version):
                    for tensor in model.values():
                        tensor.fill_(version)  # a training step
            except VersionConflict:
                pass  # an earlier attempt was published, although its call could not say so
            except TensorHubError:
                continue
            version += 1
        while True:  # keep serving
            await anyio.sleep(1)
            if weights.version is None:  # the coordinator came back without its state
                with contextlib.suppress(TensorHubError):
                    await weights.publish(steps)


async def rollout(connect: Connect, name: str, samples: Samples) -> None:
    async with connect(ADDRESS, name=name, options=OPTIONS) as hub:
        model = make_model()
        weights = await hub.register("actor", model, spot=True)
        while True:
            try:
                await weights.update("latest", timeout=10)
            except TensorHubError as error:
                if error.memory != "intact" or weights.version is None:
                    await anyio.sleep(0.2)
                    continue  # these weights must not generate
            samples.append((weights.stamp(), generate(model)))
            await anyio.sleep(0.3)


async def careless_rollout(connect: Connect, name: str, samples: Samples) -> None:
    """Generate after a failed update, too. A source that dies during an update leaves the weights
    torn.
    """
    async with connect(ADDRESS, name=name, options=OPTIONS) as hub:
        model = make_model()
        weights = await hub.register("actor", model, spot=True)
        stamp = None
        while True:
            with contextlib.suppress(TensorHubError):
                await weights.update("latest", timeout=5)
                stamp = weights.stamp()
            if stamp is not None:
                samples.append((stamp, generate(model)))
            await anyio.sleep(0.3)


async def supervised(process: Process, *arguments: object) -> None:
    """Start the process again if it could not reach the coordinator."""
    while True:
        try:
            await process(*arguments)
        except CoordinatorUnavailable:
            await anyio.sleep(1)


async def scenario(cluster: RunningCluster, rollout: Process = rollout) -> None:
    samples: Samples = []
    cluster.start("trainer", supervised, trainer, cluster.connect, 5)
    for name in ("rollout-0", "rollout-1", "rollout-2"):
        cluster.start(name, supervised, rollout, cluster.connect, name, samples)
    await anyio.sleep(20)  # things go wrong
    cluster.heal()
    with anyio.fail_after(300):
        while not samples or samples[-1][0].version < 5:  # noqa: ASYNC110 - virtual time
            await anyio.sleep(1)
    for stamp, seen in samples:
        assert seen == {stamp.version}, f"generated with {seen} as version {stamp.version}"


def test_each_sample_is_of_one_whole_version() -> None:
    simulate(scenario, seeds=range(5), spared=["trainer"])


async def careless_scenario(cluster: RunningCluster) -> None:
    await scenario(cluster, careless_rollout)


def find_the_bug() -> None:
    """Fail at one of the first seeds with "generated with {2.0, 3.0} as version 2", and print how
    to repeat that seed.
    """
    simulate(careless_scenario, seeds=range(100), spared=["trainer"])


async def the_source_dies(cluster: RunningCluster) -> None:
    """A fault on order instead of by chance."""
    samples: Samples = []
    cluster.start("trainer", trainer, cluster.connect, 1)
    cluster.start("rollout-0", rollout, cluster.connect, "rollout-0", samples)
    while not samples:  # noqa: ASYNC110 - virtual time
        await anyio.sleep(0.1)
    cluster.crash("trainer")  # rollout-0 holds version 1, and serves it
    async with cluster.connect(name="late") as hub:
        fetched = await hub.fetch("actor", "latest")
    assert generate(fetched) == {1}
    assert [source.name for source in fetched.report.sources] == ["rollout-0"]


def test_a_rollout_serves_after_the_trainer_died() -> None:
    simulate(the_source_dies, seeds=range(3), faults=())


async def by_hand() -> str:
    """Without `simulate`: any loop with virtual time, for fixtures of your own."""
    async with SimulatedCluster(7, faults=()).running() as cluster:
        async with cluster.connect(name="trainer") as hub:
            weights = await hub.register("actor", make_model())
            await weights.publish(1)
            await asyncio.sleep(600)  # takes no time
        return cluster.end_hash


def test_the_same_seed_is_the_same_run() -> None:
    def once() -> str:
        # on trio: MockClock(autojump_threshold=0)
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(by_hand())

    assert once() == once()
