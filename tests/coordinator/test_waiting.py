"""What an undecided operation waits for: when it is looked at again, and how many of its ranks are."""

from __future__ import annotations

import pytest

from benches.scale.core import Core
from tensorhub.coordinator import Received, waiting
from tensorhub.coordinator.entities import RankPart
from tests.coordinator.test_availability import newest_left, publish


@pytest.mark.parametrize("is_bound", [False, True])
def test_a_call_for_available_that_has_written_nothing_follows_what_can_be_fetched(
    is_bound: bool,
) -> None:
    cluster, trainer, keeper, reader = newest_left()
    publish(cluster, trainer, number=3)
    if not is_bound:
        for holder in (trainer, keeper):
            holder.worker.disconnect()
    cluster.run()
    asked = reader.update("available", hold=True)
    cluster.run("hook")
    operation = cluster.coordinator.cluster.models["actor"].groups["reader"].operation
    assert operation is not None
    assert (operation.version is not None) is is_bound
    if is_bound:
        trainer.unpublish()
    else:
        keeper.worker.connect()
    cluster.run()
    assert asked.number == 1


def looks(ranks: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often it is asked what a rank of so many lacks, in the step in which one of them votes."""
    core = Core(ranks, ranks, 1000)
    core.connect()
    core.begin_version(1)
    reader, asked, needs_source = core.readers[0], list[RankPart](), waiting.needs_source
    reader.prepared()
    (vote,) = reader.sent()

    def ask(part: RankPart) -> bool:
        asked.append(part)
        return needs_source(part)

    monkeypatch.setattr(waiting, "needs_source", ask)
    core.step(Received(reader.number, vote))
    monkeypatch.undo()
    (operation,) = core.coordinator.cluster.undecided.values()
    assert sum(part.voted for part in operation.parts.values()) == 1
    return len(asked)


def test_of_many_ranks_only_the_one_that_has_news_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert looks(8, monkeypatch) == looks(2, monkeypatch) > 0
