"""`tensorhub demo`, as real processes, with weights small enough for a test."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.processes import WAIT_S, alive, children, eventually, line_with, run_here, started

ENDLESS = ("--versions", "10000")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "tiny.safetensors"
    tensors = {f"layer.{number}": torch.randn(64, 16 + number) for number in range(8)}
    save_file(tensors | {"bias": torch.randn(16), "steps": torch.arange(3)}, path)
    return path


@pytest.mark.parametrize("content", [None, b"", b"not tensors at all", b"\2\0\0\0\0\0\0\0{}"])
def test_weights_that_are_none(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "bad.bin"
    if content is not None:
        path.write_bytes(content)
    done = run_here("demo", "--weights", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: usage: --weights")
    assert str(path) in done.stderr
    assert done.stderr.count("\n") == 1


def secret_of(pid: int) -> str:
    """A child has the demo's from its environment, which only its user may read."""
    environ = Path(f"/proc/{pid}/environ")
    assert environ.stat().st_mode & 0o077 == 0
    variables = dict(entry.split("=", 1) for entry in environ.read_text().split("\0") if "=" in entry)
    assert len(variables["TENSORHUB_TOKEN"]) > 20
    return variables["TENSORHUB_TOKEN"]


class TestRun:
    @pytest.fixture(autouse=True)
    def _needs_the_engine(self) -> None:
        pytest.importorskip("tensorhub.api.hub", exc_type=ImportError)

    @pytest.mark.parametrize("pace", ["wait", pytest.param("free", marks=pytest.mark.slow)])
    @pytest.mark.usefixtures("prepared_with_torch")
    def test_every_rollout_gets_the_trainers_bytes(self, weights: Path, pace: str) -> None:
        options = ("--versions", "2", "--rollouts", "2", "--pace", pace, "--json")
        done = run_here("demo", "--weights", str(weights), *options)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert (result["ok"], result["problems"], result["tensors"]) == (True, [], 10)
        assert [version["version"] for version in result["versions"]] == [1, 2]
        assert len({version["sha256"] for version in result["versions"]}) == 2
        last = result["versions"][-1]
        assert [worker["worker"] for worker in last["workers"]] == ["rollout-1", "rollout-2"]
        for version in result["versions"]:
            assert len(version["workers"]) + len(version["skipped_by"]) == 2
            assert pace == "free" or version["skipped_by"] == []
            for worker in version["workers"]:
                assert worker["sha256"] == version["sha256"]
                assert worker["same_output"]
                assert worker["bytes_read"] >= result["bytes"]
        assert {read["reader"] for read in result["reads"]} == {"rollout-1", "rollout-2"}

    @pytest.mark.usefixtures("prepared_with_torch")
    def test_tables(self, weights: Path) -> None:
        done = run_here("demo", "--weights", str(weights), "--versions", "1", "--rollouts", "1", "--pace", "free")
        assert done.returncode == 0, done.stderr
        assert "who read from whom" in done.stdout
        assert "every byte and every output equal" in " ".join(done.stdout.split())
        assert "rollout-1: version 1 in " in done.stderr

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_a_signal_while_the_processes_start(self, weights: Path, number: signal.Signals, code: int) -> None:
        with started("demo", "--weights", str(weights), *ENDLESS) as demo:
            assert eventually(lambda: bool(children(demo.pid)))
            pids = children(demo.pid)
            demo.send_signal(number)
            _, err = demo.communicate(timeout=WAIT_S)
            assert "Traceback" not in err
            assert demo.returncode == code
            assert eventually(lambda: not alive(pids))

    def test_a_rollout_that_dies_is_named(self, weights: Path) -> None:
        with started("demo", "--weights", str(weights), "--rollouts", "1", *ENDLESS) as demo:
            line_with("rollout-1: version 1", demo.stderr)
            pids = children(demo.pid)
            assert not any(secret_of(pids[0]) in Path(f"/proc/{pid}/cmdline").read_text() for pid in (demo.pid, *pids))
            rollout = next(pid for pid in pids if "rollout-1" in Path(f"/proc/{pid}/cmdline").read_text())
            subprocess.run(["kill", "-9", str(rollout)], check=True)
            _, err = demo.communicate(timeout=WAIT_S)
            assert demo.returncode == 1
            assert err.splitlines()[-1] == "error: DemoFailed: rollout-1 ended with exit code -9: it left no message"
            assert alive(pids) == []
