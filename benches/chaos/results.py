"""What the processes' calls returned, and whether that may be: the guarantees as far as they can be
judged from outside.

Pure: times are arguments (seconds of the run). What is found begins with the guarantee's name.
Judged are

- G1: after each call, the memory that the handle says it holds has, word for word, one content, and
  that content was published (or is being published) under the version that it names; no number of a
  lineage ever has two contents;
- G3: a fill of "latest" never returns less than what a publish had returned before the fill was
  called;
- G4: ranks of a group that called together and lived on do not return different outcomes
  (`in_doubt` is no outcome);
- G5 and G7, when all faults are healed (`run`): a version that a whole live group holds is got by
  every other group, and the next one is published and got;
- G10: errors are TensorHubErrors, and calls end by their timeouts plus a margin;
- errors' `memory`: "intact" is what was there before (or, in `mutate`, what its body wrote), "torn"
  is a torn handle;
- the archive: a version whose manifest is there is whole, word by word, and its contents are as for
  G1; when all faults are healed, every version that it keeps can be fetched;
- `unpublish` in `mutate` is not refused but for retention, where something is retained.

Not judged: what happened inside a call, bytes of torn or doubtful memory, who read from whom, and
G5 at other times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benches.byte_patterns import ATTEMPTS

Answer = dict[str, Any]


@dataclass
class Seat:
    """One rank of a group in one life of its process: what its memory held when it was last
    known.
    """

    group: str
    rank: int
    world_size: int = 2
    contents: set[int] | None = None  # None: in flux, or unknown
    holds: int | None = None  # what its handle said last
    # it was torn, or in doubt: resolving that is no harm that the next call did
    may_be_torn: bool = False

    def __str__(self) -> str:
        return f"{self.group}[{self.rank}]"


@dataclass
class Call:
    """One call of one rank. `content`: of a `mutate`."""

    seat: Seat
    what: str
    begun_at: float
    floor: int  # the newest number that a publish had returned before
    version: int | None = None
    content: int | None = None


@dataclass
class Results:
    """What is known. `violations` are sentences that begin with the guarantee."""

    visible: int = 0  # the newest number that a publish has returned, in this lineage
    # the last value, with those that may have come through since
    retain: set[int] = field(default_factory=lambda: {0})
    violations: list[tuple[float, str]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)  # of calls
    bytes_checked: int = 0
    commits: int = 0
    bytes_read: int = 0  # by fills
    bytes_saved: int = 0  # by deltas
    archived: int = 0  # fetches of archived numbers that returned
    bytes_direct: int = 0  # of these, out of the bucket
    # contents that were offered under a number of this lineage
    tried: dict[int, set[int]] = field(default_factory=dict)
    # the content of a number, once anybody has said so
    settled: dict[int, int] = field(default_factory=dict)
    rollbacks: list[tuple[float, int]] = field(default_factory=list)  # begun then, to that number
    # contents that a rollback retired, which had returned then
    dropped: dict[int, float] = field(default_factory=dict)

    def violated(self, now: float, text: str) -> None:
        self.violations.append((now, text))

    # ----------------------------------------------------------------------------------------------
    # calls

    def begun(
        self,
        seat: Seat,
        what: str,
        now: float,
        version: int | None = None,
        content: int | None = None,
    ) -> Call:
        if version is not None and content is not None:
            self.tried.setdefault(version, set()).add(content)
        return Call(seat, what, now, self.visible, version, content)

    def ended(self, call: Call, answer: Answer | None, now: float) -> None:
        """`answer` None: the process died."""
        if answer is None:
            self.outcomes["died"] += 1
            return
        outcome = answer["outcome"]
        self.outcomes[f"{call.what}: {outcome}"] += 1
        if outcome == "untyped":
            self.violated(now, f"bounds: {call.seat} {call.what} raised {answer['text']}")
        elif outcome == "ok":
            self._succeeded(call, answer, now)
        else:
            self._failed(call, answer, now)
        self._held(call, answer, now)
        self._remember(call.seat, answer)

    def _succeeded(self, call: Call, answer: Answer, now: float) -> None:
        if call.what == "mutate":
            assert call.version is not None
            assert call.content is not None
            self._settle(call, call.version, call.content, now)
            self.visible = max(self.visible, call.version)
        elif call.version is not None:  # an archived one
            if answer["version"] != call.version:
                self.violated(
                    now, f"content: {call.seat} asked for {call.version}, got {answer['version']}"
                )
            self.archived += 1
            self.bytes_direct += answer.get("direct", 0)
        elif call.what in ("update", "fetch"):
            floor = min([call.floor, *(to for at, to in self.rollbacks if at >= call.begun_at)])
            if answer["version"] < floor:
                self.violated(
                    now,
                    f"visibility: {call.seat} got {answer['version']} as latest; {floor} was "
                    f"published before it asked",
                )
            if answer.get("state") == "ready" and answer["holds"] != answer["version"]:
                self.violated(
                    now, f"content: {call.seat} got {answer['version']} and holds {answer['holds']}"
                )
            self.commits += bool(answer["changed"])
            self.bytes_read += answer.get("read", 0)
            self.bytes_saved += answer.get("saved", 0)

    def _held(self, call: Call, answer: Answer, now: float) -> None:
        """What the memory has, if the handle says that it holds a version."""
        contents = answer.get("contents")
        self.bytes_checked += answer.get("checked", 0)
        if contents is None or answer.get("holds") is None:
            return
        version = answer["holds"]
        if len(contents) != 1 or contents[0] // ATTEMPTS != version:
            self.violated(
                now,
                f"content: {call.seat} holds {version} after {call.what}, and its words are of "
                f"{shown(contents)}",
            )
        elif contents[0] not in self.tried.get(version, ()) and contents[0] not in self.dropped:
            self.violated(
                now, f"content: {call.seat} holds {shown(contents)}, which nobody published"
            )
        elif contents[0] in self.dropped:
            if (
                answer["outcome"] == "ok"
                and call.what in ("update", "fetch")
                and call.begun_at > self.dropped[contents[0]]
            ):
                self.violated(
                    now,
                    f"content: {call.seat} got {shown(contents)}, which a rollback had retired "
                    f"before it asked",
                )
        else:
            self._settle(call, version, contents[0], now)

    def _settle(self, call: Call, version: int, content: int, now: float) -> None:
        if any(at >= call.begun_at and version > to for at, to in self.rollbacks):
            return  # of the lineage before, perhaps
        known = self.settled.setdefault(version, content)
        if known != content:
            self.violated(
                now,
                f"content: {version} is {shown([content])} at {call.seat}, and was "
                f"{shown([known])}",
            )

    def _failed(self, call: Call, answer: Answer, now: float) -> None:
        said, seat, state = answer.get("memory"), call.seat, answer.get("state")
        text = f"{seat} {call.what} raised {answer['outcome']} ({answer['text']}), memory {said}"
        if said == "torn" and call.what == "update" and state not in ("torn", "filling"):
            self.violated(now, f"memory: {text}, and is {state}")
        if said == "intact" and state == "torn" and not seat.may_be_torn:
            self.violated(now, f"memory: {text}, and is torn")
        if said == "intact" and seat.contents is not None and "contents" in answer:
            found, usual = set(answer["contents"]), [seat.contents]
            if call.what == "mutate":
                usual.append({call.content if call.content is not None else -1})
            if found not in usual:
                self.violated(
                    now, f"memory: {text}; it was {shown(seat.contents)} and is {shown(found)}"
                )
        if answer["outcome"] == "RetentionError" and self.retain == {0}:
            self.violated(now, f"mutability: {text}, and nothing is retained")

    def _remember(self, seat: Seat, answer: Answer) -> None:
        if "state" in answer:
            seat.may_be_torn = answer["state"] in ("torn", "in_doubt", "filling")
            seat.holds = answer["holds"]
            seat.contents = set(answer["contents"]) if "contents" in answer else None

    def stored(self, number: int, shard: int, contents: set[int], now: float) -> None:
        """What the archive has of that number in the end, by any lineage."""
        content, *others = contents or [-1]
        if others or content // ATTEMPTS != number:
            text = f"its words are of {shown(contents)}"
        elif content not in self.dropped and content not in self.tried.get(number, ()):
            text = f"it is {shown(contents)}, which nobody published"
        elif content not in self.dropped and self.settled.get(number, content) != content:
            text = f"it is {shown(contents)}, and was {shown([self.settled[number]])}"
        else:
            return
        self.violated(now, f"archive: {number}, shard {shard}: {text}")

    # ----------------------------------------------------------------------------------------------
    # groups

    def paired(self, calls: Sequence[Call], answers: Sequence[Answer | None], now: float) -> None:
        """The ranks of a group called at the same time: those that have an outcome have the
        same.
        """
        heard = [
            (call, answer)
            for call, answer in zip(calls, answers, strict=True)
            if answer is not None
        ]
        known = [(call, answer) for call, answer in heard if answer.get("memory") != "in_doubt"]
        good = [(call, answer) for call, answer in known if answer["outcome"] == "ok"]
        for call, answer in known:
            if good and answer["outcome"] not in ("ok", "untyped"):
                other = good[0][0].seat
                text = (
                    f"{other} returned, {call.seat} raised {answer['outcome']} ({answer['text']})"
                )
                self.violated(now, f"group atomicity: in one {call.what}, {text}")
        outcomes = {
            (answer.get("version"), *answer.get("contents", ()))
            for _, answer in good
            if answer.get("holds") is not None
        }
        if len(outcomes) > 1:
            group, returned = calls[0].seat.group, sorted(outcomes, key=str)
            self.violated(
                now,
                f"group atomicity: the ranks of {group} returned {returned} from one "
                f"{calls[0].what}",
            )

    # ----------------------------------------------------------------------------------------------
    # rollbacks

    def rolling_back(self, to: int, now: float) -> None:
        """A rollback is about to be asked for: from now on nothing above `to` is certain."""
        self.rollbacks.append((now, to))
        self.visible = min(self.visible, to)
        for version in [number for number in self.settled if number > to]:
            del self.settled[version]

    def rolled_back(self, to: int, now: float) -> None:
        """It has returned. Nothing was published meanwhile."""
        for version in [number for number in self.tried if number > to]:
            for content in self.tried.pop(version):
                self.dropped[content] = now
        for version in [number for number in self.settled if number > to]:
            del self.settled[version]


def shown(contents: Sequence[int] | set[int]) -> str:
    """Contents as people read them."""
    return ", ".join(
        f"{number // ATTEMPTS}#{number % ATTEMPTS}" if number >= 0 else "no content"
        for number in sorted(contents)
    )
