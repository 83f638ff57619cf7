"""Bugs in reading what has changed since the version before."""

from __future__ import annotations

from collections.abc import Iterator

from tensorhub.scheduler.requests import Requests
from tensorhub.testing.sim.pulling import Frame, SimLane
from tests.testing.bugs import bug, replaced


@bug("G1: what a delta makes is not digested")
def the_result_of_a_delta_is_believed() -> Iterator[None]:
    settle = SimLane.settle

    def believes(self: SimLane, frame: Frame) -> None:
        made = self._made_of(frame)
        digests = Requests.sort_out

        def all_good(arrived, made, published, *, is_digested):  # type: ignore[no-untyped-def]
            named = list(arrived)
            good, bad = digests(named, made, published, is_digested=is_digested)
            taken = [each for each in named if each[0] in bad and each[0] in frame.bases]
            return [*good, *taken], [each for each in bad if each not in frame.bases]

        with (
            replaced(SimLane, "_made_of", lambda lane, came: made),
            replaced(Requests, "sort_out", staticmethod(all_good)),
        ):
            settle(self, frame)

    with replaced(SimLane, "settle", believes):
        yield
