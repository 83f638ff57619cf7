"""What comparisons cost a worker: few run at a time, and none begins for a fence, for room that is
needed, or in memory that was freed.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tensorhub import deltas
from tensorhub.layouts.reading import Selection
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.model.strips import Strip
from tensorhub.runtime.data.delta_making import begin_deltas, make_deltas
from tensorhub.runtime.data.deltas import COMPARED_MAX
from tensorhub.runtime.data.serving import BROKEN, SharedOwner
from tensorhub.transport.owner import CannotServe
from tensorhub.types import ContentId, RegistrationId
from tests.runtime.data.test_deltas import ALL, CHUNKS, HERE, Source
from tests.runtime.data_rig import WAIT_S, manifest_of

FIRST, SECOND = ContentId("1"), ContentId("2")
MANY = manifest_of((3 * COMPARED_MAX * 4096,))


class Publisher:
    """An owner with two versions; the second one is compared with the first one."""

    def __init__(self) -> None:
        self.memory = ChunkMemory(MANY, [memoryview(bytearray(MANY.nbytes))])
        self.owner = SharedOwner(fence_grace_s=0.05)
        self.taken: set[str] = set()
        self.asked = itertools.count()
        self.owner.deltas.on_dropped = self.taken.discard
        self.open(1, FIRST)
        assert begin_deltas(self.owner, HERE, self.lend, is_publisher=True) == 0
        make_deltas(self.owner, HERE, 1, FIRST)
        self.owner.fence(HERE)
        self.open(2, SECOND)

    def open(self, generation: int, content: ContentId) -> None:
        self.owner.open(HERE, generation, ContentId(""), self.memory, complete=True)
        self.owner.deltas.named(HERE, generation, content)

    def lend(self, registration: str, nbytes: int) -> bool:
        self.taken.add(registration)
        return True

    def ask(self) -> None:
        """A reader's lane asks for all deltas, each lane from another chunk on."""
        first, count = next(self.asked), MANY.chunk_count
        wanted = [(first + chunk) % count for chunk in range(count)]
        terms = (None, HERE, 2, SECOND, wanted, MANY.nbytes, 0.0)
        with self.owner.access(*terms) as answer:
            assert isinstance(answer, tuple)
            self.owner.deltas_of(*answer, FIRST)


