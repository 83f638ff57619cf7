"""`--tls-cert`, `--tls-key` and `--tls-ca`: of each command that connects or serves, before it does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tensorhub.cli.app import COMMANDS
from tensorhub.cli.doctor import _tls
from tensorhub.protocol.certificates import TLS
from tests.certificates import issue, usual
from tests.cli.processes import line_with, run, run_here, started


def options(files: TLS) -> list[str]:
    named = [(f"--tls-{name}", str(getattr(files, name))) for name in ("cert", "key", "ca")]
    return [part for pair in named for part in pair]


FILES = options(usual())
WITHOUT = {"demo", "simulate", "doctor", "bench", "token"}


def test_weights_go_from_command_to_command(tmp_path: Path) -> None:
    path, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file({"w": torch.arange(100_000)}, path)
    with started("serve", *FILES) as coordinator:
        address = line_with("tcp://", coordinator.stdout).strip()
        with started(
            "publish", str(path), "--model", "m", "--address", address, *FILES
        ) as publisher:
            line_with("m", publisher.stdout)
            done = run("fetch", "m", "--out", str(out), "--address", address, *FILES)
            assert (done.returncode, done.stderr) == (0, "")
            assert out.read_bytes() == path.read_bytes()
        refused = run("status", "--address", address)
        assert refused.returncode == 1
        assert "set TLS up on both sides or on neither" in refused.stderr


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - WITHOUT))
def test_each_command_has_them(command: str) -> None:
    shown = run_here(command, "--help").stdout
    assert all(f"--tls-{name}" in shown for name in ("cert", "key", "ca"))


def test_files_that_cannot_be_used_are_a_usage_error(tmp_path: Path) -> None:
    before = dict(os.environ)
    some = run_here("status", "--address", "tcp://127.0.0.1:1", *FILES[:2])
    assert some.returncode == 2
    assert "TENSORHUB_TLS_KEY and TENSORHUB_TLS_CA must be set" in some.stderr
    files = issue(tmp_path)
    os.chmod(files.key, 0o644)
    done = run_here("status", "--address", "tcp://127.0.0.1:1", *options(files))
    assert done.returncode == 2
    assert f"the key {files.key} is open to others" in done.stderr
    assert os.environ == before


def test_doctor_says_whether_tls_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _tls() == "off"
    monkeypatch.setenv("TENSORHUB_TLS_CERT", str(usual().cert))
    assert "cannot be used: TENSORHUB_TLS_KEY and TENSORHUB_TLS_CA" in _tls()
    monkeypatch.setenv("TENSORHUB_TLS_KEY", str(usual().key))
    monkeypatch.setenv("TENSORHUB_TLS_CA", str(usual().ca))
    assert _tls() == f"on, with {usual().cert}"
