"""SGLang's ranks: the loader that an engine calls on each tensor-parallel rank.

How SGLang's own loader fills each parameter is recorded from a second model without memory
(`sglang_layers`). Then there are two ways:

- *in place*: layers that post-processing leaves as they are loaded are registered where they lie.
  All ranks of an engine are one group. With host memory for a whole shard (`host_memory_bytes`)
  they are written when all ranks have all of it.
- *loaded*: layers that SGLang quantizes or repacks, and parameters that the loader computes. Whole
  published tensors are fetched; SGLang's own loader and post-processing make of them what is copied
  into the engine's layers, some layers at a time.

A publication has to fill what the engine's own load has filled, no less and no more; anything else
is refused, before a byte is written.

Responsible for a rank's steps, and for one outcome on all ranks. Not responsible for the session,
which is SGLang's, nor for the trainer (`sglang_trainer`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from sglang import __version__ as SGLANG_VERSION
from sglang.srt.distributed import parallel_state
from torch import nn

from tensorhub import sync
from tensorhub.api.tools import PublishedTensors, published_tensors
from tensorhub.errors import (
    IntegrityError,
    Memory,
    RegistrationError,
    StateError,
    TensorHubError,
    VersionConflict,
    some,
)
from tensorhub.integrations import sglang_lora, sglang_one_version, sglang_sleep
from tensorhub.integrations.adapters import Publication, fetch_adapter
from tensorhub.integrations.given import bounded
from tensorhub.integrations.recorder import Specs
from tensorhub.integrations.releases import check_release
from tensorhub.integrations.sglang_layers import (
    SecondModel,
    copy_to_live,
    differing,
    has_backup,
)
from tensorhub.integrations.sglang_plan import (
    ADVICE,
    Batch,
    Faults,
    Plan,
    batches,
    make,
    mismatch,
    probe,
    tensors_of,
)
from tensorhub.integrations.sglang_session import (
    ASLEEP,
    IN_FLEET,
    REPORT,
    SLEEPS,
    TESTED,
    TORN,
    Order,
    Outcome,
    Report,
)
from tensorhub.logs import get_logger
from tensorhub.runtime.loop_thread import finish_blocking
from tensorhub.types import Options, VersionInfo

if TYPE_CHECKING:
    from tensorhub.integrations.one_version_ranks import Member

log = get_logger(__name__)
ADAPTERS_MAX = 1000  # far more than an engine has loaded
Made = TypeVar("Made")
Tensors = Sequence[tuple[str, torch.Tensor]]


def load(model: nn.Module, named_tensors: Tensors) -> None:
    """SGLang's custom weight loader. It never raises, for that would end the engine: a trainer asks
    for its report, by SGLang's get_weights_by_name. Without tensors it gets ready for the end of a
    session, which post-processes all layers.
    """
    receiver = answering(model)
    with torch.inference_mode(False), torch.no_grad():
        if named_tensors:
            receiver.take(named_tensors)
        else:
            receiver.spare()


def answering(model: nn.Module) -> Receiver:
    """The rank of this model, which answers for the loader from now on."""
    found = receiver_of(model)
    if found is None:
        sglang_lora.watch(receiver_of)
        found = Receiver(model)
        its = getattr(model, "get_weights_by_name", None)
        model.get_weights_by_name = Answering(found, its)  # type: ignore[assignment]
    if not any(model is each for each in _shown):
        _shown.append(model)
    return found


_shown: list[nn.Module] = []  # the models of this process that the loader was called with


def receiver_of(model: nn.Module) -> Receiver | None:
    answering = model.__dict__.get("get_weights_by_name")
    return answering.receiver if isinstance(answering, Answering) else None


class Answering:
    """In the place of the model's `get_weights_by_name`: answers for the loader, too."""

    def __init__(self, receiver: Receiver, models: Callable[..., object] | None) -> None:
        self.receiver = receiver
        self._models = models

    def __call__(self, name: str, *args: Any, **named: Any) -> object:
        if name == REPORT:
            return None if self.receiver.report is None else self.receiver.report.encode()
        if name == TORN:
            return [float(self.receiver.is_torn)]
        if name == ASLEEP:
            return [float(sglang_sleep.is_asleep())]
        return None if self._models is None else self._models(name, *args, **named)


