"""One SGLang engine as a trainer sees it, by HTTP or in the trainer's process.

Responsible for the order of calls of an update, and for what becomes of generation when one fails.
Not responsible for several engines (`fleet`), nor for what an engine's ranks do (`sglang_engine`).
SGLang need not be installed here.
"""

from __future__ import annotations

import base64
import json
import pickle
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol

import torch

from tensorhub.errors import (
    BY_NAME,
    InvalidType,
    InvalidValue,
    Memory,
    StateError,
    TensorHubError,
    VersionConflict,
    shown,
)
from tensorhub.integrations.adapters import KEPT, SCHEME, named
from tensorhub.integrations.given import check_info, texts
from tensorhub.integrations.http_calls import Answer, call, checked_url, parsed
from tensorhub.integrations.sglang_session import (
    ASLEEP,
    LOADER,
    REPORT,
    SLEEPS,
    TORN,
    Order,
    Purpose,
    Report,
    check_loader,
    has_sessions,
)
from tensorhub.model.stamps import Stamp
from tensorhub.types import VersionInfo

Tensors = Sequence[tuple[str, torch.Tensor]]
PAUSES = ("abort", "retract", "in_place", None)
ALL_OF_DRAFT = "draft.*"  # in `unused`: the draft model keeps its weights
RANKS_MAX = 4096  # of one engine: each gets a copy of a call
MARGIN_S = 30.0  # an engine answers so much later than its own deadline, at most


class Engine(Protocol):
    """What `Trainer` needs of an engine: SGLang's control calls, by the names that SGLang has for
    them.
    """

    ranks: int
    has_sessions: bool  # whether this release of SGLang has them
    has_draft: bool  # whether a draft model may guess tokens

    def look(self) -> None:
        """Ask the engine what it is; again once it may be another one than before."""

    def call(self, name: str, **fields: Any) -> tuple[bool, str]:
        """Whether SGLang has done it, and what it says."""

    def parameter(self, name: str) -> object:
        """What SGLang answers for a parameter, in numbers; None for a name that the model has
        not.
        """

    def serialized(self, tensors: Tensors) -> list[Any]:
        """The tensors, once for each rank."""

    def adapters(self, name: str, **fields: Any) -> tuple[str, Mapping[str, str]]:
        """Make a call for adapters: why SGLang has refused it, or nothing, and the paths of those
        that it has loaded, by name.
        """


