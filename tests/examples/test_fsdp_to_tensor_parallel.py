"""The example with real FSDP2: six processes, three optimizer steps, each checked to the byte."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_tensor_parallel_rollout_has_what_fsdp_has_trained() -> None:
    script = ROOT / "examples" / "fsdp_to_tensor_parallel.py"
    done = subprocess.run(
        [sys.executable, script],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "3 versions of 4 trainer ranks were equal on 2 rollout ranks, to the byte" in done.stdout
