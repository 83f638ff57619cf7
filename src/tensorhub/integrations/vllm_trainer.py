"""vLLM: the trainer's side of the weight-transfer backend `tensorhub`.

Responsible for what a trainer does at each step. Not responsible for the engine's side
(`vllm_engine`), nor for the calls that one engine gets (`vllm_session`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from tensorhub import shared_empty_like, sync
from tensorhub.errors import InvalidType, RegistrationError, TensorHubError, shown, some
from tensorhub.integrations.announced import SERVERS, announced
from tensorhub.integrations.fleet import Fleet
from tensorhub.integrations.given import bounded
from tensorhub.integrations.readers import Readers
from tensorhub.integrations.trainer_group import GROUP, register_trainer
from tensorhub.integrations.vllm_session import (
    BACKEND,
    ExtensionClient,
    HttpClient,
    Session,
    Settings,
)
from tensorhub.types import HandleState, Options, VersionInfo

if TYPE_CHECKING:
    from tensorhub.layouts.views import Sources


@dataclass
class TrainerInit(TrainerInitInfo):
    """The arguments of `trainer_init`.

    `rank`, `world_size`: of this trainer's process; rank 0 talks to the engine. `pause`: the fate
    of requests during an update, "abort", "wait" (until they are done) or "keep" (they go on with
    the new weights); None: the engine is not paused here. `clear_cache`: drop the cache of the old
    weights. `resume_torn`: an engine with weights that are torn, or may be, is resumed as well,
    under the weight version "torn"; False: it stays paused until an update succeeds.
    `host_memory_bytes`: of each of the engine's workers; with enough for its shard, the weights are
    fetched before the engine is paused, and a failed update leaves the old ones whole.
    `ignored`: patterns of published names that the engine leaves alone, such as "*mtp*".
    `allow_no_readers`: an update that nothing reads is no error (`readers`). `sources`: as
    `Hub.register` takes it.
    """

    backend: ClassVar[str] = BACKEND

    address: str | list[str]
    model: str = "actor"
    world_size: int = 1
    pause: Literal["abort", "wait", "keep"] | None = "abort"
    clear_cache: bool = True
    resume_torn: bool = False
    host_memory_bytes: int = 0
    ignored: tuple[str, ...] = ()
    allow_no_readers: bool = False
    timeout_s: float = 300.0
    sources: Sources | None = None
    options: Options | None = None


class OfflineClient:
    """A client for `vllm.LLM` in this process, which generates only when it is told to."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)

    def update_weight_version(self, new_version: str) -> None:
        self._llm.update_weight_version(new_version)

    def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        if clear_cache:
            self._llm.reset_prefix_cache()

    def resume_generation(self) -> None:
        pass