class Server:
    """An SGLang server, by HTTP."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 300.0) -> None:
        self._url, self._timeout_s = checked_url(url, "an SGLang server"), timeout_s + MARGIN_S
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._has_answered = False
        self.look()

    def look(self) -> None:
        answer = self._ask("server_info")
        try:
            info = answer.fields
            self.ranks = int(info["tp_size"])
            if not 0 < self.ranks <= RANKS_MAX:
                raise ValueError
            self.has_sessions = has_sessions(f"{info['version']}")
            check_loader(f"{self!r}", info.get("custom_weight_loader"))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise StateError(f"{self!r} does not say what it is: {answer.shown}") from error
        self.has_draft = bool(info.get("speculative_algorithm"))

    def __repr__(self) -> str:
        return f"the SGLang server {self._url}"

    def _ask(self, path: str, fields: Mapping[str, Any] | None = None) -> Answer:
        body = None if fields is None else json.dumps(fields).encode()
        try:
            answer = call(f"{self!r}", f"{self._url}/{path}", body, self._headers, self._timeout_s)
            if answer.status not in (200, 400):
                raise StateError(
                    f"{self!r} has answered {answer.status} to /{path}: {answer.shown}"
                )
        except StateError as error:
            error.memory = "in_doubt"  # what was asked may have been done
            raise
        return answer

    def call(self, name: str, **fields: Any) -> tuple[bool, str]:
        answer = self._ask(name, fields)
        with suppress(ValueError):
            return answer.status == 200, f"{answer.fields.get('message', answer.shown)}"
        return answer.status == 200, answer.shown

    def parameter(self, name: str) -> object:
        if name == ASLEEP and not self._has_answered:
            with suppress(StateError, ValueError):  # a router may not pass it on
                if not _is_stamp(self._ask("model_info").fields.get("weight_version")):
                    return None  # its model would log that it has no such parameter
        answer = self._ask("get_weights_by_name", {"name": name, "truncate_size": 0})
        self._has_answered = self._has_answered or answer.status == 200
        with suppress(ValueError):
            return parsed(answer.text) if answer.status == 200 else None
        return None

    def adapters(self, name: str, **fields: Any) -> tuple[str, Mapping[str, str]]:
        answer = self._ask(name, fields)
        try:
            said = answer.fields
            refused, loaded = said["error_message"] or "", said["loaded_adapters"] or {}
            if not isinstance(loaded, dict):
                raise ValueError
            if not all(isinstance(each, str) for each in (refused, *loaded.values())):
                raise ValueError
            return refused, loaded
        except (ValueError, KeyError) as error:
            raise StateError(f"{self!r} has answered to /{name}: {answer.shown}") from error

    def serialized(self, tensors: Tensors) -> list[str]:
        return [base64.b64encode(pickle.dumps(list(tensors))).decode()] * self.ranks


class Offline:
    """An `sglang.Engine` of this process."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._has_answered = engine, False
        self.look()

    def look(self) -> None:
        from sglang import __version__

        settings = self._engine.server_args
        check_loader("this sglang.Engine", settings.custom_weight_loader)
        self.has_sessions = has_sessions(__version__)
        self.has_draft = bool(settings.speculative_algorithm)
        self.ranks = int(settings.tp_size)

    def __repr__(self) -> str:
        return f"the sglang.Engine {id(self._engine):#x}"

    def call(self, name: str, **fields: Any) -> tuple[bool, str]:
        return self._ask(name, fields) or (True, "")

    def parameter(self, name: str) -> object:
        manager = self._engine.tokenizer_manager
        if name == ASLEEP and not self._has_answered:
            its = getattr(manager, "config_value", partial(getattr, manager.server_args))
            if not _is_stamp(its("weight_version")):
                return None  # its model would log that it has no such parameter
        found = self._ask("get_weights_by_name", {"name": name, "truncate_size": 0})
        self._has_answered = self._has_answered or found is not None
        return found

    def adapters(self, name: str, **fields: Any) -> tuple[str, Mapping[str, str]]:
        said = self._ask(name, fields)
        return said.error_message or "", said.loaded_adapters or {}

    def _ask(self, name: str, fields: Mapping[str, Any]) -> Any:
        from sglang.srt.managers import io_struct

        parts = ["LoRA" if part == "lora" else part.capitalize() for part in name.split("_")]
        kind = "".join(parts) + "ReqInput"
        call = getattr(self._engine.tokenizer_manager, name)(getattr(io_struct, kind)(**fields))
        return self._engine.loop.run_until_complete(call)

    def serialized(self, tensors: Tensors) -> list[bytes]:
        return [pickle.dumps(list(tensors))] * self.ranks


