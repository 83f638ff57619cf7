"""Publishes that meet while a real store writes: numbers keep their order, and who waits behind a
failed write goes on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import anyio
import pytest

from tensorhub.coordinator import Entry, Publication
from tensorhub.errors import CoordinatorUnavailable, VersionConflict
from tensorhub.runtime.control.store import SqliteStore
from tests.rig import WAIT_S, tensors, until
from tests.test_coordinator_restart import cluster


class Disk:
    """A store's disk, which holds each publication up until it is told to go on, and fails where it
    is told to.
    """

    def __init__(self) -> None:
        self.writing, self.goes_on = threading.Event(), threading.Event()
        self.fails = False

    def pass_one(self) -> None:
        self.writing.set()
        assert self.goes_on.wait(WAIT_S)
        if self.fails:
            self.fails = False
            raise OSError("disk full")


@contextlib.contextmanager
def slow_disk() -> Iterator[Disk]:
    disk, write = Disk(), SqliteStore.write

    def slow(store: SqliteStore, entries: Sequence[Entry]) -> None:
        if any(isinstance(entry, Publication) for entry in entries):
            disk.pass_one()
        write(store, entries)

    with patch.object(SqliteStore, "write", slow):
        yield disk


async def test_a_store_in_which_numbers_have_met_can_be_opened_again(tmp_path: Path) -> None:
    with slow_disk() as disk:
        async with cluster("first", "second", "critic", state_dir=tmp_path) as (coordinator, hubs):
            first, second = [await hub.register("m", tensors(1)) for hub in hubs[:2]]
            critic = await hubs[2].register("critic", tensors(1))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(critic.publish, 9)
                await until(disk.writing.is_set)
                tasks.start_soon(first.publish, 5)
                await until(lambda: first._handle.member.running is not None)
                await hubs[0].describe()  # it was heard after the publish
                with pytest.raises(VersionConflict, match="5 is being recorded") as caught:
                    await second.publish(3)
                assert caught.value.retryable
                disk.goes_on.set()
            assert (first.version, second.version, critic.version) == (5, None, 9)
            await coordinator.restart(*hubs)
            described = {
                info.model: [v.version for v in info.versions] for info in await hubs[0].describe()
            }
            assert described == {"m": [5], "critic": [9]}
            assert (await second.publish(6)).version == 6


async def test_a_publish_behind_a_write_that_fails_is_recorded(tmp_path: Path) -> None:
    with slow_disk() as disk:
        async with cluster("first", "second", state_dir=tmp_path) as (coordinator, hubs):
            first, second = [
                await hub.register(model, tensors(1))
                for hub, model in zip(hubs, ("m", "n"), strict=True)
            ]
            errors: list[CoordinatorUnavailable] = []

            async def fails() -> None:
                with pytest.raises(
                    CoordinatorUnavailable, match="disk full; see its state_dir"
                ) as caught:
                    await first.publish(1)
                errors.append(caught.value)

            disk.fails = True
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fails)
                await until(disk.writing.is_set)
                tasks.start_soon(second.publish, 1)
                await until(lambda: second._handle.member.running is not None)
                await hubs[1].describe()
                disk.goes_on.set()
            assert [(error.retryable, error.memory) for error in errors] == [(True, "intact")]
            assert (first.version, second.version) == (None, 1)
            assert (await first.publish(1)).version == 1
            await coordinator.restart(*hubs)
            assert [info.mark for info in await hubs[0].describe()] == [1, 1]
