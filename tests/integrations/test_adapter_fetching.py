"""A request for an adapter may name any model."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import torch

from tensorhub import source, sync
from tensorhub.errors import (
    InvalidValue,
    ManifestMismatch,
    StateError,
    VersionConflict,
    VersionUnavailable,
)
from tensorhub.integrations.adapters import CONFIG, Publication, fetch_adapter

WAIT_S = 20.0


def test_what_is_no_adapter_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    with sync.serve(token="") as coordinator, sync.connect(coordinator.address) as hub:
        half = {"base.q_proj.lora_A.weight": torch.ones(4, 4)}
        text = torch.frombuffer(bytearray(b"{}"), dtype=torch.uint8)
        hub.register("adapter", {**half, CONFIG: text}).publish(1)
        hub.register("base", half).publish(1)
        hub.register("half", {**half, CONFIG: torch.ones(2)}).publish(1)
        overwritten = hub.register("overwritten", {CONFIG: (own := text.clone())})
        overwritten.publish(1)
        with sync.connect(coordinator.address) as engine:
            assert fetch_adapter(engine, "adapter", 1, WAIT_S).keys() == {*half, CONFIG}
            assert fetch_adapter(engine, "overwritten", 1, WAIT_S).keys() == {CONFIG}
            with overwritten.mutate(2):
                own.add_(0)
            monkeypatch.delattr(sync.Hub, "fetch")
            for model in ("base", "half"):
                with pytest.raises(ManifestMismatch, match=f"'{model}' has no tensor '{CONFIG}'"):
                    fetch_adapter(engine, model, 1, WAIT_S)
            with pytest.raises(VersionUnavailable, match="no live worker holds version 1"):
                fetch_adapter(engine, "overwritten", 1, WAIT_S)
            for model, version in (("adapter", 2), ("nothing", 1), ("../adapter", 1)):
                with pytest.raises(VersionUnavailable):
                    fetch_adapter(engine, model, version, 0.2)
            # what the coordinator would end the connection for, again and again
            for model, number in (
                ("a\0", 1),
                ("", 1),
                ("a" * 513, 1),
                ("base", -1),
                ("base", 2**63),
            ):
                with pytest.raises(InvalidValue):
                    fetch_adapter(engine, model, number, WAIT_S)
            for wrong in ("1", 1.5, None, [1]):
                with pytest.raises(StateError, match="is not a version selector"):
                    fetch_adapter(engine, "base", cast("int", wrong), WAIT_S)


def test_an_adapter_of_several_ranks_is_fetched_whole() -> None:
    config = torch.frombuffer(bytearray(b"{}"), dtype=torch.uint8)
    with sync.serve(token="") as coordinator, sync.connect(coordinator.address) as hub:

        def publish(rank: int) -> None:
            half = slice(2 * rank, 2 * rank + 2)
            sources = {"a": source("a", shape=(4, 4))[half], CONFIG: source(CONFIG, shape=(2,))[:]}
            tensors = {"a": torch.full((2, 4), float(rank)), CONFIG: config.clone()}
            weights = hub.register(
                "adapter", tensors, group="trainer", rank=rank, world_size=2, sources=sources
            )
            weights.publish(1)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(publish, (0, 1)))
        assert fetch_adapter(hub, "adapter", 1, WAIT_S)["a"][:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]


def test_a_number_that_was_published_anew_is_another_adapter() -> None:
    with sync.serve(token="") as coordinator, sync.connect(coordinator.address) as hub:
        text = torch.frombuffer(bytearray(b"{}"), dtype=torch.uint8)
        weights = hub.register("adapter", {CONFIG: text})
        with sync.connect(coordinator.address) as engine:
            for version in (1, 2):
                with weights.mutate(version):
                    text.add_(0)
            its = Publication(engine, fetch_adapter(engine, "adapter", 2, WAIT_S).info)
            assert its.is_current()
            hub.rollback("adapter", to=1)
            assert its.is_current()  # so far its number is no other one's
            info = weights.publish(2)
            while engine.newest("adapter") != info:
                time.sleep(0.01)
            assert not its.is_current()
            with pytest.raises(VersionConflict, match="version 2 of 'adapter' was published anew"):
                raise its.conflict()
            its = Publication(engine, fetch_adapter(engine, "adapter", 2, WAIT_S).info)
            assert its.is_current()
            with weights.mutate(3):
                text.add_(0)
            engine.wait_for("adapter", at_least=3)
            assert its.is_current()
        assert its.is_current()  # the engine has left: it knows of no other one
