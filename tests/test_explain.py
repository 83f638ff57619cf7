"""`hub.explain` and `hub.events` over real sockets, also of calls that run, wait or have failed."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from pathlib import Path

import anyio
import pytest

import tensorhub
from tensorhub import sync
from tensorhub.errors import InvalidType, InvalidValue, OperationTimeout, VersionUnavailable
from tensorhub.observed import Explanation
from tensorhub.types import VersionInfo
from tests.cli.processes import run
from tests.rig import (
    OPTIONS,
    Restartable,
    cluster,
    connect,
    nothing_left,
    published,
    tensors,
)

HOOK_S = 0.3


def check(found: Explanation) -> dict[str, float]:
    """Its parts add up, and what is not attributed is little. By name."""
    assert math.isclose(sum(part.seconds for part in found.parts), found.seconds, rel_tol=1e-9)
    by_name: dict[str, float] = {}
    for part in found.parts:
        assert part.seconds >= 0
        by_name[part.name] = by_name.get(part.name, 0.0) + part.seconds
    return by_name


async def told(hub: tensorhub.Hub) -> Explanation:
    """Once the workers have told their timings."""
    found: Explanation | None = None
    while found is None or not found.links:
        found = await hub.explain("m")
        await anyio.lowlevel.checkpoint()
    return found


async def test_the_seconds_of_an_update_have_names_and_add_up() -> None:
    async with cluster("trainer", "reader") as c:
        await published(c.hubs[0])
        weights = await c.hubs[1].register("m", tensors())

        async def pause(info: VersionInfo) -> None:
            await anyio.sleep(HOOK_S)

        report = await weights.update(before_write=pause)
        found = await told(c.hubs[0])
        parts = check(found)
        assert found.seconds == pytest.approx(report.seconds, rel=0.2)
        assert parts["before_write"] >= HOOK_S
        # on a busy machine another part may be the longest
        longest = max(parts, key=parts.__getitem__)
        assert longest != "before_write" or "before_write on reader" in str(found)
        # (that it is under 2 % is for a machine that has room: `python -m benches bottlenecks`)
        assert parts.get("other", 0.0) <= 0.2 * found.seconds
        assert (found.call, found.version, found.group) == ("update", 1, found.key.group)
        assert [link.source for link in found.links] == ["trainer"]
        assert found.unsure_s < found.seconds
        with pytest.raises(VersionUnavailable, match="no update of 'm' to version 2"):
            await c.hubs[0].explain("m", 2)


async def test_what_would_help_is_told() -> None:
    async with cluster("trainer", "reader") as c:
        await published(c.hubs[0])
        weights = await c.hubs[1].register("m", tensors())

        async def pause(info: VersionInfo) -> None:
            await anyio.sleep(HOOK_S)

        await weights.update(before_write=pause)
        found = await told(c.hubs[0])
        explaining = partial(run, "explain", "m", "--address", c.address)
        shown = await anyio.to_thread.run_sync(explaining)
        assert shown.returncode == 0, shown.stderr
        assert "without before_write: 0." in shown.stdout
        assert any(each.startswith("without before_write: 0.") for each in found.help)


async def test_what_runs_and_what_has_failed_is_explained_too() -> None:
    async with cluster("trainer", "reader") as c:
        await published(c.hubs[0])
        half = await c.hubs[1].register("m", tensors(), group="two", rank=0, world_size=2)
        with pytest.raises(OperationTimeout):
            await half.replicate(timeout=HOOK_S)
        found = await c.hubs[0].explain("m", group="two")
        parts = check(found)
        assert parts["ranks"] > 0  # most of it, where the call reaches the coordinator at once
        assert str(found).startswith("OperationTimeout: ")
        assert "no call of rank 1" in str(found)
        assert found.seconds >= HOOK_S * 0.9
        alone = await c.hubs[1].register("m", tensors(), group="alone")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(alone.update, at_least=2))
            waits: Explanation | None = None
            while waits is None:
                with contextlib.suppress(VersionUnavailable):
                    waits = await c.hubs[0].explain("m", group="alone")
            tasks.cancel_scope.cancel()
        assert waits is not None
        assert [part.name for part in waits.parts] == ["version"]
        assert str(waits).startswith("running: ")


async def test_events_are_told_in_order_and_followed_over_a_restart(tmp_path: Path) -> None:
    async with nothing_left():
        coordinator = Restartable(tmp_path)
        await coordinator.start()
        async with connect(coordinator.address, "trainer") as hub:
            weights = await published(hub)
            seen = [event async for event in hub.events()]
            assert [event.number for event in seen] == list(range(1, len(seen) + 1))
            assert [event.kind for event in seen] == ["serving", "joined", "published"]
            assert (seen[1].worker, seen[2].model, seen[2].version) == ("trainer", "m", 1)
            assert [each async for each in hub.events(after=2)] == seen[2:]
            async with connect(coordinator.address, "looks only") as other:
                assert await other.describe()
            assert [each async for each in hub.events(after=seen[-1])] == []
            followed = hub.events(follow=True, after=3)
            await weights.unpublish()
            assert (await anext(followed)).kind == "unpublished"
            await coordinator.restart(hub)
            assert (await anext(followed)).number == 1
            await followed.aclose()  # type: ignore[attr-defined]
            anew = [each async for each in hub.events(after=seen[-1])]
            assert (anew[0].number, anew[0].epoch) == (1, seen[-1].epoch + 1)
            with pytest.raises(InvalidValue, match="after=-1: give an event, its number"):
                await anext(hub.events(after=-1))
            with pytest.raises(InvalidType):
                await anext(hub.events(after="1"))  # type: ignore[arg-type]
        await coordinator.stop()


@pytest.mark.heavy
def test_the_blocking_form_and_the_command_say_the_same() -> None:
    with (
        sync.serve(token="", options=OPTIONS) as coordinator,
        sync.connect(coordinator.address, name="trainer", token="", options=OPTIONS) as trainer,
        sync.connect(coordinator.address, name="reader", token="", options=OPTIONS) as reader,
    ):
        trainer.register("m", tensors(1)).publish(1)
        reader.register("m", tensors(), group="g").replicate()
        found = trainer.explain("m", 1, group="g")
        check(found)
        assert [event.kind for event in trainer.events()][-3:] == ["published", "joined", "updated"]
        for event in trainer.events(follow=True):
            assert event.kind == "serving"
            break
        at = ("--address", coordinator.address)
        shown = run("explain", "m", "1", "--group", "g", *at)
        assert shown.returncode == 0, shown.stderr
        assert "replicate of 'm' to version 1 by g" in shown.stdout
        assert "seconds" in shown.stdout
        unknown = run("explain", "m", "7", *at)
        assert (unknown.returncode, unknown.stdout) == (1, "")
        assert "error: VersionUnavailable: no update of 'm' to version 7" in unknown.stderr
