"""The simulator itself: what a seed stands for, that it is a trace, and that each kind of fault can
happen.
"""

from __future__ import annotations

import pickle
from collections import Counter
from types import ModuleType

import pytest

from tensorhub.testing import Fault, GuaranteeBroken, SimulatedCluster, simulated
from tensorhub.testing.drivers import data_network
from tensorhub.testing.sim import sites
from tensorhub.testing.sim.network import Partitions
from tensorhub.testing.simulated import run_seed
from tensorhub.types import HandleState, Purpose

SEEDS_VARIED = 4


def tens(first: int, end: int) -> list[range]:
    return [range(ten, ten + 10) for ten in range(first, end, 10)]


# The same seeds each time: what changes from commit to commit, and finds more, is in test_slice.py.
@pytest.mark.parametrize(
    "seeds",
    [
        *(pytest.param(ten, marks=pytest.mark.heavy) for ten in tens(0, 30)),
        *(pytest.param(ten, marks=pytest.mark.slow) for ten in tens(30, 60)),
    ],
    ids=lambda s: f"{s.start}",
)
def test_guarantees_hold_under_faults(seeds: range) -> None:
    for seed in seeds:
        run_seed(seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_guarantees_hold_under_many_more_faults() -> None:
    for seed in range(1_000_000, 1_005_000):
        run_seed(seed)


@pytest.mark.parametrize(
    "seed", [7, *(pytest.param(seed, marks=pytest.mark.heavy) for seed in (3, 11))]
)
def test_same_seed_same_trace(seed: int) -> None:
    assert run_seed(seed).end_hash == run_seed(seed).end_hash != run_seed(seed + 1).end_hash


def test_a_report_says_what_happened_and_can_be_pickled() -> None:
    report = run_seed(5)
    assert report.seed == 5
    assert report.events >= 1000
    assert report.groups >= 3
    assert report.versions >= 3
    assert len(report.faults) >= 3
    assert report.paths
    assert pickle.loads(pickle.dumps(report)) == report


@pytest.mark.parametrize("kind", Fault)
def test_each_kind_of_fault_can_be_had_alone(kind: Fault) -> None:
    """RESTART and PREEMPT need something to happen to."""
    allowed = {kind, Fault.CRASH} if kind is Fault.RESTART else {kind}
    happened = Counter[str]()
    first = 18 if kind is Fault.REORDER else 7  # in these, which are small, it happens, or soon
    for seed in range(first, first + 40):
        happened.update(run_seed(seed, faults=allowed, events=300).faults)
        if happened[kind]:
            break
    assert happened[kind]
    assert set(happened) <= allowed


@pytest.mark.heavy
def test_workers_seed_and_sites_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a part of all seeds, without which the others would be other ones."""
    monkeypatch.setattr(sites, "SEEDERS_DRAWN", 1.0)
    monkeypatch.setattr(sites, "PARTED_DRAWN", 1.0)
    parted, seeded = 0, set[str]()
    block = Partitions.block

    def counted(self: Partitions, a: str, b: str, until: float) -> None:
        nonlocal parted
        parted += 1
        block(self, a, b, until)

    monkeypatch.setattr(Partitions, "block", counted)
    for seed in range(6):
        cluster = SimulatedCluster(seed, faults={Fault.PARTITION}, events=500)
        cluster.run()
        handles = (
            handle for handle in cluster.all_handles() if handle.shard.purpose is Purpose.SEED
        )
        calls = (handle.last_call for handle in handles if handle.last_call is not None)
        seeded.update(call.handle.name for call in calls if call.version is not None)
    assert seeded
    assert parted > 10  # workers, and not one


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("module", "share"),
    [
        (simulated, "CLOCKS_DRAWN"),
        (simulated, "DIGESTS_OFF"),
        (simulated, "MODELS_DRAWN"),
        (simulated, "READERS_DRAWN"),
        (simulated, "WORKERS_CLOCKS_DRAWN"),
        (simulated, "ON_DISK"),
        (data_network, "NICS_DRAWN"),
    ],
)
def test_guarantees_hold_in_each_variation(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, share: str
) -> None:
    monkeypatch.setattr(module, share, 1.0)
    for seed in range(SEEDS_VARIED):
        run_seed(seed)


@pytest.mark.heavy
def test_a_clock_beyond_the_margin_breaks_retention_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker whose clock is eight times as fast gives up what the coordinator counts on."""
    monkeypatch.setattr(simulated, "WORKERS_CLOCKS_DRAWN", 1.0)
    monkeypatch.setattr(simulated, "WORKERS_CLOCK_RATES", (8.0, 8.0))
    faults, broken = [Fault.PARTITION, Fault.DROP, Fault.ONE_WAY, Fault.BEHIND], set[str]()
    for seed in range(60):
        try:
            run_seed(seed, faults=faults)
        except GuaranteeBroken as error:
            broken.add(str(error).splitlines()[-2].partition(":")[0])
        if broken:
            break
    assert broken == {"leaving"}


def test_without_faults_everything_ends_well() -> None:
    report = run_seed(1, faults=())
    assert not report.faults
    assert report.versions >= 3


def test_a_failing_run_says_how_to_see_it_again() -> None:
    cluster = SimulatedCluster(4, faults={Fault.CRASH, Fault.CUT}, events=200)

    def damage() -> None:
        for handle in cluster.live_handles():
            if handle.member.state is HandleState.READY:
                handle.cells = ["damaged"] * len(handle.cells)
                cluster.touch(handle)
        cluster.timeline.after(0.1, None, damage)

    cluster.timeline.at(0.1, None, damage)
    with pytest.raises(GuaranteeBroken) as caught:
        cluster.run()
    text = str(caught.value)
    assert "content: " in text or "partial replicas: " in text
    assert (
        text.splitlines()[-1]
        == "reproduce: tensorhub simulate --seed 4 --faults crash,cut --events 200"
    )
