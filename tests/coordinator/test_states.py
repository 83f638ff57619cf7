"""Every state machine's table, walked pair by pair, and compared with the words of the design."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, get_args

import pytest

from tensorhub.coordinator import states
from tensorhub.coordinator.core import Coordinator
from tensorhub.coordinator.entities import Operation, RankPart, ReadLease, Replica, Version, Worker
from tensorhub.machine import STORY_EVENTS_MAX, IllegalTransition, Stateful
from tensorhub.worker import states as worker_states
from tensorhub.worker.active_call import Refusing
from tensorhub.worker.calls import Call
from tensorhub.worker.filling import Filling
from tensorhub.worker.leaving import Leaving
from tensorhub.worker.member import CALLS as CALL_KINDS
from tensorhub.worker.member_memory import MemberMemory
from tensorhub.worker.publishing import Publishing
from tensorhub.worker.states import Phase

Table = Mapping[Any, frozenset[Any]]

# name: (the entity that moves along it, its first states, the design's words).
# In the words, "A <-> B" goes both ways, and what is in brackets is explanation.
MACHINES: dict[str, tuple[type[Stateful[Any]], str, str]] = {
    "version": (
        Version,
        "STAGED",
        (
            "STAGED -> AVAILABLE | DISCARDED; AVAILABLE <-> UNAVAILABLE; AVAILABLE -> RETIRED; "
            "UNAVAILABLE -> RETIRED"
        ),
    ),
    "replica": (
        Replica,
        "FILLING",
        """FILLING -> READY | TORN | GONE; READY -> DRAINING | GONE; DRAINING -> GONE | READY;
        TORN -> FILLING | READY (published after the owner's own load) | GONE""",
    ),
    "read lease": (
        ReadLease,
        "ACTIVE",
        "ACTIVE -> RELEASED | FENCING; FENCING -> FENCED | RELEASED",
    ),
    "worker lease": (Worker, "LIVE", "LIVE <-> SUSPECT; SUSPECT -> LOST"),
    "group operation": (
        Operation,
        "GATHERING",
        (
            "GATHERING -> RUNNING | ABORTED; RUNNING -> PREPARED | ABORTED; "
            "PREPARED -> COMMITTED | ABORTED"
        ),
    ),
    "rank's part": (
        RankPart,
        "CALLED",
        (
            "CALLED -> READY | READING | VOTED; READY -> READING; READING -> CLAIMING; CLAIMING -> "
            "READING | VOTED"
        ),
    ),
    "coordinator": (Coordinator, "RECOVERING", "RECOVERING -> SERVING"),
    "handle": (
        MemberMemory,
        "EMPTY",
        """EMPTY -> FILLING | READY | IN_DOUBT | CLOSED;
        FILLING -> READY | TORN | IN_DOUBT | CLOSED;
        READY -> DRAINING | FILLING | EMPTY | IN_DOUBT;
        DRAINING -> EMPTY | READY;
        TORN -> FILLING | EMPTY (written anew, says the caller) | CLOSED;
        IN_DOUBT -> READY | EMPTY | TORN | FILLING""",
    ),
    "publish": (
        Publishing,
        "QUEUED",
        "QUEUED -> VOTED | OVER; VOTED -> ABANDONING | OVER; ABANDONING -> OVER",
    ),
    "fill": (
        Filling,
        "QUEUED",
        """QUEUED -> ASKED | OVER;
        ASKED -> MANIFEST | HOOK | HELD | FENCING | ROOM | COPYING | PULLING | ABANDONING | OVER;
        MANIFEST -> ASKED | HOOK | HELD | FENCING | ROOM | COPYING | PULLING | ABANDONING | OVER;
        HOOK -> ASKED (what it has read is gone) | HELD | FENCING | COPYING | PULLING | VOTED (of what was staged) |
        ABANDONING | OVER;
        HELD -> ASKED | FENCING | ROOM | COPYING | PULLING | ABANDONING | OVER;
        FENCING -> ASKED | COPYING | PULLING | OVER (the old version stays);
        ROOM -> COPYING | PULLING | STOPPING; COPYING -> COPYING | PULLING | STOPPING;
        PULLING -> HOOK (of what was staged) | VOTED | STOPPING; VOTED -> ASKED | PULLING (wrong bytes) | APPLYING |
        OVER; APPLYING -> OVER; ABANDONING -> OVER; STOPPING -> ASKED | OVER""",
    ),
    "leave": (
        Leaving,
        "QUEUED",
        """QUEUED -> WITHDRAWING | DEREGISTERING | OVER; WITHDRAWING -> FENCING | OVER;
        FENCING -> DEREGISTERING | OVER; DEREGISTERING -> OVER""",
    ),
    "immediate call": (Refusing, "QUEUED", "QUEUED -> OVER"),
}
CALLS = ("publish", "fill", "leave", "immediate call")  # each goes through some of the phases
TERMINAL = {
    "version": {"DISCARDED", "RETIRED"},
    "replica": {"GONE"},
    "read lease": {"RELEASED", "FENCED"},
    "worker lease": {"LOST"},
    "group operation": {"COMMITTED", "ABORTED"},
    "rank's part": {"VOTED"},
    "coordinator": {"SERVING"},
    "handle": {"CLOSED"},
    **{call: {"OVER"} for call in CALLS},
}


