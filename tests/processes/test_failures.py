"""Real processes that are killed, stopped and blocked: who notices, what is lost, and what goes
on.
"""

from __future__ import annotations

import pytest

from tests.processes.child_processes import ChildProcesses, Failed, Process
from tests.processes.stories import a_source_is_killed_in_mid_read

MIB = 2**20
NBYTES = 64 * MIB  # more than what lies in sockets' buffers
# Of publishers. Nobody is given up for being slow: a test that waits for that would wait for ever.
OPTIONS = {"chunk_bytes": MIB, "stall_timeout_s": 600.0}


def cluster(processes: ChildProcesses, lease_s: float = 10.0) -> tuple[Process, str]:
    coordinator = processes.process("coordinator")
    return coordinator, coordinator.do("serve", lease_s=lease_s, drain_grace_s=0.5)


def trainer_with(processes: ChildProcesses, address: str, version: int = 1) -> Process:
    trainer = processes.worker(address, "trainer", NBYTES, options=OPTIONS)
    trainer.do("write", content=version)
    trainer.do("publish", version=version)
    return trainer


def test_a_rank_killed_before_the_decision_aborts_its_group_and_nobody_else(
    processes: ChildProcesses,
) -> None:
    _, address = cluster(processes, lease_s=1.0)
    publishers = [
        processes.worker(address, f"p{r}", NBYTES, group="p", rank=r, world_size=2)
        for r in range(2)
    ]
    promises = [publisher.begin("publish", version=1) for publisher in publishers]
    assert [promise.result() for promise in promises] == [1, 1]
    ranks = [
        processes.worker(address, f"r{r}", NBYTES, gate=3, group="r", rank=r, world_size=2)
        for r in range(2)
    ]
    others = [
        processes.worker(address, f"o{r}", NBYTES, gate=3, group="o", rank=r, world_size=2)
        for r in range(2)
    ]
    fills = [reader.begin("replicate") for reader in ranks]
    bystanders = [reader.begin("replicate") for reader in others]
    for reader in ranks + others:
        reader.do("gate_holds")
    ranks[0].do("gate_open")  # it has all its bytes, and waits for the other
    ranks[1].kill()
    with pytest.raises(Failed, match="worker 'r1' was not heard of") as caught:
        fills[0].result()
    assert (caught.value.kind, caught.value.retryable, caught.value.memory) == (
        "GroupAborted",
        True,
        "torn",
    )
    for reader in others:
        reader.do("gate_open")
    assert [fill.result()["version"] for fill in bystanders] == [1, 1]
    assert ranks[0].do("state") == ["torn", None]
    assert [publisher.do("state") for publisher in publishers] == [["ready", 1], ["ready", 1]]


def test_readers_of_a_source_that_is_killed_in_mid_read_finish_from_another(
    processes: ChildProcesses,
) -> None:
    _, address = cluster(processes, lease_s=1.0)
    trainer = trainer_with(processes, address)
    a_source_is_killed_in_mid_read(processes, address, trainer, NBYTES, 5)


def test_a_source_that_stalls_is_left_and_can_be_read_again_when_it_goes_on(
    processes: ChildProcesses,
) -> None:
    """SIGSTOP: its connection stays, and nothing comes; the reader goes on elsewhere from what it
    has verified.
    """
    _, address = cluster(processes, lease_s=600.0)  # so that it is the reader that finds out
    trainer = trainer_with(processes, address)
    other = processes.worker(address, "other", NBYTES)
    other.do("replicate")
    reader = processes.worker(address, "reader", NBYTES, gate=5, options={"stall_timeout_s": 1.0})
    fill = reader.begin("replicate")
    reader.do("gate_holds")
    [source] = reader.do("sources")
    stalled, whole = (other, trainer) if source == "other" else (trainer, other)
    stalled.stop()
    reader.do("gate_open")
    report = fill.result()
    assert report["sources"] == {stalled.name: "stalled", whole.name: "used"}
    assert (report["version"], report["reread_bytes"]) == (1, 0)
    assert reader.do("contents") == [1]
    stalled.go_on()
    reader.do("close")
    whole.do("unpublish")
    third = processes.worker(address, "third", NBYTES)
    report = third.do("replicate")
    assert report["sources"] == {stalled.name: "used"}
    assert third.do("sha") == stalled.do("sha")


def test_a_coordinator_that_is_stopped_for_longer_than_a_lease_loses_nobody(
    processes: ChildProcesses,
) -> None:
    """SIGSTOP and SIGCONT: its workers' heartbeats lie unread, or their connections have ended
    meanwhile.
    """
    coordinator, address = cluster(processes, lease_s=1.0)
    trainer = trainer_with(processes, address)
    life = trainer.do("incarnation")
    coordinator.stop()
    trainer.do("block", seconds=3.0)  # the fault lasts so long
    coordinator.go_on()
    reader = processes.worker(address, "reader", NBYTES)
    assert reader.do("replicate")["version"] == 1
    assert trainer.do("incarnation") == life
    assert trainer.do("state") == ["ready", 1]


