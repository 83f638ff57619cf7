"""Readers of another layout than the trainer's, in processes of their own, and those that they read
from are killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.processes.child_processes import ChildProcesses, Pending, Process
from tests.processes.stories import until

OPTIONS = {"chunk_bytes": 2**18, "stall_timeout_s": 600.0}
NOT_FOR_LONG = {"lease_s": 1.0, "drain_grace_s": 0.5}


def coordinator(processes: ChildProcesses, **options: Any) -> str:
    address: str = processes.process("coordinator").do("serve", **{**NOT_FOR_LONG, **options})
    return address


def process_of(
    processes: ChildProcesses,
    address: str,
    name: str,
    gate: int | None = None,
    module: str = "tests.processes.actor",
) -> Process:
    process = processes.process(name, module=module)
    if gate is not None:
        process.do("gate", arrivals=gate)
    process.do("connect", address=address, name=name, transports=["tcp"], **OPTIONS)
    return process


class Group:
    """Ranks of one group, each in one of these processes, in turn; `parts`: so many different
    ones.
    """

    def __init__(self, name: str, cut: str, parts: int, processes: Sequence[Process]) -> None:
        self.name, self.cut, self.parts = name, cut, parts
        self.ranks = [(f"{name}{rank}", process) for rank, process in enumerate(processes)]
        size = len(processes)
        for rank, (handle, process) in enumerate(self.ranks):
            what = {"cut": cut, "part": rank % parts, "parts": parts, "name": handle}
            process.do("register_part", **what, group=name, rank=rank, world_size=size)

    def begin(self, what: str, **arguments: Any) -> list[Pending]:
        return [process.begin(what, name=handle, **arguments) for handle, process in self.ranks]

    def do(self, what: str, **arguments: Any) -> list[Any]:
        return [call.result() for call in self.begin(what, **arguments)]

    def publish(self, version: int) -> None:
        self.do("write_part", content=version)
        assert self.do("publish", version=version) == [version] * len(self.ranks)

    def has(self, content: int) -> bool:
        return all(self.do("has_part", content=content))


def held(engine: Process) -> list[str]:
    """Whom this process reads from, once the gate holds its lanes to all of them."""
    engine.do("gate_holds")
    sources: list[str] = engine.do("sources")
    engine.do("gate_holds", lanes=len(sources))
    return sources


def outcomes(reports: Sequence[dict[str, Any]], source: str) -> list[str]:
    return [report["sources"][source] for report in reports if source in report["sources"]]


def test_a_rank_of_hsdp_is_killed_in_mid_read(processes: ChildProcesses) -> None:
    """2 x 2: each part of the model is on two ranks. Its readers go on at the other one, and
    nothing is read again.
    """
    address = coordinator(processes)
    first, others = (process_of(processes, address, name) for name in ("first", "others"))
    trainer = Group("hsdp", "rows", 2, [first, others, others, others])
    trainer.publish(1)
    engine = process_of(processes, address, "engine", gate=6)
    readers = Group("r", "columns", 2, [engine, engine])
    fills = readers.begin("replicate")
    assert "first" in held(engine)
    first.kill()
    engine.do("gate_open")
    reports = [fill.result() for fill in fills]
    assert "lost" in outcomes(reports, "first")
    assert [(report["version"], report["reread_bytes"]) for report in reports] == [(1, 0), (1, 0)]
    assert readers.has(1)


def test_what_is_left_of_a_retained_version_of_hsdp_is_handed_over(
    processes: ChildProcesses,
) -> None:
    """2 x 2: one rank is killed. The other ranks leave, and workers with room keep all parts of the
    model.
    """
    address = coordinator(processes)
    first, others = (process_of(processes, address, name) for name in ("first", "others"))
    trainer = Group("hsdp", "rows", 2, [first, others, others, others])
    store = processes.process("store")
    store.do("connect", address=address, name="store", host_memory_bytes=2**28, **OPTIONS)
    others.do("retain", latest=1)
    trainer.publish(1)
    first.kill()
    until(others, lambda model: "first" not in model["workers"])
    for leaving in [
        others.begin("unpublish", name=f"hsdp{rank}", timeout=50) for rank in (1, 2, 3)
    ]:
        leaving.result()
    others.kill()
    engine = process_of(processes, address, "engine")
    readers = Group("r", "columns", 2, [engine, engine])
    assert [(report["version"], set(report["sources"])) for report in readers.do("replicate")] == [
        (1, {"store"})
    ] * 2
    assert readers.has(1)


@pytest.mark.parametrize("is_trainer_there", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_who_has_read_across_layouts_first_is_killed_and_those_who_follow_it_go_on(
    processes: ChildProcesses, is_trainer_there: bool
) -> None:
    """FSDP 4: the first group of its layout is complete, and the next ones read from it, chunk by
    chunk.
    """
    address = coordinator(processes)
    train = process_of(processes, address, "trainer")
    trainer = Group("fsdp", "rows", 4, [train] * 4)
    trainer.publish(1)
    bridge = process_of(processes, address, "bridge")
    assert {
        source
        for report in Group("b", "columns", 2, [bridge] * 2).do("replicate")
        for source in report["sources"]
    } == {"trainer"}
    if not is_trainer_there:
        other = process_of(processes, address, "other")
        Group("o", "columns", 2, [other] * 2).do("replicate")
    engine = process_of(processes, address, "engine", gate=6)
    readers = Group("r", "columns", 2, [engine] * 2)
    fills = readers.begin("replicate")
    [source, *_] = sources = held(engine)
    assert sources == [source] * 2
    assert source == "bridge" or not is_trainer_there
    (bridge if source == "bridge" else other).kill()
    if not is_trainer_there:
        train.kill()
    engine.do("gate_open")
    reports = [fill.result() for fill in fills]
    assert outcomes(reports, source) == ["lost"] * 2
    assert [(report["version"], report["reread_bytes"]) for report in reports] == [(1, 0), (1, 0)]
    assert readers.has(1)
    assert ("trainer" in reports[0]["sources"]) is is_trainer_there


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mesh", [[2, 2], [4]], ids=["HSDP 2 x 2", "FSDP 4"])
def test_real_fsdp_and_a_process_is_killed_in_mid_read(
    processes: ChildProcesses, tmp_path: Path, mesh: list[int]
) -> None:
    """HSDP: a trainer's rank, whose equal is read instead. FSDP: the group that was complete first,
    which others follow.
    """
    address, folder = coordinator(processes), str(tmp_path)
    trainers = [
        process_of(processes, address, f"trainer{rank}", module="tests.processes.fsdp_actor")
        for rank in range(4)
    ]
    for joining in [
        each.begin("join", rank=rank, mesh=mesh, folder=folder)
        for rank, each in enumerate(trainers)
    ]:
        joining.result(120)
    for training in [each.begin("optimize", seed=1, folder=folder) for each in trainers]:
        training.result(120)
    for rank, trainer in enumerate(trainers):
        trainer.do("register_model", group="trainer", rank=rank, world_size=4)
    assert [
        each.result() for each in [trainer.begin("publish", version=1) for trainer in trainers]
    ] == [1] * 4

    def engine(name: str, gate: int | None = None) -> Process:
        made = process_of(processes, address, name, gate, module="tests.processes.fsdp_actor")
        for rank in range(2):
            made.do("register_columns", rank=rank, world_size=2, group=name)
        return made

    def fill(made: Process) -> list[Pending]:
        return [made.begin("replicate", name=f"w{rank}") for rank in range(2)]

    victim = trainers[0]
    if len(mesh) == 1:
        victim = engine("bridge")
        for call in fill(victim):
            call.result()
    late = engine("late", gate=6)
    fills = fill(late)
    assert victim.name in held(late)
    victim.kill()
    late.do("gate_open")
    reports = [call.result() for call in fills]
    assert "lost" in outcomes(reports, victim.name)
    assert [(report["version"], report["reread_bytes"]) for report in reports] == [(1, 0), (1, 0)]
    assert all(late.do("is_trained", rank=rank, world_size=2, folder=folder) for rank in range(2))
