"""The auditor of real runs: it takes each order that calls may have had, and finds what cannot
be.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tensorhub
from tensorhub import sync
from tensorhub.api.weights import Weights
from tensorhub.errors import VersionUnavailable
from tensorhub.testing import GuaranteeBroken
from tensorhub.testing.auditor import audit
from tensorhub.testing.history import Entry, read, recording
from tensorhub.types import FetchReport
from tests.rig import OPTIONS, cluster, tensors, write
from tests.testing.bugs import every_bug


class Story:
    """Calls, each at its time."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def add(self, call: str, began: float, ended: float | None, **fields: Any) -> Entry:
        version = fields.get("version")
        if version is not None and call != "prefetch":
            of = {"model": "m", "version": version, "content_id": f"c{version}", "nbytes": 1}
            fields["info"] = of | {"world_size": 1} | fields.pop("of", {})
        who, group = fields.pop("who", "reader"), fields.pop("group", "g")
        entry = Entry(who, call, "m", began, group, ended=ended, **fields)
        self.entries.append(entry)
        return entry

    def publish(
        self, version: int, began: float, ended: float | None = None, **fields: Any
    ) -> None:
        named = {"who": "trainer", "group": "t", "handle": "t", "offered": {"a": f"4:{version}"}}
        told = {} if ended is None else {"version": version}
        arguments = {"version": version}
        self.add("publish", began, ended, arguments=arguments, **(named | told | fields))

    def fetch(self, version: int, began: float, ended: float, **fields: Any) -> None:
        selector = fields.pop("selector", "latest")
        named = {"digests": {"a": f"4:{version}"}, "arguments": {"selector": selector}}
        self.add("fetch", began, ended, version=version, **(named | fields))

    def failed(self, selector: int, began: float, ended: float, text: str) -> None:
        arguments = {"selector": selector}
        error = {"error": "VersionUnavailable", "text": text, "memory": "intact"}
        self.add("fetch", began, ended, arguments=arguments, **error)


@pytest.fixture
def story() -> Story:
    made = Story()
    made.publish(1, 0, 1)
    return made


def broken(story: Story, by: str, *, is_calm: bool = False) -> None:
    with pytest.raises(GuaranteeBroken, match=rf"^{by}: ") as caught:
        audit(story.entries, is_calm=is_calm)
    assert "\nguarantee: " in str(caught.value)


def test_calls_that_overlap_may_take_effect_in_any_order(story: Story) -> None:
    story.publish(2, 2, 8)
    story.fetch(2, 3, 4)
    story.fetch(1, 2.5, 4.5)  # it has asked before another one was told
    story.fetch(2, 5, 6)
    story.publish(3, 9)  # its process died
    story.fetch(3, 10, 11)
    assert audit(story.entries)["fetch: ok"] == 4


def test_what_was_seen_is_never_unseen(story: Story) -> None:
    story.publish(2, 2, 8)
    story.fetch(2, 3, 4)
    story.fetch(1, 5, 6)
    broken(story, "selectors")


def test_a_listener_does_not_go_back(story: Story) -> None:
    story.publish(2, 2, 3)
    story.add("newest", 1.5, 1.6, version=1)
    story.add("newest", 4, 4.1, version=2)
    assert audit(story.entries)
    story.add("newest", 5, 5.1, version=1)
    broken(story, "visibility")


def test_a_listener_may_hear_late(story: Story) -> None:
    story.add("newest", 0.5, 0.6)
    story.publish(2, 2, 3)
    story.add("newest", 4, 4.1, version=1)
    story.add("newest", 5, 5.1, version=2)
    assert audit(story.entries)


def test_bytes_are_those_that_were_published(story: Story) -> None:
    story.publish(2, 2, 3)
    story.fetch(2, 4, 5, digests={"a": "4:1"})
    with pytest.raises(GuaranteeBroken, match=r"^content: .* a is version 1's"):
        audit(story.entries)
    story.entries[-1] = replace(story.entries[-1], digests={"a": "4:other"})
    with pytest.raises(GuaranteeBroken, match=r"^content: .* a is nobody's"):
        audit(story.entries)
    story.entries[-1] = replace(story.entries[-1], rank=1)  # of another shard nothing is known
    assert audit(story.entries)


def test_what_was_never_published_is_not_seen(story: Story) -> None:
    story.fetch(7, 2, 3)
    broken(story, "publication numbers")


def test_one_number_has_one_content(story: Story) -> None:
    story.fetch(1, 2, 3)
    story.publish(1, 4, 5, of={"content_id": "other"})
    broken(story, "publication numbers")


def test_what_was_rolled_back_is_gone(story: Story) -> None:
    story.publish(2, 2, 3)
    story.add("rollback", 4, 5, arguments={"to": 1}, error="OperationTimeout")
    story.fetch(2, 5.5, 6)  # nothing is known of it
    story.add("rollback", 6, 7, arguments={"to": 1})
    story.fetch(1, 8, 9)
    assert audit(story.entries)
    story.fetch(2, 10, 11)
    broken(story, "selectors")


