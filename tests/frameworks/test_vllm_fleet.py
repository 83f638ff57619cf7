"""Several of vLLM's servers under one trainer, one of which is killed; and an engine that starts
late. All with `vllm_worker.WorkerExtension`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tensorhub import sync
from tensorhub.integrations.announced import SERVERS, announced
from tensorhub.integrations.trl import WeightTransfer
from tests.frameworks import vllm_cpu
from tests.frameworks.test_vllm import actor, train
from tests.frameworks.test_vllm_server import Server, post, serving
from tests.frameworks.test_vllm_worker import EXTENSION

pytestmark = [pytest.mark.framework, pytest.mark.timeout(1200)]
TOKEN = "a token of at least this length"


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[sync.Coordinator]:
    monkeypatch.setenv("TENSORHUB_TOKEN", TOKEN)
    with sync.serve(token=TOKEN) as serving_:
        yield serving_


def state(server: Server) -> dict[str, Any]:
    (found,) = post(server, "collective_rpc", method="tensorhub_state")["results"]
    return dict(found)


def test_an_engine_that_starts_late_takes_the_newest_version(
    coordinator: sync.Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("TENSORHUB_ADDRESS", coordinator.address)
    monkeypatch.setenv("TENSORHUB_MODEL", "actor")
    monkeypatch.setenv("TENSORHUB_ENGINE_URL", "http://10.0.0.2:8000")
    path = vllm_cpu.prepare(tmp_path)
    model = actor()
    with sync.connect(coordinator.address) as hub:
        hub.register("actor", model).publish(7)
        from vllm import LLM

        from tensorhub.integrations import vllm_start

        vllm_start.watch()  # an earlier test may have imported the extension
        late = LLM(model=path, worker_extension_cls=EXTENSION, **vllm_cpu.ENGINE)
        (found,) = late.collective_rpc("tensorhub_state")
        assert found["version"] == 7
        assert list(announced(hub, "actor", SERVERS)) == ["http://10.0.0.2:8000"]
        late.collective_rpc("tensorhub_check")
        late.collective_rpc("tensorhub_leave")
        assert list(announced(hub, "actor", SERVERS)) == []


def test_trls_trainer_feeds_two_servers_and_goes_on_with_one(
    coordinator: sync.Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorhub.integrations.trl.installed_version", lambda name: "1.16.0")
    model = actor()
    path = tmp_path / "model"
    path.mkdir()
    vllm_cpu.prepare(path)
    options = ["--worker-extension-cls", EXTENSION, "--load-format", "dummy"]
    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:

        def start(name: str) -> Server:
            (tmp_path / name).mkdir()
            return stack.enter_context(serving(tmp_path / name, str(path), options))

        servers = list(threads.map(start, ("one", "other")))
        transfer = WeightTransfer(
            address=coordinator.address, servers=[each.url for each in servers], timeout_s=120.0
        )
        stack.callback(transfer.destroy)
        transfer.init_weight_transfer()
        for version in (1, 2):
            train(model)
            transfer.send_weights(iter(model.named_parameters()))
            assert [state(each)["version"] for each in servers] == [version] * 2
        os.killpg(servers[0].session, signal.SIGKILL)
        train(model)
        transfer.send_weights(iter(model.named_parameters()))
        assert state(servers[1])["version"] == 3
        post(servers[1], "collective_rpc", method="tensorhub_check")
        import requests

        assert not requests.get(f"{servers[1].url}/is_paused", timeout=60).json()["is_paused"]
