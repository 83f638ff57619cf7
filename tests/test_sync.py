"""The blocking facade: the same results and errors as the async API, from threads that have no
loop.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

import tensorhub
from tensorhub import sync
from tensorhub.types import VersionInfo
from tests.rig import OPTIONS, gated, holds, library_threads, open_files, tensors, write

Pair = tuple[sync.Hub, sync.Hub]


@pytest.fixture
def address() -> Iterator[str]:
    before = open_files()
    with sync.serve(token="", options=OPTIONS) as coordinator:
        yield coordinator.address
    assert not library_threads()
    assert not [target for number, target in open_files().items() if before.get(number) != target]


@pytest.fixture
def hubs(address: str) -> Iterator[Pair]:
    with connect(address, "trainer") as trainer, connect(address, "reader") as reader:
        yield trainer, reader


def connect(address: str, name: str) -> AbstractContextManager[sync.Hub]:
    return sync.connect(address, name=name, token="", options=OPTIONS)


def interrupt_once(condition: Callable[[], bool]) -> threading.Thread:
    """Ctrl-C for the main thread, as soon as the condition holds."""

    def run() -> None:
        pause = threading.Event()
        while not condition():
            pause.wait(0.001)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_publish_replicate_mutate_update(hubs: Pair) -> None:
    trainer, reader = hubs
    source, memory = tensors(1), tensors()
    published, weights = trainer.register("m", source), reader.register("m", memory)
    assert published.publish(1).version == 1
    assert weights.replicate().changed
    assert holds(memory, 1)
    with published.mutate(2):
        write(source, 2)
    assert (published.state, published.version, published.model) == ("ready", 2, "m")
    report = weights.update("latest", at_least=2)
    assert (report.version, report.reread_bytes) == (2, 0)
    assert holds(memory, 2)
    assert not weights.update().changed
    published.unpublish()
    assert published.state == "empty"
    weights.close()
    assert weights.state == "closed"


def test_what_is_known(hubs: Pair) -> None:
    trainer, reader = hubs
    trainer.register("m", tensors(1)).publish(3)
    assert reader.wait_for("m", at_least=3).version == 3
    newest = reader.newest("m")
    assert newest is not None
    assert next(iter(reader.watch("m"))) == newest
    assert reader.describe("m").mark == 3
    assert [model.model for model in reader.describe()] == ["m"]
    assert (
        reader.describe("m", version=3, after="a name", limit=1).workers
        == reader.describe("m").workers
    )
    assert [model.mark for model in reader.describe(limit=0)] == [3]
    plan = reader.plan("m", selector=3)
    assert (plan.version, [each.workers for each in plan.sources]) == (newest, [("trainer",)])
    assert reader.name == "reader"


def test_before_write_is_called_in_this_thread(hubs: Pair) -> None:
    trainer, reader = hubs
    source, memory = tensors(1), tensors()
    trainer.register("m", source).publish(1)
    weights = reader.register("m", memory)
    seen: list[tuple[VersionInfo, threading.Thread, bool]] = []
    weights.update(
        before_write=lambda info: seen.append((info, threading.current_thread(), holds(memory, 1)))
    )
    assert [(info.version, thread, written) for info, thread, written in seen] == [
        (1, threading.current_thread(), False)
    ]
    with pytest.raises(ZeroDivisionError):
        reader.register("m", tensors()).update(before_write=lambda _: 1 // 0)


def test_several_threads_at_once(hubs: Pair) -> None:
    trainer, reader = hubs
    trainer.register("m", tensors(1)).publish(1)

    def replicate(_: int) -> bool:
        memory = tensors()
        reader.register("m", memory).replicate()
        return holds(memory, 1)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(replicate, range(12)))


def test_beside_a_running_event_loop(address: str) -> None:
    async def main() -> int:
        async with tensorhub.connect(address, token="", options=OPTIONS) as hub:
            weights = await hub.register("m", tensors(1))
            await weights.publish(1)

            def blocking() -> int:
                with connect(address, "reader") as reader:
                    return reader.register("m", tensors()).replicate().version

            return await asyncio.to_thread(blocking)

    assert asyncio.run(main()) == 1


def test_ctrl_c_in_mid_fetch(address: str) -> None:
    with (
        gated(2) as gate,
        connect(address, "trainer") as trainer,
        connect(address, "reader") as reader,
    ):
        trainer.register("m", tensors(1)).publish(1)
        memory = tensors()
        weights = reader.register("m", memory)
        waiting = interrupt_once(lambda: gate.holds)
        with pytest.raises(KeyboardInterrupt):
            weights.replicate()
        waiting.join()
        assert (weights.state, weights.version) == ("torn", None)
        assert not gate.holds
        gate.open()
        assert weights.replicate().version == 1
        assert holds(memory, 1)


def test_ctrl_c_in_before_write_leaves_the_old_version(hubs: Pair) -> None:
    trainer, reader = hubs
    source, memory = tensors(1), tensors()
    published, weights = trainer.register("m", source), reader.register("m", memory)
    published.publish(1)
    weights.replicate()
    with published.mutate(2):
        write(source, 2)

    def interrupted(_: VersionInfo) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weights.update(before_write=interrupted)
    assert (weights.state, weights.version) == ("ready", 1)
    assert holds(memory, 1)
    assert weights.update().version == 2


@pytest.mark.parametrize("name", ["serve", "connect", "Hub", "Weights"])
def test_it_mirrors_the_async_api(name: str) -> None:
    """The same names, parameters and defaults."""
    theirs, ours = getattr(tensorhub, name), getattr(sync, name)
    if inspect.isclass(theirs):
        pairs = [
            (each, getattr(ours, key))
            for key, each in vars(theirs).items()
            if not key.startswith("_")
        ]
    else:
        pairs = [(theirs, ours)]
    for their, our in pairs:
        if callable(their):
            wanted = [
                (p.name, p.kind, p.default) for p in inspect.signature(their).parameters.values()
            ]
            assert wanted == [
                (p.name, p.kind, p.default) for p in inspect.signature(our).parameters.values()
            ]
