"""SGLang: the trainer's side, which publishes weights and has engines take them.

Responsible for what a trainer does at each step. Not responsible for one engine (`sglang_server`).
SGLang need not be installed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from tensorhub import sync
from tensorhub.errors import InvalidValue, StateError, TensorHubError, shown
from tensorhub.integrations.fleet import Fleet
from tensorhub.integrations.given import bounded
from tensorhub.integrations.readers import Readers
from tensorhub.integrations.sglang_server import MARGIN_S, Session
from tensorhub.integrations.trainer_group import GROUP, register_trainer
from tensorhub.types import HandleState, Options, VersionInfo

if TYPE_CHECKING:
    from torch import nn

    from tensorhub.layouts.views import Sources


class Trainer:
    """One rank of a trainer. `send_weights` publishes its weights, where they are, and has every
    engine take them.

    `source`: the module that is trained, or its tensors by name, under the names that the engine's
    model loads (of a DTensor this rank's part). `engines`: a server's URL, an `sglang.Engine`, or
    several; only rank 0 uses them. `pause`: the fate of requests in an update, "abort", "retract"
    (they are computed anew with the new weights) or "in_place" (they go on with the cache that they
    have); None: engines are not paused here. `clear_cache`: drop the cache of the old weights; not
    with "in_place". `host_memory_bytes`: of each rank of an engine; with enough for its shard, a
    failed update leaves the old weights whole. `unused`: names of published tensors, with `*`, that
    the engine's model leaves alone. `allow_no_readers`: an update that nothing reads is no error
    (`readers`). `api_key`: of the servers. `sources`, `options`: as `Hub.register` and
    `tensorhub.connect` take them.

    Raises StateError: an engine was started without the loader, or a server does not answer;
    InvalidValue; as `tensorhub.connect` and `trainer_group.register_trainer`.
    """

    def __init__(
        self,
        source: nn.Module | Mapping[str, torch.Tensor],
        engines: object,
        address: str | list[str],
        *,
        model: str = "actor",
        rank: int = 0,
        world_size: int = 1,
        pause: Literal["abort", "retract", "in_place"] | None = "abort",
        clear_cache: bool = True,
        host_memory_bytes: int = 0,
        unused: Sequence[str] = (),
        allow_no_readers: bool = False,
        timeout_s: float = 300.0,
        api_key: str | None = None,
        sources: Sources | None = None,
        options: Options | None = None,
    ) -> None:
        several = engines if isinstance(engines, list | tuple) else [engines]
        if rank == 0 and not several and not allow_no_readers:
            raise InvalidValue(
                f"engines={shown(engines)}: nothing would take the weights. Name the engines to "
                f"update; allow_no_readers=True publishes for other workers"
            )
        self._timeout_s = timeout_s
        self._world_size = world_size
        self._is_closed = False
        asked: dict[str, Any] = {
            "model": model,
            "pause": pause,
            "clear_cache": clear_cache,
            "host_memory_bytes": host_memory_bytes,
            "unused": unused,
            "timeout_s": timeout_s,
            "api_key": api_key,
        }
        self.engines = [Session(each, address, **asked) for each in several if rank == 0]
        # an engine that does not answer says so itself
        self._fleet = Fleet(self.engines, timeout_s=timeout_s + 2 * MARGIN_S)
        self._hub = sync.connect(address, options=bounded(options, timeout_s))
        try:
            mark = next((each.mark for each in self._hub.describe() if each.model == model), None)
            self.version = -1 if mark is None else mark
            self._sent: int | None = None
            self._readers = Readers(self._hub, model, GROUP, are_optional=allow_no_readers)
            self._sends = rank == 0
            self._weights = register_trainer(
                self._hub,
                model,
                source,
                timeout_s,
                sources=sources,
                rank=rank,
                world_size=world_size,
            )
        except BaseException:
            self._hub.close()
            raise

    def send_weights(self, version: int | None = None) -> int:
        """Publish the present weights, and have the engines take them; called on every rank. When
        it returns, or raises, the weights may be written again. Returns the version; SGLang's
        `weight_version` is its stamp (`tensorhub.Stamp.parse`). `version`: above every number
        before; None: the next one.

        Raises StateError (the trainer is closed), and what an engine's ranks have met; of several
        engines only if none has taken the version (`fleet.Fleet`). An engine is resumed, unless its
        weights are torn, or may be: then it stays paused, and the next update that succeeds resumes
        it.
        """
        return self._publish(version, self._fleet.update)

    def check_weights(self) -> int:
        """Compare every engine's tensors, byte by byte, with what SGLang's own loader and
        post-processing make of the present weights, in other memory; called on every rank, with the
        weights of the last `send_weights`. For that they are published once more, under the next
        number, which is returned; no engine takes it. Engines are paused as in an update.

        Raises IntegrityError (it names the tensors that differ; the next update writes them),
        StateError (an engine has had no update), and as `send_weights`.
        """
        return self._publish(None, self._fleet.check)

    def _publish(self, version: int | None, call: Callable[[VersionInfo], object]) -> int:
        if self._is_closed:
            raise StateError("this Trainer is closed: make another one to send weights")
        held = HandleState.READY, HandleState.IN_DOUBT  # what could not be ended
        if self._weights.state in held:
            self._weights.unpublish(self._timeout_s)
        number = self.version + 1 if version is None else version
        try:
            info = self._weights.publish(number, self._timeout_s)
        except TensorHubError as error:
            if error.memory == "in_doubt":  # it may be published all the same
                self.version = number
                self._weights.unpublish(self._timeout_s)
            raise
        before, self.version = self._sent, info.version
        self._sent = info.version
        try:
            if self._sends and not self.engines:  # engines are asked themselves
                self._readers.check(before, self._timeout_s)
            call(info)
        finally:
            if self._world_size > 1:
                # all ranks wait for each other, nothing is read
                self._weights.update(info.version, timeout=self._timeout_s)
            self._weights.unpublish(self._timeout_s)
        return info.version

    def close(self) -> None:
        """Leave the cluster. The engines keep what they serve."""
        self._is_closed = True
        self._fleet.close()
        self._hub.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
