"""What the environment of a vLLM engine may say. vLLM is not needed to refuse it."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from tensorhub import sync
from tensorhub.errors import InvalidValue, StateError
from tensorhub.integrations import vllm_start
from tensorhub.integrations.announced import SERVERS, announced
from tests.rig import OPTIONS, library_threads

URL = "http://10.0.0.2:8000"


@pytest.mark.parametrize(
    ("model", "address"),
    [
        ("actor", None),
        ("actor", ""),
        ("actor", "10.0.0.1"),
        ("actor", "http://10.0.0.1:17337"),
        ("actor", "tcp://10.0.0.1:17337,,"),
        (" ", "tcp://10.0.0.1:17337"),
        ("a" * 513, "tcp://10.0.0.1:17337"),
    ],
)
def test_an_engine_that_would_start_with_old_weights_does_not_start(
    monkeypatch: pytest.MonkeyPatch, model: str, address: str | None
) -> None:
    monkeypatch.setenv("TENSORHUB_MODEL", model)
    monkeypatch.delenv("TENSORHUB_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("TENSORHUB_ADDRESS", address)
    with pytest.raises(InvalidValue, match="TENSORHUB_MODEL and TENSORHUB_ADDRESS of"):
        vllm_start.watch()


def test_an_engine_without_a_model_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORHUB_MODEL", raising=False)
    monkeypatch.setenv("TENSORHUB_ADDRESS", "rubbish")
    vllm_start.watch()


def test_an_engine_that_would_serve_outside_of_its_fleet_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its environment names no model, or it was started without the worker extension."""
    monkeypatch.delenv("TENSORHUB_MODEL", raising=False)
    monkeypatch.setenv("TENSORHUB_ADDRESS", "tcp://10.0.0.1:17337")
    monkeypatch.setenv("TENSORHUB_FLEET_HOST", "10.0.0.2")
    with pytest.raises(InvalidValue, match="MODEL is not set, but TENSORHUB_FLEET_HOST is"):
        vllm_start.watch()
    monkeypatch.setenv("TENSORHUB_MODEL", "actor")
    plain = type("Worker", (), {"load_model": lambda self: None})
    monkeypatch.setitem(
        sys.modules, "vllm.v1.worker.gpu_worker", cast(ModuleType, SimpleNamespace(Worker=plain))
    )
    vllm_start.watch()
    with pytest.raises(StateError, match="outside of the fleet: start it with --worker-ext"):
        plain().load_model()


class Worker:
    """One of vLLM's, with the extension."""

    def __init__(self, rank: int) -> None:
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(rank=rank))
        self.calls: list[tuple[object, ...]] = []

    def tensorhub_start(self, address: str, model: str) -> dict[str, Any]:
        self.calls.append(("start", address, model))
        return {"version": None}

    def tensorhub_one_version(self, address: str, model: str, host: str, token: str | None) -> None:
        self.calls.append(("one version", address, model, host, token))


def test_an_engine_is_found_from_its_start_until_it_leaves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By one of its workers, which looks after it. That nothing is published yet is told: perhaps
    the model's name is misspelt.
    """
    with sync.serve(token="", options=OPTIONS) as coordinator:
        monkeypatch.setenv("TENSORHUB_ADDRESS", coordinator.address)
        monkeypatch.setenv("TENSORHUB_MODEL", "actor")
        monkeypatch.setenv("TENSORHUB_ENGINE_URL", URL)
        workers = [Worker(0), Worker(1)]
        with sync.connect(coordinator.address) as hub:
            vllm_start.start(workers[1])
            assert list(announced(hub, "actor", SERVERS)) == []
            vllm_start.start(workers[0])
            assert list(announced(hub, "actor", SERVERS)) == [URL]
            assert "vllm_started_unpublished" in caplog.text
            (thread,) = [
                each for each in threading.enumerate() if each.name == "tensorhub-announced"
            ]
            for each in workers:
                assert each.calls == [("start", coordinator.address, "actor")]
                vllm_start.withdraw(each)
                vllm_start.withdraw(each)
            assert list(announced(hub, "actor", SERVERS)) == []
    thread.join(20.0)
    assert not thread.is_alive()
    assert not library_threads()


def test_an_engine_of_a_fleet_is_found_by_its_seat_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(0)
    for name, value in (
        ("ADDRESS", "tcp://10.0.0.1:17337"),
        ("MODEL", "actor"),
        ("ENGINE_URL", URL),
        ("FLEET_HOST", "10.0.0.2"),
        ("FLEET_TOKEN", "secret"),
    ):
        monkeypatch.setenv(f"TENSORHUB_{name}", value)
    vllm_start.start(worker)
    assert worker.calls == [
        ("one version", "tcp://10.0.0.1:17337", "actor", "10.0.0.2", "secret"),
    ]
