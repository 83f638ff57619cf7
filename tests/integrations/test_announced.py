"""How an engine announces itself; the fleets that find it so are tested with their trainers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub import sync
from tensorhub.errors import CoordinatorUnavailable, StateError, VersionConflict
from tensorhub.integrations import announced as module
from tensorhub.integrations.announced import SERVERS, Announcement, announce, announced
from tests.rig import OPTIONS

WAIT_S = 20.0
URL = "http://10.0.0.1:8000"


@pytest.fixture
def hub() -> Iterator[sync.Hub]:
    with (
        sync.serve(token="", options=OPTIONS) as coordinator,
        sync.connect(coordinator.address) as hub,
    ):
        yield hub


def test_a_number_that_is_taken_again_and_again_ends_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Weights:
        version = None

        def publish(self, number: int, timeout_s: float) -> None:
            clock[0] += 1.0
            assert clock[0] < 10.0
            raise VersionConflict(f"number {number} is taken")

    clock = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    weights: Any = Weights()
    describe: Any = lambda: SimpleNamespace(mark=clock[0])  # noqa: E731
    with pytest.raises(VersionConflict):
        Announcement(weights, describe).renew(5.0)
    assert clock[0] >= 5.0


def test_an_engine_that_cannot_be_announced_leaves_nothing_registered(
    hub: sync.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise StateError("not now")

    with monkeypatch.context() as broken:
        broken.setattr(sync.Weights, "publish", fails)
        with pytest.raises(StateError, match="not now"):
            announce(hub, "actor", SERVERS, URL)
    assert [each.summary.groups for each in hub.describe() if each.summary] in ([], [0])
    announce(hub, "actor", SERVERS, URL)
    assert list(announced(hub, "actor", SERVERS)) == [URL]


def test_an_engine_that_starts_anew_waits_for_no_announcement_before_it(hub: sync.Hub) -> None:
    """The coordinator may not have found it dead yet."""
    first, second = (announce(hub, "actor", SERVERS, URL) for _ in range(2))
    assert list(announced(hub, "actor", SERVERS)) == [URL]
    first.close()
    assert list(announced(hub, "actor", SERVERS)) == [URL]
    second.close()
    assert list(announced(hub, "actor", SERVERS)) == []


def test_an_engine_is_announced_again_after_errors_that_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Weights:
        version: int | None = None

        def publish(self, number: int, timeout_s: float) -> None:
            if errors:
                raise errors.pop()
            self.version = number
            is_announced.set()

        def close(self) -> None:
            pass

    errors = [StateError("not now"), CoordinatorUnavailable("it is away")]
    is_announced = threading.Event()
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    weights: Any = Weights()
    describe: Any = lambda: SimpleNamespace(mark=None)  # noqa: E731
    its = Announcement(weights, describe)
    its.keep()
    assert is_announced.wait(WAIT_S)
    its.close()


def test_a_closed_announcement_is_looked_after_no_more(hub: sync.Hub) -> None:
    its = announce(hub, "actor", SERVERS, URL)
    its.keep()
    (thread,) = [each for each in threading.enumerate() if each.name == "tensorhub-announced"]
    its.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
