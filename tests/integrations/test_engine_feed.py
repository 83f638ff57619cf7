"""A trainer that is handed one tensor at a time, and engines that generate all the time; the
frameworks that send so have tests of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import InvalidValue, OperationTimeout, RegistrationError, StateError
from tensorhub.integrations.engine_feed import EngineFeed, send
from tests.rig import OPTIONS

WAIT_S = 20.0


class Engine:
    """Takes each version, once `gate` is open; `fault`: what it raises instead."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.taken: list[int] = []
        self.fault: Exception | None = None

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> Any:
        if method != "tensorhub_update":
            return [None]
        assert self.gate.wait(WAIT_S)
        if self.fault is not None:
            raise self.fault
        self.taken.append(kwargs["version"])
        return [{"version": kwargs["version"]}]


@pytest.fixture
def engines() -> list[Engine]:
    return [Engine(), Engine()]


@pytest.fixture
def feed(engines: list[Engine]) -> Iterator[EngineFeed]:
    with sync.serve(token="", options=OPTIONS) as coordinator:
        made = EngineFeed(
            engines, address=coordinator.address, timeout_s=WAIT_S, allow_no_readers=True
        )
        yield made
        made.close()


def sent(value: float = 1.0) -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.full((4,), value)
    yield "b", torch.full((4,), value)


def test_an_engine_with_old_weights_is_an_error_at_each_update(
    feed: EngineFeed, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it has failed: the framework generates with it all the same. Other weights have
    another number.
    """
    first = feed.send(sent())
    engines[1].fault = StateError("it is gone")
    for value in (2.0, 3.0, 4.0, 5.0):
        with pytest.raises(StateError, match="it is gone"):
            feed.send(sent(value))
    engines[1].fault = None
    engines[1].gate.clear()
    with monkeypatch.context() as short:
        short.setattr(feed._fleet, "_timeout_s", 0.1)
        with pytest.raises(OperationTimeout, match="was not done"):
            feed.send(sent())
    engines[1].gate.set()
    while (version := feed.send(sent())) not in engines[1].taken:
        pass
    assert engines[0].taken[:2] == [first, first + 1]
    assert engines[0].taken[-1] == engines[1].taken[-1] == version


def test_weights_that_cannot_be_sent_take_no_number(feed: EngineFeed) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from sent()
        raise RuntimeError("a rank is gone")

    first = feed.send(sent())
    with pytest.raises(RuntimeError, match="a rank is gone"):
        feed.send(broken())
    assert feed.send(sent()) == first + 1


def test_weights_that_may_have_been_published_take_their_number(
    feed: EngineFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the coordinator stood still: no later weights could be sent with that number."""
    first, send = feed.send(sent()), feed._exchange.send

    def loses_the_answer(*given: Any) -> None:
        send(*given)
        raise OperationTimeout("it has not answered", memory="in_doubt")

    with monkeypatch.context() as broken:
        broken.setattr(feed._exchange, "send", loses_the_answer)
        with pytest.raises(OperationTimeout, match="has not answered"):
            feed.send(sent(2.0))
    assert feed.send(sent(3.0)) == first + 2


@pytest.mark.parametrize("has_feed", [True, False])
def test_each_rank_gathers_each_tensor_also_after_an_error(
    feed: EngineFeed, has_feed: bool
) -> None:
    """Else the other ranks would wait for it for ever."""
    gathered: list[str] = []

    def gathering() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in (*sent(), ("a", torch.zeros(3)), ("c", torch.zeros(1))):
            gathered.append(name)
            yield name, tensor

    if has_feed:
        send(feed, sent())
        with pytest.raises(RegistrationError, match="'c' is new"):
            send(feed, gathering())
    else:
        send(None, gathering())
    assert gathered == ["a", "b", "a", "c"]


def test_engines_need_a_coordinator_that_they_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORHUB_ADDRESS", raising=False)
    with pytest.raises(InvalidValue, match="set TENSORHUB_ADDRESS for the trainer's processes"):
        EngineFeed([Engine()])
