"""`check_stamp`: whether a stamp's content was published, by a cluster or an archive.

Responsible for arguments, and for what an archive says. The coordinator's answer is
`coordinator.views`'.
"""

from __future__ import annotations

from functools import partial

from anyio import to_thread

from tensorhub.api.archiving import Archive
from tensorhub.api.hub import Hub
from tensorhub.errors import IntegrityError, InvalidType, VersionUnavailable, shown
from tensorhub.model.stamps import Stamp
from tensorhub.types import Options, VersionInfo, as_timeout_s

READS: int = 3  # of an archive, each with its share of the time: the list, a manifest, an index


async def check_stamp(
    stamp: Stamp, where: Hub | Archive | str, timeout: float | None = None
) -> VersionInfo:
    """The version that a stamp names, if its content was published as that version.

    `where`: a hub, whose coordinator is asked (the read-only token is enough); or an archive: what
    `archive` returns, or its URL. The root is compared where the stamp has one and the digests of
    the version are known. A coordinator remembers the last 4,096 versions that no worker holds any
    more, without their digests, until it restarts; an archive knows what it keeps.

    Raises VersionUnavailable (the version was never published there, is forgotten, or was rolled
    back), IntegrityError (it is another content), OperationTimeout, CoordinatorUnavailable,
    ArchiveUnavailable, StateError (the extra `archive` is not installed), InvalidType and
    InvalidValue (an argument).
    """
    if isinstance(where, Hub):
        check_is_stamp(stamp)
        timeout_s = where._worker.timeout_s(timeout)
        return await where._thread.call(where._worker.coordinator.check_stamp, stamp, timeout_s)
    return await to_thread.run_sync(partial(check_archived, stamp, where, timeout))


def check_is_stamp(stamp: object) -> None:
    if not isinstance(stamp, Stamp):
        raise InvalidType(f"stamp={shown(stamp)}: give a Stamp; Stamp.parse makes one of its text")


def check_archived(stamp: Stamp, where: Archive | str, timeout: float | None) -> VersionInfo:
    """What the archive says: see `check_stamp`. Blocks for `timeout` seconds at most."""
    from tensorhub.archives.catalogue import Key, VersionCatalogue
    from tensorhub.archives.store import Store
    from tensorhub.model.digests import root_of

    check_is_stamp(stamp)
    url: object = where._url if isinstance(where, Archive) else where
    if not isinstance(url, str):
        raise InvalidType(f"where={shown(url)}: give a hub, or an archive or its URL")
    timeout_s = as_timeout_s(timeout, Options().op_timeout_s)
    catalogue = VersionCatalogue(Store(url, timeout_s=timeout_s / READS), stamp.model)
    key = Key(stamp.lineage, stamp.version)
    catalogue.find(key, alone=True)
    version, name = catalogue.versions.get(key), f"version {key} of {stamp.model!r}"
    if version is None:
        text = f"{url} has no {name}: it was not archived, or was removed"
        raise VersionUnavailable(text, retryable=False)
    if version.content_id != stamp.content_id:
        raise IntegrityError(
            f"{name} in {url} is another content than the stamp's, which is another cluster's, or "
            f"was changed"
        )
    if stamp.root and version.digest != "none":
        roots = [root_of(digests) for digests, _ in catalogue.tables(version)]
        if stamp.root not in roots:
            raise IntegrityError(
                f"no shard of {name} in {url} has digests of the stamp's root: the stamp was "
                f"changed"
            )
    return version.info
