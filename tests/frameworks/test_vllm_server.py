"""`tensorhub.integrations.vllm` against vLLM's HTTP server: several processes, with one worker and
with two that are tensor-parallel; a trainer that is killed, and a worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorhub import Stamp, sync
from tensorhub.errors import StateError
from tests.frameworks import vllm_cpu
from tests.frameworks.test_vllm import actor, train

pytestmark = [pytest.mark.framework, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).resolve().parents[2]
START_S = 540  # until the server answers, on a machine that does other things


@dataclass(frozen=True)
class Server:
    url: str
    workers: int
    session: int
    # a worker fails to finish its layers as long as a file here has the number of its rank
    faults: Path


def environment(directory: Path) -> dict[str, str]:
    """vLLM's workers load the shim as a plug-in, beside TensorHub's."""
    vllm_cpu.install_plugins(directory)
    paths = [str(directory), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    python_path = os.pathsep.join(filter(None, paths))
    shim = {
        "VLLM_PLUGINS": vllm_cpu.ENVIRONMENT["VLLM_PLUGINS"] + ",cpu_faults",
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONPATH": python_path,
    }
    workers = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TENSORHUB_TEST_FAULTS": str(directory)}
    return {**os.environ, **vllm_cpu.ENVIRONMENT, **shim, **workers}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("llama")
    (directory / "config.json").write_text(json.dumps(vllm_cpu.LLAMA))
    return str(directory)


@pytest.fixture(scope="module", params=[1, 2])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_path: str
) -> Iterator[Server]:
    transfer = ["--weight-transfer-config", '{"backend": "tensorhub"}', "--load-format", "dummy"]
    directory = tmp_path_factory.mktemp("server")
    with serving(directory, model_path, transfer, request.param) as started:
        yield started


@contextlib.contextmanager
def serving(
    directory: Path, model_path: str, options: list[str], workers: int = 1
) -> Iterator[Server]:
    """vLLM's HTTP server, in processes of its own."""
    import requests

    port = _free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model_path]
    command += ["--host", "127.0.0.1", "--port", f"{port}", "--max-model-len", "64", *options]
    command += ["--skip-tokenizer-init", "--enforce-eager", "--dtype", "bfloat16"]
    command += ["--tensor-parallel-size", f"{workers}"]
    log = directory / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=environment(directory), stdout=out, stderr=out, start_new_session=True
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while True:
            assert process.poll() is None, log.read_text()[-5000:]
            assert time.monotonic() < deadline, log.read_text()[-5000:]
            try:
                if requests.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except requests.RequestException:
                time.sleep(0.5)
        yield Server(url, workers, process.pid, directory)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def post(server: Server, path: str, **body: Any) -> Any:
    import requests

    answer = requests.post(f"{server.url}/{path}", json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()


def get(server: Server, path: str) -> Any:
    import requests

    return requests.get(f"{server.url}/{path}", timeout=60).json()


def trainer_of(url: str, address: str, model: torch.nn.Module, **settings: Any) -> Any:
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from tensorhub.integrations.vllm import TrainerInit, register

    register()
    init = TrainerInit(address=address, rank=0, timeout_s=300.0, **settings)
    return WeightTransferTrainerFactory.trainer_init(
        init, client=HTTPVLLMWeightSyncClient(url, 330), source=model
    )


def expected(model: torch.nn.Module, rank: int, workers: int) -> dict[str, str]:
    """vLLM's digests of the tensors that one of a Llama's workers has, made of the trainer's by
    hand.
    """
    from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests

    def mine(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(workers, dim)[rank]

    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for fused, parts in (("qkv", ("q", "k", "v")), ("gate_up", ("gate", "up"))):
        for name in [name for name in tensors if f".{parts[0]}_proj" in name]:
            rows = [
                mine(tensors.pop(name.replace(f"{parts[0]}_proj", f"{part}_proj")), 0)
                for part in parts
            ]
            tensors[name.replace(f"{parts[0]}_proj", f"{fused}_proj")] = torch.cat(rows)
    for name in [name for name in tensors if "o_proj" in name or "down_proj" in name]:
        tensors[name] = mine(tensors[name], 1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = mine(
            torch.cat([tensors[name], tensors[name].new_zeros(28, tensors[name].shape[1])]), 0
        )
    made = torch.nn.Module()
    for name, tensor in tensors.items():
        owner = made
        *path, last = name.split(".")
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
    return dict(compute_tensor_digests(made))


def served(server: Server) -> dict[str, str]:
    """vLLM's digests of all workers, with the rank before each name."""
    found = post(server, "weight_checker", action="checksum")["checksums"]
    return {name.rpartition(":tp")[2]: digest for name, digest in found.items()}


def check(server: Server, model: torch.nn.Module) -> None:
    has, ranks = served(server), range(server.workers)
    should = {
        f"{rank}:{name}": of
        for rank in ranks
        for name, of in expected(model, rank, server.workers).items()
    }
    assert {name for name, digest in should.items() if has[name] != digest} == set()


def process_of(server: Server, title: str) -> int:
    """The number of one of the server's processes."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            number = int(path.parent.name)
            if title in path.read_text() and os.getsid(number) == server.session:
                return number
    raise AssertionError(f"there is no process {title!r}")


def is_paused(server: Server) -> bool:
    return bool(get(server, "is_paused")["is_paused"])


@pytest.mark.parametrize("host_memory_bytes", [0, 2**30])
def test_three_updates(server: Server, host_memory_bytes: int) -> None:
    with sync.serve() as coordinator:
        model = actor(host_memory_bytes)
        trainer = trainer_of(
            server.url, coordinator.address, model, host_memory_bytes=host_memory_bytes
        )
        for version in range(3):
            train(model)
            trainer.send_weights()
            assert Stamp.parse(get(server, "weight_info")["weight_version"]).version == version
            assert not is_paused(server)
            check(server, model)
            trainer.check_weights()
        trainer.shutdown()


KILLED = """
    import sys, time
    from tests.frameworks.test_vllm import actor
    from tests.frameworks.test_vllm_server import trainer_of

    url, address, after = sys.argv[1:]
    trainer = trainer_of(url, address, actor(12), pause=None)
    trainer._weights.publish(0)
    trainer.client.start_weight_update()
    if after == "update":
        trainer.client.update_weights({"version": 0})
    print("now", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("after", ["start", "update"])
def test_a_trainer_that_is_killed_before_it_has_finished(
    server: Server, after: str, tmp_path: Path
) -> None:
    with sync.serve() as coordinator:
        script = tmp_path / "killed.py"
        script.write_text(textwrap.dedent(KILLED))
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)]),
        }
        command = [sys.executable, str(script), server.url, coordinator.address, after]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            assert process.stdout is not None
            while "now" not in (line := process.stdout.readline()):
                assert line, "the trainer has ended"
            process.kill()
        model = actor(13)
        trainer = trainer_of(server.url, coordinator.address, model)
        trainer.send_weights()
        check(server, model)
        assert not is_paused(server)
        trainer.shutdown()


