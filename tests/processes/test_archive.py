"""An archive as a holder, among real processes that are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.child_processes import ChildProcesses, Process
from tests.processes.test_failures import MIB, NBYTES, cluster, trainer_with

pytest.importorskip("obstore", reason="the extra archive is not installed")

CHUNKS = NBYTES // MIB
VERSIONS = 3  # that fit into the memory of the archive's worker


def archive_with(processes: ChildProcesses, address: str, url: str) -> Process:
    worker = processes.process("archive")
    worker.do("connect", address=address, name="archive", host_memory_bytes=VERSIONS * NBYTES)
    worker.do("archive", url=url)
    return worker


@pytest.mark.parametrize(
    "percent",
    [pytest.param(5, marks=pytest.mark.slow), 50, pytest.param(95, marks=pytest.mark.slow)],
)
def test_a_reader_whose_last_live_source_is_killed_finishes_from_the_archive(
    processes: ChildProcesses, tmp_path: Path, percent: int
) -> None:
    _, address = cluster(processes, lease_s=3.0)
    trainer = trainer_with(processes, address)
    first = archive_with(processes, address, tmp_path.as_uri())
    assert first.do("archived", at_least=1) == 1
    first.do("close")
    # which needs no host copy of what is archived: its readers' bytes come from the directory
    archive_with(processes, address, tmp_path.as_uri())
    came = CHUNKS * percent // 100
    reader = processes.worker(address, "reader", NBYTES, gate=came)
    fill = reader.begin("replicate")
    reader.do("gate_holds")
    assert reader.do("sources") == ["trainer"]
    sha = trainer.do("sha")
    trainer.kill()
    reader.do("outcome")  # of the read from it; by then nothing more comes from a buffer
    reader.do("gate_open")
    report = fill.result()
    assert (report["version"], report["reread_bytes"]) == (1, 0)
    assert report["bytes"] == {"live": came * MIB, "archive": (CHUNKS - came) * MIB}
    assert reader.do("sha") == sha
