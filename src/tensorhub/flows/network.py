"""Max-min fair shares: what each flow gets of the links that it crosses.

`max_min` is the definition, by progressive filling: all rates grow alike. A flow stops when one of
its links is full, or when it reaches its bound: the rate at which its source fills. `Network` keeps
the shares of flows that come and go. After a change it looks again only at flows that share a link
with a changed flow, and at the flows that follow them.

Pure. Not responsible for a flow's progress, nor for the flow that it must follow (`transfers`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

F = TypeVar("F", bound=Hashable)
NEGLIGIBLE = 1e-9  # of a rate: two that differ by less are the same
ROUNDS_MAX = 64  # looks at one flow, before all are looked at together


def max_min(
    paths: Mapping[F, Sequence[int]],
    capacities: Mapping[int, float] | Sequence[float],
    follows: Mapping[F, tuple[float, Sequence[F]]] | None = None,
) -> dict[F, float]:
    """The rate of each flow. `paths`: the links that each crosses, at least one. `follows`: a flow
    gets no more than a constant and these other flows together.
    """
    follows = follows or {}
    left: dict[int, float] = {}  # of each link, what flows have not got that have stopped
    users: dict[int, list[F]] = {}
    for flow, path in paths.items():
        for link in path:
            users.setdefault(link, []).append(flow)
    growing = {link: len(there) for link, there in users.items()}
    for link in users:
        left[link] = capacities[link]
    awaited: dict[F, int] = {}  # how many of those that bound a flow still grow
    followers: dict[F, list[F]] = {}
    rates: dict[F, float] = {}
    # so that nothing else is compared
    numbers = {flow: number for number, flow in enumerate(paths)}
    ahead: list[tuple[float, int, int]] = [
        (left[link] / count, -1, link) for link, count in growing.items()
    ]
    order = list(paths)
    for flow, (constant, others) in follows.items():
        awaited[flow] = len(others)
        for other in others:
            followers.setdefault(other, []).append(flow)
        if not others:
            ahead.append((constant, numbers[flow], -1))
    heapify(ahead)

    def stop(flow: F, level: float) -> None:
        """Its rate is fixed. Flows that follow it are bounded by this rate or a higher one."""
        if flow in rates:
            return
        rates[flow] = level
        for link in paths[flow]:
            left[link] -= level
            growing[link] -= 1
        for follower in followers.get(flow, ()):
            awaited[follower] -= 1
            if not awaited[follower]:
                constant, others = follows[follower]
                heappush(
                    ahead, (constant + sum(rates[other] for other in others), numbers[follower], -1)
                )

    while len(rates) < len(paths):
        level, number, link = heappop(ahead)
        if number >= 0:
            stop(order[number], level)
            continue
        if not growing[link]:
            continue
        now = max(0.0, left[link]) / growing[link]
        if now > level:  # some of its flows have stopped since
            heappush(ahead, (now, -1, link))
            continue
        for flow in users[link]:
            stop(flow, level)
    return rates


class Network(Generic[F]):
    """The shares of the flows that there are. `capacities`: of each link, by number."""

    def __init__(self, capacities: Sequence[float]) -> None:
        self.capacities = capacities
        self.rates: dict[F, float] = {}  # as of the last `settle`
        self._paths: dict[F, tuple[int, ...]] = {}
        self._users: dict[int, dict[F, None]] = {}
        # of a flow that is bounded: by which others; () allows nothing
        self._follows: dict[F, tuple[F, ...]] = {}
        self._followers: dict[F, dict[F, None]] = {}
        self._changed: dict[F, None] = {}  # flows whose shares must be looked at again

    def __contains__(self, flow: F) -> bool:
        return flow in self._paths

    def add(self, flow: F, path: tuple[int, ...]) -> None:
        self._paths[flow] = path
        self.rates[flow] = 0.0
        for link in path:
            self._users.setdefault(link, {})[flow] = None
        self._changed[flow] = None
        for follower in self._followers.get(flow, ()):
            self._changed[follower] = None

    def remove(self, flow: F) -> None:
        self.follow(flow, None)
        for link in self._paths.pop(flow):
            users = self._users[link]
            del users[flow]
            self._changed.update(dict.fromkeys(users))
        self._changed.pop(flow, None)
        del self.rates[flow]
        for follower in self._followers.get(flow, ()):
            self._changed[follower] = None

    def follow(self, flow: F, others: tuple[F, ...] | None) -> None:
        """From now on it gets no more than these together; None: no bound."""
        before = self._follows.get(flow)
        if before == others:
            return
        for other in before or ():
            there = self._followers[other]
            del there[flow]
            if not there:
                del self._followers[other]
        if others is None:
            del self._follows[flow]
        else:
            self._follows[flow] = others
            for other in others:
                self._followers.setdefault(other, {})[flow] = None
        if flow in self._paths:
            self._changed[flow] = None

    def settle(self) -> dict[F, None]:
        """Give every flow its share. Returns the flows with a changed rate."""
        moved: dict[F, None] = {}
        looks: dict[F, int] = {}
        while self._changed:
            first = next(iter(self._changed))
            if first not in self._paths:
                del self._changed[first]
                continue
            looks[first] = looks.get(first, 0) + 1
            together = (
                self._sharing([first]) if looks[first] <= ROUNDS_MAX else dict.fromkeys(self._paths)
            )
            for flow in together:
                self._changed.pop(flow, None)
            for flow, rate in self._shares(together).items():
                if abs(rate - self.rates[flow]) <= NEGLIGIBLE * max(rate, self.rates[flow]):
                    continue
                self.rates[flow] = rate
                moved[flow] = None
                for follower in self._followers.get(flow, ()):
                    if follower not in together:
                        self._changed[follower] = None
        return moved

    def _sharing(self, flows: Iterable[F]) -> dict[F, None]:
        """The flows, and all flows that share a link with them, directly or through further
        flows.
        """
        found, links = dict.fromkeys(flows), set[int]()
        todo = list(found)
        while todo:
            for link in self._paths[todo.pop()]:
                if link in links:
                    continue
                links.add(link)
                for flow in self._users[link]:
                    if flow not in found:
                        found[flow] = None
                        todo.append(flow)
        return found

    def _shares(self, flows: dict[F, None]) -> dict[F, float]:
        follows: dict[F, tuple[float, Sequence[F]]] = {}
        for flow in flows:
            others = self._follows.get(flow)
            if others is not None:
                constant = sum(self.rates.get(other, 0.0) for other in others if other not in flows)
                follows[flow] = constant, [other for other in others if other in flows]
        if len(flows) == 1:  # mostly
            (flow,) = flows
            rate = min(self.capacities[link] for link in self._paths[flow])
            return {flow: min(rate, follows[flow][0]) if flow in follows else rate}
        return max_min({flow: self._paths[flow] for flow in flows}, self.capacities, follows)
