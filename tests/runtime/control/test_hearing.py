"""In which turns sessions are heard: nobody waits for who says much, and what is said comes out as
it is said.

Floods of one session, and of read-only ones: `test_server.py` and `test_greedy.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from itertools import groupby

import pytest

from tensorhub.coordinator import Event, Received
from tensorhub.messages import FromCoordinator, Heartbeat, ReaderCut, Welcome
from tensorhub.protocol.stream import MessageStream
from tensorhub.runtime.control import hearing
from tensorhub.runtime.control.server import CoordinatorServer
from tensorhub.types import Options
from tests.rig import WAIT_S, nothing_left, until
from tests.runtime.control.test_backlog import say_at_once
from tests.runtime.control.test_server import JOIN, serving, talk

WORDS = 300


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
async def joined(
    count: int,
) -> AsyncIterator[tuple[CoordinatorServer, list[MessageStream[FromCoordinator]]]]:
    """So many workers by hand, that have joined."""
    async with nothing_left(), serving(Options()) as server, contextlib.AsyncExitStack() as stack:
        found = [
            await stack.enter_async_context(await talk(server, JOIN, incarnation=f"w{n}"))
            for n in range(count)
        ]
        for messages in found:
            assert isinstance(await messages.receive(), Welcome)
        yield server, found


async def test_whoever_says_much_has_a_few_words_in_each_turn(
    events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
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
