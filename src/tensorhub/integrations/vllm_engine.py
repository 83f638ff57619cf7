"""vLLM's workers: the engine's side of the weight-transfer backend `tensorhub`.

Responsible for vLLM's interface, in its order of calls. Not responsible for an update itself
(`vllm_updater`), nor for the trainer (`vllm_trainer`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from tensorhub.errors import StateError
from tensorhub.integrations import vllm_sleep
from tensorhub.integrations.vllm import new_updater
from tensorhub.integrations.vllm_ranks import Outcome
from tensorhub.integrations.vllm_session import INTACT, OPEN, TORN

vllm_sleep.watch()  # vLLM imports this module in its workers


@dataclass
class Init(WeightTransferInitInfo):
    """`replica`: the trainer's word for its engines. `version`: the next version, to get ready for.
    `check`: compare the engine's tensors with `version` of this model, or with the served one.
    `whole`: raise if the weights are torn.
    """

    address: str | list[str]
    model: str
    replica: str
    host_memory_bytes: int = 0
    timeout_s: float = 300.0
    ignored: list[str] = field(default_factory=list)
    version: int | None = None
    check: str | None = None
    whole: bool = False


@dataclass
class Update(WeightTransferUpdateInfo):
    version: int


class Engine(WeightTransferEngine[Init, Update]):  # type: ignore[type-arg, unused-ignore]
    """One worker of vLLM's. Made by vLLM, after it has loaded the model."""

    init_info_cls = Init
    update_info_cls = Update
    supports_draft_weight_update = False

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.updater = new_updater(model, vllm_config)
        self._ranks = self.updater.ranks
        self._is_joined = False
        self._is_open = self._is_updated = self._is_abandoned = False

    def init_transfer_engine(self, init_info: Init) -> None:
        """Join the trainer's cluster, get ready for its next version, or check the served
        version.
        """
        self._is_abandoned = self._is_open  # by a trainer that is gone, or did not hear of its end
        outcome = self._together(self._check_closed)
        if not outcome.has_failed:
            outcome = self._join(init_info)
        self._is_joined = not outcome.has_failed
        if outcome.error is not None:
            raise outcome.error

    def _check_closed(self) -> None:
        # of several workers, the last one has closed a failed update
        if self._is_open and (self._ranks.count == 1 or not self._ranks.speaks):
            raise StateError(f"finish_weight_update comes first [{OPEN}]")

    def _check_open(self) -> None:
        if not self._is_joined or not self._is_open:
            raise StateError(
                "update_weights comes after init_weight_transfer_engine and start_weight_update"
            )

    def _together(self, call: Callable[[], None]) -> Outcome:
        return self._ranks.together(call, is_torn=lambda: self.updater.is_torn)

    def _join(self, init: Init) -> Outcome:
        outcome = self.updater.join(
            address=init.address,
            model=init.model,
            group=f"{init.replica}/{self.vllm_config.instance_id}",
            host_memory_bytes=init.host_memory_bytes,
            timeout_s=init.timeout_s,
            ignored=init.ignored,
        )
        if outcome.has_failed:
            return outcome
        if init.whole:
            return self._together(self._check_whole)
        if init.check is not None:
            return self.updater.check(init.check, init.version)
        return outcome if init.version is None else self.updater.prepare(init.version)

    def _check_whole(self) -> None:
        if self.updater.is_torn:
            raise StateError(TORN)

    def start_weight_update(self) -> None:
        if not self._is_joined and self._ranks.speaks:
            raise StateError("start_weight_update comes after init_weight_transfer_engine")
        self._is_open, self._is_updated, self._is_abandoned = True, False, False

    def receive_weights(self, update_info: Update) -> None:
        outcome = self._together(self._check_open)
        if not outcome.has_failed:
            outcome = self.updater.update(update_info.version)
        if not outcome.has_failed:
            self._is_updated, self._is_abandoned = True, False
            return
        self._is_abandoned = True  # only `finish` is left to do
        if outcome.error is not None:
            self._is_open = False  # so does vLLM
            says = TORN if self.updater.is_torn else INTACT
            outcome.error.args = (f"{outcome.error} [{says}]",)
            raise outcome.error

    def finish_weight_update(self) -> None:
        if self._ranks.speaks and not (self._is_updated or self._is_abandoned):
            self._is_abandoned = True
            raise StateError(
                "finish_weight_update comes after update_weights: nothing was updated; once more "
                "gives it up"
            )
        self._is_open = self._is_updated = self._is_abandoned = False

    def shutdown(self) -> None:
        self._is_joined = False
        self.updater.close()
