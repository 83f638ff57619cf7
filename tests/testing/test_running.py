"""A simulated cluster under somebody's own code: the public API's semantics, real bytes, virtual
time, faults by order.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import torch

import tensorhub
from tensorhub import Options, errors
from tensorhub.messages import CopyRefused, MakeCopy
from tensorhub.testing import (
    Fault,
    GuaranteeBroken,
    RunningCluster,
    SimulatedCluster,
    WorkerCrashed,
    simulate,
)
from tensorhub.testing.drivers.facades import WorkerFacade

OPTIONS = Options(chunk_bytes=4096, op_timeout_s=20, host_memory_bytes=10**6)
BACKENDS = ("asyncio", "trio")
Scenario = Callable[[RunningCluster], Awaitable[object]]


def tensors(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((8192,), float(value)), "b": torch.full((10,), float(value))}


def write(model: dict[str, torch.Tensor], value: float) -> None:
    for tensor in model.values():
        tensor.fill_(value)


def values(model: Any) -> set[float]:
    return {value for tensor in model.values() for value in tensor.unique().tolist()}


@pytest.fixture(params=BACKENDS)
def run(request: pytest.FixtureRequest) -> Callable[..., list[str]]:
    """Without faults by chance, unless some are asked for."""

    def run_it(main: Scenario, *, seeds: Any = (1,), faults: Any = (), **more: Any) -> list[str]:
        return simulate(main, seeds=seeds, faults=faults, backend=request.param, **more)

    return run_it


# --------------------------------------------------------------------------------------------------
# the same API


def test_connect_has_the_parameters_of_the_real_one() -> None:
    real, simulated = (
        inspect.signature(tensorhub.connect),
        inspect.signature(RunningCluster.connect),
    )
    mine = [parameter for name, parameter in simulated.parameters.items() if name != "self"]
    theirs = list(real.parameters.values())
    assert [(p.name, p.kind, p.annotation) for p in mine] == [
        (p.name, p.kind, p.annotation) for p in theirs
    ]
    assert [p.default for p in mine[1:]] == [p.default for p in theirs[1:]]


def test_hub_and_weights_are_the_public_classes(run: Callable[..., list[str]]) -> None:
    async def main(cluster: RunningCluster) -> None:
        async with cluster.connect("tcp://some:1", name="trainer") as hub:
            assert type(hub) is tensorhub.Hub
            assert type(await hub.register("actor", tensors())) is tensorhub.Weights
            assert hub.name == "trainer"

    run(main)


def test_a_hub_that_closes_makes_no_copies_for_others(run: Callable[..., list[str]]) -> None:
    said = list[object]()

    async def main(cluster: RunningCluster) -> None:
        async with cluster.connect(name="trainer", options=OPTIONS) as hub:
            facade, weights = hub._worker, await hub.register("actor", tensors())
            assert isinstance(facade, WorkerFacade)
            info = await weights.publish(1)
            close_handles = facade.close_handles

            async def ordered_meanwhile(*arguments: Any) -> None:
                facade.worker.say = said.append  # type: ignore[assignment]
                facade.worker.copies.ordered(MakeCopy("copy", info, 0))
                del facade.worker.say
                await close_handles(*arguments)

            facade.close_handles = ordered_meanwhile  # type: ignore[method-assign, assignment]

    run(main)
    assert said[0] == CopyRefused("copy", "this worker closes")


async def everything(cluster: RunningCluster) -> None:
    """Each call of the public API once, and what it promises."""
    async with (
        cluster.connect(name="trainer", options=OPTIONS) as hub,
        cluster.connect(name="rollout", options=OPTIONS) as other,
    ):
        trained, used = tensors(1), tensors()
        weights, reader = await hub.register("actor", trained), await other.register("actor", used)
        assert hub.newest("actor") is None
        with pytest.raises(errors.VersionUnavailable):
            await reader.replicate()
        assert (await weights.publish(1)).version == 1
        with pytest.raises(errors.StateError, match="publish"):
            await weights.publish(2)
        seen: list[tuple[int, object, set[float]]] = []

        async def before_write(info: tensorhub.VersionInfo) -> None:
            seen.append((info.version, anyio.get_current_task().id, values(used)))

        report = await reader.update(before_write=before_write)
        assert seen == [(1, anyio.get_current_task().id, {0.0})]
        assert (report.version, report.changed, report.bytes_read) == (1, True, 8192 * 4 + 40)
        assert [source.name for source in report.sources] == ["trainer"]
        assert sum(report.phases.values()) == pytest.approx(report.seconds)
        assert values(used) == {1.0}
        assert not (await reader.update()).changed
        await hub.retain("actor", latest=2)
        async with weights.mutate(2):
            write(trained, 2)
        assert (await other.wait_for("actor", at_least=2)).version == 2
        assert (await reader.prefetch()).changed
        assert values(used) == {1.0}
        assert (await reader.update()).bytes_read == 0  # it was prefetched
        assert values(used) == {2.0}
        async with hub.pin("actor", 2), weights.mutate(3):
            write(trained, 3)
        assert (await reader.update(staged=True)).version == 3
        assert values(await other.fetch("actor", 2, names="b")) == {2.0}
        watcher = hub.watch("actor")
        assert (await anext(watcher)).version == 3
        await hub.rollback("actor", to=2)
        assert (await anext(watcher)).version == 2
        assert (await hub.describe("actor")).mark == 2
        with pytest.raises(errors.VersionConflict):
            await weights.publish(2)
        with pytest.raises(errors.ManifestMismatch):
            await other.fetch("actor", names="nothing")
        with pytest.raises(errors.OperationTimeout):
            await hub.wait_for("actor", at_least=9, timeout=1)
        await weights.close()
        assert weights.state == "closed"


def test_each_call_does_what_it_promises(run: Callable[..., list[str]]) -> None:
    run(everything, seeds=range(5))


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_seed_same_run(backend: str) -> None:
    hashes = [simulate(everything, seeds=[3], faults=(), backend=backend)[0] for _ in range(2)]
    assert hashes[0] == hashes[1] != simulate(everything, seeds=[4], faults=(), backend=backend)[0]


@pytest.mark.heavy
@pytest.mark.parametrize("backend", BACKENDS)
def test_same_seed_same_run_under_faults(backend: str) -> None:
    async def main(cluster: RunningCluster) -> None:
        async def member(number: int) -> None:
            name = f"w{number}"
            while True:
                try:
                    async with cluster.connect(name=name, options=OPTIONS) as hub:
                        weights = await hub.register("actor", tensors(number), spot=number > 1)
                        for version in range(1000):
                            try:
                                await (
                                    weights.publish(version)
                                    if number == 0 and not version
                                    else weights.update(timeout=3)
                                )
                            except errors.TensorHubError:
                                await anyio.sleep(0.5)
                            await anyio.sleep(0.5)
                except errors.TensorHubError:
                    await anyio.sleep(1)

        for number in range(4):
            cluster.start(f"w{number}", member, number)
        await anyio.sleep(25)

    for seed in range(3):
        one, two = (simulate(main, seeds=[seed], backend=backend) for _ in range(2))
        assert one == two


def test_ranks_of_a_group_publish_and_update_together(run: Callable[..., list[str]]) -> None:
    async def main(cluster: RunningCluster) -> None:
        async def rank(number: int, group: str, value: float, version: int | None) -> None:
            async with cluster.connect(name=f"{group}{number}", options=OPTIONS) as hub:
                model = tensors(value + number)
                weights = await hub.register("actor", model, group=group, rank=number, world_size=2)
                if version is not None:
                    await weights.publish(version)
                    await anyio.sleep(20)
                else:
                    await weights.update(at_least=1)
                    assert values(model) == {1.0 + number}

        async with anyio.create_task_group() as tasks:
            for number in range(2):
                tasks.start_soon(rank, number, "trainer", 1.0, 1)
                tasks.start_soon(rank, number, "rollout", 0.0, None)

    run(main)


# --------------------------------------------------------------------------------------------------
# real memory


def test_a_fill_that_is_broken_off_leaves_bytes_of_both(run: Callable[..., list[str]]) -> None:
    async def main(cluster: RunningCluster) -> None:
        async with cluster.connect(name="rollout", options=OPTIONS) as hub:
            used = tensors()

            async def trainer() -> None:
                async with cluster.connect(name="trainer", options=OPTIONS) as hub:
                    await (await hub.register("actor", tensors(1))).publish(1)
                    await anyio.sleep_forever()

            cluster.start("trainer", trainer)
            reader = await hub.register("actor", used)
            await hub.wait_for("actor", at_least=1)
            async with anyio.create_task_group() as tasks:

                async def fill() -> None:
                    with pytest.raises(errors.VersionUnavailable) as failed:
                        await reader.update()
                    assert failed.value.memory == "torn"

                tasks.start_soon(fill)
                for _ in range(100_000):
                    if values(used) != {0.0}:
                        break
                    await anyio.sleep(0.0005)
                cluster.crash("trainer")
            assert reader.state == "torn"
            assert values(used) == {0.0, 1.0}

    run(main, seeds=range(3))


def test_who_writes_what_is_published_is_told_and_nobody_gets_it(
    run: Callable[..., list[str]],
) -> None:
    async def main(cluster: RunningCluster) -> None:
        async with (
            cluster.connect(name="a", options=OPTIONS) as hub,
            cluster.connect(name="b", options=OPTIONS) as other,
        ):
            model = tensors(1)
            weights = await hub.register("actor", model)
            await weights.publish(1)
            await other.fetch("actor")
            model["w"][0] = 7
            with pytest.raises(errors.TensorHubError):
                await other.fetch("actor", timeout=5)
            with pytest.raises(errors.MutabilityViolation, match="'w'"):
                await weights.unpublish()
            await weights.publish(2)
            assert (await other.fetch("actor"))["w"][0] == 7

    run(main)


def test_a_before_write_that_raises_ends_the_call(run: Callable[..., list[str]]) -> None:
    async def main(cluster: RunningCluster) -> None:
        async with (
            cluster.connect(name="a", options=OPTIONS) as hub,
            cluster.connect(name="b", options=OPTIONS) as other,
        ):
            await (await hub.register("actor", tensors(1))).publish(1)
            used = tensors()
            reader = await other.register("actor", used)

            async def broken(info: object) -> None:
                raise LookupError("the engine is gone")

            with pytest.raises(LookupError, match="engine"):
                await reader.update(before_write=broken)
            assert values(used) == {0.0}
            assert (await reader.update()).changed

    run(main)


def test_a_cancelled_call_leaves_nothing_running(run: Callable[..., list[str]]) -> None:
    async def main(cluster: RunningCluster) -> None:
        async with cluster.connect(name="a", options=OPTIONS) as hub:
            reader = await hub.register("actor", tensors())
            with anyio.move_on_after(2) as scope:
                await reader.update(at_least=5)
            assert scope.cancelled_caught
            assert cluster.now == pytest.approx(2, abs=1)
            await reader.publish(1)

    run(main)


# --------------------------------------------------------------------------------------------------
# processes, faults


def test_a_closed_hub_ends_the_calls_that_still_run(run: Callable[..., list[str]]) -> None:
    """Whoever called waits for the same end as whoever closes."""

    async def main(cluster: RunningCluster) -> None:
        hub = await cluster.connect(name="rollout", options=OPTIONS)
        weights = await hub.register("actor", tensors())
        ended: list[errors.TensorHubError] = []

        async def wait_for_a_version() -> None:
            with pytest.raises(errors.StateError, match="closed") as raised:
                await weights.update(at_least=5, timeout=500)
            ended.append(raised.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_for_a_version)
            await anyio.sleep(1)
            await hub.close()
        assert ended
        assert cluster.now < 100

    run(main)


def test_a_crash_ends_the_block_and_its_calls(run: Callable[..., list[str]]) -> None:
    async def main(cluster: RunningCluster) -> None:
        ended = []
        hubs = []

        async def doomed() -> None:
            async with cluster.connect(name="doomed", options=OPTIONS) as hub:
                hubs.append(hub)
                cluster.crash("doomed")
                try:
                    await hub.wait_for("actor", at_least=1)
                finally:
                    ended.append(True)

        with pytest.raises(WorkerCrashed, match="doomed"):
            await doomed()
        assert ended
        with pytest.raises(WorkerCrashed):
            await hubs[0].describe()
        async with cluster.connect(name="doomed", options=OPTIONS) as hub:
            assert not any(model.workers or model.replicas for model in await hub.describe())

    run(main)


def test_what_is_to_start_again_is_stopped_with_the_rest(run: Callable[..., list[str]]) -> None:
    async def main(cluster: RunningCluster) -> None:
        async def stays() -> None:
            starts.append(cluster)
            try:
                await anyio.sleep(3600)
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(1)

        cluster.start("doomed", stays)
        await anyio.sleep(1)
        cluster.crash("doomed")
        cluster.restart("doomed")  # when it has ended: not before the cluster's block has

    starts: list[RunningCluster] = []
    run(main, seconds_max=60)
    assert len(starts) == 1


def test_what_was_started_is_restarted_preempted_and_stopped(run: Callable[..., list[str]]) -> None:
    async def main(cluster: RunningCluster) -> None:
        begun, ended = [], []

        async def process(word: str) -> None:
            async with cluster.connect(name="p", options=OPTIONS):
                begun.append(word)
                try:
                    await anyio.sleep_forever()
                finally:
                    ended.append(word)

        cluster.start("p", process, "x")
        await anyio.sleep(1)
        cluster.crash("p")
        await anyio.sleep(1)
        assert (begun, ended) == (["x"], ["x"])
        cluster.restart("p")
        await anyio.sleep(1)
        cluster.preempt("p", notice_s=1)
        await anyio.sleep(5)
        assert cluster.workers == ()
        cluster.heal()
        await anyio.sleep(1)
        assert (len(begun), len(ended)) == (3, 2)
        with pytest.raises(errors.StateError, match="not crashed"):
            cluster.restart("p")
        with pytest.raises(errors.StateError, match="runs already"):
            cluster.start("p", process, "y")
        with pytest.raises(errors.StateError, match="no worker 'q'"):
            cluster.cut("q")

    run(main)


ORDERS: dict[str, Callable[[RunningCluster], None]] = {
    "pause": lambda c: c.pause("a", 5),
    "pause coordinator": lambda c: c.pause("coordinator", 5),
    "partition": lambda c: c.partition("a", "b", 5),
    "partition coordinator": lambda c: c.partition("b", "coordinator", 5),
    "slow": lambda c: c.slow("a", "b", 5),
    "cut": lambda c: c.cut("b"),
    "drop": lambda c: c.drop("b"),
    "delay": lambda c: c.delay("b", 5),
    "reorder": lambda c: c.reorder(5),
    "duplicate": lambda c: c.duplicate(20),
    "stall": lambda c: c.stall("a", 5),
    "corrupt": lambda c: c.corrupt("b", 1),
    "busy device": lambda c: c.busy_device("a", 5),
    "coordinator": lambda c: c.restart_coordinator(2),
    "fail store": lambda c: c.fail_store(5),
    "slow store": lambda c: c.slow_store(5),
}


@pytest.mark.parametrize("order", ORDERS)
def test_life_goes_on_after_each_fault_by_order(order: str) -> None:
    async def main(cluster: RunningCluster) -> None:
        async with (
            cluster.connect(name="a", options=OPTIONS) as hub,
            cluster.connect(name="b", options=OPTIONS) as other,
        ):
            model, used = tensors(1), tensors()
            weights, reader = (
                await hub.register("actor", model),
                await other.register("actor", used),
            )
            await weights.publish(1)
            ORDERS[order](cluster)
            for version in range(2, 30):
                try:
                    async with weights.mutate(version):
                        write(model, version)
                    await reader.update(at_least=version)
                    break
                except errors.TensorHubError:
                    await anyio.sleep(2)
            assert values(used) == {float(version)}

    for backend in BACKENDS:
        simulate(main, seeds=range(3), faults=(), backend=backend)


def test_a_coordinator_without_its_state_is_told_of(run: Callable[..., list[str]]) -> None:
    async def main(cluster: RunningCluster) -> None:
        async with cluster.connect(name="a", options=OPTIONS) as hub:
            weights = await hub.register("actor", tensors(1))
            await weights.publish(1)
            cluster.restart_coordinator(lose_state=True)
            with pytest.raises(errors.LeaseLost):
                await hub.wait_for("actor", at_least=2)

    run(main)


# ------------------------------------------------------------------------------------------------
# what raises out of it


def test_a_broken_guarantee_raises_out_of_the_block(run: Callable[..., list[str]]) -> None:
    async def main(cluster: RunningCluster) -> None:
        async with cluster.connect(name="a", options=OPTIONS) as hub:
            weights = await hub.register("actor", tensors(1))
            await weights.publish(1)
            [handle] = cluster._simulation.users()["a"].worker.handles
            handle.cells[0] = "something"  # as if TensorHub had written it
            cluster._simulation.world.touch(handle)
            await anyio.sleep(30)

    with pytest.raises(GuaranteeBroken, match=r"content: .*holds") as broken:
        run(main)
    assert broken.value.__notes__[-1].startswith("reproduce: TENSORHUB_SEED=1 ")


def test_code_that_never_ends_is_given_up(run: Callable[..., list[str]]) -> None:
    async def main(cluster: RunningCluster) -> None:
        async with cluster.connect(name="a"):
            await anyio.sleep_forever()

    with pytest.raises(errors.StateError, match="within 60 virtual seconds"):
        run(main, seconds_max=60)


def test_what_a_process_raises_ends_the_test(run: Callable[..., list[str]]) -> None:
    async def main(cluster: RunningCluster) -> None:
        async def process() -> None:
            async with cluster.connect(name="p"):
                raise LookupError("a bug")

        cluster.start("p", process)
        await anyio.sleep_forever()

    with pytest.raises(LookupError, match="a bug"):
        run(main)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loop_in_real_time_is_refused(backend: str) -> None:
    async def main() -> None:
        with pytest.raises(errors.StateError, match="virtual time"):
            async with SimulatedCluster(1).running():
                pass

    anyio.run(main, backend=backend)


def test_what_only_users_do_wrong_is_not_drawn(run: Callable[..., list[str]]) -> None:
    async def main(cluster: RunningCluster) -> None:
        pass

    with pytest.raises(errors.StateError, match="cancel"):
        run(main, faults=[Fault.CANCEL])
    with pytest.raises(errors.StateError, match="backend"):
        simulate(main, backend="curio")
