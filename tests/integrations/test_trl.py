"""Both sides of TRL's adapter, as far as TRL is not needed for it (tests/frameworks has a trainer
of TRL's).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tensorhub import sync
from tensorhub.errors import (
    CoordinatorUnavailable,
    ManifestMismatch,
    OperationTimeout,
    RegistrationError,
    StateError,
    VersionUnavailable,
)
from tensorhub.integrations import trl
from tensorhub.integrations.trl import RolloutWeights, WeightTransfer
from tests.rig import library_threads

Rollout = Callable[..., RolloutWeights]


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightTransfer]:
    """One whose training has begun, with a coordinator of its own."""
    monkeypatch.delenv("TENSORHUB_ADDRESS", raising=False)
    monkeypatch.setattr("tensorhub.integrations.trl.installed_version", lambda name: "1.16.0")
    made = WeightTransfer(timeout_s=20.0, allow_no_readers=True)
    made.init_weight_transfer()
    yield made
    made.destroy()


@pytest.fixture
def rollout(transfer: WeightTransfer) -> Iterator[Rollout]:
    made: list[RolloutWeights] = []

    def make(policy: nn.Module, **options: Any) -> RolloutWeights:
        made.append(
            RolloutWeights(policy, transfer.rollout_settings, **{"timeout_s": 20.0, **options})
        )
        return made[-1]

    yield make
    for each in made:
        each.close()
    transfer.destroy()
    assert not library_threads()


class Policy(nn.Module):
    """It is trained but for its head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Parameter(torch.zeros(8, 4))
        self.head = nn.Parameter(torch.full((4,), 77.0), requires_grad=False)


def sent(value: float) -> Iterator[tuple[str, torch.Tensor]]:
    yield "body", nn.Parameter(torch.full((8, 4), value))  # as it comes from an optimizer's model


def values(policy: Policy) -> tuple[set[float], set[float]]:
    return set(policy.body.flatten().tolist()), set(policy.head.tolist())


def test_a_policy_has_what_was_sent_last_in_its_trainable_parameters(
    transfer: WeightTransfer, rollout: Rollout
) -> None:
    policy = Policy()
    weights = rollout(policy)
    for version in (1, 2, 3):
        transfer.send_weights(sent(float(version)))
        weights.update_model_version(version)
        assert weights.refresh() == version == weights.version
        assert values(policy) == ({version}, {77.0})


def test_a_policy_in_another_process_follows_what_it_is_not_told_of(
    transfer: WeightTransfer, rollout: Rollout
) -> None:
    policy = Policy()
    weights = rollout(policy)
    for version in (1, 2, 4):
        while transfer._sent < version:
            transfer.send_weights(sent(float(transfer._sent + 1)))
        assert weights.refresh() == version
        assert weights.refresh() == version == weights.version
        assert values(policy) == ({version}, {77.0})


def test_a_rollout_does_not_go_on_for_ever_without_the_trainers_coordinator(
    transfer: WeightTransfer, rollout: Rollout
) -> None:
    policy = Policy()
    weights = rollout(policy, timeout_s=0.5)
    transfer.send_weights(sent(1.0))
    assert weights.refresh() == 1
    transfer.destroy()
    with pytest.raises(CoordinatorUnavailable):
        weights.refresh()


def test_a_policy_that_is_not_the_trainers_is_told_what_a_policy_can_do(
    transfer: WeightTransfer, rollout: Rollout
) -> None:
    policy = Policy().to(torch.bfloat16)
    transfer.send_weights(sent(1.0))
    with pytest.raises(ManifestMismatch, match=r"'body'.*in its dtype, and freeze") as error:
        rollout(policy).refresh()
    assert len(error.value.differences) == 1
    assert "tensorhub.conversion" not in str(error.value)


def test_versions_that_are_heard_of_late_or_never(
    transfer: WeightTransfer, rollout: Rollout
) -> None:
    """An older one that is heard of last does not count, and a newer one than any that was heard of
    is taken as it is.
    """
    for version in (1, 2, 3):
        transfer.send_weights(sent(float(version)))
    weights = rollout(Policy())
    weights.update_model_version(2)
    assert weights.refresh() == 3
    transfer.send_weights(sent(4.0))
    weights.update_model_version(4)
    weights.update_model_version(3)
    assert weights.refresh() == 4


def test_a_version_that_does_not_come_is_waited_for_until_the_deadline(
    transfer: WeightTransfer, rollout: Rollout
) -> None:
    weights = rollout(Policy(), timeout_s=3.0)
    transfer.send_weights(sent(1.0))
    assert weights.refresh() == 1
    weights.update_model_version(2)
    with pytest.raises(
        VersionUnavailable, match=r"version 2 of 'actor' was not published.*waited \d"
    ):
        weights.refresh()
    assert weights.version == 0
    transfer.send_weights(sent(2.0))
    assert weights.refresh() == 2


