"""The README's own program, word by word: whatever the trainer does meanwhile, no rollout fails or
gets a torn version.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import tensorhub
from tests.rig import until

ROOT = Path(__file__).parents[1]
ROLLOUTS = 4
VERSIONS = 5


def program() -> dict[str, Any]:
    """What `loop.py` of the README defines."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (text,) = [block for block in blocks if "anyio.run(" in block]
    found: dict[str, Any] = {"__name__": "readme"}
    exec(compile(text, "README.md", "exec"), found)
    return found


def digest(model: torch.nn.Module) -> bytes:
    found = blake2b()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().data)
    return found.digest()


@pytest.mark.parametrize(
    "seconds", [0, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
async def test_rollouts_of_a_fast_trainer_neither_fail_nor_get_torn_versions(
    seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For so many seconds, and for some versions at least."""
    readme = program()
    policy, published, generated = torch.nn.Linear(1024, 1024), set[bytes](), 0

    async def generate(engine: Any) -> None:
        nonlocal generated
        generated += 1
        assert digest(engine.model) in published
        await anyio.lowlevel.checkpoint()

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            published.add(digest(policy))

    monkeypatch.setattr(torch.optim, "SGD", Optimizer)
    monkeypatch.setattr(readme["Engine"], "generate", generate)
    async with tensorhub.serve() as coordinator, anyio.create_task_group() as tasks:
        tasks.start_soon(readme["trainer"], coordinator.address, policy, 0.02)
        for number in range(ROLLOUTS):
            engine = readme["Engine"](pause_s=0)
            tasks.start_soon(readme["rollout"], coordinator.address, f"rollout-{number}", engine)
        await anyio.sleep(seconds)
        await until(lambda: len(published) > VERSIONS and generated > ROLLOUTS * VERSIONS)
        tasks.cancel_scope.cancel()


async def test_all_go_on_with_a_coordinator_that_has_lost_its_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readme, served = program(), dict[Any, float]()

    async def generate(engine: Any) -> None:
        served[engine] = float(engine.model.bias.detach()[0])
        await anyio.sleep(0.01)

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                policy.bias.add_(1)

    policy = torch.nn.Linear(1024, 1024)
    torch.nn.init.zeros_(policy.bias)
    monkeypatch.setattr(torch.optim, "SGD", Optimizer)
    monkeypatch.setattr(readme["Engine"], "generate", generate)
    async with anyio.create_task_group() as tasks:
        async with tensorhub.serve() as first:
            tasks.start_soon(readme["trainer"], first.address, policy, 0.02)
            for name in ("one", "other"):
                tasks.start_soon(readme["rollout"], first.address, name, readme["Engine"](0))
            await until(lambda: len(served) == 2 and min(served.values()) > VERSIONS)
        port = int(first.address.rpartition(":")[2])
        async with tensorhub.serve(port=port):
            newest = float(policy.bias.detach()[0])
            await until(lambda: min(served.values()) > newest + VERSIONS)
            tasks.cancel_scope.cancel()
