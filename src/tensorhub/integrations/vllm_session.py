"""One vLLM engine as a trainer sees it: an update by the calls of vLLM's weight-transfer interface,
with the pause around it. vLLM need not be installed here.

Responsible for one engine, and for what it generates with after a failure. Not responsible for
several engines (`fleet`), nor for what a worker does (`vllm_engine`).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args
from urllib.parse import urlencode

from tensorhub.errors import InvalidValue, StateError, shown, text_of
from tensorhub.integrations.given import check_info, texts
from tensorhub.integrations.http_calls import call, checked_url
from tensorhub.model.stamps import Stamp
from tensorhub.runtime.threads import begin
from tensorhub.types import VersionInfo

BACKEND = "tensorhub"  # of vLLM's weight transfer
# In an error's text, over any client:
INTACT, TORN, OPEN = (
    "the engine's weights are intact",
    "the engine's weights are torn",
    "an update is open",
)
TORN_VERSION = "torn"  # the engine's `weight_version` where it generates with torn weights
PauseMode = Literal["abort", "wait", "keep"]
MARGIN_S = 30.0  # a server answers so much later than an update's own deadline, at most
HEALTH_S = 5.0  # between two looks at the health of a server that has not answered yet


@dataclass(frozen=True)
class Settings:
    """How engines are updated: see `vllm.TrainerInit`."""

    address: str | list[str]
    model: str
    pause: PauseMode | None = "abort"
    clear_cache: bool = True
    resume_torn: bool = False
    host_memory_bytes: int = 0
    ignored: tuple[str, ...] = ()
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if self.pause not in (*get_args(PauseMode), None):
            raise InvalidValue(f"pause={shown(self.pause)}: give 'abort', 'wait', 'keep' or None")
        texts("ignored", self.ignored, "*mtp*")


class HttpClient:
    """A vLLM server by HTTP, with the calls of vLLM's own `HTTPVLLMWeightSyncClient`. The server
    needs VLLM_SERVER_DEV_MODE=1.
    """

    def __init__(self, url: str, timeout_s: float = 300.0) -> None:
        self.base_url = checked_url(url, "a vLLM server")
        self._timeout_s = timeout_s + MARGIN_S

    def __repr__(self) -> str:
        return self.base_url

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("start_weight_update", {})

    def update_weights(self, update_info: Any) -> None:
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("finish_weight_update", {"weight_version": weight_version})

    def update_weight_version(self, new_version: str) -> None:
        self._post("update_weight_version", {"new_version": new_version})

    def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self._post("pause", {}, mode=mode, clear_cache=f"{clear_cache}".lower())

    def resume_generation(self) -> None:
        self._post("resume", {})

    def collective_rpc(self, method: str, kwargs: Mapping[str, Any]) -> Any:
        body = {"method": method, "kwargs": kwargs, "timeout": self._timeout_s}
        return self._post("collective_rpc", body).get("results")

    def _post(self, path: str, body: Mapping[str, Any], **query: str) -> dict[str, Any]:
        """What the server answers, in JSON or not at all: so does no other server's "ok"."""
        whose = f"the vLLM server {self.base_url}"
        url = f"{self.base_url}/{path}" + (f"?{urlencode(query)}" if query else "")
        headers = {"Content-Type": "application/json"}
        answer = call(whose, url, json.dumps(body).encode(), headers, self._timeout_s)
        said = f"{whose} has answered {answer.status} to /{path}: {answer.shown}"
        if answer.status != 200:
            raise StateError(said)
        try:
            return answer.fields if answer.text else {}
        except ValueError as error:
            raise StateError(f"{said} ({error})") from error


