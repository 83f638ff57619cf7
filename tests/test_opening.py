"""Hubs and coordinators as objects, without blocks; and what is said where the API is used as what
it is not.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any, NoReturn

import anyio
import pytest

import tensorhub
from tensorhub import sync
from tensorhub.errors import (
    CoordinatorUnavailable,
    InvalidType,
    InvalidValue,
    StateError,
    TensorHubError,
    shown,
)
from tensorhub.types import VersionInfo
from tests.rig import (
    OPTIONS,
    cluster,
    holds,
    library_threads,
    nothing_left,
    published,
    tensors,
    until,
    worker_of,
)

NOBODY = "tcp://127.0.0.1:1"


async def join(address: str, name: str = "worker") -> tensorhub.Hub:
    return await tensorhub.connect(address, name=name, token="", options=OPTIONS)


# --------------------------------------------------------------------------------------------------
# without blocks


async def test_hubs_and_coordinators_are_objects() -> None:
    async with nothing_left():
        coordinator = await tensorhub.serve(token="", options=OPTIONS)
        trainer, reader = (
            await join(coordinator.address, "trainer"),
            await join(coordinator.address, "reader"),
        )
        await published(trainer)
        memory = tensors()
        weights = await reader.register("m", memory)
        await weights.replicate()
        assert holds(memory, 1)
        for each in (trainer, reader, coordinator):
            await each.close()
            await each.close()
        assert weights.state == "closed"
        with pytest.raises(StateError, match="closed"):
            await reader.describe()


def test_a_hub_outlives_the_loop_that_made_it() -> None:
    with sync.serve(token="", options=OPTIONS) as coordinator:
        hub = asyncio.run(join(coordinator.address))
        weights = asyncio.run(hub.register("m", tensors(1)))
        anyio.run(weights.publish, 1, backend="trio")
        asyncio.run(hub.close())
        assert weights.state == "closed"


async def test_who_holds_a_hub_keeps_it_and_not_who_holds_its_context() -> None:
    async with cluster() as c:
        entered = await tensorhub.connect(c.address, token="", options=OPTIONS).__aenter__()
        blocking = sync.connect(c.address, name="blocking", token="", options=OPTIONS).__enter__()
        gc.collect()
        await entered.describe()
        await anyio.to_thread.run_sync(blocking.describe)
        await entered.close()
        await anyio.to_thread.run_sync(blocking.close)


async def test_a_hub_that_nobody_holds_leaves_and_its_handles_hold_it() -> None:
    async with cluster("other") as c:
        weights = await (await join(c.address, "held")).register("m", tensors(1))
        gc.collect()
        await weights.publish(1)
        assert (await c.hubs[0].describe("m")).mark == 1
        watcher = (await join(c.address, "watching")).watch("m")
        gc.collect()
        assert (await anext(watcher)).version == 1
        assert [name for name in library_threads() if "held" in name]
        del weights, watcher
        gc.collect()
        await until(
            lambda: not [name for name in library_threads() if "held" in name or "watching" in name]
        )


async def test_a_watcher_ends_when_its_hub_does_however_that_is() -> None:
    """Also where the library's own thread dies under it."""
    async with cluster() as c:
        hub = await join(c.address)
        watcher, ended = hub.watch("m"), anyio.Event()

        def break_down() -> None:
            raise ZeroDivisionError

        async def watch() -> None:
            assert [info async for info in watcher] == []
            ended.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            hub._thread.post(break_down)
            await ended.wait()
        with pytest.raises(ZeroDivisionError):
            await hub.close()


async def test_nothing_is_waited_for_in_the_librarys_own_thread() -> None:
    """A finalizer runs wherever garbage is collected."""
    async with cluster() as c:
        hub = await anyio.to_thread.run_sync(
            lambda: sync.connect(c.address, token="", options=OPTIONS)
        )
        said: list[Exception] = []

        def finalizer() -> None:
            try:
                hub.describe()
            except StateError as error:
                said.append(error)
            hub.close()

        hub._async._thread.post(finalizer)
        await until(lambda: bool(said))
        assert "a thread of the library cannot wait for the library" in str(said[0])
        await anyio.to_thread.run_sync(hub.close)


