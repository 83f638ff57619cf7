"""Which calls an SGLang engine gets, and in which order; SGLang itself is not needed for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import torch

from tensorhub.errors import InvalidValue, ManifestMismatch, StateError, VersionConflict
from tensorhub.integrations.sglang import Session
from tensorhub.integrations.sglang_server import Server
from tensorhub.integrations.sglang_session import (
    ASLEEP,
    LOADER,
    PREFIX,
    REPORT,
    TORN,
    Order,
    Outcome,
    Report,
)
from tensorhub.model.stamps import Stamp
from tensorhub.types import VersionInfo

INFO = VersionInfo("actor", 3, "content", 10, 1)
SEAT = "http://10.0.0.2:1"


class Engine:
    """Does what it is told. `asleep`: what it says of its sleep; `fails`: its report's error."""

    def __init__(self) -> None:
        self.ranks, self.has_sessions, self.has_draft = 1, True, False
        self.asleep: object = [0.0]
        self.fails: Exception | None = None
        self.calls: list[str] = []
        self.flushes: list[bool] = []  # of caches of the weights before, in the last call
        self.orders: list[Order] = []
        self.loaded = {"files": "/adapter"}
        self.is_open = False
        self.report: object = None  # an older one

    def look(self) -> None:
        self.calls.append("look")

    def call(self, name: str, **fields: Any) -> tuple[bool, str]:
        called = " ".join([name, *([fields["selector"]] if "selector" in fields else [])])
        self.calls.append(called)
        if name == "begin_weight_update" and self.is_open:
            self.is_open = False
            return False, "a session is already open"
        if "weight_version" in fields:
            self.flushes.append(fields["flush_cache"])
        for tensor in fields.get("serialized_named_tensors", ()):
            self.orders.append(Order.of([tensor]))
        return True, ""

    def parameter(self, name: str) -> object:
        if name in (ASLEEP, TORN):
            return self.asleep if name == ASLEEP else [0.0]
        order = self.orders[-1]
        failed = None if self.fails is None else Outcome.of(self.fails, "intact")
        url = SEAT if order.purpose == "fleet" else ""
        return Report(order.nonce, failed, url).encode() if self.report is None else self.report

    def serialized(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> list[Any]:
        return [each for each in tensors if each[0].startswith(PREFIX)]

    def adapters(self, name: str, **fields: Any) -> tuple[str, Mapping[str, str]]:
        self.calls.append(f"{name} {fields['lora_name']}")
        if name == "unload_lora_adapter":
            del self.loaded[fields["lora_name"]]
        elif fields["lora_name"] in self.loaded:
            return "it is already loaded", self.loaded
        else:
            self.loaded[fields["lora_name"]] = fields["lora_path"]
        return "", self.loaded


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def session(engine: Engine) -> Session:
    return Session(engine, "tcp://127.0.0.1:1")


LOAD = "update_weights_from_tensor target"
UPDATE = ["begin_weight_update target", LOAD, LOAD, "end_weight_update"]


def test_an_update(engine: Engine, session: Session) -> None:
    session.update(INFO)
    assert engine.calls == ["pause_generation", *UPDATE, "continue_generation"]
    engine.calls.clear()
    engine.is_open = True  # by a trainer that is gone
    session.update(INFO)
    assert engine.calls[1:4] == ["begin_weight_update target", LOAD, "end_weight_update"]
    assert engine.calls[4:] == [*UPDATE, "continue_generation"]


@pytest.mark.parametrize(
    ("settings", "flushes"),
    [({}, True), ({"clear_cache": False}, False), ({"pause": "in_place"}, False)],
)
def test_a_cache_is_kept_where_requests_go_on_with_it(
    engine: Engine, settings: dict[str, Any], flushes: bool
) -> None:
    Session(engine, "tcp://127.0.0.1:1", **settings).update(INFO)
    assert engine.flushes == [flushes]


def test_a_report_of_an_update_before_is_none_of_this_one(engine: Engine, session: Session) -> None:
    """Of the same version, too."""
    session.update(INFO)
    engine.report = engine.parameter(REPORT)
    with pytest.raises(StateError, match="reports of another order"):
        session.update(INFO)
    engine.report = Report("", Outcome.of(InvalidValue("no order"), "intact")).encode()
    with pytest.raises(StateError, match=r"reports of another order \(no order\)"):
        session.update(INFO)


def test_a_check_is_of_what_the_engine_took_last(engine: Engine, session: Session) -> None:
    session.update(INFO)
    session.check()
    assert [(each.purpose, each.version) for each in engine.orders] == [("update", 3), ("check", 3)]


def test_an_engine_that_cannot_join_is_left_without_an_open_session(
    engine: Engine, session: Session
) -> None:
    engine.fails = StateError("no coordinator")
    with pytest.raises(StateError, match="no coordinator"):
        session.get_ready()
    assert engine.calls[-1] == "end_weight_update"


def test_an_engine_joins_a_fleet_while_it_generates(engine: Engine, session: Session) -> None:
    assert session.join_fleet("10.0.0.2", token="a word", lease_s=2.0) == SEAT
    assert engine.calls == ["begin_weight_update target", LOAD, "end_weight_update"]
    assert engine.orders[-1].fleet == {
        "host": "10.0.0.2",
        "port": 0,
        "token": "a word",
        "lease_s": 2.0,
        "called": "",
    }
    engine.fails = StateError("an engine with data parallelism cannot join a fleet")
    with pytest.raises(StateError, match="cannot join a fleet"):
        session.join_fleet()
    assert engine.calls[-1] == "end_weight_update"


def test_an_engine_that_sleeps_is_not_even_paused(engine: Engine, session: Session) -> None:
    engine.asleep = [1.0]
    with pytest.raises(StateError, match="resume_memory_occupation"):
        session.update(INFO)
    with pytest.raises(StateError, match="resume_memory_occupation"):
        session.get_ready()
    assert engine.calls == []


def test_an_engine_that_has_started_anew_is_looked_at(engine: Engine, session: Session) -> None:
    session.update(INFO)
    session.update(INFO)
    engine.asleep = None
    session.update(INFO)
    first, second, third = engine.orders
    assert first.replica == second.replica != third.replica
    assert engine.calls.count("look") == 1


def test_a_draft_is_shown_before_each_order(engine: Engine) -> None:
    engine.has_draft = True
    Session(engine, "tcp://127.0.0.1:1", pause=None).update(INFO)
    assert [each.purpose for each in engine.orders] == ["show", "update"]
    load = "update_weights_from_tensor"
    assert engine.calls == [
        "begin_weight_update all",
        f"{load} all",
        f"{load} target",
        f"{load} target",
        "end_weight_update",
    ]
    engine.calls.clear()
    Session(engine, "tcp://127.0.0.1:1", pause=None, unused=["draft.*"]).update(INFO)
    assert engine.calls == UPDATE


def test_versions_of_an_adapter_but_the_last_two_are_unloaded(
    engine: Engine, session: Session
) -> None:
    for version in (3, 4, 10):
        for model in ("poet", "critic"):
            assert session.load_adapter(model, version) == f"{model}@{version}"
    session.load_adapter("poet", 3)  # an older one, which is asked for
    session.load_adapter("poet", 3)
    assert list(engine.loaded) == ["files", "critic@4", "poet@10", "critic@10", "poet@3"]


def test_an_adapter_that_was_published_anew_is_loaded_anew(
    engine: Engine, session: Session
) -> None:
    """Under the same number, as after a rollback: the engine would go on with the old one."""
    session.load_adapter("poet", 3)
    parameter = engine.parameter

    def stale(name: str) -> object:
        if name == REPORT and engine.orders[-1].adapter:
            failed = Outcome.of(VersionConflict("published anew"), "intact")
            return Report(engine.orders[-1].nonce, failed).encode()
        return parameter(name)

    engine.parameter = stale  # type: ignore[method-assign]
    engine.calls.clear()
    assert session.load_adapter("poet", 3) == "poet@3"
    assert [each for each in engine.calls if "lora" in each] == [
        "load_lora_adapter poet@3",
        "unload_lora_adapter poet@3",
        "load_lora_adapter poet@3",
    ]


def test_an_adapter_that_the_engine_refuses(engine: Engine, session: Session) -> None:
    for text, kind in (("ManifestMismatch: no", ManifestMismatch), ("no room", StateError)):
        engine.adapters = lambda *_, text=text, **__: (text, {})  # type: ignore[method-assign]
        with pytest.raises(kind, match=r"no( room)?$"):
            session.load_adapter("poet", 1)


def test_an_old_version_that_the_engine_does_not_unload(engine: Engine, session: Session) -> None:
    """It would keep its slot."""
    for version in (1, 2):
        session.load_adapter("poet", version)
    adapters = engine.adapters

    def refuses(name: str, **fields: Any) -> tuple[str, Mapping[str, str]]:
        return ("busy", {}) if name.startswith("unload") else adapters(name, **fields)

    engine.adapters = refuses  # type: ignore[method-assign]
    with pytest.raises(StateError, match="has not unloaded poet@1: busy"):
        session.load_adapter("poet", 3)


def test_an_error_that_has_written_nothing_resumes_the_engine(
    engine: Engine, session: Session
) -> None:
    engine.fails = ManifestMismatch("not these")
    with pytest.raises(ManifestMismatch, match="not these"):
        session.update(INFO)
    assert engine.calls[-2:] == ["end_weight_update", "continue_generation"]


def test_a_lost_answer_leaves_the_engine_paused(engine: Engine, session: Session) -> None:
    call = engine.call

    def lost(name: str, **fields: Any) -> tuple[bool, str]:
        answer = call(name, **fields)
        if name == "update_weights_from_tensor":
            error = StateError("no answer")
            error.memory = "in_doubt"  # as `Server` says
            raise error
        return answer

    engine.call = lost  # type: ignore[method-assign]
    with pytest.raises(StateError, match="no answer") as caught:
        session.update(INFO)
    assert "generation stays paused" in caught.value.__notes__[0]
    assert engine.calls[-1] == "end_weight_update"


def answering(status: int, body: bytes) -> HTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *given: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (200, b"<html>ok</html>", "does not say what it is: <html>ok"),
        (200, b'{"tp_size": "many", "version": 5}', "does not say what it is"),
        (200, b'{"tp_size": Infinity, "version": "0.5.23"}', "does not say what it is"),
        (200, b'{"tp_size": 1e15, "version": "0.5.23"}', "does not say what it is"),
        (200, b'{"tp_size": 0, "version": "0.5.23"}', "does not say what it is"),
        (200, '{"tp_size": 1, "version": "0.\u00b2"}'.encode(), "does not say what it is"),
        (
            200,
            b'{"tp_size": 1, "version": "0.5", "custom_weight_loader": 5}',
            "does not say what it is",
        ),
        (401, b"who are you", "has answered 401 to /server_info: who are you"),
        (200, b'{"tp_size": 1, "version": "0.5.23"}', "was started without TensorHub's loader"),
    ],
)
def test_servers_that_are_none(status: int, body: bytes, says: str) -> None:
    with answering(status, body) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(StateError, match=f"the SGLang server {url} {says}") as caught:
            Session(url, "tcp://127.0.0.1:1", timeout_s=5.0)
        assert caught.value.retryable is False
        server.shutdown()


