"""TRL's AsyncGRPOTrainer, and a rollout worker that generates with the policy of the newest
version.

    python examples/trl_async_grpo.py MODEL     # the path of a model with its tokenizer, or a name on the Hub

The worker is a thread of the trainer's process here, with a policy of its own. In another process,
or on another machine, it does the same: `transfer.rollout_settings()` is what it has to be told
(for other machines `WeightTransfer(host=...)`).

Needs `pip install trl==1.16.0 'tensorhub-ros[torch]'`, and a GPU for TRL's attention kernel.
"""  # noqa: E501 - lines as they are typed

import itertools
import queue
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from tensorhub.integrations.trl import RolloutWeights, WeightTransfer

PROMPTS = Dataset.from_dict({"prompt": ["The sky is", "Two and two are"]})


class Rollouts:
    """What TRL calls a rollout worker. Its reward is for tokens that differ."""

    def __init__(self, path: str, transfer: WeightTransfer) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.policy, self.tokenizer = (
            AutoModelForCausalLM.from_pretrained(path),
            AutoTokenizer.from_pretrained(path),
        )
        self.weights = RolloutWeights(self.policy, transfer.rollout_settings)
        self.stopped, self.thread = (
            threading.Event(),
            threading.Thread(target=self.run, daemon=True),
        )
        self.start, self.update_model_version = self.thread.start, self.weights.update_model_version

    def run(self) -> None:
        for group in itertools.count():
            for sample in self.generate(
                PROMPTS[group % len(PROMPTS)]["prompt"], self.weights.refresh(), group
            ):
                self.rollout_buffer.put(sample)
            if self.stopped.wait(0.01 * self.rollout_buffer.qsize()):
                break

    @torch.no_grad()
    def generate(self, prompt: str, version: int, group: int) -> Iterator[RolloutSample]:
        given = self.tokenizer(prompt, return_tensors="pt").input_ids
        made = [self.policy.generate(given, do_sample=True, max_new_tokens=8)[0] for _ in range(4)]
        rewards = [len(set(tokens.tolist())) for tokens in made]
        for tokens, reward in zip(made, rewards, strict=True):
            logs = (
                self.policy(tokens[None])
                .logits[0, :-1]
                .log_softmax(-1)
                .gather(1, tokens[1:, None])[:, 0]
            )
            mask, old = (
                np.arange(len(tokens)) >= given.shape[1],
                np.append(0.0, logs.numpy()).astype(np.float32),
            )
            advantage, metrics = reward - sum(rewards) / len(rewards), {"reward": float(reward)}
            yield RolloutSample(
                [],
                [],
                tokens.numpy(),
                mask.astype(int),
                old * mask,
                advantage,
                version,
                group,
                metrics,
            )

    def check_health(self, stale_after_s: float) -> None:
        assert self.thread.is_alive()

    def stop(self) -> None:
        self.stopped.set()
        if self.thread.ident is not None:  # it was started
            self.thread.join()
        self.weights.close()


def main(path: str, **settings: Any) -> Rollouts:
    transfer = WeightTransfer()
    rollouts = Rollouts(path, transfer)
    arguments = AsyncGRPOConfig(**{"max_steps": 20, "token_budget": 4096, **settings})
    AsyncGRPOTrainer(
        path, None, arguments, PROMPTS, rollout_worker=rollouts, weight_transfer=transfer
    ).train()
    return rollouts


if __name__ == "__main__":
    main(sys.argv[1])
