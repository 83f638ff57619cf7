"""Tokens over real sockets: a change of token under running transfers, what is revoked, and what a
read-only one may do.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import anyio
import numpy as np
import pytest

import tensorhub
from tensorhub.api.hub import Hub
from tensorhub.api.tools import seed_shard
from tensorhub.errors import AuthenticationFailed
from tensorhub.messages import Watch
from tensorhub.protocol.codec import FROM_COORDINATOR
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake
from tensorhub.protocol.stream import MessageStream
from tensorhub.runtime.control import keyring, server
from tensorhub.runtime.data.lanes import PullRunner
from tensorhub.types import parse_address
from tests.rig import (
    CHUNK_BYTES,
    OPTIONS,
    WAIT_S,
    gated,
    holds,
    nothing_left,
    tensors,
    thread_of,
    until,
    worker_of,
)

SECRET = "the cluster's own"
READ_ONLY = tensorhub.read_only_token(SECRET)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token files are looked at whenever they are used, and sessions often."""
    monkeypatch.setattr(keyring, "LOOK_S", 0.0)
    monkeypatch.setattr(server, "LOOK_S", 0.01)


def token_file(path: Path, *tokens: str) -> Path:
    """As an operator replaces it: the new one is there at once, and whole."""
    new = path.with_suffix(".new")
    new.touch(0o600)
    new.write_text("".join(f"{token}\n" for token in tokens))
    return new.rename(path)


