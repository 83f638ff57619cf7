"""A history of what callers saw, in real processes: each call with its arguments, begin, end,
result and the digests of its bytes.

`recording` writes it, a file for each process, a line for each begin and end, so that a killed
process leaves what it had called. Times are of the machine's monotonic clock, which its processes
share. `auditor` judges it.

    with recording(folder):          # async and `sync` callers of this process alike
        ...
    audit(read(folder))

A begin is stamped before the call and an end after it, so that the call took effect in between.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import MethodType
from typing import Any
from unittest.mock import patch

from tensorhub.errors import TensorHubError
from tensorhub.types import VersionInfo

FOLDER_VARIABLE = "RECORDED_HISTORY"  # benches hand on no variable that begins with TENSORHUB

Digests = dict[str, str]  # by tensor: its size and digest
Content = dict[str, Any]  # a VersionInfo's fields


@dataclass
class Entry:
    """One call of one caller. What it does not have is empty."""

    who: str  # process and hub; calls of one are not always one after the other
    call: str  # as the API names it; "leave": the end of a hub
    model: str
    began: float
    group: str = ""
    rank: int = 0
    world_size: int = 1
    spot: bool = False
    handle: str = ""  # the registration
    arguments: dict[str, Any] = field(default_factory=dict)
    # of what a publish offers
    offered: Digests = field(default_factory=dict)
    # None: it never ended, or its process did not live to see it
    ended: float | None = None
    error: str = ""  # its class
    text: str = ""
    memory: str = ""
    retryable: bool = False
    version: int | None = None
    info: Content | None = None  # None: the caller was not told
    digests: Digests = field(default_factory=dict)  # of what it was given

    @property
    def content(self) -> VersionInfo | None:
        return VersionInfo(**self.info) if self.info is not None else None

    def __str__(self) -> str:
        arguments = " ".join(f"{name}={value}" for name, value in self.arguments.items())
        end = "never ended"
        if self.ended is not None:
            given = "" if self.info is None else f" ({self.info['content_id']})"
            end = f"v{self.version}{given}" if self.version is not None else self.error or "ok"
            end = f"{self.ended:.4f} {end}{f': {self.text[:160]}' if self.text else ''}"
        where = f" {self.group}[{self.rank}]" if self.group else ""
        return f"{self.began:.4f} {self.who}{where} {self.call} {arguments} -> {end}"


def read(folder: Path) -> list[Entry]:
    """All that was written there, by the times at which calls began."""
    entries = list[Entry]()
    for path in sorted(folder.glob("*.jsonl")):
        mine = dict[int, Entry]()
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # its process was killed in the midst of it
                fields = json.loads(line)
                number = fields.pop("number")
                if "began" in fields:
                    mine[number] = Entry(**fields)
                else:
                    for name, value in fields.items():
                        setattr(mine[number], name, value)
        entries += mine.values()
    return sorted(entries, key=lambda entry: entry.began)


class Recorder:
    """What this process's callers see, written as it happens."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._numbers = itertools.count()
        self._open()

    def _open(self) -> None:
        self._pid = os.getpid()
        path = self._folder / f"{self._pid}-{time.monotonic_ns()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def begin(self, call: str, **fields: Any) -> int:
        number = next(self._numbers)
        self._write({"number": number, "call": call, "began": time.monotonic(), **fields})
        return number

    def end(self, number: int, **fields: Any) -> None:
        self._write({"number": number, "ended": time.monotonic(), **fields})

    def failed(self, number: int, error: BaseException) -> None:
        told: dict[str, Any] = {"error": type(error).__name__, "text": str(error)}
        if isinstance(error, TensorHubError):
            told |= {"memory": error.memory, "retryable": error.retryable}
        self.end(number, **told)

    def _write(self, line: Mapping[str, Any]) -> None:
        if os.getpid() != self._pid:  # a fork has a file of its own
            os.close(self._file)
            self._open()
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


# -- around the API


@contextlib.contextmanager
def recording(folder: Path) -> Iterator[None]:
    """Within the block, what this process's callers see is written into that folder."""
    recorder = Recorder(folder)
    try:
        with _patched(recorder):
            yield
    finally:
        recorder.close()


def record_from_now_on(folder: Path) -> None:
    """As `recording`, until this process ends."""
    _patched(Recorder(folder)).__enter__()


