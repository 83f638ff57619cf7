"""Sessions and what they watch. How guests give way to others is in test_guests.py."""

from __future__ import annotations

from tensorhub.coordinator import Disconnected, Send
from tensorhub.messages import (
    Announce,
    Watch,
)
from tests.coordinator.test_answers import OBSERVER, ask, observed


def test_watchers_hear_the_newest_version_now_and_whenever_it_changes() -> None:
    cluster, trainer = observed()
    assert ask(cluster, Watch("actor")) == Announce("actor", None)
    heard: list[Announce] = []
    step = cluster.coordinator.step

    def listen(event: object, now: float) -> list[object]:
        actions = step(event, now)  # type: ignore[arg-type]
        heard.extend(a.message for a in actions if isinstance(a, Send) and isinstance(a.message, Announce))
        return list(actions)

    cluster.coordinator.step = listen  # type: ignore[assignment, method-assign]
    for number in (1, 2):
        trainer.publish(number)
        cluster.run()
        trainer.unpublish()
        cluster.run()
    assert [a.newest.version for a in heard if a.newest is not None] == [1, 2]
    step(Disconnected(OBSERVER), cluster.now)
    trainer.publish(3)
    cluster.run()
    assert len(heard) == 2
    assert cluster.coordinator.cluster.watchers == {}