class Sglang(HTTPServer):
    """A server of two ranks. `answers`: what a path answers instead of 200."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str | None]] = []
        info = {"tp_size": 2, "version": "0.5.10", "custom_weight_loader": [LOADER]}
        self.info: dict[str, Any] = info
        self.answers: dict[str, tuple[int, str]] = {}
        its = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.strip("/")
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                its.calls.append((path, self.headers["Authorization"]))
                said = json.dumps(its.info if path == "server_info" else {"message": "done"})
                status, text = its.answers.get(path, (200, said))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            do_POST = do_GET  # noqa: N815

            def log_message(self, *given: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)


@contextmanager
def serving() -> Iterator[tuple[Sglang, str]]:
    with Sglang() as its:
        thread = threading.Thread(target=its.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield its, f"http://127.0.0.1:{its.server_port}"
        finally:
            its.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "said",
    [
        '{"error_message": null, "loaded_adapters": ["poet"]}',
        '{"error_message": null, "loaded_adapters": {"poet": 5}}',
        '{"error_message": ["no"], "loaded_adapters": {}}',
        "[" * 10**6,
    ],
)
def test_answers_that_no_server_gives(said: str) -> None:
    with serving() as (its, url):
        server = Server(url, timeout_s=20.0)
        its.answers = dict.fromkeys(("load_lora_adapter", "get_weights_by_name"), (200, said))
        with pytest.raises(StateError, match="has answered to /load_lora_adapter"):
            server.adapters("load_lora_adapter", lora_name="poet")
        assert Report.decode(server.parameter(REPORT)) is None


def test_what_a_server_answers() -> None:
    with serving() as (its, url):
        server = Server(url, api_key="a key", timeout_s=20.0)
        assert (server.ranks, server.has_draft) == (2, False)
        assert len(server.serialized([])) == 2
        its.info["speculative_algorithm"] = "EAGLE"
        server.look()
        assert server.has_draft
        assert server.call("pause_generation", mode="abort") == (True, "done")
        its.answers = {
            "pause_generation": (400, '{"message": "no"}'),
            "continue_generation": (400, "not JSON"),
            "get_weights_by_name": (400, "[1.0]"),
            "update_weights_from_tensor": (500, "broken"),
            "load_lora_adapter": (400, '{"error_message": "full", "loaded_adapters": null}'),
            "unload_lora_adapter": (200, "{}"),
        }
        assert server.call("pause_generation", mode="abort") == (False, "no")
        assert server.call("continue_generation") == (False, "not JSON")
        assert server.parameter("a") is None
        assert server.adapters("load_lora_adapter", lora_name="a") == ("full", {})
        with pytest.raises(StateError, match="has answered to /unload_lora_adapter"):
            server.adapters("unload_lora_adapter", lora_name="a")
        with pytest.raises(StateError, match="has answered 500") as caught:
            server.call("update_weights_from_tensor")
        assert caught.value.memory == "in_doubt"  # it may have been done
        assert {key for _, key in its.calls} == {"Bearer a key"}


@pytest.mark.parametrize(
    ("model_info", "is_asked"),
    [
        ((200, '{"weight_version": "default"}'), False),
        ((200, json.dumps({"weight_version": f"{Stamp('actor', 0, 3, 'content', b'')}"})), True),
        ((404, "a router does not pass it on"), True),
        ((200, "not JSON"), True),
    ],
)
def test_only_a_server_that_was_updated_before_is_asked_at_once_whether_it_sleeps(
    model_info: tuple[int, str], is_asked: bool
) -> None:
    """SGLang logs an error where a model has no parameter of that name."""
    with serving() as (its, url):
        its.answers = {"model_info": model_info, "get_weights_by_name": (200, "[1.0]")}
        server = Server(url, timeout_s=20.0)
        assert server.parameter(ASLEEP) == ([1.0] if is_asked else None)
        assert ("get_weights_by_name", None) in its.calls or not is_asked
        server.parameter(REPORT)
        assert server.parameter(ASLEEP) == [1.0]


def test_a_check_before_any_update(session: Session) -> None:
    with pytest.raises(StateError, match="has taken no version yet"):
        session.check()
