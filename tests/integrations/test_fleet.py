"""Several engines at the same time: which are waited for, and which are left running."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import (
    InvalidType,
    InvalidValue,
    ManifestMismatch,
    OperationTimeout,
    StateError,
)
from tensorhub.integrations.announced import SERVERS, announce
from tensorhub.integrations.fleet import Fleet
from tensorhub.integrations.trl import WeightTransfer
from tensorhub.integrations.vllm_session import INTACT, TORN, HttpClient
from tensorhub.types import VersionInfo
from tests.rig import OPTIONS

WAIT_S = 20.0


def info(version: int) -> VersionInfo:
    return VersionInfo("actor", version, f"content-{version}", 16, 1)


class FakeEngine:
    """`gate`: an update waits for it. `fault`: an update raises it."""

    def __init__(self, name: str) -> None:
        self.name, self.begun, self.taken = name, list[int](), list[int]()
        self.gate = threading.Event()
        self.gate.set()
        self.fault: Exception | None = None

    def get_ready(self, version: int | None = None) -> None:
        pass

    def update(self, info: VersionInfo) -> None:
        self.begun.append(info.version)
        assert self.gate.wait(WAIT_S)
        if self.fault is not None:
            raise self.fault
        self.taken.append(info.version)

    def check(self, published: VersionInfo | None = None) -> None:
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def engines() -> list[FakeEngine]:
    return [FakeEngine(name) for name in ("a", "b", "c")]


@pytest.fixture
def fleet(engines: list[FakeEngine]) -> Iterator[Callable[..., Fleet]]:
    made: list[Fleet] = []

    def make(**settings: Any) -> Fleet:
        made.append(Fleet(engines, **{"timeout_s": WAIT_S, **settings}))
        return made[-1]

    yield make
    for each in engines:
        each.gate.set()
    for fleet in made:
        fleet.close()
        fleet._threads.shutdown(wait=True)


def test_an_engine_that_is_named_twice_is_refused() -> None:
    with pytest.raises(InvalidValue, match="http://a: give each engine once"):
        Fleet([FakeEngine("http://a"), FakeEngine("http://b"), FakeEngine("http://a/")])


def test_all_take_a_version(engines: list[FakeEngine], fleet: Callable[..., Fleet]) -> None:
    assert fleet().update(info(1)).done == ("a", "b", "c")
    assert [each.taken for each in engines] == [[1], [1], [1]]


def test_an_engine_that_fails_twice_is_excluded_until_it_succeeds(
    engines: list[FakeEngine], fleet: Callable[..., Fleet]
) -> None:
    its = fleet()
    engines[1].fault = StateError("it is gone")
    first, second, third = (its.update(info(version)) for version in (1, 2, 3))
    assert (first.excluded, list(first.failed)) == ((), ["b"])
    assert (second.excluded, list(second.failed)) == (("b",), ["b"])
    assert (third.excluded, third.done) == (("b",), ("a", "c"))
    engines[1].fault = None
    while engines[1].taken == []:  # each update tries it, and does not wait for it
        returned = its.update(info(4))
    assert engines[1].taken[0] == 4
    while returned.excluded:
        returned = its.update(info(5))
    assert returned.done == ("a", "b", "c")


def test_a_slow_engine_keeps_no_other_one(
    engines: list[FakeEngine], fleet: Callable[..., Fleet]
) -> None:
    its = fleet(timeout_s=0.2, failures_max=1)
    engines[2].gate.clear()
    report = its.update(info(1))
    assert (report.done, report.excluded) == (("a", "b"), ("c",))
    assert isinstance(report.failed["c"], OperationTimeout)
    assert its.update(info(2)).done == ("a", "b")
    engines[2].gate.set()
    while engines[2].taken[-1:] != [3]:
        its.update(info(3))
    its._threads.shutdown(wait=True)
    assert engines[2].begun[:2] == [1, 3]  # the second one would have run beside the first


def test_an_engine_that_is_listed_again_has_no_second_call_beside_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The second update would pause it, and the end of the first would resume it meanwhile."""
    made, listed = list[FakeEngine](), ["a"]

    def make(name: str) -> FakeEngine:
        made.append(FakeEngine(name))
        made[-1].gate.clear()
        return made[-1]

    fleet = Fleet(find=lambda: listed, make=make, timeout_s=0.1)
    with pytest.raises(OperationTimeout):
        fleet.update(info(1))
    listed.clear()  # the coordinator does not hear of it for a while
    for version in (2, 3):
        fleet.update(info(version))
    assert caplog.text.count("engine_not_listed") == 1  # it may go on with old weights
    listed.append("a")
    with pytest.raises(OperationTimeout):
        fleet.update(info(4))
    assert [each.begun for each in made] == [[1]]
    made[0].gate.set()
    fleet.close()
    fleet._threads.shutdown(wait=True)


