"""Weights for TRL's `AsyncGRPOTrainer`: `weight_transfer=WeightTransfer(...)`, and the rollouts'
side of it.

TRL hands its weights to rank 0 one tensor at a time. They are copied into buffers, and published as
one version. A rollout worker that has the model in its own process fills that in place. TRL counts
the policy's versions, from 1 before the first step. Here they are numbered likewise, after the
versions that were published under that name before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING, Any

from tensorhub import sync
from tensorhub.errors import (
    InvalidType,
    InvalidValue,
    ManifestMismatch,
    StateError,
    TensorHubError,
    some,
)
from tensorhub.integrations.checkpoint_engine import Exchange, Meeting
from tensorhub.integrations.fleet import Fleet
from tensorhub.integrations.given import bounded, texts
from tensorhub.integrations.releases import check_calls, check_release
from tensorhub.integrations.vllm_session import ExtensionClient, Session, Settings
from tensorhub.runtime.control.addresses import split_addresses
from tensorhub.types import Options

if TYPE_CHECKING:
    import torch
    from torch import nn

SUPPORTED = ("1.16",)
SETTINGS = {"address", "token", "model", "before"}  # of a rollout


class WeightTransfer:
    """The trainer's side: TRL's `WeightTransferProtocol`. TRL itself calls all its methods.

    `settings`: see `Exchange`. Without an address it runs a coordinator of its own on `host`, which
    only this machine reaches by default. `servers`: URLs of vLLM servers with
    `vllm_worker.WorkerExtension`, which are paused, updated and resumed together (`fleet.Fleet`);
    they need an address, and the token in their own environment. Without it, those that have
    announced themselves (`vllm_start`) are updated. `host_memory_bytes`: of each of
    their workers, see `vllm.TrainerInit`. `pause`, `resume`: called before and after each update,
    to stop an inference server of another kind.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        servers: Sequence[str] = (),
        host_memory_bytes: int = 0,
        pause: Callable[[], object] | None = None,
        resume: Callable[[], object] | None = None,
        **settings: Any,
    ) -> None:
        check_release("trl", installed_version("trl"), SUPPORTED, probe=_probe)
        self._exchange = Exchange(host=host, **settings)
        self._servers = list(texts("servers", servers, "http://HOST:PORT"))
        self._host_memory_bytes = host_memory_bytes
        if self._servers and not self._exchange.has_address:
            raise InvalidValue(
                "servers= need a coordinator that they reach: start `tensorhub serve`, and give "
                "its address= here, or in TENSORHUB_ADDRESS"
            )
        self._fleet: Fleet | None = None
        self._pause, self._resume = pause, resume
        self._meeting: Meeting | None = None
        self._sent = 0

    def init_weight_transfer(self) -> None:
        """Called once, when training begins."""
        self._meeting = self._exchange.join("sender", self._exchange.prepare())
        self._sent = 0
        if self._exchange.has_address:
            timeout_s = self._exchange.timeout_s
            settings = Settings(
                split_addresses(self._meeting.address),
                self._exchange.model,
                pause="keep",
                host_memory_bytes=self._host_memory_bytes,
                timeout_s=timeout_s,
            )
            self._fleet = Fleet(
                find=lambda: self._servers or self._exchange.servers(),
                make=lambda url: Session(ExtensionClient(url, timeout_s), settings),
                timeout_s=timeout_s,
            )
            if self._servers:
                self._fleet.join()

    def rollout_settings(self) -> dict[str, Any]:
        """What `RolloutWeights` takes, here or in another process; from the beginning of training
        on.
        """
        if self._meeting is None:
            raise StateError(
                "training has not begun, so there is nothing to join yet: TRL calls "
                "init_weight_transfer() first"
            )
        meeting = self._meeting
        return {
            "address": meeting.address,
            "token": meeting.token,
            "model": self._exchange.model,
            "before": meeting.next - 1,
        }

    def pause(self) -> None:
        if self._pause is not None:
            self._pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        if self._meeting is None:
            raise StateError("init_weight_transfer() comes before send_weights()")
        version = self._meeting.next + self._sent
        try:
            self._exchange.send(iterator, version)
        except TensorHubError as error:
            self._sent += error.memory == "in_doubt"  # it may be published all the same
            raise
        self._sent += 1
        if self._fleet is not None:
            self._fleet.update(self._exchange.published(version))

    def resume(self) -> None:
        if self._resume is not None:
            self._resume()

    def destroy(self) -> None:
        """Called when training ends: the version is unpublished, and a coordinator of its own
        ends.
        """
        if self._fleet is not None:
            self._fleet.close()
        self._exchange.close()
        self._meeting = self._fleet = None


