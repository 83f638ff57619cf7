"""A coordinator whose terms end: it goes on, not faster than its engine stands, and answers nothing
in between.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from tensorhub.coordinator import Durable, Entry, Persist, Retention
from tensorhub.errors import TensorHubError
from tensorhub.runtime.control import candidate
from tensorhub.runtime.control.candidate import Candidate
from tensorhub.runtime.control.election import Deposed, Election, Store
from tensorhub.runtime.control.elections import LocalElection
from tensorhub.runtime.control.server import CoordinatorServer
from tensorhub.runtime.control.store import MemoryStore
from tensorhub.types import parse_address
from tests.rig import OPTIONS, connect, tensors, until

AGAIN_S = 2.0**-7  # which nothing else sleeps


class Full(MemoryStore):
    def begin_anew(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Slow(MemoryStore):
    """It writes until it may end."""

    blocks = True

    def __init__(self) -> None:
        super().__init__()
        self.took: list[str] = []
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def write(self, entries: Sequence[Entry]) -> None:
        self.has_begun.set()
        self.may_end.wait()
        self.took.append("a write")

    def begin_anew(self) -> None:
        self.took.append("the new cluster")


class Ended(MemoryStore):
    """Of a term that has ended before its leader has read it."""

    def read(self) -> Durable:
        raise Deposed("another coordinator leads")


@contextlib.asynccontextmanager
async def leads(
    engine: Election,
) -> AsyncIterator[tuple[Candidate, CoordinatorServer]]:
    """A candidate, and the server of its first term."""
    made = Candidate(options=OPTIONS, secrets_accepted=[b""], election=engine)
    ready = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run, "127.0.0.1", 0, ready.set)
        await ready.wait()
        await until(lambda: made.server is not None)
        assert made.server is not None
        yield made, made.server
        tasks.cancel_scope.cancel()


async def test_a_full_disk_as_the_cluster_begins_anew_ends_the_term_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(candidate, "AGAIN_S", AGAIN_S)
    async with leads(LocalElection(lambda address: Full())) as (made, first):
        first._outlived = "a worker remembers more"
        first._is_outlived.set()
        await until(lambda: made.server not in (None, first))
    [lost] = [each for each in caplog.messages if "leadership_lost" in each]
    assert "a worker remembers more" in lost
    assert os.strerror(errno.ENOSPC) in lost


async def test_a_cluster_begins_anew_once_the_running_write_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store takes one write at a time, and the next term may not find out again."""
    monkeypatch.setattr(candidate, "AGAIN_S", AGAIN_S)
    stores = [slow := Slow(), Slow()]
    async with leads(LocalElection(lambda address: stores.pop(0))) as (made, first):
        first._unrecorded.append(Persist(1, 1, Retention("m", 1)))
        first._record_wanted.set()
        await until(slow.has_begun.is_set)
        first._is_outlived.set()
        await wait_all_tasks_blocked()
        slow.may_end.set()
        await until(lambda: made.server not in (None, first))
    assert slow.took == ["a write", "the new cluster"]


async def test_no_two_coordinators_give_operations_the_same_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On two copies of one state they may have one epoch."""
    monkeypatch.setattr(candidate, "AGAIN_S", AGAIN_S)
    store = MemoryStore()
    async with leads(LocalElection(lambda address: store)) as (made, first):
        first._term_over.set()
        await until(lambda: made.server not in (None, first))
        assert made.server is not None
        clusters = [each.show()[0].cluster for each in (first, made.server)]
        epochs = [each.mint_epoch() for each in clusters]
    assert epochs[0] != epochs[1]
    assert {epoch >> 32 for epoch in epochs} == {store.epoch}


async def test_terms_that_end_at_once_follow_one_another_at_a_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses, sleep = list[float](), anyio.sleep

    async def counted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(candidate, "AGAIN_S", AGAIN_S)
    monkeypatch.setattr(anyio, "sleep", counted)
    stores = iter((MemoryStore, Ended, Ended, MemoryStore))
    async with leads(LocalElection(lambda address: next(stores)())) as (made, first):
        first._term_over.set()
        await until(lambda: made.server not in (None, first))
    assert pauses.count(AGAIN_S) == 2


class Engine:
    """See `Election` and `Term`. It gives one term."""

    def __init__(self) -> None:
        self.store: Store = MemoryStore()
        self.left_s = math.inf
        self.why = "no time is left"
        self.ends = anyio.Event()
        self.resigned = 0

    async def campaign(self, address: str, stands_by: Callable[[str], None]) -> Engine:
        stands_by("tcp://another:1")
        if self.resigned:
            await anyio.sleep_forever()
        return self

    async def lost(self) -> str:
        await self.ends.wait()
        return "another one leads"

    async def resign(self) -> None:
        self.resigned += 1

    async def aclose(self) -> None:
        pass


async def test_a_leader_without_work_stands_by_once_its_term_is_lost() -> None:
    """Although its own clock leaves it time: another one may hold the lease already."""
    engine = Engine()
    async with leads(engine) as (made, _):
        host, port = parse_address(made.address)
        await (await anyio.connect_tcp(host, port)).aclose()
        assert made.leader == ""
        engine.ends.set()
        await until(lambda: made.leader == "tcp://another:1")
        with pytest.raises(OSError, match="connect"):
            await anyio.connect_tcp(host, port)
        assert (made.server, engine.resigned) == (None, 1)


async def test_a_leader_without_time_left_answers_nothing() -> None:
    """Although nothing has told it yet that its term has ended."""
    engine = Engine()
    async with leads(engine) as (made, _), connect(made.address) as hub:
        await hub.register("m", tensors(1))
        engine.left_s = 0.0
        with pytest.raises(TensorHubError):
            await hub.describe("m", timeout=0.5)
        await until(lambda: made.leader == "tcp://another:1")
