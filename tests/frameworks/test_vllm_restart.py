"""vLLM engines that start again: with another number of tensor-parallel workers, and from the host
memory of their machine. All with `vllm_worker.WorkerExtension`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tensorhub import Options, sync
from tensorhub.integrations.vllm_session import ExtensionClient, HttpClient, Session, Settings
from tests.frameworks import vllm_cpu
from tests.frameworks.test_vllm import actor, train
from tests.frameworks.test_vllm_server import serving
from tests.frameworks.test_vllm_worker import EXTENSION

pytestmark = [pytest.mark.framework, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_an_engine_comes_back_with_other_tensor_parallel_workers(
    sizes: tuple[int, int], tmp_path: Path
) -> None:
    """It was killed, and the cluster still knows its old workers: their lease runs."""
    path = tmp_path / "model"
    path.mkdir()
    vllm_cpu.prepare(path)
    options = ["--worker-extension-cls", EXTENSION, "--load-format", "dummy"]
    model = actor()
    with (
        sync.serve(options=Options(lease_s=600)) as coordinator,
        sync.connect(coordinator.address) as hub,
    ):
        weights = hub.register("actor", model)
        http = HttpClient("http://127.0.0.1:1")
        client = ExtensionClient(http)
        engine = Session(client, Settings(coordinator.address, "actor", pause="keep"))
        for number, size in enumerate(sizes):
            directory = tmp_path / f"{number}"
            directory.mkdir()
            with serving(directory, f"{path}", options, size) as server:
                http.base_url = server.url
                for version in (2 * number, 2 * number + 1):
                    with weights.mutate(version):
                        train(model)
                    engine.update(hub.wait_for("actor", at_least=version))
                    engine.check()
                assert [each["rank"] for each in client.state()] == list(range(size))
                os.killpg(server.session, signal.SIGKILL)


def test_an_engine_starts_from_the_host_memory_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer is gone: `tensorhub seed` holds what it has published last."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    path = vllm_cpu.prepare(tmp_path)
    model = actor()
    with sync.serve() as coordinator:
        monkeypatch.setenv("TENSORHUB_ADDRESS", coordinator.address)
        monkeypatch.setenv("TENSORHUB_MODEL", "actor")
        command = [sys.executable, "-m", "tensorhub", "seed", "actor", "--host-memory", "1GiB"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as seed:
            try:
                with sync.connect(coordinator.address) as trainer:
                    trainer.register("actor", model).publish(7)
                    assert seed.stdout is not None
                    assert "version 7" in seed.stdout.readline()
                from vllm import LLM

                from tensorhub.integrations import vllm_start

                vllm_start.watch()  # an earlier test may have loaded the plug-in
                llm = LLM(model=path, worker_extension_cls=EXTENSION, **vllm_cpu.ENGINE)
                (state,) = llm.collective_rpc("tensorhub_state")
                assert (state["version"], state["is_torn"]) == (7, False)
                llm.collective_rpc("tensorhub_check")
                llm.collective_rpc("tensorhub_leave")
            finally:
                seed.terminate()
