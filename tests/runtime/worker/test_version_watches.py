"""Names of models that come and go: neither a worker nor its coordinator keeps those that nobody
uses any more.
"""

from __future__ import annotations

from math import inf

import anyio
import pytest

from tensorhub.errors import LeaseLost, OperationTimeout
from tensorhub.messages import Announce, FromWorker, Unwatch, Watch
from tensorhub.runtime.worker import version_watches as news_module
from tensorhub.runtime.worker.version_watches import VersionWatches
from tensorhub.types import VersionInfo
from tests.rig import WAIT_S, cluster, tensors, until

KEPT = 4


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(news_module, "IDLE_NAMES_MAX", KEPT)


class MessageSink:
    """What is said."""

    online = True
    fault = None

    def __init__(self) -> None:
        self.said: list[FromWorker] = []

    def say(self, message: FromWorker) -> None:
        self.said.append(message)


def version(model: str) -> VersionInfo:
    return VersionInfo(model, 1, f"{model}-content", 4, 1)


def test_the_names_asked_for_first_are_left_first() -> None:
    line = MessageSink()
    news = VersionWatches(line)
    for number in range(KEPT + 2):
        news.watch(f"m{number}")
    assert line.said[-3:] == [Unwatch("m0"), Watch(f"m{KEPT + 1}"), Unwatch("m1")]
    assert [news.watches(f"m{number}") for number in range(KEPT + 2)] == [False, False] + [
        True
    ] * KEPT
    news.announced(Announce("m0", version("m0")))  # said before the coordinator heard
    assert not news.watches("m0")
    news.watch("m0")
    news.announced(Announce("m0", version("m0")))
    assert news.newest("m0") == version("m0")


def test_a_name_with_a_listener_or_a_version_is_watched_on() -> None:
    line, heard = MessageSink(), list[VersionInfo | None]()
    news = VersionWatches(line)
    news.listen("heard", heard.append)
    news.watch("published")
    news.announced(Announce("published", version("published")))
    for number in range(3 * KEPT):
        news.watch(f"m{number}")
    assert news.watches("heard")
    assert news.newest("published") == version("published")
    news.unlisten("heard", heard.append)
    for number in range(3 * KEPT, 4 * KEPT):
        news.watch(f"m{number}")
    assert not news.watches("heard")
    assert not news._listeners


async def test_the_coordinator_forgets_them_too() -> None:
    async with cluster("curious", "trainer") as c:
        hub, trainer = c.hubs
        weights = await trainer.register("actor", tensors())
        await weights.publish(1)
        await hub.wait_for("actor", at_least=1)
        for number in range(20):
            hub.newest(f"m{number}")
            hub.watch(f"watched{number}")
        server = c.coordinator._candidate.server
        assert server is not None
        watched = server._core.cluster.watchers
        await until(lambda: set(watched) == {"actor", "m18", "watched18", "m19", "watched19"})
        newest = hub.newest("actor")
        assert newest is not None
        assert newest.version == 1
        assert hub.newest("m0") is None  # begins to watch it again
        await until(lambda: "m0" in watched)


async def test_who_waits_in_vain_is_not_told_that_nothing_was_ever_published() -> None:
    """After a rollback to a version that no worker holds there is no newest one either."""
    news = VersionWatches(MessageSink())
    with pytest.raises(OperationTimeout, match="or no worker holds what a rollback has made"):
        await news.wait_for("m", 0, 0)


async def test_a_call_that_waits_without_a_deadline_is_told_when_the_state_is_lost() -> None:
    news, told = VersionWatches(MessageSink()), list[str]()

    async def wait() -> None:
        with pytest.raises(LeaseLost, match="without its state") as caught:
            await news.wait_for("m", 8, inf)
        told.append(str(caught.value))

    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await until(lambda: news.listeners("m") > 0)
            news.announced(Announce("m", version("m")))
            news.state_lost([])
    assert len(told) == 1


def test_where_the_newest_goes_back_without_a_rollback_each_asker_is_told_once() -> None:
    """As a read-only worker hears of an older copy of the state: no coordinator begins anew for it."""
    news, heard, lost = VersionWatches(MessageSink()), list[VersionInfo | None](), list[LeaseLost]()
    news.listen("m", heard.append, lost.append)
    news.announced(Announce("m", version("m"), 1))
    news.announced(Announce("m", version("m"), 2))
    news.report_loss("m")
    assert not lost
    news.announced(Announce("m", version("m"), 1))
    assert len(lost) == 1
    with pytest.raises(LeaseLost, match="on an older copy of its state"):
        news.report_loss("m")
    news.report_loss("m")
    assert news.newest("m") == version("m")
