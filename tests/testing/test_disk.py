"""The product's store on files that a simulated crash cuts."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tensorhub.coordinator import Retention
from tensorhub.runtime.control.tables import Tables
from tensorhub.testing import simulated
from tensorhub.testing.drivers.disk import DATABASE, DiskStore
from tensorhub.testing.sim.assertion import GuaranteeBroken
from tensorhub.testing.sim.terms import Deposed
from tensorhub.testing.simulated import run_seed


def retention(number: int) -> Retention:
    return Retention("actor", number)


def test_a_write_that_a_crash_cuts_is_there_or_is_not() -> None:
    found = set[bool]()
    for seed in range(40):
        store = DiskStore(Random(seed), shared=False)
        epoch, _ = store.begin()
        store.write(epoch, retention(1))
        is_durable = store.crash(retention(2))
        if is_durable:
            store.append(retention(2))
        found.add(is_durable)
        _, entries = store.begin()
        assert entries == [retention(1), *[retention(2)] * is_durable]
    assert found == {True, False}


def test_a_former_leader_writes_nothing() -> None:
    store = DiskStore(Random(1), shared=True)
    former, _ = store.begin()
    store.write(former, retention(1))
    store.begin()
    with pytest.raises(Deposed):
        store.write(former, retention(2))
    assert store == [retention(1)]


def test_an_older_copy_leaves_no_store_of_a_former_term_open() -> None:
    """Their epochs come again."""
    store = DiskStore(Random(1), shared=True)
    for _ in range(3):
        store.write(store.begin()[0], retention(1))
    store.go_back(0)
    assert not store._open
    assert store.begin() == (2, [])


def test_a_store_that_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tables, "write", lambda tables, entry: None)
    store = DiskStore(Random(1), shared=False)
    epoch, _ = store.begin()
    store.write(epoch, retention(1))
    with pytest.raises(GuaranteeBroken, match="durable mark"):
        store.begin()


def test_a_store_without_syncs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a crash cuts what was said to be durable."""
    store = DiskStore(Random(1), shared=False)
    epoch, _ = store.begin()
    before = store._files()
    store.write(epoch, retention(1))
    monkeypatch.setattr(store, "_files", lambda: before)
    with pytest.raises(GuaranteeBroken, match="durable mark"):
        store.begin()


def test_its_files_go_with_it() -> None:
    store = DiskStore(Random(1), shared=False)
    store.begin()
    path: Path = store._path
    assert (path / DATABASE).exists()
    del store
    assert not path.exists()


def test_a_seed_on_disk_is_judged_by_what_its_files_give_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simulated, "ON_DISK", 1.0)
    demands = run_seed(1).demands
    assert demands["durable mark: {} was read, not {}"]
    assert demands["durable mark: epoch {} of {} {}"]
