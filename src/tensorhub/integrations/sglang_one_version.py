"""One SGLang rank of a fleet with one version on all engines, or on none: see `one_version_ranks`.

A step is a call of the scheduler's `run_batch`: in each of SGLang's loops all that uses the weights
happens there, and on all tensor-parallel ranks for the same batches. Where a batch overlaps the
work on the one before, a flip waits for the device, too.

Responsible for the scheduler, and for how a version gets into a rank's model and out of it
(`sglang_engine`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from sglang.srt.distributed import parallel_state

from tensorhub import shared_empty_like, sync
from tensorhub.errors import StateError, TensorHubError
from tensorhub.integrations import one_version_ranks, sglang_sleep
from tensorhub.integrations.one_version_ranks import PREFIXES, Member, not_quick
from tensorhub.integrations.sglang_plan import Faults, Plan
from tensorhub.integrations.sglang_session import SLEEPS, Order
from tensorhub.types import VersionInfo


class Receiver(Protocol):
    """One rank of an engine: see `sglang_engine`."""

    def planned(self, version: int) -> tuple[VersionInfo, Plan]: ...
    def mismatch(self, faults: Sequence[Faults]) -> TensorHubError | None: ...
    def plan(self) -> Plan: ...
    def register(self, tensors: Mapping[str, torch.Tensor], word: str) -> sync.Weights: ...
    def write(
        self, tensors: Mapping[str, torch.Tensor], info: VersionInfo, points: bool
    ) -> None: ...


class Part(one_version_ranks.Part):
    """`points`: the model's tensors become a slot's, and are not copied: nothing has captured where
    they are.
    """

    def __init__(
        self, scheduler: Any, receiver: Receiver, device: torch.device, timeout_s: float
    ) -> None:
        super().__init__(device, timeout_s)
        self._scheduler, self._receiver = scheduler, receiver
        is_compiled = getattr(scheduler.server_args, "enable_torch_compile", False)
        self._points = device.type == "cpu" and not is_compiled

    def planned(self, version: int) -> tuple[VersionInfo, Plan, Faults]:
        info, plan = self._receiver.planned(version)
        if plan.loaded:
            layers = [layer.name for batch in plan.loaded for layer in batch.layers]
            raise not_quick(
                plan.recording.casts,
                f"{len(layers)} layer(s) can only be loaded by SGLang's loader ({layers[0]!r})",
            )
        return info, plan, plan.faults

    def mismatch(self, version: int, faults: Sequence[Faults]) -> TensorHubError | None:
        return self._receiver.mismatch(faults)

    def allocate(self) -> dict[str, torch.Tensor]:
        plan = self._receiver.plan()
        tensors: dict[str, torch.Tensor] = shared_empty_like(plan.in_place)
        plan.recording.fill_numbers(tensors)
        return tensors

    def register(self, tensors: Mapping[str, torch.Tensor], word: str) -> sync.Weights:
        return self._receiver.register(tensors, word)

    def write(self, tensors: Mapping[str, torch.Tensor], info: VersionInfo) -> None:
        if sglang_sleep.sleeps(self._scheduler):
            raise StateError(SLEEPS)
        self._receiver.write(tensors, info, self._points)


def scheduler() -> Any:
    """The one that has called the loader."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        found = caller.f_locals.get("self")
        if hasattr(found, "run_batch"):
            return found
        frame = caller
    raise StateError("this release of SGLang calls its loader from elsewhere than its scheduler")


def member(scheduler: Any, receiver: Receiver, hub: sync.Hub, order: Order) -> Member:
    """Raises StateError (this kind of engine cannot join), and as `one_version_engine.Engine`."""
    group = parallel_state.get_tp_group()
    if group.world_size != torch.distributed.get_world_size():
        raise StateError("an engine that is not only tensor-parallel cannot join a fleet")
    if getattr(scheduler.server_args, "dp_size", 1) > 1:
        raise StateError("an engine with data parallelism cannot join a fleet")
    if scheduler.draft_worker is not None:
        raise StateError("an engine with speculative decoding cannot join a fleet")
    settled = getattr(scheduler.server_args, "disable_radix_cache", False)
    if not getattr(scheduler, "disable_radix_cache", settled):
        raise StateError(f"{PREFIXES}--disable-radix-cache")
    device = next(scheduler.tp_worker.model_runner.model.parameters()).device
    part = Part(scheduler, receiver, device, order.timeout_s)
    its = {"timeout_s": order.timeout_s, "wait_s": order.timeout_s, **order.fleet}
    return Member(part, group.rank_in_group, group.ranks, hub, order.model, **its)


def begin_together(scheduler: Any, member: Member) -> None:
    """From now on each batch is a step."""
    run = scheduler.run_batch

    @functools.wraps(run)
    def run_batch(*given: Any, **named: Any) -> Any:
        with member.step():
            return run(*given, **named)

    scheduler.run_batch = run_batch
