"""A trainer that starts while another one is registered, which lives or is about to be found dead."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic
from types import SimpleNamespace

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import RegistrationError
from tensorhub.integrations import trainer_group
from tensorhub.integrations.sglang import Trainer
from tensorhub.types import Options

SOURCE = {"a": torch.zeros(2)}
LEASE_S = 0.5


@pytest.fixture
def address() -> Iterator[str]:
    with sync.serve(token="", options=Options(lease_s=LEASE_S)) as coordinator:
        yield coordinator.address


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_trainer_before_it_is_waited_for_until_it_is_gone(
    address: str, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    first = Trainer(SOURCE, [], address, allow_no_readers=True)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        first.close()

    monkeypatch.setattr(trainer_group, "time", SimpleNamespace(sleep=sleep, monotonic=monotonic))
    with Trainer(SOURCE, [], address, world_size=world_size, allow_no_readers=True):
        assert waits


@pytest.mark.parametrize("timeout_s", [300.0, 0.1])
def test_a_trainer_that_lives_is_named_after_the_lease_or_the_timeout(
    address: str, monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    waited = 0.0

    def sleep(seconds: float) -> None:
        nonlocal waited
        waited += seconds

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: waited)
    monkeypatch.setattr(trainer_group, "time", clock)
    with (
        Trainer(SOURCE, [], address, allow_no_readers=True),
        pytest.raises(
            RegistrationError, match="another trainer publishes 'actor', or one has died"
        ) as error,
    ):
        Trainer(SOURCE, [], address, allow_no_readers=True, timeout_s=timeout_s)
    assert "less than 0.5 s ago" in str(error.value)
    assert error.value.retryable
    wanted = min(timeout_s, 2 * LEASE_S)
    assert wanted <= waited <= wanted + 2 * trainer_group.RETRY_S


def test_what_is_wrong_with_the_tensors_is_said_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_group, "time", SimpleNamespace(monotonic=monotonic))
    with pytest.raises(RegistrationError, match="'a'"):
        Trainer({"a": torch.zeros(4, 4).t()}, [], address, allow_no_readers=True)
