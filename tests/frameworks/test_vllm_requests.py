"""An update of a vLLM engine in the middle of a request: each token is of one version."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from tensorhub import sync
from tests.frameworks import vllm_cpu
from tests.frameworks.generating import answer_by, steps
from tests.frameworks.test_vllm import actor
from tests.frameworks.test_vllm_worker import EXTENSION

pytestmark = [pytest.mark.framework, pytest.mark.timeout(400)]

LENGTH = 16_384  # more tokens than are generated until the last update
ENOUGH = 10  # tokens of each version
STEPS = (1, 3, 7)  # what each version adds to a token to get the next one


async def generated(address: str, path: Path, weights: sync.Weights, model: Any) -> list[int]:
    """The tokens of one request, in which two updates arrive: with a pause, and without one."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    given = {**vllm_cpu.ENGINE, "distributed_executor_backend": None, "max_model_len": LENGTH}
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=f"{path}", worker_extension_cls=EXTENSION, **given)
    )
    try:
        await engine.collective_rpc("tensorhub_join", kwargs={"address": address})
        await engine.collective_rpc("tensorhub_update")
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=LENGTH - 1,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        tokens, version = [0], 0
        async for output in engine.generate({"prompt_token_ids": tokens[:]}, sampling, "one"):
            tokens += output.outputs[0].token_ids
            if steps(tokens)[-ENOUGH:] != [STEPS[version]] * ENOUGH:
                continue
            if version == len(STEPS) - 1:
                break
            version += 1
            with weights.mutate(version):
                answer_by(model, STEPS[version])
            if version == 1:
                await engine.pause_generation(mode="keep", clear_cache=False)
            await engine.collective_rpc("tensorhub_update")
            if version == 1:
                await engine.resume_generation()
        return tokens
    finally:
        engine.shutdown()


def test_an_update_in_the_middle_of_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = vllm_cpu.prepare(tmp_path, {**vllm_cpu.LLAMA, "max_position_embeddings": LENGTH})
    monkeypatch.setenv("VLLM_PLUGINS", vllm_cpu.ENVIRONMENT["VLLM_PLUGINS"] + ",cpu_generation")
    model = actor()
    answer_by(model, STEPS[0])
    with sync.serve() as coordinator, sync.connect(coordinator.address) as hub:
        weights = hub.register("actor", model)
        weights.publish(0)
        tokens = asyncio.run(generated(coordinator.address, Path(path), weights, model))
    assert [step for step, _ in itertools.groupby(steps(tokens))] == list(STEPS)
