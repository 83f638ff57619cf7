"""What the bucket of an archive shows, and what of it may come back.

The judge hears each object that is written and removed, and each entry of the coordinator's store.
It says which versions the bucket shows in effect; the driver demands that these can be fetched
(G5, G7), and that after a cold start the newest of them is `latest`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tensorhub.coordinator import Entry, Publication, Restoration, Rollback
from tensorhub.errors import TensorHubError
from tensorhub.testing.sim.assertion import HOLDING, demand
from tensorhub.testing.sim.judges.call_history import CallHistory
from tensorhub.testing.sim.judges.contents import Contents
from tensorhub.testing.sim.judges.ports import JudgedHandle, JudgedWorld
from tensorhub.types import Purpose, VersionInfo

Key = tuple[int, int]  # a lineage, and a number


class ArchiveJudge:
    """One bucket."""

    def __init__(self, world: JudgedWorld, contents: Contents, history: CallHistory) -> None:
        self._world = world
        self._contents = contents
        self._history = history
        self.shown: dict[Key, str] = {}  # content ids
        self._ended: set[str] = set()  # content ids that a rollback has ended

    @property
    def in_effect(self) -> dict[int, str]:
        """Content ids by number: a number of a later lineage replaces that and all above it."""
        found: dict[int, str] = {}
        for (_, number), content_id in sorted(self.shown.items()):
            found = {each: its for each, its in found.items() if each < number}
            found[number] = content_id
        return found

    def has(self, handle: JudgedHandle, content_id: str) -> bool:
        """Whether that handle stands for this content, which the bucket shows."""
        return handle.shard.purpose is Purpose.ARCHIVE and content_id in self.shown.values()

    def wrote(self, key: Key, content_id: str, shards: Iterable[Sequence[str]]) -> None:
        """G1: the bucket has the publisher's bytes."""
        for shard, cells in enumerate(shards):
            truth = self._contents.truth[content_id][shard]
            demand(
                (*cells,) == truth,
                "content: archived {} is {}, published was {}",
                key,
                cells,
                truth,
            )
        self.shown[key] = content_id

    def removed(self, key: Key, *, unwanted: bool) -> None:
        """Its objects are gone. `unwanted`: by the rules of retention."""
        content_id = self.shown.pop(key)
        ended = unwanted or content_id in self._ended
        demand(ended, "retention: the archive gives up {}, which no rollback has ended", key)
        for handle in self._world.live_handles():
            content, state = handle.member.content, handle.member.state
            is_its = content is not None and content.version.content_id == content_id
            promised = is_its and state in HOLDING and handle.shard.purpose is Purpose.ARCHIVE
            demand(not promised, "retention: {} is removed, and {} promises it", key, handle)

    def not_restored(self, error: TensorHubError, told: object, *, in_vain: bool) -> None:
        """The coordinator refuses what the archive restores; `in_vain`: it is a new cluster that
        has versions of its own. One whose state is an older copy refuses so as to be loud.
        """
        in_vain = in_vain or self._world.was_older
        demand(error.retryable or in_vain, "durable mark: {} is refused: {!r}", told, error)

    def state_lost(self) -> None:
        """The next cluster knows no more than the bucket shows."""
        self._ended.difference_update(self.in_effect.values())

    def stored(self, entry: Entry, before: Iterable[Entry]) -> None:
        """It is durable now."""
        if isinstance(entry, Rollback):
            gone = (each for each in published_in(before) if each.model == entry.model)
            self._ended.update(each.content_id for each in gone if each.number > entry.to)
        elif isinstance(entry, Restoration):
            is_cold = not any(
                isinstance(each, Publication | Restoration | Rollback) and each.model == entry.model
                for each in before
            )
            for each in entry.publications:
                if each.number not in self._contents.numbers.get(each.model, {}):
                    self._comes_back(each, is_cold=is_cold)

    def _comes_back(self, publication: Publication, *, is_cold: bool) -> None:
        number, content_id = publication.number, publication.content_id
        demand(
            content_id not in self._ended,
            "durable mark: {} comes back, and was rolled back",
            publication,
        )
        demand(
            not is_cold or self.in_effect.get(number) == content_id,
            "durable mark: {} comes back, and the bucket shows {}",
            publication,
            self.in_effect,
        )
        self.restore(publication)

    def restore(self, publication: Publication) -> None:
        """It is visible again."""
        number, content_id = publication.number, publication.content_id
        self._contents.restored(publication)
        info = VersionInfo(
            publication.model,
            number,
            content_id,
            publication.nbytes,
            publication.world_size,
            publication.lineage,
        )
        self._history.models[publication.model].restored(info)


def published_in(store: Iterable[Entry]) -> Iterator[Publication]:
    """All publications there, restored ones too."""
    for entry in store:
        if isinstance(entry, Publication):
            yield entry
        elif isinstance(entry, Restoration):
            yield from entry.publications
