"""A rank's fill (R7): replicate, update, fetch.

Fill is said, all ranks are bound to one version, its manifest is compared, `before_write` runs, all are ready; only
then is the old version fenced and the new one pulled. What this rank has pulled and verified is its vote.

Responsible for the order of these, for the leases that it reads under, and for what a fill that is broken off leaves
behind. Not responsible for reading bytes (`scheduler.pull`).
"""

from __future__ import annotations

from typing import assert_never

from tensorhub.errors import OperationTimeout, StateError, TensorHubError
from tensorhub.machine import InvariantBroken
from tensorhub.manifest import Manifest, check_compatible
from tensorhub.messages import (
    AddSource,
    DropSource,
    Fill,
    GetManifest,
    Grant,
    ManifestReply,
    Prepared,
    ReadFailed,
    ReadyToWrite,
    Start,
    Write,
)
from tensorhub.types import HandleState, OpKind, VersionInfo
from tensorhub.worker.calls import AddPullSource, CallHook, DropPullSource, FillCall, StartPull, StopPull
from tensorhub.worker.enrolment import Shard
from tensorhub.worker.holding import Holding
from tensorhub.worker.rank import Rank
from tensorhub.worker.running import GroupCall, set_memory
from tensorhub.worker.states import UNVOTED, Phase

MANIFESTS_KEPT_MAX = 16


class Manifests:
    """The manifests that are known, and which of them fit one registration. Outlives its fills.

    `known`: by id; shared by a worker's handles.
    """

    def __init__(self, known: dict[str, Manifest], shard: Shard) -> None:
        self._known = known
        self._shard = shard
        self._fitting: set[str] = set()  # ids

    def get(self, manifest_id: str) -> Manifest | None:
        return self._known.get(manifest_id)

    def add(self, blob: bytes) -> Manifest:
        """Decode and keep it; raises ProtocolError for what is not a manifest."""
        manifest = Manifest.decode(blob)
        while len(self._known) >= MANIFESTS_KEPT_MAX:
            del self._known[next(iter(self._known))]
        self._known[manifest.manifest_id] = manifest
        return manifest

    def check_fits(self, manifest: Manifest) -> None:
        """Raise ManifestMismatch unless this registration can be filled with it."""
        mine = self._shard.manifest
        if mine is not None and manifest.manifest_id not in self._fitting:
            check_compatible(manifest, mine)
            self._fitting.add(manifest.manifest_id)


