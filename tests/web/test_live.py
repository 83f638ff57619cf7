"""The dashboard and the saved page of a real cluster: what both show is what the library says."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
import pytest

import tensorhub
from tensorhub.api.hub import Hub
from tensorhub.observed import Explanation
from tests.cli import processes
from tests.rig import WAIT_S, connect, gated, published, tensors, until
from tests.web.browser import Browser
from tests.web.rig import TOKEN, coordinator

T = TypeVar("T")
READ_ONLY = tensorhub.read_only_token(TOKEN)


@contextlib.asynccontextmanager
async def opened(what: contextlib.AbstractContextManager[T]) -> AsyncIterator[T]:
    with what as made:
        yield made


async def aside(function: Callable[..., T], *arguments: object) -> T:
    """A blocking call, while the cluster of this test goes on."""
    return await anyio.to_thread.run_sync(functools.partial(function, *arguments))


async def divided(hub: Hub) -> Explanation:
    """Of the reader's update, once it has told what took how long."""
    with anyio.fail_after(WAIT_S):
        while not (found := await hub.explain("m", 1, group="rollout")).links:  # noqa: ASYNC110 - the reader tells it
            await anyio.sleep(0.01)
    return found


async def test_a_read_is_watched_while_it_runs_and_explained_afterwards(tab: Browser) -> None:
    async with (
        coordinator(TOKEN) as serving,
        opened(gated(3)) as gate,
        connect(serving.address, "trainer", token=TOKEN) as trainer,
        connect(serving.address, "reader", token=TOKEN, transports=["tcp"]) as reader,
        anyio.create_task_group() as tasks,
    ):
        await published(trainer)
        weights = await reader.register("m", tensors(), group="rollout")
        await aside(tab.open, f"{serving.http_url}#/model/m")
        await aside(tab.see, "asks for a token")
        await aside(tab.type_into, "input", f"{READ_ONLY}\ue007")
        await aside(tab.see, "Who reads from whom", "trainer", "no read is running")
        tasks.start_soon(weights.update)
        await until(lambda: gate.holds)
        await aside(tab.see, "being read", "1 update", "chunks")
        title = "document.querySelector(\".node[title^='reader:']\")?.title ?? ''"
        shown = lambda: "reads from trainer" in tab.run(f"return {title}")  # noqa: E731
        await aside(tab.until, shown, "who reads from whom")
        assert await aside(tab.run, "return document.querySelectorAll('.edge.live').length") == 1
        await aside(tab.run, "location.hash = '#/model/m/worker/reader'")
        await aside(tab.see, "Its update of version 1 has run for")
        await aside(tab.see, "It reads version 1 from trainer.")
        gate.open()
        await until(lambda: weights.version is not None)
        await aside(tab.see, "No call of it is under way", "committed")
        await aside(tab.run, "document.querySelector('td a[href*=update]').click()")
        found = await divided(trainer)
        with anyio.fail_after(WAIT_S):
            while found.sentence not in await aside(tab.text):  # the source tells last
                found = await divided(trainer)
        large = [part.name for part in found.parts if part.seconds > 0.01 * found.seconds]
        await aside(tab.see, *large)
        await aside(tab.run, "location.hash = '#/'")
        await aside(tab.see, "published", "updated", "version 1", "all heard")
    await aside(tab.see, "The coordinator has not been heard for")
    await aside(tab.open, "about:blank")
    expected = ("401", "ERR_CONNECTION", "ERR_INCOMPLETE", "ERR_EMPTY", "ERR_SOCKET")
    complaints = await aside(tab.complaints)
    assert [each for each in complaints if not any(one in each for one in expected)] == []


@pytest.mark.parametrize(
    "anyio_backend", ["asyncio", pytest.param("trio", marks=pytest.mark.heavy)]
)
async def test_a_run_is_saved_and_opens_without_its_cluster(tab: Browser, tmp_path: Path) -> None:
    token, out = tmp_path / "token", tmp_path / "run.html"
    token.write_text(READ_ONLY)
    token.chmod(0o600)
    async with (
        coordinator(TOKEN) as serving,
        connect(serving.address, "trainer", token=TOKEN) as trainer,
        connect(serving.address, "reader", token=TOKEN) as reader,
    ):
        await published(trainer)
        weights = await reader.register("m", tensors(), group="rollout")
        await weights.update()
        await divided(trainer)
        command = ("report", "--address", serving.address, "--token-file", str(token))
        done = await aside(processes.run, *command, "--out", str(out))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("saved 1 model, ")
        again = await aside(processes.run, *command, "--out", str(out))
        assert again.returncode == 2
        assert "--force" in again.stderr
        size = out.stat().st_size
        forced = await aside(processes.run, *command, "--out", str(out), "--force", "--model", "m")
        assert forced.returncode == 0
        lost = await aside(processes.run, *command, "--out", str(tmp_path / "none" / "run.html"))
        assert lost.returncode == 2
    assert 50_000 < size < 400_000
    assert os.listdir(tmp_path) in (["run.html", "token"], ["token", "run.html"])
    assert READ_ONLY not in await aside(out.read_text)
    await aside(tab.open, out.as_uri())
    await aside(tab.see, "saved", "version 1", "published", "updated")
    await aside(tab.run, "location.hash = '#/model/m/update/1/rollout'")
    await aside(tab.see, "of version 1, rollout", "The parts add up to")
    await aside(tab.run, "location.hash = '#/model/m'")
    await aside(tab.see, "Who reads from whom", "reader", "was read from")
    edges = "return document.querySelectorAll('.edge.past').length"
    await aside(tab.until, lambda: tab.run(edges) == 1, "the reader's source is known")
