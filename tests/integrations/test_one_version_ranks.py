"""The ranks of one engine of a fleet with one version: two processes."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tensorhub import sync
from tensorhub.errors import StateError, TensorHubError
from tensorhub.integrations.one_version_ranks import Member, Part
from tensorhub.integrations.one_version_trainer import OneVersion
from tensorhub.types import VersionInfo

WAIT_S = 60.0


class Tensors(Part):
    """One tensor. `fails`: how often it cannot be fetched."""

    def __init__(self, hub: sync.Hub, rank: int, fails: int) -> None:
        super().__init__(torch.device("cpu"), WAIT_S)
        self._hub, self._rank, self._fails, self._shapes = hub, rank, fails, "always the same"
        self.model = torch.zeros(4)

    def planned(self, version: int) -> tuple[VersionInfo, object, Any]:
        return self._hub.wait_for("actor", at_least=version), self._shapes, None

    def mismatch(self, version: int, faults: Sequence[Any]) -> TensorHubError | None:
        return None

    def allocate(self) -> Mapping[str, torch.Tensor]:
        return {"a": torch.zeros(4)}

    def register(self, tensors: Mapping[str, torch.Tensor], word: str) -> sync.Weights:
        return self._hub.register("actor", tensors, group=f"engine{self._rank}{word}")

    def fetch(self, slot: int, version: int) -> None:
        if self._fails:
            self._fails -= 1
            raise StateError("this rank cannot fetch now")
        super().fetch(slot, version)

    def write(self, tensors: Mapping[str, torch.Tensor], info: VersionInfo) -> None:
        self.model.copy_(tensors["a"])


@contextmanager
def member(address: str, rank: int, store: str, fails: int) -> Iterator[Member]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    with sync.connect(address) as hub:
        try:
            yield Member(Tensors(hub, rank, fails), rank, [0, 1], hub, "actor", wait_s=WAIT_S)
        finally:
            dist.destroy_process_group()


def second(address: str, store: str, fails: int, pipe: Any) -> None:
    """Rank 1: says what each step reads."""
    with member(address, 1, store, fails) as its:
        while pipe.recv():
            with its.step():
                pipe.send(its.part.model.tolist())  # type: ignore[attr-defined]
        for each in threading.enumerate():
            if each.name == "tensorhub-orders":  # rank 0 has ordered it to end
                each.join(WAIT_S)


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    spawn, processes = multiprocessing.get_context("spawn"), []

    def starts(*given: Any) -> Any:
        ours, its = spawn.Pipe()
        process = spawn.Process(target=second, args=(*given, its))
        process.start()
        processes.append((process, ours, its))
        return ours

    yield starts
    for process, ours, its in processes:
        process.join(WAIT_S)
        process.kill()
        process.join()
        assert process.exitcode == 0
        ours.close()
        its.close()


def test_what_one_rank_has_failed_to_fetch_all_ranks_fetch_again(
    tmp_path: Path, start: Callable[..., Any]
) -> None:
    with sync.serve(token="") as coordinator, sync.connect(coordinator.address) as hub:
        weights = hub.register("actor", {"a": torch.full((4,), 1.0)})
        info = weights.publish(1)
        store = f"{tmp_path / 'store'}"
        pipe = start(coordinator.address, store, 1)
        with member(coordinator.address, 0, store, 0) as its:
            assert its.engine is not None
            fleet = OneVersion(hub, "actor", [its.engine.url])
            with pytest.raises(StateError, match=r"worker 1: .*cannot fetch now"):
                fleet.update(info)
            fleet.update(info)
            pipe.send(True)
            with its.step():
                assert pipe.recv() == [1.0] * 4
            fleet.close()
            its.engine.close()
            pipe.send(False)


def test_a_step_that_waits_for_a_version_keeps_none_from_being_put_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with sync.serve(token="") as coordinator, sync.connect(coordinator.address) as hub:
        info = hub.register("actor", {"a": torch.full((4,), 1.0)}).publish(1)
        part = Tensors(hub, 0, 0)
        its = Member(part, 0, [0], hub, "actor", wait_s=WAIT_S, lease_s=0.5)
        assert its.engine is not None
        fleet = OneVersion(hub, "actor", [its.engine.url], lease_s=0.5)
        use, waits = its.engine._use, threading.Event()

        def noted(wait_s: float) -> Any:
            waits.set()
            return use(wait_s)

        monkeypatch.setattr(its.engine, "_use", noted)

        def step() -> list[float]:
            with its.step():
                return part.model.tolist()

        with ThreadPoolExecutor(1) as thread:
            stepped = thread.submit(step)
            assert waits.wait(WAIT_S)
            assert part.lock.acquire(timeout=WAIT_S)  # which putting a version takes
            part.lock.release()
            fleet.update(info)
            assert stepped.result(WAIT_S) == [1.0] * 4
        fleet.close()
        its.engine.close()