class Trainer(TrainerWeightTransferEngine[TrainerInit]):  # type: ignore[type-arg, unused-ignore]
    """One rank of a trainer. Made by `WeightTransferTrainerFactory.trainer_init`, on every rank.

    `source`: the module that is trained, or its tensors by name, which are published where they are
    (of a DTensor this rank's part); or one of vLLM's `WeightSource`s: rank 0 copies its tensors
    into buffers of its own at each update. `client`: of the engine; or several, which take each
    version at the same time (`fleet.Fleet`). A server's URL is a client, too. None: at each update,
    all servers that have announced themselves (`vllm_start`).
    """

    init_info_cls = TrainerInit

    def __init__(self, init_info: TrainerInit, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.rank = init_info.rank  # vLLM 0.32 takes none
        self._init = init_info
        given = client if isinstance(client, list | tuple) else [client] * (client is not None)
        clients = given * self.is_sender
        settings = Settings(
            **{each.name: getattr(init_info, each.name) for each in fields(Settings)}
        )
        self._buffers: dict[str, torch.Tensor] | None = None
        self._hub = self._connected()
        timeout_s = init_info.timeout_s
        self._fleet = Fleet(
            [Session(_client(each, init_info), settings) for each in clients],
            find=None if given else partial(announced, self._hub, init_info.model, SERVERS),
            make=lambda url: Session(ExtensionClient(url, timeout_s), settings),
            timeout_s=timeout_s,
        )
        try:
            mark = _mark(self._hub, init_info.model)
            self._version = -1 if mark is None else mark
            self._sent: int | None = None
            self._readers = Readers(
                self._hub, init_info.model, GROUP, are_optional=init_info.allow_no_readers
            )
            self._weights = self._register(source)
            if clients:
                self._fleet.join()
        except BaseException:
            self._hub.close()
            raise

    @classmethod
    def trainer_init(cls, init_info: TrainerInit, *, client: Any, source: Any = None) -> Self:
        return cls(init_info, client, source)

    def _connected(self) -> sync.Hub:
        options = bounded(self._init.options, self._init.timeout_s)
        return sync.connect(self._init.address, options=options)

    def _registered(self, hub: sync.Hub, model: str) -> sync.Weights:
        init = self._init
        return register_trainer(
            hub,
            model,
            self.source,
            init.timeout_s,
            sources=init.sources,
            rank=self.rank,
            world_size=init.world_size,
        )

    def _register(self, source: Any) -> sync.Weights | None:
        if isinstance(source, nn.Module | Mapping):
            return self._registered(self._hub, self._init.model)
        metadata = getattr(source, "metadata", None)
        if metadata is None:
            raise InvalidType(
                f"source={shown(source)}: give the module that is "
                "trained, or a WeightSource of vLLM's"
            )
        if not self.is_sender:
            return None
        like = {
            each.name: torch.empty(each.shape, dtype=each.dtype, device="meta")
            for each in _called(metadata)
        }
        self._buffers = shared_empty_like(like)
        init = self._init
        return register_trainer(
            self._hub, init.model, self._buffers, init.timeout_s, sources=init.sources
        )

    def send_weights(self, version: int | None = None) -> None:
        """Publish the present weights, and have the engine take them; called on every rank. When it
        returns, or raises, the weights may be written again. `version`: above every number before;
        None: the next one.

        Raises StateError (nothing reads what was published before: `TrainerInit.allow_no_readers`),
        and what the engine raises, as the client passes it on; of several engines only if none has
        taken the version. A paused engine is resumed,
        unless its weights are torn, or may be: then its weight version is "torn", and it stays
        paused (`TrainerInit.resume_torn`) until an update succeeds.
        """
        number = self._version + 1 if version is None else version
        held = HandleState.READY, HandleState.IN_DOUBT  # copies, or what could not be ended
        if self._weights is not None and self._weights.state in held:
            self._weights.unpublish(self._init.timeout_s)
        self._copy()
        if self._weights is None:
            return
        with self._published(self._weights, number) as info:
            before, self._version, self._sent = self._sent, number, number
            if self.is_sender:
                self._readers.check(before, self._init.timeout_s)
                self._fleet.update(info)

    @contextlib.contextmanager
    def _published(self, weights: sync.Weights, number: int) -> Iterator[VersionInfo]:
        """Publish the present weights, on all ranks, as long as engines read them. Copies of a
        `WeightSource` stay published.
        """
        try:
            info = weights.publish(number, self._init.timeout_s)
        except TensorHubError as error:
            if error.memory == "in_doubt":  # it may be published all the same
                self._version = number
                weights.unpublish(self._init.timeout_s)
            raise
        try:
            yield info
        finally:
            if self._init.world_size > 1 and self._buffers is None:
                # all ranks wait for each other, nothing is read
                weights.update(number, timeout=self._init.timeout_s)
            if self._buffers is None:
                weights.unpublish(self._init.timeout_s)

    def _copy(self) -> None:
        """Of a `WeightSource`: run through it, as every rank has to, and keep what it yields."""
        if isinstance(self.source, nn.Module | Mapping):
            return
        buffers = {} if self._buffers is None else self._buffers
        left, unknown = dict.fromkeys(buffers), []
        with torch.no_grad():
            for name, tensor in (getattr(self.source, "iter_full", None) or self.source.__iter__)():
                if self._buffers is not None and left.pop(name, name) is None:
                    buffers[name].copy_(tensor)
                elif self._buffers is not None:
                    unknown.append(repr(name))
        if left or unknown:
            text = (
                f"the source has not yielded {len(left)} of its tensors: "
                f"{some(list(map(repr, left)))}"
            )
            raise RegistrationError(f"{text}; and {len(unknown)} others: {some(unknown)}")

    def check_weights(self) -> None:
        """Have each of the engine's workers compare its tensors with what vLLM's own loader makes
        of these weights, padding included; called on every rank, before the weights are written
        again. They are published meanwhile, as a model of its own. No tensor of the engine is
        written, and generation need not be paused.

        Raises the engine's errors, as the client passes them on: IntegrityError (it names the
        tensors that differ; the next update writes all of them), StateError (nothing was updated
        yet).
        """
        if self._sent is None or self._buffers is not None:
            if self.is_sender:
                self._fleet.check()
        elif self._weights is not None:
            model = f"{self._init.model}.check"
            with self._connected() as hub:
                mark = _mark(hub, model)
                weights = self._registered(hub, model)
                with self._published(weights, 0 if mark is None else mark + 1) as info:
                    if self.is_sender:
                        self._fleet.check(info)

    def shutdown(self) -> None:
        """Leave the cluster. The engine keeps what it serves."""
        self._fleet.close()
        self._hub.close()


def _mark(hub: sync.Hub, model: str) -> int | None:
    """The newest number that the model had; None: it has none."""
    return next((each.mark for each in hub.describe() if each.model == model), None)


def _called(metadata: Any) -> Any:
    """vLLM 0.32 has a method where 0.33 has a property."""
    return metadata() if callable(metadata) else metadata


def _client(client: Any, init: TrainerInit) -> Any:
    return HttpClient(client, init.timeout_s) if isinstance(client, str) else client
