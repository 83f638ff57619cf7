"""What a worker asks again after a lost connection."""

from __future__ import annotations

from itertools import count

import anyio

from tensorhub.messages import Done, Rollback
from tensorhub.runtime.worker.coordinator_client import CoordinatorClient
from tests.runtime.worker.test_version_watches import MessageSink

WAIT_S = 30.0


async def test_a_rollback_that_is_asked_for_again_is_the_same_one() -> None:
    """R1: the coordinator may have done it before the connection was lost, and a trainer may have
    published since; a second one would end that.
    """
    link = MessageSink()
    client = CoordinatorClient(link, count(1))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.rollback, "m", 3, WAIT_S)
        await anyio.wait_all_tasks_blocked()
        client.lost()
        await anyio.wait_all_tasks_blocked()
        first, second = link.said
        client.answered(Done(2))
    assert isinstance(first, Rollback)
    assert isinstance(second, Rollback)
    assert (first.request, second.request, second.to) == (1, 2, 3)
    assert first.ident == second.ident
