"""G10: what one worker can make the coordinator keep; each bound is a refusal that names it, and
nobody else notices.
"""

from __future__ import annotations

from itertools import count

import pytest

from tensorhub.coordinator import (
    DOOR,
    CloseSession,
    Connected,
    Coordinator,
    Disconnected,
    LookFor,
    Persisted,
    Received,
    Send,
    Silent,
    invariants,
    limits as real,
)
from tensorhub.coordinator.actions import Action, Persist
from tensorhub.errors import CoordinatorUnavailable, RegistrationError, StateError, TensorHubError
from tensorhub.messages import (
    NO_REQUEST,
    WATCHES_MAX,
    Abandon,
    Announce,
    BegunWith,
    Deregister,
    Done,
    ErrorInfo,
    FromCoordinator,
    FromWorker,
    Join,
    Leave,
    LeaveGranted,
    LeaveRequest,
    Outcome,
    Pin,
    Publish,
    Refused,
    Register,
    Registered,
    Retain,
    RetainedAck,
    SetRetained,
    Unpin,
    Unwatch,
    Watch,
)
from tensorhub.testing import CHUNKS, MANIFEST, StepwiseCluster
from tensorhub.types import Endpoint, Location, Medium, OpKey, Options, Purpose


class Desk:
    """A coordinator, and workers by hand, each with one session."""

    def __init__(self, options: Options | None = None) -> None:
        ids = count()
        self.core = Coordinator(
            cluster="c",
            epoch=1,
            options=options or Options(),
            ids=lambda: f"id{next(ids)}",
            now=0.0,
        )
        self.now = 0.0
        self.requests = count(1)
        self.closed: dict[int, str] = {}
        self.heard: dict[int, list[FromCoordinator]] = {}
        self.stores = True
        self.unstored: list[int] = []

    def step(self, event: object) -> None:
        self.now += 0.001
        todo: list[Action] = self.core.step(event, self.now)  # type: ignore[arg-type]
        for action in todo:
            match action:
                case Send():
                    self.heard.setdefault(action.session, []).append(action.message)
                case CloseSession():
                    self.closed[action.session] = action.reason
                case Persist():
                    self.unstored.append(action.record)
        if any(isinstance(action, LookFor) and action.session == DOOR for action in todo):
            self.step(Silent((DOOR,)))  # nobody is there
        while self.stores and self.unstored:
            self.step(Persisted(self.unstored.pop(0)))
        self.core.check_invariants()
        invariants.check_counts(self.core.cluster)

    def connect(self, session: int, *, joins: bool = True) -> None:
        self.step(Connected(session, f"life{session}", "worker"))
        if joins:
            self.say(session, Join(f"w{session}", Location(), (Endpoint("tcp", "x"),), 1, 0))

    def say(self, session: int, message: FromWorker) -> FromCoordinator | None:
        """The last thing that this session hears of it."""
        before = len(self.heard.get(session, ()))
        self.step(Received(session, message))
        answers = self.heard.get(session, [])[before:]
        return answers[-1] if answers else None

    def register(
        self, session: int, name: str, manifest: bytes = b"m", world_size: int = 1, model: str = "m"
    ) -> object:
        use = (True, False, Medium.DEVICE, Purpose.USE, "", 1, 1, manifest, None)
        return self.say(
            session, Register(next(self.requests), name, model, name, 0, 0, world_size, *use)
        )

    def publication(self, name: str, version: int = 1, sequence: int = 0) -> Publish:
        group = self.core.cluster.models["m"].groups[name]
        return Publish(OpKey("m", name, group.epoch, sequence), 0, name, version, version, 10.0)

    def publish(
        self, session: int, name: str, version: int, sequence: int
    ) -> FromCoordinator | None:
        return self.say(session, self.publication(name, version, sequence))


@pytest.fixture
def desk() -> Desk:
    return Desk()


def refusal(answer: object) -> TensorHubError:
    assert isinstance(answer, Refused)
    return answer.error.error()


def test_registrations_of_one_worker_and_of_all(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real, "REGISTRATIONS_OF_WORKER_MAX", 2)
    monkeypatch.setattr(real, "REGISTRATIONS_MAX", 3)
    for session in (1, 2):
        desk.connect(session)
    assert isinstance(desk.register(1, "a"), Registered)
    assert isinstance(desk.register(1, "b"), Registered)
    error = refusal(desk.register(1, "c"))
    assert isinstance(error, RegistrationError)
    assert "REGISTRATIONS_OF_WORKER_MAX" in str(error)
    assert not error.retryable
    assert isinstance(desk.register(2, "d"), Registered)  # nobody else notices
    error = refusal(desk.register(2, "e"))
    assert "REGISTRATIONS_MAX" in str(error)
    assert error.retryable
    desk.say(1, Deregister(99, "a", True))
    assert isinstance(desk.register(2, "e"), Registered)


