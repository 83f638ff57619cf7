"""One engine's updates, as a client of vLLM's sees them; vLLM itself is not needed."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub.errors import InvalidValue, StateError
from tensorhub.integrations import vllm_session
from tensorhub.integrations.vllm_session import (
    INTACT,
    OPEN,
    TORN_VERSION,
    ExtensionClient,
    HttpClient,
    Session,
    Settings,
)
from tensorhub.model.stamps import Stamp
from tensorhub.types import VersionInfo
from tests.integrations.test_http_calls import Rogue

INFO = VersionInfo("actor", 7, "content-7", 16, 1)
STAMP = str(Stamp("actor", INFO.lineage, 7, "content-7", b""))
Call = tuple[str, dict[str, Any]]


class Client:
    """`faults`: what a call raises, by its name, the first time."""

    base_url = "fake"

    def __init__(self, faults: Mapping[str, Exception] | None = None) -> None:
        self.calls: list[Call] = []
        self.faults = dict(faults or {})

    def _called(self, name: str, **given: Any) -> None:
        self.calls.append((name, given))
        if name in self.faults:
            raise self.faults.pop(name)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._called("init", **init_info)

    def start_weight_update(self) -> None:
        self._called("start")

    def update_weights(self, update_info: Any) -> None:
        self._called("update", **update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._called("finish", label=weight_version)

    def update_weight_version(self, new_version: str) -> None:
        self._called("label", label=new_version)

    def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self._called("pause", mode=mode, clear_cache=clear_cache)

    def resume_generation(self) -> None:
        self._called("resume")

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def test_what_an_update_calls_and_that_the_label_is_the_stamp() -> None:
    client = Client()
    settings = Settings(
        "tcp://a:1", "actor", "keep", True, host_memory_bytes=5, ignored=("*mtp*",), timeout_s=9.0
    )
    Session(client, settings).update(INFO)
    init = client.calls[0][1]
    assert init.pop("replica")
    assert client.calls == [
        (
            "init",
            {
                "address": ["tcp://a:1"],
                "model": "actor",
                "timeout_s": 9.0,
                "host_memory_bytes": 5,
                "ignored": ["*mtp*"],
                "version": 7,
            },
        ),
        ("pause", {"mode": "keep", "clear_cache": True}),
        ("start", {}),
        ("update", {"version": 7}),
        ("finish", {"label": STAMP}),
        ("resume", {}),
    ]


@pytest.mark.parametrize(
    ("fault", "text", "resume_torn", "after"),
    [
        ("pause", "lost", False, ["init", "resume"]),  # perhaps it was paused
        ("start", "lost", False, ["init", "resume"]),
        ("update", f"no [{INTACT}]", False, ["finish", "resume"]),
        ("update", "lost", False, ["finish", "label"]),
        ("update", "lost", True, ["finish", "label", "resume"]),
        ("finish", "lost", False, ["label"]),
    ],
)
def test_an_engine_whose_update_fails(
    fault: str, text: str, resume_torn: bool, after: list[str]
) -> None:
    client = Client({fault: StateError(text)})
    session = Session(client, Settings("tcp://a:1", "actor", resume_torn=resume_torn))
    with pytest.raises(StateError, match=text.partition(" ")[0]):
        session.update(INFO)
    assert client.names[client.names.index(fault) + 1 :] == after
    labels = [given["label"] for name, given in client.calls if name == "label"]
    assert labels == [TORN_VERSION] * ("label" in after)
    session.update(INFO)
    assert client.names[-1] == "resume"


def test_an_engine_that_is_not_paused_here_is_labelled_all_the_same() -> None:
    client = Client({"update": StateError("lost")})
    with pytest.raises(StateError, match="lost"):
        Session(client, Settings("tcp://a:1", "actor", pause=None)).update(INFO)
    assert client.names == ["init", "start", "update", "finish", "label"]
    assert client.calls[-1][1] == {"label": TORN_VERSION}


@pytest.mark.parametrize("fault", ["pause", "start"])
def test_torn_weights_stay_paused_whatever_fails_next(fault: str) -> None:
    client = Client({"update": StateError("lost")})
    session = Session(client, Settings("tcp://a:1", "actor"))
    for failing in ("lost", "later"):
        with pytest.raises(StateError, match=failing):
            session.update(INFO)
        assert "resume" not in client.names
        client.faults = {fault: StateError("later")}
    client.faults = {}
    session.update(INFO)
    assert client.names[-1] == "resume"


@pytest.mark.parametrize("fault", ["pause", "start"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_new_session_asks_whether_the_one_before_has_torn_the_weights(
    fault: str, is_whole: bool
) -> None:
    client = Client({fault: StateError("lost")})
    init = client.init_weight_transfer_engine

    def said(init_info: dict[str, Any]) -> None:
        init(init_info)
        if init_info.get("whole") and not is_whole:
            raise StateError("they are torn")

    client.init_weight_transfer_engine = said  # type: ignore[method-assign]
    session = Session(client, Settings("tcp://a:1", "actor"))
    for _ in range(2):
        with pytest.raises(StateError, match="lost"):
            session.update(INFO)
        assert ("resume" in client.names, "label" in client.names) == (is_whole, not is_whole)
        client.faults = {fault: StateError("lost")}
    assert [bool(given.get("whole")) for name, given in client.calls if name == "init"] == [
        False,
        True,
        False,
    ]  # it is known now


@pytest.mark.parametrize(("said", "is_resumed"), [(False, True), (True, False), (None, False)])
def test_what_an_engine_with_the_extension_says_of_its_weights(said: Any, is_resumed: bool) -> None:
    engine = Engine(state=[{"is_torn": False}, {"is_torn": said}])
    client = ExtensionClient(engine)
    client.pause_generation = broken  # type: ignore[method-assign]
    resumed: list[str] = []
    client.resume_generation = lambda: resumed.append("resumed")  # type: ignore[method-assign]
    with pytest.raises(StateError, match="lost"):
        Session(client, Settings("tcp://a:1", "actor")).update(INFO)
    assert bool(resumed) == is_resumed


def broken(**_: Any) -> None:
    raise StateError("lost")


def test_an_engine_that_cannot_be_resumed_does_not_hide_what_has_failed() -> None:
    client = Client({"start": StateError("first"), "resume": RuntimeError("second")})
    with pytest.raises(StateError, match="first") as caught:
        Session(client, Settings("tcp://a:1", "actor")).update(INFO)
    assert "stays paused, if it was: RuntimeError: second" in caught.value.__notes__[0]


def test_an_update_that_a_killed_trainer_has_left_open_is_closed() -> None:
    client = Client({"init": StateError(f"no: {OPEN}")})
    session = Session(client, Settings("tcp://a:1", "actor"))
    session.get_ready(3)
    assert client.names == ["init", "finish", "init"]
    client.faults = {"init": StateError("no such model")}
    with pytest.raises(StateError, match="no such model"):
        session.get_ready(3)
    assert client.names[3:] == ["init"]


class Engine:
    """An engine with `WorkerExtension`. `answers`: what its workers return, by method."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.calls = answers, list[Call]()
        self.fault: Exception | None = None

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> Any:
        name = method.removeprefix("tensorhub_")
        self.calls.append((name, kwargs))
        return self.answers.get(name, [None])

    def update_weight_version(self, new_version: str) -> None:
        self.calls.append(("label", {"label": new_version}))
        if self.fault is not None:
            raise self.fault

    def reset_prefix_cache(self) -> None:
        self.calls.append(("reset", {}))


