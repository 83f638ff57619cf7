"""The course of a fence: readers have their grace, then they are shut out; what nobody can end
makes it fail in time.
"""

from __future__ import annotations

from tensorhub.model.accesses import Access
from tensorhub.types import ContentId, RegistrationId
from tensorhub.worker.fencing import FenceStep, look
from tensorhub.worker.owner import Owner

HERE, OTHER = RegistrationId("here"), RegistrationId("other")
CONTENT = ContentId("content")


def begun(owner: Owner, registration: RegistrationId = HERE) -> Access:
    access = owner.begin(registration, 1, CONTENT, [0], 1)
    assert isinstance(access, Access)
    return access


def fencing() -> tuple[Owner, Access]:
    """One access to the fenced memory runs, and one to another."""
    owner = Owner()
    for registration in (HERE, OTHER):
        owner.open(registration, 1, CONTENT, [1], complete=True)
    access = begun(owner)
    begun(owner, OTHER)
    owner.close(HERE)
    return owner, access


def test_readers_are_shut_out_after_their_grace_and_only_those_of_this_memory() -> None:
    owner, access = fencing()
    assert look(owner, HERE, 0.9, 1.0, 10.0) == FenceStep(False)
    assert look(owner, HERE, 1.0, 1.0, 10.0) == FenceStep(False, frozenset({access.number}))


def test_it_stands_when_nobody_reads_also_when_it_was_late() -> None:
    owner, access = fencing()
    assert look(owner, HERE, 10.0, 1.0, 10.0).is_late
    owner.end(access)
    assert look(owner, HERE, 10.0, 1.0, 10.0) == FenceStep(True)
