"""One vLLM worker of a fleet with one version on all engines, or on none: see `one_version_ranks`.

A step is a call of `execute_model`.

Responsible for how a version gets into the worker's model and out of it (`vllm_updater`), and for
vLLM's sleep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.distributed import parallel_state

from tensorhub import sync
from tensorhub.errors import TensorHubError
from tensorhub.integrations import one_version_ranks
from tensorhub.integrations.one_version_ranks import not_quick
from tensorhub.integrations.vllm_plan import Faults, Plan, mismatch
from tensorhub.integrations.vllm_updater import Updater
from tensorhub.types import VersionInfo


class Part(one_version_ranks.Part):
    """`points`: the model's tensors become a slot's, and are not copied: nothing has captured where
    they are.
    """

    def __init__(self, updater: Updater, device: torch.device, *, points: bool) -> None:
        super().__init__(device, updater.joined()[1].timeout_s)
        self._updater, self._points = updater, points

    def planned(self, version: int) -> tuple[VersionInfo, Plan, Faults]:
        info = self._updater.plan_for(version, self.lock)
        plan = self._updater.planned()
        if plan.loaded:
            raise not_quick(
                plan.recording.casts,
                f"{len(plan.loaded)} tensor(s) can only be loaded by the model's load_weights",
            )
        return info, plan, plan.faults

    def mismatch(self, version: int, faults: Sequence[Faults]) -> TensorHubError | None:
        return mismatch(f"version {version}", faults)

    def allocate(self) -> dict[str, torch.Tensor]:
        self._updater.note_live()
        return self._updater.host_memory()

    def register(self, tensors: Mapping[str, torch.Tensor], word: str) -> sync.Weights:
        return self._updater.register(tensors, word)

    def write(self, tensors: Mapping[str, torch.Tensor], info: VersionInfo) -> None:
        updater = self._updater
        updater.sleep.check_awake()
        updater.is_torn = True
        updater.check_places(updater.planned())
        try:
            updater.write_staged(tensors, points=self._points)
        finally:
            updater.note_live()
        updater.finish(info)


class Member(one_version_ranks.Member):
    """One worker."""

    def __init__(
        self, updater: Updater, device: torch.device, *, points: bool, **settings: Any
    ) -> None:
        hub, its = updater.joined()
        ranks = parallel_state.get_tp_group().ranks if updater.ranks.count > 1 else [0]
        part = Part(updater, device, points=points)
        settings["timeout_s"] = its.timeout_s
        super().__init__(part, updater.ranks.rank, ranks, hub, its.model, **settings)
        self._sleep, self._before_sleep = updater.sleep, updater.sleep.before
        self._sleep.before = self._asleep

    def _asleep(self, level: int) -> None:
        with self.part.lock:
            self._sleep.is_asleep = True
        if level > 1:
            self.lost()
        self._before_sleep(level)
