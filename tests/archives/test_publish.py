"""`tensorhub publish` of a URL: served from memory, to the byte what is in the bucket."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from secrets import token_hex

import pytest
import torch
from safetensors.torch import save

from tensorhub import sync
from tensorhub.archives.store import Store
from tests.archives.servers import S3
from tests.archives.test_checkpoints import model, put, use
from tests.cli.processes import WAIT_S, line_with, run, run_here, started

pytestmark = pytest.mark.usefixtures("prepared")


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "file":
        (tmp_path / "bucket").mkdir()
        return f"file://{tmp_path}/bucket"
    server: S3 = request.getfixturevalue("s3")
    use(server, monkeypatch)
    return f"{server.url}/{token_hex(4)}"


def test_what_is_published_is_what_is_in_the_bucket(url: str, tmp_path: Path) -> None:
    files = model(tmp_path / "model")
    put(url, files)
    out = tmp_path / "out"
    with sync.serve(token="") as coordinator:
        at = ("--address", coordinator.address)
        with started("publish", url, "-m", "m", *at, "--json") as process:
            said = json.loads(line_with("{", process.stdout))
            assert said["files"] == [f"{url}/part-{n}.safetensors" for n in (0, 1)]
            assert (said["version"], said["tensors"]) == (0, 5)
            Store(url).delete(files)  # nothing of it is needed any more
            done = run("fetch", "m", "--out", str(out), *at, "--quiet")
            assert done.returncode == 0, done.stderr
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
        done = run_here("publish", url, "-m", "m", *at, "--version", "0", "--quiet")
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        assert f"there is nothing in {url}: correct the URL" in done.stderr
    del files["config.json"]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files


def test_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(save({"a": torch.zeros(3)}))
    url = f"file://{tmp_path}/m.safetensors"
    with (
        sync.serve(token="") as coordinator,
        started("publish", url, "-m", "m", "--address", coordinator.address) as process,
    ):
        assert "published m version 0 (12 bytes, 1 tensors, 1 file)" in line_with(
            "", process.stdout
        )
        assert line_with(f"reading 64 B of {url} into memory", process.stderr)
        assert line_with("serving it from memory; Ctrl-C stops it", process.stderr)


def test_a_used_number_and_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.safetensors").write_bytes(save({"a": torch.zeros(3)}))
    arguments = ("publish", f"file://{tmp_path}", "-m", "m", "--address")
    with sync.serve(token="") as coordinator, sync.connect(coordinator.address) as hub:
        hub.register("m", {"a": torch.zeros(3)}).publish(4)
        done = run_here(*arguments, coordinator.address, "--version", "3")
        assert (done.returncode, done.stdout) == (1, "")
        assert "error: VersionConflict: 3 is not above 4" in done.stderr
    monkeypatch.setattr("tensorhub.transport.segments.available_bytes", lambda: 10)
    done = run_here(*arguments, "tcp://127.0.0.1:1")
    assert done.returncode == 1
    assert "StateError: 64 bytes of shared memory cannot be had: 10 are" in done.stderr


@pytest.mark.parametrize(
    ("path", "code", "says"),
    [
        ("garbage.safetensors", 2, "error: usage: file://{}/garbage.safetensors is not a safeten"),
        ("gone.safetensors", 1, "error: ArchiveUnavailable: file://{}/gone.safetensors is not th"),
        ("gone", 1, "error: ArchiveUnavailable: file://{}/gone is no directory"),
        ("?token=hunter2", 2, "error: usage: the URL of an archive has no user, query or fragment"),
    ],
)
def test_what_cannot_be_published(tmp_path: Path, path: str, code: int, says: str) -> None:
    (tmp_path / "garbage.safetensors").write_bytes(bytes(1000))
    done = run_here(
        "publish", f"file://{tmp_path}/{path}", "--model", "m", "--address", "tcp://127.0.0.1:1"
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(says.format(tmp_path))
    assert done.stderr.count("\n") == 1
    assert "hunter2" not in done.stderr