def _patched(recorder: Recorder) -> contextlib.ExitStack:
    hub, tools, weights = (import_module(f"tensorhub.api.{name}") for name in _MODULES)
    stack = contextlib.ExitStack()
    for owner, name, wrap in (
        (hub.Hub, "register", _register),
        (hub.Hub, "close", _close),
        (hub.Hub, "newest", _newest),
        (hub.Hub, "wait_for", _wait_for),
        (hub.Hub, "retain", _retain),
        (hub.Hub, "rollback", _rollback),
        (hub.Hub, "_pin", _pin),
        (hub, "fetch_into", _fetch),
        (tools, "fetch_into", _fetch),
        (weights.Weights, "_publish", _publish),
        (weights.Weights, "_mutate", _mutate),
        (weights.Weights, "unpublish", _of_handle),
        (weights.Weights, "close", _of_handle),
        (weights.Weights, "replicate", _fill),
        (weights.Weights, "update", _fill),
        (weights.Weights, "prefetch", _of_handle),
    ):
        original = getattr(owner, name)
        wrapped = functools.wraps(original)(functools.partial(wrap, recorder, original))
        stack.enter_context(patch.object(owner, name, _Method(wrapped)))
    sync = import_module("tensorhub.sync")  # has made its own of the methods before
    for blocking, owner, names in (
        (sync.Hub, hub.Hub, ("wait_for", "retain", "rollback", "close")),
        (sync.Weights, weights.Weights, ("unpublish", "replicate", "prefetch", "close")),
    ):
        for name in names:
            stack.enter_context(patch.object(blocking, name, sync._blocking(getattr(owner, name))))
    register = sync._making(hub.Hub.register, sync.Weights)
    stack.enter_context(patch.object(sync.Hub, "register", register))
    return stack


_MODULES = ("hub", "tools", "weights")
_hubs = itertools.count()


