"""The release before and this one in one cluster, as during an upgrade: weights flow, and no call
fails.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing
from io import BytesIO
from itertools import product
from pathlib import Path

import pytest

import tensorhub
from benches.child_processes import Pending, Process

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
NOW = tensorhub.__version__
Start = Callable[[str, bool], Process]  # a process of that name: of the release before, or of this
Group = tuple[list[Process], list[Pending]]  # its ranks, and what they are doing
AHEAD = 50  # so many versions later the ranks of a group end: none has begun them yet


@pytest.fixture(scope="session")
def release_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel of the release before is installed, without what it needs."""
    found = re.search(r"The release before, .*: commit `(\w+)`", CHANGELOG)
    assert found is not None, "CHANGELOG.md names no commit of the release before"
    work = tmp_path_factory.mktemp("before")
    archived = subprocess.run(
        ["git", "-C", str(ROOT), "archive", found[1]], capture_output=True, timeout=60, check=False
    )
    if archived.returncode:
        pytest.skip(f"commit {found[1]} cannot be had here: {archived.stderr.decode().strip()}")
    with tarfile.open(fileobj=BytesIO(archived.stdout)) as archive:
        archive.extractall(work / "source", filter="data")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(work)]
    subprocess.run(build, cwd=work / "source", check=True, timeout=300, capture_output=True)
    (wheel,) = work.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target"]
    subprocess.run([*pip, str(work / "installed"), str(wheel)], check=True, timeout=300)
    return work / "installed"


@pytest.fixture
def start(release_before: Path) -> Iterator[Start]:
    started: list[Process] = []

    def start(name: str, is_old: bool) -> Process:
        first = release_before if is_old else ROOT / "src"
        path = os.pathsep.join(map(str, (first, ROOT)))
        made = Process(name, "tests.processes.upgrade_actor", environment={"PYTHONPATH": path})
        started.append(made)
        assert made.do("where") == str(first / "tensorhub")
        return made

    yield start
    for process in reversed(started):
        process.end()


def coordinator(start: Start, is_old: bool, state_dir: Path, port: int = 0) -> tuple[Process, str]:
    process = start("coordinator", is_old)
    return process, process.do("serve", port=port, state_dir=str(state_dir))


def worker(
    start: Start,
    name: str,
    is_old: bool,
    address: str,
    transports: list[str] | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> Process:
    process = start(name, is_old)
    place = {"rank": rank, "ranks": ranks}
    process.do("connect", address=address, name=name, transports=transports, **place)
    return process


def flow(trainer: Process, rollouts: list[Process]) -> None:
    """Some versions go from the trainer to the rollouts, and from rollout to rollout."""
    training = trainer.begin("train", first=1)
    following = [rollout.begin("follow") for rollout in rollouts]
    trainer.do("finish", after=5)
    last = training.result()
    for rollout in rollouts:
        rollout.do("finish", after=last)
    assert all(each.result() > 0 for each in following)


def test_a_trainer_of_the_release_before_is_read_at_a_coordinator_of_this_one(
    start: Start, tmp_path: Path
) -> None:
    _, address = coordinator(start, False, tmp_path)
    trainer = worker(start, "trainer", True, address)
    rollout = worker(start, "rollout", False, address, ["tcp"])
    flow(trainer, [rollout])
    assert rollout.do("releases") == {"trainer": "", "rollout": NOW}


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_old",
    [each for each in product((True, False), repeat=3) if len(set(each)) > 1],
    ids=lambda each: "-".join("old" if old else "new" for old in each),
)
def test_weights_flow_in_every_pairing(
    start: Start, tmp_path: Path, is_old: tuple[bool, bool, bool]
) -> None:
    """Of coordinator, trainer and rollout; over tcp, and between processes of one host."""
    _, address = coordinator(start, is_old[0], tmp_path)
    trainer = worker(start, "trainer", is_old[1], address)
    rollouts = [
        worker(start, "far", is_old[2], address, ["tcp"]),
        worker(start, "near", is_old[2], address),
        worker(start, "other", not is_old[2], address),
    ]
    flow(trainer, rollouts)
    for rollout in rollouts:
        rollout.do("fetch")
    releases = trainer.do("releases")
    assert set(releases) == {"trainer", "far", "near", "other"}
    if not is_old[0] and not is_old[1]:
        assert {releases["far"], releases["other"]} == {"", NOW}
        assert releases["trainer"] == NOW


def leave(process: Process, running: Pending) -> int:
    process.do("finish")
    told: int = running.result()
    assert process.leave() == 0
    return told


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False], ids=["coordinator first", "workers first"])
def test_an_upgrade_one_process_after_another_fails_no_call(
    start: Start, tmp_path: Path, is_first: bool
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    serving, address = coordinator(start, True, tmp_path, port)
    trainer = worker(start, "trainer", True, address)
    training = trainer.begin("train", first=1)
    rollouts = {name: worker(start, name, True, address) for name in ("a", "b", "c")}
    following = {name: each.begin("follow") for name, each in rollouts.items()}

    def upgrade_coordinator() -> None:
        serving.do("stop_serving")
        coordinator(start, False, tmp_path, port)

    if is_first:
        upgrade_coordinator()
    for name in list(rollouts):
        assert leave(rollouts[name], following[name]) > 0
        rollouts[name] = worker(start, name, False, address)
        following[name] = rollouts[name].begin("follow")
    last = leave(trainer, training)
    trainer = worker(start, "trainer", False, address)
    training = trainer.begin("train", first=last + 1)
    if not is_first:
        trainer.do("newest", at_least=last + 1)  # it has heard the lineage with that
        upgrade_coordinator()
    trainer.do("finish", after=last + 10)
    last = training.result()
    for rollout in rollouts.values():
        rollout.do("finish", after=last)
    assert all(each.result() > 0 for each in following.values())
    assert set(trainer.do("releases").values()) == {NOW}


@pytest.mark.slow
def test_an_upgrade_of_groups_of_two_workers_first_fails_no_call(
    start: Start, tmp_path: Path
) -> None:
    """The ranks of a group leave together, at one version. Workers of the release before do not
    repeat a publish, so their coordinator does not restart.
    """
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    serving, address = coordinator(start, True, tmp_path, port)

    def group(name: str, is_old: bool, what: str, **arguments: int) -> Group:
        ranks = [worker(start, name, is_old, address, None, rank, 2) for rank in range(2)]
        return ranks, [each.begin(what, **arguments) for each in ranks]

    def end(running: Group, after: int) -> set[int]:
        for rank in running[0]:
            rank.do("finish", after=after)
        return {each.result() for each in running[1]}

    def upgrade(running: Group, name: str, what: str, **arguments: int) -> Group:
        for rank in running[0]:
            assert rank.leave() == 0
        return group(name, False, what, **arguments)

    trainers = group("trainer", True, "train", first=1)
    rollouts = [group(name, True, "follow") for name in ("a", "b")]
    for place, name in enumerate(("a", "b")):
        end(rollouts[place], trainers[0][0].do("newest") + AHEAD)
        rollouts[place] = upgrade(rollouts[place], name, "follow")
    (last,) = end(trainers, trainers[0][0].do("newest") + AHEAD)
    trainers = upgrade(trainers, "trainer", "train", first=last + 1)
    trainers[0][0].do("newest", at_least=last + 1)  # it has heard the lineage with that
    serving.do("stop_serving")
    coordinator(start, False, tmp_path, port)
    (last,) = end(trainers, trainers[0][0].do("newest") + AHEAD)
    for each in rollouts:
        end(each, last)
    assert set(trainers[0][0].do("releases").values()) == {NOW}
