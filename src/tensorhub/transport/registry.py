"""Which transports there are, in order of preference.

Each name has one factory. The transport that the factory makes has both sides: it reads
(`Transport.open`) and is read (`Transport.serve`). `transport.built_in` lists the built-in ones.
Third parties add theirs through the entry-point group `tensorhub.transports` (name -> factory),
which is looked up when a name is first needed.

Responsible for names and order. Not responsible for which transport a given pair of workers can
use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tensorhub.errors import TransportUnavailable
from tensorhub.protocol.certificates import Certificates
from tensorhub.transport.base import Transport
from tensorhub.types import Incarnation, Options

ENTRY_POINT_GROUP = "tensorhub.transports"


@dataclass(frozen=True, slots=True)
class Local:
    """What a transport knows of the worker that it works for."""

    incarnation: Incarnation
    # live: the first one is presented at each connection; b"" is open access
    secrets: Sequence[bytes]
    options: Options
    is_named: bool = False  # the user has asked for this transport by its name
    # by transport: outlives an incarnation; closed with the worker
    kept: dict[str, Any] = field(default_factory=dict)
    certificates: Certificates | None = None  # None: no TLS on the network

    @property
    def secret(self) -> bytes:
        """What to present now."""
        return self.secrets[0]


class MeantTransportUnavailable(TransportUnavailable):
    """A user has configured this transport without naming it in `transports=`, so its absence
    deserves a warning.
    """


# raises TransportUnavailable, saying what is missing
TransportFactory = Callable[[Local], Transport]


class Registry:
    """Names of transports, each with its factory. The built-in ones are in order of preference."""

    def __init__(
        self, built_in: Mapping[str, TransportFactory], only_by_name: Collection[str] = ()
    ) -> None:
        """`only_by_name`: these are made only if they are wanted."""
        self.built_in = built_in
        self._only_by_name = only_by_name

    def names(self) -> tuple[str, ...]:
        """Every name that can be asked for, built-in ones first, best first."""
        return (*self.built_in, *sorted(_entry_points().keys() - self.built_in.keys()))

    def make(
        self,
        local: Local,
        wanted: Sequence[str] | None = None,
        missing: Callable[[str, TransportUnavailable], object] = lambda name, reason: None,
    ) -> tuple[Transport, ...]:
        """The `wanted` transports, in that order. None: all built-in ones that work here, best
        first, but for those that are `only_by_name`. `missing` is told of each that does not work,
        with the reason.

        Raises TransportUnavailable if a wanted one is unknown or does not work here, or if none
        works.
        """
        if wanted is not None:
            if not wanted:
                raise TransportUnavailable(
                    f"no transport is allowed; there are {', '.join(self.names())}"
                )
            named = replace(local, is_named=True)
            return tuple(self._make_one(name, named) for name in dict.fromkeys(wanted))
        made: list[Transport] = []
        reasons: list[str] = []
        for name, factory in self.built_in.items():
            if name in self._only_by_name:
                continue
            try:
                made.append(factory(local))
            except TransportUnavailable as reason:
                reasons.append(f"{name}: {reason}")
                missing(name, reason)
        if not made:
            raise TransportUnavailable(
                f"no transport works here ({'; '.join(reasons) or 'none is known'})"
            )
        return tuple(made)

    def probe(self, local: Local) -> dict[str, str | None]:
        """Every transport by name: why it does not work here, None if it does."""
        found: dict[str, str | None] = {}
        for name in self.names():
            try:
                self._make_one(name, local)
            except TransportUnavailable as reason:
                found[name] = str(reason)
            else:
                found[name] = None
        return found

    def _make_one(self, name: str, local: Local) -> Transport:
        if name in self.built_in:
            return self.built_in[name](local)
        point = _entry_points().get(name)
        if point is None:
            raise TransportUnavailable(
                f"there is no transport {name!r}; there are {', '.join(self.names())}"
            )
        try:
            factory: TransportFactory = point.load()
        except Exception as error:
            raise TransportUnavailable(
                f"transport {point.name!r} ({point.value}) cannot be loaded: {error}"
            ) from error
        return factory(local)


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
