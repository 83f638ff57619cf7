"""One version on all engines, with real processes: engines and trainers that are killed at each
step, and an observer that asks all engines all the time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import StateError
from tensorhub.integrations.one_version_http import Remote
from tensorhub.integrations.one_version_trainer import OneVersion
from tests.integrations.fleet_actor import LEASE_S, TIMEOUT_S, values

WAIT_S = 60.0
pytestmark = [pytest.mark.timeout(300), pytest.mark.heavy]


class Process:
    """`fleet_actor` in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.integrations.fleet_actor", *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hears(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        return json.loads(said) if said else {}

    def asks(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.hears()

    def waits(self) -> int:
        return self._process.wait(WAIT_S)

    def kills(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)
        for each in (self._process.stdin, self._process.stdout):
            if each is not None:
                each.close()


class Observer:
    """Asks all engines which version they serve, over and over. No older version may be answered to
    a question that was asked after a newer one was answered.
    """

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.faults: list[str] = []
        self.seen: set[int] = set()
        self._newest = -1
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._threads: list[threading.Thread] = []

    def watches(self, url: str) -> None:
        self._threads.append(threading.Thread(target=self._watch, args=(url,)))
        self._threads[-1].start()

    def _watch(self, url: str) -> None:
        engine = Remote(url, timeout_s=5.0)
        while not self._ends.wait(0.002):
            with self._lock:
                newest = self._newest
            try:
                version = engine.version
            except StateError:
                continue
            with self._lock:
                if version is not None:
                    self.seen.add(version)
                    if version < newest:
                        self.faults.append(f"{url} serves {version} after {newest} was served")
                    self._newest = max(self._newest, version)

    def close(self) -> None:
        self._ends.set()
        for each in self._threads:
            each.join()
        assert not self.faults


class Fleet:
    def __init__(self, address: str) -> None:
        self.address = address
        self.observer = Observer()
        self.processes: list[Process] = []
        self.version = 0
        self.engines = [self.engine(f"engine-{number}")[0] for number in range(2)]
        self.urls = list(self.observer.urls)

    def engine(self, name: str, port: str = "0", die_at: str = "") -> tuple[Process, str]:
        process = Process("engine", self.address, name, port, "1000", die_at)
        self.processes.append(process)
        url = process.hears()["url"]
        self.observer.urls.append(url)
        self.observer.watches(url)
        return process, url

    def serve(self, version: int | None = None) -> int:
        """Wait until both engines serve one version; it is in their weights."""
        deadline = time.monotonic() + WAIT_S
        while True:
            said = [each.asks() for each in self.engines]
            served = {each["version"] for each in said}
            if len(served) == 1 and None not in served and version in (None, *served):
                assert all(each["values"] == [float(each["version"])] for each in said)
                return int(served.pop())
            assert time.monotonic() < deadline, said

    def close(self) -> None:
        try:
            self.observer.close()
        finally:
            for each in self.processes:
                each.kills()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with sync.serve(token="") as coordinator:
        made = Fleet(coordinator.address)
        try:
            yield made
        finally:
            made.close()


def serves(engine: Process) -> dict[str, Any]:
    """What it serves, once it has a lease."""
    deadline = time.monotonic() + WAIT_S
    while (said := engine.asks())["version"] is None:
        assert time.monotonic() < deadline
    return said


class Trainer:
    """One in this process."""

    def __init__(self, fleet: Fleet, urls: list[str]) -> None:
        self.fleet = fleet
        self.tensors = values(1000, 0.0)
        self.hub = sync.connect(fleet.address)
        self.weights = self.hub.register("actor", self.tensors)
        self.engines = OneVersion(
            self.hub, "actor", urls, lease_s=LEASE_S, timeout_s=TIMEOUT_S, failures_max=1
        )

    def update(self) -> tuple[str, ...]:
        self.fleet.version += 1
        with self.weights.mutate(self.fleet.version), torch.no_grad():
            for each in self.tensors.values():
                each.fill_(self.fleet.version)
        info = self.hub.wait_for("actor", at_least=self.fleet.version)
        return self.engines.update(info).done

    def close(self) -> None:
        self.engines.close()
        self.hub.close()


@pytest.mark.parametrize("step", ["Stage", "Fence", "Flip", "Decide", "Settle"])
def test_a_trainer_that_is_killed_after_a_step(fleet: Fleet, step: str) -> None:
    """All engines have the new version if it was decided, and else the old one."""
    first = fleet.version + 1
    fleet.version += 2
    trainer = Process("trainer", fleet.address, json.dumps(fleet.urls), f"{first}", step)
    fleet.processes.append(trainer)
    assert trainer.hears() == {"version": first}
    assert trainer.waits() == -9
    expected = first + (step in ("Decide", "Settle"))
    assert fleet.serve(expected) == expected


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["stage", "flip", "settle"])
def test_an_engine_that_is_killed(fleet: Fleet, call: str, when: str) -> None:
    """The others get the version in the same update."""
    victim, url = fleet.engine("victim", die_at=f"{call} {when}")
    trainer = Trainer(fleet, [*fleet.urls, url])
    try:
        assert set(fleet.urls) <= set(trainer.update())
        assert victim.waits() == -9
        assert fleet.serve() == fleet.version
    finally:
        trainer.close()


def test_an_engine_that_is_started_anew_takes_the_version_of_its_peers(fleet: Fleet) -> None:
    """And is updated with them again."""
    victim, url = fleet.engine("victim", die_at="flip after")
    trainer = Trainer(fleet, [*fleet.urls, url])
    try:
        trainer.update()
        assert victim.waits() == -9
        again, _ = fleet.engine("victim", port=url.rpartition(":")[2])
        assert serves(again) == {"version": fleet.version, "values": [float(fleet.version)]}
        while url not in trainer.update():
            pass
        assert fleet.serve() == fleet.version
        assert serves(again)["version"] == fleet.version
        again.kills()  # other trainers here do not know it, and do not keep it from serving
    finally:
        trainer.close()


def test_each_version_is_observed_in_order(fleet: Fleet) -> None:
    """The observer, which judges the tests above, sees what engines serve."""
    trainer = Trainer(fleet, fleet.urls)
    deadline = time.monotonic() + WAIT_S
    try:
        for _ in range(3):
            trainer.update()
            while fleet.version not in fleet.observer.seen:
                assert time.monotonic() < deadline
                time.sleep(0.002)
    finally:
        trainer.close()
    assert fleet.observer.faults == []