class ExtensionClient:
    """An engine with `vllm_worker.WorkerExtension`, by the calls of a weight-transfer client.
    `engine`: a server's URL, or an `LLM` in this process.

    A release before 0.29 keeps no weight version: there `state()` tells the version.
    """

    def __init__(self, engine: Any, timeout_s: float = 300.0) -> None:
        self._engine = HttpClient(engine, timeout_s) if isinstance(engine, str) else engine
        self.base_url: str | None = getattr(self._engine, "base_url", None)

    def __repr__(self) -> str:
        return f"{self._engine!r}"

    def _call(self, method: str, **given: Any) -> list[Any]:
        """What each worker returns."""
        results = self._engine.collective_rpc(f"tensorhub_{method}", kwargs=given)
        if not isinstance(results, list) or not results:
            raise StateError(f"{self!r} has called no worker: {shown(results)}")
        return results

    def _call_for(self, asked: int | None, method: str, **given: Any) -> None:
        """Each worker has to say that it has that version, or (None) one: "ok" alone is nothing."""
        for state in self._call(method, **given):
            has = state.get("version") if isinstance(state, dict) else None
            if type(has) is not int or asked not in (None, has):
                raise StateError(
                    f"{self!r} has answered to tensorhub_{method}, and a worker does not say that "
                    f"it has version {asked}: {shown(state)}"
                )

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        asked = dict(init_info)
        version, check = asked.pop("version", None), asked.pop("check", None)
        must_be_whole = asked.pop("whole", False)
        self._call("join", **asked)
        if must_be_whole:
            said = self._call("state")
            if not all(isinstance(each, dict) and each.get("is_torn") is False for each in said):
                raise StateError(f"{self!r} does not say that its weights are whole")
        elif check is not None:
            self._call_for(None, "check", model=check, version=version)
        elif version is not None:
            self._call("prepare", version=version)

    def start_weight_update(self) -> None:
        """Nothing is open between calls."""

    def update_weights(self, update_info: Any) -> None:
        self._call_for(update_info["version"], "update", **update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if weight_version is not None:
            self.update_weight_version(weight_version)

    def update_weight_version(self, new_version: str) -> None:
        call = getattr(self._engine, "update_weight_version", None)
        if call is None:
            return
        try:
            call(new_version)
        except StateError as error:
            if "answered 404" not in f"{error}":
                raise

    def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        if isinstance(self._engine, HttpClient):
            self._engine.pause_generation(mode=mode, clear_cache=clear_cache)
        elif clear_cache:  # an LLM generates only when it is told to
            self._engine.reset_prefix_cache()

    def resume_generation(self) -> None:
        if isinstance(self._engine, HttpClient):
            self._engine.resume_generation()

    def state(self) -> list[dict[str, Any]]:
        """Of each worker: the version in place, whether the weights are torn, and how they come."""
        return list(self._call("state"))


class Session:
    """The updates of one engine. `client`: as vLLM has them, `HttpClient`, or any object with their
    calls.
    """

    def __init__(self, client: Any, settings: Settings) -> None:
        self.client, self._settings = client, settings
        self._controls = _controls(client, settings)
        self._replica = f"vllm-{secrets.token_hex(8)}"
        # the weights, as far as this session knows; None: a trainer before may have torn them
        self._is_whole: bool | None = None

    @property
    def name(self) -> str:
        return str(getattr(self.client, "base_url", None) or repr(self.client))

    def _init(self, **asked: Any) -> dict[str, Any]:
        settings = self._settings
        address = settings.address
        return {
            "address": [address] if isinstance(address, str) else list(address),
            "model": settings.model,
            "replica": self._replica,
            "timeout_s": settings.timeout_s,
            "host_memory_bytes": settings.host_memory_bytes,
            "ignored": list(settings.ignored),
            **asked,
        }

    def _await(self, call: Callable[..., object], *given: Any, **named: Any) -> None:
        """Make a call to the engine. vLLM never answers a call that was under way when its engine's
        process died, but its health tells of it.
        """
        look = self._look()
        if look is None:
            call(*given, **named)
            return
        answer = begin("tensorhub-vllm-call", call, *given, **named)
        while not wait([answer], HEALTH_S).done:
            look()
        answer.result()

    def _look(self) -> Callable[[], None] | None:
        """What looks at the engine's health, where that can be seen."""
        url, handles = (getattr(self.client, each, None) for each in ("base_url", "handles"))
        if url is not None:
            return partial(_check_health, url)
        return None if handles is None else partial(_check_actors, handles)

    def get_ready(self, version: int | None = None) -> None:
        """Have the engine join the cluster, and get ready for `version`: it binds, and fetches
        where it has host memory, while it still generates.
        """
        self._join(self._init(version=version))

    def _join(self, init: dict[str, Any]) -> None:
        try:
            self._await(self.client.init_weight_transfer_engine, init)
        except Exception as error:
            if OPEN not in _text_of(error):
                raise
            with suppress(Exception):  # of several workers, the last one may have finished already
                self._await(self.client.finish_weight_update)
            self._await(self.client.init_weight_transfer_engine, init)

    def check(self, published: VersionInfo | None = None) -> None:
        """See `vllm.Trainer.check_weights`. `published`: what to compare with; None: the version
        that the engine serves, which has to be published.
        """
        model, version = self._settings.model, None
        if published is not None:
            check_info(published)
            model, version = published.model, published.version
        init = self._init(check=model, version=version)
        self._await(self.client.init_weight_transfer_engine, init)

    def update(self, info: VersionInfo) -> None:
        """Have the engine take a version. A paused engine is resumed, unless its weights are torn,
        or may be: see `vllm.Trainer.send_weights`. Raises what the client raises.
        """
        check_info(info)
        self.get_ready(info.version)
        settings, is_whole = self._settings, self._is_whole
        try:
            self._await(self._controls.pause, settings.pause, settings.clear_cache)
            self._await(self.client.start_weight_update)
            is_whole = False
            try:
                self._await(self.client.update_weights, {"version": info.version})
            except Exception as error:
                is_whole = INTACT in _text_of(error)
                # of several workers only the last one has closed the update
                with suppress(Exception):
                    self._await(self.client.finish_weight_update)
                raise
            stamp = Stamp(info.model, info.lineage, info.version, info.content_id, b"")
            self._await(self.client.finish_weight_update, weight_version=str(stamp))
        except BaseException as error:
            self._is_whole = is_whole = self._says_whole() if is_whole is None else is_whole
            self._after_failure(error, is_whole)
            raise
        self._is_whole = True
        self._await(self._controls.resume)

    def _says_whole(self) -> bool:
        """Ask the engine whether its weights are whole."""
        try:
            self._join(self._init(whole=True))
        except Exception:
            return False
        return True

    def _after_failure(self, error: BaseException, is_whole: bool) -> None:
        """Whatever an engine generates bears the stamp of its weights, or "torn"."""
        try:
            if not is_whole:
                self._await(self._controls.label, TORN_VERSION)
                error.add_note(
                    'the engine\'s weights may be torn: its weight version is "torn" until an '
                    "update succeeds"
                )
            if is_whole or self._settings.resume_torn:
                self._await(self._controls.resume)
            elif self._settings.pause is not None:
                error.add_note("generation stays paused; the next update that succeeds resumes it")
        except Exception as failed:
            error.add_note(f"generation stays paused, if it was: {type(failed).__name__}: {failed}")


def _check_health(url: str) -> None:
    """Raises StateError: the server's engine is dead, or the server takes no calls any more."""
    whose = f"the vLLM server {url}"
    try:
        answer = call(whose, f"{url}/health", None, {}, HEALTH_S)
    except StateError as error:
        if isinstance(error.__cause__, ConnectionRefusedError):
            raise
        return
    if answer.status == 503:
        raise StateError(
            f"{whose} says that its engine is dead: start the server again", retryable=True
        )


def _check_actors(handles: Sequence[Any]) -> None:
    """As `_check_health`, of Ray's actors. One that does a call at a time does not answer."""
    import ray

    looks = [look for each in handles if (look := getattr(each, "check_health", None))]
    try:
        ray.get([each.remote() for each in looks], timeout=HEALTH_S)
    except TimeoutError:
        pass
    except Exception as error:
        raise StateError(
            f"an actor of Ray's says that its engine is dead: start it again ({text_of(error)})",
            retryable=True,
        ) from error


def _nothing(*_: object) -> None:
    pass


def _text_of(error: BaseException) -> str:
    """All that an error says, with the body of an HTTP answer."""
    response = getattr(error, "response", None)
    return f"{error} {getattr(response, 'text', '')}"


@dataclass(frozen=True)
class _Controls:
    """How a client's engine is paused, resumed, and told what its weights are: vLLM's clients have
    no calls for it.
    """

    pause: Callable[[Any, bool], object] = _nothing
    resume: Callable[[], object] = _nothing
    label: Callable[[str], object] = _nothing


def _controls(client: Any, init: Settings) -> _Controls:
    found = _of_client(client, init.timeout_s)
    if found is None and (init.pause is not None or init.resume_torn):
        raise InvalidValue(
            f"client={shown(client)} cannot pause its engine: give it pause_generation(mode=, "
            f"clear_cache=), "
            "resume_generation() and update_weight_version(new_version), or "
            "TrainerInit(pause=None) where nothing is "
            "generated during an update"
        )
    found = found or _Controls()
    return found if init.pause is not None else _Controls(label=found.label)


def _of_client(client: Any, timeout_s: float) -> _Controls | None:
    if all(
        hasattr(client, name)
        for name in ("pause_generation", "resume_generation", "update_weight_version")
    ):
        return _Controls(
            lambda mode, clear: client.pause_generation(mode=mode, clear_cache=clear),
            client.resume_generation,
            client.update_weight_version,
        )
    if hasattr(client, "base_url"):
        return _of_client(HttpClient(client.base_url, client.timeout), timeout_s)
    if hasattr(client, "handles"):

        def call(name: str, *given: Any, **arguments: Any) -> None:
            import ray

            calls = [getattr(each, name).remote(*given, **arguments) for each in client.handles]
            try:
                ray.get(calls, timeout=timeout_s + MARGIN_S)
            except TimeoutError as error:
                raise StateError(
                    f"{client!r} has not done {name} in time", retryable=True
                ) from error

        return _Controls(
            lambda mode, clear: call("pause_generation", mode=mode, clear_cache=clear),
            lambda: call("resume_generation"),
            lambda version: call("update_weight_version", version),
        )
    return None