class Filling(GroupCall):
    """QUEUED -> ASKED -> (MANIFEST) -> (HOOK) -> (HELD) -> (FENCING) -> PULLING -> VOTED -> over.

    Until the old version is fenced it ends by ABANDONING, while it pulls by STOPPING.
    """

    unbound = Phase.ASKED

    def __init__(self, call: FillCall, rank: Rank, holding: Holding, manifests: Manifests, timeout_s: float) -> None:
        super().__init__(call.kind.value, rank, holding, timeout_s)
        self._call = call
        self._manifests = manifests
        self._version: VersionInfo | None = None  # bound
        self._manifest: Manifest | None = None  # of the bound version
        self._grants: tuple[Grant, ...] = ()  # to begin the pull with
        self._write_said = False  # the coordinator has told every rank to overwrite
        self._deaf = False  # a connection was lost in the midst of it, and perhaps that word
        self._leases: set[str] = set()  # that the pull reads under

    def check_allowed(self) -> None:
        super().check_allowed()
        if self._call.kind is OpKind.REPLICATE and self._holding.version is not None:
            raise StateError(f"{self._rank.title} holds version {self._holding.version}: update() replaces it")

    # ------------------------------------------------------------------------------------------------- what is said

    def start(self) -> None:
        self._take_key()
        self.phase = Phase.ASKED
        self._say_call()

    def _say_call(self) -> None:
        call, shard = self._call, self._rank.shard
        self._rank.say(
            Fill(
                key=self.operation,
                rank=shard.rank,
                registration=shard.registration,
                kind=call.kind,
                selector=call.selector,
                at_least=call.at_least,
                generation=self.generation,
                hold=call.hold,
                staged=call.staged,
                timeout_s=max(0.0, self.deadline - self._rank.now),
            )
        )

    def _say_phase_again(self) -> None:
        self._deaf = True
        match self.phase:
            case Phase.ASKED:
                self._say_call()
            case Phase.MANIFEST:
                self._ask_manifest()
            case Phase.HELD:
                self._rank.say(ReadyToWrite(self.operation, self._rank.shard.rank))
            case Phase.VOTED:
                self._rank.say(Prepared(self.operation, self._rank.shard.rank))
            case _:
                pass

    # ------------------------------------------------------------------------------------------- until it may write

    def told(self, message: Start | Write | AddSource | DropSource) -> None:
        """The coordinator says something about this operation."""
        match message:
            case Start() if self.phase is Phase.ASKED:
                self._version, self._write_said, self._grants = message.version, message.write, message.grants
                self._find_manifest(message.manifest_id)
            case Start() if self.phase is Phase.PULLING:
                self._reconcile(message.grants)
            case Start(write=True) | Write():
                if self.phase is Phase.HELD:
                    self._grants = message.grants
                    self._write()
                elif self.phase is Phase.ABANDONING:
                    self._write_said = True  # it crossed our Abandon: nothing was written here
            case Start():
                pass
            case AddSource():
                self._add_source(message.grant)
            case DropSource():
                self._drop_source(message.lease)
            case _:
                assert_never(message)

    def _find_manifest(self, manifest_id: str) -> None:
        manifest = self._manifests.get(manifest_id)
        if manifest is None:
            self.phase = Phase.MANIFEST
            self._ask_manifest()
        else:
            self._manifest_found(manifest)

    def _ask_manifest(self) -> None:
        assert self._version is not None
        self.request = self._rank.new_request()
        shard = self._rank.shard
        self._rank.say(GetManifest(self.request, shard.model, self._version.content_id, shard.number))

    def manifest_came(self, reply: ManifestReply) -> None:
        if self.phase is not Phase.MANIFEST or reply.request != self.request:
            return
        try:
            manifest = self._manifests.add(reply.manifest)
        except TensorHubError as error:
            self.give_up(error)
        else:
            self._manifest_found(manifest)

    def _manifest_found(self, manifest: Manifest) -> None:
        self._manifest = manifest
        try:
            self._manifests.check_fits(manifest)
        except TensorHubError as error:
            self.give_up(error)
            return
        if self._call.hold:
            assert self._version is not None
            self.phase = Phase.HOOK
            self._rank.act(CallHook(self._version))
        else:
            self._ready_to_write()

    def hook_returned(self, error: Exception | None) -> None:
        if self.phase is not Phase.HOOK:
            return
        if error is not None:
            self.give_up(error)
        else:
            self._ready_to_write()

    def _ready_to_write(self) -> None:
        if self._write_said:
            self._write()
        else:
            self.phase = Phase.HELD
            self._rank.say(ReadyToWrite(self.operation, self._rank.shard.rank))

    def _write(self) -> None:
        """Every rank is ready: fence what this one holds, then fill."""
        self._write_said = True
        if self._holding.state is HandleState.READY:
            self._fence()
        else:
            self._start_pull()

    def fenced(self) -> None:
        """FENCING: nobody reads the old version any more."""
        if self.error is None:
            self._start_pull()
        else:
            self._old_one_stays()  # given up between the fence and the first byte

    def fence_failed(self) -> None:
        """FENCING: accesses still run at the deadline."""
        error = self._still_read()
        if self.error is None:
            self._abandon(error)
        if self.error is None or isinstance(self.error, OperationTimeout):
            self.error = error
        self._old_one_stays()

    def _old_one_stays(self) -> None:
        """Nothing was written: let readers in again (R7)."""
        self._holding.reopen()
        self.finish(error=self.error)

    # ------------------------------------------------------------------------------------------------- the pull

    def _start_pull(self) -> None:
        assert self._version is not None
        assert self._manifest is not None
        self._holding.fill(self._version, self._manifest, self.generation)
        self.phase = Phase.PULLING
        self._leases = {grant.lease for grant in self._grants}
        self._rank.act(StartPull(self._version, self._manifest, self.generation, self._grants))

    def _reconcile(self, grants: tuple[Grant, ...]) -> None:
        """After a lost connection: the coordinator's list of our leases is the true one."""
        for lease in sorted(self._leases - {grant.lease for grant in grants}):
            self._rank.act(DropPullSource(lease))
        for grant in grants:
            self._add_source(grant)

    def _add_source(self, grant: Grant) -> None:
        if self.phase is Phase.PULLING:
            if grant.lease not in self._leases:
                self._leases.add(grant.lease)
                self._rank.act(AddPullSource(grant))
        elif self.phase in UNVOTED:
            self._grants = (*self._grants, grant)

    def _drop_source(self, lease: str) -> None:
        if self.phase is Phase.PULLING and lease in self._leases:
            self._rank.act(DropPullSource(lease))
        else:
            self._grants = tuple(grant for grant in self._grants if grant.lease != lease)
            self._rank.say(ReadFailed(self.operation, self._rank.shard.rank, lease, "dropped", ""))

    def source_failed(self, lease: str, reason: str, detail: str, chunk: int | None) -> None:
        if lease in self._leases:
            self._leases.discard(lease)
            self._rank.say(ReadFailed(self.operation, self._rank.shard.rank, lease, reason, detail[:1000], chunk))

    def pull_done(self) -> None:
        if self.phase is not Phase.PULLING:
            return
        self.phase = Phase.VOTED
        self._holding.verified()
        self._rank.say(Prepared(self.operation, self._rank.shard.rank))
        if not self._rank.shard.serves:
            self._holding.fetched()
            self.finish(version=self._version, changed=True)

    def pull_failed(self, error: TensorHubError) -> None:
        if self.phase is Phase.PULLING:
            self.give_up(error)

    def _stop_pull(self, error: Exception) -> None:
        self.error = error
        self.phase = Phase.STOPPING
        self._rank.act(StopPull())

    def pull_stopped(self) -> None:
        if self.phase is Phase.STOPPING:
            self._torn(self.error)

    # -------------------------------------------------------------------------------------------------- its end

    def committed(self, version: VersionInfo) -> None:
        content, changed = self._holding.content, True
        if self.phase is Phase.VOTED:
            self._holding.filled()
        elif content is not None and content.version.content_id == version.content_id:
            changed = False  # a barrier: this content was held already
        elif content is None and self.phase in (Phase.ASKED, Phase.ABANDONING):
            changed = False  # as above, but it was rolled back since
        else:
            raise InvariantBroken(f"{self}: committed before this rank voted. Story:\n{self._holding.story}")
        self._finish_committed(version, changed=changed)

    def aborted(self, error: Exception) -> None:
        match self.phase:
            case Phase.PULLING:
                self._stop_pull(error)
            case Phase.STOPPING | Phase.FENCING:
                self.error = error
            case Phase.VOTED:
                self._torn(error)
            case _:
                if self._write_said or self._deaf:  # the coordinator may count on a fill that was never begun
                    self._holding.restate()
                self.finish(error=error)

    def _give_up(self, error: Exception) -> None:
        match self.phase:
            case Phase.ASKED | Phase.MANIFEST | Phase.HOOK | Phase.HELD:
                self.error = error
                self.phase = Phase.ABANDONING
                self._abandon(error)
            case Phase.FENCING:
                self.error = error
                self._abandon(error)
            case Phase.PULLING:
                self._abandon(error)
                self._stop_pull(error)
            case Phase.VOTED:
                self._doubt(error)
            case Phase.ABANDONING:
                self._leave_unheard()
            case Phase.STOPPING:
                pass
            case _:
                raise InvariantBroken(f"{self} is in no phase of a fill. Story:\n{self._holding.story}")

    def _leave_unheard(self) -> None:
        """The outcome does not come, and nothing was written here."""
        if self._holding.state is HandleState.READY and self._version is None and self.error is not None:
            set_memory(self.error, "in_doubt")  # if it holds that content already, the others may have ended well
        self.finish(error=self.error)

    def _torn(self, error: Exception | None) -> None:
        self._holding.tear()
        if error is not None:
            set_memory(error, "torn")
        self.finish(error=error)