def test_an_engine_that_was_excluded_and_gone_is_waited_for_once_it_is_listed_again() -> None:
    """It was started anew: the failures of the one before say nothing of it."""
    made, listed = list[FakeEngine](), ["a", "b"]

    def make(name: str) -> FakeEngine:
        made.append(FakeEngine(name))
        return made[-1]

    fleet = Fleet(find=lambda: listed, make=make, timeout_s=WAIT_S, failures_max=1)
    fleet.join()
    made[0].fault = StateError("it is gone")
    assert fleet.update(info(1)).excluded == ("a",)
    listed.remove("a")
    fleet.update(info(2))
    listed.append("a")
    assert sorted(fleet.update(info(3)).done) == ["a", "b"]
    assert [each.taken for each in made] == [[], [1, 2, 3], [3]]
    fleet.close()


def test_an_error_that_is_raised_is_not_logged_as_a_whole_too(
    engines: list[FakeEngine], fleet: Callable[..., Fleet], caplog: pytest.LogCaptureFixture
) -> None:
    its = fleet()
    for each in engines:
        each.fault = ManifestMismatch("a long list")
    with pytest.raises(ManifestMismatch, match="a long list"):
        its.update(info(1))
    assert "a long list" not in caplog.text
    assert caplog.text.count("engine_not_updated") == len(engines)
    engines[0].fault = None
    its.update(info(2))
    assert caplog.text.count("a long list") == len(engines) - 1


def test_an_excluded_engine_is_not_waited_for(
    engines: list[FakeEngine], fleet: Callable[..., Fleet]
) -> None:
    its = fleet(failures_max=1)
    engines[2].fault = StateError("it is gone")
    assert its.update(info(1)).excluded == ("c",)
    engines[2].gate.clear()
    report = its.update(info(2))
    assert (report.done, report.failed, report.excluded) == (("a", "b"), {}, ("c",))


def test_an_excluded_engine_that_succeeds_late_is_waited_for_again(
    engines: list[FakeEngine], fleet: Callable[..., Fleet]
) -> None:
    its = fleet(failures_max=1)
    engines[2].fault = StateError("it is gone")
    assert its.update(info(1)).excluded == ("c",)
    engines[2].fault = None
    engines[2].gate.clear()
    its.update(info(2))
    late = its._members[2].running
    assert late is not None
    engines[2].gate.set()
    late.result(WAIT_S)
    engines[2].gate.clear()
    its._timeout_s = 0.5
    assert isinstance(its.update(info(3)).failed["c"], OperationTimeout)


def test_a_check_that_one_engine_fails(
    engines: list[FakeEngine], fleet: Callable[..., Fleet]
) -> None:
    its = fleet()
    its.check()
    engines[1].fault = StateError("b has other bytes")
    with pytest.raises(StateError, match="b has other bytes"):
        its.check()


def test_failures_that_do_not_follow_each_other_exclude_no_engine(
    engines: list[FakeEngine], fleet: Callable[..., Fleet]
) -> None:
    its = fleet()
    for version in range(6):
        engines[1].fault = StateError("it was busy") if version % 2 else None
        assert its.update(info(version)).excluded == ()


def test_an_update_that_no_engine_takes_raises_what_all_have_met(
    engines: list[FakeEngine], fleet: Callable[..., Fleet]
) -> None:
    its = fleet()
    for _ in range(3):  # excluded, too: there is nothing else to wait for
        for each in engines:
            each.fault = StateError(f"{each.name} is gone")
        with pytest.raises(StateError, match="a is gone") as error:
            its.update(info(1))
        assert [note[:1] for note in error.value.__notes__] == ["b", "c"]
    for each in engines:
        each.fault = None
    assert its.update(info(2)).done == ("a", "b", "c")


# ---------------------------------------------------------------------------------------------
# vLLM's routes, and TRL's trainer in front of them


