"""SGLang: the trainer's side, which publishes weights and has engines take them.

Responsible for the order of calls of an update, and for what becomes of generation when one fails.
Not responsible for what an engine's ranks do (`sglang_engine`). SGLang need not be installed here.
"""

from __future__ import annotations

import base64
import pickle
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import torch

from tensorhub import sync
from tensorhub.errors import (
    InvalidType,
    InvalidValue,
    Memory,
    StateError,
    TensorHubError,
    shown,
    text_of,
)
from tensorhub.integrations.readers import Readers
from tensorhub.integrations.sglang_session import (
    LOADER,
    REPORT,
    Order,
    Report,
    check_loader,
    has_sessions,
)
from tensorhub.types import Options, VersionInfo

if TYPE_CHECKING:
    from torch import nn

    from tensorhub.layouts.views import Sources

Tensors = Sequence[tuple[str, torch.Tensor]]
GROUP = "trainer"
PAUSES = ("abort", "retract", "in_place", None)
MARGIN_S = 30.0  # an engine answers so much later than its own deadline, at most


class Engine(Protocol):
    """What `Trainer` needs of an engine: SGLang's control calls, by the names that SGLang has for
    them.
    """

    ranks: int
    has_sessions: bool  # whether this release of SGLang has them

    def call(self, name: str, **fields: Any) -> tuple[bool, str]:
        """Whether SGLang has done it, and what it says."""

    def parameter(self, name: str) -> object:
        """What SGLang answers for a parameter, in numbers; None for a name that the model has
        not.
        """

    def serialized(self, tensors: Tensors) -> list[Any]:
        """The tensors, once for each rank."""


