"""A coordinator whose terms end: it goes on, and not faster than its engine stands."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator, Callable

import anyio
import pytest

from tensorhub.coordinator import Durable
from tensorhub.runtime.control import candidate
from tensorhub.runtime.control.candidate import Candidate
from tensorhub.runtime.control.election import Deposed, Store
from tensorhub.runtime.control.elections import LocalElection
from tensorhub.runtime.control.server import CoordinatorServer
from tensorhub.runtime.control.store import MemoryStore
from tests.rig import OPTIONS, until

AGAIN_S = 2.0**-7  # which nothing else sleeps


class Full(MemoryStore):
    def begin_anew(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Ended(MemoryStore):
    """Of a term that has ended before its leader has read it."""

    def read(self) -> Durable:
        raise Deposed("another coordinator leads")


@contextlib.asynccontextmanager
async def leads(
    open_store: Callable[[], Store],
) -> AsyncIterator[tuple[Candidate, CoordinatorServer]]:
    """A candidate, and the server of its first term."""
    made = Candidate(
        options=OPTIONS,
        secrets_accepted=[b""],
        election=LocalElection(lambda address: open_store()),
    )
    ready = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run, "127.0.0.1", 0, ready.set)
        await ready.wait()
        assert made.server is not None
        yield made, made.server
        tasks.cancel_scope.cancel()


async def test_a_full_disk_as_the_cluster_begins_anew_ends_the_term_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(candidate, "AGAIN_S", AGAIN_S)
    async with leads(Full) as (made, first):
        first._outlived = "a worker remembers more"
        first._is_outlived.set()
        await until(lambda: made.server not in (None, first))
    [lost] = [each for each in caplog.messages if "leadership_lost" in each]
    assert "a worker remembers more" in lost
    assert os.strerror(errno.ENOSPC) in lost


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
    async with leads(lambda: next(stores)()) as (made, first):
        first._term_over.set()
        await until(lambda: made.server not in (None, first))
    assert pauses.count(AGAIN_S) == 2