def _probe() -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol

    check_calls(WeightTransfer, WeightTransferProtocol)


class RolloutWeights:
    """A rollout's policy, which is filled in place with what the trainer sends: its trainable
    parameters.

    `refresh` brings the newest version, in the thread that generates, between two generations.
    `update_model_version` says which version it has to be at least, from any thread: the rollout
    worker's method of that name calls it, where that is called in this process. Other rollouts read
    from here.
    """

    def __init__(
        self,
        policy: nn.Module,
        settings: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        *,
        timeout_s: float = 300.0,
        options: Options | None = None,
    ) -> None:
        """`settings`: what `WeightTransfer.rollout_settings()` gives. In the trainer's process it
        may be that method itself, which the first `refresh` calls.
        """
        if not callable(settings):
            _check_settings(settings)
        self._policy, self._settings, self._options = policy, settings, options
        self._timeout_s = timeout_s
        self._wanted = 1  # the newest version that was heard of; there is none before it
        self._before = self.version = 0
        self._model = ""
        self._hub: sync.Hub | None = None
        self._weights: sync.Weights | None = None

    def update_model_version(self, model_version: int) -> None:
        """Returns at once."""
        self._wanted = max(self._wanted, model_version)

    def refresh(self) -> int:
        """The policy's version, once it is the newest one, and at least what
        `update_model_version` was told, or the first. Asks the coordinator each time, so that no
        rollout generates with old weights for ever: `timeout_s` bounds the call.

        Raises ManifestMismatch (other names, shapes or dtypes than the trainer's, all listed),
        VersionUnavailable (it was not sent in time, or its holders have died, and nothing newer was
        sent), CoordinatorUnavailable (as after the end of a trainer that ran it), and as
        `tensorhub.connect`, `Hub.register` and `Weights.update`. The policy's memory may be torn
        then, and the next call repairs it.
        """
        until = time.monotonic() + self._timeout_s
        hub, weights = self._joined()
        at_least, held = self._before + self._wanted, weights.version
        if held is not None and held >= at_least:
            newest = hub.describe(self._model, self._timeout_s, limit=0).mark or 0
            if max(newest, at_least) == held:
                self.version = held - self._before
                return self.version
        self.version = 0  # nothing is known of the memory if this fails
        left_s = max(0.0, until - time.monotonic())
        try:
            report = weights.update("latest", at_least=at_least, timeout=left_s)
        except ManifestMismatch as error:
            found = error.differences
            text = (
                f"the policy's trainable parameters are not the trainer's: {len(found)} "
                f"difference(s): {some(found, '; ', most=100)}. Load the policy from the trainer's "
                f"model, in its dtype, and freeze what the trainer freezes"
            )
            raise ManifestMismatch(text, differences=found, memory=error.memory) from error
        self.version = report.version - self._before
        return self.version

    def _joined(self) -> tuple[sync.Hub, sync.Weights]:
        if self._hub is not None and self._weights is not None:
            return self._hub, self._weights
        settings = self._settings() if callable(self._settings) else self._settings
        _check_settings(settings)
        self._before, self._model = settings["before"], settings["model"]
        if self._hub is None:
            options = bounded(self._options, self._timeout_s)
            self._hub = sync.connect(settings["address"], token=settings["token"], options=options)
        sent = {name: each for name, each in self._policy.named_parameters() if each.requires_grad}
        self._weights = self._hub.register(self._model, sent)
        return self._hub, self._weights

    def close(self) -> None:
        """Leave the cluster."""
        if self._hub is not None:
            self._hub.close()


def _check_settings(settings: object) -> None:
    if not isinstance(settings, Mapping) or not settings.keys() >= SETTINGS:
        # never the token
        given = (
            sorted(map(str, settings)) if isinstance(settings, Mapping) else type(settings).__name__
        )
        raise InvalidType(
            f"settings: give the trainer's WeightTransfer.rollout_settings, or what that method "
            f"has returned there, "
            f"not {given}"
        )
