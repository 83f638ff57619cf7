"""Processes that are stopped beyond their lease and wake up (R11): the others went on, and they are somebody new."""

from __future__ import annotations

import pytest

from tests.processes.child_processes import ChildProcesses, Failed, Process
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


def test_a_holder_whose_version_was_given_up_meanwhile_is_ordered_out(processes: ChildProcesses) -> None:
    _, address = cluster(processes, lease_s=1.0)
    trainer = trainer_with(processes, address)
    zombie = processes.worker(address, "zombie", NBYTES)
    zombie.do("replicate")
    stop_beyond_lease(zombie, trainer)
    for version in (2, 3, 4):
        trainer.do("mutate", version=version)
    wake(zombie, trainer)
    until(zombie, lambda state: state == ["empty", None], "state")
    with pytest.raises(Failed, match="version 1, which it held, is unknown to the coordinator") as caught:
        zombie.do("unpublish")
    assert caught.value.kind == "LeaseLost"
    assert zombie.do("update")["version"] == 4
    assert zombie.do("contents") == [4]


def test_a_reader_that_wakes_up_in_mid_read_ends_its_call_and_may_call_again(processes: ChildProcesses) -> None:
    """Also its group's: the other rank has heard why, long before."""
    _, address = cluster(processes, lease_s=1.0)
    publishers = [processes.worker(address, f"p{r}", NBYTES, group="p", rank=r, world_size=2) for r in range(2)]
    for publisher in publishers:
        publisher.do("write", content=1)
    promises = [publisher.begin("publish", version=1) for publisher in publishers]
    assert [promise.result() for promise in promises] == [1, 1]
    zombie, other = [processes.worker(address, f"r{r}", NBYTES, gate=5, group="r", rank=r, world_size=2) for r in range(2)]
    fills = [zombie.begin("replicate"), other.begin("replicate")]
    for reader in (zombie, other):
        reader.do("gate_holds")
    stop_beyond_lease(zombie, publishers[0])
    with pytest.raises(Failed, match="worker 'r0' was not heard of") as caught:
        fills[1].result()
    assert (caught.value.kind, caught.value.retryable, caught.value.memory) == ("GroupAborted", True, "torn")
    wake(zombie, publishers[0])
    with pytest.raises(Failed) as caught:
        fills[0].result()
    assert (caught.value.kind, caught.value.retryable, caught.value.memory) == ("GroupAborted", True, "torn")
    for reader in (zombie, other):
        reader.do("gate_open")
    fills = [zombie.begin("replicate"), other.begin("replicate")]
    assert [fill.result()["version"] for fill in fills] == [1, 1]
    assert [reader.do("contents") for reader in (zombie, other)] == [[1], [1]]


def test_a_rank_that_had_voted_hears_what_was_decided_without_it(processes: ChildProcesses) -> None:
    """It was PREPARED: neither its silence nor the end of its lease is an abort."""
    _, address = cluster(processes, lease_s=1.0)
    zombie, other = [processes.worker(address, f"p{r}", MIB, group="p", rank=r, world_size=2) for r in range(2)]
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
    readers = [processes.worker(address, f"r{r}", MIB, group="r", rank=r, world_size=2) for r in range(2)]
    fills = [reader.begin("replicate") for reader in readers]
    assert [fill.result()["version"] for fill in fills] == [1, 1]
    assert [reader.do("contents") for reader in readers] == [[1], [1]]


def test_an_unpublish_of_one_that_wakes_up_needs_nobody(processes: ChildProcesses) -> None:
    """Nobody is there to tell it that it was lost."""
    coordinator, address = cluster(processes, lease_s=1.0)
    trainer = trainer_with(processes, address)
    zombie = processes.worker(address, "zombie", NBYTES)
    zombie.do("replicate")
    stop_beyond_lease(zombie, trainer)
    coordinator.stop()
    zombie.go_on()
    zombie.begin("unpublish", timeout=600).result(20)
    assert zombie.do("state") == ["empty", None]
    zombie.do("write", content=9)
    coordinator.go_on()
    assert zombie.do("update")["version"] == 1
    assert zombie.do("contents") == [1]
    assert trainer.do("state") == ["ready", 1]