def in_words(words: str) -> set[tuple[str, str]]:
    moves: set[tuple[str, str]] = set()
    for clause in re.sub(r"\([^)]*\)", "", words).split(";"):
        left, both, right = clause.partition("<->")
        if not both:
            left, _, right = clause.partition("->")
        for target in right.split("|"):
            moves.add((left.strip(), target.strip()))
            if both:
                moves.add((target.strip(), left.strip()))
    return moves


def names(table: Table) -> set[tuple[str, str]]:
    return {(old.name, new.name) for old, targets in table.items() for new in targets}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_table_says_what_the_design_says(machine: str) -> None:
    entity, _, words = MACHINES[machine]
    assert names(entity.table) == in_words(words)


def test_every_table_is_a_machines() -> None:
    tables = [value for name, value in vars(states).items() if name.endswith("_TABLE")]
    tables += [value for name, value in vars(worker_states).items() if name.endswith("_TABLE")]
    used = [entity.table for entity, _, _ in MACHINES.values()]
    assert len(tables) == len(used)
    assert all(any(t is u for u in used) for t in tables)


@pytest.mark.parametrize("machine", MACHINES)
def test_every_state_is_reached_and_the_last_ones_are_last(machine: str) -> None:
    entity, first, _ = MACHINES[machine]
    table: Table = entity.table
    kind: type[StrEnum] = type(next(iter(table)))
    if machine not in CALLS:
        assert set(table) == set(kind)
    reached, todo = {kind[first]}, [kind[first]]
    while todo:
        for new in table[todo.pop()] - reached:
            reached.add(new)
            todo.append(new)
    assert reached == set(table)
    assert {state.name for state in table if not table[state]} == TERMINAL[machine]


PAIRS = [
    (machine, old, new)
    for machine, (entity, _, _) in MACHINES.items()
    for old in entity.table
    for new in type(old)  # every pair, also of a state with itself
]


def test_each_phase_is_one_of_some_call() -> None:
    assert set().union(*(MACHINES[call][0].table for call in CALLS)) == set(Phase)
    kinds = {kind.machine: kind.table for kind in CALL_KINDS.values()}
    assert {name: names(table) for name, table in kinds.items()} == {
        name: names(MACHINES[name][0].table) for name in CALLS
    }


def test_each_call_has_its_kind() -> None:
    assert set(CALL_KINDS) == set(get_args(Call))


@pytest.mark.parametrize(("machine", "old", "new"), PAIRS, ids=lambda value: str(value))
def test_become_moves_along_the_table_and_nowhere_else(
    machine: str, old: StrEnum, new: StrEnum
) -> None:
    kind, _, _ = MACHINES[machine]

    class Entity(Stateful[Any]):
        machine = kind.machine
        table = kind.table

        def __repr__(self) -> str:
            return f"<a {machine}>"

    entity = Entity(old)
    entity.story.note(7, 1.5, "something happened before")
    if new in entity.table[old]:
        entity.become(new, 8, 2.0, "because")
        assert entity.state is new
        assert f"2.000 (event 8) {old} -> {new}: because" in str(entity.story)
        return
    with pytest.raises(IllegalTransition) as caught:
        entity.become(new, 8, 2.0, "because")
    assert entity.state is old
    for part in (f"<a {machine}>", f"{old} -> {new}", "because", "something happened before"):
        assert part in str(caught.value)


def test_a_story_is_bounded_and_keeps_the_newest() -> None:
    entity = Stateful(states.WorkerState.LIVE)
    for number in range(10 * STORY_EVENTS_MAX):
        entity.story.note(number, float(number), f"line {number};")
    lines = str(entity.story).splitlines()
    assert len(lines) == STORY_EVENTS_MAX
    assert f"line {10 * STORY_EVENTS_MAX - 1};" in lines[-1]