def test_manifests_of_one_worker_and_of_all(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "MANIFEST_BYTES_OF_WORKER_MAX", 100)
    monkeypatch.setattr(real, "MANIFEST_BYTES_MAX", 150)
    for session in (1, 2, 3):
        desk.connect(session)
    assert isinstance(desk.register(1, "a", b"x" * 60), Registered)
    assert "MANIFEST_BYTES_OF_WORKER_MAX" in str(refusal(desk.register(1, "b", b"y" * 60)))
    assert isinstance(desk.register(2, "c", b"y" * 60), Registered)
    assert isinstance(desk.register(3, "d", b"x" * 60), Registered)  # an equal one costs nothing
    assert "MANIFEST_BYTES_MAX" in str(refusal(desk.register(3, "e", b"z" * 40)))
    assert isinstance(desk.publish(2, "c", 1, 0), Outcome)
    assert desk.core.cluster.manifests.nbytes == 120
    desk.say(2, Leave("enough"))
    assert desk.core.cluster.manifests.nbytes == 60  # nobody holds that version
    desk.say(1, Leave("enough"))
    desk.say(3, Leave("enough"))
    assert desk.core.cluster.manifests.nbytes == 0


def test_what_ranks_go_on_with_is_counted_with_their_manifests(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real, "MANIFEST_BYTES_OF_WORKER_MAX", 100)
    monkeypatch.setattr(real, "MANIFEST_BYTES_MAX", 150)
    for session in (1, 2):
        desk.connect(session)
        assert isinstance(desk.register(session, f"r{session}", b"x" * 40), Registered)
    for manifest, kept in (
        (b"a" * 61, b""),
        (b"b" * 60, b"b" * 60),
        (b"c" * 50, b"c" * 50),
        (b"d" * 99, b"c" * 50),
    ):
        assert desk.say(1, BegunWith("r1", manifest)) is None
        assert desk.core.cluster.members["r1"].begun == kept
    desk.say(2, BegunWith("r2", b"e" * 60))
    # beyond what there is room for in all, or of this worker
    desk.say(2, BegunWith("r2", b"f" * 61))
    desk.say(2, BegunWith("r1", b"g"))  # of another worker
    assert desk.core.cluster.manifests.nbytes == 150
    desk.say(1, Deregister(99, "r1", True))
    assert desk.core.cluster.manifests.nbytes == 100
    desk.say(2, Leave("enough"))
    assert desk.core.cluster.manifests.nbytes == 0


