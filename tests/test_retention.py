"""What keeps versions, and what takes them back: rollback, retain and pin through the public
API.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import anyio
import pytest

import tensorhub
from tensorhub.api.hub import Hub
from tensorhub.api.weights import Weights
from tensorhub.errors import (
    LeaseLost,
    OperationTimeout,
    RetentionError,
    StateError,
    VersionConflict,
    VersionUnavailable,
)
from tensorhub.messages import Announce
from tensorhub.types import VersionInfo
from tests.rig import (
    OPTIONS,
    WAIT_S,
    cluster,
    connect,
    gated,
    holds,
    nothing_left,
    tensors,
    until,
    worker_of,
    write,
)
from tests.runtime.data_rig import waited_out_s

# --------------------------------------------------------------------------------------------------
# rollback


async def test_rollback_and_publish_again() -> None:
    async with cluster("trainer", "keeper", "reader") as c:
        trainer, keeper, reader = c.hubs
        source, kept, mine = tensors(1), tensors(), tensors()
        published = await trainer.register("m", source)
        await published.publish(1)
        weights = await keeper.register("m", kept)
        await weights.replicate()
        async with published.mutate(2):
            write(source, 2)
        follower = await reader.register("m", mine)
        assert (await follower.update()).version == 2
        watcher = reader.watch("m")
        assert (await anext(watcher)).version == 2
        await trainer.rollback("m", to=1)
        newest = trainer.newest("m") or await trainer.wait_for("m", at_least=1)
        assert newest.version == 1
        assert (published.state, published.version) == ("empty", None)
        assert (await anext(watcher)).version == 1
        await until(lambda: follower.state == "empty")
        assert (await follower.update()).version == 1
        assert holds(mine, 1)
        info = await trainer.describe("m")
        assert (info.lineage, info.mark, [v.version for v in info.versions]) == (1, 1, [1])
        async with published.mutate(2):
            write(source, 3)
        assert (await follower.update(at_least=2)).version == 2
        assert holds(mine, 3)


async def test_watch_gives_a_number_again_that_has_other_content_after_a_rollback() -> None:
    """Also where nothing was taken from it in between."""
    async with cluster("trainer", "watcher") as c:
        trainer, hub = c.hubs
        weights = await trainer.register("m", tensors(1))
        for number in (1, 2):
            async with weights.mutate(number):
                pass
        watcher = hub.watch("m")
        before = await anext(watcher)
        await trainer.rollback("m", to=1)
        async with weights.mutate(2):
            pass
        await until(lambda: hub.newest("m") not in (None, before))
        await hub.wait_for("m", at_least=2)
        with anyio.fail_after(WAIT_S):
            after = await anext(watcher)
        assert (before.version, after.version) == (2, 2)
        assert before.content_id != after.content_id


async def test_newest_and_wait_for_are_right_as_soon_as_rollback_returns() -> None:
    async with cluster("trainer", "other") as c:
        trainer, other = c.hubs
        published = await trainer.register("m", tensors(1))
        await published.publish(90)
        async with published.mutate(95):
            pass
        assert (await trainer.wait_for("m", at_least=95)).version == 95
        kept = await other.register("m", tensors())
        await kept.replicate()
        await trainer.rollback("m", to=92)
        newest = trainer.newest("m")
        # 90 is held by nobody, but it is what the lineage has
        assert newest is None or newest.version == 90
        with pytest.raises(OperationTimeout, match="version 95 of 'm' was not published"):
            await trainer.wait_for("m", at_least=95, timeout=0.05)
        async with anyio.create_task_group() as tasks:
            found: list[tuple[int, str]] = []

            async def wait() -> None:
                info = await trainer.wait_for("m", at_least=95)
                found.append((info.version, info.content_id))

            tasks.start_soon(wait)
            await until(lambda: trainer._worker.version_watches.listeners("m") > 0)
            async with published.mutate(93):
                pass
            async with published.mutate(95):
                pass
        info = await trainer.describe("m")
        assert found == [(95, info.versions[-1].content_id)]


async def test_wait_for_does_not_return_what_was_rolled_back_before_it_woke() -> None:
    async with cluster("watcher") as c:
        (hub,) = c.hubs
        first, older, again = (
            VersionInfo("m", number, f"id{place}", 1, 1)
            for place, number in enumerate((95, 90, 95))
        )

        def hear(*infos: VersionInfo) -> None:
            for info in infos:
                hub._worker.version_watches.announced(Announce("m", info))

        found: list[VersionInfo] = []

        async def wait() -> None:
            found.append(await hub.wait_for("m", at_least=95))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await until(lambda: hub._worker.version_watches.listeners("m") > 0)
            # its answer comes after the one to the question for news, which knows of none
            await hub.describe()
            hub._thread.post(partial(hear, first, older))
            await until(lambda: hub.newest("m") == older)
            hub._thread.post(partial(hear, again))
        assert found == [again]


async def test_a_reader_in_mid_fetch_of_what_is_rolled_back() -> None:
    with gated(2) as gate:
        async with cluster("trainer", "reader") as c:
            trainer, reader = c.hubs
            await (await trainer.register("m", tensors(1))).publish(5)
            weights = await reader.register("m", tensors())
            async with anyio.create_task_group() as tasks:
                problems: list[VersionUnavailable] = []

                async def fetch() -> None:
                    with pytest.raises(
                        VersionUnavailable, match="was rolled back to 4; ask again"
                    ) as caught:
                        await weights.replicate(5)
                    problems.append(caught.value)

                tasks.start_soon(fetch)
                await until(lambda: gate.holds)
                await reader.rollback("m", to=4)
            assert (problems[0].retryable, problems[0].memory, weights.state) == (
                True,
                "torn",
                "torn",
            )


async def test_what_rollback_refuses() -> None:
    async with cluster("trainer") as c:
        (trainer,) = c.hubs
        with pytest.raises(VersionConflict, match="nothing was published under it yet"):
            await trainer.rollback("m", to=0)
        await (await trainer.register("m", tensors(1))).publish(3)
        with pytest.raises(VersionConflict, match="its newest number is 3"):
            await trainer.rollback("m", to=4)
        for to in (-1, 2**63, "3", True):
            with pytest.raises(StateError, match="is not a version"):
                await trainer.rollback("m", to=to)  # type: ignore[arg-type]
        with pytest.raises(StateError, match="cannot name a model"):
            await trainer.rollback("", to=1)


async def test_rollback_and_retain_outlive_the_coordinator(tmp_path: Path) -> None:
    async with nothing_left():
        async with (
            tensorhub.serve(token="", options=OPTIONS, state_dir=tmp_path) as coordinator,
            connect(coordinator.address) as hub,
        ):
            published = await hub.register("m", tensors(1))
            for number in (1, 2, 3):
                async with published.mutate(number):
                    pass
            await hub.rollback("m", to=1)
            await hub.retain("m", latest=3)
        async with (
            tensorhub.serve(token="", options=OPTIONS, state_dir=tmp_path) as coordinator,
            connect(coordinator.address) as hub,
        ):
            info = await hub.describe("m")
            assert (info.lineage, info.mark, info.retain, [v.version for v in info.versions]) == (
                1,
                1,
                3,
                [1],
            )
            with pytest.raises(VersionConflict, match="the newest number so far is 1"):
                await (await hub.register("m", tensors(1))).publish(1)
            assert (await (await hub.register("m", tensors(1))).publish(2)).version == 2


# --------------------------------------------------------------------------------------------------
# retain


async def test_the_last_holder_of_a_retained_version_stays_published() -> None:
    async with cluster("trainer", "keeper") as c:
        trainer, keeper = c.hubs
        await trainer.retain("m", latest=1)  # nobody registered it yet
        source, kept = tensors(1), tensors()
        published = await trainer.register("m", source)
        await published.publish(1)
        for leave in (published.unpublish(timeout=0.05), closing(published), mutating(published)):
            with pytest.raises(RetentionError, match="lower retain") as caught:
                await leave
            assert (caught.value.retryable, caught.value.memory) == (True, "intact")
            assert (published.state, published.version) == ("ready", 1)
        info = await trainer.describe("m")
        assert (info.retain, [v.retained for v in info.versions]) == (1, [True])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(published.unpublish)
            await until(lambda: published.state == "draining")
            weights = await keeper.register("m", kept)
            assert (await weights.replicate()).version == 1  # from the one that wants to leave
        assert published.state == "empty"
        assert holds(kept, 1)
        await trainer.retain("m", latest=0)
        await weights.unpublish()


async def closing(weights: Weights) -> None:
    with anyio.fail_after(WAIT_S):
        await weights._thread.call(weights._handle.close, 0.05)


async def mutating(weights: Weights) -> None:
    async with weights.mutate(2, timeout=waited_out_s(0.05)):
        raise AssertionError("it is published still")


async def test_who_leaves_without_waiting() -> None:
    async with cluster("trainer", "spot") as c:
        trainer, spot = c.hubs
        await trainer.retain("m", latest=1)
        published = await trainer.register("m", tensors(1))
        await published.publish(1)
        weights = await spot.register("m", tensors(), spot=True)
        await weights.replicate()
        await weights.unpublish()
        await published.close(abandon=True)
        assert published.state == "closed"
        await (await trainer.register("m", tensors(1))).publish(2)
    # leaving the hub has not waited either


async def test_what_retain_refuses() -> None:
    async with cluster("trainer") as c:
        for latest in (-1, 2**63, 1.0, "1", True):
            with pytest.raises(StateError, match="give the number of versions to keep, 0 or more"):
                await c.hubs[0].retain("m", latest=latest)  # type: ignore[arg-type]
        assert await c.hubs[0].describe() == ()


# --------------------------------------------------------------------------------------------------
# pin


async def test_a_pinned_version_stays_for_the_length_of_the_block() -> None:
    async with cluster("trainer", "evaluator") as c:
        trainer, evaluator = c.hubs
        published = await trainer.register("m", tensors(1))
        await published.publish(1)
        async with evaluator.pin("m", 1), evaluator.pin("m", 1):
            info = await trainer.describe("m")
            assert [v.retained for v in info.versions] == [True]
            with pytest.raises(RetentionError, match=r"is pinned by 2 block"):
                await published.unpublish(timeout=0.05)
        await published.unpublish()


async def test_what_cannot_be_pinned() -> None:
    async with cluster("trainer", "evaluator") as c:
        trainer, evaluator = c.hubs
        with pytest.raises(VersionUnavailable, match="version 1 of 'm' cannot be pinned"):
            async with evaluator.pin("m", 1):
                pass
        with pytest.raises(StateError, match="is not a version"):
            async with evaluator.pin("m", "latest"):  # type: ignore[arg-type]
                pass
        published = await trainer.register("m", tensors(1))
        await published.publish(1)
        with pytest.raises(ZeroDivisionError):
            async with evaluator.pin("m", 1):
                _ = 1 // 0
        await published.unpublish()


async def test_a_pin_ends_with_its_cancelled_block_and_with_its_hub() -> None:
    async with cluster("trainer") as c:
        published = await c.hubs[0].register("m", tensors(1))
        await published.publish(1)

        async def hold(hub: Hub, held: anyio.Event) -> None:
            async with hub.pin("m", 1):
                held.set()
                await anyio.sleep_forever()

        async with connect(c.address, "evaluator") as hub, anyio.create_task_group() as tasks:
            held = anyio.Event()
            tasks.start_soon(hold, hub, held)
            await held.wait()
            tasks.cancel_scope.cancel()
        await published.unpublish()
        await published.publish(2)
        async with connect(c.address, "evaluator") as hub:
            await hub._thread.call(hub._worker.pins.pin, "m", 2, WAIT_S)
        await published.unpublish()


async def test_a_pin_outlives_the_coordinator(tmp_path: Path) -> None:
    async with nothing_left(), contextlib.AsyncExitStack() as stack:
        async with tensorhub.serve(token="", options=OPTIONS, state_dir=tmp_path) as coordinator:
            port = int(coordinator.address.rpartition(":")[2])
            trainer = await stack.enter_async_context(connect(coordinator.address, "trainer"))
            evaluator = await stack.enter_async_context(connect(coordinator.address, "evaluator"))
            published = await trainer.register("m", tensors(1))
            await published.publish(1)
            await stack.enter_async_context(evaluator.pin("m", 1))
        async with tensorhub.serve(port=port, token="", options=OPTIONS, state_dir=tmp_path):
            info = await trainer.describe("m")
            assert [v.retained for v in info.versions] == [True]
            await until(lambda: worker_of(evaluator).link.online)
            await stack.aclose()


async def test_a_pin_that_is_lost_is_told_at_the_end_of_its_block() -> None:
    """The coordinator comes back without its state: nothing of that model is known any more."""
    async with nothing_left(), contextlib.AsyncExitStack() as stack:
        async with tensorhub.serve(token="", options=OPTIONS) as coordinator:
            port = int(coordinator.address.rpartition(":")[2])
            hub = await stack.enter_async_context(connect(coordinator.address, "evaluator"))
            published = await hub.register("m", tensors(1))
            await published.publish(1)
            pinned = hub.pin("m", 1)
            await pinned.__aenter__()
        async with tensorhub.serve(port=port, token="", options=OPTIONS):
            await until(lambda: bool(hub._worker.pins.lost))
            with pytest.raises(
                LeaseLost, match="the pin of version 1 of 'm' was lost while"
            ) as caught:
                await pinned.__aexit__(None, None, None)
            assert caught.value.retryable
            await stack.aclose()
