"""Windows in memory: in which order they are filled, and how long a read waits."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest

from tensorhub.errors import IntegrityError, OperationTimeout
from tensorhub.fs import cache as cache_module
from tensorhub.fs.cache import Cache, Key
from tensorhub.memory.windows import Windows
from tests.memory.test_on_demand import CHUNK_BYTES
from tests.memory.test_windows import several
from tests.rig import WAIT_S


class Section:
    """Whose windows are filled when the test says so."""

    def __init__(self) -> None:
        self.windows = Windows(several(), CHUNK_BYTES)
        self.begun = queue.SimpleQueue[int]()
        self.may_end = threading.Event()

    def fill(self, number: int) -> None:
        self.begun.put(number)
        assert self.may_end.wait(WAIT_S)


def test_the_window_that_is_read_arrives_before_the_following_ones_are_asked_for() -> None:
    """They would share its link, and the first byte would come as late as the last."""
    section, cache, got = Section(), Cache(8 * CHUNK_BYTES), list[int]()
    first, *following = [Key(section, number) for number in range(3)]

    def read() -> None:
        window = section.windows.windows[0]
        put, deadline = (lambda view: got.append(len(view))), time.monotonic() + WAIT_S
        cache.read(first, window.start, window.stop, put, following, deadline)

    reader = threading.Thread(target=read)
    reader.start()
    assert section.begun.get(timeout=WAIT_S) == 0
    assert not any(cache.holds(each) for each in following)
    section.may_end.set()
    reader.join(WAIT_S)
    assert got == [first.nbytes]
    assert {section.begun.get(timeout=WAIT_S) for _ in following} == {1, 2}
    cache.close()


def test_a_read_ends_at_its_deadline_though_the_fill_goes_on() -> None:
    section, cache = Section(), Cache(8 * CHUNK_BYTES)
    with pytest.raises(OperationTimeout, match="did not arrive in time"):
        cache.read(Key(section, 0), 0, 1, lambda view: None, (), time.monotonic())
    section.may_end.set()
    cache.close()


def test_a_window_that_cannot_be_filled_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    section, cache, given_back = Section(), Cache(8 * CHUNK_BYTES), list[int]()
    monkeypatch.setattr(section, "fill", _fails)
    monkeypatch.setattr(section.windows, "give_back", given_back.append)
    for _ in range(2):
        with pytest.raises(IntegrityError):
            _read(cache, Key(section, 1))
    assert given_back == [1, 1]
    assert cache.nbytes == 0
    cache.close()


def test_the_window_that_was_read_longest_ago_makes_room() -> None:
    section, cache = Section(), Cache(2 * CHUNK_BYTES)
    section.may_end.set()
    zero, one, two = (Key(section, number) for number in range(3))
    for each in (zero, one, zero, two):
        _read(cache, each)
    assert [cache.holds(each) for each in (zero, one, two)] == [True, False, True]
    cache.close()


def test_a_window_that_makes_room_before_it_is_read_is_read_once_it_is_filled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    section, cache, read = Section(), Cache(2 * CHUNK_BYTES), list[int]()
    zero, one, two = (Key(section, number) for number in range(3))
    filled, may_fill_again = list[int](), threading.Event()
    calls, wait = itertools.count(), cache_module._wait

    def fill(number: int) -> None:
        assert number not in filled or may_fill_again.wait(WAIT_S)
        filled.append(number)

    def wait_and_make_room(fill: Future[None], deadline: float) -> None:
        """The first window is filled: before it is read, it makes room, and is filled ahead again."""
        call = next(calls)
        if call == 4:
            may_fill_again.set()
        wait(fill, deadline)
        if call == 0:
            _read(cache, one)
            _read(cache, two)
            _read(cache, two, [zero])

    monkeypatch.setattr(section, "fill", fill)
    monkeypatch.setattr(cache_module, "_wait", wait_and_make_room)
    _read(cache, zero, put=lambda view: read.append(filled.count(0)))
    may_fill_again.set()
    assert read == [2]
    cache.close()


def _read(
    cache: Cache,
    key: Key,
    following: Sequence[Key] = (),
    put: Callable[[memoryview], object] = lambda view: None,
) -> None:
    window = key.section.windows.windows[key.number]
    deadline = time.monotonic() + WAIT_S
    cache.read(key, window.start, window.stop, put, following, deadline)


def _fails(number: int) -> None:
    raise IntegrityError("broken")
