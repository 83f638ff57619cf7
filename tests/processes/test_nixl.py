"""One process reads another one's memory by NIXL: while that changes, dies or stands still; and
processes end well.

UCX is held to TCP where the source has to do a part of each read, which is the hardest; else it
chooses (cma, on one host).
"""

from __future__ import annotations

import pytest

from tensorhub.transport.nixl import agents as nixl
from tests.processes.child_processes import ChildProcesses, Failed, Process
from tests.processes.stories import a_source_is_killed_in_mid_read, memory_is_taken_back_in_mid_read

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.skipif(
        nixl.version() is None, reason=f"NIXL is not installed: {nixl.INSTALL}, or make nixl"
    ),
]

MIB = 2**20
NBYTES = 64 * MIB
OPTIONS = {"chunk_bytes": MIB, "transports": ["nixl"]}
GATE = {"arrivals": 5, "transport": "nixl"}


@pytest.fixture(params=["chosen", "tcp"])
def wires(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp,self")
    return str(request.param)


def cluster(processes: ChildProcesses, **more: object) -> tuple[Process, str, Process]:
    """A coordinator, its address, and a trainer that has published version 1."""
    coordinator = processes.process("coordinator")
    address = coordinator.do("serve", lease_s=10.0, drain_grace_s=0.5)
    trainer = processes.worker(address, "trainer", NBYTES, options=OPTIONS | more)
    trainer.do("write", content=1)
    trainer.do("publish", version=1)
    return coordinator, address, trainer


def test_two_readers_one_after_the_other_and_each_version(
    processes: ChildProcesses, wires: str
) -> None:
    _, address, trainer = cluster(processes)
    readers = [
        processes.worker(address, f"reader{number}", NBYTES, options=OPTIONS) for number in range(2)
    ]
    for reader in readers:
        report = reader.do("replicate")
        assert (report["version"], report["bytes_read"], report["reread_bytes"]) == (1, NBYTES, 0)
        assert set(report["transports"].values()) == {"nixl"}
        assert reader.do("sha") == trainer.do("sha")
    trainer.do("mutate", version=2)
    for fill in [reader.begin("update") for reader in readers]:
        assert fill.result()["version"] == 2
    assert {reader.do("sha") for reader in readers} == {trainer.do("sha")}


def test_memory_that_is_taken_back_is_not_committed_though_its_reader_goes_on(
    processes: ChildProcesses, wires: str
) -> None:
    coordinator, address, trainer = cluster(processes, integrity=False)
    reader = processes.worker(
        address, "reader", NBYTES, gate=GATE | {"heeds_cuts": False}, options={"chunk_bytes": MIB}
    )
    memory_is_taken_back_in_mid_read(coordinator, trainer, reader)


def test_a_source_that_is_killed_in_mid_read_is_left_for_another(
    processes: ChildProcesses, wires: str
) -> None:
    _, address, trainer = cluster(processes)
    a_source_is_killed_in_mid_read(processes, address, trainer, NBYTES, GATE, OPTIONS)


def test_a_source_that_stands_still_costs_its_reader_the_timeout_only(
    processes: ChildProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP it has to answer each read. Those that it has not answered end with the reader's
    agent, which is replaced.
    """
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    _, address, trainer = cluster(processes)
    reader = processes.worker(address, "reader", NBYTES, options=OPTIONS | {"stall_timeout_s": 0.5})
    trainer.stop()
    with pytest.raises(Failed):
        reader.do("replicate", timeout=3.0)
    trainer.go_on()
    report = reader.do("replicate")
    assert (report["version"], report["transports"]) == (1, {"trainer": "nixl"})
    assert reader.do("sha") == trainer.do("sha")
