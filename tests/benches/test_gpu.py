"""The GPU benchmarks without a GPU: that they say so, and that their processes do what they are
told (in host memory).
"""

from __future__ import annotations

import sys
from argparse import Namespace

import pytest

from benches import gpu


def test_a_step_that_fails_or_hangs_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures: list[dict[str, object]] = []
    for program, limit_s, outcome in (
        ("import signal; signal.pause()", 1.0, "FAILED: not done after 1 s"),
        ("raise SystemExit(3)", 60.0, "FAILED: exit status 3"),
        ("from benches.gpu import tell; tell('speed', 2.5, 'TB/s', 1.5, 'quiet')", 60.0, "passed"),
    ):
        monkeypatch.setattr(
            gpu, "_command", lambda step, options, program=program: [sys.executable, "-c", program]
        )
        assert gpu._run("ipc", Namespace(), limit_s, figures) == outcome
    assert [figure["value"] for figure in figures] == [2.5]
    assert "speed: 2.5 TB/s  (bar 1.5: reached)  quiet" in capsys.readouterr().out
