"""The MTP layers of a real engine's are its draft model, from the base's checkpoint: they are
updated with the base.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import ManifestMismatch
from tests.frameworks import vllm_cpu
from tests.frameworks.test_vllm_draft import parameters
from tests.frameworks.test_vllm_worker import EXTENSION

pytestmark = [pytest.mark.framework, pytest.mark.timeout(400)]

MIMO = {
    **vllm_cpu.LLAMA,
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "num_nextn_predict_layers": 1,
}
SHAPES: dict[str, tuple[int, ...]] = {
    "input_layernorm.weight": (64,),
    "post_attention_layernorm.weight": (64,),
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.k_proj.weight": (32, 64),
    "self_attn.v_proj.weight": (32, 64),
    "self_attn.q_proj.bias": (64,),
    "self_attn.k_proj.bias": (32,),
    "self_attn.v_proj.bias": (32,),
    "self_attn.o_proj.weight": (64, 64),
    "mlp.gate_proj.weight": (128, 64),
    "mlp.up_proj.weight": (128, 64),
    "mlp.down_proj.weight": (64, 128),
}
MTP = "model.mtp_layers.0"


def checkpoint() -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (100, 64),
        "model.norm.weight": (64,),
        "lm_head.weight": (100, 64),
        f"{MTP}.token_layernorm.weight": (64,),
        f"{MTP}.hidden_layernorm.weight": (64,),
        f"{MTP}.final_layernorm.weight": (64,),
        f"{MTP}.input_proj.weight": (64, 128),
    }
    for layer in ("model.layers.0", "model.layers.1", MTP):
        shapes.update({f"{layer}.{name}": shape for name, shape in SHAPES.items()})
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    directory = tmp_path_factory.mktemp("mimo")
    model = vllm_cpu.prepare(directory, MIMO)
    vllm_cpu.write_checkpoint(directory, checkpoint())
    from vllm import LLM
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    process = UnquantizedLinearMethod.process_weights_after_loading

    def processed(self: Any, layer: Any) -> None:
        process(self, layer)
        if layer.prefix.endswith("layers.1.self_attn.qkv_proj"):
            weight = layer.weight.data.t().contiguous()
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)

    patch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", processed)
    yield LLM(
        model=model,
        worker_extension_cls=EXTENSION,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
        **{**vllm_cpu.ENGINE, "load_format": "auto"},
    )
    patch.undo()


def test_mtp_layers_are_updated_with_their_base_or_neither_is(llm: Any) -> None:
    with sync.serve() as coordinator, sync.connect(coordinator.address) as hub:
        tensors = checkpoint()
        weights = hub.register("actor", tensors)
        llm.collective_rpc("tensorhub_join", args=(coordinator.address,))
        for version in range(2):
            with weights.mutate(version):
                for tensor in tensors.values():
                    tensor.normal_()
            llm.collective_rpc("tensorhub_update")
            llm.collective_rpc("tensorhub_check")
            has = parameters(llm)
            (block,) = {name.split(".mtp_block")[0] for name in has if ".mtp_block." in name}
            for layer, name in ((f"{block}.mtp_block", MTP), ("model.layers.1",) * 2):
                for attribute in ("self_attn.o_proj", "mlp.down_proj", "input_layernorm"):
                    assert torch.equal(
                        has[f"{layer}.{attribute}.weight"], tensors[f"{name}.{attribute}.weight"]
                    )
            for index in range(2):  # the latter is turned after it is loaded
                bias = [f"model.layers.{index}.self_attn.{each}_proj.bias" for each in "qkv"]
                assert torch.equal(
                    has[f"model.layers.{index}.self_attn.qkv_proj.bias"],
                    torch.cat([tensors[each] for each in bias]),
                )
            assert torch.equal(
                has[f"{block}.input_proj.weight"], tensors[f"{MTP}.input_proj.weight"]
            )
        del tensors[f"{MTP}.input_proj.weight"], tensors["model.layers.0.mlp.down_proj.weight"]
        with sync.connect(coordinator.address) as other:
            other.register("less", tensors).publish(0)
            llm.collective_rpc("tensorhub_join", args=(coordinator.address, "less"))
            with pytest.raises(ManifestMismatch) as caught:
                llm.collective_rpc("tensorhub_update")
        assert {each.split("'")[1] for each in caught.value.differences} == {
            f"{block}.input_proj.weight",
            "model.layers.0.mlp.down_proj.weight",
        }
        now = parameters(llm)
        assert all(torch.equal(each, now[name]) for name, each in has.items())
        llm.collective_rpc("tensorhub_leave")