@pytest.mark.parametrize("seconds", [3.0, pytest.param(30.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("embedded", [False, True], ids=["apart", "embedded"])
def test_a_trainer_that_blocks_its_only_thread_loses_nothing(
    processes: ChildProcesses, embedded: bool, seconds: float
) -> None:
    if embedded:
        trainer = processes.process("trainer")
        address = trainer.do("serve", lease_s=1.0)
        trainer.do("connect", address=address, name="trainer", **OPTIONS)
        trainer.do("register", nbytes=NBYTES)
    else:
        _, address = cluster(processes, lease_s=1.0)
        trainer = processes.worker(address, "trainer", NBYTES, options=OPTIONS)
    trainer.do("write", content=1)
    trainer.do("publish", version=1)
    life = trainer.do("incarnation")
    readers = [processes.worker(address, f"reader{number}", NBYTES) for number in range(2)]
    blocked = trainer.begin("block", seconds=seconds)
    fills = [reader.begin("replicate") for reader in readers]
    assert [fill.result()["version"] for fill in fills] == [1, 1]
    assert not blocked.is_over
    blocked.result(seconds + 30)
    assert trainer.do("state") == ["ready", 1]
    assert trainer.do("incarnation") == life
    trainer.do("mutate", version=2)
    assert [reader.do("update")["version"] for reader in readers] == [2, 2]
    assert [reader.do("contents") for reader in readers] == [[2], [2]]


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_unpublish_needs_nothing_of_a_reader_in_mid_read(
    processes: ChildProcesses, how: str
) -> None:
    """R3: the owner's fence alone decides. With a stopped reader, its connection is shut down."""
    _, address = cluster(processes, lease_s=2.0)
    trainer = trainer_with(processes, address)
    reader = processes.worker(address, "reader", NBYTES, gate=5)
    reader.begin("replicate")
    reader.do("gate_holds")
    if how == "kill":
        reader.kill()
    else:
        reader.stop()
    trainer.do("unpublish")
    assert trainer.do("state") == ["empty", None]
    trainer.do("mutate", version=2)
    third = processes.worker(address, "third", NBYTES)
    assert third.do("replicate")["version"] == 2
    assert third.do("contents") == [2]


def test_a_coordinator_that_restarts_with_its_state(
    processes: ChildProcesses, tmp_path: object
) -> None:
    """Transfers in flight go on, holders announce themselves again, and used numbers stay used."""
    coordinator = processes.process("coordinator")
    address = coordinator.do("serve", state_dir=str(tmp_path), lease_s=5.0)
    port = int(address.rpartition(":")[2])
    trainer = trainer_with(processes, address)
    holder = processes.worker(address, "holder", NBYTES)
    holder.do("replicate")
    reader = processes.worker(address, "reader", NBYTES, gate=5)
    fill = reader.begin("replicate")
    reader.do("gate_holds")
    coordinator.kill()
    second = processes.process("second coordinator")
    assert second.do("serve", state_dir=str(tmp_path), port=port, lease_s=5.0) == address
    late = processes.worker(address, "late", NBYTES)
    assert late.do("replicate")["version"] == 1
    assert late.do("contents") == [1]
    reader.do("gate_open")
    report = fill.result()
    assert (report["version"], report["bytes_read"], report["reread_bytes"]) == (1, NBYTES, 0)
    assert not reader.do("update")["changed"]
    assert reader.do("contents") == [1]
    assert trainer.do("state") == ["ready", 1]
    with pytest.raises(Failed, match="the newest number so far is 1"):
        trainer.do("mutate", version=1)
    trainer.do("mutate", version=2)
    for process in (holder, reader, late):
        assert process.do("update", at_least=2)["version"] == 2
        assert process.do("contents") == [2]


def test_unpublish_with_a_coordinator_that_is_stopped(processes: ChildProcesses) -> None:
    """A trainer never hangs on a dead coordinator: after a lease of silence it takes its memory
    back by itself.
    """
    coordinator, address = cluster(processes, lease_s=1.0)
    trainer = trainer_with(processes, address)
    reader = processes.worker(address, "reader", NBYTES)
    coordinator.stop()
    trainer.begin("unpublish", timeout=600).result(20)
    assert trainer.do("state") == ["empty", None]
    trainer.do("write", content=2)
    coordinator.go_on()
    trainer.do("publish", version=2)
    assert reader.do("replicate", selector="latest")["version"] == 2
    assert reader.do("contents") == [2]


@pytest.mark.parametrize("integrity", [True, False], ids=["digests", "fence alone"])
def test_committed_contents_are_never_mixed(processes: ChildProcesses, integrity: bool) -> None:
    """G2, with a hammer: a trainer that overwrites as fast as it can, and three readers that follow
    it.
    """
    coordinator = processes.process("coordinator")
    address = coordinator.do("serve", drain_grace_s=0)
    options = {"chunk_bytes": 4 * MIB, "integrity": integrity}
    trainer = processes.worker(address, "trainer", 32 * MIB, options=options)
    readers = [processes.worker(address, f"reader{number}", 32 * MIB) for number in range(3)]
    follows = [reader.begin("follow") for reader in readers]
    last = trainer.do("train", first=1, seconds=2.5)
    for reader in readers:
        reader.do("stop_at", version=last)
    found = [follow.result() for follow in follows]
    assert [each["mixed"] for each in found] == [[], [], []]
    for each in found:
        assert each["seen"] == sorted(set(each["seen"]))
        assert each["seen"][-1] == last
        assert set(each["failures"]) <= {"VersionUnavailable", "GroupAborted"}
