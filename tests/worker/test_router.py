"""To whom a worker hands what its coordinator says: each kind of message, and what is not known, or
not any more.
"""

from __future__ import annotations

from itertools import count

import pytest

from tensorhub.errors import RegistrationError
from tensorhub.messages import (
    Announce,
    CutReader,
    Description,
    DigestAgain,
    DigestedAgain,
    Digests,
    Dismissed,
    Done,
    DropCopy,
    EpochChanged,
    ErrorInfo,
    Events,
    FromCoordinator,
    HeartbeatAck,
    LeaveGranted,
    MakeCopy,
    ManifestReply,
    Outcome,
    Refused,
    RegisterAgain,
    Registered,
    Revoked,
    SetRetained,
    TellDigests,
    Updates,
    Welcome,
)
from tensorhub.types import OpKey, VersionInfo
from tensorhub.worker.registration_session import Shard
from tensorhub.worker.router import (
    Anew,
    Answered,
    Deliver,
    Examine,
    LoseState,
    Reply,
    Resume,
    Router,
)

VERSION = VersionInfo("m", 1, "c1", 1, 8)
ERROR = ErrorInfo("StateError", "no", False)


def shard(registration: str, group: str = "g", rank: int = 0) -> Shard:
    return Shard(registration, "m", group, rank, 2, False, "", None, rank)


def two_ranks() -> Router[str]:
    """Handles are their names. "a" and "b" are the ranks of one group, "c" is another group's."""
    router = Router[str](count(1))
    for each in (shard("a"), shard("b", rank=1), shard("c", group="other")):
        router.add(each, each.registration)
    return router


def outcome(group: str, rank: int) -> Outcome:
    return Outcome(OpKey("m", group, 1, 1), rank, True, True, VERSION, None)


def answers_of_handles(
    request: int,
) -> list[Registered | LeaveGranted | Done | Refused | ManifestReply]:
    return [
        Registered(request, "b", 1, 1, True),
        LeaveGranted(request),
        Done(request),
        Refused(request, ERROR),
        ManifestReply(request, b""),
    ]


@pytest.mark.parametrize("number", range(5))
def test_an_answer_goes_to_who_asked_and_only_once(number: int) -> None:
    router = two_ranks()
    request = router.new_request(shard("b", rank=1))
    answer = answers_of_handles(request)[number]
    assert router.asker(request) == "b"
    assert router.route(answer) == [Deliver("b", answer)]
    assert not any(isinstance(routed, Deliver) for routed in router.route(answer)), (
        "it has come twice"
    )


def test_what_no_handle_has_asked_is_the_workers_own() -> None:
    router, own = two_ranks(), 77
    for answer in (
        *answers_of_handles(own),
        Description(own, ()),
        Events(own, (), 0, 1),
        Updates(own, ()),
    ):
        # only handles ask for these
        known = [] if isinstance(answer, Registered | LeaveGranted) else [Answered(answer)]
        assert router.route(answer) == known


def test_a_new_session_answers_nothing_that_was_asked_before_it() -> None:
    router = two_ranks()
    request = router.new_request(shard("a"))
    router.welcomed(Welcome("x", 1, 5.0, True))
    assert router.asker(request) is None
    assert router.route(LeaveGranted(request)) == []


def test_what_names_a_rank_goes_to_that_rank_of_that_group() -> None:
    router = two_ranks()
    for group, rank, handle in (("g", 0, "a"), ("g", 1, "b"), ("other", 0, "c")):
        assert router.route(outcome(group, rank)) == [Deliver(handle, outcome(group, rank))]
    assert router.route(outcome("other", 1)) == []


def test_an_epoch_is_told_to_every_rank_of_its_group() -> None:
    message = EpochChanged("m", "g", 2, 1)
    assert two_ranks().route(message) == [Deliver("a", message), Deliver("b", message)]
    assert two_ranks().route(EpochChanged("another", "g", 2, 1)) == []


def test_what_names_a_registration_goes_there_or_nowhere() -> None:
    router = two_ranks()
    for message in (Revoked("c", "c1", "rolled back"), SetRetained("c", "c1", True, 1)):
        assert router.route(message) == [Deliver("c", message)]
        router.remove(shard("c", group="other"))
        assert router.route(message) == []
        router.add(shard("c", group="other"), "c")


