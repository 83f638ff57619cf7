"""Each benchmark runs on small inputs and writes its figures; the benchmarks compare the bytes that
they move themselves.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from benches import capped, plan
from benches.testbed import network
from tensorhub.layouts import plan as planned
from tensorhub.testing.auditor import audit
from tensorhub.testing.history import read
from tests.recorder import record_children

pytestmark = pytest.mark.heavy

QUICK = [
    "files --rounds 1 --mib 1",
    "imports --rounds 1",
    "observing --workers 8 --seconds 0.5 --rounds 1",
    "one_sided --transport cma --rounds 1 --mib 2 --tensors 6 --tiny 3",
    "scale.core --workers 8 --ranks 1 --manifest 1000",
    "strided --transport shm --rounds 1 --mib 2 --runs 176 65536",
]
SLOW = [
    "archive --steps 4 --contexts 1 --rounds 1",
    "busy --rounds 1 --mib 4 --transports tcp",
    "calls --rounds 1 --tensors 10",
    "deltas --rounds 1 --lr 1e-5 --steps 1",
    "early_digests --rounds 1 --mib 16 --seconds 0.2",
    "one_sided --transport shm --rounds 1 --mib 2 --tensors 6 --tiny 3 --readers 2",
    "one_to_n --transport shm --rounds 1 --mib 4 --receivers 1 2",
    "resharded --transport tcp --rounds 1 --mib 4",
    "strided --transport tcp --rounds 1 --mib 2 --runs 176",
    "tiny --rounds 1 --mib 64 --tensors 20",
    "tls --rounds 1 --mib 2 --tensors 6 --tiny 3",
]
ROOT = [
    "capped --readers 1 2 --rounds 1 --mib 8",
    "delta_reads --lr 1e-5 --steps 1 --rounds 1 --mbit 400 --readers 2",
    "delta_reads --lr 1e-5 --steps 1 --rounds 1 --mbit 0 --lan-mbit 10000",
    "testbed.__main__ churn --systems tensorhub+seeds sockets --mb 2 --mbit 100 --versions 3",
    (
        "wan --congestion cubic --loss 0 --connections 1 4 --rounds 1 --mib 8 --chunk-mib 0.0625 "
        "--round-trip-ms 10"
    ),
]

REFUSED = [
    "archive --steps 0",
    "capped --readers 0",
    "capped --mbit -1",
    "delta_reads --mbit -1",
    "leaks --fill 3",
    "testbed.__main__ standalon",
    "testbed.__main__ standalone --versions 1",
    "testbed.__main__ standalone --mb nan",
    "wan --connections 17",
    "wan --loss 1",
]


def run(command: str, tmp_path: Path) -> None:
    name, *options = command.split()
    file = tmp_path / "figures.json"
    assert importlib.import_module(f"benches.{name}").main([*options, "--json", str(file)]) == 0
    if not file.exists():
        pytest.skip("the benchmark has said why it cannot run here")
    assert json.loads(file.read_text())


@pytest.mark.parametrize(
    "command", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_it_runs(command: str, tmp_path: Path) -> None:
    run(command, tmp_path)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("command", ROOT)
def test_it_runs_between_network_namespaces(command: str, tmp_path: Path) -> None:
    if (reason := network.why_not() or capped.why_not()) is not None:
        pytest.skip(reason)
    run(command, tmp_path)


@pytest.mark.slow
@pytest.mark.root
def test_what_the_testbed_callers_saw_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (reason := network.why_not()) is not None:
        pytest.skip(reason)
    record_children(monkeypatch, tmp_path / "history")
    monkeypatch.chdir(tmp_path)  # where the picture goes
    run("testbed.__main__ standalone --systems tensorhub --mb 2 --mbit 100 --versions 3", tmp_path)
    judged = audit(read(tmp_path / "history"))
    assert judged["publish: ok"] >= 3
    assert judged["update: ok"] + judged["replicate: ok"] > 0 < judged["tensors compared"]


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_cannot_be_measured_is_refused(wrong: str) -> None:
    name, *options = wrong.split()
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benches.{name}").main(options)
    assert ended.value.code == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("publisher", plan.PUBLISHERS)
def test_the_plan_of_a_trillion_parameters_reads_each_byte_once(publisher: str) -> None:
    publication = plan.checked(plan.PUBLISHERS[publisher](plan.SOURCES))
    sources = [each.coordinates for each in publication.classes]
    for held in plan.READING.values():
        reader = plan.rank_of(held(0), publication.catalogue)
        assert sum(planned(reader, sources, turn=0).needs.values()) == reader.nbytes
