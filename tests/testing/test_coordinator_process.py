"""The simulated processes of coordinators alone: what a store tells them, and what their judge hears."""

from __future__ import annotations

import pytest

from tensorhub.coordinator import Persist, Retention
from tensorhub.messages import Announce, Watch
from tensorhub.testing import GuaranteeBroken, SimulatedCluster
from tensorhub.testing.sim.judges.reference_model import Publishing
from tensorhub.testing.sim.network import Link
from tensorhub.testing.sim.terms import Term
from tensorhub.types import VersionInfo


def test_a_coordinator_hears_of_its_writes_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the second write is due just when the first one's lost reply comes."""
    cluster, heard = SimulatedCluster(1, faults=()), list[int]()
    late_s = iter((1.0, 0.0))
    monkeypatch.setattr(cluster.injector, "store_s", lambda: 1.0)
    monkeypatch.setattr(cluster.injector, "reply_s", lambda: next(late_s, 0.0))

    def persisted(persist: Persist, term: Term) -> None:
        del term.unstored[persist.record]
        heard.append(persist.record)

    monkeypatch.setattr(cluster, "persisted", persisted)
    for record in (1, 2):
        persist = Persist(cause=0, record=record, entry=Retention("actor", record))
        cluster.unstored[record] = persist
        cluster.process.to_be_stored(persist, cluster.term)
    assert cluster.run_until(lambda: not cluster.unstored, 10.0)
    assert heard == [1, 2]


def test_a_former_leader_knows_what_was_so_when_it_was_deposed_however_many_lead_since() -> None:
    """Its clock is wrong, so it goes on while the next leader dies, and yet another one leads."""
    cluster = SimulatedCluster(1, faults=())
    former, history, worker = cluster.term, cluster.guarantees.history, cluster.worker("w")
    versions = [VersionInfo("actor", number, f"c{number}", 1, 1) for number in (1, 2, 3)]

    def publish(version: VersionInfo) -> None:
        call = Publishing("g", version.version)
        history.models["actor"].begins(call)
        history.models["actor"].published(call, version)

    publish(versions[0])
    publish(versions[1])
    cluster.process.split(lease_s=1.0, stops_s=0.5, believes_s=60.0)
    assert cluster.run_until(lambda: cluster.former is former, 5.0)
    publish(versions[2])
    second = cluster.term
    cluster.process.crash(kept=0.0, down_s=0.1)
    assert cluster.run_until(lambda: cluster.term is not second, 5.0)
    assert cluster.former is former
    former.joined[worker.incarnation] = 1
    cluster.term.joined.pop(worker.incarnation, None)
    assert cluster.is_behind(worker)
    history.says(worker, Watch("actor"))
    history.announced(worker, Announce("actor", versions[1]))
    with pytest.raises(GuaranteeBroken, match="visibility"):
        history.announced(worker, Announce("actor", versions[0]))


def test_the_last_words_of_a_late_leader_arrive_after_it_has_stepped_down() -> None:
    cluster = SimulatedCluster(1, faults=())
    former, worker = cluster.term, cluster.worker("w")
    cluster.process.split(lease_s=1.0, stops_s=0.0, believes_s=2.0)
    assert cluster.run_until(lambda: cluster.former is former, 5.0)
    worker.link = Link(1, former.party)
    cluster.process.step_down(former, "it looks at its clock")
    assert cluster.is_behind(worker)
    worker.link = Link(2, cluster.term.party)
    assert not cluster.is_behind(worker)
