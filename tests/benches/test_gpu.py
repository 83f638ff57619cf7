"""The GPU benchmarks without a GPU: that they say so, and that their processes do what they are told (in host memory)."""

from __future__ import annotations

import sys
from argparse import Namespace

import pytest

from benches import gpu
from benches.gpu_processes import publisher_main, reader_main
from benches.remotes import Remote


def test_a_step_that_fails_or_hangs_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    figures: list[dict[str, object]] = []
    for program, limit_s, outcome in (
        ("import signal; signal.pause()", 1.0, "FAILED: not done after 1 s"),
        ("raise SystemExit(3)", 60.0, "FAILED: exit status 3"),
        ("from benches.gpu import tell; tell('speed', 2.5, 'TB/s', 1.5, 'quiet')", 60.0, "passed"),
    ):
        monkeypatch.setattr(gpu, "_command", lambda step, options, program=program: [sys.executable, "-c", program])
        assert gpu._run("ipc", Namespace(), limit_s, figures) == outcome
    assert [figure["value"] for figure in figures] == [2.5]
    assert "speed: 2.5 TB/s  (bar 1.5: reached)  quiet" in capsys.readouterr().out


@pytest.mark.slow  # three interpreters that import torch
def test_its_processes_copy_and_count() -> None:
    publisher = Remote("publisher", publisher_main, 2**22, 2**21, "cpu")
    started = [publisher]
    try:
        address, sizes = publisher.hear()
        assert list(sizes.values()) == [2**21, 2**21]
        reader = Remote("reader", reader_main, address, 2**22, 2**21, "cpu", ("tcp",))
        started.append(reader)
        reader.hear()
        for version, model in ((1, "digested"), (2, "plain")):
            publisher.ask("publish", version)
            report = reader.ask("fetch", model, version)
            assert report["transports"] == ["tcp"]
            assert 0 < report["stall"] <= report["seconds"]
            assert reader.ask("sum") == publisher.ask("sum") > 0
            reader.ask("unpublish", model)
            reader.ask("clear")
            assert publisher.ask("unpublish") > 0
    finally:
        for remote in reversed(started):
            remote.end()
