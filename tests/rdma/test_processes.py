"""Processes read each other's memory by RDMA: while versions change, and while a source dies or
takes its memory back.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes.child_processes import ChildProcesses, Process, child_processes
from tests.processes.stories import a_source_is_killed_in_mid_read, memory_is_taken_back_in_mid_read

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(300)]

MIB = 2**20
NBYTES = 64 * MIB
OPTIONS = {"chunk_bytes": MIB, "stall_timeout_s": 600.0, "transports": ["rdma"]}
GATE = {"arrivals": 5, "transport": "rdma"}


@pytest.fixture
def processes() -> Iterator[ChildProcesses]:
    with child_processes("asyncio") as made:
        yield made


def cluster(processes: ChildProcesses, integrity: bool = True) -> tuple[Process, str, Process]:
    """A coordinator, its address, and a trainer that has published version 1."""
    coordinator = processes.process("coordinator")
    address = coordinator.do("serve", lease_s=5.0, drain_grace_s=0.5)
    trainer = processes.worker(
        address, "trainer", NBYTES, options=OPTIONS | {"integrity": integrity}
    )
    trainer.do("write", content=1)
    trainer.do("publish", version=1)
    return coordinator, address, trainer


def test_versions_are_replicated_one_reader_behind_the_other(processes: ChildProcesses) -> None:
    """The second reader has the first for its source while that fills, and both read each version
    into the same memory.
    """
    _, address, trainer = cluster(processes)
    first = processes.worker(address, "first", NBYTES, gate=GATE, options=OPTIONS)
    second = processes.worker(address, "second", NBYTES, options=OPTIONS)
    filling = first.begin("replicate")
    first.do("gate_holds")
    behind = second.begin("replicate")
    while not second.do("sources"):
        pass
    first.do("gate_open")
    reports = [filling.result(), behind.result()]
    assert {transport for report in reports for transport in report["transports"].values()} == {
        "rdma"
    }
    assert "first" in reports[1]["transports"]
    for version in (2, 3):
        trainer.do("mutate", version=version)
        for reader in (first, second):
            report = reader.do("update", at_least=version)
            assert (report["version"], report["bytes_read"], report["reread_bytes"]) == (
                version,
                NBYTES,
                0,
            )
            assert set(report["transports"].values()) == {"rdma"}
            assert reader.do("contents") == [version]


def test_a_source_that_is_killed_in_mid_read_is_left_for_another(processes: ChildProcesses) -> None:
    _, address, trainer = cluster(processes)
    a_source_is_killed_in_mid_read(processes, address, trainer, NBYTES, GATE, OPTIONS)


def test_memory_that_is_taken_back_is_not_committed_though_its_reader_goes_on(
    processes: ChildProcesses,
) -> None:
    coordinator, address, trainer = cluster(processes, integrity=False)
    reader = processes.worker(
        address, "reader", NBYTES, gate=GATE | {"heeds_cuts": False}, options=OPTIONS
    )
    memory_is_taken_back_in_mid_read(coordinator, trainer, reader, timeout_s=20.0)
