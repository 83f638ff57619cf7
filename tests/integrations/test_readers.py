"""A trainer that nothing listens to says so at its second update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import InvalidType, InvalidValue, StateError
from tensorhub.integrations import readers
from tensorhub.integrations.checkpoint_engine import Exchange
from tensorhub.integrations.sglang import Trainer
from tensorhub.integrations.streamed import Sender
from tests.rig import OPTIONS


@pytest.fixture
def address() -> Iterator[str]:
    with sync.serve(token="", options=OPTIONS) as coordinator:
        yield coordinator.address


@pytest.fixture
def hub(address: str) -> Iterator[sync.Hub]:
    with sync.connect(address, options=OPTIONS) as hub:
        yield hub


def sent(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((4,), value))]


def send(sender: Sender, *versions: int) -> None:
    for version in versions:
        sender.send(version, sent(float(version)))


def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(4)}


def test_the_second_update_without_a_reader_is_an_error_and_publishes_nothing(
    hub: sync.Hub,
) -> None:
    sender = Sender(hub, "actor", timeout_s=0.5)
    send(sender, 1)
    for version in (2, 3):
        with pytest.raises(
            StateError, match=r"nothing reads 'actor': version 1 .*allow_no_readers"
        ):
            send(sender, version)
    assert hub.describe("actor", limit=0).mark == 1
    reader = hub.register("actor", tensors())  # it comes late
    send(sender, 2)
    assert reader.update("latest").version == 2


def test_a_first_reader_that_is_starting_is_waited_for(
    hub: sync.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while the second update waits."""
    registered: list[sync.Weights] = []
    monkeypatch.setattr(
        readers, "sleep", lambda _: registered.append(hub.register("actor", tensors()))
    )
    sender = Sender(hub, "actor")
    send(sender, 1, 2)
    assert len(registered) == 1
    assert registered[0].update("latest").version == 2


def test_a_reader_that_was_seen_may_go(hub: sync.Hub) -> None:
    """A fleet of preempted rollouts comes back; the trainer goes on meanwhile."""
    sender = Sender(hub, "actor")
    send(sender, 1)
    hub.fetch("actor", 1)
    send(sender, 2, 3)


def test_a_reader_of_an_earlier_trainer_does_not_count(hub: sync.Hub) -> None:
    earlier = Sender(hub, "actor")
    send(earlier, 1)
    hub.fetch("actor", 1)
    earlier.close()
    sender = Sender(hub, "actor", timeout_s=0.5)
    send(sender, 2)
    with pytest.raises(StateError, match="nothing reads 'actor': version 2"):
        send(sender, 3)


def test_what_a_trainer_itself_has_read_counts_for_no_reader(hub: sync.Hub) -> None:
    """As where it took over another one's weights."""
    before = hub.register("actor", tensors())
    before.publish(1)
    hub.register("actor", tensors(), group="trainer").update(1)
    before.close()
    with pytest.raises(StateError, match="nothing reads 'actor': version 1"):
        readers.Readers(hub, "actor", "trainer", are_optional=False).check(1, 0.2)


def test_readers_are_optional_where_the_setting_says_so(
    hub: sync.Hub, caplog: pytest.LogCaptureFixture
) -> None:
    send(Sender(hub, "actor", allow_no_readers=True), 1, 2, 3)
    assert caplog.text.count("no_readers") == 1


def test_the_adapters_pass_the_setting_on(address: str) -> None:
    def updates(**settings: Any) -> None:
        exchange = Exchange(host="127.0.0.1", address=address, timeout_s=2.0, **settings)
        try:
            exchange.join("sender", exchange.prepare())
            for _ in range(2):
                exchange.join("sender", exchange.prepare())
                exchange.send(sent(1.0), None)
        finally:
            exchange.close()

    with pytest.raises(StateError, match="nothing reads 'actor'"):
        updates()
    updates(model="other", allow_no_readers=True)
    with pytest.raises(InvalidType, match="allow_no_readers=1: give True or False"):
        Exchange(host="127.0.0.1", allow_no_readers=1)  # type: ignore[arg-type]


def test_sglangs_trainer_without_engines(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidValue, match=r"engines=\[\]: nothing would take .*allow_no_readers"):
        Trainer(tensors(), [], address, timeout_s=2.0)
    with Trainer(tensors(), [], address, timeout_s=2.0, allow_no_readers=True) as trainer:
        assert [trainer.send_weights() for _ in range(3)] == [0, 1, 2]
    assert caplog.text.count("no_readers") == 1