async def test_a_token_is_changed_under_running_transfers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coordinator, trainer and reader each have a file of their own, changed one after the
    other.
    """
    caplog.set_level(logging.INFO, "tensorhub")
    files = [token_file(tmp_path / name, "old") for name in ("coordinator", "trainer", "reader")]
    mine, reports = tensors(), list[tensorhub.FetchReport]()

    async def everywhere(*tokens: str) -> None:
        # the others are looked at when there is a reason
        read = f"token_file_read' path='{files[0]}'"
        before = caplog.text.count(read)
        for file in files:
            token_file(file, *tokens)
        await until(lambda: caplog.text.count(read) == before + 1)

    async with nothing_left(), contextlib.AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(
            tensorhub.serve(token=files[0], options=OPTIONS)
        )

        async def connect(name: str, file: Path) -> Hub:
            joining = tensorhub.connect(coordinator.address, name=name, token=file, options=OPTIONS)
            return await stack.enter_async_context(joining)

        trainer = await connect("trainer", files[1])
        source = await trainer.register("m", tensors(1))
        await source.publish(1)
        with gated(3) as gate:
            reader = await connect("reader", files[2])
            weights = await reader.register("m", mine)

            async def replicate() -> None:
                reports.append(await weights.replicate())

            # many Reads
            monkeypatch.setitem(
                PullRunner.__init__.__kwdefaults__ or {}, "batch_bytes", CHUNK_BYTES
            )
            async with reader.pin("m", 1), anyio.create_task_group() as tasks:
                tasks.start_soon(replicate)
                await until(lambda: gate.holds)
                await everywhere("old", "new")
                await everywhere("new", "old")
                welcomes = caplog.text.count("worker_welcomed")
                await everywhere("new")
                await until(lambda: caplog.text.count("worker_welcomed") == welcomes + 2)
                assert source.state == "ready"
                gate.open()
        assert holds(mine, 1)
        assert (reports[0].reread_bytes, reports[0].version) == (0, 1)
        assert caplog.text.count("its token is not accepted any more") >= 2  # both sessions
        assert "source_failed" in caplog.text  # and the reader's lane
        assert "coordinator_unreachable" not in caplog.text
        assert "peer_refused" not in caplog.text
        with pytest.raises(AuthenticationFailed):
            async with tensorhub.connect(coordinator.address, token="old", options=OPTIONS):
                pass
        async with source.mutate(2):
            pass
        assert (await weights.update()).version == 2
        await stack.aclose()


async def test_a_revoked_token_ends_what_came_with_it_also_who_only_listens(tmp_path: Path) -> None:
    file = token_file(tmp_path / "token", "new", "old")
    async with nothing_left(), tensorhub.serve(token=file, options=OPTIONS) as coordinator:
        host, port = parse_address(coordinator.address)
        async with (
            tensorhub.connect(coordinator.address, token="new", options=OPTIONS) as stays,
            tensorhub.connect(coordinator.address, token="old", options=OPTIONS) as goes,
            MessageStream(await anyio.connect_tcp(host, port), FROM_COORDINATOR, 2**20) as listens,
        ):
            await listens.handshake(
                ClientHandshake("observer", "o", b"old", bytes(NONCE_BYTES)), WAIT_S
            )
            await listens.send(Watch("m"))
            assert await listens.receive() is not None
            token_file(file, "new")
            with anyio.fail_after(WAIT_S):
                assert await listens.receive() is None
            await until(lambda: isinstance(worker_of(goes).link.fault, AuthenticationFailed))
            why = (
                f"reached.*: {coordinator.address}: the coordinator refused this side: this worker"
            )
            for call in (
                goes.describe(timeout=0.1),
                goes.fetch("m", timeout=0.1),
                goes.wait_for("m", at_least=1, timeout=0.1),
            ):
                with pytest.raises(AuthenticationFailed, match=why):
                    await call
            assert await stays.describe() == ()


async def test_a_path_that_is_given_as_the_token_itself_is_pointed_out(tmp_path: Path) -> None:
    file = token_file(tmp_path / "token", "secret")
    async with nothing_left(), tensorhub.serve(token=file, options=OPTIONS) as coordinator:
        for token, hint in (
            (str(file), r"the path of a file.*give a pathlib\.Path"),
            ("a", "sides$"),
        ):
            with pytest.raises(AuthenticationFailed, match=hint) as caught:
                await tensorhub.connect(coordinator.address, token=token, options=OPTIONS)
            assert str(file) not in str(caught.value)


async def test_a_coordinator_whose_token_is_a_path_says_so_in_its_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(token_file(tmp_path / "token", "secret"))
    async with nothing_left(), tensorhub.serve(token=path, options=OPTIONS) as coordinator:
        with pytest.raises(AuthenticationFailed):
            await tensorhub.connect(coordinator.address, token="secret", options=OPTIONS)
        await until(lambda: "this side's token is the path of a file" in caplog.text)


async def test_a_token_file_that_goes_bad_cuts_nobody_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = token_file(tmp_path / "token", "good")
    async with nothing_left(), tensorhub.serve(token=file, options=OPTIONS) as coordinator:
        async with tensorhub.connect(coordinator.address, token="good", options=OPTIONS) as hub:
            file.write_text("")
            await until(lambda: "token_file_not_taken" in caplog.text)
            file.unlink()
            await until(lambda: "No such file" in caplog.text)
            assert "offline" not in repr(hub)
        async with tensorhub.connect(coordinator.address, token="good", options=OPTIONS) as hub:
            assert await hub.describe() == ()


# ------------------------------------------------------------------------------------------------
# the read-only token


async def test_a_read_only_token_fetches_and_looks_and_nothing_else() -> None:
    async with (
        nothing_left(),
        tensorhub.serve(token=SECRET, options=OPTIONS) as coordinator,
        tensorhub.connect(
            coordinator.address, token=SECRET, options=OPTIONS, name="trainer"
        ) as trainer,
        tensorhub.connect(
            coordinator.address, token=READ_ONLY, options=OPTIONS, name="dashboard"
        ) as dashboard,
    ):
        assert "read-only" in repr(dashboard)
        assert "read-only" not in repr(trainer)
        source = await trainer.register("m", tensors(1))
        info = await source.publish(1)
        assert await dashboard.wait_for("m", at_least=1) == info == dashboard.newest("m")
        async for seen in dashboard.watch("m"):
            assert seen == info
            break
        fetched = await dashboard.fetch("m")
        assert all(
            np.array_equal(fetched[name].numpy(), tensor) for name, tensor in tensors(1).items()
        )
        assert (await dashboard.plan("m")).version == info
        model = await dashboard.describe("m")
        assert [shard.worker for replica in model.replicas for shard in replica.shards] == [
            "trainer"
        ]
        counts = (await dashboard.describe("m", limit=0)).summary
        assert counts is not None
        assert counts.shards == 1
        for call, named in (
            (dashboard.register("m", tensors()), "register"),
            (dashboard.retain("m", latest=3), "retain"),
            (dashboard.rollback("m", to=0), "rollback"),
            (dashboard.pin("m", 1).__aenter__(), "pin"),
            (seed_shard(dashboard, info, 0), "seed"),
        ):
            with pytest.raises(
                AuthenticationFailed,
                match=f"this token is read-only: {named} needs the cluster's full",
            ):
                await call
        await source.unpublish()
        assert (await trainer.describe("m")).leases == ()


async def test_who_is_left_with_a_read_only_token_keeps_its_memory_and_hears_why(
    tmp_path: Path,
) -> None:
    """Its registration is refused from then on; what it held is its own, and nobody waits for
    it.
    """
    file = token_file(tmp_path / "token", "old")
    async with nothing_left(), tensorhub.serve(token=SECRET, options=OPTIONS) as coordinator:
        token_file(file, SECRET)
        async with tensorhub.connect(coordinator.address, token=file, options=OPTIONS) as hub:
            source = await hub.register("m", tensors(1))
            await source.publish(1)
            token_file(file, READ_ONLY)
            thread_of(hub).post(lambda: worker_of(hub).link._outbox.close())  # type: ignore[union-attr]
            await until(lambda: "read-only" in repr(hub))
            await source.unpublish()
            with pytest.raises(AuthenticationFailed, match="this token is read-only: register"):
                await source.publish(2)
            assert source.state == "empty"
