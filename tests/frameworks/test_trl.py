"""TRL's real `AsyncGRPOTrainer` for a few steps, offline, with a tiny random model and rollouts
that generate with it.

Two things are other than in TRL: the attention kernel, which is for GPUs and is fetched when it is
first called, and the table of devices' speeds, which has none for a CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.framework, pytest.mark.timeout(600)]

pytest.importorskip(
    "trl",
    reason="trl is not installed here; `make frameworks FRAMEWORKS=trl` installs it, and runs this",
)

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from tokenizers.pre_tokenizers import Whitespace  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from trl.experimental.async_grpo import (  # noqa: E402
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    packing,
)
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample  # noqa: E402

from examples.trl_async_grpo import PROMPTS, Rollouts, main  # noqa: E402
from tensorhub.errors import (  # noqa: E402
    CoordinatorUnavailable,
    InvalidType,
    ManifestMismatch,
    StateError,
    TensorHubError,
)
from tensorhub.integrations.trl import RolloutWeights, WeightTransfer  # noqa: E402

ASKED = sorted(set(" ".join(PROMPTS["prompt"]).split()))
WORDS = ["<pad>", "<eos>", "<unk>", *ASKED, *[f"w{number}" for number in range(20)]]
ON_A_CPU = {
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-2,
    "token_budget": 64,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "dtype": "float32",
    "bf16": False,
    "gradient_checkpointing": False,
    "max_staleness": 100,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    words = Tokenizer(
        WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    monkeypatch.setattr(
        packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attention)
    )


def attention(
    q: Any,
    k: Any,
    v: Any,
    q_starts: Any,
    k_starts: Any,
    *_: Any,
    softmax_scale: Any = None,
    **__: Any,
) -> Any:
    """Causal, over each pair of sequences that end together."""
    found = []
    for i in range(len(q_starts) - 1):
        query, key, value = (
            each[starts[i] : starts[i + 1]].transpose(0, 1)
            for each, starts in ((q, q_starts), (k, k_starts), (v, k_starts))
        )
        mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril(
            key.shape[1] - query.shape[1]
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=softmax_scale
        )
        found.append(out.transpose(0, 1))
    return torch.cat(found)


class Worker(Rollouts):
    """The example's, which remembers what it had of each version, and what went wrong."""

    def __init__(self, path: Path, transfer: WeightTransfer) -> None:
        self.seen: dict[int, float] = {}  # by version: a sum over the policy
        self.told: list[int] = []
        self.error: BaseException | None = None
        super().__init__(str(path), transfer)
        self.update_model_version = self._note  # type: ignore[assignment]

    def _note(self, version: int) -> None:
        self.told.append(version)
        self.weights.update_model_version(version)

    def generate(self, prompt: str, version: int, group: int) -> Iterator[RolloutSample]:
        self.seen[version] = total(self.policy)
        yield from super().generate(prompt, version, group)

    def run(self) -> None:
        try:
            super().run()
        except BaseException as error:
            self.error = error


def total(policy: torch.nn.Module) -> float:
    return sum(each.double().abs().sum().item() for each in policy.parameters())