def test_who_goes_on_with_what_there_is_no_room_for_hears_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody could be told the manifest of what it would serve; its memory is torn, and its next
    call begins anew.
    """
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    call = reader.replicate()
    cluster.run(until=lambda: reader.pull is not None and len(reader.pull.missing) != CHUNKS)
    trainer.worker.crash()
    cluster.restart()
    monkeypatch.setattr(real, "MANIFEST_BYTES_OF_WORKER_MAX", len(MANIFEST.encode()) * 3 // 2)
    reader.worker.connect()
    cluster.run()
    assert isinstance(call.error, CoordinatorUnavailable)
    assert "no room for its manifest" in str(call.error)
    assert (call.error.retryable, call.error.memory) == (True, "torn")


def test_models_and_watches(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.connect(1)
    for number in range(2 * WATCHES_MAX):
        desk.core.step(Received(1, Watch(f"m{number}")), 1.0)
    desk.say(1, Watch("m0"))  # again: it is known
    assert 1 not in desk.closed
    error = refusal(desk.say(1, Watch("one more")))
    assert "WATCHES_MAX" in str(error)
    assert "WATCHES_MAX" in desk.closed[1]
    desk.step(Disconnected(1))
    assert not desk.core.cluster.models
    assert not desk.core.cluster.watchers
    monkeypatch.setattr(real, "MODELS_MAX", 1)
    desk.connect(2)
    desk.say(2, Watch("w"))  # makes no model
    desk.register(2, "a", model="m")
    for answer in (desk.register(2, "b", model="n"), desk.say(2, Retain(5, "n", 1))):
        assert "MODELS_MAX" in str(refusal(answer))
    assert isinstance(desk.say(2, Watch("n")), Announce)


def test_watches_of_all(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "WATCHED_MAX", 2)
    for session in (1, 2):
        desk.connect(session)
        assert (
            desk.say(session, Watch("m")) == desk.say(session, Watch("m")) == Announce("m", None, 0)
        )
    error = refusal(desk.say(2, Watch("n")))
    assert "WATCHED_MAX" in str(error)
    assert error.retryable
    assert "WATCHED_MAX" in desk.closed[2]
    desk.step(Disconnected(2))
    desk.say(1, Unwatch("n"))
    desk.say(1, Unwatch("m"))
    desk.say(1, Unwatch("m"))
    assert desk.core.cluster.watched == 0


def test_what_is_retained_and_pinned(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "PINS_OF_WORKER_MAX", 2)
    desk.connect(1)
    desk.register(1, "a")
    desk.publish(1, "a", 1, 0)
    assert "RETAINED_MAX" in str(refusal(desk.say(1, Retain(1, "m", real.RETAINED_MAX + 1))))
    for number in (1, 2):
        told = desk.say(1, Pin(number, f"p{number}", "m", 1))
        if isinstance(told, SetRetained):  # it knows
            told = desk.say(1, RetainedAck("a", told.content_id, told.keep, told.seq))
        assert isinstance(told, Done)
    assert "PINS_OF_WORKER_MAX" in str(refusal(desk.say(1, Pin(3, "p3", "m", 1))))
    desk.say(1, Unpin(4, "p1", "m"))
    assert isinstance(desk.say(1, Pin(5, "p3", "m", 1)), Done)


def test_orders_that_are_not_recorded_yet(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "PENDING_WRITES_OF_SESSION_MAX", 3)
    desk.stores = False
    for session in (1, 2):
        desk.connect(session)
    for request in range(3):
        assert desk.say(1, Retain(request, "m", 1)) is None
    error = refusal(desk.say(1, Retain(3, "m", 1)))
    assert isinstance(error, CoordinatorUnavailable)
    assert "PENDING_WRITES_OF_SESSION_MAX" in str(error)
    assert desk.say(2, Retain(1, "m", 2)) is None  # nobody else notices
    desk.stores = True
    assert isinstance(desk.say(1, Leave("")), object)
    assert not desk.core.cluster.pending_writes


def test_a_pin_that_is_said_again_before_it_is_recorded_counts_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real, "PENDING_WRITES_OF_SESSION_MAX", 2)
    desk.connect(1)
    desk.register(1, "a")
    desk.publish(1, "a", 1, 0)
    desk.stores = False
    for request in range(5):
        assert not isinstance(desk.say(1, Pin(request, "p", "m", 1)), Refused)
    assert desk.say(1, Retain(5, "m", 1)) is None


def test_an_acknowledgement_of_an_older_notice_answers_no_retain(desk: Desk) -> None:
    desk.connect(1)
    desk.register(1, "a")
    desk.publish(1, "a", 1, 0)
    notices = []
    for request, latest in enumerate((1, 0, 1)):
        desk.say(1, Retain(request, "m", latest))
        notices.append([each for each in desk.heard[1] if isinstance(each, SetRetained)][-1])
    assert [notice.keep for notice in notices] == [True, False, True]
    for notice in notices:
        assert Done(2) not in desk.heard[1]
        desk.say(1, RetainedAck("a", notice.content_id, notice.keep, notice.seq))
    assert Done(2) in desk.heard[1]


def test_sessions_and_workers() -> None:
    desk = Desk(Options(sessions_max=2))
    for session in (1, 2, 3):
        desk.connect(session, joins=session < 3)
    assert list(desk.closed) == [3]
    (refused,) = desk.heard[3]
    assert isinstance(refused, Refused)
    assert (refused.request, type(refused.error.error())) == (NO_REQUEST, CoordinatorUnavailable)
    assert "Options.sessions_max" in desk.closed[3]
    desk.say(3, Join("w3", Location(), (), 1, 0))
    assert 3 not in desk.core.cluster.sessions
    desk.step(Disconnected(3))
    for session in (1, 2):
        desk.step(Disconnected(session))
    for session in range(4, 8):  # workers that come, join and go count until their leases are over
        desk.connect(session)
        desk.step(Disconnected(session))
    desk.connect(8)
    assert "Options.sessions_max" in desk.closed[8]


def test_who_says_that_a_million_ranks_publish_makes_nothing_for_them(desk: Desk) -> None:
    desk.connect(1)
    desk.register(1, "a", world_size=2**20)
    desk.publish(1, "a", 1, 0)
    version = desk.core.cluster.models["m"].versions[1]
    assert version.info.world_size == 2**20
    assert not version.holdings


def test_a_rank_that_never_says_that_its_fence_stands(desk: Desk) -> None:
    desk.connect(1)
    desk.register(1, "a")
    for number in range(real.LEAVING_OF_RANK_MAX):
        outcome = desk.publish(1, "a", number, number)
        assert isinstance(outcome, Outcome)
        assert outcome.committed
        assert isinstance(
            desk.say(1, LeaveRequest(number, "a", number, 1.0, True, False)), LeaveGranted
        )
    outcome = desk.publish(1, "a", 99, real.LEAVING_OF_RANK_MAX)
    assert isinstance(outcome, Outcome)
    assert outcome.error is not None
    error = outcome.error.error()
    assert isinstance(error, StateError)
    assert "never said to be fenced" in str(error)


def test_what_one_rank_tells_the_others_is_short_and_kept_once(desk: Desk) -> None:
    desk.connect(1)
    desk.register(1, "a")
    group = desk.core.cluster.models["m"].groups["a"]
    key = OpKey("m", "a", group.epoch, 0)
    causes = tuple((rank, "c" * 16_000) for rank in range(4096))
    error = ErrorInfo("GroupAborted", "e" * 16_000, True, causes, ("d" * 16_000,) * 1024)
    outcome = desk.say(1, Abandon(key, 0, error))
    assert isinstance(outcome, Outcome)
    assert outcome.error is not None
    kept = outcome.error
    chars = (
        len(kept.message)
        + sum(len(text) for _, text in kept.causes)
        + sum(map(len, kept.differences))
    )
    assert chars <= 3 * real.ERROR_CHARS_MAX
    assert group.decided[key][0].error is kept