# --------------------------------------------------------------------------------------------------
# wrong use


async def test_wrong_use_says_what_to_write() -> None:
    opening: Any = tensorhub.connect(NOBODY, token="", options=OPTIONS)
    with pytest.raises(
        AttributeError, match=r"write `x = await tensorhub.connect\(...\)` or `async with"
    ):
        opening.register("m", {})
    with (
        pytest.raises(
            TypeError,
            match=r"write `async with tensorhub.connect\(...\)`; without an event loop: "
            r"tensorhub.sync",
        ),
        opening,
    ):
        pass
    with pytest.raises(CoordinatorUnavailable):
        await opening
    with pytest.raises(StateError, match=r"call connect\(\) again"):
        await opening
    async with cluster("one") as c:
        hub: Any = c.hubs[0]
        weights: Any = await hub.register("m", tensors(1))
        with (
            pytest.raises(TypeError, match=r"write `async with weights.mutate\(...\):`"),
            weights.mutate(1),
        ):
            pass
        with pytest.raises(TypeError, match=r"write `async with weights.mutate\(...\):`"):
            await weights.mutate(1)
        with pytest.raises(TypeError, match=r"write `async with hub.pin\(...\):`"):
            await hub.pin("m", 1)
        with pytest.raises(TypeError, match=r"write `async for info in hub\.watch"):
            list(hub.watch("m"))
        with pytest.raises(TypeError, match=r"hub\.watch\(\) is iterated"):
            await hub.watch("m")

        def blocking() -> Any:
            return sync.connect(c.address, token="", options=OPTIONS)

        other = await anyio.to_thread.run_sync(blocking)
        with pytest.raises(
            TypeError,
            match=r"write `hub = sync.connect\(...\)`, or `hub = await tensorhub.connect\(...\)`",
        ):
            await other
        await anyio.to_thread.run_sync(other.close)


async def test_a_block_is_entered_once_and_left_once() -> None:
    async with cluster("one") as c:
        weights = await published(c.hubs[0])
        with pytest.raises(StateError, match=r"weights.mutate\(\) is no open block"):
            await weights.mutate(2).__aexit__(None, None, None)
        assert (weights.state, weights.version) == ("ready", 1)
        for block, call in (
            (weights.mutate(2), "weights.mutate"),
            (c.hubs[0].pin("m", 2), "hub.pin"),
        ):
            async with block:
                with pytest.raises(
                    StateError, match=rf"{call}\(\) was entered already: call {call}\(\) again"
                ):
                    await block.__aenter__()
            with pytest.raises(StateError, match=rf"{call}\(\) is no open block"):
                await block.__aexit__(None, None, None)


async def test_who_polls_a_closed_hub_is_told_so() -> None:
    async with cluster("one") as c:
        hub = await join(c.address)
        await published(c.hubs[0])
        assert (await hub.wait_for("m", at_least=1)).version == 1
        await hub.close()
        for model in ("m", "other"):
            with pytest.raises(StateError, match="is closed: the hub was closed"):
                hub.newest(model)


async def test_what_belongs_to_its_process_is_not_pickled() -> None:
    for opening in (tensorhub.connect(NOBODY, token=""), tensorhub.serve(token="")):
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(
                TypeError, match=r"\(\.\.\.\) can neither be pickled nor copied: call it in"
            ):
                attempt(opening)
    async with cluster("one") as c:
        hub = c.hubs[0]
        blocking = await anyio.to_thread.run_sync(
            lambda: sync.connect(c.address, token="", options=OPTIONS)
        )
        weights = await hub.register("m", tensors(1))
        theirs = await anyio.to_thread.run_sync(lambda: blocking.register("m", tensors(1)))
        for each in (hub, weights, hub.watch("m"), c.coordinator, blocking, theirs):
            kind = type(each).__name__
            for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(
                    TypeError,
                    match=f"a {kind} belongs to its process, .* in the other process, connect",
                ):
                    attempt(each)
        await anyio.to_thread.run_sync(blocking.close)


