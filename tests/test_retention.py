"""What keeps versions, and what takes them back: rollback, retain and pin through the public API."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

import tensorhub
from tensorhub.errors import OperationTimeout, StateError, VersionConflict, VersionUnavailable
from tests.rig import OPTIONS, cluster, connect, gated, holds, nothing_left, tensors, until, write

# --------------------------------------------------------------------------------------------------------- rollback


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
        assert newest is None or newest.version == 90  # 90 is held by nobody, but it is what the lineage has
        with pytest.raises(OperationTimeout, match="version 95 of 'm' was not published"):
            await trainer.wait_for("m", at_least=95, timeout=0.05)
        async with anyio.create_task_group() as tasks:
            found: list[tuple[int, str]] = []

            async def wait() -> None:
                info = await trainer.wait_for("m", at_least=95)
                found.append((info.version, info.content_id))

            tasks.start_soon(wait)
            await until(lambda: bool(trainer._worker._listeners.get("m")))
            async with published.mutate(93):
                pass
            async with published.mutate(95):
                pass
        info = await trainer.describe("m")
        assert found == [(95, info.versions[-1].content_id)]


async def test_a_reader_in_mid_fetch_of_what_is_rolled_back() -> None:
    with gated(2) as gate:
        async with cluster("trainer", "reader") as c:
            trainer, reader = c.hubs
            await (await trainer.register("m", tensors(1))).publish(5)
            weights = await reader.register("m", tensors())
            async with anyio.create_task_group() as tasks:
                problems: list[VersionUnavailable] = []

                async def fetch() -> None:
                    with pytest.raises(VersionUnavailable, match="was rolled back to 4; ask again") as caught:
                        await weights.replicate()
                    problems.append(caught.value)

                tasks.start_soon(fetch)
                await until(lambda: gate.holds)
                await reader.rollback("m", to=4)
            assert (problems[0].retryable, problems[0].memory, weights.state) == (True, "torn", "torn")


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


async def test_a_rollback_outlives_the_coordinator(tmp_path: Path) -> None:
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
        async with (
            tensorhub.serve(token="", options=OPTIONS, state_dir=tmp_path) as coordinator,
            connect(coordinator.address) as hub,
        ):
            info = await hub.describe("m")
            assert (info.lineage, info.mark, [v.version for v in info.versions]) == (1, 1, [1])
            with pytest.raises(VersionConflict, match="the newest number so far is 1"):
                await (await hub.register("m", tensors(1))).publish(1)
            assert (await (await hub.register("m", tensors(1))).publish(2)).version == 2