class Receiver:
    """One rank of an engine, with what it has registered. `report`: of the last order. `is_torn`:
    the weights are, or may be. `member`: its part in a fleet with one version.
    """

    def __init__(self, model: nn.Module) -> None:
        self.report: Report | None = None
        self._model = model
        self._second: SecondModel | None = None
        self._hub: sync.Hub | None = None
        self._joined: Order | None = None
        self._published: PublishedTensors | None = None  # of which `_plan` is, or may be
        self._plan: Plan | None = None
        self._weights: sync.Weights | None = None
        self._is_agreed = False  # by all ranks: the publication fits
        self._served: Order | None = None
        self._fetched: Publication | None = None  # an adapter's, the last one
        self._adapters: dict[str, Publication] = {}  # that SGLang has loaded, the last ones
        self.is_torn = self._is_lost = False
        self.member: Member | None = None
        sglang_sleep.watch(self)

    def take(self, named_tensors: Tensors) -> None:
        """Do what a trainer has ordered: on all ranks, or on none."""
        try:
            order = Order.of(named_tensors)
            if order.purpose == "show":
                return
            plan = self.on_all_ranks(lambda: self._get_ready(order))
            url = ""
            if order.purpose == "check":
                self.on_all_ranks(lambda: self._check(order))
            elif order.purpose == "fleet":
                url = self.join_fleet(sglang_one_version.scheduler, order)
            elif plan is not None:
                self._agree(plan, order)
                self.on_all_ranks(lambda: self._fill(plan, order))
                self.is_torn, self._served = False, order
            self.report = Report(order.nonce, url=url)
        except _Failed as failed:
            self.is_torn, self._is_agreed = failed.outcome.memory != "intact", False
            if self.member is not None and order.purpose == "check" and self.is_torn:
                self.member.distrust()
            log.error(
                "sglang_update_failed", error=failed.outcome.text, memory=failed.outcome.memory
            )
            self.report = Report(order.nonce, failed.outcome)
        except TensorHubError as error:  # it is no order, on any rank
            memory: Memory = "torn" if self.is_torn else "intact"
            log.error("sglang_update_failed", error=f"{error}", memory=memory)
            self.report = Report("", Outcome.of(error, memory))

    def before_sleep(self) -> None:
        """The memory goes: serve it no longer, and write all of it at the next update."""
        with self._alone:
            self._is_lost = self.is_torn = self.is_torn or not has_backup()
        if self.member is not None and self._is_lost:
            self.member.lost()
        if self._weights is not None:
            try:
                self._weights.unpublish()
            except TensorHubError:
                self._forget()

    def fetch_adapter(self, model: str, version: int) -> Mapping[str, torch.Tensor]:
        if self._hub is None or self._joined is None:
            raise StateError("this engine has joined no cluster yet: Session.get_ready comes first")
        found = fetch_adapter(self._hub, model, version, self._joined.timeout_s)
        self._fetched = Publication(self._hub, found.info)
        return found

    def has_loaded(self, name: str) -> None:
        """SGLang has loaded what was fetched last, as MODEL@VERSION."""
        if self._fetched is not None:
            self._adapters.pop(name, None)
            self._adapters[name] = self._fetched
            if len(self._adapters) > ADAPTERS_MAX:
                del self._adapters[next(iter(self._adapters))]

    @property
    def _alone(self) -> AbstractContextManager[object]:
        """Within it nothing else uses the model."""
        return nullcontext() if self.member is None else self.member.part.lock

    def spare(self) -> None:
        """Have the end of a session leave alone what it must not process."""
        try:
            self._second_model().spare()
        except Exception as error:
            log.error("sglang_update_failed", error=f"{error}", memory="intact")

    def _second_model(self) -> SecondModel:
        draft = self._draft()
        if self._second is None or self._second.draft is not draft:
            self._second = SecondModel(self._model, draft)
        return self._second

    def _draft(self) -> nn.Module | None:
        drafts = [each for each in _shown if each is not self._model]
        if not drafts or (self._joined is not None and not self._joined.has_draft):
            return None
        if len(drafts) > 1:
            raise StateError(
                f"an engine with {len(drafts)} draft models cannot be updated: name 'draft.*' in "
                f"unused= to update its target alone"
            )
        return drafts[0]

    def on_all_ranks(self, call: Callable[[], Made]) -> Made:
        """The call's result, once it has returned on all ranks. Raises _Failed on all ranks, with
        one outcome: the error of the first failed rank; the memory is torn if any rank's is.
        """
        outcome: Outcome | None = None
        try:
            made = call()
        except Exception as error:
            outcome = Outcome.of(error, "torn" if self.is_torn else "intact")
        failed = [each for each in _of_all_ranks(outcome) if each is not None]
        if failed:
            first = next((each for each in failed if each.kind != "GroupAborted"), failed[0])
            raise _Failed(
                replace(
                    first,
                    memory="torn" if any(each.memory == "torn" for each in failed) else "intact",
                )
            )
        return made

    # --------------------------------------------------------------------------------------------
    # before a byte is written

    def _get_ready(self, order: Order) -> Plan | None:
        """The plan for this version. Without a plan: there is nothing to write."""
        if self.member is not None:
            self._check_allowed(order)
            return None
        self._join(order)
        second = self._second_model()
        second.spare()
        if sglang_sleep.is_asleep():
            raise StateError(SLEEPS)
        self._check_adapter(order)
        if order.purpose != "update":
            return None
        assert self._hub is not None
        served, cluster = self._served, (order.address, order.model)
        if served and (served.address, served.model) == cluster and not self.is_torn:
            if served.content_id is not None and served.content_id == order.content_id:
                return None
            self._check_is_newer(self._hub, served, order)
        plan, _ = self._plan_for(order.version)
        if self._weights is None and plan.in_place and not plan.faults:
            self._weights = self.register(plan.in_place)
        self._check_live(plan, second)
        return plan

    def _check_allowed(self, order: Order) -> None:
        """Of the orders to a member of a fleet."""
        assert self._joined is not None
        if order.purpose in ("update", "fleet") or order.address != self._joined.address:
            raise StateError(IN_FLEET)
        if sglang_sleep.is_asleep():
            raise StateError(SLEEPS)
        self._check_adapter(order)

    def _check_adapter(self, order: Order) -> None:
        adapter = self._adapters.get(order.adapter)
        if adapter is not None and not adapter.is_current():
            raise adapter.conflict()

    def _join(self, order: Order) -> None:
        known = None if self._hub is None or self._joined is None else self._joined.address
        lasting = order.lasting()
        # for adapters it does not matter how the base is updated
        if known != order.address if order.purpose == "join" else lasting != self._joined:
            self.close()
            self._joined = lasting
        if self._hub is None:
            options = Options(host_memory_bytes=order.host_memory_bytes)
            self._hub = sync.connect(order.address, options=bounded(options, order.timeout_s))

    @staticmethod
    def _check_is_newer(hub: sync.Hub, served: Order, order: Order) -> None:
        is_older = order.version < served.version
        if (
            is_older
            and order.version
            != hub.wait_for(order.model, at_least=0, timeout=order.timeout_s).version
        ):
            text = (
                f"version {order.version} is older than the one that the engine serves, "
                f"{served.version}"
            )
            raise VersionConflict(
                f"{text}; to go back, call hub.rollback({order.model!r}, to=...) and publish anew"
            )

    def _plan_for(self, version: int) -> tuple[Plan, VersionInfo]:
        """Made once, and again when the published tensors change."""
        assert self._hub is not None
        assert self._joined is not None
        joined = self._joined
        asked = published_tensors(
            self._hub._async, joined.model, version, joined.timeout_s, self._published
        )
        published = self._published = finish_blocking(asked)
        if self._plan is None or self._plan.specs != published.kinds:
            self._forget()
            with self._alone:
                self._plan = self._new_plan(self._second_model(), joined.model, published.kinds)
        return self._plan, published.version

    @staticmethod
    def _new_plan(second: SecondModel, model: str, specs: Specs) -> Plan:
        if (stages := parallel_state.get_pp_group().world_size) > 1:
            raise StateError(
                f"an engine with pipeline-parallel stages ({stages}) cannot be updated"
            )
        plan = make(second, specs)
        check_release("SGLang", SGLANG_VERSION, TESTED, probe=lambda: probe(second, plan))
        log.info(
            "sglang_plan",
            model=model,
            in_place=len(plan.in_place),
            loaded=[layer.name for batch in plan.loaded for layer in batch.layers],
            computed=plan.recording.computed,
            unread=plan.recording.unread,
        )
        return plan

    def register(self, tensors: Mapping[str, torch.Tensor], word: str = "") -> sync.Weights:
        """What this rank reads in place. `word`: another one for each at the same time."""
        assert self._hub is not None
        assert self._joined is not None
        assert self._plan is not None
        sources = self._plan.recording.sources
        return self._hub.register(
            self._joined.model,
            tensors,
            sources={name: sources.get(name, []) for name in tensors},
            group=f"{self._joined.replica}{word}",
            rank=parallel_state.get_tensor_model_parallel_rank(),
            world_size=parallel_state.get_tensor_model_parallel_world_size(),
            spot=True,
            partial=True,
        )

    def _forget(self) -> None:
        """Give up what is registered: the next update makes a plan, and writes everything."""
        weights, self._weights, self._plan, self._is_agreed = self._weights, None, None, False
        if weights is not None:
            with suppress(TensorHubError):
                weights.close(abandon=True)

    def _check_live(self, plan: Plan, second: SecondModel) -> None:
        """Raise if the model no longer has the registered tensors."""
        live = tensors_of(second.live)
        other = [
            name
            for name, tensor in plan.in_place.items()
            if name not in live or not _is_same(live[name], tensor)
        ]
        if other:
            self._plan = None  # made anew at the next update
            raise RegistrationError(
                f"{len(other)} parameter(s) of the engine were replaced since they were "
                f"registered: "
                f"{some(list(map(repr, other)), most=100)}. What is replaced once may be replaced "
                f"at each update: {ADVICE}"
            )

    def _agree(self, plan: Plan, order: Order) -> None:
        """Raise _Failed on all ranks unless the publication fits: every rank has what it needs, and
        every published tensor has a place on some rank. SGLang's loaders say nothing of either.
        """
        if self._is_agreed:
            return
        error = self.mismatch(_of_all_ranks(plan.faults))
        self._is_agreed = error is None
        if error is not None:
            raise _Failed(Outcome.of(error, "torn" if self.is_torn else "intact"))

    def mismatch(self, faults: Sequence[Faults]) -> TensorHubError | None:
        """Why what is published does not fit, given each rank's faults."""
        assert self._joined is not None
        config = getattr(self._model, "config", None)
        is_tied = getattr(config, "tie_word_embeddings", False)
        known = [*self._joined.unused, *(["*lm_head.weight"] if is_tied else [])]
        return mismatch(self._joined.model, self.plan(), faults, known)

    # --------------------------------------------------------------------------------------------
    # a fleet with one version: see sglang_one_version

    def start(self, scheduler: Any, address: list[str], model: str, **fleet: Any) -> None:
        """Join a fleet as the engine starts, and wait until the version that was committed is
        served, if one was. Raises what `join_fleet` does.
        """
        word = _of_all_ranks(secrets.token_hex(8))[0]
        order = Order(address, model, f"sglang-{word}", purpose="fleet", fleet=fleet)
        with torch.inference_mode(False), torch.no_grad():
            self.on_all_ranks(lambda: self._get_ready(order))
            self.join_fleet(lambda: scheduler, order)
            engine = self.member and self.member.engine
            self.on_all_ranks(lambda: engine and engine.start(order.timeout_s))

    def join_fleet(self, find: Callable[[], Any], order: Order) -> str:
        """From now on each batch of the scheduler has a version that may be served. Returns the
        URL for `OneVersion`, on rank 0; raises _Failed.
        """
        hub = self._hub
        assert hub is not None

        def made() -> tuple[Any, Member]:
            scheduler = find()
            return scheduler, sglang_one_version.member(scheduler, self, hub, order)

        self._forget()
        scheduler, member = self.on_all_ranks(made)
        self.member = member
        sglang_one_version.begin_together(scheduler, member)
        return "" if member.engine is None else member.engine.url

    def plan(self) -> Plan:
        """Raises StateError: there is none any more."""
        if self._plan is None:
            raise StateError("the engine's tensors are others now: it takes all of a version anew")
        return self._plan

    def planned(self, version: int) -> tuple[VersionInfo, Plan]:
        plan, info = self._plan_for(version)
        return info, plan

    def write(self, tensors: Mapping[str, torch.Tensor], info: VersionInfo, points: bool) -> None:
        """Have the model hold these. `points`: its tensors become these, and are not copied."""
        plan, second, joined = self.plan(), self._second, self._joined
        assert second is not None
        assert joined is not None
        self._check_live(plan, second)
        self.is_torn = True
        live = tensors_of(second.live) if points else {}
        for name, tensor in tensors.items():
            if points:
                live[name].data = plan.in_place[name] = tensor
            else:
                plan.in_place[name].copy_(tensor)
        if self._is_lost:
            second.refill(plan.recording.needs)
            self._is_lost = False
        second.post_load()
        self._served = replace(joined, version=info.version, content_id=info.content_id)
        self.is_torn = False

    # ----------------------------------------------------------------------------------------------
    # it is written

    def _fill(self, plan: Plan, order: Order) -> None:
        hub, second = self._hub, self._second
        assert hub is not None
        assert second is not None

        def fetched(batch: Batch) -> Mapping[str, torch.Tensor]:
            names = list(batch.names)
            return hub.fetch(
                order.model, order.version, rank=None, names=names, timeout=order.timeout_s
            )

        is_staged = 0 < plan.nbytes <= order.host_memory_bytes
        ahead = [fetched(batch) for batch in plan.loaded[: None if is_staged else 1]]
        if self._weights is not None:
            self._update_in_place(self._weights, plan, order, is_staged)
        self.is_torn = True
        for number, batch in enumerate(plan.loaded):
            tensors = ahead[number] if number < len(ahead) else fetched(batch)
            for layer in second.loaded(batch.layers, tensors):
                copy_to_live(layer)
        if self._is_lost:
            second.refill(plan.recording.needs)
            self._is_lost = False
        second.post_load()
        self.is_torn = False

    def _update_in_place(
        self, weights: sync.Weights, plan: Plan, order: Order, is_staged: bool
    ) -> None:
        try:
            if is_staged and weights.version is None:
                weights.prefetch(order.version, timeout=order.timeout_s)
            # each time: an engine that has slept has lost it. The numbers are always the same, so
            # this is no write to published memory, and torch does not count it.
            for name, place, value in plan.recording.filled:
                if name in plan.in_place:
                    plan.in_place[name].data[place] = value
            weights.update(order.version, staged=is_staged, timeout=order.timeout_s)
        except TensorHubError as error:
            self.is_torn = self.is_torn or error.memory != "intact"
            raise

    def _check(self, order: Order) -> None:
        if self._plan is None or self._served is None or self._second is None:
            raise StateError(
                "no update has succeeded: there is nothing to compare the engine's weights with"
            )
        with nullcontext() if self.member is None else self.member.step():
            self._check_live(self._plan, self._second)
            self._compare(order)

    def _compare(self, order: Order) -> None:
        """Compare this rank's tensors with what SGLang's own code makes of the published ones."""
        hub, plan, second = self._hub, self._plan, self._second
        assert hub is not None
        assert plan is not None
        assert second is not None
        filled = [
            layer
            for layer in second.layers
            if any(name in plan.recording.needs for name in layer.tensors)
        ]
        differ: list[str] = []
        for batch in batches(filled, plan.recording):
            names = list(batch.names)
            tensors = hub.fetch(
                order.model, order.version, rank=None, names=names, timeout=order.timeout_s
            )
            for layer in second.loaded(batch.layers, tensors):
                differ += differing(layer)
        if differ:
            self.is_torn, self._plan = True, None  # so that the next update writes all of it
            raise IntegrityError(
                f"{len(differ)} tensor(s) of the engine differ from what SGLang's loader makes of "
                f"version {order.version}: {some(list(map(repr, differ)), most=100)}"
            )

    def close(self) -> None:
        """Leave the cluster. The engine keeps what it serves."""
        hub, weights = self._hub, self._weights
        self._hub = self._joined = self._published = self._plan = self._weights = None
        for each in (weights, hub):
            if each is not None:
                with suppress(TensorHubError):
                    each.close()


class _Failed(Exception):
    """An update has failed, on all ranks."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"{outcome.kind}: {outcome.text}")
        self.outcome = outcome


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride(), one.dtype) == (
        other.data_ptr(),
        other.shape,
        other.stride(),
        other.dtype,
    )


def _of_all_ranks(value: Made) -> list[Made]:
    """What each tensor-parallel rank gives, to all of them. It waits as long as SGLang's own
    barriers do.
    """
    size = parallel_state.get_tensor_model_parallel_world_size()
    found: list[Any] = [value] * size
    if size > 1:
        group = parallel_state.get_tp_group().cpu_group
        torch.distributed.all_gather_object(found, value, group=group)
    return found
