"""What one rank has in its memory, and what it tells the coordinator of that, against times that
can be worked out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tensorhub.messages import (
    AddSource,
    DropSource,
    Fenced,
    Fill,
    FromWorker,
    Grant,
    LeaveGranted,
    Outcome,
    Prepared,
    Progress,
    ReadFailed,
    Registered,
    Start,
    Write,
)
from tensorhub.testing.flow.coordinated import Peer, ThinRank
from tensorhub.testing.flow.scenario import load
from tensorhub.testing.flow.thin import MODEL, Shard
from tensorhub.testing.flow.topology import Place
from tensorhub.testing.flow.transfers import Flow, Memory
from tensorhub.testing.flow.workload import World
from tensorhub.types import Location, OpKey, OpKind, VersionInfo

CHUNK = 4096
BYTES = 10 * CHUNK
SHARD = Shard(BYTES, CHUNK)


def version(number: int) -> VersionInfo:
    return VersionInfo(MODEL, number, f"{number:032x}", BYTES, 1)


class Given(Peer):
    """A worker over links of a chunk a second, of which ten are all; with memories by the lease
    that grants them. `said`: by its rank.
    """

    def __init__(self) -> None:
        made = load("standalone")
        scenario = replace(made, links=replace(made.links, nic_mbit_per_s=CHUNK / 125_000))
        self.world = World.of(scenario)
        self.place: Place = self.world.topology.places["rollout-0"]
        self.transfers = self.world.transfers
        self.copy_bytes_per_s = 10.0 * CHUNK
        self.sources: dict[str, Memory] = {}
        self.said: list[FromWorker] = []
        self.live: set[int] = set()  # generations

    @property
    def now(self) -> float:
        return self.world.timeline.now

    def request(self, rank: ThinRank) -> int:
        return 1

    def say(self, message: FromWorker) -> None:
        self.said.append(message)

    def find(self, grant: Grant) -> tuple[Place, Memory] | None:
        memory = self.sources.get(grant.lease)
        return None if memory is None else (self.world.topology.places["trainer-0"], memory)

    def opened(self, rank: ThinRank) -> None:
        self.live.add(rank.generation)

    def closed(self, rank: ThinRank) -> None:
        self.live.discard(rank.generation)

    def read(
        self, source: tuple[Place, Memory], reader: Memory, broken: Callable[[], None]
    ) -> Flow:
        path = self.world.topology.path(source[0], self.place)
        return self.transfers.open(source[1], reader, path, 0.0, 0.0, broken)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.world.timeline.after(seconds, call)

    # -- what a test does

    def source(self, lease: str, have: float = BYTES) -> Grant:
        self.sources[lease] = Memory("trainer-0", float(BYTES))
        self.transfers.put(self.sources[lease], have)
        return grant(lease)

    def until(self, when: float) -> None:
        self.transfers.settle()
        self.world.timeline.run(when)
        self.world.timeline.now = max(self.now, when)

    def heard(self, kind: type) -> list[FromWorker]:
        return [each for each in self.said if isinstance(each, kind)]


def grant(lease: str) -> Grant:
    return Grant(lease, "trainer-0", "i" * 32, "t" * 32, 1, (), Location(), complete=True)


@pytest.fixture
def shell() -> Given:
    return Given()


def rank_of(shell: Given) -> ThinRank:
    made = ThinRank(SHARD, "r" * 32, "rollout-0", 0, 0, 1, shell=shell, report_s=1.0)
    made.hear(Registered(1, made.registration, epoch=1, sequence=1, keep=False))
    return made


def begin(
    rank: ThinRank, number: int, *grants: Grant, kind: OpKind = OpKind.UPDATE
) -> list[VersionInfo | None]:
    """It calls, and is told to write. What comes of the call."""
    ended: list[VersionInfo | None] = []
    rank.begin_fill(kind, ended.append)
    assert rank.key is not None
    rank.hear(Start(rank.key, 0, version(number), "", False, ()))
    rank.hear(Write(rank.key, 0, grants))
    return ended


def end(rank: ThinRank, number: int | None) -> None:
    assert rank.key is not None
    info = None if number is None else version(number)
    rank.hear(Outcome(rank.key, 0, number is not None, number is not None, info, None))


def test_a_fill_reads_votes_and_holds_what_was_committed(shell: Given) -> None:
    rank = rank_of(shell)
    ended = begin(rank, 1, shell.source("a"))
    shell.until(5.0)
    assert not shell.heard(Prepared)
    shell.until(20.0)
    assert shell.heard(Prepared) == [Prepared(OpKey(MODEL, "rollout-0", 1, 1), 0, SHARD.root)]
    assert rank.times == pytest.approx([0.0, 0.0, 0.0, 10.0])
    end(rank, 1)
    assert (ended, rank.held, rank.sequence) == ([version(1)], version(1), 2)
    assert shell.live == {1}


def test_a_call_says_into_which_generation_it_reads_and_that_no_engine_is_held(
    shell: Given,
) -> None:
    rank = rank_of(shell)
    for number, kind in enumerate((OpKind.REPLICATE, OpKind.UPDATE), 1):
        begin(rank, number, shell.source(f"{number}"), kind=kind)
        shell.until(20.0 * number)
        end(rank, number)
    said = [
        (each.kind, each.generation, each.hold)
        for each in shell.heard(Fill)
        if isinstance(each, Fill)
    ]
    assert said == [(OpKind.REPLICATE, 1, False), (OpKind.UPDATE, 2, False)]
    assert rank.generation == 2


def test_it_reports_what_has_come_each_second_and_no_more_when_all_is_there(shell: Given) -> None:
    rank = rank_of(shell)
    begin(rank, 1, shell.source("a"))
    shell.until(30.0)
    reports = [each for each in shell.heard(Progress) if isinstance(each, Progress)]
    assert [each.bytes_read for each in reports[:9]] == pytest.approx(
        [CHUNK * second for second in range(1, 10)], abs=1
    )
    assert (reports[-1].chunks_verified, reports[-1].bytes_read) == (10, BYTES)
    assert [(each.lease, each.nbytes) for each in reports[-1].flows] == [("a", BYTES)]
    assert len(reports) in (10, 11)


def test_the_old_version_is_fenced_under_its_own_generation_before_it_is_overwritten(
    shell: Given,
) -> None:
    rank = rank_of(shell)
    begin(rank, 1, shell.source("a"))
    shell.until(20.0)
    end(rank, 1)
    assert not shell.heard(Fenced), "there was nothing before"
    begin(rank, 2, shell.source("b"))
    assert shell.heard(Fenced) == [Fenced(rank.registration, 1)]
    assert shell.live == {2}
    rank.begin_leave(lambda: None)
    rank.hear(LeaveGranted(1))
    assert shell.heard(Fenced)[1:] == [Fenced(rank.registration, 2)]
    assert not shell.live


def test_what_broke_off_is_held_by_nobody(shell: Given) -> None:
    rank = rank_of(shell)
    ended = begin(rank, 1, shell.source("a"))
    shell.until(5.0)
    end(rank, None)
    assert ended == [None]
    assert (rank.memory, rank.held, rank.lanes, shell.live) == (None, None, {}, set())
    shell.until(30.0)
    assert not shell.heard(Prepared)


def test_a_source_that_is_lost_dropped_or_never_there_is_said_and_another_one_goes_on(
    shell: Given,
) -> None:
    rank = rank_of(shell)
    begin(rank, 1, shell.source("a"), grant("nowhere"))
    assert rank.key is not None
    shell.until(2.0)
    shell.transfers.end(shell.sources["a"])
    shell.until(3.0)
    rank.hear(AddSource(rank.key, 0, shell.source("b")))
    shell.until(5.0)
    rank.hear(DropSource(rank.key, 0, "b", "another one is better"))
    rank.hear(DropSource(rank.key, 0, "b", "once more"))
    rank.hear(AddSource(rank.key, 0, shell.source("c")))
    rank.hear(AddSource(rank.key, 0, grant("c")))
    assert rank.memory is not None
    assert len(rank.lanes) == len(rank.memory.inflows) == 1
    shell.until(30.0)
    failed = [
        (each.lease, each.reason)
        for each in shell.heard(ReadFailed)
        if isinstance(each, ReadFailed)
    ]
    assert failed == [("nowhere", "lost"), ("a", "lost"), ("b", "dropped")]
    assert rank.times[-1] == pytest.approx(11.0)  # nothing came from 2 to 3
    assert len(shell.heard(Prepared)) == 1


def test_what_its_host_memory_has_of_the_version_is_copied_from_there_and_the_rest_is_read(
    shell: Given,
) -> None:
    rank, beside = rank_of(shell), rank_of(shell)
    rank.beside = beside
    begin(beside, 2, shell.source("a"), kind=OpKind.PREFETCH)
    shell.until(4.0)
    begin(rank, 2, shell.source("b"))  # four chunks are there, and ten a second are copied
    shell.until(4.2)
    assert rank.memory is not None
    assert rank.memory.have == 0
    shell.until(4.4 + 1e-6)
    assert rank.memory.have == pytest.approx(4 * CHUNK, abs=1)
    shell.until(60.0)
    assert rank.memory.is_whole


def test_another_version_in_its_host_memory_is_no_source(shell: Given) -> None:
    rank, beside = rank_of(shell), rank_of(shell)
    rank.beside = beside
    begin(beside, 1, shell.source("a"), kind=OpKind.PREFETCH)
    shell.until(20.0)
    end(beside, 1)
    begin(rank, 2, shell.source("b"))
    shell.until(25.0)
    assert rank.memory is not None
    assert rank.memory.have == pytest.approx(5 * CHUNK, abs=1)


def test_a_copy_of_a_call_that_has_ended_does_not_count(shell: Given) -> None:
    rank, beside = rank_of(shell), rank_of(shell)
    rank.beside = beside
    begin(beside, 1, shell.source("a"), kind=OpKind.PREFETCH)
    shell.until(20.0)
    end(beside, 1)
    begin(rank, 1)
    end(rank, None)
    begin(rank, 2)  # with no source yet
    shell.until(30.0)
    assert rank.memory is not None
    assert rank.memory.have == 0
    assert len(shell.heard(Prepared)) == 1, "of the host memory"


def test_a_rank_whose_process_is_gone_reads_no_more(shell: Given) -> None:
    rank = rank_of(shell)
    begin(rank, 1, shell.source("a"))
    shell.until(5.0)
    rank.die()
    shell.until(30.0)
    assert not shell.heard(Prepared)
    assert not shell.live
    assert sum(edge.nbytes for edge in shell.transfers.edges) == pytest.approx(5 * CHUNK)