class Server:
    """An SGLang server, by HTTP."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 300.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidValue(
                f'{shown(url)} is not the URL of an SGLang server: give "http://HOST:PORT"'
            )
        import requests

        self._url, self._timeout_s = url.rstrip("/"), timeout_s + MARGIN_S
        self._http = requests.Session()
        if api_key is not None:
            self._http.headers["Authorization"] = f"Bearer {api_key}"
        try:
            answer = self._http.get(f"{self._url}/server_info", timeout=self._timeout_s)
            answer.raise_for_status()
            info = answer.json()
        except requests.RequestException as error:
            text = (
                f"the SGLang server {self._url} does not say what it is: is it up, and is "
                f"api_key= right? ({error})"
            )
            raise StateError(text, retryable=True) from error
        check_loader(f"the SGLang server {self._url}", info.get("custom_weight_loader"))
        self.ranks = int(info["tp_size"])
        self.has_sessions = has_sessions(info["version"])

    def __repr__(self) -> str:
        return f"Server({self._url!r})"

    def call(self, name: str, **fields: Any) -> tuple[bool, str]:
        answer = self._http.post(f"{self._url}/{name}", json=fields, timeout=self._timeout_s)
        if answer.status_code != 400:
            answer.raise_for_status()
        try:
            said = answer.json()
        except ValueError:
            said = {}
        return answer.ok, f"{said.get('message', answer.text)}"

    def parameter(self, name: str) -> object:
        asked = {"name": name, "truncate_size": 0}
        answer = self._http.post(
            f"{self._url}/get_weights_by_name", json=asked, timeout=self._timeout_s
        )
        return answer.json() if answer.ok else None

    def serialized(self, tensors: Tensors) -> list[str]:
        return [base64.b64encode(pickle.dumps(list(tensors))).decode()] * self.ranks


class Offline:
    """An `sglang.Engine` of this process."""

    def __init__(self, engine: Any) -> None:
        from sglang import __version__

        check_loader("this sglang.Engine", engine.server_args.custom_weight_loader)
        self.has_sessions = has_sessions(__version__)
        self._engine = engine
        self.ranks = int(engine.server_args.tp_size)

    def call(self, name: str, **fields: Any) -> tuple[bool, str]:
        return self._ask(name, fields) or (True, "")

    def parameter(self, name: str) -> object:
        return self._ask("get_weights_by_name", {"name": name, "truncate_size": 0})

    def _ask(self, name: str, fields: Mapping[str, Any]) -> Any:
        from sglang.srt.managers import io_struct

        kind = "".join(part.capitalize() for part in name.split("_")) + "ReqInput"
        call = getattr(self._engine.tokenizer_manager, name)(getattr(io_struct, kind)(**fields))
        return self._engine.loop.run_until_complete(call)

    def serialized(self, tensors: Tensors) -> list[bytes]:
        return [pickle.dumps(list(tensors))] * self.ranks


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
    InvalidValue; as `tensorhub.connect` and `Hub.register`.
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
        if pause not in PAUSES:
            raise InvalidValue(f"pause={shown(pause)}: give one of {', '.join(map(repr, PAUSES))}")
        self._pause, self._flush, self._timeout_s = (
            pause,
            clear_cache and pause != "in_place",
            timeout_s,
        )
        self._world_size = world_size
        self._engines: list[tuple[Engine, Order]] = []
        self._torn = set[str]()  # engines, by replica, whose weights may be torn
        self._hub = sync.connect(address, options=options)
        try:
            mark = next((each.mark for each in self._hub.describe() if each.model == model), None)
            self.version = -1 if mark is None else mark
            self._sent: int | None = None
            self._readers = Readers(self._hub, model, GROUP, are_optional=allow_no_readers)
            self._sends = rank == 0
            asked: dict[str, Any] = {
                "sources": sources,
                "group": GROUP,
                "rank": rank,
                "world_size": world_size,
            }
            self._weights = self._hub.register(model, source, **asked)
            for engine in _list(engines) if rank == 0 else []:
                order = Order(
                    [address] if isinstance(address, str) else list(address),
                    model,
                    f"sglang-{secrets.token_hex(8)}",
                    self.version,
                    host_memory_bytes=host_memory_bytes,
                    timeout_s=timeout_s,
                    unused=tuple(unused),
                )
                self._engines.append((_engine(engine, api_key, timeout_s), order))
        except BaseException:
            self._hub.close()
            raise

    def send_weights(self, version: int | None = None) -> int:
        """Publish the present weights, and have the engines take them; called on every rank. When
        it returns, or raises, the weights may be written again. Returns the version; SGLang's
        `weight_version` is its stamp (`tensorhub.Stamp.parse`). `version`: above every number
        before; None: the next one.

        Raises StateError (nothing has read what was published before: `allow_no_readers`), and what
        an engine's ranks have met; of several engines, the first one's error, with a note for each
        other one. An engine is resumed, unless its weights are torn, or may be: then
        it stays paused, and the next update that succeeds resumes it.
        """
        return self._publish(version, is_check=False)

    def check_weights(self) -> int:
        """Compare every engine's tensors, byte by byte, with what SGLang's own loader and
        post-processing make of the present weights, in other memory; called on every rank, with the
        weights of the last `send_weights`. For that they are published once more, under the next
        number, which is returned; no engine takes it. Engines are paused as in an update.

        Raises IntegrityError (it names the tensors that differ; the next update writes them),
        StateError (an engine has had no update), and as `send_weights`.
        """
        return self._publish(None, is_check=True)

    def _publish(self, version: int | None, *, is_check: bool) -> int:
        info = self._weights.publish(
            self.version + 1 if version is None else version, self._timeout_s
        )
        before, self.version = self._sent, info.version
        self._sent = info.version
        try:
            if self._sends and not self._engines:  # engines are asked themselves
                self._readers.check(before, self._timeout_s)
            self._on_all(info, is_check=is_check)
        finally:
            if self._world_size > 1:
                # all ranks wait for each other, nothing is read
                self._weights.update(info.version, timeout=self._timeout_s)
            self._weights.unpublish(self._timeout_s)
        return info.version

    def _on_all(self, info: VersionInfo, *, is_check: bool) -> None:
        """On all engines at the same time: what one of them does, or does not, holds up no
        other.
        """
        errors: list[Exception] = []
        engines = [
            (
                engine,
                replace(order, version=info.version, content_id=info.content_id, is_check=is_check),
            )
            for engine, order in self._engines
        ]

        def call(pair: tuple[Engine, Order]) -> None:
            try:
                self._update(*pair)
            except Exception as error:
                errors.append(error)

        if len(engines) == 1:
            self._update(*engines[0])
            return
        with ThreadPoolExecutor(
            max(1, len(engines)), thread_name_prefix="tensorhub-sglang"
        ) as threads:
            list(threads.map(call, engines))
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"another engine: {text_of(other)}")
            raise errors[0]

    def _update(self, engine: Engine, order: Order) -> None:
        """Carry out an order on one engine. The engine is resumed after its pause, also where the
        pause itself has failed, unless its weights may be torn.
        """
        was_whole = is_whole = order.replica not in self._torn
        try:
            if self._pause is not None:
                _done(engine.call("pause_generation", mode=self._pause))
            self._begin(engine)
            try:
                is_whole = False
                self._load(engine, order)
            except BaseException as error:
                is_intact = isinstance(error, TensorHubError) and error.memory == "intact"
                is_whole = was_whole and is_intact
                with suppress(Exception):  # the first error is reported
                    self._end(engine)
                raise
            self._end(engine)
        except BaseException as error:
            if not is_whole:
                self._torn.add(order.replica)
                error.add_note(
                    "generation stays paused: the engine's weights may be torn; the next "
                    "update resumes it"
                )
            elif self._pause is not None:
                with suppress(Exception):  # the first error is reported
                    engine.call("continue_generation")
            raise
        self._torn.discard(order.replica)
        if self._pause is not None:
            _done(engine.call("continue_generation"))

    @staticmethod
    def _begin(engine: Engine) -> None:
        if not engine.has_sessions:
            return
        done, said = engine.call("begin_weight_update", selector="target")
        if not done and "already open" in said:  # by a trainer that is gone
            _load(engine, [])  # the loader prepares the end
            _done(engine.call("end_weight_update"))
            done, said = engine.call("begin_weight_update", selector="target")
        _done((done, said))

    @staticmethod
    def _end(engine: Engine) -> None:
        if engine.has_sessions:
            _done(engine.call("end_weight_update"))

    def _load(self, engine: Engine, order: Order) -> None:
        _carry_out(engine, order)
        if not order.is_check:
            _load(engine, [], flush_cache=self._flush, weight_version=str(self._weights.stamp()))

    def close(self) -> None:
        """Leave the cluster. The engines keep what they serve."""
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


def _carry_out(engine: Engine, order: Order) -> None:
    """Give the engine's loader an order. Raises what its ranks have met. An engine that says that
    it has loaded, and has not asked the loader, is found out here.
    """
    _load(engine, order.tensors(), flush_cache=False)
    report = Report.decode(engine.parameter(REPORT))
    if report is None or (report.version, report.is_check) != (order.version, order.is_check):
        raise StateError(
            f"{engine!r} has answered that it has loaded version {order.version}, and its loader "
            f"{'was never called' if report is None else f'reports version {report.version}'}: "
            f"does something between trainer and engine answer in its place?"
        )
    if report.failed is not None:
        raise report.failed.error()


def _load(engine: Engine, tensors: Tensors, **fields: Any) -> None:
    target = {"selector": "target"} if engine.has_sessions else {"disable_draft_model": True}
    asked = {"load_format": LOADER, **target, **fields}
    given = engine.serialized(tensors)
    answer = engine.call("update_weights_from_tensor", serialized_named_tensors=given, **asked)
    _done(answer, "in_doubt")  # of the last call: new weights would bear the old label


def _done(answer: tuple[bool, str], memory: Memory = "intact") -> None:
    done, said = answer
    if not done:
        raise StateError(f"SGLang has refused: {said}", memory=memory)


def _list(engines: object) -> list[object]:
    return list(engines) if isinstance(engines, list | tuple) else [engines]


def _engine(engine: object, api_key: str | None, timeout_s: float) -> Engine:
    if isinstance(engine, str):
        return Server(engine, api_key=api_key, timeout_s=timeout_s)
    if hasattr(engine, "tokenizer_manager"):
        return Offline(engine)
    if hasattr(engine, "call") and hasattr(engine, "serialized"):
        return engine  # type: ignore[return-value]
    raise InvalidType(
        f"engines={shown(engine)}: give the URL of an SGLang server, an "
        "sglang.Engine, or a list of them"
    )