def test_a_question_about_memory_that_is_not_here_is_answered_at_once() -> None:
    """Else the coordinator would wait for it, and readers for the coordinator."""
    router = two_ranks()
    again, digests = DigestAgain("i", "a", 1, 0), TellDigests("a", 7, "")
    assert router.route(again) == [Examine("a", again)]
    assert router.route(digests) == [Examine("a", digests)]
    router.remove(shard("a"))
    assert router.route(again) == [Reply(DigestedAgain("i", "a", None))]
    assert router.route(digests) == [Reply(Digests("a", 7, 0, (), b"", True))]


@pytest.mark.parametrize(
    "message", [Announce("m", None), CutReader("l", "r"), MakeCopy("k", VERSION, 0), DropCopy("k")]
)
def test_what_concerns_the_worker_itself_is_handed_on(message: FromCoordinator) -> None:
    assert two_ranks().route(message) == [message]


@pytest.mark.parametrize(
    "message", [HeartbeatAck(0), Welcome("x", 1, 5.0, True), Dismissed("late")]
)
def test_what_concerns_the_session_is_nobody_elses(message: FromCoordinator) -> None:
    assert two_ranks().route(message) == []


def test_a_rank_is_free_as_soon_as_its_registration_leaves() -> None:
    router, first, second = two_ranks(), shard("a"), shard("d")
    with pytest.raises(
        RegistrationError, match="rank 0 of group 'g' of 'm' is registered by this worker already"
    ):
        router.check_free("m", "g", 0)
    request = router.new_request(first)
    router.leave(first)
    router.check_free("m", "g", 0)
    assert router.route(outcome("g", 0)) == []
    assert router.route(LeaveGranted(request)) == [Deliver("a", LeaveGranted(request))], (
        "it is still about to end"
    )
    router.add(second, "d")
    router.remove(first)
    assert router.route(outcome("g", 0)) == [Deliver("d", outcome("g", 0))], (
        "the end of the first is not the second's"
    )


def test_nothing_is_kept_of_what_has_ended() -> None:
    router = Router[str](count(1))
    router.add(shard("a"), "a")
    request = router.new_request(shard("a"))
    router.remove(shard("a"))
    assert router.is_empty
    assert router.route(Registered(request, "a", 1, 1, True)) == []


def test_a_state_is_lost_with_another_cluster_an_older_epoch_or_the_same_one_again() -> None:
    router = two_ranks()
    sessions = [
        ("x", 2, "a", False),
        ("x", 2, "a", False),
        ("x", 3, "b", False),
        ("x", 3, "b'", True),
        ("x", 2, "c", True),
        ("x", 2, "", False),  # by an older release
        ("y", 9, "d", True),
        ("y", 9, "d", False),
    ]
    for cluster, epoch, term, is_lost in sessions:
        steps = router.welcomed(Welcome(cluster, epoch, 5.0, True, term=term))
        anew = [Anew.WATCH, *map(Resume, "abc"), Anew.PIN]
        assert steps == (
            [*map(LoseState, "abc"), Anew.FORGET_VERSIONS, *anew] if is_lost else anew
        ), (cluster, epoch, term)
        assert (router.cluster, router.epoch, router.term) == (cluster, epoch, term)


def test_a_register_that_was_answered_may_be_asked_for_again() -> None:
    """Once the other ranks are here, and the group's layout is known."""
    router = two_ranks()
    older, newer = router.new_request(shard("a")), router.new_request(shard("a"))
    for request in (older, newer):
        router.route(Registered(request, "a", 1, 0, True, None))
    again = RegisterAgain(newer, whole=False)
    assert router.route(again) == [Deliver("a", again)]
    assert router.route(RegisterAgain(older, whole=False)) == []
    router.remove(shard("a"))
    assert router.route(again) == []


def test_what_was_answered_over_a_former_session_is_not_asked_for_again() -> None:
    router = two_ranks()
    request = router.new_request(shard("a"))
    router.route(Registered(request, "a", 1, 0, True, None))
    router.welcomed(Welcome("c", 1, 10.0, True))
    assert router.route(RegisterAgain(request, whole=False)) == []
