"""The command: what it refuses, where it skips; and (slow) a whole small run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benches.testbed import __main__ as program, network
from benches.testbed.sizes import SIZES, fitted
from benches.testbed.ways import WAYS
from tensorhub.testing.flow.scenario import load


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("standalon", "did you mean 'standalone'"),
        ("standalone --systems tensorhub sokets", "no system 'sokets': did you mean 'sockets'? Give tensorhub"),
        ("standalone --rollouts 1000", "this machine can run"),
        ("standalone --wan-ratio 4", "no WAN"),
        ("standalone --versions 0", "give a number above 0"),
        ("standalone --versions 1", "--versions 1: give 2 or more"),
        ("standalone --mb nan", "give a number above 0"),
        ("standalone --rollouts 2 --wan-ratio 4", "not allowed with"),
        ("update", "update has generate_mean_copies = 0, and rollouts of the testbed have to generate"),
    ],
)
def test_what_cannot_be_run_is_refused(wrong: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(wrong.split())
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err


def test_a_mistake_in_a_file_is_shown_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('format = 1\ntitle = "mine"\nseed = 1\nversion = 3\n')
    with pytest.raises(SystemExit):
        program.main([str(file)])
    assert "mine.toml, line 4: version: a scenario has no such key: did you mean 'versions'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("standalone --systems tensorhub+seeds", "tensorhub+seeds: not run: the scenario has no hosts for seeds"),
        ("standalone --picture nowhere/p.svg", "nowhere/p.svg: No such file or directory"),
        ("standalone --picture p.svg --json nowhere/f.json", "nowhere/f.json: No such file or directory"),
    ],
)
def test_what_would_be_in_vain_is_refused_before_it_takes_long(
    wrong: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(network, "why_not", lambda: None)
    monkeypatch.setattr(program, "_measure", lambda *_: pytest.fail("it has begun"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        program.main(wrong.split())
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err


def test_without_the_rights_of_root_it_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert program.main(["standalone"]) == 0
    assert capsys.readouterr().out == "skipped: network namespaces need the rights of root\n"


def test_how_long_it_takes_is_said_before() -> None:
    """7 versions, one every 4.8 s; what cannot be run takes no time."""
    scenario = fitted(load("standalone"), SIZES["standalone"])
    ways = [WAYS[name] for name in ("tensorhub", "sockets", "tensorhub+seeds")]
    said = program._expected([scenario], ways, rounds=5)
    assert said == "expected: 37 to 42 s for each run, 6.1 to 6.9 min for all 10; more where the trainer is held up"


@pytest.mark.slow
@pytest.mark.root
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if (reason := network.why_not()) is not None:
        pytest.skip(reason)
    files = ["--json", str(tmp_path / "figures.json"), "--picture", str(tmp_path / "picture.svg")]
    few = "churn --systems tensorhub+seeds sockets chain-waits --mb 2 --mbit 100 --versions 3".split()
    assert program.main([*few, *files]) == 0
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]["0.0"]
    assert [row["way"] for row in rows] == ["tensorhub+seeds", "sockets", "chain-waits"]
    assert all(row["stalls"]["updates"] > 0 for row in rows[:2])
    assert rows[2]["failure"] == "not run: its group is fixed, and rollouts come and go here"
    ElementTree.fromstring((tmp_path / "picture.svg").read_text())
    assert "TensorHub, seeds" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("name", ["redis", "s3", "web"])
def test_a_small_run_of_a_storage(name: str, tmp_path: Path) -> None:
    """Each rollout looks at all its words, so that it has what was pushed; versions that are old are deleted meanwhile."""
    if (reason := network.why_not() or WAYS[name].lacks()) is not None:
        pytest.skip(reason)
    files = ["--json", str(tmp_path / "figures.json"), "--picture", str(tmp_path / "picture.svg")]
    few = f"standalone --systems {name} --rollouts 2 --mb 12 --mbit 400 --versions 6".split()
    assert program.main([*few, *files]) == 0
    (row,) = json.loads((tmp_path / "figures.json").read_text())["rows"]["2"]
    assert row["failure"] is None
    assert row["joins"]["done"] == 2
    assert row["updates"]["done"] > 2


def test_what_a_killed_run_has_left_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """But not what another run is using."""
    monkeypatch.setattr(program, "MEMORY", tmp_path)
    dead, own = tmp_path / f"{program.SCRATCH}4194305-x", tmp_path / f"{program.SCRATCH}{os.getpid()}-x"
    for directory in (dead, own):
        (directory / "files").mkdir(parents=True)
    with program._scratch(None) as scratch:
        assert {each.name for each in tmp_path.iterdir()} == {own.name, scratch.name}
    assert list(tmp_path.iterdir()) == [own]
