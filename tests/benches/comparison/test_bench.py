"""`tensorhub bench` with real processes: what works, what goes wrong, and that nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from typer.testing import CliRunner

from benches.comparison import process_tree, suite
from benches.comparison.backends import BACKENDS, Backend
from benches.comparison.suite import Plan, Visit
from tensorhub.cli.app import app
from tests.benches.comparison import standin
from tests.cli.processes import alive, eventually, run_here

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[3]


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where stand-ins write whom they have started. Whoever of those is left after a test that
    failed is ended here.
    """
    path = tmp_path / "notes"
    path.touch()
    monkeypatch.setenv("STANDIN_NOTES", str(path))
    given = filter(None, [os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src"), *given]))
    yield path
    process_tree.end(alive([int(line) for line in path.read_text().split()]))


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert left(os.getpid()) == []


def left(pid: int) -> list[Path]:
    """Directories of a suite's."""
    roots = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return [place for root in roots for place in root.glob(f"thb{pid}-*")]


def visits_of(
    *backends: Backend, timeout_s: float = 60.0, directory: Path = Path("/none")
) -> list[Visit]:
    plan = Plan(backends, 1, 1, 4, [1], timeout_s, directory)
    visits: list[Visit] = []
    anyio.run(suite.run, plan, visits.append)
    return visits


def test_a_run(tmp_path: Path, prepared_with_torch: None) -> None:
    results, picture = tmp_path / "results.json", tmp_path / "picture.svg"
    plan = "--mib 4 --rounds 1 --copies 1 --receivers 1 --only bare,tensorhub-tcp".split()
    done = run_here("bench", *plan, "--results", str(results), "--picture", str(picture))
    assert done.returncode == 0, done.stderr
    found = json.loads(results.read_text())
    assert [(row["backend"], row["reason"]) for row in found["rows"]] == [
        ("bare", None),
        ("tensorhub-tcp", None),
    ]
    assert all(
        row["seconds"]["median"] > 0 and row["peak_gib"] > 2 * 4 / 1024 for row in found["rows"]
    )
    assert found["rows"][1]["versions"]["tensorhub"]
    assert found["rows"][1]["offered_s"]["median"] > 0
    assert "TensorHub tcp" in picture.read_text()
    assert "TensorHub tcp" in done.stdout
    names = json.loads(run_here("bench", "--list", "--json").stdout)
    assert "bare" in [each["name"] for each in names]


def test_json_is_the_document_and_nothing_else(prepared_with_torch: None) -> None:
    plan = "--mib 4 --rounds 1 --copies 1 --receivers 1 --only bare --json".split()
    done = run_here("bench", *plan)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["backend"], done.stderr) == ("bare", "")


def test_a_backend_that_delivers_other_bytes_is_found_out(
    notes: Path, prepared_with_torch: None
) -> None:
    (visit,) = visits_of(standin.backend("wrong"))
    assert visit.reason == "receiver 1 got other bytes than the source has, in copy 0"
    assert not visit.copies


PROGRAM = """
import benches.comparison.command as command
from tensorhub.cli import main
from benches.comparison.backends import Kind, Backend
backends = {backend.name: backend for backend in command.BACKENDS}
command.BACKENDS = [backends["bare"], Backend("tests.benches.comparison.standin:hangs", "hangs", Kind.PEER, "")]
main()
"""


def test_ctrl_c_leaves_nothing_but_what_is_known(notes: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        "bench",
        "--mib",
        "4",
        "--receivers",
        "1",
        "--results",
        str(results),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            assert eventually(lambda: len(notes.read_text().split()) >= 2)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
            assert left(process.pid) == []
            bare, hanging = json.loads(results.read_text())["rows"]
            assert bare["seconds"]["median"] > 0
            assert hanging["seconds"] is None
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    started = [int(line) for line in notes.read_text().split()]
    assert eventually(lambda: not alive(started), 5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--only bare,nobody", "there is no backend 'nobody'"),
        ("--skip " + ",".join(backend.name for backend in BACKENDS), "no backend is left"),
        ("--receivers 1,x", "--receivers '1,x'"),
        ("--receivers 0", "--receivers '0'"),
        ("--results /nowhere/file", "/nowhere/file cannot be written"),
    ],
)
def test_what_cannot_be_run_is_refused(given: str, said: str) -> None:
    done = CliRunner().invoke(app, ["bench", *given.split()])
    assert (done.exit_code, said in done.stderr) == (2, True), done.stderr
