"""What examples/async_grpo.py and examples/async_grpo_sync.py learn: a task, a policy, and GRPO's
loss. Nothing in here knows TensorHub.

The task: sort four digits. The reward is the share of digits in the right place, which can be
verified; guessing gets 0.1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DIGITS, LENGTH = 10, 4
SORT = DIGITS  # the token between the question and the answer
ANSWERS = 8  # to one question: a group of GRPO
QUESTIONS = 16  # in a batch of one rollout
CLIP = 0.2

# --------------------------------------------------------------------------------------------------
# the policy


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.before_attention(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        made: Tensor = x + self.down(F.gelu(self.up(self.before_mlp(x))))
        return made


class Policy(nn.Module):
    """A transformer of 100,000 parameters."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(DIGITS + 1, width), nn.Embedding(2 * LENGTH, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, DIGITS)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logarithms of the next digits' probabilities, after each token."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        made: Tensor = self.head(self.norm(self.blocks(x))).log_softmax(-1)
        return made


# --------------------------------------------------------------------------------------------------
# samples


@dataclass
class Group:
    """One question, and the answers to it that one version of the weights gave."""

    tokens: list[list[int]]
    logprobs: list[list[float]]  # of the answers' digits, by the weights that gave them
    stamp: str  # of these weights


@torch.no_grad()
def generate(policy: Policy, stamp: str) -> list[Group]:
    asked = torch.randint(DIGITS, (QUESTIONS, LENGTH)).repeat_interleave(ANSWERS, 0)
    tokens = torch.cat([asked, torch.full((len(asked), 1), SORT)], 1)
    chances = []
    for _ in range(LENGTH):
        logs = policy(tokens)[:, -1]
        digit = torch.multinomial(logs.exp(), 1)
        chances.append(logs.gather(1, digit))
        tokens = torch.cat([tokens, digit], 1)
    answers = tokens.view(QUESTIONS, ANSWERS, -1).tolist()
    logprobs = torch.cat(chances, 1).view(QUESTIONS, ANSWERS, -1).tolist()
    return [Group(*each, stamp) for each in zip(answers, logprobs, strict=True)]


def rewards(tokens: Tensor) -> Tensor:
    """Of each answer the share of digits in their place."""
    return (tokens[:, -LENGTH:] == tokens[:, :LENGTH].sort(1).values).float().mean(1)


def learn(policy: Policy, groups: list[Group]) -> float:
    """Put the gradient of GRPO's loss into the policy; returns the mean reward."""
    tokens = torch.tensor([answer for group in groups for answer in group.tokens])
    before = torch.tensor([logs for group in groups for logs in group.logprobs])
    reward = rewards(tokens)
    of_group = reward.view(-1, ANSWERS)
    spread = of_group.std(1, keepdim=True) + 1e-4
    advantage = ((of_group - of_group.mean(1, keepdim=True)) / spread).view(-1, 1)
    now = policy(tokens[:, :-1])[:, LENGTH:].gather(2, tokens[:, -LENGTH:, None])[..., 0]
    ratio = (now - before).exp()  # the samples are of an older version
    gained = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    policy.zero_grad()
    torch.autograd.backward(-gained.mean())
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    return reward.mean().item()
