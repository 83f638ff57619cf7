"""The simulator's auditor for real runs: it judges a history of what callers saw (`history`).

Theory of operation. The reference model of the simulator takes begins and ends in the order of
their times, and judges each return by what may have been visible between its call's begin and its
end. Overlapping calls may take effect in any order. Beside it, the bytes that a caller was given
are compared with those that were published under that content.

Judged are G1 (content), G3 (visibility), R1 (numbers), R2 (rollbacks), R12 (selectors), that
nothing retained is forgotten, and, in a run without faults (`is_calm`), that what is retained and
held can be had (G5). Not judged: tensors of another layout, and calls of processes that did not
record.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import inf
from typing import Any

from tensorhub.testing.history import Digests, Entry
from tensorhub.testing.sim.assertion import GuaranteeBroken
from tensorhub.testing.sim.judges.reference_model import (
    Call,
    Pinning,
    Publishing,
    Reading,
    ReferenceModel,
    Retaining,
    RollingBack,
)
from tensorhub.testing.sim.promises import promise_of
from tensorhub.types import VersionInfo

READS = ("replicate", "update", "prefetch", "fetch")
ENDS_HOLDING = ("publish", "mutate", "unpublish", "replicate", "update", "close", "leave")
STORY_LINES = 40
NO_SUCH = ("does not exist", "is not published", "no worker holds it any more")


def audit(entries: Sequence[Entry], *, is_calm: bool = False) -> Counter[str]:
    """Judge that history; returns how often each call was judged. `is_calm`: no fault happened.
    Raises GuaranteeBroken, with the story of the call that cannot be.
    """
    return _Auditor(entries, is_calm=is_calm).run()


def require(holds: bool, what: str, *about: object) -> None:
    """As the simulator's `demand`, of which each has to be met by a search."""
    if not holds:
        raise GuaranteeBroken(what.format(*about))