def test_what_is_retained_is_neither_forgotten_nor_lost(story: Story) -> None:
    story.add("retain", 2, 3, arguments={"latest": 5})
    for version in (2, 3, 4):
        story.publish(
            version, 2 * version, 2 * version + 1, handle=f"t{version}", group=f"{version}"
        )
    story.failed(1, 20, 21, "no holder")  # after a fault
    assert audit(story.entries)
    broken(story, "retention", is_calm=True)
    story.add("unpublish", 10, 11, who="trainer", group="t", handle="t")
    assert audit(story.entries, is_calm=True)  # nobody holds it
    story.failed(1, 22, 23, "there is no version 1: it does not exist")
    broken(story, "selectors")


# -- real ones


@pytest.mark.anyio
async def test_a_real_run_is_recorded_and_sound(tmp_path: Path) -> None:
    with recording(tmp_path):
        await _work()
    found = audit(read(tmp_path), is_calm=True)
    assert found["publish: ok"] == 3
    assert found["update: ok"] == found["fetch: ok"] == 3
    assert found["replicate: VersionUnavailable"] == 1
    assert found["tensors compared"] == 18
    assert found["pin: ok"] == found["unpin: ok"] == found["retain: ok"] == 1
    assert found["newest: ok"]


async def _work() -> None:
    source, memory = tensors(1), tensors()
    async with cluster("trainer", "reader") as its:
        trainer, reader = its.hubs
        await trainer.retain("m", latest=1)
        weights = await trainer.register("m", source)
        await weights.publish(1)
        mine = await reader.register("m", memory)
        with pytest.raises(VersionUnavailable):
            await mine.replicate(9, timeout=1)
        for version in (1, 2, 3):
            if version > 1:
                async with weights.mutate(version):
                    write(source, version)
            await reader.wait_for("m", at_least=version)
            await mine.update("latest")
            await reader.fetch("m", version)
            reader.newest("m")
        async with reader.pin("m", 3):
            pass


def test_blocking_callers_are_recorded_too(tmp_path: Path) -> None:
    with (
        recording(tmp_path),
        sync.serve(token="", options=OPTIONS) as coordinator,
        sync.connect(coordinator.address, name="one", token="", options=OPTIONS) as hub,
    ):
        weights = hub.register("m", tensors(1))
        weights.publish(1)
        hub.retain("m", latest=0)
        other = hub.register("m", tensors())
        other.replicate()
        other.unpublish()
        with weights.mutate(2):
            write(tensors(), 2)
        other.update()
    found = audit(read(tmp_path), is_calm=True)
    calls = ("publish", "retain", "replicate", "unpublish", "mutate", "update", "leave")
    assert all(found[f"{call}: ok"] for call in calls)
    assert found["tensors compared"] == 6


@pytest.mark.anyio
async def test_wrong_bytes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Weights.update

    @functools.wraps(update)
    async def spoilt(weights: Weights, *given: Any, **named: Any) -> FetchReport:
        report = await update(weights, *given, **named)
        if report.version == 3:
            memory: Any = weights._memory
            next(iter(memory._tensors.values()))[0] ^= 1
        return report

    monkeypatch.setattr(Weights, "update", spoilt)
    with recording(tmp_path):
        await _work()
    with pytest.raises(GuaranteeBroken, match=r"^content: .* is nobody's"):
        audit(read(tmp_path))


@pytest.mark.anyio
async def test_a_stale_version_is_found(tmp_path: Path) -> None:
    with recording(tmp_path), every_bug()["latest_one_behind"].enter():
        async with cluster("first", "second") as its:
            first, second = its.hubs
            await (await first.register("m", tensors(1))).publish(1)
            await (await first.register("m", tensors(2))).publish(2)
            await second.fetch("m")
    with pytest.raises(GuaranteeBroken, match=r"^selectors: .* asked for latest, and got 1"):
        audit(read(tmp_path))


@pytest.mark.anyio
@pytest.mark.parametrize("names", [("retained_is_forgotten",), ()])
async def test_a_retained_version_that_is_forgotten_is_found(
    tmp_path: Path, names: Sequence[str]
) -> None:
    with recording(tmp_path):
        if names:
            with every_bug()[names[0]].enter():
                await _lose_a_retained_version()
        else:
            await _lose_a_retained_version()
    entries = read(tmp_path)
    if not names:
        assert audit(entries)
        return
    with pytest.raises(GuaranteeBroken, match=r"^selectors: .* there is no 1, which there is"):
        audit(entries)


async def _lose_a_retained_version() -> None:
    async with cluster("first", "second") as its:
        first, second = its.hubs
        await first.retain("m", latest=3)
        weights = await first.register("m", tensors(1))
        await weights.publish(1)
        await (await second.register("m", tensors(2))).publish(2)
        await (await second.register("m", tensors(3))).publish(3)
        await weights.close(abandon=True)
        with pytest.raises((VersionUnavailable, tensorhub.OperationTimeout)):
            await second.fetch("m", 1, timeout=0.5)


def test_a_process_that_was_killed_leaves_what_it_has_begun(tmp_path: Path) -> None:
    begun = {"number": 0, "who": "w", "call": "publish", "model": "m", "began": 1.0}
    lines = [json.dumps(begun | {"arguments": {"version": 1}}), '{"number": 0, "ended": 2.']
    (tmp_path / "1.jsonl").write_text("\n".join(lines))
    [entry] = read(tmp_path)
    assert entry.ended is None
    assert audit([entry]) == {}
