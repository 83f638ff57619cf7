"""`tensorhub fetch`, as a process: files to the byte, or nothing at all."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.encoder import model_path
from tensorhub import sync
from tensorhub.cli.fetch import _tell
from tensorhub.types import DeltaUse, FetchReport, SourceReport, VersionInfo
from tests.cli.processes import WAIT_S, line_with, run, run_here, started
from tests.cli.test_publish import OPTIONS, published, zeros_like
from tests.memory.test_files import listing, sharded, some


def fetch(address: str, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run("fetch", "m", "--out", str(out), "--address", address, *options)


def refused(address: str, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run_here("fetch", "m", "--out", str(out), "--address", address, *options)


@contextlib.contextmanager
def trainer(address: str, tensors: dict[str, torch.Tensor]) -> Iterator[sync.Weights]:
    """Tensors that are published from this process, not from files."""
    with sync.connect(address, options=OPTIONS) as hub:
        weights = hub.register("m", tensors)
        weights.publish(1)
        yield weights


def end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 0


def test_what_other_memory_than_a_trainers_brought_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    info = VersionInfo("m", 3, "c", 3000, 1)
    live = SourceReport("a", "tcp", 1000, 1.0, "used", deltas=DeltaUse.NO_BASE)
    seed = SourceReport("b", "tcp", 2000, 1.0, "used", kind="seed")
    report = FetchReport(3, True, 3000, 1.0, {"resolve": 1.0}, (live, seed))
    _tell(info, report, (Path("out"),), 0.5, as_json=False)
    assert capsys.readouterr().out == (
        "fetched m version 3: 3,000 bytes (live 1,000, seed 2,000) in 1.500 s into out\n"
    )
    _tell(info, report, (Path("out"),), 0.5, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["bytes_by_kind"] == {"live": 1000, "seed": 2000}
    assert (said["bytes_saved"], said["changed_words"], said["codec_s"]) == (0, None, 0)
    assert [(each["name"], each["deltas"]) for each in said["sources"]] == [
        ("a", "no base"),
        ("b", "undecided"),
    ]


@pytest.mark.heavy
def test_a_real_model_after_its_publisher_has_gone(address: str, tmp_path: Path) -> None:
    """A file, published, in three replicas, whose publisher then ends, comes back to the byte."""
    path = model_path()
    with contextlib.ExitStack() as stack:
        with published(path, address) as (process, said):
            for _ in range(3):
                hub = stack.enter_context(sync.connect(address, options=OPTIONS))
                hub.register("m", zeros_like(path)).replicate()
            end(process)
        done = fetch(address, tmp_path / "out.safetensors", "--json")
        assert (done.returncode, done.stderr) == (0, "")
        told = json.loads(done.stdout)
        assert told["files"] == [str(tmp_path / "out.safetensors")]
        assert {key: told[key] for key in ("model", "version", "content_id", "bytes")} == {
            key: said[key] for key in ("model", "version", "content_id", "bytes")
        }
        assert told["seconds"] == pytest.approx(sum(told["phases"].values()), abs=0.5)
        assert (tmp_path / "out.safetensors").read_bytes() == path.read_bytes()
        done = fetch(address, tmp_path / "out")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"fetched m version 0: {said['bytes']:,} bytes in ")
        assert done.stdout.endswith(f" into {tmp_path / 'out' / path.name}\n")
        assert listing(tmp_path / "out") == {path.name: path.read_bytes()}


def test_a_sharded_model(address: str, tmp_path: Path) -> None:
    tensors = some()
    index = sharded(
        tmp_path / "in",
        {"one.safetensors": {"mask": tensors.pop("mask")}, "two.safetensors": tensors},
    )
    with published(index, address):
        assert fetch(address, tmp_path / "out").returncode == 0
        assert listing(tmp_path / "out") == listing(tmp_path / "in")
        assert fetch(address, tmp_path / "one.safetensors").returncode == 0
        save_file(some(), tmp_path / "theirs", metadata={"format": "pt"})
        assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()
        done = fetch(
            address, tmp_path / "some", "--names", "layers.0.*", "--names", "mask", "--json"
        )
        assert json.loads(done.stdout)["bytes"] == 40 * 70 * 4 + 2
        assert {
            name
            for file in ("one.safetensors", "two.safetensors")
            for name in load_file(tmp_path / "some" / file)
        } == {
            "layers.0.w",
            "mask",
        }


def test_a_trainers_tensors(address: str, tmp_path: Path) -> None:
    tied = torch.arange(6.0)
    with trainer(address, {"a": tied, "b": tied, "c": torch.ones(2, dtype=torch.complex128)}):
        done = fetch(address, tmp_path / "out")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("error: ManifestMismatch: ")
        assert "'c' is complex128" in done.stderr
        assert fetch(address, tmp_path / "out", "--names", "[ab]").returncode == 0
        assert load_file(tmp_path / "out" / "model.safetensors")["b"].equal(tied)
        assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~umask()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_selectors(address: str, tmp_path: Path) -> None:
    with trainer(address, {"a": torch.ones(3)}) as weights:
        assert fetch(address, tmp_path / "1", "--version", "1").returncode == 0
        done = refused(address, tmp_path / "9", "--version", "9")
        assert done.stderr.startswith("error: VersionUnavailable: ")
        assert done.returncode == 1
        done = refused(address, tmp_path / "9", "--rank", "3")
        assert done.stderr.startswith("error: ManifestMismatch: ")
        weights.unpublish()
        done = refused(address, tmp_path / "9", "--timeout", "0.2")
        assert done.returncode == 1
    done = run_here(
        "fetch", "unknown", "--out", str(tmp_path / "9"), "--address", address, "--timeout", "0.2"
    )
    assert done.returncode == 1
    assert os.listdir(tmp_path) == ["1"]


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (
            ("--names", "none*"),
            1,
            "error: ManifestMismatch: names: no tensor is called 'none*'; there are 'a'",
        ),
        (("--version", "soon"), 2, "error: usage: --version: 'soon' is not a version selector"),
        (("--version", "9" * 5000), 2, "error: usage: --version: "),
        (("--version", "-1"), 2, "error: usage: --version: "),
        (("--rank", "-1"), 2, "--rank"),
    ],
)
def test_what_cannot_be_fetched(
    address: str, tmp_path: Path, options: Sequence[str], code: int, text: str
) -> None:
    with trainer(address, {"a": torch.ones(3)}):
        done = refused(address, tmp_path / "out", *options)
    assert (done.returncode, done.stdout) == (code, "")
    assert text in done.stderr
    assert os.listdir(tmp_path) == []


def test_outputs_that_exist_are_refused_before_anything(tmp_path: Path) -> None:
    """Nobody is there to be asked: the answer does not wait for one."""
    (tmp_path / "out.safetensors").write_text("old")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    for out, text in (
        (
            "out.safetensors",
            "out.safetensors exists: take another place, or replace what is there (--force)",
        ),
        ("out", "out exists and is not empty: take another place"),
        ("none/out", "none: No such file or directory"),
    ):
        done = refused("tcp://127.0.0.1:1", tmp_path / out)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: usage: ")
        assert text in done.stderr
    done = refused("tcp://127.0.0.1:1", tmp_path / "new", "--timeout", "0")
    assert done.stderr.startswith("error: CoordinatorUnavailable: ")
    assert set(listing(tmp_path)) == {"out.safetensors", "out/old"}
    assert len(os.listdir(tmp_path)) == 2


def test_force_replaces(address: str, tmp_path: Path) -> None:
    path = tmp_path / "in.safetensors"
    save_file(some(), path)
    (tmp_path / "out.safetensors").write_text("old")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    (tmp_path / "out" / path.name).write_text("old")
    with published(path, address):
        assert fetch(address, tmp_path / "out.safetensors", "--force").returncode == 0
        assert fetch(address, tmp_path / "out", "--force").returncode == 0
    assert (tmp_path / "out.safetensors").read_bytes() == path.read_bytes()
    assert listing(tmp_path / "out") == {"old": b"old", path.name: path.read_bytes()}


def test_a_name_that_nobody_knows(address: str, tmp_path: Path) -> None:
    """It may be mistyped, or early: what the command waits for is said at once, and not after a
    minute.
    """
    done = run(
        "fetch", "acctor", "--out", str(tmp_path / "new"), "--address", address, "--timeout", "0.2"
    )
    waiting, error = done.stderr.splitlines()
    assert (
        waiting
        == "waiting 0.2 s at most: nothing is published as 'acctor' yet (is the name right?)"
    )
    assert error.startswith("error: VersionUnavailable: ")
    with started(
        "fetch", "acctor", "--out", str(tmp_path / "new"), "--address", address, "--timeout", "inf"
    ) as process:
        assert "waiting until it is: nothing is published as 'acctor' yet" in line_with(
            "waiting", process.stderr
        )
    with started("seed", "acctor", "--host-memory", "1MB", "--address", address) as process:
        assert "waiting until it is: nothing is published as 'acctor' yet" in line_with(
            "waiting", process.stderr
        )
