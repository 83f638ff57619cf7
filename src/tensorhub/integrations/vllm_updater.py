"""What updates the model of one of vLLM's workers, whatever vLLM's interface calls it.

With host memory for a whole shard (`host_memory_bytes`) an update is staged: the shard is filled in
host memory, where it stays and serves other workers, while the engine generates. The engine's own
tensors are written when all of it is there.

All workers of an engine make each call, and each returns the same outcome (`vllm_ranks.Outcome`).

Responsible for what a worker does when. Not responsible for how a publication gets into the model
(`vllm_plan`), nor for vLLM's layers (`vllm_layers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm import __version__ as VLLM_VERSION
from vllm.config import set_current_vllm_config

from tensorhub import shared_empty_like, sync
from tensorhub.api.arguments import is_list
from tensorhub.api.tools import PublishedTensors, published_tensors
from tensorhub.errors import (
    IntegrityError,
    RegistrationError,
    StateError,
    TensorHubError,
    VersionConflict,
    VersionUnavailable,
    some,
)
from tensorhub.integrations import vllm_layers as layers, vllm_reload as reload, vllm_sleep
from tensorhub.integrations.adapters import Publication, fetch_adapter
from tensorhub.integrations.given import bounded, texts
from tensorhub.integrations.lost_memory import is_lost
from tensorhub.integrations.releases import check_release
from tensorhub.integrations.vllm_draft import with_draft
from tensorhub.integrations.vllm_first_load import first_load, note_first
from tensorhub.integrations.vllm_lora import Adapters, watch as watch_adapters, without_adapters
from tensorhub.integrations.vllm_plan import Layer, Plan, Planner, batches, mismatch
from tensorhub.integrations.vllm_ranks import Outcome, Ranks
from tensorhub.runtime.loop_thread import finish_blocking
from tensorhub.types import LATEST, VersionInfo

# releases that the tests have run with: docs/frameworks.md
TESTED = ("0.22", "0.23", "0.24", "0.29", "0.31", "0.32", "0.33")


@dataclass(frozen=True)
class Settings:
    """`group`: the same word for all workers of an engine, and another one for other engines.
    `ignored`: patterns of published names that the engine leaves alone.
    """

    address: str | Sequence[str]
    model: str
    group: str
    host_memory_bytes: int = 0
    timeout_s: float = 300.0
    ignored: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ignored", texts("ignored", self.ignored, "*mtp*"))
        if is_list(self.address):
            object.__setattr__(self, "address", tuple(self.address))

    @property
    def cluster(self) -> tuple[str | Sequence[str], str]:
        """Of which version numbers are."""
        return self.address, self.model


class Updater:
    """Of one worker, once vLLM has loaded its model."""

    def __init__(self, base: nn.Module, vllm_config: Any, draft: nn.Module | None = None) -> None:
        model = base
        if vllm_config.lora_config is not None:
            watch_adapters()
            model = without_adapters(base)
            note_first(model, first_load(base))
        if draft is not None:
            model = with_draft(model, draft, vllm_config)
        self._model = model
        self._vllm_config = vllm_config
        self._ranks = Ranks(vllm_config.parallel_config)
        self._planner = Planner(model, vllm_config.model_config)
        self._settings: Settings | None = None
        self._hub: sync.Hub | None = None
        self._published: PublishedTensors | None = None  # of which `plan` is, or may be
        self.plan: Plan | None = None
        self._prepared: int | None = None  # the version that all workers are ready for
        self.weights: sync.Weights | None = None
        self.live: dict[str, torch.Tensor] = {}  # the tensors that are written in place
        self.staged: dict[str, torch.Tensor] = {}  # all of the shard, in host memory
        self.served: VersionInfo | None = None
        self.is_torn = False
        self._samples: torch.Tensor | None = None  # of the model after the last update
        self._adapters = Adapters(base, self._fetch_adapter)
        self.sleep = vllm_sleep.of(base)
        self.sleep.before = self._before_sleep

    @property
    def ranks(self) -> Ranks:
        return self._ranks

    # ----------------------------------------------------------------------------------------------
    # calls on all workers

    def join(self, **settings: Any) -> Outcome:
        """Connect to a cluster by these `Settings`, or stay there if nothing has changed."""
        return self.together(lambda: self._connect(Settings(**settings)))

    def newest(self) -> tuple[Outcome, int]:
        """The newest version, as one of the workers sees it."""
        found: list[int] = []

        def ask() -> None:
            found.append(self._newest().version)

        outcome = self.together(ask, tell=lambda: found[0])
        return outcome, -1 if outcome.has_failed else max(outcome.told.values())

    def is_published(self) -> tuple[Outcome, bool]:
        """Whether there is a version, as one of the workers sees it."""
        found: list[bool] = []

        def ask() -> None:
            hub, settings = self.joined()
            try:
                found.append(hub.describe(settings.model, limit=0).mark is not None)
            except VersionUnavailable:
                found.append(False)

        outcome = self.together(ask, tell=lambda: found[0])
        return outcome, not outcome.has_failed and any(outcome.told.values())

    def prepare(self, version: int) -> Outcome:
        """Get ready for a version: plan, register, and read it where it is staged. Nothing is
        written.
        """
        return self._get_ready(version, lambda: self._make_plan(version))

    def _get_ready(self, version: int, make_plan: Callable[[], None]) -> Outcome:
        outcome = self.together(make_plan, tell=lambda: self.plan and self.plan.faults)
        if outcome.has_failed:
            return outcome
        assert self._settings is not None
        error = mismatch(
            self._settings.model, [outcome.told[rank] for rank in sorted(outcome.told)]
        )
        if error is not None:
            self.forget()
            return Outcome(
                error if self._ranks.speaks else None, (self.is_torn,) * self._ranks.count
            )
        outcome = self.together(lambda: self._fetch_staged(version))
        self._prepared = None if outcome.has_failed else version
        return outcome

    def update(self, version: int) -> Outcome:
        """Have the model hold a version. An error that says `memory` "intact" on all workers has
        left the old one.
        """
        outcome = self._get_ready(version, lambda: self._plan_to_write(version))
        self._prepared = None
        if not outcome.has_failed:
            outcome = self.together(lambda: self._write(version))
        if outcome.has_failed:
            # A worker that has succeeded has new weights, beside workers that have old ones.
            self.is_torn = any(outcome.are_torn) or len(outcome.are_torn) < self._ranks.count
            if outcome.error is not None:
                outcome.error.memory = "torn" if self.is_torn else "intact"
        return outcome

    def check(self, model: str | None = None, version: int | None = None) -> Outcome:
        """Compare the model with what vLLM's own loader makes of the served version, which has to
        be published, or of another publication of the same weights. Nothing is written.

        IntegrityError names the tensors that differ; the next update writes all of them.
        """
        return self.together(lambda: self._compare(model, version))

    def close(self) -> None:
        self.forget()
        self._adapters.clear()
        hub, self._hub, self._settings, self.served = self._hub, None, None, None
        if hub is not None:
            with suppress(TensorHubError):
                hub.close()

    def state(self) -> dict[str, Any]:
        """What this worker has, for people and for JSON."""
        plan, served = self.plan, self.served
        return {
            "rank": self._ranks.rank,
            "model": self._settings and self._settings.model,
            "version": served and served.version,
            "content_id": served and served.content_id,
            "is_torn": self.is_torn,
            "is_staged": bool(self.staged),
            "in_place": plan and len(plan.in_place),
            "processed": plan and len(plan.processed),
            "computed": plan and len(plan.computed),
            "adapters": self._adapters.state(),
            "vllm": VLLM_VERSION,
        }

    def together(self, call: Callable[[], object], **how: Any) -> Outcome:
        """Make a call on all workers: see `Ranks.together`."""
        return self._ranks.together(call, is_torn=lambda: self.is_torn, **how)

    # ----------------------------------------------------------------------------------------------
    # getting ready

    def joined(self) -> tuple[sync.Hub, Settings]:
        if self._hub is None or self._settings is None:
            raise StateError("this engine has joined no cluster yet: that comes first")
        return self._hub, self._settings

    def _connect(self, settings: Settings) -> None:
        if settings != self._settings or self._hub is None:
            is_same = self._settings is not None and self._settings.cluster == settings.cluster
            served = self.served if is_same else None
            self.close()
            options = bounded(None, settings.timeout_s)
            self._hub = sync.connect(settings.address, options=options)
            self._settings, self.served = settings, served

    def _fetch_adapter(
        self, model: str, version: int
    ) -> tuple[Mapping[str, torch.Tensor], Publication]:
        hub, settings = self.joined()
        found = fetch_adapter(hub, model, version, settings.timeout_s)
        return found, Publication(hub, found.info)

    def forget(self) -> None:
        """Give up what is registered: the next update makes a plan, and writes everything."""
        weights, self.weights = self.weights, None
        self.plan = self._published = self._prepared = None
        self.live, self.staged = {}, {}
        if weights is not None:
            with suppress(TensorHubError):
                weights.close(abandon=True)

    def _make_plan(self, version: int) -> None:
        self.sleep.check_awake()
        self._check_newer(version)
        self.plan_for(version)

    def _plan_to_write(self, version: int) -> None:
        """As `_make_plan`; the engine is paused, so what is known is not asked for once more."""
        self.sleep.check_awake()
        is_newer = self._prepared != version
        if is_newer:
            self._check_newer(version)
        if self._is_lost():
            self.is_torn = True
            self.forget()
        if is_newer or self.plan is None:
            self.plan_for(version)

    def plan_for(
        self, version: int, alone: AbstractContextManager[object] | None = None
    ) -> VersionInfo:
        """Plan for this version's tensors: made once, and again when they change. `alone`: within
        it nothing else uses the model.
        """
        hub, settings = self.joined()
        asked = published_tensors(
            hub._async, settings.model, version, settings.timeout_s, self._published
        )
        published = finish_blocking(asked)
        if self.plan is None or self.plan.specs != published.kinds:
            self.forget()
            with alone or nullcontext(), set_current_vllm_config(self._vllm_config):
                plan = self._planner.plan(settings.model, published.kinds, settings.ignored)
                check_release(
                    "vLLM", VLLM_VERSION, TESTED, probe=lambda: reload.probe(self._model, plan)
                )
            self.plan = plan
        self._published = published
        return published.version

    def _newest(self) -> VersionInfo:
        hub, settings = self.joined()
        asked = published_tensors(
            hub._async, settings.model, LATEST, settings.timeout_s, self._published
        )
        return finish_blocking(asked).version

    def _check_newer(self, version: int) -> None:
        """Raise VersionConflict if the model holds a newer version, unless that was rolled back."""
        if self.served is None or self.is_torn or version >= self.served.version:
            return
        if version != self._newest().version:
            raise VersionConflict(
                f"version {version} is older than the one that the engine serves, "
                f"{self.served.version}; to go back, call "
                f"hub.rollback(model, to=...) and publish anew"
            )

    def _fetch_staged(self, version: int) -> None:
        hub, settings = self.joined()
        plan = self.planned()
        if self.weights is None:
            self._register(hub, settings, plan)
        self.check_places(plan)
        if self.staged and self.weights is not None:
            self.weights.update(version, timeout=settings.timeout_s)

    def planned(self) -> Plan:
        assert self.plan is not None  # made before, in the same call
        return self.plan

    def _register(self, hub: sync.Hub, settings: Settings, plan: Plan) -> None:
        self.note_live()
        tensors = self.live
        if 0 < plan.nbytes <= settings.host_memory_bytes:
            tensors = self.staged = self.host_memory()
        if tensors:
            self.weights = self.register(tensors)

    def note_live(self) -> None:
        """Remember the tensors that are written in place."""
        self.live = {
            n: layers.own_tensors(each.module)[a].data
            for each in self.planned().in_place
            for a, n in each.names.items()
        }

    def register(self, tensors: Mapping[str, torch.Tensor], word: str = "") -> sync.Weights:
        """This worker's part of a version. `word`: another one for each at the same time."""
        hub, settings = self.joined()
        sources = self.planned().recording.sources
        parallel = self._vllm_config.parallel_config
        return hub.register(
            settings.model,
            tensors,
            sources={name: sources.get(name, []) for name in tensors},
            # an engine that comes back with other workers is another group
            group=f"{settings.group}{word}/{parallel.data_parallel_index}/{self._ranks.count}",
            rank=self._ranks.rank,
            world_size=self._ranks.count,
            spot=True,
            partial=True,
        )

    def host_memory(self) -> dict[str, torch.Tensor]:
        """For this worker's part, in load format."""
        plan = self.planned()
        with layers.load_format(self._model):
            like = {
                name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                for each in (*plan.in_place, *plan.processed)
                for a, name in each.names.items()
                for tensor in [layers.own_tensors(each.module)[a]]
            }
        tensors = shared_empty_like(like)
        plan.recording.fill_numbers(tensors)
        return tensors

    def check_places(self, plan: Plan) -> None:
        """Raise if a tensor that is written in place is no longer where it was registered."""
        moved = [
            repr(name)
            for layer in plan.in_place
            for own in [layers.own_tensors(layer.module)]
            for attribute, name in layer.names.items()
            if not layers.is_in_place(own.get(attribute), self.live[name])
        ]
        if moved:
            raise RegistrationError(
                f"{len(moved)} parameter(s) were replaced since they were registered, by "
                f"post-processing or a reload: {some(moved)}. Copy into the old ones; or call "
                f"shutdown_weight_transfer_engine (tensorhub_leave) and join anew: then the new "
                f"ones are registered"
            )

    # ----------------------------------------------------------------------------------------------
    # memory that goes, and memory that was lost, as by vLLM's `sleep(level=2)`

    def _before_sleep(self, level: int) -> None:
        """Serve the model's own memory no longer. What is staged in host memory stays, and stays
        served.
        """
        self.is_torn = self.is_torn or level > 1
        if level > 1:
            self._adapters.unload()
        if self.weights is not None and not self.staged:
            try:
                self.weights.unpublish()
            except TensorHubError:
                self.forget()

    def _is_lost(self) -> bool:
        if self.plan is None or self.is_torn:
            return False
        return is_lost(self._samples, self.plan.sampled(), self.plan.recording, self.live)

    # ----------------------------------------------------------------------------------------------
    # writing

    def _write(self, version: int) -> None:
        hub, settings = self.joined()
        plan = self.planned()
        assert self._published is not None
        served, info = self.served, self._published.version
        if not self.is_torn and served is not None and served.content_id == info.content_id:
            self.served = info
            return
        loaded: Mapping[str, torch.Tensor] = {}
        if plan.loaded:
            loaded = hub.fetch(
                settings.model, version, rank=None, names=plan.loaded, timeout=settings.timeout_s
            )
        if self.weights is not None and not self.staged:
            if self.weights.version is None:
                plan.recording.fill_numbers(self.live)
            try:
                self.weights.update(version, timeout=settings.timeout_s)
            except TensorHubError as error:
                self.is_torn = self.is_torn or error.memory != "intact"
                raise
        self.is_torn = True
        if self.staged:
            self.write_staged(self.staged)
        else:
            for layer, tensors in self._sinks(hub, plan, version):
                filled = {attribute: tensors[name] for attribute, name in layer.names.items()}
                layers.process(layer.module, filled)
        if loaded:
            layers.load(self._model, self._vllm_config.model_config, loaded.items())
        self.finish(info)

    def finish(self, info: VersionInfo) -> None:
        """All of a version was written."""
        layers.finish(self._model, self._vllm_config.model_config)
        self._samples = self.planned().sampled()
        self.is_torn, self.served = False, info

    def write_staged(self, staged: Mapping[str, torch.Tensor], *, points: bool = False) -> None:
        """Have the model hold what is staged. `points`: tensors that would be written in place
        become the staged ones.
        """
        plan = self.planned()
        with torch.no_grad():
            for layer in plan.in_place:
                for attribute, name in layer.names.items():
                    if points:
                        layers.own_tensors(layer.module)[attribute].data = staged[name]
                    else:
                        self.live[name].copy_(staged[name])
            for layer in plan.processed:
                tensors = layers.allocate(layer.module, layer.names)
                for attribute, name in layer.names.items():
                    tensors[attribute].copy_(staged[name])
                layers.process(layer.module, tensors)

    def _sinks(
        self, hub: sync.Hub, plan: Plan, version: int
    ) -> Iterator[tuple[Layer, dict[str, torch.Tensor]]]:
        """Each layer that is processed, with its tensors in load format; the next ones are read
        meanwhile.
        """
        _, settings = self.joined()

        def read(batch: list[Layer]) -> dict[str, torch.Tensor]:
            tensors = {}
            for layer in batch:
                made = layers.allocate(layer.module, layer.names)
                tensors.update(
                    {name: made[attribute].data for attribute, name in layer.names.items()}
                )
            plan.recording.fill_numbers(tensors)
            sources = {name: plan.recording.sources.get(name, []) for name in tensors}
            sink = hub.register(settings.model, tensors, sources=sources, spot=True, partial=True)
            try:
                sink.replicate(version, timeout=settings.timeout_s)
            finally:
                sink.close(abandon=True)
            return tensors

        with ThreadPoolExecutor(1, thread_name_prefix="tensorhub-sink") as thread:
            ahead = batches(plan.processed)
            coming = [thread.submit(read, batch) for batch in ahead[:1]]
            for number, batch in enumerate(ahead):
                tensors = coming.pop().result()
                if number + 1 < len(ahead):
                    coming.append(thread.submit(read, ahead[number + 1]))
                for layer in batch:
                    yield layer, tensors

    # ----------------------------------------------------------------------------------------------
    # the check

    def _compare(self, model: str | None, version: int | None) -> None:
        hub, settings = self.joined()
        self.sleep.check_awake()
        plan, served = self.plan, self.served
        if plan is None or served is None or self.is_torn:
            raise StateError(
                "no update has succeeded: there is nothing to compare the engine's weights with"
            )
        self.check_places(plan)
        differ: list[str] = []
        with set_current_vllm_config(self._vllm_config):
            for batch in batches(plan.layers):
                names = sorted({each for layer in batch for each in plan.needs(layer)})
                fetched = hub.fetch(
                    settings.model if model is None else model,
                    served.version if version is None else version,
                    rank=None,
                    names=names,
                    timeout=settings.timeout_s,
                )
                differ += reload.differences(self._model, plan, batch, dict(fetched))
        if differ:
            self.is_torn = True  # so that the next update writes all of it
            self.forget()
            raise IntegrityError(
                f"{len(differ)} tensor(s) of the engine differ from an independent load of version "
                f"{served.version}: {some(list(map(repr, differ)), most=100)}"
            )