class Session:
    """One engine as a trainer sees it. `engine`: a server's URL, or an `sglang.Engine`. The other
    arguments are those of `Trainer`.

    Raises StateError: the engine was started without the loader, or a server does not answer; and
    InvalidValue.
    """

    def __init__(
        self,
        engine: object,
        address: str | list[str],
        *,
        model: str = "actor",
        pause: Literal["abort", "retract", "in_place"] | None = "abort",
        clear_cache: bool = True,
        host_memory_bytes: int = 0,
        unused: Sequence[str] = (),
        timeout_s: float = 300.0,
        api_key: str | None = None,
    ) -> None:
        if pause not in PAUSES:
            raise InvalidValue(f"pause={shown(pause)}: give one of {', '.join(map(repr, PAUSES))}")
        unused = texts("unused", unused, "*mtp*")
        self.engine = _engine(engine, api_key, timeout_s)
        self._pause, self._flush = pause, clear_cache and pause != "in_place"
        self._taken: VersionInfo | None = None
        # the weights, as far as this session knows; None: a trainer before may have torn them
        self._is_whole: bool | None = None
        order = Order(
            [address] if isinstance(address, str) else list(address),
            model,
            "",
            host_memory_bytes=host_memory_bytes,
            timeout_s=timeout_s,
            unused=unused,
        )
        self._order = self._of_this_engine(order)

    @property
    def name(self) -> str:
        return repr(self.engine)

    def get_ready(self, version: int | None = None) -> None:
        """Have the engine join the cluster, which adapters need; it goes on generating."""
        self._join()

    def _join(self, adapter: str = "") -> None:
        """Raises VersionConflict: that adapter was published anew since the engine loaded it."""
        self._look()
        self._begin()
        try:
            self._give(replace(self._order, purpose="join", adapter=adapter))
        finally:
            self._end()

    def join_fleet(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        lease_s: float = 3.0,
        called: str = "",
    ) -> str:
        """Have the engine join a fleet with one version on all engines, or on none (`one_version`):
        from now on it generates with no other version, and `OneVersion` updates it. The arguments
        are those of `one_version_engine.Engine`. A batch waits for a version for `timeout_s`; then
        SGLang ends the engine. Returns the URL for `OneVersion`.

        Raises StateError: the engine has a draft model, a prefix cache, pipeline stages or data
        parallelism, or is one of a fleet.
        """
        fleet = {"host": host, "port": port, "token": token, "lease_s": lease_s, "called": called}
        self._look()
        self._begin()
        try:
            return self._give(replace(self._order, purpose="fleet", fleet=fleet)).url
        finally:
            self._end()

    def update(self, info: VersionInfo) -> None:
        """Pause, have the engine take a version, and resume, unless the weights are torn, or may
        be. Raises what the engine's ranks have met.
        """
        self._while_paused("update", info)
        self._taken = info

    def check(self, published: VersionInfo | None = None) -> None:
        """See `Trainer.check_weights`. `published`: what to compare with; None: the version that
        the engine took last, which has to be published.
        """
        info = published or self._taken
        if info is None:
            raise StateError(f"{self.name} has taken no version yet: there is nothing to compare")
        self._while_paused("check", info)

    def load_adapter(self, model: str, version: int) -> str:
        """Have the engine load a published version of an adapter (`adapters.adapter_tensors`).
        Returns its name, which requests give as `lora_path`. Versions of this adapter but the last
        two are unloaded, each once no request uses it.

        Raises ManifestMismatch: it is no adapter, or none for this engine (all reasons are listed);
        StateError: the engine takes no adapters; and as `Hub.fetch`.
        """
        self._join()
        name = f"{model}@{version}"
        asked = {"lora_name": name, "lora_path": f"{SCHEME}{name}"}
        refused, loaded = self.engine.adapters("load_lora_adapter", **asked)
        if refused and loaded.get(name) == asked["lora_path"]:
            try:
                self._join(name)
            except VersionConflict:
                self._unload(name)
                refused, loaded = self.engine.adapters("load_lora_adapter", **asked)
        if refused and name not in loaded:
            kind, _, text = refused.partition(": ")
            raise (
                BY_NAME[kind](text)
                if kind in BY_NAME
                else StateError(f"SGLang has refused {name!r}: {refused}")
            )
        ours = [named(path) for path in loaded.values() if path.startswith(SCHEME)]
        versions = sorted(its for name_, its in ours if name_ == model and its != version)
        for old in versions[: max(0, len(versions) + 1 - KEPT)]:
            self._unload(f"{model}@{old}")
        return name

    def _unload(self, name: str) -> None:
        refused, _ = self.engine.adapters("unload_lora_adapter", lora_name=name)
        if refused:
            raise StateError(f"SGLang has not unloaded {name}: {refused}")

    def _while_paused(self, purpose: Purpose, info: VersionInfo) -> None:
        check_info(info)
        self._look()
        order = replace(
            self._order, purpose=purpose, version=info.version, content_id=info.content_id
        )
        engine, is_whole = self.engine, self._is_whole
        try:
            if self._pause is not None:
                _done(engine.call("pause_generation", mode=self._pause))
            self._begin()
            try:
                is_whole = False
                self._give(order)
                if purpose == "update":
                    stamp = Stamp(info.model, info.lineage, info.version, info.content_id, b"")
                    _load(engine, [], flush_cache=self._flush, weight_version=str(stamp))
            except BaseException as error:
                is_intact = isinstance(error, TensorHubError) and error.memory == "intact"
                is_whole = self._is_whole if is_intact else False
                with suppress(Exception):  # the first error is reported
                    self._end()
                raise
            self._end()
        except BaseException as error:
            self._is_whole = is_whole = self._says_whole() if is_whole is None else is_whole
            if not is_whole:
                error.add_note(
                    "generation stays paused: the engine's weights may be torn; the next "
                    "update resumes it"
                )
            elif self._pause is not None:
                with suppress(Exception):  # the first error is reported
                    engine.call("continue_generation")
            raise
        self._is_whole = True
        if self._pause is not None:
            _done(engine.call("continue_generation"))

    def _says_whole(self) -> bool:
        """Ask the engine, which knows nothing of it as long as its loader was never called."""
        try:
            return self.engine.parameter(TORN) in (None, [0.0])
        except Exception:
            return False

    def _look(self) -> None:
        """Refuse an engine that sleeps, and know one that has just started, perhaps with another
        number of ranks.
        """
        state = self.engine.parameter(ASLEEP)
        if state == [1.0]:
            raise StateError(SLEEPS)
        if state is None:
            self.engine.look()
            self._order = self._of_this_engine(self._order)

    def _of_this_engine(self, order: Order) -> Order:
        has_draft = self.engine.has_draft and ALL_OF_DRAFT not in order.unused
        return replace(order, replica=f"sglang-{secrets.token_hex(8)}", has_draft=has_draft)

    def _begin(self) -> None:
        engine, selector = self.engine, "all" if self._order.has_draft else "target"
        if not engine.has_sessions:
            return
        done, said = engine.call("begin_weight_update", selector=selector)
        if not done and "already open" in said:  # by a trainer that is gone
            self._show_draft()
            _load(engine, [])  # the loader prepares the end
            _done(engine.call("end_weight_update"))
            done, said = engine.call("begin_weight_update", selector=selector)
        _done((done, said))

    def _end(self) -> None:
        if self.engine.has_sessions:
            _done(self.engine.call("end_weight_update"))

    def _show_draft(self) -> None:
        if self._order.has_draft:
            shown_models = replace(self._order, purpose="show").tensors()
            _load(self.engine, shown_models, draft=True, flush_cache=False)

    def _give(self, order: Order) -> Report:
        """Give the engine's loader an order. Raises what its ranks have met. An engine that says
        that it has loaded, and has not asked the loader, is found out here.
        """
        self._show_draft()
        order = replace(order, nonce=secrets.token_hex(8))
        _load(self.engine, order.tensors(), flush_cache=False)
        report = Report.decode(self.engine.parameter(REPORT))
        if report is None or report.nonce != order.nonce:
            said = "gives no report" if report is None else "reports of another order"
            if report is not None and report.failed is not None:
                said += f" ({report.failed.text})"
            raise StateError(
                f"{self.engine!r} has answered that it has loaded version {order.version}, and its "
                f"loader, asked by get_weights_by_name, {said}: does something between trainer and "
                f"engine answer in its place, or not pass /get_weights_by_name on?"
            )
        if report.failed is not None:
            raise report.failed.error()
        return report


def _load(engine: Engine, tensors: Tensors, *, draft: bool = False, **fields: Any) -> None:
    """Call the loader with the engine's model, and with its draft model, too."""
    asked: dict[str, Any] = {"load_format": LOADER, **fields}
    if engine.has_sessions:
        asked["selector"] = "all" if draft else "target"
    else:
        asked["disable_draft_model"] = not draft
    given = engine.serialized(tensors)
    answer = engine.call("update_weights_from_tensor", serialized_named_tensors=given, **asked)
    _done(answer, "in_doubt")  # of the last call: new weights would bear the old label


def _is_stamp(weight_version: object) -> bool:
    """Whether TensorHub has updated this engine."""
    try:
        Stamp.parse(weight_version)  # type: ignore[arg-type]
    except TensorHubError:
        return False
    return True


def _done(answer: tuple[bool, str], memory: Memory = "intact") -> None:
    done, said = answer
    if not done:
        raise StateError(f"SGLang has refused: {said}", memory=memory)


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