class _Auditor:
    def __init__(self, entries: Sequence[Entry], *, is_calm: bool) -> None:
        self._entries = entries
        self._is_calm = is_calm
        self._models: defaultdict[str, ReferenceModel] = defaultdict(ReferenceModel)
        self._calls: dict[int, Call] = {}  # by the entry's place
        self._listening: set[tuple[str, str]] = set()
        self._listeners: set[tuple[str, str]] = set()  # that have heard of a version
        self._contents: dict[str, VersionInfo] = {}
        self._published: defaultdict[tuple[str, int, int], list[Digests]] = defaultdict(list)
        self._must_stay: dict[int, frozenset[str]] = {}  # by the place of a read
        self.judged: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        self._collect()
        edges = [(entry.began, 0, place) for place, entry in enumerate(self._entries)]
        edges += [
            (entry.ended, 1, place)
            for place, entry in enumerate(self._entries)
            if entry.ended is not None
        ]
        for _, is_end, place in sorted(edges):
            entry = self._entries[place]
            try:
                if is_end:
                    self._ends(place, entry)
                else:
                    self._begins(place, entry)
            except GuaranteeBroken as broken:
                raise GuaranteeBroken(self._story(broken, entry)) from broken
        return self.judged

    def _collect(self) -> None:
        """What was published, as its publishers have said at any time."""
        for entry in self._entries:
            if entry.call == "publish" and entry.content is not None:
                content = entry.content
                self._contents[content.content_id] = content
                if entry.offered:
                    key = content.content_id, entry.rank, entry.world_size
                    self._published[key].append(entry.offered)

    def _begins(self, place: int, entry: Entry) -> None:
        model, arguments = self._models[entry.model], entry.arguments
        call = Call(entry.who)
        match entry.call:
            case "publish":
                call = Publishing(entry.group, arguments["version"])
                call.left = entry.ended is None
            case name if name in READS:
                holds = arguments.get("holds")
                call = Reading(
                    f"{entry.who} {entry.group}".strip(),
                    arguments.get("selector", "latest"),
                    arguments.get("at_least"),
                    VersionInfo(**holds) if holds is not None else None,
                )
            case "rollback":
                call = RollingBack(entry.who, arguments["to"])
            case "retain":
                call = Retaining(entry.who, arguments["latest"])
            case "pin":
                call = Pinning(entry.who, arguments["version"])
            case "unpin":
                self._unpin(model, entry)
                return
            case "newest" | "wait_for":
                if (entry.who, entry.model) not in self._listening:  # what it hears may be as old
                    self._listening.add((entry.who, entry.model))
                    model.listens(entry.who)
                return
            case "leave":
                self._leaves(entry)
                return
            case _:
                return
        self._calls[place] = call
        model.begins(call)

    def _ends(self, place: int, entry: Entry) -> None:
        self.judged[f"{entry.call}: {entry.error or 'ok'}"] += 1
        call, model, is_ok = self._calls.get(place), self._models[entry.model], not entry.error
        match call:
            case Publishing():
                self._published_ends(entry, call, model)
            case Reading() if is_ok:
                self._read_ends(entry, call, model)
            case Reading() if entry.error == "VersionUnavailable":
                self._not_read(entry, call, model)
            case RollingBack():
                self._rollback_ends(entry, call, model)
            case Retaining() if is_ok:
                for other in self._unanswered(Retaining, entry.who, call):
                    model.not_retained(other, unknown=True)
                model.retained(call)
            case Pinning() if is_ok:
                model.pinned(call)
            case Pinning() if _says_there_is_none(entry):
                model.denied(call, call.number)
            case None if entry.call in ("newest", "wait_for") and is_ok:
                self._announced(entry, model)
            case _:
                pass

    # -- ends

    def _published_ends(self, entry: Entry, call: Publishing, model: ReferenceModel) -> None:
        if entry.content is not None:
            model.published(call, entry.content)
        elif entry.memory == "intact" and entry.error != "LeaseLost":
            taken = entry.error == "VersionConflict" and not entry.retryable
            model.not_published(call, taken=taken)
        else:  # in doubt, cancelled, or another error
            call.left = True

    def _read_ends(self, entry: Entry, call: Reading, model: ReferenceModel) -> None:
        info = entry.content
        if info is None:  # of a prefetch, the number only: what it may be is not unique
            known = [each for each in self._contents.values() if each.version == entry.version]
            require(
                bool(known),
                "publication numbers: {} got {}, and nobody has published it",
                entry.call,
                entry.version,
            )
            if len(known) != 1:
                return
            info = known[0]
        require(
            info.version == entry.version,
            "content: {} says version {}, and what it holds is {}",
            entry.call,
            entry.version,
            info,
        )
        self._contents.setdefault(info.content_id, info)
        model.read(call, info)
        self._check_bytes(entry, info)

    def _not_read(self, entry: Entry, call: Reading, model: ReferenceModel) -> None:
        number = call.selector
        if not isinstance(number, int):
            return
        if _says_there_is_none(entry):
            model.denied(call, number)
        if not self._is_calm or entry.ended is None:
            return
        for content_id in model.must_stay(call):
            held = self._contents.get(content_id)
            if held is None or held.version != number:
                continue
            holder = self._holder(content_id, entry.model, entry.began, entry.ended)
            require(
                not holder,
                "retention: {} cannot be had, and is retained, and {} has held it: {}",
                number,
                holder,
                entry.text,
            )

    def _rollback_ends(self, entry: Entry, call: RollingBack, model: ReferenceModel) -> None:
        if entry.error == "VersionConflict":
            model.not_rolled_back(call, beyond=True)
        elif not entry.error:
            # what had no answer was recorded before, or never will be
            for other in self._unanswered(RollingBack, None, call):
                if other.to == call.to:
                    model.rolled_back(other)
            model.rolled_back(call)

    def _unanswered(self, kind: type[Any], who: str | None, but: Call) -> list[Any]:
        """Earlier calls of that kind whose callers do not know what has become of them."""
        return [
            call
            for place, call in self._calls.items()
            if isinstance(call, kind)
            and call is not but
            and call.ended == inf
            and (who is None or call.who == who)
            and (self._entries[place].error or self._entries[place].ended is None)
        ]

    def _announced(self, entry: Entry, model: ReferenceModel) -> None:
        listener, info = (entry.who, entry.model), entry.content
        if info is None and listener not in self._listeners:
            return  # it has not been told anything yet
        self._listeners.add(listener)
        model.announced(entry.who, info)
        least = entry.arguments.get("at_least", 0)
        if info is not None:
            require(
                info.version >= least,
                "visibility: {} waited for {}, and was told of {}",
                entry.who,
                least,
                info,
            )

    def _unpin(self, model: ReferenceModel, entry: Entry) -> None:
        pins = [
            (place, call)
            for place, call in self._calls.items()
            if isinstance(call, Pinning) and call.who == entry.who and call.done < inf
        ]
        for place, call in pins[-1:]:
            model.unpinned(call)
            del self._calls[place]

    def _leaves(self, entry: Entry) -> None:
        """A worker's pins end with it."""
        for place, call in list(self._calls.items()):
            if isinstance(call, Pinning) and call.who == entry.who and call.done < inf:
                self._models[self._entries[place].model].unpinned(call)
                del self._calls[place]

    # -- bytes

    def _check_bytes(self, entry: Entry, info: VersionInfo) -> None:
        """What it was given is what was published under that content, in the same shard."""
        for known in self._published.get((info.content_id, entry.rank, entry.world_size), ()):
            for name, digest in entry.digests.items():
                if name in known and known[name].partition(":")[0] == digest.partition(":")[0]:
                    require(
                        known[name] == digest,
                        "content: {} was given {} of version {}, and {} is {}",
                        f"{entry.who} {entry.group}".strip(),
                        info.content_id,
                        info.version,
                        name,
                        self._whose(name, digest),
                    )
                    self.judged["tensors compared"] += 1

    def _whose(self, name: str, digest: str) -> str:
        """Of which version those bytes are."""
        for (content_id, _, _), published in self._published.items():
            if any(each.get(name) == digest for each in published):
                return f"version {self._contents[content_id].version}'s"
        return "nobody's"

    # -- who holds what

    def _holder(self, content_id: str, model: str, began: float, ended: float) -> str:
        """A group that is not spot, all of whose ranks have held that from before until after
        then.
        """
        ranks: defaultdict[str, set[int]] = defaultdict(set)
        sizes: dict[str, int] = {}
        for entry in self._entries:
            if entry.model != model or entry.spot or entry.call not in ("publish", "update"):
                continue
            content = entry.content
            if content is None or content.content_id != content_id or not entry.handle:
                continue
            if entry.ended is None or entry.ended >= began:
                continue
            if not self._changes(entry, entry.ended, ended):
                ranks[entry.group].add(entry.rank)
                sizes[entry.group] = entry.world_size
        whole = (group for group, there in ranks.items() if len(there) == sizes[group])
        return next(whole, "")

    def _changes(self, holding: Entry, since: float, until: float) -> bool:
        return any(
            since <= entry.began <= until
            and entry.call in ENDS_HOLDING
            and (entry.handle == holding.handle or entry.call == "leave")
            and entry.who == holding.who
            for entry in self._entries
        )

    # -- telling

    def _story(self, broken: GuaranteeBroken, about: Entry) -> str:
        """The guarantee, the call that cannot be, and the last calls before that end of all that
        concern its model.
        """
        end = about.ended if about.ended is not None else about.began
        before = [
            entry for entry in self._entries if entry.model == about.model and entry.began <= end
        ]
        lines = [f"{'*' if entry is about else ' '} {entry}" for entry in before[-STORY_LINES:]]
        return "\n".join([str(broken), f"guarantee: {promise_of(str(broken))}", *lines])


def _says_there_is_none(entry: Entry) -> bool:
    return entry.error == "VersionUnavailable" and any(text in entry.text for text in NO_SUCH)
