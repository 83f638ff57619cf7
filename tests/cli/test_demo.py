"""`tensorhub demo`, as real processes, with weights small enough for a test."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.processes import WAIT_S, alive, children, eventually, line_with, run_here, started

pytestmark = pytest.mark.heavy


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "tiny.safetensors"
    tensors = {f"layer.{number}": torch.randn(64, 16 + number) for number in range(8)}
    save_file(tensors | {"bias": torch.randn(16), "steps": torch.arange(3)}, path)
    return path


@pytest.mark.parametrize("content", [None, b"not tensors at all", b"\2\0\0\0\0\0\0\0{}"])
def test_weights_that_are_none(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "bad.bin"
    if content is not None:
        path.write_bytes(content)
    done = run_here("demo", "--weights", str(path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: usage: --weights")
    assert str(path) in done.stderr


def secret_of(pid: int) -> str:
    """A child has the demo's from its environment, which only its user may read."""
    environ = Path(f"/proc/{pid}/environ")
    assert environ.stat().st_mode & 0o077 == 0
    variables = dict(
        entry.split("=", 1) for entry in environ.read_text().split("\0") if "=" in entry
    )
    assert len(variables["TENSORHUB_TOKEN"]) > 20
    return variables["TENSORHUB_TOKEN"]


@pytest.mark.usefixtures("prepared_with_torch")
def test_every_rollout_gets_the_trainers_bytes(weights: Path) -> None:
    done = run_here(
        "demo", "--weights", str(weights), "--versions", "2", "--rollouts", "2", "--json"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["ok"], result["problems"], result["tensors"]) == (True, [], 10)
    digests = {version["version"]: version["digest"] for version in result["versions"]}
    assert (list(digests), len({*digests.values()})) == ([1, 2], 2)
    names = [(fetch["version"], fetch["worker"]) for fetch in result["fetches"]]
    assert names == [(version, f"rollout-{number}") for version in (1, 2) for number in (1, 2)]
    for fetch in result["fetches"]:
        assert (fetch["digest"], fetch["same_output"]) == (digests[fetch["version"]], True)
        assert fetch["bytes_read"] >= result["bytes"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_the_processes_start(
    weights: Path, number: signal.Signals, code: int
) -> None:
    with started("demo", "--weights", str(weights), "--versions", "10000") as demo:
        assert eventually(lambda: bool(children(demo.pid)))
        pids = children(demo.pid)
        demo.send_signal(number)
        _, err = demo.communicate(timeout=WAIT_S)
        assert "Traceback" not in err
        assert demo.returncode == code
        assert eventually(lambda: not alive(pids))


def test_a_rollout_that_dies_is_named(weights: Path) -> None:
    with started(
        "demo", "--weights", str(weights), "--rollouts", "1", "--versions", "10000"
    ) as demo:
        line_with("rollout-1: version 1", demo.stderr)
        pids = children(demo.pid)
        assert not any(
            secret_of(pids[0]) in Path(f"/proc/{pid}/cmdline").read_text()
            for pid in (demo.pid, *pids)
        )
        rollout = next(
            pid for pid in pids if "rollout-1" in Path(f"/proc/{pid}/cmdline").read_text()
        )
        subprocess.run(["kill", "-9", str(rollout)], check=True)
        _, err = demo.communicate(timeout=WAIT_S)
        assert demo.returncode == 1
        assert (
            err.splitlines()[-1]
            == "error: DemoFailed: rollout-1 ended with exit code -9: it left no message"
        )
        assert alive(pids) == []
