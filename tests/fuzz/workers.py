"""Targets: what a coordinator may say to a worker's rank, in any order, whatever the rank is
doing.
"""

from __future__ import annotations

import contextlib
import itertools
import typing
from typing import Any

from tensorhub.errors import IntegrityError, ProtocolError, StateError
from tensorhub.messages import ErrorInfo, FromWorker, Grant, ToRank
from tensorhub.model.manifest import Manifest, TensorDescription, build_manifest
from tensorhub.protocol import codec
from tensorhub.scheduler.pull import Pull
from tensorhub.types import (
    ContentId,
    Endpoint,
    HandleState,
    LeaseId,
    Location,
    OpKey,
    OpKind,
    RegistrationId,
    VersionInfo,
)
from tensorhub.worker.calls import (
    Action,
    AddPullSource,
    Call,
    CallHook,
    CloseCall,
    CopyLocally,
    DropPullSource,
    Fence,
    FillCall,
    Finish,
    OpenGeneration,
    PublishCall,
    RefuseCall,
    ReopenGeneration,
    Say,
    StartPull,
    StopPull,
    UnpublishCall,
)
from tensorhub.worker.member import Member
from tensorhub.worker.owner import Owner
from tensorhub.worker.registration_session import Shard
from tests.fuzz.source import Source

STEPS_MAX = 300
MANIFEST = build_manifest(
    [TensorDescription("w", "uint8", (3, 4096), 0, 3 * 4096)], 4096, "xxh3-64"
)
OTHER = build_manifest([TensorDescription("v", "uint8", (1,), 0, 1)], 4096, "none")
KINDS = sorted(typing.get_args(ToRank), key=lambda kind: kind.__name__)
REGISTRATION = RegistrationId("r")
CALLS: tuple[Call, ...] = (
    PublishCall(1),
    PublishCall(2),
    FillCall(OpKind.REPLICATE, "latest"),
    FillCall(OpKind.UPDATE, "latest", None, True),
    FillCall(OpKind.UPDATE, 3, None, False, True),
    UnpublishCall(),
    RefuseCall(ErrorInfo.of(StateError("no"))),
    CloseCall(),
    CloseCall(abandon=True),
)
GRANTS = [
    Grant(
        lease,
        "source",
        "source.1",
        "s",
        5,
        (Endpoint("tcp", "tcp://127.0.0.1:1"),),
        Location(host="h"),
        complete,
    )
    for lease, complete in (("l1", True), ("l2", False), ("l1", False))
]


