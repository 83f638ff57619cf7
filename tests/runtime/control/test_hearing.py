"""In which turns sessions are heard: nobody waits for who says much, and what is said comes out as it is said.

Floods of one session, and of read-only ones: `test_server.py` and `test_greedy.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from itertools import groupby

import anyio
import pytest

from tensorhub.coordinator import Event, Received, Tick
from tensorhub.messages import FromCoordinator, Heartbeat, HeartbeatAck, ReaderCut, Welcome
from tensorhub.protocol.polled_stream import PolledStream
from tensorhub.protocol.stream import MessageStream
from tensorhub.runtime.control import hearing
from tensorhub.runtime.control.server import CoordinatorServer
from tensorhub.types import Options
from tests.rig import WAIT_S, nothing_left, until
from tests.runtime.control.test_backlog import say_at_once
from tests.runtime.control.test_server import JOIN, serving, talk

WORDS = 300


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What the coordinator takes, in order."""
    events, step = list[Event](), CoordinatorServer._step

    def noting(self: CoordinatorServer, event: Event) -> None:
        events.append(event)
        step(self, event)

    monkeypatch.setattr(CoordinatorServer, "_step", noting)
    return events


@contextlib.asynccontextmanager
async def joined(count: int) -> AsyncIterator[tuple[CoordinatorServer, list[MessageStream[FromCoordinator]]]]:
    """So many workers by hand, that have joined."""
    async with nothing_left(), serving(Options()) as server, contextlib.AsyncExitStack() as stack:
        found = [await stack.enter_async_context(await talk(server, JOIN, incarnation=f"w{n}")) for n in range(count)]
        for messages in found:
            assert isinstance(await messages.receive(), Welcome)
        yield server, found


async def test_whoever_says_much_has_a_few_words_in_each_turn(events: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearing, "TURNS_S", WAIT_S)
    async with joined(3) as (_, [one, other, third]):
        events.clear()
        for messages in (one, other):
            say_at_once(messages, *[ReaderCut("unknown")] * WORDS)
        say_at_once(third, Heartbeat(1))
        await until(lambda: len(events) > 2 * WORDS)
        heard = [event.session for event in events if isinstance(event, Received)]
    turns = [(session, len(list(run))) for session, run in groupby(heard)]
    assert max(words for _, words in turns) == hearing.MESSAGES_PER_TURN
    assert heard.index(3) <= 2 * hearing.MESSAGES_PER_TURN


async def test_what_is_due_comes_between_the_turns_of_many(events: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearing, "TURNS_S", -1.0)
    async with joined(12) as (server, workers):
        monkeypatch.setattr(server._core, "next_deadline", lambda: 0.0)
        events.clear()
        for messages in workers:
            say_at_once(messages, *[ReaderCut("unknown")] * WORDS)
        await until(lambda: sum(isinstance(event, Received) for event in events) == 12 * WORDS)
        monkeypatch.undo()
    runs = [len(list(run)) for is_tick, run in groupby(events, lambda event: isinstance(event, Tick)) if not is_tick]
    assert max(runs) <= 3  # trio has its own order


async def test_an_answer_does_not_wait_until_everybody_else_was_heard(
    events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hearing, "TURNS_S", -1.0)
    sent, send, most = [0], PolledStream.send_nowait, 0

    def counting(self: PolledStream, item: bytes) -> int:
        nonlocal most
        most = max(most, sum(isinstance(event, Received) for event in events) - len(sent))
        sent.append(0)
        return send(self, item)

    async with joined(50) as (_, workers):
        events.clear()
        sent.clear()
        monkeypatch.setattr(PolledStream, "send_nowait", counting)
        for messages in workers:
            say_at_once(messages, Heartbeat(1))
        for messages in workers:
            assert isinstance(await messages.receive(), HeartbeatAck)
    assert len(sent) == 50
    assert most <= 3


async def test_a_defect_is_raised_by_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a callback of the loop raises would only be logged, and the peer would wait for ever."""
    step = CoordinatorServer._step

    def defect(self: CoordinatorServer, event: Event) -> None:
        if isinstance(event, Received) and isinstance(event.message, Heartbeat):
            raise ZeroDivisionError
        step(self, event)

    monkeypatch.setattr(CoordinatorServer, "_step", defect)

    async def say() -> None:
        async with joined(1) as (_, [messages]):
            say_at_once(messages, Heartbeat(1))
            await anyio.sleep_forever()

    with pytest.raises(ExceptionGroup) as caught:
        await say()
    assert caught.group_contains(ZeroDivisionError)
