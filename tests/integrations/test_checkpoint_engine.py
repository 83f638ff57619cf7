"""Who meets where, under which number, and what is refused: the part of verl's and NeMo-RL's
engines that needs neither.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import tensorhub
from tensorhub import sync
from tensorhub.errors import (
    AuthenticationFailed,
    OperationTimeout,
    StateError,
    TensorHubError,
    VersionConflict,
)
from tensorhub.integrations.checkpoint_engine import KEY, Exchange
from tests.rig import OPTIONS, library_threads

Make = Callable[..., Exchange]


def weights(value: float) -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.full((4, 4), value)
    yield "b", torch.full((), value)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.delenv("TENSORHUB_ADDRESS", raising=False)
    made: list[Exchange] = []

    def make(**settings: Any) -> Exchange:
        made.append(Exchange(host="127.0.0.1", **{"timeout_s": 20.0, **settings}))
        return made[-1]

    yield make
    for each in made:
        anyio.run(each.leave)
        each.close()
    assert not library_threads()


@pytest.fixture
def address() -> Iterator[str]:
    with sync.serve(token="", options=OPTIONS) as coordinator:
        yield coordinator.address


async def received(exchange: Exchange, version: int | None) -> list[float]:
    return [tensor.flatten()[0].item() async for _, tensor in exchange.receive(version)]


def update(sender: Exchange, receiver: Exchange, value: float, version: int | None) -> list[float]:
    meeting = sender.prepare()
    sender.join("sender", meeting)
    receiver.join("receiver", meeting)
    sender.send(weights(value), version)
    return anyio.run(received, receiver, version)


def test_without_an_address_the_sender_runs_a_coordinator_whose_token_goes_with_it(
    make: Make,
) -> None:
    sender, receiver = make(), make()
    for version in (1, 2, None, None):
        value = 1.5 if version is None else float(version)
        assert update(sender, receiver, value, version) == [value, value]
    meeting = sender.prepare()[KEY]
    assert (meeting["mark"], meeting["held"]) == (4, 4)
    with pytest.raises(AuthenticationFailed):
        sync.connect(meeting["address"], token="another")


def test_a_receiver_follows_a_new_trainer_and_leaves_the_old_ones_cluster(make: Make) -> None:
    old, new, receiver = make(), make(), make()
    assert update(old, receiver, 1.0, 1) == [1.0, 1.0]
    assert update(new, receiver, 2.0, 1) == [2.0, 2.0]
    assert len(old._connected().describe("actor").replicas) == 1  # its own


def test_an_address_is_taken_from_the_settings_or_the_environment(
    make: Make, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make(address=address).prepare()[KEY] == {
        "address": address,
        "token": None,
        "mark": None,
        "held": None,
    }
    monkeypatch.setenv("TENSORHUB_ADDRESS", address)
    sender = make()
    assert update(sender, make(), 3.0, 3) == [3.0, 3.0]
    assert sender.prepare()[KEY]["address"] == address


def test_a_number_that_was_used_before_the_update_is_refused_on_both_sides(
    make: Make, address: str
) -> None:
    """The error has the call that lets a resumed run go on."""
    old, receiver = make(address=address), make(address=address)
    assert update(old, receiver, 5.0, 5) == [5.0, 5.0]
    new = make(address=address)  # of another run, or of this one from an older checkpoint
    for version in (5, 3, 0):
        with pytest.raises(VersionConflict, match="another model=") as sent:
            update(new, receiver, 1.0, version)
        with pytest.raises(VersionConflict, match="up to 5 were published before") as got:
            anyio.run(received, receiver, version)
        assert str(sent.value) == str(got.value)
        assert ("rollback" in str(got.value)) == (version > 0)  # nothing is before 0
    with pytest.raises(VersionConflict) as refused:
        update(new, receiver, 1.0, 3)
    _, code, _ = str(refused.value).split("`")
    assert code.endswith("hub.rollback('actor', to=2)")
    exec(code, {"tensorhub": tensorhub})
    assert update(new, receiver, 3.0, 3) == [3.0, 3.0]
    assert update(new, receiver, 6.0, None) == [6.0, 6.0]


def test_the_same_number_again_brings_it_to_who_lacks_it(make: Make) -> None:
    sender, receiver = make(), make()
    assert update(sender, receiver, 1.0, 1) == [1.0, 1.0]
    assert update(sender, make(), 1.0, 1) == [1.0, 1.0]
    with pytest.raises(VersionConflict, match="with other bytes"):
        update(sender, receiver, 2.0, 1)


def test_a_sender_that_was_closed_begins_anew(make: Make) -> None:
    sender, receiver = make(), make()
    assert update(sender, receiver, 9.0, 9) == [9.0, 9.0]
    sender.close()
    anyio.run(receiver.leave)
    assert not library_threads()
    with pytest.raises(StateError, match="takes no part in updates yet"):
        sender.send(weights(1.0), 1)
    assert (sender.prepare()[KEY]["mark"], sender.prepare()[KEY]["held"]) == (None, None)
    assert update(sender, receiver, 1.0, 1) == [1.0, 1.0]


def test_who_does_not_send_leaves_what_its_own_prepare_has_opened(make: Make) -> None:
    def threads() -> list[str]:
        return sorted(
            each.name for each in threading.enumerate() if each.name.startswith("tensorhub-")
        )

    sender = make()
    meeting, opened = sender.prepare(), threads()
    for role in ("idle", "receiver"):
        other = make()
        other.prepare()  # NeMo-RL calls it on each
        other.join(role, meeting)
        assert threads() == opened


def test_a_coordinator_that_is_given_by_its_address_is_joined_by_a_token_file(
    make: Make, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("a secret that only this cluster has")
    with sync.serve(token=token, options=OPTIONS) as coordinator:
        given = {"address": coordinator.address, "token": str(token)}
        sender, receiver = make(**given), make(**given)
        assert update(sender, receiver, 1.0, 1) == [1.0, 1.0]
        assert sender.prepare()[KEY]["token"] is None, "a token of others goes nowhere"
        sender.close()
        anyio.run(receiver.leave)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"transports": ["pigeon"]}, "pigeon"),
        ({"options": {"listen_host": "192.0.2.1"}}, "192.0.2.1"),
        ({"device": "cuda:99"}, "cuda:99"),
    ],
)
def test_each_setting_reaches_both_sides(
    make: Make, address: str, setting: dict[str, Any], said: str
) -> None:
    """One that cannot be used is refused by either."""

    def publish(exchange: Exchange) -> None:
        exchange.join("sender", exchange.prepare())
        exchange.send(weights(1.0), None)

    sender = make(address=address)
    publish(sender)
    meeting = sender.prepare()
    wrong = make(address=address, **setting)
    wrong.join("receiver", meeting)
    with pytest.raises(TensorHubError, match=said):
        anyio.run(received, wrong, 1)
    with pytest.raises(TensorHubError, match=said):
        publish(wrong)


def test_who_waits_for_an_update_is_let_go_by_the_next_one_or_the_deadline(make: Make) -> None:
    sender, receiver = make(), make(timeout_s=0.5)
    receiver.join("receiver", sender.prepare())
    with pytest.raises(OperationTimeout):
        anyio.run(received, receiver, 1)

    async def run() -> None:
        waits = make()
        waits.join("receiver", meeting)
        found = waits.receive(1)
        async with anyio.create_task_group() as tasks:

            async def first() -> None:
                with pytest.raises(
                    StateError, match="to version 1 was given up here: a later one has begun"
                ):
                    await anext(found)

            tasks.start_soon(first)
            while waits._receiving is None:
                await anyio.lowlevel.checkpoint()
            waits.join("receiver", meeting)

    meeting = sender.prepare()
    anyio.run(run)


def test_an_update_that_ends_late_does_not_forget_the_one_that_has_begun(make: Make) -> None:
    sender, receiver = make(), make()
    assert update(sender, receiver, 1.0, 1) == [1.0, 1.0]
    meeting = sender.prepare()

    async def second() -> None:
        with pytest.raises(
            StateError, match="to version 3 was given up here: a later one has begun"
        ):
            await received(receiver, 3)

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            first = anyio.Event()

            async def receive_first() -> None:
                assert await received(receiver, 2) == [2.0, 2.0]
                first.set()

            tasks.start_soon(receive_first)
            while receiver._receiving is None:
                await anyio.lowlevel.checkpoint()
            begun = receiver._receiving
            tasks.start_soon(second)
            while receiver._receiving is begun:
                await anyio.lowlevel.checkpoint()
            await anyio.to_thread.run_sync(sender.send, weights(2.0), 2)
            await first.wait()
            receiver.join("receiver", meeting)

    anyio.run(run)


def test_a_rank_that_does_not_send_runs_through_its_generator(make: Make) -> None:
    sender, idle = make(), make()
    idle.join("idle", sender.prepare())
    left = weights(1.0)
    assert idle.send(left, 1) == {}
    assert next(left, None) is None
    assert sender.prepare()[KEY]["mark"] is None


def test_calls_in_the_wrong_order_say_what_comes_first(make: Make) -> None:
    sender = make()
    with pytest.raises(StateError, match="takes no part in updates yet"):
        sender.send(weights(1.0), 1)
    with pytest.raises(StateError, match="or was another backend's"):
        sender.join("sender", {})
    sender.join("sender", sender.prepare())
    with pytest.raises(StateError, match="is 'sender' in updates"):
        anyio.run(received, sender, 1)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            {"adress": "tcp://127.0.0.1:1"},
            r"no setting 'adress' \(did you mean 'address'\?\); there are host, address,",
        ),
        (
            {"address": "host:1"},
            r"'host:1' is not .* give \"tcp://HOST:PORT\", with .* or \"ray-actor://NAME\"",
        ),
        ({"timeout_s": "soon"}, "timeout_s='soon': give seconds"),
        ({"model": ""}, "cannot name a model"),
        ({"device": "gpu"}, "device='gpu': give 'cpu', or 'cuda'"),
        ({"transports": "tcp"}, r"transports='tcp': give a list"),
        ({"options": 5}, "options=5: give values by their names"),
        ({"options": {"chunk_bytes": 1}}, "chunk_bytes = 1: give 4096"),
        (
            {"options": {"host_memory": 1}},
            r"no option 'host_memory' \(did you mean 'host_memory_bytes'\?\)",
        ),
    ],
)
def test_settings_that_cannot_be_used_are_named_before_the_first_update(
    make: Make, wrong: dict[str, Any], says: str
) -> None:
    with pytest.raises(StateError, match=says):
        make(**wrong)
