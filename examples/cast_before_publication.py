"""A trainer keeps fp32 masters, and a rollout wants bf16 with q, k and v fused: the copy is
converted before publication.

    python examples/cast_before_publication.py

The copy has two buffers that take turns. So a publication never waits for who still reads the
version before, and the next optimizer step begins at once: it writes the masters, which nobody
reads. Each report says what that costs: until a buffer was free, to convert, to publish. What a
rollout reads is half of the masters' bytes.

Each version is checked: what the rollout has equals the masters after that step, cast and fused by
hand, to the byte. Needs torch: `pip install 'tensorhub-ros[torch]'`. In an installed
TensorHub this file is `tensorhub._examples.cast_before_publication`.
"""

from collections.abc import Callable

import anyio
import torch
from torch import Tensor, nn

import tensorhub
from tensorhub.api.weights import Weights
from tensorhub.conversion import cast, register_converted

HIDDEN, VERSIONS = 512, 3
BF16 = torch.bfloat16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k = nn.Linear(HIDDEN, HIDDEN // 4, bias=False)
        self.v = nn.Linear(HIDDEN, HIDDEN // 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1)

    def fused(self) -> Tensor:
        """What the rollout shall have."""
        return torch.cat([self.q.weight, self.k.weight, self.v.weight]).detach().to(BF16)


def train_one_step(model: Attention, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(16, HIDDEN)).square().mean().backward()
    optimizer.step()


async def main(say: Callable[[str], object] = print) -> None:
    torch.manual_seed(0)
    masters, engine = Attention(), {"qkv": torch.zeros(HIDDEN * 3 // 2, HIDDEN, dtype=BF16)}
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2)
    sources = {"qkv": [tensorhub.source(f"{name}.weight") for name in "qkv"]}
    async with (
        tensorhub.serve() as coordinator,
        tensorhub.connect(coordinator.address, name="trainer") as trainer,
        tensorhub.connect(coordinator.address, name="rollout") as rollout,
    ):
        copy = await register_converted(trainer, "actor", cast(masters, BF16), group="trainer")
        weights = await rollout.register("actor", engine, sources=sources)
        train_one_step(masters, optimizer)
        for version in range(1, VERSIONS + 1):
            report, expected = await copy.publish(version), masters.fused()
            waited, converted, published = (
                1000 * each for each in (report.reclaim_s, report.convert_s, report.publish_s)
            )
            say(
                f"version {version}: {waited:.1f} ms for a buffer, {converted:.1f} to convert, "
                f"{published:.1f} to publish"
            )
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read, weights, version, say)
                train_one_step(masters, optimizer)  # while that version is read
            assert torch.equal(engine["qkv"], expected)
    say(f"{VERSIONS} versions of fp32 masters were equal in bf16, to the byte")


async def read(weights: Weights, version: int, say: Callable[[str], object]) -> None:
    report = await weights.update(version)
    say(f"  the rollout read {report.bytes_read:,} bytes in {report.cells} cells")


if __name__ == "__main__":
    anyio.run(main)
