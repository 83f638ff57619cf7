"""vLLM: the weight-transfer backend `tensorhub`, for its engine and for the trainer that feeds it.

`WeightTransferConfig(backend="tensorhub")` is all that the engine needs to be told: vLLM finds the backend by the entry
point `vllm.general_plugins`. The trainer makes a `Trainer` by `WeightTransferTrainerFactory.trainer_init(TrainerInit(...),
...)`, and calls `send_weights()` after each step.

Responsible for the trainer's side, and for what both sides say to each other. Not responsible for the engine's side
(`vllm_engine`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import nn
from vllm import __version__ as VLLM_VERSION
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from tensorhub import shared_empty_like, sync
from tensorhub.errors import InvalidType, InvalidValue, RegistrationError, shown, some
from tensorhub.integrations.releases import check_release
from tensorhub.types import Options, VersionInfo

if TYPE_CHECKING:
    from tensorhub.layouts.entries import Sources

__all__ = ["OfflineClient", "Trainer", "TrainerInit", "register"]

BACKEND = "tensorhub"
SUPPORTED = ("0.32", "0.33")  # releases of vLLM whose hooks this was written for
INTACT, TORN = "the engine's weights are intact", "the engine's weights are torn"  # in an error's text, over any client


def register(release: str = VLLM_VERSION) -> None:
    """Make the backend known to vLLM. vLLM calls it in each of its processes; a trainer calls it once.

    Raises StateError: this release of vLLM is not supported.
    """
    check_release("vLLM", release, SUPPORTED)
    for factory, module, name in (
        (WeightTransferEngineFactory, "tensorhub.integrations.vllm_engine", "Engine"),
        (WeightTransferTrainerFactory, __name__, "Trainer"),
    ):
        if BACKEND not in factory._registry:
            factory.register_engine(BACKEND, module, name)


@dataclass
class TrainerInit(TrainerInitInfo):
    """What `trainer_init` is given.

    `rank`, `world_size`: of this trainer's process; rank 0 talks to the engine. `pause`: what becomes of requests during an
    update, "abort", "wait" (until they are done) or "keep" (they go on with the new weights); None: the engine is not paused
    here. `clear_cache`: forget what was cached with the old weights. `host_memory_bytes`: of each of the engine's workers;
    with enough for its shard, a failed update leaves the old weights whole. `sources`: as `Hub.register` takes it.
    """

    backend: ClassVar[str] = BACKEND

    address: str | list[str]
    model: str = "actor"
    world_size: int = 1
    pause: Literal["abort", "wait", "keep"] | None = "abort"
    clear_cache: bool = True
    host_memory_bytes: int = 0
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

    def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        if clear_cache:
            self._llm.reset_prefix_cache()

    def resume_generation(self) -> None:
        pass


class Trainer(TrainerWeightTransferEngine[TrainerInit]):  # type: ignore[type-arg, unused-ignore]
    """One rank of a trainer. Made by `WeightTransferTrainerFactory.trainer_init`, on every rank.

    `source`: the module that is trained, or its tensors by name, which are published where they are (of a DTensor this
    rank's part); or one of vLLM's `WeightSource`s, whose tensors rank 0 copies into buffers of its own at each update.
    """

    init_info_cls = TrainerInit

    def __init__(self, init_info: TrainerInit, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.rank = init_info.rank  # vLLM 0.32 takes none
        self._init = init_info
        self._pausing = _pausing(client) if self.is_sender and init_info.pause is not None else None
        self._buffers: dict[str, torch.Tensor] | None = None
        self._hub = sync.connect(init_info.address, options=init_info.options)
        try:
            mark = next((each.mark for each in self._hub.describe() if each.model == init_info.model), None)
            self._version = -1 if mark is None else mark
            self._weights = self._register(source)
            if self.is_sender:
                self._replica = f"vllm-{secrets.token_hex(8)}"
                client.init_weight_transfer_engine(self._engine_init())
        except BaseException:
            self._hub.close()
            raise

    @classmethod
    def trainer_init(cls, init_info: TrainerInit, *, client: Any, source: Any = None) -> Self:
        return cls(init_info, client, source)

    def _register(self, source: Any) -> sync.Weights | None:
        asked: dict[str, Any] = {"sources": self._init.sources, "group": "trainer"}
        if isinstance(source, nn.Module | Mapping):
            asked.update(rank=self.rank, world_size=self._init.world_size)
            return self._hub.register(self._init.model, source, **asked)
        metadata = getattr(source, "metadata", None)
        if metadata is None:
            raise InvalidType(f"source={shown(source)}: give the module that is trained, or a WeightSource of vLLM's")
        if not self.is_sender:
            return None
        like = {each.name: torch.empty(each.shape, dtype=each.dtype, device="meta") for each in _called(metadata)}
        self._buffers = shared_empty_like(like)
        return self._hub.register(self._init.model, self._buffers, **asked)

    def _engine_init(self, version: int | None = None) -> dict[str, Any]:
        init = self._init
        address = [init.address] if isinstance(init.address, str) else list(init.address)
        sent = {"address": address, "model": init.model, "replica": self._replica, "timeout_s": init.timeout_s}
        return {**sent, "host_memory_bytes": init.host_memory_bytes, "version": version}

    def send_weights(self, version: int | None = None) -> None:
        """Publish the present weights, and have the engine take them; called on every rank. When it returns, or raises, the
        weights may be written again. `version`: above every number before; None: the next one.

        Raises what the engine raises, as the client passes it on. A paused engine is resumed, unless its weights are torn,
        or may be: then it stays paused, and the next update that succeeds resumes it.
        """
        number = self._version + 1 if version is None else version
        if self._buffers is not None and self._weights is not None and self._weights.version is not None:
            self._weights.unpublish(self._init.timeout_s)
        self._copy()
        if self._weights is None:
            return
        info = self._weights.publish(number, self._init.timeout_s)
        self._version = info.version
        try:
            if self.is_sender:
                self._update(info)
        finally:
            if self._init.world_size > 1 and self._buffers is None:
                self._weights.update(number, timeout=self._init.timeout_s)  # all ranks wait for each other, nothing is read
            if self._buffers is None:
                self._weights.unpublish(self._init.timeout_s)

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
            text = f"the source has not yielded {len(left)} of its tensors: {some(list(map(repr, left)))}"
            raise RegistrationError(f"{text}; and {len(unknown)} others: {some(unknown)}")

    def _update(self, info: VersionInfo) -> None:
        self.client.init_weight_transfer_engine(self._engine_init(info.version))  # it gets ready while it still generates
        pause, resume = self._pausing or (_nothing, _nothing)
        pause(self._init.pause, self._init.clear_cache)
        try:
            self._start()
            try:
                self.client.update_weights({"version": info.version, "content_id": info.content_id})
            except Exception as error:
                if INTACT not in _text_of(error):
                    error.add_note("generation stays paused: the engine's weights may be torn; the next update resumes it")
                    resume = _nothing
                raise
            self.client.finish_weight_update(weight_version=f"{info.version}")
        finally:
            resume()

    def _start(self) -> None:
        try:
            self.client.start_weight_update()
        except Exception:
            self.client.finish_weight_update()  # what a trainer has begun that is gone: only that is forgiven
            self.client.start_weight_update()

    def shutdown(self) -> None:
        """Leave the cluster. The engine keeps what it serves."""
        self._hub.close()


def _nothing(*_: object) -> None:
    pass


def _called(metadata: Any) -> Any:
    """vLLM 0.32 has a method where 0.33 has a property."""
    return metadata() if callable(metadata) else metadata


def _text_of(error: BaseException) -> str:
    """All that an error says, with the body of an HTTP answer."""
    response = getattr(error, "response", None)
    return f"{error} {getattr(response, 'text', '')}"


def _pausing(client: Any) -> tuple[Callable[[Any, bool], object], Callable[[], object]]:
    """How a client's engine is paused and resumed: vLLM's clients have no calls for it."""
    if hasattr(client, "pause_generation") and hasattr(client, "resume_generation"):
        return lambda mode, clear: client.pause_generation(mode=mode, clear_cache=clear), client.resume_generation
    if hasattr(client, "base_url"):

        def post(path: str, query: Mapping[str, str]) -> None:
            import requests

            requests.post(f"{client.base_url}/{path}", params=query, timeout=client.timeout).raise_for_status()

        return lambda mode, clear: post("pause", {"mode": mode, "clear_cache": f"{clear}".lower()}), lambda: post(
            "resume", {}
        )
    if hasattr(client, "handles"):

        def call(name: str, **arguments: Any) -> None:
            import ray

            ray.get([getattr(handle, name).remote(**arguments) for handle in client.handles])

        return (
            lambda mode, clear: call("pause_generation", mode=mode, clear_cache=clear),
            lambda: call("resume_generation"),
        )
    raise InvalidValue(
        f"client={shown(client)} cannot pause its engine: give it pause_generation(mode=, clear_cache=) and "
        "resume_generation(), or TrainerInit(pause=None) where nothing is generated during an update"
    )
