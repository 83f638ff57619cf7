"""A reader that waits until a mate fills what both have in common, before it asks for chunks of it."""

from __future__ import annotations

from typing import Any

import pytest

from tensorhub.errors import OperationTimeout
from tensorhub.messages import FromOwner, Listed, ReadRefused, Select, Selected
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.transport import read_client
from tensorhub.transport.base import Cutter, ReadFailure, ReadRight
from tensorhub.transport.peers import Peer
from tensorhub.transport.read_client import BUNDLE_PATIENCE_S, ReadClient
from tensorhub.types import ContentId, Incarnation, LeaseId, RegistrationId

RIGHT = ReadRight(LeaseId("l"), Incarnation("i"), RegistrationId("r"), 7, ContentId("c"), bundle="norms")


class Clock:
    """Passes as somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Mate:
    """The connection to one that answers so, and then always as it has answered last."""

    payload_bytes = 0

    def __init__(self, *answers: FromOwner | Exception | None) -> None:
        self.answers = list(answers)
        self.asked: list[Select] = []

    def send(self, message: Select) -> None:
        self.asked.append(message)

    def receive(self, codec: object) -> FromOwner | None:
        said = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(said, Exception):
            raise said
        return said


class Dialects:
    dialect = None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(read_client, "time", clock)
    return clock


def reader(mate: Mate, cutter: Cutter | None = None) -> ReadClient:
    connection: Any = mate
    dialects: Any = Dialects()
    return ReadClient(dialects, Peer(connection, "a", RIGHT.incarnation, b"", False), RIGHT, cutter or Cutter())


NOT_YET, NOT_OPEN, FILLS = Selected(0, 0), ReadRefused(0, "this memory is not open under that generation"), Selected(0, 1)


def test_it_asks_until_the_mate_fills_and_less_often_each_time(clock: Clock) -> None:
    mate = Mate(*[NOT_OPEN] * 3, *[NOT_YET] * 7, FILLS)
    reader(mate).await_bundle()
    assert mate.asked == [Select(0, "r", 7, "norms", 1, 0, b"")] * 11
    assert clock.slept == [0.005 * 2**n for n in range(7)] + [0.5] * 3


def test_it_is_given_up_in_time(clock: Clock) -> None:
    mate = Mate(NOT_YET)
    with pytest.raises(ReadFailure, match="does not fill") as failure:
        reader(mate).await_bundle()
    assert failure.value.reason == "refused"
    assert BUNDLE_PATIENCE_S < clock.now < BUNDLE_PATIENCE_S + 1
    assert len(mate.asked) < 150


def test_who_is_cut_asks_no_more(clock: Clock) -> None:
    mate, cutter = Mate(NOT_YET), Cutter()
    cutter.cut()
    with pytest.raises(ReadFailure):
        reader(mate, cutter).await_bundle()
    assert (len(mate.asked), clock.slept) == (1, [])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Listed(0, 1, b"x"), "lost"),
        (None, "lost"),
        (ConnectionLost("gone"), "lost"),
        (OperationTimeout("nothing came"), "stalled"),
    ],
)
def test_whoever_answers_something_else_or_nothing_is_left(
    clock: Clock, answer: FromOwner | Exception | None, reason: str
) -> None:
    mate = Mate(NOT_YET, answer)
    client = reader(mate)
    with pytest.raises(ReadFailure) as failure:
        client.await_bundle()
    assert (failure.value.reason, len(mate.asked)) == (reason, 2)