class FakeVllm:
    """The routes that an update uses. `answers`: what a route answers instead of 200."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bodies: list[Any] = []
        self.answers: dict[str, tuple[int, str]] = {}
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                path = self.path.strip("/")
                said = json.loads(body)
                path = said.get("method", path)
                fake.calls.append(path)
                fake.bodies.append(said)
                done = json.dumps({"results": [said.get("kwargs")]})  # an update's has the version
                code, text = fake.answers.get(path.partition("?")[0], (200, done))
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = False
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()


@pytest.fixture
def servers() -> Iterator[list[FakeVllm]]:
    made = [FakeVllm(), FakeVllm()]
    yield made
    for each in made:
        each.close()


@contextmanager
def joined() -> Iterator[tuple[sync.Coordinator, sync.Hub]]:
    with (
        sync.serve(token="", options=OPTIONS) as coordinator,
        sync.connect(coordinator.address) as hub,
    ):
        yield coordinator, hub


@pytest.fixture
def transfer(
    servers: list[FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[WeightTransfer, sync.Hub]]:
    monkeypatch.delenv("TENSORHUB_ADDRESS", raising=False)
    monkeypatch.setattr("tensorhub.integrations.trl.installed_version", lambda name: "1.16.0")
    with joined() as (coordinator, hub):
        made = WeightTransfer(
            address=coordinator.address,
            servers=[each.url for each in servers],
            host_memory_bytes=2**20,
            timeout_s=WAIT_S,
        )
        made.init_weight_transfer()
        yield made, hub
        made.destroy()


def send(transfer: WeightTransfer, value: float) -> None:
    transfer.pause()
    transfer.send_weights(iter([("a", torch.full((4,), value))]))
    transfer.resume()


UPDATE = [
    "tensorhub_join",
    "tensorhub_prepare",
    "pause?mode=keep&clear_cache=true",
    "tensorhub_update",
    "update_weight_version",
    "resume",
]


def test_trls_trainer_updates_several_vllm_servers(
    servers: list[FakeVllm], transfer: tuple[WeightTransfer, sync.Hub]
) -> None:
    trainer, _ = transfer
    send(trainer, 1.0)
    replicas = set()
    for each in servers:
        assert each.calls == ["tensorhub_join", *UPDATE]
        replicas.add(each.bodies[1]["kwargs"]["replica"])
        assert each.bodies[1]["kwargs"]["host_memory_bytes"] == 2**20
        assert [body.get("kwargs") for body in each.bodies[2:5:2]] == [{"version": 1}] * 2
    assert len(replicas) == 2


def test_servers_that_have_announced_themselves(
    servers: list[FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorhub.integrations.trl.installed_version", lambda name: "1.16.0")
    with joined() as (coordinator, hub):
        trainer = WeightTransfer(
            address=coordinator.address, timeout_s=WAIT_S, allow_no_readers=True
        )
        trainer.init_weight_transfer()
        send(trainer, 1.0)
        first = announce(hub, "actor", SERVERS, f"{servers[0].url}/")
        send(trainer, 2.0)
        announce(hub, "actor", SERVERS, servers[1].url)
        send(trainer, 3.0)
        first.close()
        send(trainer, 4.0)
        trainer.destroy()
    updates = [each.calls.count("tensorhub_update") for each in servers]
    replicas = [
        {body["kwargs"]["replica"] for body in each.bodies if "replica" in body.get("kwargs", {})}
        for each in servers
    ]
    assert updates == [2, 2]
    assert [len(each) for each in replicas] == [1, 1]  # each is the same engine all the time


def test_a_server_that_is_gone_leaves_no_other_one_paused(
    servers: list[FakeVllm], transfer: tuple[WeightTransfer, sync.Hub]
) -> None:
    trainer, hub = transfer
    servers[0].close()
    send(trainer, 1.0)
    assert servers[1].calls[-1] == "resume"
    servers[1].close()
    hub.fetch("actor", 1)  # the fake servers read nothing
    with pytest.raises(StateError, match="does not answer /collective_rpc: is it up"):
        send(trainer, 2.0)


@pytest.mark.parametrize("whole", [True, False])
def test_a_server_is_resumed_unless_its_weights_may_be_torn(
    servers: list[FakeVllm], transfer: tuple[WeightTransfer, sync.Hub], whole: bool
) -> None:
    trainer, _ = transfer
    servers[0].answers["tensorhub_update"] = (500, f"no [{INTACT if whole else TORN}]")
    send(trainer, 1.0)
    assert (servers[0].calls[-1] == "resume") is whole
    assert ("update_weight_version" in servers[0].calls) is not whole
    assert servers[1].calls[-1] == "resume"


def test_a_server_keeps_its_cache_where_the_trainer_says_so(servers: list[FakeVllm]) -> None:
    client = HttpClient(servers[0].url)
    for clear_cache in (True, False):
        client.pause_generation(mode="wait", clear_cache=clear_cache)
    assert servers[0].calls == [
        "pause?mode=wait&clear_cache=true",
        "pause?mode=wait&clear_cache=false",
    ]


def test_servers_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORHUB_ADDRESS", raising=False)
    monkeypatch.setattr("tensorhub.integrations.trl.installed_version", lambda name: "1.16.0")
    with pytest.raises(InvalidValue, match="need a coordinator that they reach"):
        WeightTransfer(servers=["http://127.0.0.1:1"])
    with pytest.raises(InvalidType, match=r"servers='http://a': give a list"):
        WeightTransfer(servers="http://a", address="tcp://127.0.0.1:1")
    with pytest.raises(InvalidValue, match=r"'127\.0\.0\.1:8000' is not the URL of a vLLM server"):
        HttpClient("127.0.0.1:8000")
