"""What a rank does with host copies and with what it has staged: the order of copies, fences, votes
and restatements.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import TypeVar

import pytest

from tensorhub.errors import DrainTimeout, GroupAborted, IntegrityError, StateError
from tensorhub.messages import (
    AddSource,
    DropSource,
    ErrorInfo,
    Grant,
    LeaveGranted,
    LeaveRequest,
    Outcome,
    Prepared,
    ReadFailed,
    Refused,
    Register,
    Registered as RegisteredReply,
    Resolve,
    RetainedAck,
    Revoked,
    SetRetained,
    Start,
)
from tensorhub.model.manifest import Manifest, TensorDescription, build_manifest
from tensorhub.types import HandleState, Location, Medium, OpKind, Purpose, VersionInfo
from tensorhub.worker.calls import (
    Action,
    AddPullSource,
    CopyLocally,
    DropPullSource,
    EndPrefetch,
    Fence,
    FillCall,
    Finish,
    FreeStaging,
    LocalCopy,
    MakeRoom,
    OpenGeneration,
    ReleaseCall,
    ReopenGeneration,
    Say,
    StartPull,
    UnpublishCall,
    staging_of,
)
from tensorhub.worker.local_copies import LocalCopies
from tensorhub.worker.member import Member
from tensorhub.worker.registration_session import Shard

A = TypeVar("A")
CHUNKS = 3
ALL = frozenset(range(CHUNKS))
GRANT = Grant("lease", "source", "i", "r", 1, (), Location(), True)


def manifest() -> Manifest:
    return build_manifest(
        [TensorDescription("w", "uint8", (CHUNKS, 4096), 0, CHUNKS * 4096)], 4096, "none", "world/1"
    )


def version(number: int) -> VersionInfo:
    return VersionInfo("m", number, f"content{number}", CHUNKS * 4096, 1)


class Rank:
    """A member that is connected, and everything that it has wanted so far."""

    def __init__(
        self,
        copies: LocalCopies,
        medium: Medium = Medium.DEVICE,
        purpose: Purpose = Purpose.USE,
        *,
        ranks: int = 1,
    ) -> None:
        name = f"{medium.value}-{purpose.value}"
        self.shard = Shard(
            name, "m", name, 0, ranks, False, "world/1", manifest(), 0, medium, purpose
        )
        numbers = count(1)
        known = {manifest().manifest_id: manifest()}
        self.member = Member(
            self.shard,
            requests=lambda: next(numbers),
            generations=lambda: next(numbers),
            manifests=known,
            copies=copies,
        )
        self.actions: list[Action] = []
        self.connect()
        self.take()

    def connect(self) -> None:
        (say,) = [a.message for a in self.do(self.member.connected(0, 10)) if isinstance(a, Say)][
            -1:
        ]
        assert isinstance(say, Register)
        self.registered = say
        self.do(self.member.receive(RegisteredReply(say.request, say.registration, 1, 0, True), 0))

    def do(self, actions: list[Action]) -> list[Action]:
        self.actions.extend(actions)
        return actions

    def take(self) -> list[Action]:
        """What it has wanted since the last time, but for messages."""
        taken: list[Action] = [action for action in self.actions if not isinstance(action, Say)]
        self.actions = []
        return taken

    def said(self, kind: type[A]) -> list[A]:
        return [
            a.message for a in self.actions if isinstance(a, Say) and isinstance(a.message, kind)
        ]

    def fill(
        self, number: int, *, staged: bool = False, hold: bool = False, kind: OpKind = OpKind.UPDATE
    ) -> None:
        """Called, bound, and told to write."""
        self.do(self.member.begin(FillCall(kind, "latest", hold=hold, staged=staged), 60, 0))
        self.start(number)

    def start(self, number: int) -> None:
        running = self.member.running
        assert running is not None
        assert running.key is not None
        start = Start(running.key, 0, version(number), manifest().manifest_id, True, ())
        self.do(self.member.receive(start, 0))

    def outcome(self, number: int | None) -> None:
        running = self.member.running
        key = (
            running.key
            if running is not None and running.key is not None
            else self.member._memory.doubt
        )
        assert key is not None
        error = ErrorInfo.of(GroupAborted("aborted")) if number is None else None
        done = Outcome(
            key, 0, number is not None, True, version(number) if number is not None else None, error
        )
        self.do(self.member.receive(done, 0))
        self.member.check_invariants()

    def hold(self, number: int) -> None:
        """Filled with a version, as if in no time."""
        self.fill(number)
        self.do(self.member.copied(ALL, 0))  # from other memory of this worker, where there is some
        self.do(self.member.pull_done(0))
        self.outcome(number)
        self.take()

    def fenced(self) -> None:
        """The last fence that it wanted stands."""
        fence = [action for action in self.actions if isinstance(action, Fence)][-1]
        self.take()
        self.do(self.member.fenced(fence.generation, 0))


def of(actions: list[Action], kind: type[A]) -> A:
    (found,) = [action for action in actions if isinstance(action, kind)]
    return found


def kinds(actions: list[Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


# --------------------------------------------------------------------------------------------------
# local copies


def test_what_a_running_prefetch_has_is_copied_first_and_again_after_it_broke_off() -> None:
    copies = LocalCopies()
    host, rank = Rank(copies, Medium.HOST, Purpose.PREFETCH), Rank(copies)
    host.fill(2, kind=OpKind.PREFETCH)
    under = of(host.take(), StartPull).generation
    rank.fill(2)
    actions = rank.take()
    assert kinds(actions) == ["OpenGeneration", "CopyLocally"]
    assert of(actions, CopyLocally).sources == (LocalCopy(host.shard.registration, under),)
    host.do(host.member.cancel(StateError("an update has taken it"), 0))
    host.do(host.member.pull_stopped(0))
    salvage = of(host.take(), ReopenGeneration).generation
    rank.do(rank.member.copied(frozenset({0}), 0))
    again = of(rank.take(), CopyLocally)
    assert (again.sources, again.copied) == (
        (LocalCopy(host.shard.registration, salvage),),
        frozenset({0}),
    )
    rank.do(rank.member.copied(frozenset({0, 1}), 0))
    actions = rank.take()
    assert kinds(actions) == ["EndPrefetch", "StartPull"]
    assert of(actions, StartPull).copied == frozenset({0, 1})
    rank.do(rank.member.pull_done(0))
    rank.outcome(2)
    actions = rank.take()
    assert (kinds(actions), of(actions, EndPrefetch).frees) == (["EndPrefetch", "Finish"], True)


def test_a_copy_is_registered_unless_the_newest_coordinator_has_refused_it() -> None:
    rank = Rank(LocalCopies(), Medium.HOST, Purpose.PREFETCH)
    member = rank.member

    def is_registered() -> bool:
        return member.is_registered

    assert is_registered()
    rank.do(member.disconnected(0))
    assert is_registered()  # as far as it knows
    rank.do(member.connected(0, 10))
    (say,) = rank.said(Register)
    rank.do(member.receive(Refused(say.request, ErrorInfo.of(StateError("no"))), 0))
    assert not is_registered()
    rank.connect()
    assert is_registered()


def test_only_copies_of_that_content_and_shard_are_of_use() -> None:
    copies = LocalCopies()
    Rank(copies, Medium.HOST, Purpose.PREFETCH).hold(1)
    rank = Rank(copies)
    rank.fill(2)
    assert kinds(rank.take()) == ["OpenGeneration", "EndPrefetch", "StartPull"]


def test_a_fill_that_is_given_up_while_it_copies_is_torn_behind_the_copying() -> None:
    copies = LocalCopies()
    Rank(copies, Medium.HOST, Purpose.PREFETCH).hold(2)
    rank = Rank(copies)
    rank.fill(2)
    rank.take()
    rank.do(rank.member.cancel(StateError("cancelled"), 0))
    assert kinds(rank.take()) == ["StopPull"]
    rank.do(rank.member.copied(ALL, 0))  # it crossed the order to stop
    assert rank.take() == []
    rank.do(rank.member.pull_stopped(0))
    assert kinds(rank.take()) == ["Fence", "Finish"]
    assert rank.member.state is HandleState.TORN


@pytest.mark.parametrize("copied", [False, True])
def test_who_goes_over_copies_all_of_it_again(copied: bool) -> None:
    """What it had copied may lie in other chunks then."""
    copies = LocalCopies()
    Rank(copies, Medium.HOST, Purpose.PREFETCH).hold(2)
    rank = Rank(copies)
    rank.fill(2)
    first = of(rank.take(), CopyLocally)
    if copied:
        rank.do(rank.member.copied(frozenset({0}), 0))
        assert of(rank.take(), StartPull).copied == frozenset({0})
    assert rank.member.running is not None
    assert rank.member.running.key is not None
    gone = ErrorInfo.of(GroupAborted("what it has read is gone; call again"))
    rank.do(
        rank.member.receive(
            Outcome(rank.member.running.key, 0, False, False, None, gone, again=True), 0
        )
    )
    assert kinds(rank.take()) == ["StopPull"]
    rank.do(rank.member.pull_stopped(0))
    assert kinds(rank.take()) == ["Fence"]
    rank.start(2)
    again = of(rank.take(), CopyLocally)
    assert (again.sources, again.copied) == (first.sources, frozenset())


def test_a_release_frees_the_memory_when_its_fence_stands() -> None:
    host = Rank(LocalCopies(), Medium.HOST, Purpose.PREFETCH)
    host.hold(2)
    host.do(host.member.begin(ReleaseCall(), 60, 0))
    (withdraw,) = host.said(LeaveRequest)
    assert host.take() == []
    host.do(host.member.receive(LeaveGranted(withdraw.request), 0))
    host.fenced()
    assert kinds(host.take()) == ["FreeMemory", "Finish"]
    host.fill(3, kind=OpKind.PREFETCH)
    host.do(host.member.cancel(StateError("cancelled"), 0))
    host.do(host.member.pull_stopped(0))
    host.take()
    host.do(host.member.begin(ReleaseCall(), 60, 0))
    assert kinds(host.take()) == ["Fence", "FreeMemory", "Finish"]  # what was left of it


def test_memory_that_is_not_a_copys_is_never_freed() -> None:
    rank = Rank(LocalCopies())
    rank.hold(2)
    rank.do(rank.member.receive(Revoked(rank.shard.registration, "content2", "rolled back"), 0))
    rank.fenced()
    assert rank.member.state is HandleState.EMPTY
    assert rank.take() == []


def test_a_retention_copy_is_filled_from_a_handle_of_its_worker_and_never_the_other_way() -> None:
    copies = LocalCopies()
    rank, host = Rank(copies), Rank(copies, Medium.HOST, Purpose.RETENTION)
    rank.hold(1)
    content = rank.member.content
    assert content is not None
    host.fill(1, kind=OpKind.REPLICATE)
    assert of(host.take(), CopyLocally).sources == (
        LocalCopy(rank.shard.registration, content.generation),
    )
    assert not copies.keep(rank.shard, "content1", manifest().grid_id)
    host.do(host.member.copied(ALL, 0))
    assert of(host.take(), StartPull).copied == ALL
    host.do(host.member.pull_done(0))
    host.outcome(1)
    assert host.member.version == 1
    assert copies.keep(rank.shard, "content1", manifest().grid_id)
    # it is not its own reason to leave
    assert not copies.keep(host.shard, "content1", manifest().grid_id)
    other = replace(rank.shard, registration="another handle")
    assert [each.registration for each in copies.find(other, "content1", manifest().grid_id)] == [
        "host-retention"
    ]


@pytest.mark.parametrize(("ranks", "goes"), [(1, True), (2, False)])
def test_unasked_a_rank_leaves_what_its_own_host_copy_keeps_unless_it_has_mates(
    ranks: int, goes: bool
) -> None:
    """R4: the others' shards stop to serve with it, also where one rank has published all that they
    have read.
    """
    copies = LocalCopies()
    rank, host = Rank(copies, ranks=ranks), Rank(copies, Medium.HOST, Purpose.RETENTION)
    rank.hold(1)
    host.hold(1)
    rank.do(rank.member.receive(SetRetained(rank.shard.registration, "content1", True, 1), 0))
    rank.do(rank.member.begin(UnpublishCall(), 60, 0))
    rank.do(rank.member.tick(30))  # readers have had half the time to leave
    assert kinds(rank.take()) == (["Fence"] if goes else [])


def test_a_rank_does_not_say_that_it_keeps_what_it_fences_unless_it_has_stayed() -> None:
    """R4: by its word another last holder would leave. Its own leave may be unasked: it did not
    know that the version is retained.
    """
    rank = Rank(LocalCopies())
    rank.hold(1)
    rank.do(rank.member.begin(UnpublishCall(), 60, 0))
    rank.do(rank.member.tick(30))  # readers have had half the time to leave
    fence, retained = (
        of(rank.take(), Fence),
        SetRetained(rank.shard.registration, "content1", True, 1),
    )
    rank.do(rank.member.receive(retained, 30))
    assert rank.said(RetainedAck) == []
    rank.do(rank.member.fence_failed(fence.generation, 60))
    rank.do(rank.member.receive(retained, 60))
    assert [ack.keep for ack in rank.said(RetainedAck)] == [True]


def test_what_a_fill_has_begun_to_use_again_is_not_freed_with_what_was_ordered_out() -> None:
    host = Rank(LocalCopies(), Medium.HOST, Purpose.PREFETCH)
    host.hold(2)
    host.do(host.member.begin(FillCall(OpKind.PREFETCH, "latest"), 60, 0))  # waits for a source
    host.do(host.member.receive(Revoked(host.shard.registration, "content2", "rolled back"), 0))
    host.start(1)
    fence = of(host.actions, Fence)
    host.take()
    host.do(host.member.fenced(fence.generation, 0))
    host.do(host.member.pull_done(0))
    host.outcome(1)
    assert "FreeMemory" not in kinds(host.take())
    assert host.member.version == 1


# --------------------------------------------------------------------------------------------------
# staged


def staged(*, hold: bool = False) -> tuple[Rank, int]:
    """A rank that holds version 1, and has staged version 2; and the generation of version 1."""
    rank = Rank(LocalCopies())
    rank.hold(1)
    content = rank.member.content
    assert content is not None
    held = content.generation
    rank.fill(2, staged=True, hold=hold)
    assert kinds(rank.take()) == ["MakeRoom"]
    rank.do(rank.member.room_ended(None, 0))
    actions = rank.take()
    assert kinds(actions) == ["EndPrefetch", "StartPull"]
    assert of(actions, StartPull).staged
    rank.do(rank.member.pull_done(0))
    return rank, held


def test_a_lane_goes_on_where_another_coordinator_grants_the_same_memory_under_its_own_lease() -> (
    None
):
    rank = Rank(LocalCopies())
    rank.fill(2)
    key = rank.member.running.key if rank.member.running is not None else None
    assert key is not None
    rank.do(rank.member.receive(AddSource(key, 0, GRANT), 0))
    assert AddPullSource(GRANT) in rank.take()

    def starts(grant: Grant) -> list[Action]:
        what = version(2), manifest().manifest_id, True, (grant,)
        rank.do(rank.member.receive(Start(key, 0, *what), 0))
        return rank.take()

    for lease in ("second", "third", "third"):
        assert starts(replace(GRANT, lease=lease)) == []
    other = replace(GRANT, lease="fourth", generation=GRANT.generation + 1)
    assert starts(other) == [DropPullSource(GRANT.lease), AddPullSource(other)]
    rank.do(rank.member.receive(DropSource(key, 0, "second", "moved"), 0))
    assert rank.take() == []
    rank.do(rank.member.receive(DropSource(key, 0, "third", "moved"), 0))
    assert rank.take() == [DropPullSource(GRANT.lease)]


def test_a_staged_update_reads_from_the_sources_that_are_left_when_there_is_room() -> None:
    rank = Rank(LocalCopies())
    rank.hold(1)
    rank.fill(2, staged=True)
    assert of(rank.take(), MakeRoom).nbytes == manifest().region_bytes
    key = rank.member.running.key if rank.member.running is not None else None
    assert key is not None
    drop = DropSource(key, 0, GRANT.lease, "moved")
    for message in (
        AddSource(key, 0, GRANT),
        AddSource(key, 0, replace(GRANT, lease="other")),
        drop,
    ):
        rank.do(rank.member.receive(message, 0))
    assert rank.take() == []
    rank.do(rank.member.room_ended(None, 0))
    assert [grant.lease for grant in of(rank.take(), StartPull).grants] == ["other"]


def test_a_source_that_is_taken_back_before_it_is_read_hears_at_once_that_it_is_free() -> None:
    """Else its owner would wait out the grace of a reader that never comes."""
    rank = Rank(LocalCopies())
    rank.hold(1)
    rank.fill(2)
    assert kinds(rank.take()) == ["Fence"]
    running = rank.member.running
    assert running is not None
    assert running.key is not None
    rank.do(rank.member.receive(AddSource(running.key, 0, GRANT), 0))
    rank.do(rank.member.receive(DropSource(running.key, 0, GRANT.lease, "moved"), 0))
    assert [(said.lease, said.reason) for said in rank.said(ReadFailed)] == [
        (GRANT.lease, "dropped")
    ]


@pytest.mark.parametrize("why", ["there is none", "cancelled", "cancelled too late"])
def test_a_staged_update_without_room_holds_what_it_held(why: str) -> None:
    rank = Rank(LocalCopies())
    rank.hold(1)
    rank.fill(2, staged=True)
    rank.take()
    error = StateError(why)
    if why != "there is none":
        rank.do(rank.member.cancel(error, 0))
        assert kinds(rank.take()) == ["CancelRoom"]
    rank.do(rank.member.room_ended(None if why == "cancelled too late" else error, 0))
    actions = rank.take()
    assert (kinds(actions), of(actions, Finish).error) == (["FreeStaging", "Finish"], error)
    assert (error.memory, rank.member.version) == ("intact", 1)


def test_staged_fences_and_writes_after_the_commit_only() -> None:
    rank, held = staged(hold=True)
    assert kinds(rank.take()) == ["CallHook"]
    assert rank.member.version == 1
    rank.do(rank.member.hook_returned(None, 0))
    assert len(rank.said(Prepared)) == 1
    assert rank.take() == []
    rank.outcome(2)
    assert rank.actions == [Fence(held)]  # without a deadline: it is not given up any more
    rank.fenced()
    actions = rank.take()
    assert kinds(actions) == ["OpenGeneration", "CopyLocally"]
    copy, opened = of(actions, CopyLocally), of(actions, OpenGeneration)
    assert (copy.sources, copy.last) == (
        (LocalCopy(staging_of("device-use"), opened.generation),),
        True,
    )
    assert not opened.complete
    assert rank.member.state is HandleState.FILLING
    rank.do(rank.member.copied(ALL, 0))
    actions = rank.take()
    assert kinds(actions) == ["FreeStaging", "EndPrefetch", "Finish"]
    assert of(actions, Finish).error is None
    assert rank.member.version == 2


def test_staged_and_aborted_holds_what_it_held() -> None:
    for votes in (False, True):
        rank, held = staged(hold=True)
        if votes:
            rank.do(rank.member.hook_returned(None, 0))
        rank.take()
        rank.outcome(None)
        assert [r.held.generation for r in rank.said(Register) if r.held is not None] == [held]
        actions = rank.take()
        assert sorted(kinds(actions)) == ["Finish", "FreeStaging"]
        error = of(actions, Finish).error
        assert isinstance(error, GroupAborted)
        assert (error.memory, rank.member.version) == ("intact", 1)


def in_doubt() -> tuple[Rank, int]:
    rank, held = staged()
    rank.do(rank.member.disconnected(0))
    rank.take()
    rank.do(rank.member.cancel(StateError("cancelled"), 0))
    error = of(rank.take(), Finish).error
    assert isinstance(error, StateError)
    assert (error.memory, rank.member.state) == ("in_doubt", HandleState.IN_DOUBT)
    rank.connect()
    assert rank.registered.held is not None
    assert (rank.registered.held.version, rank.registered.held.generation) == (1, held)
    assert (len(rank.said(Prepared)), len(rank.said(Resolve))) == (1, 1)
    rank.take()
    rank.member.check_invariants()
    return rank, held


def test_a_doubt_about_what_was_staged_that_ends_in_a_commit_applies_it_before_the_next_call() -> (
    None
):
    rank, held = in_doubt()
    rank.do(rank.member.begin(UnpublishCall(), 60, 0))
    rank.take()
    rank.outcome(2)
    assert rank.actions == [Fence(held)]
    assert rank.member.has_pending_work
    assert rank.member.fence_until(Fence(held)) == 60
    rank.do(rank.member.fence_failed(held, 60))
    end, fence = rank.take()[-2:]
    assert isinstance(end, Finish)
    assert (type(end.error), fence) == (DrainTimeout, Fence(held))
    rank.do(rank.member.begin(UnpublishCall(), 60, 60))
    rank.do(rank.member.fenced(held, 60))
    assert kinds(rank.take()) == ["OpenGeneration", "CopyLocally"]
    rank.do(rank.member.copied(ALL, 0))
    assert len(rank.said(LeaveRequest)) == 1  # the unpublish, of version 2
    assert kinds(rank.take()) == ["FreeStaging"]
    assert rank.member.version == 2


def test_a_doubt_about_what_was_staged_that_ends_in_an_abort_changes_nothing() -> None:
    rank, held = in_doubt()
    rank.outcome(None)
    assert [r.held.generation for r in rank.said(Register) if r.held is not None] == [held]
    assert rank.take() == [FreeStaging()]
    assert (rank.member.state, rank.member.version) == (HandleState.READY, 1)


def test_what_was_staged_and_does_not_come_through_is_torn_and_the_coordinator_hears_of_it() -> (
    None
):
    rank, _ = staged()
    rank.take()
    rank.outcome(2)
    rank.fenced()
    rank.take()
    rank.do(rank.member.copied(frozenset({0}), 0))
    assert [r.held for r in rank.said(Register)] == [None]
    error = of(rank.take(), Finish).error
    assert isinstance(error, IntegrityError)
    assert (error.memory, rank.member.state) == ("torn", HandleState.TORN)


@pytest.mark.parametrize("again", [False, True])
def test_what_was_staged_is_said_once_it_is_in_place_where_what_it_replaced_was_said_before(
    again: bool,
) -> None:
    rank, held = staged()
    if again:
        rank.do(rank.member.disconnected(0))
        rank.connect()
        assert rank.registered.held is not None
        assert rank.registered.held.generation == held
    rank.take()
    rank.outcome(2)
    rank.do(rank.member.fenced(held, 0))
    rank.take()
    rank.do(rank.member.copied(ALL, 0))
    assert [r.held and r.held.version for r in rank.said(Register)] == [2] * again


def test_what_is_empty_has_nothing_to_lose_and_is_filled_at_once() -> None:
    rank = Rank(LocalCopies())
    rank.fill(2, staged=True, hold=True)
    assert kinds(rank.take()) == ["CallHook"]
    rank.do(rank.member.hook_returned(None, 0))
    actions = rank.take()
    assert kinds(actions) == ["OpenGeneration", "EndPrefetch", "StartPull"]
    assert not of(actions, StartPull).staged


def test_what_is_rolled_back_while_it_is_applied_is_given_up_afterwards() -> None:
    rank, _ = staged()
    rank.take()
    rank.outcome(2)
    rank.do(rank.member.receive(Revoked(rank.shard.registration, "content2", "rolled back"), 0))
    rank.fenced()
    rank.take()
    rank.do(rank.member.copied(ALL, 0))
    (register,) = rank.said(Register)
    assert register.held is not None
    assert register.held.version == 2
    rank.take()
    reply = RegisteredReply(register.request, register.registration, 1, 0, False)
    rank.do(rank.member.receive(reply, 0))
    assert kinds(rank.take()) == ["Fence"]
    assert rank.member.state is HandleState.EMPTY


def test_a_coordinator_without_its_state_ends_the_doubt_about_what_was_staged() -> None:
    rank, held = in_doubt()
    rank.do(rank.member.state_lost(0))
    assert rank.take() == [FreeStaging(), Fence(held)]
    assert rank.member.state is HandleState.EMPTY
    rank.member.check_invariants()


def test_a_doubt_about_what_was_staged_is_ended_so_where_nothing_is_held_any_more_too() -> None:
    rank, _ = staged()
    rank.do(rank.member.receive(Revoked(rank.shard.registration, "content1", "rolled back"), 0))
    rank.fenced()
    rank.do(rank.member.disconnected(0))
    rank.do(rank.member.cancel(StateError("cancelled"), 0))
    rank.take()
    assert rank.member.state is HandleState.IN_DOUBT
    assert rank.member.content is None
    rank.do(rank.member.state_lost(0))
    assert rank.take() == [FreeStaging()]
    assert "empty" in repr(rank.member)
    rank.member.check_invariants()