def test_what_a_refresh_has_used_of_its_seconds_is_waited_for_no_second_time(
    transfer: WeightTransfer, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = rollout(Policy(), timeout_s=20.0)
    transfer.send_weights(sent(1.0))
    assert weights.refresh() == 1
    weights.update_model_version(2)
    seconds = iter((0.0, 19.9))
    monkeypatch.setattr(trl, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    with pytest.raises(VersionUnavailable, match=r"waited 0"):
        weights.refresh()


def test_a_policy_that_cannot_be_registered_yet(transfer: WeightTransfer, rollout: Rollout) -> None:
    policy = Policy()
    policy.body = nn.Parameter(torch.empty(8, 4, device="meta"))
    weights = rollout(policy)
    transfer.send_weights(sent(1.0))
    with pytest.raises(RegistrationError, match="body"):
        weights.refresh()
    policy.body = nn.Parameter(torch.zeros(8, 4))
    assert weights.refresh() == 1
    assert values(policy) == ({1.0}, {77.0})


def test_training_that_begins_anew_counts_anew(transfer: WeightTransfer, rollout: Rollout) -> None:
    for version in (1, 2):
        transfer.send_weights(sent(float(version)))
    assert rollout(Policy()).refresh() == 2
    transfer.destroy()
    with pytest.raises(StateError, match="training has not begun"):
        transfer.rollout_settings()
    with pytest.raises(StateError, match="comes before send_weights"):
        transfer.send_weights(sent(3.0))
    transfer.init_weight_transfer()
    transfer.send_weights(sent(1.0))
    assert rollout(Policy()).refresh() == 1


def test_a_second_training_counts_from_the_versions_of_the_first(
    transfer: WeightTransfer, rollout: Rollout
) -> None:
    """An older rollout still serves the first one's last version, which is none of the second
    one's.
    """
    with sync.serve(token="") as coordinator:
        first, second = (
            WeightTransfer(address=coordinator.address, timeout_s=20.0, allow_no_readers=True)
            for _ in range(2)
        )
        first.init_weight_transfer()
        for version in (1, 2):
            first.send_weights(sent(float(version)))
        older = RolloutWeights(Policy(), first.rollout_settings, timeout_s=20.0)
        assert older.refresh() == 2
        first.destroy()
        second.init_weight_transfer()
        policy = Policy()
        early, weights = (
            RolloutWeights(policy, second.rollout_settings(), timeout_s=timeout_s)
            for timeout_s in (0.5, 20.0)
        )
        with pytest.raises(VersionUnavailable, match="version 3 of 'actor' was not published"):
            early.refresh()
        second.send_weights(sent(3.0))
        assert weights.refresh() == 1
        assert values(policy) == ({3.0}, {77.0})
        for each in (older, early, weights):
            each.close()
        second.destroy()


def test_a_version_that_nobody_has_any_more_is_waited_for_until_the_next_one_comes(
    transfer: WeightTransfer,
) -> None:
    with sync.serve(token="") as coordinator:
        first, second = (
            WeightTransfer(address=coordinator.address, timeout_s=20.0, allow_no_readers=True)
            for _ in range(2)
        )
        first.init_weight_transfer()
        settings = first.rollout_settings()
        first.send_weights(sent(1.0))
        first.destroy()
        late = RolloutWeights(Policy(), settings, timeout_s=0.2)
        with pytest.raises(VersionUnavailable, match="no live worker holds 'latest' of 'actor'"):
            late.refresh()
        weights = RolloutWeights(Policy(), settings, timeout_s=20.0)
        with ThreadPoolExecutor(1) as thread:
            refreshed = thread.submit(weights.refresh)
            second.init_weight_transfer()
            second.send_weights(sent(2.0))
            assert refreshed.result() == 2
        for each in (late, weights):
            each.close()
        second.destroy()


def test_what_failed_does_not_take_a_number(transfer: WeightTransfer, rollout: Rollout) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from sent(1.0)
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="a rank is gone"):
        transfer.send_weights(broken())
    transfer.send_weights(sent(1.0))
    assert rollout(Policy()).refresh() == 1


def test_what_may_have_been_published_takes_its_number(
    transfer: WeightTransfer, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the coordinator stood still: no later weights could be sent with that number."""
    send = transfer._exchange.send

    def loses_the_answer(*given: Any) -> None:
        send(*given)
        raise OperationTimeout("it has not answered", memory="in_doubt")

    with monkeypatch.context() as broken:
        broken.setattr(transfer._exchange, "send", loses_the_answer)
        with pytest.raises(OperationTimeout, match="has not answered"):
            transfer.send_weights(sent(1.0))
    transfer.send_weights(sent(2.0))
    weights = rollout(Policy())
    weights.update_model_version(1)  # as the framework counts
    assert weights.refresh() == 2
