"""Requests that name adapters, in an engine that generates: a version that cannot be loaded is the
error of its request.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.integrations.adapters import adapter_tensors
from tensorhub.integrations.vllm_lora import adapter_request
from tests.frameworks import vllm_cpu
from tests.frameworks.test_vllm_lora import CONFIG, adapter
from tests.frameworks.test_vllm_server import post, serving
from tests.frameworks.test_vllm_worker import EXTENSION

pytestmark = [pytest.mark.framework, pytest.mark.timeout(900)]

LENGTH = 16_384  # more tokens than are generated while a test runs
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "max_cpu_loras": 2}


@pytest.fixture
def coordinator() -> Iterator[sync.Coordinator]:
    with sync.serve() as serving:
        yield serving


@pytest.fixture
def hub(coordinator: sync.Coordinator) -> Iterator[sync.Hub]:
    with sync.connect(coordinator.address) as connected:
        yield connected


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = vllm_cpu.prepare(tmp_path, {**vllm_cpu.LLAMA, "max_position_embeddings": LENGTH})
    monkeypatch.setenv("VLLM_PLUGINS", vllm_cpu.ENVIRONMENT["VLLM_PLUGINS"] + ",cpu_generation")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return path


@asynccontextmanager
async def engine(path: str, address: str, workers: int) -> AsyncIterator[Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    settings = {**vllm_cpu.ENGINE, "distributed_executor_backend": None, "max_model_len": LENGTH}
    arguments = AsyncEngineArgs(
        model=path, worker_extension_cls=EXTENSION, tensor_parallel_size=workers, **LORA, **settings
    )
    made = AsyncLLM.from_engine_args(arguments)
    try:
        await made.collective_rpc("tensorhub_join", kwargs={"address": address})
        yield made
    finally:
        made.shutdown()


def train(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.normal_()


class Request:
    """One that runs until it is closed."""

    def __init__(self, llm: Any, name: str, version: int | None = None) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=LENGTH - 1,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        lora = None if version is None else adapter_request("poet", version)
        prompt = {"prompt_token_ids": [0]}
        self._outputs = llm.generate(prompt, sampling, name, lora_request=lora)

    async def tokens(self, count: int = 3) -> None:
        """Wait for so many further ones."""
        while count > 0:
            count -= len((await anext(self._outputs)).outputs[0].token_ids)

    async def close(self) -> None:
        await self._outputs.aclose()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_version_that_is_not_published_is_the_error_of_its_request(
    path: str, coordinator: sync.Coordinator, hub: sync.Hub, workers: int
) -> None:
    from vllm.exceptions import VLLMValidationError

    poet = hub.register("poet", adapter_tensors(tensors := adapter(), CONFIG))
    poet.publish(0)
    hub.register("other", {"weight": adapter()[next(iter(adapter()))]}).publish(0)

    async def requests() -> None:
        async with engine(path, coordinator.address, workers) as llm:
            other = Request(llm, "other")
            await other.tokens()
            with pytest.raises(VLLMValidationError, match=r"VersionUnavailable: .*poet"):
                await Request(llm, "missing", 1).tokens()
            with pytest.raises(Exception, match=r"'other' has no tensor 'adapter_config\.json'"):
                await llm.add_lora(adapter_request("other", 0))
            running, queued = [Request(llm, "0", 0)], list[asyncio.Future[None]]()
            await running[0].tokens()
            for version in range(1, 4):  # more than vLLM has room for, and more than are kept
                with poet.mutate(version):
                    train(tensors)
                assert await llm.add_lora(adapter_request("poet", version))
                running.append(Request(llm, f"{version}", version))
                queued.append(asyncio.ensure_future(running[-1].tokens()))
                if version == 1:
                    await queued[0]
                await other.tokens()
            poet.unpublish()  # what is queued does not need it
            await running[0].tokens()
            await running[0].close()
            await running[1].close()
            await asyncio.gather(*queued)
            for each in (*running[2:], other):
                await each.tokens()
            states = await llm.collective_rpc("tensorhub_state")
            assert [each["adapters"] for each in states] == [{"poet": [2, 3]}] * workers
            with pytest.raises(VLLMValidationError, match=r"VersionUnavailable: .*poet"):
                await Request(llm, "late", 7).tokens()
            await other.tokens()

    asyncio.run(requests())


def test_adapters_of_a_server_by_http(
    path: str,
    coordinator: sync.Coordinator,
    hub: sync.Hub,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's calls that load adapters, and requests that name them; two tensor-parallel workers."""
    import requests

    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    monkeypatch.setitem(vllm_cpu.ENVIRONMENT, "VLLM_PLUGINS", os.environ["VLLM_PLUGINS"])
    options = ["--worker-extension-cls", EXTENSION, "--load-format", "dummy", "--enable-lora"]
    options += ["--max-lora-rank", "8", "--max-loras", "2", "--max-cpu-loras", "2"]
    options += ["--served-model-name", "base", "--enable-scale-out"]
    poet = hub.register("poet", adapter_tensors(tensors := adapter(), CONFIG))
    poet.publish(0)
    with serving(tmp_path_factory.mktemp("server"), path, options, 2) as server:

        def load(name: str, model: str) -> requests.Response:
            body = {"lora_name": name, "lora_path": f"tensorhub:{model}"}
            return requests.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=60)

        def generate(model: str) -> requests.Response:
            sampling = {"temperature": 0, "max_tokens": 3, "ignore_eos": True, "detokenize": False}
            body = {"model": model, "token_ids": [0], "sampling_params": sampling}
            return requests.post(f"{server.url}/inference/v1/generate", json=body, timeout=60)

        assert "has joined no cluster yet" in load("early", "poet@0").text
        post(
            server,
            "collective_rpc",
            method="tensorhub_join",
            kwargs={"address": coordinator.address},
        )
        for wrong, reason in (("poet@1", "not published yet"), ("poet", "MODEL@VERSION")):
            refused = load("wrong", wrong)
            assert (refused.ok, reason in refused.text) == (False, True), refused.text
        for version in range(3):
            if version:
                with poet.mutate(version):
                    train(tensors)
            loaded = load(f"poet@{version}", f"poet@{version}")
            assert loaded.ok, loaded.text
            made = generate(f"poet@{version}")
            assert made.ok, made.text
            assert len(made.json()["choices"][0]["token_ids"]) == 3
        states = post(server, "collective_rpc", method="tensorhub_state")["results"]
        assert [each["adapters"] for each in states] == [{"poet": [1, 2]}] * 2
        late = generate("poet@0")  # unloaded, and no longer published
        assert late.status_code == 400, late.text
        assert "poet" in late.text
        assert generate("poet@2").ok
        assert generate("base").ok
