"""What a cluster of processes goes through by whichever transport: a story that several tests
tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.processes.child_processes import WAIT_S, ChildProcesses, Failed, Process
from tests.runtime.data_rig import waited_out_s


def until(process: Process, holds: Callable[[Any], bool], what: str = "describe") -> Any:
    """Ask until the answer is such."""
    deadline = time.monotonic() + WAIT_S
    while not holds(answer := process.do(what)):
        assert time.monotonic() < deadline, answer
    return answer


def a_source_is_killed_in_mid_read(
    processes: ChildProcesses,
    address: str,
    trainer: Process,
    nbytes: int,
    gate: int | Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
) -> None:
    """Two readers are held by `gate` in the midst of their reads from it; they finish from another,
    read nothing twice. `options`: of all but the trainer.
    """
    other = processes.worker(address, "other", nbytes, options=options or {})
    other.do("replicate")
    readers = [
        processes.worker(address, f"reader{number}", nbytes, gate=gate, options=options or {})
        for number in range(2)
    ]
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


def memory_is_taken_back_in_mid_read(
    coordinator: Process, trainer: Process, reader: Process, timeout_s: float = 5.0
) -> None:
    """It is not committed, though its reader goes on: with nobody to tell it (its gate heeds no
    cuts, and the coordinator stands still), and no digests (the trainer makes none): the word alone
    is in the way (G1, G2).
    """
    fill = reader.begin("replicate", selector=1, timeout=waited_out_s(timeout_s))
    reader.do("gate_holds")
    coordinator.stop()
    trainer.do("unpublish", timeout=waited_out_s())  # waits for nobody
    trainer.do("write", content=2)
    reader.do("gate_open")
    assert reader.do("outcome") == "refused"
    coordinator.go_on()
    with pytest.raises(Failed) as caught:
        fill.result()
    assert caught.value.kind == "VersionUnavailable"
    assert reader.do("state") == ["torn", None]
