"""`tensorhub publish`, as a process: what it serves is the file, and a file that changes ends it
and nobody else.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tensorhub import sync
from tensorhub.errors import TensorHubError
from tensorhub.types import Options
from tests.cli.processes import WAIT_S, eventually, line_with, run_here, started
from tests.rig import gated
from tests.runtime.data_rig import waited_out_s

OPTIONS = Options(op_timeout_s=WAIT_S)


@contextlib.contextmanager
def published(
    path: Path, address: str, *options: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, object]]]:
    """A publisher whose version is visible, and what it said."""
    with started(
        "publish", str(path), "--model", "m", "--address", address, "--json", *options
    ) as process:
        yield process, json.loads(line_with("{", process.stdout))


def zeros_like(path: Path) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in load_file(path).items()}


def large(path: Path, megabytes: int = 96) -> Path:
    save_file(
        {
            f"t{n}": torch.randint(0, 256, (4, 2**20), dtype=torch.uint8)
            for n in range(megabytes // 4)
        },
        path,
    )
    return path


def test_the_next_number(address: str, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(3)}, path)
    for number, options in ((0, ()), (1, ()), (7, ("--version", "7")), (8, ())):
        with published(path, address, *options) as (process, said):
            assert said["version"] == number
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 130
    done = run_here("publish", str(path), "--model", "m", "--address", address, "--version", "8")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: VersionConflict: 8 is not above 8")
    assert "leave --version out, or give 9 or more. No command goes back: a Python" in done.stderr


def test_what_it_says(address: str, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(3)}, path)
    with started("publish", str(tmp_path), "-m", "m", "--address", address) as process:
        assert (
            line_with("", process.stdout) == "published m version 0 (12 bytes, 1 tensors, 1 file)\n"
        )
        assert line_with("Ctrl-C stops it", process.stderr)
    with started("publish", str(path), "-m", "m", "--address", address, "--quiet") as process:
        assert line_with("", process.stdout)
        process.terminate()
        assert process.communicate(timeout=WAIT_S) == ("", "")
        assert process.returncode == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "none.safetensors",
            "none.safetensors: No such file or directory; give a safetensors file or a directory",
        ),
        ("garbage.safetensors", "garbage.safetensors is not a safetensors file: "),
        ("empty", "empty has no *.safetensors and no *.index.json"),
        ("escaping.index.json", "it names '../../x': only a plain file name"),
        ("missing.index.json", "names files that are not there: b.safetensors"),
    ],
)
def test_what_cannot_be_published(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "garbage.safetensors").write_bytes(os.urandom(1000))
    (tmp_path / "empty").mkdir()
    (tmp_path / "escaping.index.json").write_text('{"weight_map": {"a": "../../x"}}')
    (tmp_path / "missing.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    done = run_here(
        "publish", str(tmp_path / name), "--model", "m", "--address", "tcp://127.0.0.1:1"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: usage: ")
    assert done.stderr.count("\n") == 1
    assert text in done.stderr


def test_a_version_that_the_coordinator_forgets(tmp_path: Path) -> None:
    """Without its state, it knows nothing that was published before: nobody is left to serve
    for.
    """
    save_file({"a": torch.zeros(3)}, tmp_path / "m.safetensors")
    with started("serve", "--quiet") as coordinator:
        address = line_with("tcp://", coordinator.stdout).strip()
        with published(tmp_path / "m.safetensors", address) as (process, _):
            coordinator.kill()
            coordinator.wait(WAIT_S)
            with started("serve", "--quiet", "--port", address.rpartition(":")[2]) as again:
                assert line_with(address, again.stdout)
                out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (1, "")
    assert "error: VersionUnavailable: the coordinator knows this version of 'm' no more" in err


# ---------------------------------------------------------------------------------------------
# files that are written


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-(2**22), os.SEEK_END)
        file.write(b"other bytes!" * (2**18))


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 2**20), overwrite])
def test_a_file_that_is_written_while_it_is_read(
    address: str, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """Readers in the middle fail, and get no other bytes; the publisher says why and ends, by no
    signal.
    """
    path = large(tmp_path / "m.safetensors")
    with (
        published(path, address) as (process, _),
        gated(2) as gate,
        sync.connect(address, options=OPTIONS) as hub,
    ):
        weights = hub.register("m", zeros_like(path))
        with ThreadPoolExecutor() as threads:
            reading = threads.submit(weights.replicate, timeout=waited_out_s(4))
            assert eventually(lambda: gate.holds)
            change(path)
            gate.open()
            out, err = process.communicate(timeout=WAIT_S)
            assert (process.returncode, out) == (1, "")
            assert err.splitlines()[-1].startswith(
                f"error: MutabilityViolation: {path} was written "
            )
            with pytest.raises(TensorHubError):
                reading.result(timeout=WAIT_S)
        assert weights.state == "torn"
