"""Quantized engines: vLLM's own loader is the judge of each method of quantization."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import IntegrityError, ManifestMismatch
from tests.frameworks import vllm_cpu
from tests.frameworks.test_vllm_worker import EXTENSION, updater_of, worker_of
from tests.frameworks.vllm_quantized import METHODS, Method, Tensors, checkpoint, prepared

pytestmark = [pytest.mark.framework, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> Iterator[None]:
    with prepared():
        yield


@pytest.fixture(scope="module")
def coordinator() -> Iterator[sync.Coordinator]:
    with sync.serve() as serving:
        yield serving


def start(
    directory: Path,
    method: Method,
    tensors: Tensors | None,
    overrides: dict[str, Any] | None = None,
    workers: int = 1,
) -> Any:
    """An engine; without tensors: with dummy weights. `overrides`: of its configuration, in place of
    the method's quantization. `workers`: two have processes of their own.
    """
    gc.collect()  # an engine that is given up ends the groups of the one that runs
    directory.mkdir(exist_ok=True)
    path = vllm_cpu.prepare(directory, method.differs)
    settings = {**vllm_cpu.ENGINE, "hf_overrides": overrides or {}}
    if tensors is not None:
        vllm_cpu.write_checkpoint(directory, tensors)
        settings["load_format"] = "auto"
    if not overrides:
        settings["quantization"] = method.quantizes
    if workers > 1:
        settings |= {"tensor_parallel_size": workers, "distributed_executor_backend": "mp"}
    from vllm import LLM

    return LLM(model=path, worker_extension_cls=EXTENSION, **settings)


def contents(llm: Any) -> dict[str, Any]:
    return contents_of(worker_of(llm))


def contents_of(worker: Any) -> dict[str, Any]:
    """Each tensor and number that any module of the model has, or what it computes with (kernels of
    experts have scales of their own).
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def note(owner: Any, at: str) -> None:
        for key, value in owner.items():
            name = f"{at}.{key}"
            if isinstance(value, torch.Tensor):
                data = value.detach().clone().contiguous().view(-1).view(torch.uint8)
                has = data.numpy().tobytes()
                found[name] = (*value.shape,), value.dtype, value.stride(), has
            elif isinstance(value, float) and not key.endswith("_time"):
                found[name] = value
            elif type(value).__module__.startswith("vllm.") and id(value) not in seen:
                seen.add(id(value))
                if not isinstance(value, torch.nn.Module) and hasattr(value, "__dict__"):
                    note(vars(value), name)

    for name, module in worker.get_model().named_modules():
        for owner in (module._parameters, module._buffers, vars(module)):
            note(owner, name)
    return found


def lose_memory(llm: Any) -> None:
    for tensor in worker_of(llm).get_model().parameters():
        if tensor.is_contiguous():
            tensor.data.view(-1).view(torch.uint8).fill_(0x5A)


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def spoilt(tensors: Tensors) -> tuple[Tensors, set[str]]:
    """Without a layer, without one tensor of another, with a misspelt name, one too many, and one of
    another dtype; and how what is listed has to begin.
    """
    given = {name: each for name, each in tensors.items() if "layers.1.self_attn" not in name}
    attention = "model.layers.0.self_attn"
    of = {
        part: sorted(name for name in given if f"{attention}.{part}_proj" in name) for part in "oqk"
    }
    lost, misspelt, other = of["o"][-1], of["q"][0], of["k"][0]
    del given[lost]
    wrong = misspelt.replace("q_proj", "q_porj")
    given[wrong] = given.pop(misspelt)
    given["model.layers.0.mlp.extra.weight"] = torch.zeros(2)
    is_plain = given[other].is_floating_point() and given[other].itemsize > 1
    given[other] = given[other].to(torch.int32 if is_plain else torch.bfloat16)
    named = {
        "model.layers.1.self_attn.qkv_proj.",
        "model.layers.1.self_attn.o_proj.",
        lost,
        wrong,
        "model.layers.0.mlp.extra.weight",
        other,
    }
    experts = "model.layers.{}.block_sparse_moe.experts."
    if any(name.startswith(experts.format(0)) for name in given):
        # a whole expert, and one tensor of one expert
        for name in [name for name in given if name.startswith(experts.format(0) + "2.")]:
            del given[name]
        (*_, scale) = sorted(name for name in given if name.startswith(experts.format(1) + "3.w2."))
        del given[scale]
        attribute = scale.partition(".w2.")[2]
        named |= {f"{experts.format(0)}routed_experts.w{n}_" for n in (13, 2)}
        named.add(f"{experts.format(1)}routed_experts.w2_{attribute}")
    return given, named


