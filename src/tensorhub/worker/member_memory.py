"""The content of one rank's memory, held or voted for, and the generation under which readers may
read it.

Theory of operation. Each verb is one event in the life of the memory: it moves the handle's state
along its table, resets all that depends on the state, and asks the shell for the actions that
follow (open, fence, reopen).

Responsible for `state` and `content`, for restating them to the coordinator, and for giving up
content that must not be held any longer. Not responsible for when an event happens, nor for what
follows a fence: the running call decides (`worker.active_call`). Access to memory is
`worker.owner`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tensorhub.errors import LeaseLost
from tensorhub.layouts.joining import said_parts
from tensorhub.layouts.reading import publication_in
from tensorhub.machine import Stateful, demand
from tensorhub.messages import Held, Outcome, Prepared, Resolve, RetainedAck, Revoked, SelectionRoot
from tensorhub.model.manifest import Manifest
from tensorhub.types import HandleState, Medium, OpKey, VersionInfo
from tensorhub.worker import calls
from tensorhub.worker.member_context import MemberContext
from tensorhub.worker.registration_session import Shard, said_manifest
from tensorhub.worker.states import HANDLE_TABLE, HOLDING, WITH_CONTENT


@dataclass(slots=True)
class Content:
    """The content that the memory holds, or is being filled with, under one generation."""

    version: VersionInfo
    manifest: Manifest
    generation: int
    retained: bool = False  # it is to be kept (R4), by the last word heard
    published: bool = False  # by this rank; else it was read from other workers
    root: bytes = b""  # of its chunks' digests, where it was voted for
    # the root of each selection, instead, where it is held in another layout
    roots: tuple[SelectionRoot, ...] = ()
    # names its regions, where it is held in another layout; None: `manifest`
    base: Manifest | None = None
    part_ids: tuple[str, ...] = ()  # of this content, as the coordinator names them
    # these parts by their ids, where this worker has had them from elsewhere than the coordinator
    parts: Mapping[str, bytes] = field(default_factory=dict)
    former: bool = False  # the coordinator has lost its state since
    spoiled: bool = False  # its bytes have changed since, so it is not restated

    def held(self, *, told: bool) -> Held:
        """This content, for the coordinator. `told`: the coordinator has asked for the manifest
        itself.
        """
        version, manifest, of = (
            self.version,
            self.base or self.manifest,
            publication_in(self.manifest),
        )
        return Held(
            version=version.version,
            content_id=version.content_id,
            generation=self.generation,
            world_size=version.world_size,
            nbytes=version.nbytes,
            manifest=said_manifest(manifest, told=told),
            published=self.published,
            root=self.root,
            manifest_id=manifest.manifest_id,
            part_ids=self.part_ids,
            publication="" if of is None else of.publication_id,
            lineage=None if self.former else version.lineage,
        )


class MemberMemory(Stateful[HandleState]):
    """The memory of one registration."""

    machine = "handle"
    table = HANDLE_TABLE

    def __init__(self, context: MemberContext) -> None:
        super().__init__(HandleState.EMPTY)
        # READY, DRAINING: held; FILLING: filled with; IN_DOUBT: voted for; else None
        self.content: Content | None = None
        # What other threads may read at any time: READY, DRAINING: `content`; else None. It is
        # taken back before an action lets a byte be written, and comes after the last byte.
        self.in_place: Content | None = None
        # the running call's vote: only the coordinator decides on it
        self.voted: Content | None = None
        self.doubt: OpKey | None = None  # IN_DOUBT: the operation with the unknown outcome
        self.fencing = False  # the fence of `content` was asked for: it is not restated
        # the version held until the coordinator knew that content no more (R2)
        self.given_up: int | None = None
        # the coordinator has lost its state, and no call has said so yet (R2)
        self.is_loss_unreported = False
        # the generation of content that was given up without a call, until fenced
        self.pending_fence: int | None = None
        # TORN host copy: this worker may copy verified chunks under this generation
        self.salvage: Content | None = None
        # voted for, in staging memory; `content` is still held, until it is applied
        self.staged: Content | None = None
        self.applying = False  # `staged` was committed, and is on its way into the memory
        # the restatement since the vote may be out of date: repeated once applied
        self._restate_pending = False
        self._context = context

    def __repr__(self) -> str:
        s = self._context.shard
        return f"<MemberMemory {s.model}/{s.group}[{s.rank}] {self.state.value} v={self.version}>"

    @property
    def version(self) -> int | None:
        """What `weights.version` shows."""
        if self.content is not None and self.state in HOLDING:
            return self.content.version.version
        return None

    @property
    def shard(self) -> Shard:
        """The shard that this memory is registered as."""
        return self._context.shard

    @property
    def is_host(self) -> bool:
        """Whether the memory is the library's own host memory."""
        return self._context.shard.medium is Medium.HOST

    @property
    def readable(self) -> Content | None:
        """The content that this worker may copy from here: its verified chunks."""
        if self.content is not None and not self.fencing:
            return self.content
        return self.salvage

    # --------------------------------------------------------------------------------- publishing,
    # and its vote

    def promise(self, version: int, generation: int) -> None:
        """This rank's vote to publish; the content id is not minted yet. Readers may come right
        after the commit.
        """
        s = self._context.shard
        assert s.manifest is not None
        info = VersionInfo(s.model, version, "", s.manifest.nbytes, s.world_size)
        self.voted = Content(info, s.manifest, generation, published=True, part_ids=s.part_ids)
        self._context.act(calls.OpenGeneration(generation, "", s.manifest, complete=True))

    def publish(self, version: VersionInfo) -> None:
        """The publication was committed."""
        assert self.voted is not None
        self.content = self.voted
        self.content.version = version
        self._become(HandleState.READY, f"published {version.version}")

    def break_promise(self) -> None:
        """The publication was aborted: the memory is unchanged."""
        assert self.voted is not None
        self._context.act(calls.Fence(self.voted.generation))
        self.voted = None

    def adopt(self, content: Content) -> None:
        """The memory has all of that content, or has it as soon as it is asked for. Its chunks are
        marked available as they are there.
        """
        self.content = content
        self._become(HandleState.READY, f"adopted {content.version.version}")
        opened = content.generation, content.version.content_id, content.manifest
        self._context.act(calls.OpenGeneration(*opened, complete=False))

    # ------------------------------------------------------------------------------------ being
    # filled, and its vote

    def fill(self, content: Content) -> None:
        """The first byte may be written. Readers may read each chunk as it arrives, if this memory
        serves readers.
        """
        self.drop_salvage()
        keeps_base = self.state is HandleState.READY
        self.content = content
        version = content.version
        self._become(HandleState.FILLING, f"filled with {version.version}")
        if self._context.shard.serves:
            manifest = content.manifest
            self._context.act(
                calls.OpenGeneration(
                    content.generation,
                    version.content_id,
                    manifest,
                    complete=False,
                    keeps_base=keeps_base,
                )
            )

    def verified(self, root: bytes, roots: tuple[SelectionRoot, ...] = ()) -> None:
        """All chunks are in place, with digests of that root: this rank's vote. `roots`: the
        selections' roots instead.
        """
        assert self.content is not None
        self.voted = self.content
        self.voted.root, self.voted.roots = root, roots

    def unvote(self) -> None:
        """The coordinator has found wrong chunks, and has not counted the vote: the fill goes
        on.
        """
        self.voted = self.staged = None

    def filled(self) -> None:
        assert self.content is not None
        self._become(HandleState.READY, f"filled with {self.content.version.version}")

    def fetched(self) -> None:
        """All chunks are verified, and belong to the caller. No other memory depends on a fetch, so
        it awaits no outcome.
        """
        self.content = None
        self._become(HandleState.CLOSED, "fetched")

    def tear(self) -> None:
        """The fill is broken off: fence it. Of a host copy this worker may still copy the verified
        chunks.
        """
        assert self.content is not None
        broken = self.content
        self._context.act(calls.Fence(broken.generation))
        self.content = None
        self._become(HandleState.TORN, "fill broken off")
        if self.is_host:  # an update of this worker may copy the verified chunks
            self.salvage = replace(
                broken,
                generation=self._context.new_generation(),
                retained=False,
                root=b"",
                roots=(),
            )
            self._context.act(calls.ReopenGeneration(self.salvage.generation))

    def drop_salvage(self) -> None:
        """The verified chunks of a broken fill are not needed any more."""
        if self.salvage is not None:
            self._context.act(calls.Fence(self.salvage.generation))
            self.salvage = None

    # -------------------------------------------------------------------------------- staged:
    # filled beside, then applied

    def stage(self, content: Content) -> None:
        """All chunks are in staging memory: this rank's vote. The held content stays unchanged
        until the commit.
        """
        self.staged = content

    def drop_staged(self) -> None:
        """The operation was aborted: the held content stays. Restate it, as the coordinator may
        count on it no more.
        """
        self.staged, self._restate_pending = None, False
        self._context.act(calls.FreeStaging())
        self.restate()

    def apply(self) -> None:
        """The operation was committed: fence the held content, then copy the staged content. This
        is never given up.
        """
        assert self.staged is not None
        self.applying = True
        if self.content is not None:
            self._context.act(calls.Fence(self.content.generation))
        else:
            self._overwrite()

    def _overwrite(self) -> None:
        assert self.staged is not None
        version, manifest, generation = (
            self.staged.version,
            self.staged.manifest,
            self.staged.generation,
        )
        self.fill(replace(self.staged, retained=False, root=b"", roots=()))
        source = calls.LocalCopy(calls.staging_of(self._context.shard.registration), generation)
        self._context.act(calls.CopyLocally(version, manifest, generation, (source,), last=True))

    def applied(self, *, whole: bool) -> None:
        """The staged content is in place; or (not `whole`) bytes did not arrive, which only broken
        memory can cause.
        """
        staged, self.staged, self.applying = self.staged, None, False
        self._context.act(calls.FreeStaging())
        if whole:
            self.filled()
            assert self.content is not None
            if staged is not None:
                its = self.content
                its.retained, its.root, its.roots = staged.retained, staged.root, staged.roots
            # whether it is to be kept is asked again, now that it can be given up
            if self._restate_pending:
                self._restate_pending = False
                self.restate()
        else:
            self.tear()
            self.restate()

    # --------------------------------------------------------------------------------------------
    # taking it back

    def withdraw(self) -> None:
        self._become(HandleState.DRAINING, "withdrawn")

    def stay(self, why: str) -> None:
        """The withdrawal is over, and the content stays."""
        self._become(HandleState.READY, why)

    def fence(self, until: float) -> None:
        """Fence the content; at `until` the fence is given up."""
        assert self.content is not None
        self.fencing = True
        self._context.act(calls.Fence(self.content.generation, until))

    def reopen(self) -> None:
        """The held content is complete, but closed: open and announce it again (R7)."""
        assert self.content is not None
        self.fencing = False
        self.content.generation = self._context.new_generation()
        self._context.act(calls.ReopenGeneration(self.content.generation))
        self.restate()

    def forget(self, why: str) -> None:
        """The content is fenced, and the memory belongs to the caller."""
        self.content = None
        self._become(HandleState.EMPTY, why)

    def close(self) -> None:
        """The memory holds nothing, and will never hold anything again."""
        self.drop_salvage()
        if self.is_host:
            self._context.act(calls.FreeMemory())
        if self.staged is not None:
            self.staged, self.applying = None, False
            self._context.act(calls.FreeStaging())
        if self.state is not HandleState.CLOSED:
            self._become(HandleState.CLOSED, "closed")

    # --------------------------------------------------------------------------------- what only
    # the coordinator knows

    def restate(self, *, told: bool = False, parts: Sequence[str] = ()) -> None:
        """Register the content that is held or voted for, but no content that is being fenced or
        filled. `told`: the coordinator has asked for the manifests themselves; `parts`: and for
        these parts.
        """
        content, holds = self.voted, self.state in HOLDING
        if self.applying:
            content = self.staged
        elif self.state is HandleState.IN_DOUBT or (holds and not self.fencing):
            content = self.content
        if self.staged is not None and not self.applying:
            # if committed already, the coordinator counts on the held content no longer
            self._restate_pending = True
        said = self._parts(content, parts)
        held = content.held(told=told) if content is not None and not content.spoiled else None
        undecided = content is self.voted or (
            self.state is HandleState.IN_DOUBT and self.staged is None
        )
        if held is not None and undecided:
            held = replace(held, voted=True)
        self._context.say(self._context.session.register(held, told=told, parts=said))

    def _parts(self, content: Content | None, asked: Sequence[str]) -> list[bytes]:
        """The `asked` parts of the registration and of the content, where known. A copy that was
        filled knows only the ids of its parts. Once the coordinator asks for such a part, the copy
        names no part any more; else the coordinator would ask for ever.
        """
        shard, found = self._context.shard, dict(content.parts) if content is not None else {}
        held = content.manifest if content is not None else None
        if held is not None:
            found |= said_parts(held)
        for manifest in (shard.manifest, held):
            if manifest is not None and not found.keys() >= set(asked):
                found |= shard.parts(manifest)
        if content is not None and not found.keys() >= set(asked).intersection(content.part_ids):
            content.part_ids = ()
        return [found[each] for each in asked if each in found]

    def restate_after(self, commit: OpKey) -> None:
        """Restate after a commit of an older membership: the coordinator may not know that this
        memory holds it.
        """
        if self._context.session.is_older(commit):
            self.restate()

    def not_kept(self) -> None:
        """The coordinator does not know the restated content: give it up. During `apply` restate it
        later instead.
        """
        if self.applying:
            self._restate_pending = True
        elif self.state is HandleState.READY and not self.fencing:
            number = self.version
            self._give_up_held(
                HandleState.EMPTY, "ordered out: the coordinator does not know that content"
            )
            self.given_up = number

    def set_retained(self, keep: bool, seq: int, content_id: str | None = None) -> None:
        """Mark the held content (if it has that id) as retained or not, and acknowledge it, unless
        it is being fenced.
        """
        content = self.staged if self.applying else self.content
        holds = self.applying or (self.state in HOLDING and not self.fencing)
        if content is not None and holds and content_id in (None, content.version.content_id):
            content.retained = keep
            self._context.say(
                RetainedAck(self._context.shard.registration, content.version.content_id, keep, seq)
            )

    def order_out(self, order: Revoked) -> None:
        """The coordinator has retired this content: give it up. Content that is being fenced or
        overwritten is left to its call; if that content is restated after all, the answer is that
        it is not kept.
        """
        if self.applying:
            self._restate_pending = True
            return
        held = self.content is not None and self.content.version.content_id == order.content_id
        if held and self.state is HandleState.READY and not self.fencing:
            self._give_up_held(HandleState.EMPTY, order.reason)

    def spoil(self) -> None:
        """The bytes have changed since they were published or verified (R8). A publisher keeps the
        memory until it unpublishes, and gets the error then. A replica gives its content up.
        """
        assert self.content is not None
        self.content.spoiled = True
        if (
            self.state is HandleState.READY
            and not self.content.published
            and not self.fencing
            and not self.applying
        ):
            self._give_up_held(HandleState.EMPTY, "its bytes have changed")

    def lose(self, *, reported: bool) -> None:
        """The coordinator has lost its state, and with it this content and the votes for it.

        The running call ends content that is being fenced, filled, torn or overwritten by a staged
        update. A host copy reports no loss, because it has no caller.
        """
        number = self.content.version.version if self.content is not None else None
        for content in (self.content, self.staged):
            if content is not None:
                content.former = True
        if self.applying:
            self._restate_pending = True
        elif self.state is HandleState.READY and not self.fencing:
            self._give_up_held(HandleState.EMPTY, "the coordinator has lost its state")
            self.given_up = number
        elif self.doubt is not None:
            self._lose_doubt()
        self.is_loss_unreported = (
            not reported and not self.is_host and self.state is not HandleState.CLOSED
        )

    def _lose_doubt(self) -> None:
        intact, why = (
            self.staged is not None or self.publishes,
            "in doubt, and the coordinator has lost its state",
        )
        self.doubt = None
        if self.staged is not None:
            self.staged = None
            self._context.act(calls.FreeStaging())
        state = HandleState.EMPTY if intact else HandleState.TORN
        if self.content is not None:
            self._give_up_held(state, why)
        else:
            self._become(state, why)

    def loss_error(self) -> LeaseLost:
        """The error that reports this loss."""
        return LeaseLost(
            f"{self._context.title}: the coordinator has come back without its state, as a new "
            f"cluster: what was published, "
            "retained and pinned before is unknown to it, and nobody reads what this handle held. "
            "The next call goes on "
            "in the new cluster: publish anew, or fetch what it has (a state_dir keeps a "
            "coordinator's state)"
        )

    def _give_up_held(self, state: HandleState, why: str) -> None:
        """Give up the held content. The next call waits for its fence, so that no reader is left by
        then.
        """
        assert self.content is not None
        self.pending_fence = self.content.generation
        self._context.act(calls.Fence(self.content.generation))
        self.content = None
        self._become(state, why)

    def doubt_outcome(self, key: OpKey) -> None:
        """This rank has voted, and has not heard the outcome: the memory stays unchanged until the
        outcome is known (R6).
        """
        self.doubt = key
        if self.staged is None:
            self.content = self.voted
        self._become(HandleState.IN_DOUBT, "voted, outcome unknown")

    @property
    def publishes(self) -> bool:
        """Whether the operation in doubt is a publication: the coordinator mints its content id."""
        return (
            self.staged is None and self.content is not None and not self.content.version.content_id
        )

    def ask_outcome(self, *, vote: bool) -> None:
        """IN_DOUBT: ask for the outcome. `vote`: repeat the vote of a fill (the vote of a
        publication is restated).
        """
        assert self.doubt is not None
        rank = self._context.shard.rank
        if vote and not self.publishes:
            content = self.staged or self.content
            root, roots = (content.root, content.roots) if content is not None else (b"", ())
            self._context.say(Prepared(self.doubt, rank, root, roots))
        self._context.say(Resolve(self.doubt, rank))

    def resolve(self, outcome: Outcome) -> None:
        """The outcome of the operation that was in doubt."""
        self.doubt = None
        if self.staged is not None:
            self._resolve_staged(outcome)
            return
        assert self.content is not None
        if outcome.committed and outcome.version is not None:
            self.content.version = outcome.version
            self._become(HandleState.READY, "doubt resolved: committed")
            self.restate_after(outcome.key)
        else:
            self._give_up_held(
                HandleState.EMPTY if self.publishes else HandleState.TORN,
                "doubt resolved: aborted",
            )

    def _resolve_staged(self, outcome: Outcome) -> None:
        if outcome.committed:
            self.apply()
        elif self.content is not None:
            self._become(HandleState.READY, "doubt resolved: aborted; nothing was written")
            self.drop_staged()
        else:
            self._become(HandleState.EMPTY, "doubt resolved: aborted; nothing was written")
            self.drop_staged()

    @property
    def unfenced(self) -> int | None:
        """The generation of which the fence is awaited, for no call or for one that cannot be given
        up: content that was given up, or that committed content is to replace.
        """
        if self.applying and self.state is not HandleState.FILLING and self.content is not None:
            return self.content.generation
        return self.pending_fence

    def fence_stands(self) -> None:
        """The fence of the `unfenced` generation stands."""
        if self.applying:
            self._overwrite()
            return
        self.pending_fence = None
        # a fill that was asked for before may have begun meanwhile
        if self.is_host and self.content is None:
            self._context.act(calls.FreeMemory())

    # ----------------------------------------------------------------------------------------------
    # helpers

    def _become(self, state: HandleState, why: str) -> None:
        self.given_up, self.voted, self.fencing = None, None, False
        self.in_place = None
        self.become(state, self._context.cause, self._context.now, why)
        if state in HOLDING:
            self.in_place = self.content

    def check_invariants(self) -> None:
        """Raise InvariantBroken if the parts disagree."""
        is_in_doubt = self.state is HandleState.IN_DOUBT
        # it may hold nothing meanwhile
        staged_doubt = self.staged is not None and is_in_doubt
        is_there = (self.content is not None) == (self.state in WITH_CONTENT)
        demand(is_there or staged_doubt, "a state says whether there is content", self)
        in_place = self.content if self.version is not None else None
        demand(self.in_place is in_place, "what is in place has a version", self)
        is_told = (self.doubt is not None) == is_in_doubt
        demand(self.applying or is_told, "a state says whether there is a doubt", self)
        holds = self.state in HOLDING
        demand(holds or not self.fencing, "what is fenced is held", self)