class _Method:
    """A partial function that is also bound to what it is called of."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.__signature__ = inspect.signature(getattr(function, "__wrapped__", function))
        self._function = function

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self._function, instance)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._function(*given, **named)


def _who(hub: Any) -> str:
    """One hub of one process."""
    known = getattr(hub, "_recorded_as", None)
    if known is None:
        known = hub._recorded_as = f"{hub.name}@{os.getpid()}.{next(_hubs)}"
    return str(known)


def _of(weights: Any) -> dict[str, Any]:
    """Which handle it is."""
    shard = weights._handle.member.shard
    return {
        "who": getattr(weights, "_recorded_of", f"@{os.getpid()}"),
        "model": shard.model,
        "group": shard.group,
        "rank": shard.rank,
        "world_size": shard.world_size,
        "spot": shard.spot,
        "handle": shard.registration,
    }


def _shown(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in arguments.items()
        if isinstance(value, str | int) and not isinstance(value, bool)
    }


def _info(info: VersionInfo | None) -> dict[str, Any]:
    if info is None:
        return {}
    names = ("model", "version", "content_id", "nbytes", "world_size", "lineage")
    return {"version": info.version, "info": {name: getattr(info, name) for name in names}}


def _held(weights: Any) -> VersionInfo | None:
    content = weights._handle.member.content
    return content.version if content is not None else None


async def _told(
    recorder: Recorder, number: int, call: Any, result: Callable[[Any], dict[str, Any]]
) -> Any:
    """Await it, and write how it ends."""
    try:
        given = await call
    except BaseException as error:
        recorder.failed(number, error)
        raise
    recorder.end(number, **result(given))
    return given


async def _register(
    recorder: Recorder, call: Any, hub: Any, model: str, tensors: Any, **named: Any
) -> Any:
    weights = await call(hub, model, tensors, **named)
    weights._recorded_of = _who(hub)
    weights._recorded = None if named.get("sources") else tensors
    return weights


async def _close(recorder: Recorder, call: Any, hub: Any) -> None:
    number = recorder.begin("leave", who=_who(hub), model="")
    await _told(recorder, number, call(hub), lambda _: {})


def _newest(recorder: Recorder, call: Any, hub: Any, model: str) -> Any:
    number = recorder.begin("newest", who=_who(hub), model=model)
    try:
        info = call(hub, model)
    except BaseException as error:
        recorder.failed(number, error)
        raise
    recorder.end(number, **_info(info))
    return info


async def _wait_for(recorder: Recorder, call: Any, hub: Any, model: str, **named: Any) -> Any:
    number = recorder.begin("wait_for", who=_who(hub), model=model, arguments=_shown(named))
    return await _told(recorder, number, call(hub, model, **named), _info)


async def _retain(recorder: Recorder, call: Any, hub: Any, model: str, **named: Any) -> None:
    number = recorder.begin("retain", who=_who(hub), model=model, arguments=_shown(named))
    await _told(recorder, number, call(hub, model, **named), lambda _: {})


async def _rollback(recorder: Recorder, call: Any, hub: Any, model: str, **named: Any) -> None:
    number = recorder.begin("rollback", who=_who(hub), model=model, arguments=_shown(named))
    await _told(recorder, number, call(hub, model, **named), lambda _: {})


@contextlib.asynccontextmanager
async def _pin(
    recorder: Recorder, call: Any, hub: Any, model: str, version: int, timeout: Any
) -> AsyncIterator[None]:
    block = call(hub, model, version, timeout)
    number = recorder.begin("pin", who=_who(hub), model=model, arguments={"version": version})
    await _told(recorder, number, block.__aenter__(), lambda _: {})
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        pinned = {"pin": number}
        number = recorder.begin("unpin", who=_who(hub), model=model, arguments=pinned)
        kind = None if error is None else type(error)
        leaving = block.__aexit__(kind, error, None)
        with contextlib.suppress(*[] if error is None else [type(error)]):
            await _told(recorder, number, leaving, lambda _: {})


async def _fetch(
    recorder: Recorder, call: Any, hub: Any, model: str, selector: Any, memory: Any, **named: Any
) -> Any:
    arguments = {"selector": selector, "rank": named.get("rank", 0)}
    number = recorder.begin("fetch", who=_who(hub), model=model, arguments=arguments)

    def result(said: Any) -> dict[str, Any]:
        info, _ = said
        tensors, rank = getattr(memory, "tensors", None), arguments["rank"]
        its = {} if rank is None else {"rank": rank, "world_size": info.world_size}
        alike = rank is not None or info.world_size == 1
        return _info(info) | its | {"digests": digests(tensors()) if tensors and alike else {}}

    return await _told(recorder, number, call(hub, model, selector, memory, **named), result)


async def _publish(
    recorder: Recorder, call: Any, weights: Any, version: int, timeout: Any
) -> VersionInfo:
    offered, arguments = digests(getattr(weights, "_recorded", None)), {"version": version}
    number = recorder.begin("publish", **_of(weights), arguments=arguments, offered=offered)
    info: VersionInfo = await _told(recorder, number, call(weights, version, timeout), _info)
    return info


@contextlib.asynccontextmanager
async def _mutate(
    recorder: Recorder, call: Any, weights: Any, version: int, timeout: Any
) -> AsyncIterator[None]:
    number = recorder.begin("mutate", **_of(weights), arguments={"version": version})
    try:
        async with call(weights, version, timeout):
            yield
    except BaseException as error:
        recorder.failed(number, error)
        raise
    recorder.end(number)


async def _of_handle(recorder: Recorder, call: Any, weights: Any, *given: Any, **named: Any) -> Any:
    signature = inspect.signature(call).bind(weights, *given, **named)
    arguments = _shown(signature.arguments)
    number = recorder.begin(call.__name__, **_of(weights), arguments=arguments)

    def result(report: Any) -> dict[str, Any]:
        return {} if report is None else {"version": report.version}

    return await _told(recorder, number, call(weights, *given, **named), result)


async def _fill(recorder: Recorder, call: Any, weights: Any, *given: Any, **named: Any) -> Any:
    signature = inspect.signature(call).bind(weights, *given, **named)
    signature.apply_defaults()
    arguments, held = _shown(signature.arguments), _held(weights)
    if held is not None:
        arguments["holds"] = _info(held)["info"]
    number = recorder.begin(call.__name__, **_of(weights), arguments=arguments)

    def result(report: Any) -> dict[str, Any]:
        info, tensors = _held(weights), getattr(weights, "_recorded", None)
        known = _info(info) if info is not None and info.version == report.version else {}
        return known | {"version": report.version, "digests": digests(tensors)}

    return await _told(recorder, number, call(weights, *given, **named), result)


# -- bytes


def digests(tensors: Any) -> Digests:
    """Of each tensor, by its name; none where one is not plain (a DTensor)."""
    found: Digests = {}
    for name, tensor in _named(tensors):
        if type(tensor).__name__ == "DTensor":
            return {}
        its = tensor.detach().cpu() if hasattr(tensor, "detach") else tensor
        if hasattr(its, "view") and hasattr(its, "untyped_storage"):
            torch = import_module("torch")
            its = its.contiguous().reshape(-1).view(torch.uint8).numpy()
        data = memoryview(its.reshape(-1).view("uint8"))
        digest = hashlib.blake2b(data, digest_size=8).hexdigest()
        found[name] = f"{data.nbytes}:{digest}"
    return found


def _named(tensors: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if tensors is None:
        return
    if hasattr(tensors, "state_dict"):
        tensors = tensors.state_dict()
    for name, tensor in tensors.items():
        if isinstance(tensor, Mapping):
            yield from _named(tensor, f"{prefix}{name}.")
        elif hasattr(tensor, "reshape"):
            yield f"{prefix}{name}", tensor
