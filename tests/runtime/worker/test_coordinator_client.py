"""What a worker asks its coordinator: one rollback at a time, which is asked for again until there is an answer."""

from __future__ import annotations

import itertools

import anyio
import pytest

from tensorhub.errors import OperationTimeout
from tensorhub.messages import Done, FromWorker, Rollback
from tensorhub.runtime.worker.coordinator_client import CoordinatorClient
from tests.rig import until

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Link:
    """A connection on which nobody answers by himself."""

    online = True

    def __init__(self) -> None:
        self.said: list[Rollback] = []

    def say(self, message: FromWorker) -> None:
        assert isinstance(message, Rollback)
        self.said.append(message)


async def test_a_rollback_waits_for_the_one_before() -> None:
    link = Link()
    questions = CoordinatorClient(link, itertools.count(1))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(questions.rollback, "m", 1, 60.0)
        await until(lambda: len(link.said) == 1)
        tasks.start_soon(questions.rollback, "m", 2, 60.0)
        await until(lambda: questions._rolling_back.statistics().tasks_waiting == 1)
        questions.lost()
        await until(lambda: len(link.said) == 2)
        assert link.said[0].ident == link.said[1].ident
        questions.answered(Done(link.said[1].request))
        await until(lambda: len(link.said) == 3)
        assert (link.said[2].to, link.said[2].ident != link.said[0].ident) == (2, True)
        questions.answered(Done(link.said[2].request))


async def test_whose_turn_does_not_come_is_told_so() -> None:
    link = Link()
    questions = CoordinatorClient(link, itertools.count(1))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(questions.rollback, "m", 1, 60.0)
        await until(lambda: len(link.said) == 1)
        with pytest.raises(OperationTimeout, match="an earlier rollback of this worker was not over"):
            await questions.rollback("m", 2, 0.01)
        questions.answered(Done(link.said[0].request))
    with pytest.raises(OperationTimeout, match="did not answer"):
        await questions.rollback("m", 2, 0.01)
    assert not questions._rolling_back.locked()
