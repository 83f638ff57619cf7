"""What a cluster of processes goes through by whichever transport: a story that several tests tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.processes.crew import Crew, Process


def a_source_is_killed_in_mid_read(
    processes: Crew,
    address: str,
    trainer: Process,
    nbytes: int,
    gate: int | Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
) -> None:
    """Two readers are held by `gate` in the midst of their reads from it; they finish from another, read nothing twice.
    `options`: of the source.
    """
    other = processes.worker(address, "other", nbytes, options=options or {})
    other.do("replicate")
    readers = [processes.worker(address, f"reader{number}", nbytes, gate=gate) for number in range(2)]
    fills = [reader.begin("replicate") for reader in readers]
    for reader in readers:
        reader.do("gate_holds")
    other.kill()
    for reader in readers:
        reader.do("gate_open")
    reports = [fill.result() for fill in fills]
    assert "lost" in [report["sources"].get("other") for report in reports]
    for report, reader in zip(reports, readers, strict=True):
        assert (report["reread_bytes"], report["version"]) == (0, 1)
        assert reader.do("sha") == trainer.do("sha")
