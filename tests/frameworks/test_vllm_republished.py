"""A model that is quantized once, and published a second time. The judge is vLLM, which quantizes
the same weights when it loads them.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import InvalidValue, VersionConflict
from tensorhub.integrations.quantized import Quantizer, Republisher
from tests.cli.processes import WAIT_S, line_with, run_here, started
from tests.frameworks.test_vllm_quant import contents, start
from tests.frameworks.vllm_quantized import METHODS, Tensors, checkpoint, compressed, prepared

pytestmark = [pytest.mark.framework, pytest.mark.timeout(400)]

CHANNEL = METHODS["compressed fp8, channel"].config
ONLINE = METHODS["online fp8, channel"]


@pytest.fixture
def coordinator() -> Iterator[sync.Coordinator]:
    with sync.serve() as serving:
        yield serving


@pytest.fixture
def hub(coordinator: sync.Coordinator) -> Iterator[sync.Hub]:
    with sync.connect(coordinator.address) as connected:
        yield connected


def quantized(config: dict[str, Any], tensors: Tensors) -> Tensors:
    quantizer = Quantizer(config)
    return {
        n: t for name, each in tensors.items() for n, t in quantizer.quantize(name, each).items()
    }


def of_linear_layers(llm: Any) -> dict[str, Any]:
    ends = "_proj.weight", "_proj.weight_scale"
    return {name: each for name, each in contents(llm).items() if name.endswith(ends)}


def test_an_engine_has_what_it_would_quantize_itself(
    tmp_path: Path, coordinator: sync.Coordinator, hub: sync.Hub
) -> None:
    one, other = (checkpoint(ONLINE, seed) for seed in (1, 2))
    directories = [tmp_path / name for name in ("itself", "second")]
    for directory in directories:
        directory.mkdir()
    with prepared():
        wanted = of_linear_layers(start(directories[0], ONLINE, other))
        method = METHODS["compressed fp8, channel"]
        llm = start(directories[1], method, quantized(CHANNEL, one))
        hub.register("actor", other).publish(7)
        with Republisher(hub, "actor", "actor-fp8", CHANNEL) as republisher:
            republisher.publish()
            llm.collective_rpc("tensorhub_join", args=(coordinator.address, "actor-fp8"))
            (state,) = llm.collective_rpc("tensorhub_update")
            llm.collective_rpc("tensorhub_check")
            llm.collective_rpc("tensorhub_leave")
        assert state["version"] == 7
        assert len(wanted) == 16
        assert of_linear_layers(llm) == wanted


def test_an_engine_follows_the_command(
    tmp_path: Path, coordinator: sync.Coordinator, hub: sync.Hub
) -> None:
    """It starts as the command says, with dummy weights."""
    tensors = checkpoint(ONLINE, 1)
    weights = hub.register("actor", tensors)
    weights.publish(0)
    arguments = ("republish", "actor", "actor-fp8", "--quantization", "FP8_DYNAMIC", "--json")
    with prepared(), started(*arguments, "--address", coordinator.address) as process:
        overrides = json.loads(line_with("--hf-overrides", process.stderr).split("'")[1])
        llm = start(tmp_path, ONLINE, None, overrides)
        llm.collective_rpc("tensorhub_join", args=(coordinator.address, "actor-fp8"))
        has = []
        for version in range(3):
            if version:  # twice gives the first content again
                with weights.mutate(version):
                    for tensor in tensors.values():
                        tensor.neg_()
            line_with("{", process.stdout)
            (state,) = llm.collective_rpc("tensorhub_update")
            assert (state["version"], state["is_torn"]) == (version, False)
            llm.collective_rpc("tensorhub_check")
            has.append(of_linear_layers(llm))
        llm.collective_rpc("tensorhub_leave")
    assert len(has[0]) == 16
    changed = {name for name, each in has[0].items() if each != has[1][name]}
    assert changed == {name for name in has[0] if name.endswith("weight")}
    assert has[0] == has[2]


@pytest.mark.parametrize(("end", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_the_command_follows_a_trainer(
    coordinator: sync.Coordinator, hub: sync.Hub, end: signal.Signals, code: int
) -> None:
    tensors = checkpoint(ONLINE, 1)
    weights = hub.register("actor", tensors)
    weights.publish(7)
    arguments = ("republish", "actor", "actor-fp8", "--quantization", "FP8_DYNAMIC", "--json")
    with started(*arguments, "--address", coordinator.address) as process:
        overrides = json.loads(line_with("--hf-overrides", process.stderr).split("'")[1])
        assert overrides["quantization_config"]["format"] == "float-quantized"
        for version in (7, 8):
            if version > 7:
                with weights.mutate(version):
                    for tensor in tensors.values():
                        tensor.neg_()
            said = json.loads(line_with("{", process.stdout))
            assert (said["model"], said["version"]) == ("actor-fp8", version)
            assert said["bytes"] < 0.56 * said["of_bytes"]
            found, wanted = hub.fetch("actor-fp8", version), quantized(CHANNEL, tensors)
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
        process.send_signal(end)
        _, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == code
        assert "Traceback" not in err


@pytest.mark.parametrize("given", ["FP9", "missing.json"])
def test_the_command_refuses_another_quantization(given: str) -> None:
    done = run_here("republish", "a", "b", "--quantization", given, "--address", "tcp://h:1")
    assert (done.returncode, given in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("config", "of_bf16"),
    [
        (CHANNEL, 0.56),
        (METHODS["compressed fp8, tensor"].config, 0.56),
        (METHODS["compressed fp8, block"].config, 0.56),
        (METHODS["compressed int4"].config, 0.36),
    ],
)
def test_readers_fetch_fewer_bytes(
    coordinator: sync.Coordinator, hub: sync.Hub, config: dict[str, Any], of_bf16: float
) -> None:
    """Embeddings, a seventh of this small model, stay as they are."""
    tensors = checkpoint(ONLINE, 1)
    weights = hub.register("actor", tensors)
    weights.publish(3)
    with (
        Republisher(hub, "actor", "small", config) as republisher,
        sync.connect(coordinator.address) as reader,
    ):
        for version in (3, 5, 6):
            if version > 3:
                with weights.mutate(version):
                    for tensor in tensors.values():
                        tensor.neg_()
            report = republisher.publish(version)
            found = reader.fetch("small", version)
            whole = reader.fetch("actor", version)
            assert report.nbytes == found.report.bytes_read <= of_bf16 * whole.report.bytes_read
            wanted = quantized(config, tensors)
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
        with pytest.raises(VersionConflict):
            republisher.publish(6)


def test_a_model_whose_tensors_change_is_registered_anew(hub: sync.Hub) -> None:
    tensors = checkpoint(ONLINE, 1)
    weights = hub.register("actor", tensors)
    weights.publish(0)
    with Republisher(hub, "actor", "small", CHANNEL) as republisher:
        republisher.publish()
        weights.close(abandon=True)
        hub.register("actor", {"a_proj.weight": torch.ones(4, 8).bfloat16()}).publish(1)
        republisher.publish(1)
        assert {*hub.fetch("small", 1)} == {"a_proj.weight", "a_proj.weight_scale"}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (METHODS["compressed nvfp4"].config, "shared by layers that an engine fuses"),
        (compressed({"symmetric": False}, None, "float-quantized"), "symmetric"),
        (compressed({"strategy": "tensor"}, {"strategy": "tensor"}, "float-quantized"), "samples"),
        (compressed({"num_bits": "many"}, None, "float-quantized"), "num_bits"),
    ],
)
def test_another_configuration_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidValue, match=says):
        Quantizer(config)


def test_a_model_does_not_follow_itself(hub: sync.Hub) -> None:
    with pytest.raises(InvalidValue, match="another name"):
        Republisher(hub, "actor", "actor", CHANNEL)
