"""`archive`: a model's versions kept in object storage, and served from there.

Responsible for arguments and results. `runtime.worker.archiver` does the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorhub.api.opening import Opening, Unpicklable
from tensorhub.api.tools import check_full
from tensorhub.errors import InvalidType, shown
from tensorhub.runtime.ending import CLOSE_S
from tensorhub.runtime.loop_thread import CallerMode
from tensorhub.types import as_integer, as_timeout_s, check_flag, check_name, check_version, invalid

if TYPE_CHECKING:
    from tensorhub.api.hub import Hub
    from tensorhub.runtime.worker.ports import CallersArchiver


@dataclass(frozen=True, slots=True)
class ArchivedVersion:
    """One version in an archive. `base`: the number of the version that it is a difference to;
    None: it is an anchor, a whole checkpoint. `nbytes`: of all of its tensors; `stored_bytes`: of
    its own objects.
    """

    version: int
    base: int | None
    nbytes: int
    stored_bytes: int


def archive(
    hub: Hub,
    model: str,
    url: str,
    *,
    every: int = 1,
    keep: int | None = None,
    keep_every: int = 0,
    serve: bool = False,
    take_over: bool = False,
) -> Opening[Archive]:
    """Keep versions of a model in object storage, and serve all that are there, until the block
    ends: `async with tensorhub.archive(hub, "actor", "s3://bucket/run-7"): ...`

    To the cluster each archived version has a reliable holder. It can be fetched when no other
    worker holds it, and a read goes on from the archive when its last other source dies.

    `url`: "s3://bucket/prefix", "gs://...", "az://..." or "file:///directory". Credentials come
    from the environment (docs/archive.md). `every`: versions with numbers that it divides are
    archived. `keep`: the newest so many stay, with those that `keep_every` divides, and those that
    the cluster retains or pins; None: all stay. `serve`: the versions that the archive has of
    another cluster become this one's, with their lineage, if nothing was published here under this
    name yet: so a cluster starts again from the bucket. `take_over`: write there although another
    archiver does.

    The hub needs `Options.host_memory_bytes` for two versions. A version that is unpublished
    before it was read is not archived: `hub.retain` gives it time. A bucket that cannot be reached
    any more is asked again, as long as it takes; `Archive.wait_for` raises what has ended an
    archive.

    Raises ArchiveUnavailable, StateError (another archiver is connected, another cluster's
    archive, the extra `archive` is not installed), VersionConflict (another version has a number
    of the archive's), IntegrityError, AuthenticationFailed (a read-only token).
    """
    from tensorhub.archives.retention import Keep
    from tensorhub.runtime.worker.ports import ArchiveSettings

    check_full(hub._worker, "archive")
    check_name("model", model)
    if not isinstance(url, str):
        raise InvalidType(f"url={shown(url)}: give a URL, as 's3://bucket/prefix'")
    counts = {"every": (every, 1), "keep_every": (keep_every, 0)}
    if keep is not None:
        counts["keep"] = (keep, 1)
    for name, (value, least) in counts.items():
        if (as_integer(value) or 0) < least or as_integer(value) is None:
            raise invalid(value, int, f"{name}={shown(value)}: give a whole number from {least}")
    check_flag("serve", serve)
    check_flag("take_over", take_over)
    kept = None if keep is None else Keep(int(keep), int(keep_every))
    settings = ArchiveSettings(model, url, int(every), kept, serve, take_over)

    async def begin(mode: CallerMode) -> Archive:
        archiver = await hub._thread.call(hub._worker.archive, settings, undo=_end)
        return Archive(archiver, hub, url)

    return Opening(begin, "archive")


def show_archiving(archive: Archive, tell: Callable[[int, int, int], None]) -> None:
    """Have `tell(version, bytes done, bytes in all)` called as a version is written, by the thread
    that writes; internal, and may change.
    """
    archive._archiver.on_writing = tell


def _end(archiver: CallersArchiver) -> None:
    archiver.end()


class Archive(Unpicklable):
    """An archive of a model that is written and served. Made by `archive`."""

    def __init__(self, archiver: CallersArchiver, hub: Hub, url: str) -> None:
        self._archiver, self._hub, self._url = archiver, hub, url

    def __repr__(self) -> str:
        return f"<Archive of {self._archiver!r}>"

    async def __aenter__(self) -> Archive:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def versions(self) -> tuple[ArchivedVersion, ...]:
        """What is archived, ascending by number."""
        return tuple(
            [
                ArchivedVersion(
                    each.key.number,
                    None if each.base is None else each.base.number,
                    each.nbytes,
                    sum(each.own_objects.values()),
                )
                for each in self._archiver.versions
            ]
        )

    async def wait_for(self, *, at_least: int, timeout: float | None = None) -> ArchivedVersion:
        """The newest archived version, once its number is `at_least`.

        OperationTimeout; raises what has ended the archive: LeaseLost (another archiver has taken
        over, the coordinator has lost its state), StateError (too little host memory, closed),
        IntegrityError.
        """
        timeout_s = as_timeout_s(timeout, self._hub._worker.options.op_timeout_s)
        least = check_version(at_least)
        await self._hub._thread.call(self._archiver.wait_for, least, timeout_s)
        return self.versions[-1]

    async def close(self) -> None:
        """End it. A version that is being written is given up. What is archived stays in the
        bucket, and is served no more. Raises what has ended the archive before.
        """
        await self._hub._thread.call(self._archiver.close, CLOSE_S)