def test_what_the_workers_of_an_engine_are_asked() -> None:
    engine = Engine(update=[{"version": 7}] * 2, check=[{"version": 7}] * 2)
    session = Session(ExtensionClient(engine), Settings("tcp://a:1", "actor"))
    session.update(INFO)
    session.check(VersionInfo("copy", 8, "content-7", 16, 1))
    session.check()
    kept = ExtensionClient(idle := Engine())
    kept.pause_generation(mode="abort", clear_cache=False)
    assert idle.calls == []
    assert [(name, given) for name, given in engine.calls if name != "join"] == [
        ("prepare", {"version": 7}),
        ("reset", {}),
        ("update", {"version": 7}),
        ("label", {"label": STAMP}),
        ("check", {"model": "copy", "version": 8}),
        ("check", {"model": "actor", "version": None}),
    ]


@pytest.mark.parametrize(
    "said", [[], None, [None], [{}], [{"version": 7}, {"version": 6}], [{"version": 8}]]
)
def test_a_worker_that_does_not_say_that_it_has_the_version(said: Any) -> None:
    session = Session(ExtensionClient(Engine(update=said)), Settings("tcp://a:1", "actor"))
    with pytest.raises(StateError, match=r"does not say that it has version 7|called no worker"):
        session.update(INFO)


def test_a_check_that_no_worker_has_made() -> None:
    session = Session(ExtensionClient(Engine(check=[None])), Settings("tcp://a:1", "actor"))
    with pytest.raises(StateError, match="tensorhub_check"):
        session.check()


def test_a_label_that_a_release_cannot_keep_and_one_that_is_refused() -> None:
    engine = Engine(update=[{"version": 7}])
    session = Session(ExtensionClient(engine), Settings("tcp://a:1", "actor"))
    engine.fault = StateError("the vLLM server has answered 404 to /update_weight_version")
    session.update(INFO)
    engine.fault = StateError("the vLLM server has answered 500 to /update_weight_version")
    with pytest.raises(StateError, match="500"):
        session.update(INFO)


