"""systemd takes the units, and finds little that a compromised process of theirs could reach."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.render import DEPLOY
from tensorhub.runtime.sigterm import LEAVE_S
from tests.cli.processes import WAIT_S, run_here

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
EXPOSURE_MAX = 30  # of systemd's own score, 0 to 100; a service without any setting has 96


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = unit.read_text(encoding="utf-8")
    copy = tmp_path / unit.name.replace("@", "@actor")
    copy.write_text(text.replace("/opt/tensorhub/bin/tensorhub", "/bin/true"), encoding="utf-8")
    for words in (
        ("verify", "--man=no", "--recursive-errors=no"),
        ("security", "--offline=yes", f"--threshold={EXPOSURE_MAX}"),
    ):
        done = subprocess.run(
            ["systemd-analyze", *words, str(copy)], capture_output=True, text=True, timeout=WAIT_S
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_commands_of_a_unit_are_commands_of_ours_and_have_the_time_to_leave(unit: Path) -> None:
    text = unit.read_text(encoding="utf-8").replace("\\\n", "")
    (line,) = re.findall(r"^ExecStart=/opt/tensorhub/bin/tensorhub (\w+) (.+)$", text, re.MULTILINE)
    known = run_here(line[0], "--help").stdout
    assert [each for each in re.findall(r"(--[\w-]+)", line[1]) if each not in known] == []
    settings = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    assert (settings["Restart"], int(settings["TimeoutStopSec"]) > LEAVE_S) == ("always", True)
