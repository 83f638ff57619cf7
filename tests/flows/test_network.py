"""Max-min fair shares: feasible, as large as can be, the same in any order; and kept, the same as
found anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings, strategies as st

from tensorhub.flows.network import Network, max_min

Paths = dict[int, tuple[int, ...]]


@dataclass
class Case:
    capacities: list[float]
    paths: Paths
    follows: dict[int, tuple[float, tuple[int, ...]]] = field(default_factory=dict)


@st.composite
def cases(draw: st.DrawFn, *, bounded: bool = False) -> Case:
    links = draw(st.integers(1, 7))
    capacities = [float(draw(st.sampled_from((1, 2, 3, 10)))) for _ in range(links)]
    paths: Paths = {}
    for flow in range(draw(st.integers(1, 14))):
        path = draw(st.lists(st.integers(0, links - 1), min_size=1, max_size=3, unique=True))
        paths[flow] = tuple(path)
    case = Case(capacities, paths)
    for flow in paths:
        if bounded and flow and draw(st.booleans()):
            case.follows[flow] = 0.0, (draw(st.integers(0, flow - 1)),)
    return case


def used(case: Case, rates: dict[int, float]) -> list[float]:
    return [
        sum(rates[f] for f, path in case.paths.items() if link in path)
        for link in range(len(case.capacities))
    ]


@given(cases(bounded=True))
def test_no_link_carries_more_than_it_can_and_nobody_is_ahead_of_whom_it_follows(
    case: Case,
) -> None:
    rates = max_min(case.paths, case.capacities, case.follows)
    assert all(
        have <= most * (1 + 1e-9)
        for have, most in zip(used(case, rates), case.capacities, strict=True)
    )
    assert all(
        rates[flow] <= sum(rates[other] for other in others) + 1e-9
        for flow, (_, others) in case.follows.items()
    )


@given(cases(bounded=True))
def test_each_flow_has_a_full_link_on_which_nobody_has_more_or_has_all_of_whom_it_follows(
    case: Case,
) -> None:
    rates = max_min(case.paths, case.capacities, case.follows)
    full = [
        have >= most * (1 - 1e-9)
        for have, most in zip(used(case, rates), case.capacities, strict=True)
    ]
    for flow, path in case.paths.items():
        most = [
            max(rates[f] for f, other in case.paths.items() if link in other)
            for link in path
            if full[link]
        ]
        follows_all = (
            flow in case.follows
            and rates[flow] >= sum(rates[o] for o in case.follows[flow][1]) - 1e-9
        )
        assert follows_all or any(rates[flow] >= there - 1e-9 for there in most)


@given(cases(bounded=True), st.randoms())
def test_the_order_of_flows_makes_no_difference(case: Case, random: object) -> None:
    order = list(case.paths)
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = max_min({flow: case.paths[flow] for flow in order}, case.capacities, case.follows)
    rates = max_min(case.paths, case.capacities, case.follows)
    assert all(abs(shuffled[flow] - rates[flow]) < 1e-9 for flow in rates)


@settings(deadline=None)
@given(cases(bounded=True), st.data())
def test_shares_that_are_kept_are_those_that_are_found_anew(
    case: Case, data: st.DataObject
) -> None:
    network: Network[int] = Network(case.capacities)
    there: Paths = {}
    follows: dict[int, tuple[float, tuple[int, ...]]] = {}
    for flow, path in case.paths.items():
        network.add(flow, path)
        there[flow] = path
        if flow in case.follows and case.follows[flow][1][0] in there:
            follows[flow] = case.follows[flow]
            network.follow(flow, follows[flow][1])
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(there)))
            for follower in [
                f for f, (_, others) in follows.items() if gone in others and f != gone
            ]:
                del follows[follower]
                network.follow(follower, None)
            network.remove(gone)
            follows.pop(gone, None)
            del there[gone]
        network.settle()
        wanted = max_min(there, case.capacities, follows) if there else {}
        assert network.rates.keys() == wanted.keys()
        assert all(abs(network.rates[each] - rate) < 1e-6 for each, rate in wanted.items())


def test_a_flow_that_may_follow_nobody_gets_nothing() -> None:
    assert max_min({1: (0,), 2: (0,)}, [2.0], {1: (0.0, ())}) == {1: 0.0, 2: 2.0}


def test_a_chain_gets_what_its_narrowest_link_carries_from_there_on() -> None:
    paths = {1: (0,), 2: (1,), 3: (2,)}
    assert max_min(paths, [3.0, 1.0, 3.0], {2: (0.0, (1,)), 3: (0.0, (2,))}) == {
        1: 3.0,
        2: 1.0,
        3: 1.0,
    }


def test_a_bound_may_have_a_constant_part() -> None:
    paths = {1: (0,), 2: (1,), 3: (2,)}
    assert max_min(paths, [1.0, 9.0, 9.0], {2: (0.5, (1,)), 3: (2.0, ())}) == {
        1: 1.0,
        2: 1.5,
        3: 2.0,
    }


def test_who_follows_flows_over_other_links_hears_of_each_change() -> None:
    """Flow 9 shares no link with those that it follows: one that comes, slows down, goes, or is not
    followed any more.
    """
    network: Network[int] = Network([6.0, 6.0, 100.0])
    network.add(9, (2,))
    network.follow(9, (1, 2))

    def rate() -> float:
        network.settle()
        return network.rates[9]

    assert rate() == 0.0
    network.add(1, (0,))
    assert rate() == 6.0
    network.add(2, (1,))
    assert rate() == 12.0
    network.add(3, (0,))  # shares link 0 with flow 1
    assert rate() == 9.0
    network.remove(2)
    assert rate() == 3.0
    network.follow(9, (3,))
    network.remove(1)
    assert rate() == 6.0
    network.follow(9, None)
    assert rate() == 100.0


def test_a_flow_may_follow_others_before_it_is_there() -> None:
    network: Network[int] = Network([6.0, 6.0, 100.0])
    network.follow(9, (1, 2))
    network.add(1, (0,))
    network.add(2, (1,))
    assert network.rates == {1: 0.0, 2: 0.0}
    assert network.settle() == {1: None, 2: None}
    assert network.rates == {1: 6.0, 2: 6.0}
    assert 9 not in network
    network.add(9, (2,))
    network.settle()
    assert 9 in network
    assert network.rates[9] == 12.0


def test_flows_that_are_gone_leave_nothing_behind() -> None:
    network: Network[int] = Network([6.0])
    for flow in range(0, 100, 2):
        for each in (flow, flow + 1):
            network.add(each, (0,))
        network.follow(flow, (flow + 1,))
        network.settle()
        for each in (flow, flow + 1):
            network.remove(each)
    assert network.settle() == {}
    assert [*network._paths, *network._follows, *network._followers, *network.rates] == []