def test_a_server_that_takes_a_call_and_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_session, "MARGIN_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = HttpClient(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.1)
        with pytest.raises(StateError, match=r"/resume: is it up\? \(timed out\)"):
            client.resume_generation()


class Slow(Client):
    """`update`: while an update is awaited."""

    def __init__(self, url: str, update: Callable[[], object]) -> None:
        super().__init__()
        self.base_url, self._update = url, update

    def update_weights(self, update_info: Any) -> None:
        super().update_weights(update_info)
        self._update()


@pytest.mark.parametrize("is_up", [True, False])
def test_a_call_that_a_dead_engine_leaves_unanswered(
    monkeypatch: pytest.MonkeyPatch, is_up: bool
) -> None:
    """Its server says so, or takes no calls any more."""
    monkeypatch.setattr(vllm_session, "HEALTH_S", 0.1)
    server, answered = Rogue(), threading.Event()

    def die() -> None:
        if is_up:
            server.status = 503
        else:
            server.close()
        answered.wait()

    client = Slow(server.url, die)
    reason = "says that its engine is dead" if is_up else "Connection refused"
    try:
        with pytest.raises(StateError, match=f"{server.url} .*{reason}") as caught:
            Session(client, Settings("tcp://a:1", "actor")).update(INFO)
    finally:
        answered.set()
        server.close()
    assert "may be torn" in caught.value.__notes__[0]
    assert client.names == ["init", "pause", "start", "update", "finish", "label"]


@pytest.mark.parametrize("status", [200, 404, 500])
def test_a_slow_call_to_a_server_that_is_not_known_to_be_dead(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(vllm_session, "HEALTH_S", 0.1)
    server, asked = Rogue(), threading.Event()
    server.status = status

    def update() -> None:
        while len(server.calls) < 2:
            asked.wait(0.01)

    client = Slow(server.url, update)
    try:
        Session(client, Settings("tcp://a:1", "actor")).update(INFO)
    finally:
        server.close()
    assert {path for _, path, _ in server.calls} == {"/health"}
    assert client.names == ["init", "pause", "start", "update", "finish", "resume"]


@pytest.mark.parametrize("pause", ["kep", "", False])
def test_a_misspelt_pause_is_refused_at_once(pause: Any) -> None:
    with pytest.raises(InvalidValue, match=r"pause=.*: give 'abort', 'wait', 'keep' or None"):
        Settings("tcp://10.0.0.1:17337", "actor", pause=pause)


class Actors:
    """As vLLM's client has them. `update`: while an update is awaited."""

    def __init__(self, update: Callable[[], object] = int, **more: str) -> None:
        def answers(what: str) -> Any:
            return SimpleNamespace(remote=lambda *_, **__: what)

        calls = {
            "pause_generation": "paused",
            "resume_generation": "resumed",
            "update_weight_version": "told",
            **more,
        }
        each = SimpleNamespace(**{name: answers(what) for name, what in calls.items()})
        self.handles, self._update = [each, each], update

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        self._update()


def test_a_call_to_ray_actors_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(calls: list[object], timeout: float) -> None:
        if calls == ["paused", "paused"]:
            raise TimeoutError(f"{timeout}")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get))
    session = Session(Actors(), Settings("tcp://a:1", "actor", timeout_s=9.0))
    with pytest.raises(StateError, match="has not done pause_generation in time") as caught:
        session.update(INFO)
    assert str(caught.value.__cause__) == str(9.0 + vllm_session.MARGIN_S)


@pytest.mark.parametrize("health", ["dead", "busy", None])
def test_an_engine_that_dies_under_a_call_of_its_ray_actor(
    monkeypatch: pytest.MonkeyPatch, health: str | None
) -> None:
    """The actor lives, and never answers. One that does a call at a time says nothing meanwhile."""
    monkeypatch.setattr(vllm_session, "HEALTH_S", 0.1)
    looked, given_up = threading.Event(), threading.Event()

    def get(calls: list[object], timeout: float) -> None:
        if calls in ([], ["dead"] * 2, ["busy"] * 2):
            looked.set()
        if calls == ["dead", "dead"]:
            raise RuntimeError("EngineDeadError")
        if calls == ["busy", "busy"]:
            raise TimeoutError

    def update() -> None:
        assert (given_up if health == "dead" else looked).wait(20.0)

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get))
    actors = Actors(update, **({} if health is None else {"check_health": health}))
    session = Session(actors, Settings("tcp://a:1", "actor"))
    if health == "dead":
        with pytest.raises(StateError, match=r"its engine is dead.*EngineDeadError") as caught:
            session.update(INFO)
        assert caught.value.retryable
        given_up.set()
    else:
        session.update(INFO)
