"""Several lines to one source as one channel: who is asked for what, and what becomes of it where
lines end.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tensorhub.model.accesses import CHUNKS_PER_ACCESS_MAX
from tensorhub.transport import parallel
from tensorhub.transport.base import Arrival, Cutter, Lacking, ReadFailure, Unusable
from tensorhub.transport.parallel import ParallelChannel
from tests.runtime.data_rig import WAIT_S

SIZE = 10


class Line:
    """A connection by which what was asked for comes chunk by chunk; `goes_on` holds it up."""

    def __init__(self, lines: Lines, cutter: Cutter) -> None:
        self.asked: list[list[int]] = []
        self.fails: ReadFailure | None = None
        self.lacks: set[int] = set()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.is_driven = threading.Event()
        self.is_closed = False
        self.before: Callable[[], object] = lambda: None
        self.on_close: Callable[[], object] = lambda: None
        self._left: deque[int] = deque()
        self._is_cut = threading.Event()
        cutter.attach(self._cut)
        lines.made.append(self)

    def _cut(self) -> None:
        self._is_cut.set()
        self.goes_on.set()

    def submit(self, chunks: Sequence[int]) -> None:
        self.asked.append(list(chunks))
        self._left.extend(chunks)

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        assert self._left, "it waits for nothing"
        self.is_driven.set()
        assert self.goes_on.wait(WAIT_S)
        self.before()
        if self._is_cut.is_set():
            raise ReadFailure("lost", "it was cut")
        if self.fails is not None:
            raise self.fails
        chunk = self._left.popleft()
        return Lacking([chunk], []) if chunk in self.lacks else Arrival([(chunk, chunk)], 0.0, 0.0)

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        self.on_close()


class Lines:
    """Opens lines. `refuses`: why no further one can be had."""

    def __init__(self) -> None:
        self.made: list[Line] = []
        self.refuses: Exception | None = None
        self.tried = 0
        self.before: Callable[[Cutter], object] = lambda cutter: None

    def __call__(self, cutter: Cutter) -> Line:
        self.tried += 1
        self.before(cutter)
        if self.refuses is not None:
            raise self.refuses
        return Line(self, cutter)


def channel_of(connections: int, chunks: int = 40) -> tuple[Lines, ParallelChannel, Cutter]:
    lines, cutter = Lines(), Cutter()
    return lines, ParallelChannel(lines, connections, [SIZE] * chunks, cutter), cutter


class Held:
    """A thread that waits for its answer by the first line, and others beside it."""

    def __init__(self, lines: Lines, channel: ParallelChannel, threads: ThreadPoolExecutor) -> None:
        self._line = lines.made[0]
        self._channel = channel
        self._threads = threads
        self.hold()

    def hold(self) -> None:
        self._line.goes_on.clear()
        self._line.is_driven.clear()
        self._answer = self.call()
        assert self._line.is_driven.wait(WAIT_S)

    def call(self) -> Future[Arrival | Lacking]:
        return self._threads.submit(self._channel.receive, 1)

    def let_go(self) -> Arrival | Lacking:
        self._line.goes_on.set()
        return self._answer.result(WAIT_S)


@contextlib.contextmanager
def first_line_held(lines: Lines, channel: ParallelChannel) -> Iterator[Held]:
    with ThreadPoolExecutor(3) as threads:
        yield Held(lines, channel, threads)


def named(answer: Arrival | Lacking) -> list[int]:
    assert isinstance(answer, Arrival)
    return [chunk for chunk, _ in answer.chunks]


def all_of(channel: ParallelChannel) -> list[int]:
    """What one thread receives until there is nothing for it."""
    found: list[int] = []
    while chunks := named(channel.receive(1)):
        found += chunks
    return found


def test_each_thread_opens_a_line_and_no_line_is_asked_for_everything() -> None:
    lines, channel, _ = channel_of(3)
    channel.submit(range(20, 40))
    channel.submit(range(20))
    with ThreadPoolExecutor(4) as threads:
        lines.made[0].goes_on.clear()
        first = threads.submit(channel.receive, 1)
        assert lines.made[0].is_driven.wait(WAIT_S)
        assert lines.made[0].asked[0] == list(range(40 // 3))  # the lowest; no more than its share
        assert threads.submit(channel.receive, 1).result(WAIT_S).chunks
        lines.made[1].goes_on.clear()
        second = threads.submit(channel.receive, 1)
        third = threads.submit(channel.receive, 1)
        found = [named(third.result(WAIT_S))]
        assert len(lines.made) == 3
        # by the third line: nothing is left that nobody was asked for
        found.append(all_of(channel))
        assert channel.receive(1) == Arrival((), 0.0, 0.0)
        for line in lines.made:
            line.goes_on.set()
        found += [named(first.result(WAIT_S)), named(second.result(WAIT_S)), all_of(channel)]
    assert sorted(chunk for chunks in found for chunk in chunks) == [
        c for c in range(40) if c != lines.made[1].asked[0][0]
    ]
    assert sorted(chunk for line in lines.made for asked in line.asked for chunk in asked) == list(
        range(40)
    )
    assert all(asked == sorted(asked) for line in lines.made for asked in line.asked)
    channel.close()
    assert all(line.is_closed for line in lines.made)


def test_a_line_is_asked_only_for_chunks_that_come_by_it_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By one that has become slow everybody would wait for what it was asked for before."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(parallel, "FIRST_BYTES", SIZE)
    lines, channel, _ = channel_of(2)
    line = lines.made[0]
    line.before = lambda: now.__setitem__(0, now[0] + parallel.AHEAD_S / 4)
    channel.submit(range(40))
    for _ in range(6):
        channel.receive(1)
    assert [len(asked) for asked in line.asked] == [1, 4, 1, 1, 1, 1]  # four come in that time
    line.before = lambda: now.__setitem__(0, now[0] + 100.0)
    channel.receive(1)
    before = len(line.asked)
    for _ in range(3):
        channel.receive(1)
    assert len(line.asked) == before  # it has enough to do


def test_a_request_names_no_more_chunks_than_a_source_takes() -> None:
    lines, channel, _ = channel_of(1, CHUNKS_PER_ACCESS_MAX + 1)
    channel.submit(range(CHUNKS_PER_ACCESS_MAX + 1))
    channel.receive(1)
    assert [len(asked) for asked in lines.made[0].asked] == [CHUNKS_PER_ACCESS_MAX]


def test_chunks_of_a_line_that_ends_come_by_another_line() -> None:
    lines, channel, _ = channel_of(2)
    channel.submit(range(12))
    with first_line_held(lines, channel) as held:
        found = all_of(channel)  # by the second line
        lines.made[0].fails = ReadFailure("lost", "broken", bytes_discarded=7)
        # the other one's own thread may have gone to rest: so this one takes its line
        answer = held.let_go()
    assert isinstance(answer, Arrival)
    assert answer.discarded_bytes == 7
    assert lines.made[0].is_closed
    found += [*named(answer), *all_of(channel)]
    assert sorted(found) == list(range(12))
    channel.submit([12])
    answer = channel.receive(1)
    assert isinstance(answer, Arrival)
    # told once; and no line is opened again
    assert (named(answer), answer.discarded_bytes, lines.tried) == ([12], 0, 2)


def test_chunks_of_a_line_are_asked_of_others_once_it_is_closed() -> None:
    """Until then it may write there."""
    lines, channel, _ = channel_of(2)
    channel.submit(range(12))
    with first_line_held(lines, channel) as held:
        found = all_of(channel)  # by the second line
        others: list[int] = []
        lines.made[0].on_close = lambda: others.extend(named(channel.receive(1)))
        lines.made[0].fails = ReadFailure("lost", "broken")
        found += [*named(held.let_go()), *all_of(channel)]
    assert not others
    assert sorted(found) == list(range(12))


def test_the_channel_fails_with_its_last_line() -> None:
    lines, channel, _ = channel_of(2)
    channel.submit(range(12))
    with first_line_held(lines, channel) as held:
        channel.receive(1)
        for number, line in enumerate(lines.made):
            line.fails = ReadFailure("refused", f"line {number}", bytes_discarded=1 + number)
        # its line is gone, and it waits for no other one
        assert held.call().result(WAIT_S) == Arrival((), 0.0, 0.0)
        with pytest.raises(ReadFailure, match="line 0") as failed:
            held.let_go()
    assert failed.value.bytes_discarded == 3
    channel.close()
    assert all(line.is_closed for line in lines.made)


@pytest.mark.parametrize("why", [Unusable("not this way"), ReadFailure("unreachable", "full")])
def test_a_further_line_that_cannot_be_had_is_no_failure(why: Exception) -> None:
    lines, channel, _ = channel_of(2)
    lines.refuses = why
    channel.submit(range(12))
    with first_line_held(lines, channel) as held:
        for _ in range(2):
            assert channel.receive(1) == Arrival((), 0.0, 0.0)
        assert lines.tried == 2  # and is tried once
        found = named(held.let_go())
    assert sorted(found + all_of(channel)) == list(range(12))


def test_the_first_line_has_to_be_had() -> None:
    lines = Lines()
    lines.refuses = Unusable("not this way")
    with pytest.raises(Unusable):
        ParallelChannel(lines, 2, [SIZE], Cutter())


def test_a_chunk_that_the_source_lacks_may_be_asked_for_again() -> None:
    lines, channel, _ = channel_of(2)
    lines.made[0].lacks = {1}
    channel.submit([1])
    assert channel.receive(1) == Lacking([1], [])
    assert channel.receive(1) == Arrival((), 0.0, 0.0)
    lines.made[0].lacks.clear()
    channel.submit([1])
    assert named(channel.receive(1)) == [1]


def until_it_is_cut() -> tuple[Callable[[Cutter], None], threading.Event]:
    """What opens a line, and never succeeds; and whether it has begun."""
    opening, is_cut = threading.Event(), threading.Event()

    def wait(its: Cutter) -> None:
        its.attach(is_cut.set)
        opening.set()
        assert is_cut.wait(WAIT_S)
        its.detach()
        raise ReadFailure("unreachable", "the read was given up")

    return wait, opening


def test_a_cut_ends_every_line_also_one_that_is_being_opened() -> None:
    lines, channel, cutter = channel_of(3)
    channel.submit(range(12))
    wait, opening = until_it_is_cut()
    with first_line_held(lines, channel) as held:
        lines.before = wait
        second = held.call()
        assert opening.wait(WAIT_S)
        cutter.cut()
        with pytest.raises(ReadFailure, match="it was cut"):
            held.let_go()
        assert second.result(WAIT_S) == Arrival((), 0.0, 0.0)
    channel.close()


def test_a_closed_channel_leaves_no_reference_cycle() -> None:
    """Else the destination, which the caller may want to let go, would stay until cycles are
    collected.
    """
    _, channel, cutter = channel_of(2)
    channel.close()
    gone = weakref.ref(channel)
    del channel
    assert gone() is None
    opens = until_it_is_cut()[0]  # which raises an error of its own
    cutter.cut()
    with contextlib.suppress(ReadFailure):
        ParallelChannel(opens, 2, [SIZE], cutter)  # type: ignore[arg-type]
    opener = weakref.ref(opens)
    del opens
    assert opener() is None


def test_a_line_goes_on_opening_while_chunks_are_left_for_it() -> None:
    lines, channel, _ = channel_of(2)
    channel.submit(range(8))
    opening, goes_on, cutters = threading.Event(), threading.Event(), list[Cutter]()

    def wait(its: Cutter) -> None:
        cutters.append(its)
        opening.set()
        assert goes_on.wait(WAIT_S)

    with first_line_held(lines, channel) as held:
        lines.before = wait
        second = held.call()
        assert opening.wait(WAIT_S)
        assert named(held.let_go()) == [0]
        was_cut = cutters[0].is_cut
        goes_on.set()
        assert not was_cut
        assert named(second.result(WAIT_S))


def test_a_line_that_opens_too_late_is_not_waited_for() -> None:
    """The end of a fetch would wait for its connection."""
    lines, channel, _ = channel_of(2)
    channel.submit(range(3))
    wait, opening = until_it_is_cut()
    with first_line_held(lines, channel) as held:
        lines.before = wait
        second = held.call()
        assert opening.wait(WAIT_S)
        found = [*named(held.let_go()), *all_of(channel)]
        assert sorted(found) == [0, 1, 2]
        assert second.result(WAIT_S) == Arrival((), 0.0, 0.0)
        assert not lines.made[0].is_closed
        lines.before = lambda cutter: None
        channel.submit(range(3, 9))  # there is more, after all: it is opened
        held.hold()
        assert named(channel.receive(1))
        assert len(lines.made) == 2
        assert named(held.let_go())
