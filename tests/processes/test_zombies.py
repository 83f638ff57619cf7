"""Processes that are stopped beyond their lease and wake up (R11): the others went on, and they are
somebody new.
"""

from __future__ import annotations

from tests.processes.child_processes import ChildProcesses, Process
from tests.processes.stories import until
from tests.processes.test_failures import MIB, NBYTES, cluster, trainer_with


def stop_beyond_lease(zombie: Process, witness: Process) -> None:
    zombie.stop()
    until(witness, lambda model: zombie.name not in model["workers"])


def wake(zombie: Process, witness: Process) -> None:
    zombie.go_on()
    until(witness, lambda model: model["workers"].get(zombie.name) == "live")


def test_a_holder_that_wakes_up_holds_its_version_again(processes: ChildProcesses) -> None:
    _, address = cluster(processes, lease_s=1.0)
    trainer = trainer_with(processes, address)
    zombie, reader = [processes.worker(address, name, NBYTES) for name in ("zombie", "reader")]
    zombie.do("replicate")
    life = zombie.do("incarnation")
    stop_beyond_lease(zombie, trainer)
    trainer.do("mutate", version=2)
    assert reader.do("replicate")["version"] == 2
    wake(zombie, trainer)
    assert zombie.do("incarnation") != life
    assert zombie.do("state") == ["ready", 1]
    until(trainer, lambda model: "zombie" in model["holders"])
    other = processes.worker(address, "other", NBYTES)
    assert other.do("replicate", selector=1)["sources"] == {"zombie": "used"}
    assert other.do("contents") == [1]
    assert zombie.do("update")["version"] == 2
    assert zombie.do("contents") == [2]


def test_a_rank_that_had_voted_hears_what_was_decided_without_it(processes: ChildProcesses) -> None:
    """It was PREPARED: neither its silence nor the end of its lease is an abort."""
    _, address = cluster(processes, lease_s=1.0)
    zombie, other = [
        processes.worker(address, f"p{r}", MIB, group="p", rank=r, world_size=2) for r in range(2)
    ]
    for publisher in (zombie, other):
        publisher.do("write", content=1)
    promise = zombie.begin("publish", version=1)
    until(other, lambda model: model["versions"] == {"1": "staged"})
    zombie.stop()
    assert other.do("publish", version=1) == 1
    until(other, lambda model: "p0" not in model["workers"])
    wake(zombie, other)
    assert promise.result() == 1
    assert zombie.do("state") == ["ready", 1]
    until(other, lambda model: model["holders"] == ["p0", "p1"])
    readers = [
        processes.worker(address, f"r{r}", MIB, group="r", rank=r, world_size=2) for r in range(2)
    ]
    fills = [reader.begin("replicate") for reader in readers]
    assert [fill.result()["version"] for fill in fills] == [1, 1]
    assert [reader.do("contents") for reader in readers] == [[1], [1]]
