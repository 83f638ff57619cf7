"""Copies of what a generator yields: one version an update, or none; and what receivers hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest
import torch

import tensorhub
from tensorhub import sync
from tensorhub.errors import (
    InvalidValue,
    RegistrationError,
    VersionConflict,
    VersionUnavailable,
)
from tensorhub.integrations.readers import Readers
from tensorhub.integrations.streamed import Receiver, Sender
from tests.rig import OPTIONS

SHAPES = {"embed": (64, 16), "norm": (16,), "scale": ()}


def weights(version: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        name: torch.full(shape, version + number).to(dtype)
        for number, (name, shape) in enumerate(SHAPES.items())
    }


@pytest.fixture
def address() -> Iterator[str]:
    with sync.serve(token="", options=OPTIONS) as coordinator:
        yield coordinator.address


@pytest.fixture
def hub(address: str) -> Iterator[sync.Hub]:
    with sync.connect(address, name="trainer", token="", options=OPTIONS) as hub:
        yield hub


def received(
    address: str, *versions: int, timeout_s: float = 30.0
) -> list[dict[str, torch.Tensor]]:
    """What a receiver has after each of these updates, which are made in loops of their own."""
    found = []

    async def connect() -> Receiver:
        return Receiver(
            await tensorhub.connect(address, name="rollout", token="", options=OPTIONS), "m"
        )

    receiver = anyio.run(connect)
    try:
        for version in versions:
            buffers, _ = anyio.run(receiver.receive, version, timeout_s)
            found.append({name: buffer.clone() for name, buffer in buffers.items()})
    finally:
        anyio.run(receiver.close)
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(expected) and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def test_each_update_is_one_version_and_is_copied_once(address: str, hub: sync.Hub) -> None:
    sender = Sender(hub, "m")
    first = weights(1)
    sent = sender.send(1, iter(first.items()))
    assert (sent.version, sent.changed, sent.nbytes) == (
        1,
        True,
        sum(each.nbytes for each in first.values()),
    )
    for each in first.values():
        each.zero_()  # the caller's own memory is not what is published
    assert same(received(address, 1)[0], weights(1))
    held = [buffer.data_ptr() for buffer in sender._buffers.values()]
    for version in (2, 5):
        sender.send(version, weights(version).items())
        assert same(received(address, version)[0], weights(version))
    assert held == [buffer.data_ptr() for buffer in sender._buffers.values()]
    assert [view.version for view in hub.describe("m").versions if view.state == "available"] == [5]


def test_a_receivers_buffers_stay_and_serve(address: str, hub: sync.Hub) -> None:
    async def run() -> None:
        async with tensorhub.connect(address, name="rollout", token="", options=OPTIONS) as mine:
            receiver = Receiver(mine, "m")
            buffers, report = await receiver.receive(1, 30.0)
            # none was read to allocate
            assert report.bytes_read == sum(each.nbytes for each in weights(1).values())
            places = {name: buffer.data_ptr() for name, buffer in buffers.items()}
            assert same(buffers, weights(1))
            await anyio.to_thread.run_sync(sender.send, 2, weights(2).items())
            buffers, _ = await receiver.receive(2, 30.0)
            assert same(buffers, weights(2))
            assert places == {name: each.data_ptr() for name, each in buffers.items()}
            sender.close()
            assert same(await anyio.to_thread.run_sync(lambda: received(address, 2)[0]), weights(2))

    sender = Sender(hub, "m")
    sender.send(1, weights(1).items())
    anyio.run(run)


@pytest.mark.parametrize("first", [True, False])
def test_what_a_generator_raises_leaves_nothing_published(
    address: str, hub: sync.Hub, first: bool
) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(2).items())[:2]
        raise RuntimeError("a rank is gone")

    sender = Sender(hub, "m", allow_no_readers=True)
    if not first:
        sender.send(1, weights(1).items())
    with pytest.raises(RuntimeError, match="a rank is gone"):
        sender.send(2, broken())
    assert sender.version is None
    sender.send(3, weights(3).items())
    assert same(received(address, 3)[0], weights(3))
    assert hub.describe("m").mark == 3


def test_all_that_differs_is_in_one_error_and_nothing_is_published(
    address: str, hub: sync.Hub
) -> None:
    sender = Sender(hub, "m", allow_no_readers=True)
    sender.send(1, weights(1).items())
    other = weights(2) | {"norm": torch.zeros(8), "extra": torch.zeros(1)}
    del other["scale"]
    left = iter([*other.items(), ("embed", other["embed"])])
    with pytest.raises(RegistrationError) as error:
        sender.send(2, left)
    text = (
        "'norm' is float32 (8,), and was float32 (16,); 'extra' is new; 'embed' came twice; "
        "'scale' is missing"
    )
    assert text in str(error.value)
    assert "4 tensor(s)" in str(error.value)
    assert next(left, None) is None
    assert sender.version is None
    with pytest.raises(RegistrationError, match="'norm' is bfloat16"):
        sender.send(2, weights(2, torch.bfloat16).items())
    sender.send(2, weights(2).items())
    assert same(received(address, 2)[0], weights(2))


def test_parameters_that_are_trained_are_copied_without_a_graph(
    address: str, hub: sync.Hub
) -> None:
    sender = Sender(hub, "m")
    for version in (1, 2):
        sender.send(
            version, ((name, torch.nn.Parameter(each)) for name, each in weights(version).items())
        )
        assert same(received(address, version)[0], weights(version))
    assert not any(buffer.requires_grad for buffer in sender._buffers.values())


def test_a_name_that_comes_twice_at_first(hub: sync.Hub) -> None:
    with pytest.raises(RegistrationError, match=r"1 name\(s\) came twice in one update: 'norm'"):
        Sender(hub, "m").send(1, [*weights(1).items(), ("norm", torch.zeros(16))])


def test_the_same_number_again_is_the_same_bytes_or_a_conflict(address: str, hub: sync.Hub) -> None:
    sender = Sender(hub, "m")
    first = weights(1) | {"nan": torch.tensor([float("nan")])}
    sender.send(1, first.items())
    assert not sender.send(1, first.items()).changed
    with pytest.raises(VersionConflict, match=r"with other bytes in 1 tensor\(s\): 'norm'"):
        sender.send(1, (first | {"norm": torch.zeros(16)}).items())
    assert sender.version == 1


def test_a_first_publication_that_is_refused_leaves_buffers_that_serve_the_next(
    address: str, hub: sync.Hub
) -> None:
    with sync.connect(address, name="other", token="", options=OPTIONS) as theirs:
        other = Sender(theirs, "m")
        other.send(5, weights(5).items())
        other.close()
    assert other.nbytes == 0
    sender = Sender(hub, "m")
    with pytest.raises(VersionConflict):
        sender.send(4, weights(4).items())
    held = [buffer.data_ptr() for buffer in sender._buffers.values()]
    sender.send(6, weights(6).items())
    assert same(received(address, 6)[0], weights(6))
    assert held == [buffer.data_ptr() for buffer in sender._buffers.values()]
    assert "handles=1" in repr(hub), "the refused one is registered once"


def test_a_receiver_that_is_late_is_told_that_its_version_is_gone(
    address: str, hub: sync.Hub
) -> None:
    """It does not take a newer one for it, neither at first nor later."""

    async def run() -> None:
        async with tensorhub.connect(address, name="rollout", token="", options=OPTIONS) as mine:
            receiver = Receiver(mine, "m")
            await receiver.receive(1, 30.0)
            for version in (2, 3):
                await anyio.to_thread.run_sync(sender.send, version, weights(version).items())
            with pytest.raises(VersionUnavailable, match="no live worker holds 2 of 'm'"):
                await receiver.receive(2, 1.0)

    sender = Sender(hub, "m")
    sender.send(1, weights(1).items())
    anyio.run(run)
    with pytest.raises(VersionUnavailable, match="version 1"):
        received(address, 1)


def test_buffers_on_a_device_that_is_not_there(hub: sync.Hub) -> None:
    left = iter(weights(1).items())
    with pytest.raises(
        InvalidValue,
        match=r"device='cuda:99': a buffer for a tensor of shape \(64, 16\) cannot be made",
    ):
        Sender(hub, "m", device="cuda:99").send(1, left)
    assert next(left, None) is None


@pytest.mark.parametrize("first", [True, False])
def test_a_sender_waits_as_long_as_its_timeout(
    hub: sync.Hub, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Of each call that may wait for others."""
    given: list[object] = []
    sender = Sender(hub, "m", timeout_s=7.5, allow_no_readers=True)
    sender.send(1, weights(1).items())
    publish, mutate, check = sync.Weights.publish, sync.Weights.mutate, Readers.check

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(self: Any, what: Any, timeout: Any = None) -> Any:
            given.append(timeout)
            return call(self, what, timeout)

        return called

    monkeypatch.setattr(sync.Weights, "publish", noted(publish))
    monkeypatch.setattr(sync.Weights, "mutate", noted(mutate))
    monkeypatch.setattr(Readers, "check", noted(check))
    if first:
        sender.close()
    sender.send(2, weights(2).items())
    assert given == [7.5, 7.5]
