"""Many ranks name a manifest that is not known: one is asked for it, and nobody waits for it for
long.
"""

from __future__ import annotations

from collections.abc import Iterator

from tensorhub.coordinator import Connected, Coordinator, Received, Send, Tick, limits
from tensorhub.coordinator.registrations import ANSWER_S_MAX
from tensorhub.messages import FromCoordinator, Join, Register, RegisterAgain, Registered
from tensorhub.model.manifest import id_of
from tensorhub.testing import DEVICE
from tensorhub.types import Location, Options
from tests.coordinator.layout_world import World

LEASE_S = 8.0
MANIFEST = b"a manifest"
IDENT = id_of(MANIFEST)


class Ranks:
    """Ranks of one coordinator, each with a session of its number."""

    def __init__(self, count: int, lease_s: float = LEASE_S) -> None:
        self.now = 0.0
        self.heard: dict[int, list[FromCoordinator]] = {number: [] for number in range(count)}
        ids = (f"id{number}" for number in iter(int, 1))
        self.core = Coordinator(
            cluster="c",
            epoch=1,
            options=Options(lease_s=lease_s),
            ids=lambda: next(ids),
            now=0.0,
            durable=None,
        )
        for number in range(count):
            self.step(Connected(number, f"w{number}", "worker"))
            self.step(Received(number, Join(f"w{number}", Location(), (), 1, 0)))
            self.heard[number].clear()

    def step(self, event: Connected | Received | Tick) -> int:
        """How many messages it brings about."""
        said = [action for action in self.core.step(event, self.now) if isinstance(action, Send)]
        for action in said:
            self.heard[action.session].append(action.message)
        self.core.check_invariants()
        return len(said)

    def register(self, number: int, request: int = 1, *, whole: bool = False) -> None:
        manifest = MANIFEST if whole else b""
        rank = ("m", f"g{number}", 0, 0, 1, True, False, *DEVICE, "", 1, 1)
        self.step(Received(number, Register(request, f"r{number}", *rank, manifest, None, IDENT)))

    def answers(self) -> Iterator[tuple[int, bool]]:
        """(number, whole) of each rank that is told to say it again, since this was asked last."""
        for number, messages in self.heard.items():
            for message in messages:
                assert isinstance(message, RegisterAgain | Registered)
                if isinstance(message, RegisterAgain):
                    yield number, message.whole
            messages.clear()


def test_one_is_asked_and_the_others_hear_when_it_has_answered() -> None:
    ranks = Ranks(4)
    for number in range(4):
        ranks.register(number)
    assert list(ranks.answers()) == [(0, True)]
    ranks.register(0, 2, whole=True)
    ranks.step(Tick())
    assert list(ranks.answers()) == [(1, False), (2, False), (3, False)]
    for number in range(1, 4):
        ranks.register(number, 2)
    assert list(ranks.answers()) == []
    assert len(ranks.core.cluster.members) == 4
    assert ranks.core.next_deadline() == LEASE_S / 2


def test_if_it_does_not_answer_the_others_are_asked() -> None:
    ranks = Ranks(3)
    for number in range(3):
        ranks.register(number)
    assert list(ranks.answers()) == [(0, True)]
    ranks.now = LEASE_S / 8
    ranks.step(Tick())
    assert list(ranks.answers()) == [(1, True), (2, True)]
    ranks.register(2, 2, whole=True)
    ranks.register(0, 2)
    assert list(ranks.answers()) == []
    assert set(ranks.core.cluster.members) == {"r0", "r2"}


def test_nobody_waits_for_it_as_long_as_calls_wait_however_long_a_lease_is() -> None:
    ranks = Ranks(2, lease_s=3600.0)
    for number in range(2):
        ranks.register(number)
    assert list(ranks.answers()) == [(0, True)]
    ranks.now = ANSWER_S_MAX
    ranks.step(Tick())
    assert list(ranks.answers()) == [(1, True)]
    assert Options().op_timeout_s > 2 * ANSWER_S_MAX


def test_very_many_are_told_in_several_steps() -> None:
    count = 2 * limits.WOKEN_PER_STEP + 2
    ranks = Ranks(count)
    for number in range(count):
        ranks.register(number)
    ranks.register(0, 2, whole=True)
    told = []
    while (ranks.core.next_deadline() or 0.0) < LEASE_S / 8:
        ranks.now = ranks.core.next_deadline() or ranks.now
        told.append(ranks.step(Tick()))
    assert told == [limits.WOKEN_PER_STEP, limits.WOKEN_PER_STEP, 1]


def test_only_the_parts_that_are_not_known_are_asked_for() -> None:
    world, shared = World(), (b"catalogue", b"arrangement")
    world.group("one", [("own/one", (*shared, b"its own"))])
    other = world.arrive("other", layout_id="own/other", parts=(*shared, b"another"))
    (again,) = other.take(RegisterAgain)
    assert (again.whole, again.part_ids) == (False, (id_of(b"another"),))
