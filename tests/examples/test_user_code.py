"""What an example of a framework asks of its user is short: 40 lines at most, of which docs/frameworks.md shows how many are
there for TensorHub.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.user_code import user_code

REPOSITORY = Path(__file__).parents[2]
LINES_MAX = 40
FRAMEWORKS = {
    "verl": "verl_update",
    "TRL": "trl_async_grpo",
    "vLLM": "vllm_server",
    "SGLang": "sglang_server",
    "Ray": "ray_weights",
}
SAMPLE = '''"""Not counted: tensorhub."""
import torch
from tensorhub import (
    sync,
)

# tensorhub


class Actor:
    """About tensorhub."""

    def __init__(self, address, model):
        self.model = model
        self.weights = sync.connect(address).register(
            "actor", model
        )

    @sync.decorator
    def step(self): return self.model


def main():
    settings = {"backend": "tensorhub"}
    kind = settings["backend"]
    with torch.no_grad(), open(kind):
        loss = torch.zeros(1)
    print(loss)
    Actor("", None).weights.publish(1)
'''
COUNTED = {15, 16, 17, 19, 20, 24, 25, 26, 29}
OTHERS = {10, 13, 14, 23, 27, 28}


def test_lines_that_name_what_is_tensorhubs_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(SAMPLE)
    assert user_code(path) == (sorted(COUNTED), len(COUNTED | OTHERS))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_example_is_short(framework: str) -> None:
    example = f"examples/{FRAMEWORKS[framework]}.py"
    ours, lines = user_code(REPOSITORY / example)
    assert 0 < len(ours) <= lines <= LINES_MAX, ours
    row = f"| [{example}](../{example}) | {len(ours)} | {lines} |"
    assert row in (REPOSITORY / "docs" / "frameworks.md").read_text(), f"docs/frameworks.md: {row}"