@pytest.mark.parametrize("kind", METHODS)
def test_an_update_is_what_the_engine_loads_itself(
    tmp_path: Path, coordinator: sync.Coordinator, kind: str
) -> None:
    """The engine loads one checkpoint, gets another one, and the first one again: staged, after its
    memory was lost.
    """
    from vllm.config import set_current_vllm_config

    from tensorhub.integrations import vllm_reload

    method = METHODS[kind]
    one, other = (checkpoint(method, seed) for seed in (1, 2))
    llm = start(tmp_path, method, one)
    loaded = contents(llm)
    with sync.connect(coordinator.address) as hub:
        broken, named = spoilt(other)
        hub.register(f"{kind} spoilt", broken).publish(0)
        llm.collective_rpc("tensorhub_join", args=(coordinator.address, f"{kind} spoilt"))
        with pytest.raises(ManifestMismatch) as caught:
            llm.collective_rpc("tensorhub_update")
        listed = [each.split("'")[1] for each in caught.value.differences]
        assert [name for name in named if not any(each.startswith(name) for each in listed)] == []
        assert differing(loaded, contents(llm)) == []

        hub.register(kind, other).publish(1)
        llm.collective_rpc("tensorhub_join", args=(coordinator.address, kind))
        llm.collective_rpc("tensorhub_update")
        llm.collective_rpc("tensorhub_check")
        has = contents(llm)
        changed = {name.rpartition(".")[0] for name in differing(loaded, has)}
        updater = updater_of(llm)
        assert {layer.name for layer in updater.plan.layers} <= changed
        if method.experts:  # as of a release that was not tested
            with set_current_vllm_config(updater._vllm_config):
                vllm_reload.probe(updater._model, updater.plan)
        assert differing(has, contents(llm)) == []

        lose_memory(llm)
        llm.collective_rpc("tensorhub_update")
        assert differing(has, contents(llm)) == []

        lose_memory(llm)
        llm.collective_rpc(
            "tensorhub_join",
            args=(coordinator.address, kind),
            kwargs={"host_memory_bytes": 2**30},
        )
        hub.register(kind, one).publish(2)
        llm.collective_rpc("tensorhub_update")
        llm.collective_rpc("tensorhub_check")
        assert differing(loaded, contents(llm)) == []

        module = "routed_experts" if method.experts else "down_proj"
        layer = next(each for each in updater_of(llm).plan.layers if module in each.name)
        name, tensor = next(iter(layer.module.named_parameters()))
        dense = tensor.data if tensor.is_contiguous() else tensor.data.t()
        dense.view(-1)[:1].view(torch.uint8).bitwise_xor_(1)
        with pytest.raises(IntegrityError, match=rf"{module}\.{name}"):
            llm.collective_rpc("tensorhub_check")
        llm.collective_rpc("tensorhub_leave")


@pytest.mark.parametrize(
    "kind", ["fp8, tensor", "compressed int4", "experts, compressed fp8, channel"]
)
def test_two_workers_have_what_they_load_themselves(
    tmp_path: Path, coordinator: sync.Coordinator, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They load one checkpoint, get another one, and the first one again: staged."""
    plugins = vllm_cpu.ENVIRONMENT["VLLM_PLUGINS"] + ",cpu_quantized"
    monkeypatch.setitem(vllm_cpu.ENVIRONMENT, "VLLM_PLUGINS", plugins)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    one, other = (checkpoint(METHODS[kind], seed) for seed in (1, 2))
    llm = start(tmp_path, METHODS[kind], one, workers=2)
    loaded = llm.collective_rpc(contents_of)
    assert len(loaded) == 2
    with sync.connect(coordinator.address) as hub:
        for version, (tensors, staged) in enumerate([(other, 0), (one, 2**30)]):
            model = f"two, {kind}, {version}"
            hub.register(model, tensors).publish(version)
            settings = {"model": model, "host_memory_bytes": staged}
            llm.collective_rpc("tensorhub_join", args=(coordinator.address,), kwargs=settings)
            llm.collective_rpc("tensorhub_update")
            llm.collective_rpc("tensorhub_check")
            has = llm.collective_rpc(contents_of)
            changed = [differing(before, now) for before, now in zip(loaded, has, strict=True)]
            assert [bool(names) for names in changed] == [not staged] * 2, changed
        llm.collective_rpc("tensorhub_leave")
    llm.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize("kind", ["experts, fp8, block"])
def test_an_engine_that_has_loaded_nothing_refuses_what_it_does_not_read(
    tmp_path: Path, coordinator: sync.Coordinator, kind: str
) -> None:
    """Also beside tensors that it reads."""
    method = METHODS[kind]
    tensors, llm = checkpoint(method, 1), start(tmp_path, method, None)
    before = contents(llm)
    name = next(each for each in tensors if "layers.1.self_attn.o_proj" in each)
    extra = name.rpartition(".")[0] + ".extra"
    with sync.connect(coordinator.address) as hub:
        for model, given, differ in (
            ("more", {**tensors, extra: torch.zeros(2)}, {extra}),
            ("less", {n: t for n, t in tensors.items() if n != name}, {name}),
            ("all", tensors, None),
        ):
            hub.register(model, given).publish(0)
            llm.collective_rpc("tensorhub_join", args=(coordinator.address, model))
            if differ is not None:
                with pytest.raises(ManifestMismatch) as caught:
                    llm.collective_rpc("tensorhub_update")
                assert {each.split("'")[1] for each in caught.value.differences} == differ
                assert differing(before, contents(llm)) == []
        llm.collective_rpc("tensorhub_update")
        llm.collective_rpc("tensorhub_check")
        llm.collective_rpc("tensorhub_leave")
    itself = contents(start(tmp_path / "itself", method, tensors))
    # vLLM's dummy weights are also scales of its cache, which no checkpoint here has
    assert [name for name in differing(itself, contents(llm)) if ".attn." not in name] == []