class Seen(WeightTransfer):
    """Remembers what was sent."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            pause=lambda: self.calls.append("pause"),
            resume=lambda: self.calls.append("resume"),
            **settings,
        )
        self.calls: list[str] = []
        self.sent: list[float] = []

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        total = 0.0

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal total
            for name, tensor in iterator:
                total += tensor.double().abs().sum().item()
                yield name, tensor

        super().send_weights(counted())
        self.calls.append("send")
        self.sent.append(total)


def trainer(path: Path, out: Path, transfer: WeightTransfer, worker: Any) -> AsyncGRPOTrainer:
    arguments = AsyncGRPOConfig(**ON_A_CPU, output_dir=str(out))
    prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": "w0 w1 w2"}]] * 8})
    return AsyncGRPOTrainer(
        str(path),
        args=arguments,
        train_dataset=prompts,
        rollout_worker=worker,
        weight_transfer=transfer,
    )


def test_rollouts_have_the_trainers_weights_after_each_step(model: Path, tmp_path: Path) -> None:
    transfer = Seen()
    worker = Worker(model, transfer)
    trainer(model, tmp_path, transfer, worker).train()
    assert worker.error is None
    assert worker.told == [1, 2, 3, 4]
    assert transfer.calls == ["pause", "send", "resume"] * 4
    assert len(set(transfer.sent)) == 4, "a step has changed nothing"
    assert worker.seen
    assert {version: transfer.sent[version - 1] for version in worker.seen} == worker.seen


def test_the_example_runs(model: Path, tmp_path: Path) -> None:
    rollouts = main(str(model), **ON_A_CPU, output_dir=str(tmp_path))
    assert rollouts.weights.version >= 1


def test_the_example_says_why_training_could_not_begin(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL stops a rollout worker then that was never started."""
    monkeypatch.setenv("TENSORHUB_ADDRESS", "tcp://127.0.0.1:1")
    with pytest.raises(CoordinatorUnavailable, match="is one running there"):
        main(str(model), **ON_A_CPU, output_dir=str(tmp_path))


def test_settings_of_a_rollout_that_are_none(model: Path) -> None:
    policy = AutoModelForCausalLM.from_pretrained(model)
    for wrong, named in (
        (WeightTransfer(), "WeightTransfer"),
        (None, "NoneType"),
        ({"token": "secret"}, r"\['token'\]"),
    ):
        with pytest.raises(
            InvalidType, match=f"WeightTransfer.rollout_settings, .* returned there, not {named}$"
        ):
            RolloutWeights(policy, wrong)  # type: ignore[arg-type]


def test_a_rollout_that_dies_does_not_hold_the_trainer_up(model: Path, tmp_path: Path) -> None:
    """A second reader, in a process of its own, is killed while it holds a version: others may read
    that from it only.
    """

    class Killed(Seen):
        def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
            super().send_weights(iterator)
            if len(self.sent) == 2:
                command = [
                    sys.executable,
                    "-c",
                    CHILD,
                    str(model),
                    json.dumps(self.rollout_settings()),
                ]
                child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                assert child.stdout is not None
                assert child.stdout.readline() == "2\n"
                child.kill()
                child.communicate()

    transfer = Killed()
    worker = Worker(model, transfer)
    trainer(model, tmp_path, transfer, worker).train()
    assert worker.error is None
    assert worker.told == [1, 2, 3, 4]


CHILD = """
import json, sys, time
from transformers import AutoModelForCausalLM
from tensorhub.integrations.trl import RolloutWeights
weights = RolloutWeights(AutoModelForCausalLM.from_pretrained(sys.argv[1]), json.loads(sys.argv[2]))
weights.update_model_version(2)
print(weights.refresh(), flush=True)
time.sleep(600)
"""


def test_a_policy_of_another_shape_and_calls_in_the_wrong_order(model: Path) -> None:
    transfer = WeightTransfer(timeout_s=5.0)
    with pytest.raises(StateError, match="training has not begun"):
        transfer.rollout_settings()
    with pytest.raises(StateError, match="init_weight_transfer"):
        transfer.send_weights(iter(()))
    policy = AutoModelForCausalLM.from_pretrained(model)
    transfer.init_weight_transfer()
    transfer.send_weights(
        (name, each) for name, each in policy.named_parameters() if "norm" not in name
    )
    weights = RolloutWeights(policy, transfer.rollout_settings, timeout_s=5.0)
    weights.update_model_version(1)
    with pytest.raises(ManifestMismatch) as error:
        weights.refresh()
    assert len(error.value.differences) == 5
    transfer.destroy()
    with pytest.raises(TensorHubError):
        weights.refresh()
    weights.close()
