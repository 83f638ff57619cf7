"""A copy of an archived version: held without a call, said with its parts, given up like any
replica; and its place among the host copies.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from tensorhub.errors import RetentionError
from tensorhub.messages import Register, RegisterAgain, Registered, Revoked, SetRetained
from tensorhub.model.manifest import id_of
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.types import HandleState, Medium, Purpose, VersionInfo
from tensorhub.worker.calls import Action, CloseCall, Fence, FreeMemory, OpenGeneration, Say
from tensorhub.worker.host_copies import HostCopies
from tensorhub.worker.host_copy_actions import (
    BeginCall,
    CopyAction,
    DropHandle,
    FinishRequest,
    Unload,
)
from tensorhub.worker.local_copies import LocalCopies
from tensorhub.worker.member import Member
from tensorhub.worker.member_memory import Content
from tensorhub.worker.registration_session import Shard

MANIFEST = make_manifest(40, "xxh3-64")
ONE = MANIFEST.region_bytes
INFO = VersionInfo("m", 3, "content", MANIFEST.nbytes, 2)
BLOBS = [b"catalogue", b"arrangement", b"coordinates"]
PARTS = {id_of(blob): blob for blob in BLOBS}


def shard(ident: str = "r1") -> Shard:
    of_host = Medium.HOST, Purpose.ARCHIVE
    return Shard(ident, "m", f"archive/{ident}", 0, 1, False, "", MANIFEST, 1, *of_host)


def member(ident: str = "r1", copies: LocalCopies | None = None) -> Member:
    """Online, with its content, and all that it says."""
    numbers = count(1)
    made = Member(
        shard(ident),
        requests=lambda: next(numbers),
        generations=lambda: next(numbers),
        manifests={},
        copies=copies,
    )
    return made


def adopted() -> tuple[Member, OpenGeneration, Register]:
    made = member()
    content = Content(INFO, MANIFEST, 0, root=b"root", part_ids=tuple(PARTS), parts=PARTS)
    (opened,) = made.adopt(content, 0.0)
    (register,) = said(made.connected(0.0))
    assert isinstance(opened, OpenGeneration)
    return made, opened, register


def said(actions: list[Action]) -> list[Register]:
    messages = [action.message for action in actions if isinstance(action, Say)]
    return [message for message in messages if isinstance(message, Register)]


def answered(made: Member, register: Register, *, keep: bool = True) -> list[Action]:
    return made.receive(Registered(register.request, "r1", 1, 0, keep, None), 1.0)


def test_it_is_registered_as_held_from_the_beginning() -> None:
    made, opened, register = adopted()
    assert (made.state, made.version) == (HandleState.READY, 3)
    assert (opened.content_id, opened.complete, opened.manifest) == ("content", False, MANIFEST)
    held = register.held
    assert held is not None
    assert (held.version, held.content_id, held.generation) == (3, "content", opened.generation)
    assert (held.root, held.published, held.part_ids) == (b"root", False, tuple(PARTS))
    assert held.manifest_id == register.manifest_id == MANIFEST.manifest_id
    assert (register.shard, register.world_size) == (1, 1)
    assert (register.purpose, register.parts) == (Purpose.ARCHIVE, ())
    made.check_invariants()


def test_it_says_its_parts_and_its_manifest_when_it_is_asked() -> None:
    made, _, register = adopted()
    asked = tuple(PARTS)[1:]
    (again,) = said(made.receive(RegisterAgain(register.request, True, asked), 1.0))
    assert again.parts == tuple(BLOBS[1:])
    assert again.held is not None
    assert again.held.part_ids == tuple(PARTS)  # it names them, although it did not say all
    assert again.manifest == again.held.manifest == MANIFEST.encode()


def test_it_says_it_again_over_each_connection() -> None:
    made, opened, register = adopted()
    answered(made, register)
    made.receive(SetRetained("r1", "content", True, 1), 2.0)
    made.disconnected(3.0)
    (again,) = said(made.connected(4.0))
    assert again.held == register.held
    assert made.content is not None
    assert (made.content.retained, made.content.generation) == (True, opened.generation)


@pytest.mark.parametrize("how", ["not known", "ordered out", "state lost", "spoiled"])
def test_what_the_coordinator_does_not_keep_is_given_up_with_its_memory(how: str) -> None:
    made, opened, register = adopted()
    match how:
        case "not known":
            actions = answered(made, register, keep=False)
        case "ordered out":
            actions = made.receive(Revoked("r1", "content", "it was rolled back"), 1.0)
        case "state lost":
            actions = made.state_lost(1.0)
        case _:
            made._memory.spoil()
            actions = made._context.take_actions()
    assert Fence(opened.generation) in actions
    assert (made.state, made.content) == (HandleState.EMPTY, None)
    assert FreeMemory() in made.fenced(opened.generation, 2.0)
    why = {
        "not known": "does not know that content",
        "ordered out": "it was rolled back",
        "state lost": "has lost its state",
        "spoiled": "its bytes have changed",
    }
    assert why[how] in made.why
    made.check_invariants()


def test_content_of_a_state_that_is_lost_names_no_lineage() -> None:
    """The number is of the lost state; the present state may count another lineage by it."""
    content = Content(replace(INFO, lineage=2), MANIFEST, 0)
    assert content.held(told=False).lineage == 2
    content.former = True
    assert content.held(told=False).lineage is None


def test_no_fill_of_this_worker_takes_it_for_content_that_is_there() -> None:
    copies = LocalCopies()
    made = member("r1", copies)
    made.adopt(Content(INFO, MANIFEST, 0), 0.0)
    other = shard("r2")
    assert copies.find(other, "content", MANIFEST.grid_id) == []


# --------------------------------------------------------------------------------------------------
# among the host copies


class World:
    def __init__(self, bytes_max: int) -> None:
        self.copies = HostCopies(bytes_max, 60.0, lambda: "new")
        self.used = dict[str, float]()
        self.copies.budget.last_used = lambda ident: self.used.get(ident, 0.0)
        self.members = dict[str, Member]()
        self.actions = list[CopyAction]()
        self.requests = count(1)

    def adopt(self, ident: str) -> None:
        self.copies.adopted(shard(ident))
        self.members[ident] = made = member(ident)
        self.copies.began(made)
        made.adopt(Content(INFO, MANIFEST, 0), 0.0)

    def want(self, ident: str, purpose: Purpose = Purpose.ARCHIVE) -> int:
        """Room for one version; returns the request."""
        request = next(self.requests)
        steps = self.copies.make_room(ident, purpose, ONE)
        self.actions += self.copies.begin(steps, 0.0, request)
        self.copies.check_invariants()
        return request

    def unloaded(self, ident: str) -> None:
        self.actions += self.copies.unloaded(ident, 0.0)

    def take(self) -> list[CopyAction]:
        actions, self.actions = self.actions, []
        return actions


def test_the_version_that_was_used_longest_ago_gives_its_room_to_another() -> None:
    world = World(2 * ONE)
    for ident in ("a", "b", "c"):
        world.adopt(ident)
    assert world.take() == []
    for ident in ("a", "b"):
        assert world.want(ident) in (1, 2)
    assert world.take() == [FinishRequest(1), FinishRequest(2)]
    world.used.update(a=2.0, b=1.0)
    request = world.want("c")
    assert world.take() == [Unload("b", in_turn=True)]
    world.unloaded("b")
    assert world.take() == [FinishRequest(request)]
    assert {each for each in "abc" if world.copies.budget.reservation(each)} == {"a", "c"}


@pytest.mark.parametrize("purpose", [Purpose.USE, Purpose.RETENTION, Purpose.SEED])
def test_what_comes_first_does_not_wait_for_a_turn(purpose: Purpose) -> None:
    world = World(ONE)
    world.adopt("a")
    world.want("a")
    world.take()
    request = world.want("other", purpose)
    assert world.take() == [Unload("a", in_turn=False)]
    world.unloaded("a")
    assert world.take() == [FinishRequest(request)]
    refused = world.want("a")
    (finished,) = world.take()
    assert isinstance(finished, FinishRequest)
    assert (finished.request, "does not outrank" in str(finished.error)) == (refused, True)


def test_a_removed_copy_leaves_and_goes_unless_it_must_stay() -> None:
    world = World(ONE)
    world.adopt("a")
    for error in (RetentionError("it must stay"), None):
        request = next(world.requests)
        begun = world.copies.begin(world.copies.remove("a", 5.0), 0.0, request)
        (call,) = begun
        assert isinstance(call, BeginCall)
        assert (call.registration, call.call, call.timeout_s) == ("a", CloseCall(), 5.0)
        ended = world.copies.call_ended(call.number, 1.0, error=error)
        finished = FinishRequest(request, None, error)
        assert ended == ([finished] if error is not None else [DropHandle("a"), finished])
    assert world.copies.begin(world.copies.remove("a", 5.0), 0.0, 9) == [FinishRequest(9)]


def test_a_copy_that_was_ordered_out_is_dropped_and_one_that_was_unloaded_stays() -> None:
    world = World(ONE)
    world.adopt("a")
    world.want("a")
    world.take()
    assert world.copies.unloaded("a", 0.0) == []
    world.want("a")
    world.take()
    assert world.copies.freed("a", 0.0) == [DropHandle("a")]
    assert world.copies.budget.reserved_bytes == 0


def test_room_that_a_closed_copy_takes_before_its_handle_ends_is_given_back() -> None:
    """Its memory is gone by then, and readers may still wait for chunks of it."""
    world = World(ONE)
    world.adopt("a")
    closing = world.members["a"]
    assert closing.content is not None
    generation = closing.content.generation
    closing.begin(CloseCall(), 5.0, 0.0)
    closing.fenced(generation, 0.0)
    assert closing.state is HandleState.CLOSED
    assert world.copies.freed("a", 0.0) == []
    world.want("a")
    assert world.copies.budget.reserved_bytes == ONE
    world.copies.ended("a", 0.0)
    assert world.copies.budget.reserved_bytes == 0