class _Shell:
    """What drives a rank's machine, as `runtime.worker.handle` does, over the real owner and the
    real books of a pull.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.now = 0.0
        self.requests = itertools.count(1)
        self.asked = [0]
        generations = itertools.count(1)
        shard = Shard(
            REGISTRATION, "actor", "g", 0, source.choice((1, 2)), source.flag(), "", MANIFEST, 0
        )
        self.member = Member(
            shard,
            requests=self.new_request,
            generations=lambda: next(generations),
            manifests=dict[str, Manifest](),
        )
        self.owner = Owner()
        self.pull: Pull | None = None
        self.fences: list[Fence] = []
        self.hooks = 0
        self.copies = 0
        self.stops = 0
        self.staged = False
        self.keys: list[OpKey] = []
        self.finished = True
        self.is_lost = False

    def new_request(self) -> int:
        self.asked.append(next(self.requests))
        return self.asked[-1]

    # -- what the member wants done

    def apply(self, actions: list[Action]) -> None:
        for action in actions:
            self._do(action)
        self.member.check_invariants()
        self.owner.check_invariants()
        if self.pull is not None:
            self.pull.check_invariants()

    def _do(self, action: Action) -> None:
        match action:
            case Say():
                self._say(action.message)
                key = getattr(action.message, "key", None)
                self.keys += [key] if isinstance(key, OpKey) and key not in self.keys else []
            case OpenGeneration():
                sizes = [chunk.nbytes for chunk in action.manifest.chunks]
                content_id = ContentId(action.content_id)
                self.owner.open(
                    REGISTRATION, action.generation, content_id, sizes, complete=action.complete
                )
            case ReopenGeneration():
                self.owner.reopen(REGISTRATION, action.generation)
            case Fence():
                self.owner.close(REGISTRATION)
                self.fences.append(action)
            case CallHook():
                self.hooks += 1
            case StartPull():
                assert self.pull is None, "two pulls at a time"
                self.pull = Pull([chunk.nbytes for chunk in action.manifest.chunks], action.copied)
                self.staged = action.staged
                for grant in action.grants:
                    self.pull.add_source(LeaseId(grant.lease), grant.complete)
            case AddPullSource() if (
                self.pull is not None and LeaseId(action.grant.lease) not in self.pull._sources
            ):
                self.pull.add_source(LeaseId(action.grant.lease), action.grant.complete)
            case DropPullSource() if self.pull is not None:
                self.pull.drop_source(LeaseId(action.lease))
            case CopyLocally():
                self.copies += 1
            case StopPull():
                self.stops += 1
            case Finish():
                assert not self.finished, "a call has ended twice"
                self.finished = True
            case _:
                pass

    def _say(self, message: FromWorker) -> None:
        """A number that leaves no room for the next one cannot be said: that costs the coordinator
        its connection.
        """
        try:
            codec.decode(codec.encode(message), codec.FROM_WORKER)
        except ProtocolError as error:
            assert "sequence: 18446744073709551616" in str(error)
            self.is_lost = True

    # -- what happens

    def hear(self) -> None:
        """Anything that a coordinator can say about this registration, true or not."""
        message = self.source.value(self.source.choice(KINDS), self._pools())
        with contextlib.suppress(ProtocolError):  # which costs the coordinator its connection
            self.apply(self.member.receive(message, self.now))

    def _pools(self) -> dict[str, list[Any]]:
        ids = ["c1", "c2"]
        versions = [
            VersionInfo("actor", number, ids[number % 2], 3 * 4096, 1) for number in (1, 2, 3)
        ]
        return {
            "request": self.asked[-4:],
            "registration": [REGISTRATION],
            "epoch": [1, 2],
            "sequence": [0, 1, 2],
            "key": self.keys[-3:] or [OpKey("actor", "g", 1, 0)],
            "rank": [0],
            "version": versions,
            "content_id": ids,
            "manifest_id": [MANIFEST.manifest_id, OTHER.manifest_id],
            "manifest": [MANIFEST.encode(), OTHER.encode(), b"junk"],
            "grants": [tuple(GRANTS[:1]), tuple(GRANTS[:2]), (), tuple(GRANTS)],
            "grant": GRANTS,
            "lease": [grant.lease for grant in GRANTS],
            "keep": [True, True, False],
        }

    def call(self) -> None:
        call = self.source.choice(CALLS)
        with contextlib.suppress(StateError):
            actions = self.member.begin(call, self.source.choice((0.0, 5.0, 60.0)), self.now)
            self.finished = False
            self.apply(actions)

    def go_on(self) -> None:
        """One of the things that the member waits for here comes to its end."""
        member, now = self.member, self.now
        if self.fences:
            fence = self.fences.pop(0)
            if self.source.byte() > 240 and fence.until is not None:
                self.apply(member.fence_failed(fence.generation, now))
            else:
                self.apply(member.fenced(fence.generation, now))
        elif self.stops:
            self.stops -= 1
            self.copies, self.pull = 0, None
            self.apply(member.pull_stopped(now))
        elif self.copies:
            self.copies -= 1
            self.apply(member.copied(frozenset(range(self.source.below(4))), now))
        elif self.hooks:
            self.hooks -= 1
            self.apply(
                member.hook_returned(StateError("no") if self.source.byte() > 220 else None, now)
            )
        elif self.pull is not None:
            self._read(self.pull)

    def _read(self, pull: Pull) -> None:
        lease = LeaseId(self.source.choice(("l1", "l2")))
        kind = self.source.byte()
        if kind < 160:
            self.pull = None
            self.apply(self.member.pull_done(self.now))
        elif kind < 180:
            self.pull = None
            self.apply(self.member.pull_failed(IntegrityError("no memory"), self.now))
        else:
            if kind < 220:
                with contextlib.suppress(Exception):  # no source of this pull
                    pull.lane_ended(lease)
            reason = self.source.choice(("lost", "corrupt", "dropped"))
            self.apply(
                self.member.source_failed(
                    lease, reason, "", self.now, chunk=0 if reason == "corrupt" else None
                )
            )

    def any_step(self) -> None:
        kind, member = self.source.byte(), self.member
        if self.is_lost:
            self.is_lost = False
            self.apply(member.disconnected(self.now))
        elif kind < 120:
            self.hear()
        elif kind < 190:
            self.go_on()
        elif kind < 220:
            self.call()
        elif kind < 230:
            self.apply(member.connected(self.now))
        elif kind < 236:
            self.apply(member.disconnected(self.now))
        elif kind < 240:
            self.apply(member.state_lost(self.now))
        elif kind < 245:
            self.apply(member.cancel(StateError("cancelled"), self.now))
        elif kind < 250:
            self.now += self.source.choice((0.1, 5.0, 100.0))
            self.apply(member.tick(self.now))
        else:
            changed = self.source.choice((True, False, None))
            generation = self.source.below(8)
            self.apply(
                member.digested_again(
                    "i", generation, changed, IntegrityError("it has changed"), self.now
                )
            )

    def end(self) -> None:
        """The coordinator falls silent: whatever it has said, each call ends by its deadline."""
        self.source.rest()
        for _ in range(200):
            while self.fences or self.stops or self.copies or self.hooks:
                self.go_on()
            if self.member.running is None:
                break
            self.now = max(self.now, self.member.running.next_deadline())
            self.apply(self.member.tick(self.now))
        assert self.member.running is None, self.member
        assert self.finished
        assert self.member.state is not HandleState.DRAINING


def ranks(data: bytes) -> None:
    """What a coordinator says that cannot be is a ProtocolError, or changes nothing; no call waits
    for it for ever.
    """
    shell = _Shell(Source(data))
    shell.apply(shell.member.connected(0.0))
    for _ in range(STEPS_MAX):
        if not shell.source:
            break
        shell.any_step()
    shell.end()