async def test_a_blocking_hook_in_async_code_is_refused_before_a_byte_changes() -> None:
    async with cluster("trainer", "reader") as c:
        source, memory = await c.hubs[0].register("m", tensors(1)), tensors()
        await source.publish(1)
        weights: Any = await c.hubs[1].register("m", memory)
        await weights.replicate()
        async with source.mutate(2):
            pass
        with pytest.raises(
            InvalidType,
            match=r"before_write .* async function, and this one "
            r"returned 'paused': write `async def`",
        ):
            await weights.update(before_write=lambda info: "paused")

        def stop(info: VersionInfo) -> None:
            pytest.fail("it was called")

        with pytest.raises(InvalidType, match="this one returns None: write `async def`"):
            await weights.update(before_write=stop)
        with pytest.raises(InvalidType, match="before_write=3: give a function"):
            await weights.update(before_write=3)
        assert (weights.state, weights.version, holds(memory, 1)) == ("ready", 1, True)

        async def pause(info: VersionInfo) -> None: ...

        def blocking() -> None:
            with sync.connect(c.address, token="", options=OPTIONS) as hub:
                theirs = hub.register("m", tensors())
                for hook in (pause, lambda info: pause(info)):
                    with pytest.raises(
                        InvalidType, match=r"before_write of tensorhub\.sync is a plain function"
                    ):
                        theirs.update(before_write=hook)
                assert theirs.state == "empty"

        await anyio.to_thread.run_sync(blocking)
        assert (await weights.update(before_write=lambda info: pause(info))).version == 2


Arguments = dict[str, Any]


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        (
            {"address": None},
            InvalidType,
            'address=None: give a coordinator\'s "tcp://HOST:PORT", or a list of them',
        ),
        ({"address": 7}, InvalidType, "address=7"),
        (
            {"address": [None]},
            InvalidType,
            'None is not a TensorHub address: give "tcp://HOST:PORT"',
        ),
        ({"address": []}, InvalidValue, "no coordinator address is given"),
        (
            {"address": b"tcp://h:1"},
            InvalidType,
            r"address=b'tcp://h:1': give a coordinator's \"tcp://HOST:PORT\"",
        ),
        ({"address": "here"}, InvalidValue, "'here' is not a TensorHub address"),
        ({"address": "tcp://h:99999"}, InvalidValue, "with a PORT of 0 to 65535"),
        ({"name": 3}, InvalidType, "3 cannot name a worker"),
        (
            {"name": "n" * 100_000},
            InvalidValue,
            r"n{3,}\.\.\.n+' \(of 100000 characters\) cannot name a worker",
        ),
        ({"location": "here"}, InvalidType, "location='here': give tensorhub.Location"),
        (
            {"transports": "tcp"},
            InvalidType,
            r"transports='tcp': give a list of names, as \[\"tcp\"\]",
        ),
        ({"transports": b"tcp"}, InvalidType, "transports=b'tcp': give a list of names"),
        ({"prefetch": 1}, InvalidType, "prefetch=1: give True or False"),
        ({"prefetch": True}, InvalidValue, "set Options.host_memory_bytes"),
        ({"options": {}}, InvalidType, r"options={}: give tensorhub.Options\(...\)"),
        ({"token": 5}, InvalidType, "token is text, bytes, or the path"),
    ],
    ids=str,
)
def test_arguments_of_connect(arguments: Arguments, kind: type[TensorHubError], says: str) -> None:
    """At the call, and not where it is awaited."""
    for call in (tensorhub.connect, sync.connect):
        given: Arguments = {"address": NOBODY, "token": ""} | arguments
        with pytest.raises(kind, match=says) as caught:
            call(**given)
        assert issubclass(kind, StateError)
        assert issubclass(kind, (TypeError, ValueError))
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"port": "http"}, "port='http'"),
        ({"port": 70_000}, "port=70000"),
        ({"host": None}, "host=None"),
        ({"state_dir": 1}, "state_dir=1"),
        ({"state_dir": ""}, "state_dir=''"),
        ({"state_dir": "a\0b"}, r"state_dir='a\\x00b'"),
    ],
    ids=str,
)
def test_arguments_of_serve(arguments: Arguments, says: str) -> None:
    for call in (tensorhub.serve, sync.serve):
        with pytest.raises(StateError, match=f"{says}: give") as caught:
            call(token="", **arguments)
        assert isinstance(caught.value, (TypeError, ValueError))


