"""Which versions go, which are stored anew first, and in which order objects are deleted. PURE.

A delta is of no use without its base, so a version that is not wanted any more stays while a wanted
one is based on it. Where this would keep more bytes than an anchor has, a wanted version becomes an
anchor itself, which frees what it was based on.

Deletion goes from the newest to the oldest, manifests before all other objects: so whatever is left
after a crash, no visible version lacks an object. `catalogue.leftovers` finds the rest.

Responsible for deciding. Not responsible for doing it (`writing`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tensorhub.archives.catalogue import Key
from tensorhub.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class Keep:
    """Which versions are wanted: the newest so many, those with numbers that `every` divides (0:
    none because of that), and the pinned ones; `without`: but not these.
    """

    latest: int = 1
    every: int = 0
    pinned: frozenset[Key] = frozenset()
    without: frozenset[Key] = frozenset()

    def __post_init__(self) -> None:
        if self.latest < 1 or self.every < 0:
            raise InvalidValue(
                f"keep the newest 1 or more, and every k-th with k 0 or more; not {self.latest} "
                f"and {self.every}"
            )

    def chosen(self, keys: Iterable[Key]) -> set[Key]:
        """Those of these versions that are wanted."""
        newest = sorted({*keys} - self.without)
        multiples = [key for key in newest if self.every and key.number % self.every == 0]
        return {*newest[-self.latest :], *multiples, *self.pinned.intersection(newest)}


@dataclass(frozen=True, slots=True)
class Entry:
    """One manifest, and what it names. `objects`: of this version alone, with their bytes.
    `parts`: objects that several versions may share. `anchor_bytes`: the size of an anchor of it.
    """

    path: str
    key: Key
    turn: int
    base: Key | None
    objects: Mapping[str, int]
    parts: frozenset[str]
    anchor_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(self.objects.values())


@dataclass(frozen=True, slots=True)
class Decision:
    """`anchor_first`: versions that are to be stored anew; then comes a new decision. `manifests`:
    deleted one by one in this order. `objects`: deleted after them, in any order. `held`: versions
    that are not wanted, and stay because wanted ones, or readers, need them.
    """

    anchor_first: tuple[Key, ...]
    manifests: tuple[str, ...]
    objects: tuple[str, ...]
    held: frozenset[Key] = field(default_factory=frozenset)


def decide(entries: Collection[Entry], keep: Keep, in_use: Collection[str] = ()) -> Decision:
    """What to do. `in_use`: paths of manifests that readers are using, each with its whole
    chain.
    """
    newest: dict[Key, Entry] = {}
    for entry in sorted(entries, key=lambda each: each.turn):
        newest[entry.key] = entry
    wanted = keep.chosen(newest)
    staying, anchor_first = {each.path for each in entries if each.path in in_use}, list[Key]()
    for key in sorted(wanted):
        chain = _chain(key, newest)
        spare = [each for each in chain if each.key not in wanted and each.path not in staying]
        # more than twice an anchor, because one of the spare ones is an anchor
        if sum(each.nbytes for each in spare) > 2 * newest[key].anchor_bytes:
            anchor_first.append(key)
        staying.update(each.path for each in chain)
    stays = [each for each in entries if each.path in staying]
    going = [each for each in entries if each.path not in staying]
    needed = {path for each in stays for path in (*each.objects, *each.parts)}
    manifests = sorted(going, key=lambda each: (each.key, -each.turn), reverse=True)
    objects = dict.fromkeys(
        path for each in manifests for path in (*each.objects, *sorted(each.parts))
    )
    return Decision(
        tuple(anchor_first),
        tuple([each.path for each in manifests]),
        tuple([path for path in objects if path not in needed]),
        frozenset([each.key for each in stays if each.key not in wanted]),
    )


def _chain(key: Key, newest: Mapping[Key, Entry]) -> Sequence[Entry]:
    """The version and its bases, up to the first that is not there."""
    found, at = list[Entry](), newest.get(key)
    while at is not None:
        found.append(at)
        at = None if at.base is None else newest.get(at.base)
    return found