class Held:
    """Comparisons, each of which is held in its midst until `let_go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Semaphore(0)
        self.count = self.running = self.most = 0
        self._lock = threading.Lock()
        self._may_go = threading.Event()
        self._encode = deltas.encode
        monkeypatch.setattr(deltas, "encode", self._held)

    def _held(self, base: memoryview, new: memoryview, width: int) -> bytes | None:
        with self._lock:
            self.count += 1
            self.running += 1
            self.most = max(self.most, self.running)
        self.begun.release()
        assert self._may_go.wait(WAIT_S)
        with self._lock:
            self.running -= 1
        return self._encode(base, new, width)

    def await_begun(self, count: int) -> None:
        for _ in range(count):
            assert self.begun.acquire(timeout=WAIT_S)

    def let_go(self) -> None:
        self._may_go.set()


@contextmanager
def threads(count: int, target: Callable[[], object]) -> Iterator[None]:
    """The block runs beside them; they end with it."""
    running = [threading.Thread(target=target) for _ in range(count)]
    for each in running:
        each.start()
    try:
        yield
    finally:
        for each in running:
            each.join(WAIT_S)
            assert not each.is_alive()


def test_however_many_readers_ask_few_chunks_are_compared_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher, held = Publisher(), Held(monkeypatch)
    with threads(2 * COMPARED_MAX, publisher.ask):
        held.await_begun(COMPARED_MAX)
        held.let_go()
    assert held.most == COMPARED_MAX
    assert held.count == MANY.chunk_count
    publisher.owner.fence(HERE)


def test_a_fence_waits_for_the_comparisons_that_run_and_no_other_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher, held = Publisher(), Held(monkeypatch)
    kept = publisher.owner.deltas
    with threads(2 * COMPARED_MAX, publisher.ask):
        held.await_begun(COMPARED_MAX)
        with threads(1, lambda: publisher.owner.fence(HERE)):
            with kept._changed:
                assert kept._changed.wait_for(
                    lambda: kept._histories[HERE].open_generation == 0, WAIT_S
                )
            held.let_go()
    assert held.count == COMPARED_MAX


def test_room_that_is_needed_waits_for_the_comparisons_that_run_and_no_other_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher, held = Publisher(), Held(monkeypatch)
    kept = publisher.owner.deltas
    with threads(2 * COMPARED_MAX, publisher.ask):
        held.await_begun(COMPARED_MAX)
        with threads(1, lambda: kept.end(HERE)):
            with kept._changed:
                assert kept._changed.wait_for(lambda: HERE not in kept._begun, WAIT_S)
            held.let_go()
    assert held.count == COMPARED_MAX
    assert not publisher.taken
    wanted: list[RegistrationId] = []
    kept.on_wanted = wanted.append
    publisher.ask()
    assert wanted == [HERE]  # the next reader that asks has it begin again
    publisher.owner.fence(HERE)


def test_memory_that_was_freed_is_refused_and_ends_what_is_made_beforehand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher = Publisher()

    def freed(memory: ChunkMemory, chunk: int, into: bytearray) -> memoryview:
        raise OSError(14, "Bad address")

    monkeypatch.setattr(ChunkMemory, "copied", freed)
    with pytest.raises(CannotServe, match=BROKEN.reason):
        publisher.ask()
    make_deltas(publisher.owner, HERE, 2, SECOND)
    assert publisher.owner.deltas.missing(HERE, 2) == list(range(MANY.chunk_count))
    publisher.owner.fence(HERE)


@pytest.mark.parametrize("lacks", ["memory", "registration"])
def test_what_cannot_begin_gives_its_room_back(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    publisher = Publisher()
    publisher.owner.deltas.end(HERE)

    def no_memory(*_: object) -> object:
        raise OSError(12, "Cannot allocate memory")

    def gone(registration: str, nbytes: int) -> bool:
        publisher.owner.deltas.forget(HERE)
        return publisher.lend(registration, nbytes)

    if lacks == "memory":
        monkeypatch.setattr("tensorhub.runtime.data.deltas.mmap.mmap", no_memory)
        with pytest.raises(OSError, match="Cannot allocate"):
            begin_deltas(publisher.owner, HERE, publisher.lend, is_publisher=True)
    else:
        begin_deltas(publisher.owner, HERE, gone, is_publisher=True)
    assert not publisher.taken
    publisher.owner.fence(HERE)


def test_a_replica_that_becomes_a_publisher_begins_anew_with_a_shadow() -> None:
    replica = Source(has_shadow=False)
    assert replica.deltas.missing(HERE, 1) == []  # or its thread would look for ever
    replica.is_publisher = True
    replica.publish([0])
    assert not replica.deltas.is_begun(HERE)
    replica.deltas.begin(HERE, replica.memory, has_shadow=True)
    replica.look()
    replica.publish([1])
    assert set(replica.find(2)) == set(ALL)


def test_another_generation_during_a_comparison_keeps_its_delta(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Source()
    source.look()
    source.publish([5])
    held = Held(monkeypatch)
    with threads(1, source.look):
        held.await_begun(1)
        source.deltas.closed(HERE)
        source.deltas.reopened(HERE, 99)
        held.let_go()
    assert source.deltas.missing(HERE, 99) == list(range(1, CHUNKS))


@pytest.mark.parametrize("is_strided", [False, True])
def test_memory_of_strips_is_no_base(is_strided: bool) -> None:
    owner, memory = SharedOwner(), ChunkMemory(MANY, [memoryview(bytearray(MANY.nbytes))])
    owner.open(HERE, 1, FIRST, memory, complete=True)
    owner.fence(HERE)
    if is_strided:
        memory = memory.selected(Selection(((Strip(0, 64, 0, 0, 1, ((2, 16),), 8),),)))
    owner.open(HERE, 2, SECOND, memory, complete=False, keeps_base=True)
    assert (owner.base(HERE) is None) == is_strided
    owner.fence(HERE)


@pytest.mark.heavy
def test_whatever_happens_beside_readers_their_deltas_make_the_newest_bytes() -> None:
    """Versions, fences that are given up, room that is recalled and lent again, a registration that
    goes: in any order, while readers ask.
    """
    rng = random.Random(7)
    array = bytearray(rng.randbytes(MANY.nbytes))
    memory = ChunkMemory(MANY, [memoryview(array)])
    owner, taken = SharedOwner(fence_grace_s=0.05), set[str]()
    owner.deltas.on_dropped = taken.discard
    contents: list[bytes] = []
    generations = itertools.count(1)
    now = [0, 0]  # the generation and the version
    is_over = threading.Event()
    wrong: list[str] = []
    found_any = threading.Event()

    def lend(registration: str, nbytes: int) -> bool:
        taken.add(registration)
        return True

    def publish() -> None:
        for at in rng.sample(range(MANY.nbytes), 60):
            array[at] ^= 1
        contents.append(bytes(array))
        now[:] = next(generations), len(contents)
        owner.open(HERE, now[0], ContentId(""), memory, complete=True)
        owner.deltas.named(HERE, now[0], ContentId(str(len(contents))))

    def read(number: int) -> None:
        chance = random.Random(number)
        while not is_over.is_set():
            generation, version = now
            base = max(1, version - chance.randrange(1, 4))
            chunks = chance.sample(range(MANY.chunk_count), 5)
            terms = (None, HERE, generation, ContentId(str(version)), chunks, MANY.nbytes, 0.0)
            with owner.access(*terms) as answer:
                if not isinstance(answer, tuple):
                    continue
                for chunk, made in owner.deltas_of(*answer, ContentId(str(base))).items():
                    held = ChunkMemory(MANY, [memoryview(bytearray(contents[base - 1]))])
                    held.apply(chunk, made)
                    found_any.set()
                    if held.buffer(chunk) != memory.buffer(chunk):
                        wrong.append(f"chunk {chunk} of {version} from {base}")

    publish()
    numbers = itertools.count()
    with threads(4, lambda: read(next(numbers))):
        for _ in range(100):
            begin_deltas(owner, HERE, lend, is_publisher=True)
            make_deltas(owner, HERE, now[0], ContentId(str(now[1])), lambda: rng.random() < 0.3)
            happens = rng.random()
            if happens < 0.1:
                owner.deltas.end(HERE)
                continue
            owner.fence(HERE)
            if happens < 0.3:
                now[0] = next(generations)
                owner.reopen(HERE, now[0])
            else:
                if happens < 0.35:
                    owner.forget(HERE)
                publish()
        is_over.set()
    assert not wrong
    assert found_any.is_set()
    owner.fence(HERE)
    owner.forget(HERE)
    owner.check_invariants()
    assert not owner.deltas._histories
    assert not owner.deltas._begun
    assert not taken