def test_the_example(server: Server, model_path: str) -> None:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    command = [
        sys.executable,
        str(REPOSITORY / "examples" / "vllm_server.py"),
        server.url,
        model_path,
    ]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=env, timeout=300, check=True
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("the server")]
    assert said == [f"the server has version {version}" for version in range(3)]


@pytest.mark.parametrize("resume_torn", [False, True])
@pytest.mark.parametrize("rank", [0, -1])
def test_an_update_that_fails_on_one_worker_is_torn_on_all(
    server: Server, rank: int, resume_torn: bool
) -> None:
    import requests

    number = rank % server.workers
    with sync.serve() as coordinator:
        model = actor(30 + number)
        trainer = trainer_of(server.url, coordinator.address, model, resume_torn=resume_torn)
        trainer.send_weights()
        train(model)
        fault = server.faults / f"{number}"
        fault.touch()
        try:
            with pytest.raises(requests.HTTPError) as caught:
                trainer.send_weights()
        finally:
            fault.unlink()
        assert f"rank {number} cannot finish its layers" in caught.value.response.text
        assert "the engine's weights are torn" in caught.value.response.text
        assert is_paused(server) != resume_torn
        assert get(server, "weight_info") == {"weight_version": "torn"}
        # of what is published still, and what one of the workers has already
        trainer.send_weights()
        assert not is_paused(server)
        assert Stamp.parse(get(server, "weight_info")["weight_version"]).version == 2
        check(server, model)
        trainer.check_weights()
        trainer.shutdown()


def test_a_process_that_is_killed_within_an_update(server: Server) -> None:
    """The last test of a server. The trainer hears of it long before its deadline, and has its
    memory back. An engine with one worker on a GPU has that in its own process.
    """
    import requests

    killed = "VLLM::Worker_TP1" if server.workers > 1 else "VLLM::EngineCore"
    with sync.serve() as coordinator:
        trainer = trainer_of(server.url, coordinator.address, actor(40))
        trainer.send_weights()
        fault = server.faults / f"{server.workers - 1}"
        fault.write_text(f"{process_of(server, killed)}")
        with pytest.raises((requests.HTTPError, requests.ConnectionError, StateError)):
            trainer.send_weights()
        assert trainer._weights is not None
        assert trainer._weights.version is None
        train(trainer.source)
        trainer.shutdown()
