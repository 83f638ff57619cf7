"""One version on all engines, or on none: two real engines that generate all the time, one of which
fails to flip, is killed, or starts late; and a trainer that is killed.

Each version has another step from a token to the next one, so that each token tells its version.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tensorhub import sync
from tensorhub.errors import StateError
from tensorhub.integrations.fleet import FleetReport
from tensorhub.integrations.one_version import Step
from tensorhub.integrations.one_version_trainer import OneVersion
from tests.frameworks.generating import Process, answer_by
from tests.frameworks.test_vllm import actor

TIMEOUT_S, WAIT_S = 60.0, 120.0


class Client(threading.Thread):
    """Asks an engine for tokens, over and over. After a newer version was seen anywhere, no request
    that begins then may have a token of an older one, nor may a request go back.
    """

    newest = 0
    lock = threading.Lock()

    def __init__(self, engine: Process) -> None:
        super().__init__()
        self.engine = engine
        self.seen: list[int] = []
        self.faults: list[str] = []
        self.ends = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.ends.wait(0.001):
            with self.lock:
                newest = Client.newest
            try:
                versions = self.engine.asks("generate")
            except EOFError:  # it was killed
                return
            if isinstance(versions, str):
                self.faults.append(versions)
                return
            with self.lock:
                if versions != sorted(versions) or versions[0] < newest:
                    self.faults.append(f"{versions} after {newest}")
                Client.newest = max(Client.newest, versions[-1])
                self.seen += versions

    def waits_for(self, version: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self.seen or self.seen[-1] != version:
            assert time.monotonic() < deadline, (self.seen[-20:], version)
            time.sleep(0.02)


Start = Callable[[Path, dict[str, str], int], Process]


class Rig:
    """`engine`: starts one, with so many ranks."""

    def __init__(self, place: Path, address: str, hub: sync.Hub, engine: Start) -> None:
        self.place, self.address, self.hub, self._engine = place, address, hub, engine
        self.model = actor()
        self.weights = hub.register("actor", self.model)
        self.copy = {name: each.clone() for name, each in self.model.state_dict().items()}
        self.before = hub.register("before", self.copy)  # the version before
        self.version = 0
        self.engines: list[Process] = []
        self.clients: list[Client] = []
        self.fleet = OneVersion(hub, "actor", timeout_s=TIMEOUT_S)

    def start(self, *ranks: int) -> None:
        """Engines with so many ranks."""
        environment = {
            "TENSORHUB_ADDRESS": self.address,
            "TENSORHUB_MODEL": "actor",
            "TENSORHUB_FLEET_HOST": "127.0.0.1",
        }
        first = len(self.engines)
        for number, each in enumerate(ranks, first):
            self.engines.append(self._engine(self.place / f"{number}", environment, each))
        for engine in self.engines[first:]:
            assert engine.hears() == "ready"
            self.clients.append(Client(engine))

    def publish(self) -> Any:
        """The next version, whose number is its step."""
        with self.before.mutate(self.version):
            for name, each in self.model.state_dict().items():
                self.copy[name].copy_(each)
        self.version += 1
        with self.weights.mutate(self.version):
            answer_by(self.model, self.version)
        return self.hub.wait_for("actor", at_least=self.version)

    def update(self) -> FleetReport:
        return self.fleet.update(self.publish())

    def update_all(self) -> None:
        """Also engines that failures have excluded: those come back within a few updates."""
        deadline = time.monotonic() + WAIT_S
        while len(self.update().done) < sum(each.is_alive() for each in self.clients):
            self.check(self.version)
            assert time.monotonic() < deadline
        self.check(self.version)

    def check(self, version: int) -> None:
        """All live engines generate with it, and hold what the framework's own loader makes of it."""
        for client in self.clients:
            if client.is_alive():
                client.waits_for(version)
                of = (
                    "{}"
                    if version == self.version
                    else f'{{"model": "before", "version": {version}}}'
                )
                assert client.engine.asks(f"tensorhub_check {of}") == "done"
            assert client.faults == []

    def kill(self, client: Client) -> None:
        client.ends.set()
        os.killpg(client.engine.pid, signal.SIGKILL)
        client.join()
        client.engine.wait()


@contextmanager
def rigged(place: Path, engine: Start) -> Iterator[Rig]:
    with sync.serve(token="") as coordinator, sync.connect(coordinator.address) as hub:
        made = Rig(place, coordinator.address, hub, engine)
        try:
            made.start(1, 1)
            yield made
        finally:
            for client in made.clients:
                if client.is_alive():
                    made.kill(client)
            made.fleet.close()


class OneVersionTests:
    """What is to hold in each framework. A fixture `rig` has two engines."""

    def test_all_engines_go_on_with_each_version(self, rig: Rig) -> None:
        for _ in range(3):
            report = rig.update()
            assert len(report.done) == 2
            rig.check(rig.version)

    def test_a_flip_that_fails_leaves_the_old_version_everywhere(self, rig: Rig) -> None:
        """One engine cannot finish its layers, after all its tensors were written."""
        rig.fleet._attempts_max = 1
        fault = rig.engines[1].place / "0"
        fault.touch()
        with pytest.raises(StateError, match="no engine has taken") as error:
            rig.update()
        assert "cannot finish its layers" in "".join(error.value.__notes__)
        fault.unlink()
        rig.check(rig.version - 1)
        rig.fleet._attempts_max = 4
        rig.update_all()

    @pytest.mark.parametrize("step", ["Stage", "Fence", "Flip", "Decide"])
    def test_a_trainer_that_is_killed_after_a_step(self, rig: Rig, step: str) -> None:
        rig.fleet.close()
        rig.publish()
        command = [sys.executable, "-m", "tests.frameworks.one_version_rig"]
        died = subprocess.run([*command, rig.address, f"{rig.version}", step], timeout=WAIT_S)
        assert died.returncode == -signal.SIGKILL
        rig.check(rig.version - (step != "Decide"))
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                rig.fleet = OneVersion(rig.hub, "actor", timeout_s=TIMEOUT_S)
                break
            except StateError:  # the coordinator takes the dead one for alive
                assert time.monotonic() < deadline
                time.sleep(0.2)
        rig.update_all()

    def test_an_engine_that_is_killed_and_a_late_one_of_two_ranks(self, rig: Rig) -> None:
        """The late one has the others' version before any update. Its ranks begin each step with the
        same version: otherwise their parts of the model would make no sense.
        """
        rig.kill(rig.clients[1])
        assert len(rig.update().done) == 1
        rig.check(rig.version)
        rig.start(2)
        rig.check(rig.version)
        for _ in range(3):
            assert len(rig.update().done) == 2
            rig.check(rig.version)
        fault = rig.engines[-1].place / "1"
        fault.touch()
        rig.fleet._attempts_max = 1
        with pytest.raises(StateError, match="no engine has taken"):
            rig.update()
        fault.unlink()
        rig.check(rig.version - 1)


def trainer(address: str, version: str, die_at: str) -> None:
    """Updates the fleet, and dies after a step."""
    with sync.connect(address, name=f"trainer-{os.getpid()}") as hub:
        fleet = OneVersion(hub, "actor", timeout_s=TIMEOUT_S)
        does = fleet._do

        def dying(step: Step) -> Any:
            answer = does(step)
            if type(step).__name__ == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        fleet._do = dying  # type: ignore[method-assign]
        fleet.update(hub.wait_for("actor", at_least=int(version)))


if __name__ == "__main__":
    trainer(*sys.argv[1:])
