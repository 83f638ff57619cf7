"""Ranks of another layout, each a process: what they leave unread, and one that is killed while it looks for that."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes.child_processes import ChildProcesses, Failed, Process

ROWS = 101


def rank_of(processes: ChildProcesses, address: str, name: str, first: int, end: int, **settings: Any) -> Process:
    process = processes.process(name)
    process.do("connect", address=address, name=name, transports=["tcp"])
    process.do("register_rows", rows=ROWS, first=first, end=end, **settings)
    return process


def published(processes: ChildProcesses) -> str:
    """A version of two ranks."""
    address: str = processes.process("coordinator").do("serve", lease_s=1.0, drain_grace_s=0.5)
    settings: dict[str, Any] = {"says_all": True, "group": "t", "world_size": 2}
    trainers = [rank_of(processes, address, f"t{r}", 51 * r, 51 + 50 * r, rank=r, **settings) for r in range(2)]
    for rank, trainer in enumerate(trainers):
        trainer.do("paint", value=10 + rank)
    promises = [trainer.begin("publish", version=1) for trainer in trainers]
    assert [promise.result() for promise in promises] == [1, 1]
    return address


def test_what_no_process_of_a_group_reads_is_said_to_each_of_them(processes: ChildProcesses) -> None:
    address = published(processes)
    unread: dict[str, Any] = {"group": "r", "world_size": 2}
    readers = [rank_of(processes, address, f"r{r}", 60 * r, 40 + 60 * r, rank=r, **unread) for r in range(2)]
    fills = [reader.begin("replicate") for reader in readers]
    for fill in fills:
        with pytest.raises(Failed, match=r"\[40:60, 0:512\], \[100:101, 0:512\] .* is read by no rank") as caught:
            fill.result()
        assert (caught.value.kind, caught.value.memory) == ("ManifestMismatch", "intact")
    assert [reader.do("state") for reader in readers] == [["empty", None]] * 2
    assert [reader.do("colours") for reader in readers] == [[0]] * 2
    partial = [
        rank_of(processes, address, f"p{r}", 60 * r, 40 + 60 * r, rank=r, group="p", world_size=2, partial=True)
        for r in range(2)
    ]
    fills = [reader.begin("replicate") for reader in partial]
    assert [fill.result()["version"] for fill in fills] == [1, 1]
    assert [reader.do("colours") for reader in partial] == [[10], [11]]


def test_who_checks_that_is_killed_and_another_takes_its_place(processes: ChildProcesses) -> None:
    address = published(processes)
    group: dict[str, Any] = {"group": "r", "world_size": 3}
    cuts = (0, 20, 70, ROWS)
    readers = [rank_of(processes, address, f"r{r}", *cuts[r : r + 2], rank=r, **group) for r in range(3)]
    readers[0].do("hold_checks")
    fills = [reader.begin("replicate") for reader in readers]
    readers[0].do("checks")
    readers[0].kill()
    for fill in fills[1:]:
        with pytest.raises(Failed, match="worker 'r0' was not heard of") as caught:
            fill.result()
        assert (caught.value.kind, caught.value.retryable, caught.value.memory) == ("GroupAborted", True, "intact")
    readers[0] = rank_of(processes, address, "again", 0, 20, rank=0, **group)
    fills = [reader.begin("replicate") for reader in readers]
    assert [fill.result()["version"] for fill in fills] == [1, 1, 1]
    assert [reader.do("colours") for reader in readers] == [[10], [10, 11], [11]]
