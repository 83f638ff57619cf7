"""One process reads another one's memory: while that changes, dies or stands still, and where the
kernel forbids it.
"""

from __future__ import annotations

import os

import pytest

from tensorhub.transport import cma
from tests.processes.child_processes import ChildProcesses, Process
from tests.processes.stories import memory_is_taken_back_in_mid_read

pytestmark = pytest.mark.skipif(cma.fault_here() is not None, reason=str(cma.fault_here()))

MIB = 2**20
NBYTES = 8 * MIB
OPTIONS = {"chunk_bytes": 65_536, "stall_timeout_s": 600.0}
GATE = {"arrivals": 5, "transport": "cma"}


def cluster(processes: ChildProcesses, integrity: bool = True) -> tuple[Process, str, Process]:
    """A coordinator, its address, and a trainer that has published version 1."""
    coordinator = processes.process("coordinator")
    address = coordinator.do("serve", lease_s=1.0, drain_grace_s=0.5)
    trainer = processes.worker(
        address, "trainer", NBYTES, options=OPTIONS | {"integrity": integrity}
    )
    trainer.do("write", content=1)
    trainer.do("publish", version=1)
    return coordinator, address, trainer


@pytest.mark.parametrize("integrity", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_it_is_chosen_between_processes_of_one_host(
    processes: ChildProcesses, integrity: bool
) -> None:
    _, address, trainer = cluster(processes, integrity)
    readers = [processes.worker(address, f"reader{number}", NBYTES) for number in range(2)]
    fills = [reader.begin("replicate") for reader in readers]
    for fill, reader in zip(fills, readers, strict=True):
        report = fill.result()
        assert (report["version"], report["bytes_read"], report["reread_bytes"]) == (1, NBYTES, 0)
        assert set(report["transports"].values()) == {"cma"}
        assert reader.do("sha") == trainer.do("sha")


def test_memory_that_is_taken_back_is_not_committed_though_its_reader_goes_on(
    processes: ChildProcesses,
) -> None:
    coordinator, address, trainer = cluster(processes, integrity=False)
    reader = processes.worker(address, "reader", NBYTES, gate=GATE | {"heeds_cuts": False})
    memory_is_taken_back_in_mid_read(coordinator, trainer, reader)


@pytest.mark.slow
def test_where_the_kernel_forbids_it_tcp_is_used(processes: ChildProcesses) -> None:
    _, address, trainer = cluster(processes)
    trainer.do("hide")
    # root may read everything, unless it has less rights than the other process.
    prefix = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    reader = processes.worker(address, "reader", NBYTES, prefix=prefix)
    report = reader.do("replicate")
    assert (report["version"], report["transports"]) == (1, {"trainer": "tcp"})
    assert reader.do("sha") == trainer.do("sha")