async def test_arguments_of_hubs_and_weights() -> None:
    async with cluster("one") as c:
        hub: Any = c.hubs[0]
        weights: Any = await hub.register("m", tensors(1))
        calls: list[tuple[type[Exception], str, Callable[[], Any]]] = [
            (TypeError, "None is not a version", lambda: weights.publish(None)),
            (TypeError, "True is not a version", lambda: weights.publish(True)),
            (ValueError, "-1 is not a version", lambda: weights.publish(-1)),
            (TypeError, "timeout='1'", lambda: weights.publish(1, timeout="1")),
            (TypeError, "timeout=True", lambda: weights.publish(1, timeout=True)),
            (ValueError, "timeout=-1", lambda: weights.publish(1, timeout=-1)),
            (
                ValueError,
                "timeout=1000.*: give seconds",
                lambda: weights.publish(1, timeout=10**400),
            ),
            (ValueError, "'newest' is not a version selector", lambda: weights.replicate("newest")),
            (TypeError, "None is not a version selector", lambda: weights.replicate(None)),
            (TypeError, "staged='no'", lambda: weights.update(staged="no")),
            (TypeError, "abandon=1", lambda: weights.close(1)),
            (TypeError, "3 cannot name a model", lambda: hub.register(3, tensors(1))),
            (ValueError, "'' cannot name a model", lambda: hub.register("", tensors(1))),
            (
                ValueError,
                "world_size > 1 needs group=",
                lambda: hub.register("m", tensors(1), world_size=2),
            ),
            (
                ValueError,
                "rank=0, world_size=0",
                lambda: hub.register("m", tensors(1), world_size=0),
            ),
            (
                TypeError,
                "rank=0, world_size='2'",
                lambda: hub.register("m", tensors(1), world_size="2"),
            ),
            (TypeError, r"\['m'\] cannot name a model", lambda: hub.newest(["m"])),
            (TypeError, "rank='0', world_size=1", lambda: hub.register("m", tensors(1), rank="0")),
            (ValueError, "rank=1, world_size=1", lambda: hub.register("m", tensors(1), rank=1)),
            (TypeError, "latest=None", lambda: hub.retain("m", latest=None)),
            (ValueError, "latest=-1", lambda: hub.retain("m", latest=-1)),
            (TypeError, "rank='0'", lambda: hub.fetch("m", rank="0")),
            (TypeError, "names=5", lambda: hub.fetch("m", names=5)),
            (ValueError, "device='moon' cannot be used", lambda: hub.fetch("m", device="moon")),
            (TypeError, "None is not a version", lambda: hub.wait_for("m", at_least=None)),
        ]
        for kind, says, call in calls:
            with pytest.raises(kind, match=says) as caught:
                await call()
            assert isinstance(caught.value, StateError), says
        assert weights.state == "empty"


def test_over_long_names_are_cut_in_messages() -> None:
    name = "layer." * 100
    error = StateError(f"tensor {name!r} is missing at the reader: register it")
    assert str(error).startswith("tensor 'layer.layer.")
    assert str(error).endswith("layer.' is missing at the reader: register it")
    assert len(str(error)) < 250
    assert shown("short") == "'short'"
    assert len(shown([1] * 10**6)) == len(shown("x" * 10**8)) == 63

    class Bad:
        def __repr__(self) -> str:
            raise RuntimeError

    assert shown(Bad()) == "<Bad>"


async def test_a_coordinator_that_is_gone_is_complained_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with nothing_left():
        coordinator = await tensorhub.serve(token="", options=OPTIONS)
        hub = await join(coordinator.address)
        tries: list[int] = []

        async def refuse(host: str, port: int) -> NoReturn:
            tries.append(port)
            raise OSError("refused")

        worker_of(hub).link._dial = refuse
        await coordinator.close()
        await until(lambda: len(tries) >= 4)
        await hub.close()
    events = [
        record.getMessage()
        for record in caplog.records
        if "coordinator_unreachable" in record.getMessage()
    ]
    assert len(events) == 1, events
