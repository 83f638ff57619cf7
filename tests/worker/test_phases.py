"""Phases of calls that a search of a thousand seeds may not meet: each is entered here, from where
the table says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tensorhub.errors import GroupAborted, StateError
from tensorhub.machine import counting_transitions
from tensorhub.messages import Compare, ErrorInfo, GetManifest, ManifestReply, Outcome, Start
from tensorhub.testing.coverage import RARE, transitions
from tensorhub.types import Medium, OpKind, Purpose
from tensorhub.worker.calls import FillCall
from tensorhub.worker.local_copies import LocalCopies
from tests.worker.test_host import ALL, Rank, manifest, version


def host(copies: LocalCopies, purpose: Purpose = Purpose.PREFETCH) -> Rank:
    return Rank(copies, Medium.HOST, purpose)


def asks_manifest(rank: Rank, *, write: bool, staged: bool = False) -> int:
    """It is bound to version 2 and does not know its manifest: the number of its question."""
    rank.member._context.manifests._known.clear()
    rank.do(rank.member.begin(FillCall(OpKind.UPDATE, "latest", staged=staged), 60, 0))
    running = rank.member.running
    assert running is not None
    assert running.key is not None
    rank.do(
        rank.member.receive(Start(running.key, 0, version(2), manifest().manifest_id, write, ()), 0)
    )
    assert running.phase == "manifest"
    return rank.said(GetManifest)[-1].request


def manifest_comes(rank: Rank, request: int) -> None:
    rank.do(rank.member.receive(ManifestReply(request, manifest().encode()), 0))


def asked_to_fencing() -> None:
    rank = Rank(LocalCopies())
    rank.hold(1)
    rank.fill(2)


def manifest_to_asked() -> None:
    rank = Rank(LocalCopies())
    asks_manifest(rank, write=False)
    running = rank.member.running
    assert running is not None
    assert running.key is not None
    unknown = Outcome(
        running.key, 0, False, False, None, ErrorInfo.of(GroupAborted("new")), unknown=True
    )
    rank.do(rank.member.receive(unknown, 0))


def manifest_to_copying() -> None:
    copies = LocalCopies()
    host(copies).hold(2)
    rank = Rank(copies)
    manifest_comes(rank, asks_manifest(rank, write=True))


def manifest_to_fencing() -> None:
    rank = Rank(LocalCopies())
    rank.hold(1)
    manifest_comes(rank, asks_manifest(rank, write=True))


def room_to_stopping() -> None:
    """Also to the phase before, as a staged update whose manifest is not known."""
    rank = Rank(LocalCopies())
    rank.hold(1)
    manifest_comes(rank, asks_manifest(rank, write=True, staged=True))
    rank.do(rank.member.cancel(StateError("cancelled"), 0))
    rank.do(rank.member.room_ended(None, 0))


def hook_to_fencing() -> None:
    rank = Rank(LocalCopies())
    rank.hold(1)
    rank.fill(2, hold=True)
    rank.do(rank.member.hook_returned(None, 0))


def copying_to_copying() -> None:
    copies = LocalCopies()
    prefetched, rank = host(copies), Rank(copies)
    prefetched.fill(2, kind=OpKind.PREFETCH)
    rank.fill(2)
    prefetched.do(prefetched.member.cancel(StateError("an update has taken it"), 0))
    prefetched.do(prefetched.member.pull_stopped(0))
    rank.do(rank.member.copied(frozenset({0}), 0))


def copying_to_stopping() -> None:
    copies = LocalCopies()
    host(copies).hold(2)
    rank = Rank(copies)
    rank.fill(2)
    rank.do(rank.member.cancel(StateError("cancelled"), 0))


def voted_to_pulling() -> None:
    rank = Rank(LocalCopies())
    rank.fill(2)
    rank.do(rank.member.pull_done(0))
    content, running = rank.member.content, rank.member.running
    assert content is not None
    assert running is not None
    assert running.key is not None
    rank.do(rank.member.receive(Compare(running.key, 0, 0, b"", True), 0))
    rank.do(rank.member.compared(content.generation, len(ALL), [(1, 7, None)], 0))


def is_gone(rank: Rank) -> None:
    """What it reads; there is another way."""
    running = rank.member.running
    assert running is not None
    assert running.key is not None
    error = ErrorInfo.of(GroupAborted("call again"))
    rank.do(rank.member.receive(Outcome(running.key, 0, False, False, None, error, again=True), 0))


def held_to_asked() -> None:
    rank = Rank(LocalCopies())
    rank.do(rank.member.begin(FillCall(OpKind.UPDATE, "latest"), 60, 0))
    running = rank.member.running
    assert running is not None
    assert running.key is not None
    rank.do(
        rank.member.receive(Start(running.key, 0, version(2), manifest().manifest_id, False, ()), 0)
    )
    is_gone(rank)


def hook_to_asked() -> None:
    rank = Rank(LocalCopies())
    rank.fill(2, hold=True)
    is_gone(rank)
    rank.do(rank.member.hook_returned(None, 0))


def fencing_to_asked() -> None:
    rank = Rank(LocalCopies())
    rank.hold(1)
    held = rank.member.content
    assert held is not None
    rank.fill(2)
    is_gone(rank)
    rank.do(rank.member.fenced(held.generation, 0))


def stopping_to_asked() -> None:
    rank = Rank(LocalCopies())
    rank.fill(2)
    is_gone(rank)
    rank.do(rank.member.pull_stopped(0))


def voted_to_asked() -> None:
    rank = Rank(LocalCopies())
    rank.fill(2)
    rank.do(rank.member.pull_done(0))
    is_gone(rank)


WAYS: dict[Callable[[], None], set[str]] = {
    asked_to_fencing: {"fill: asked -> fencing"},
    manifest_to_asked: {"fill: manifest -> asked"},
    manifest_to_copying: {"fill: manifest -> copying"},
    manifest_to_fencing: {"fill: manifest -> fencing"},
    hook_to_fencing: {"fill: hook -> fencing"},
    room_to_stopping: {"fill: manifest -> room", "fill: room -> stopping"},
    held_to_asked: {"fill: held -> asked"},
    hook_to_asked: {"fill: hook -> asked"},
    fencing_to_asked: {"fill: fencing -> asked"},
    stopping_to_asked: {"fill: stopping -> asked"},
    voted_to_asked: {"fill: voted -> asked"},
    copying_to_copying: {"fill: copying -> copying"},
    copying_to_stopping: {"fill: copying -> stopping"},
    voted_to_pulling: {"fill: voted -> pulling"},
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_each_rare_phase_is_entered(way: Callable[[], None]) -> None:
    with counting_transitions() as counted:
        way()
    assert WAYS[way] <= set(counted)
    assert set(counted) <= set(transitions())


def test_a_search_is_spared_what_is_entered_here_and_nothing_else() -> None:
    assert Counter(RARE) == Counter(each for rare in WAYS.values() for each in rare)


@pytest.mark.parametrize(("number", "rebinds"), [(2, 0), (3, 1)])
def test_a_call_that_is_bound_to_equal_content_again_counts_no_rebind(
    number: int, rebinds: int
) -> None:
    rank = Rank(LocalCopies())
    rank.do(rank.member.begin(FillCall(OpKind.UPDATE, "latest"), 60, 0))
    running = rank.member.running
    assert running is not None

    def starts(bound: int) -> None:
        assert running is not None
        assert running.key is not None
        rank.do(
            rank.member.receive(
                Start(running.key, 0, version(bound), manifest().manifest_id, False, ()), 0
            )
        )

    starts(2)
    is_gone(rank)
    starts(number)
    assert running.rebinds == rebinds
