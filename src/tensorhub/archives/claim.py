"""The right to write a model's versions, which one process has at a time.

The numbers in `writers/` only grow, and the highest one holds. Each is one atomic creation, so of
two processes that claim at once one is refused. A process that was replaced finds out at `check`,
before its next manifest or deletion.

Responsible for refusing a second archiver, and the archiver of another cluster. Not responsible for
versions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from secrets import token_hex
from typing import Final

from tensorhub.archives.catalogue import Fields, VersionCatalogue
from tensorhub.errors import IntegrityError, LeaseLost, StateError
from tensorhub.memory.json_pieces import Pieces

WRITER_BYTES_MAX: Final = 2**16
NUMBER_MAX: Final = 10**11  # of writers one after the other
_WRITER: Final = re.compile(r"writers/([0-9]{12})\.json")


@dataclass(frozen=True, slots=True)
class Writer:
    """A process that writes an archive. `owner`: the operator's name of it, such as a host, which
    stays after a restart. `writer`: a name that no other process ever has.
    """

    archive: str
    model: str
    cluster: str
    owner: str
    writer: str
    released: bool = False


class Claim:
    """The right to write the versions of one model. An archiver of the same owner gets it at once:
    it is the same archiver, started again.
    """

    def __init__(
        self,
        catalogue: VersionCatalogue,
        cluster: str,
        owner: str,
        *,
        take_over: bool = False,
        former: str = "",
    ) -> None:
        """`take_over`: also from another archiver of this cluster. `former`: the cluster whose
        versions are this one's from now on. StateError: another archiver holds it, or the archive
        is another cluster's.
        """
        self._catalogue = catalogue
        number, held = newest_writer(catalogue)
        if held is not None and held.cluster not in (cluster, former):
            raise StateError(
                f"{self._where} is of another cluster ({held.cluster}; this one is {cluster}): "
                f"archive to another URL; or, if that cluster is gone, or began anew as this one "
                f"on an older copy of its state, make its versions this one's (serve=True, --serve)"
            )
        if held is not None and held.cluster == cluster and not take_over:
            self._refuse(held, owner)
        archive = token_hex(16) if held is None else held.archive
        self._mine = Writer(archive, catalogue.model, cluster, owner, token_hex(16))
        self._number = number + 1
        if self._number >= NUMBER_MAX:
            raise IntegrityError(
                f"{catalogue.name(_path(number))} is no object that TensorHub wrote: delete it"
            )
        if not self._create(self._number, self._mine):
            raise StateError(
                f"another process began to write {self._where} just now: end it, or archive to "
                f"another URL",
                retryable=True,
            )
        if self._create(self._number, replace(self._mine, writer=token_hex(16))):
            raise StateError(
                f"{catalogue.store.url} replaces an object that must be created only once (it "
                f"ignores If-None-Match): archive to a store that knows conditional writes"
            )
        catalogue.store.delete(
            [catalogue.at(path) for path, at in _listed(catalogue) if at < number]
        )

    def __repr__(self) -> str:
        return f"<Claim {self._number} of {self._where} by {self._mine.owner!r}>"

    @property
    def writer(self) -> Writer:
        return self._mine

    def check(self) -> None:
        """LeaseLost: another process has taken over, or this one has left the archive."""
        number, held = newest_writer(self._catalogue)
        if number != self._number or self._mine.released:
            by = f" by {held.owner!r}" if held is not None else ""
            raise LeaseLost(
                f"{self._where} was taken over{by}: this process writes there no more",
                retryable=False,
            )

    def release(self) -> None:
        """Leave the archive to the next writer, which then need not take over."""
        self.check()
        self._number, self._mine = self._number + 1, replace(self._mine, released=True)
        self._create(self._number, self._mine)

    @property
    def _where(self) -> str:
        return f"the archive of {self._catalogue.model!r} at {self._catalogue.store.url}"

    def _create(self, number: int, writer: Writer) -> bool:
        path = self._catalogue.at(_path(number))
        return self._catalogue.store.create(path, json.dumps(asdict(writer)).encode())

    def _refuse(self, held: Writer, owner: str) -> None:
        if held.owner != owner and not held.released:
            raise StateError(
                f"{self._where} is being written by {held.owner!r}: end that archiver, or take "
                f"over from it (take_over=True, --take-over) if it is gone"
            )


def _path(number: int) -> str:
    return f"writers/{number:012d}.json"


def newest_writer(catalogue: VersionCatalogue) -> tuple[int, Writer | None]:
    """The process that writes there now, or wrote there last, and its number; 0 and None: none
    did.
    """
    path, number = max(_listed(catalogue), key=lambda each: each[1], default=("", 0))
    return number, _read(catalogue, path) if path else None


def _listed(catalogue: VersionCatalogue) -> Iterator[tuple[str, int]]:
    at = catalogue.at("")
    for each in catalogue.store.objects(catalogue.at("writers")):
        path = each.path.removeprefix(at)
        if (found := _WRITER.fullmatch(path)) is not None:
            yield path, int(found[1])


def _read(catalogue: VersionCatalogue, path: str) -> Writer:
    text = catalogue.store.read(catalogue.at(path), WRITER_BYTES_MAX)
    try:
        said = Fields(Pieces(text, "it").value(WRITER_BYTES_MAX))
        names = ("archive", "model", "cluster", "owner", "writer")
        archive, model, cluster, owner, writer = (said.text(each, 512) for each in names)
        found = Writer(archive, model, cluster, owner, writer, said.take("released") is True)
        said.end()
    except ValueError as error:
        raise IntegrityError(f"{catalogue.name(path)} names no writer: {error}") from None
    if found.model != catalogue.model:
        raise IntegrityError(f"{catalogue.name(path)} is of model {found.model!r}")
    return found
