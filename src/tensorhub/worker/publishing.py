"""A rank's publish: it opens the memory and says so. The coordinator decides whether that counts
(R6).
"""

from __future__ import annotations

from tensorhub.errors import StateError, shown, some
from tensorhub.layouts.views import without_shape
from tensorhub.machine import InvariantBroken
from tensorhub.messages import Publish
from tensorhub.types import HandleState, VersionInfo
from tensorhub.worker.active_call import GroupCall
from tensorhub.worker.calls import PublishCall
from tensorhub.worker.coverage import Coverage
from tensorhub.worker.member_context import MemberContext
from tensorhub.worker.member_memory import MemberMemory
from tensorhub.worker.registration_session import Shard
from tensorhub.worker.states import PUBLISH_TABLE, Phase


def check_has_shapes(shard: Shard) -> None:
    """Raise StateError if a view does not say how large its whole tensor is: readers could not tell
    what it holds.
    """
    if shard.declared is not None and (unknown := without_shape(shard.declared.sources)):
        names = list(dict.fromkeys(unknown.values()))
        each_of = "each of " if len(names) > 1 else ""
        raise StateError(
            f"{shard.title} cannot be published: sources= does not say how large "
            f"{each_of}{some(list(map(shown, names)))} is as a whole; register it with "
            f"source({shown(names[0])}, shape=...)"
        )


def torn(title: str) -> StateError:
    """Why this memory is not published."""
    return StateError(
        f"{title} is torn: it holds parts of several versions, so it cannot be published. update() "
        f"repairs it; or write all of it anew, say so by unpublish(), and publish then",
        memory="torn",
    )


class Publishing(GroupCall[PublishCall]):
    """Votes when it starts. Then the coordinator may ask it to check what all ranks publish
    together.
    """

    machine, table, what = "publish", PUBLISH_TABLE, "publish"
    unbound = Phase.VOTED

    def __init__(
        self, call: PublishCall, context: MemberContext, memory: MemberMemory, timeout_s: float
    ) -> None:
        super().__init__(call, context, memory, timeout_s)
        self.coverage = Coverage(context, self)
        self._lineage: int | None = None  # in which it began, as far as it was heard of
        self._is_repeated = False

    def check_allowed(self) -> None:
        super().check_allowed()
        if self._memory.version is not None:
            text = f"{self._context.title} holds version {self._memory.version}, which is published"
            raise StateError(f"{text}: unpublish() first, or use mutate()")
        if self._memory.state is HandleState.TORN:
            raise torn(self._context.title)
        check_has_shapes(self._context.shard)

    def start(self) -> None:
        """The promise begins here."""
        self.former = self._context.session.untaken
        self._take_key()
        self._lineage = self._context.session.lineage
        self._memory.promise(self._call.version, self.generation)
        self.enter(Phase.VOTED)
        self._say_call()

    def _say_call(self) -> None:
        shard, left_s = self._context.shard, max(0.0, self.deadline - self._context.now)
        self._context.say(
            Publish(
                self.operation,
                shard.rank,
                shard.registration,
                self._call.version,
                self.generation,
                left_s,
                self._lineage if self._is_repeated else None,
                self.former,
            )
        )

    def _say_phase_again(self) -> None:
        if self.phase is Phase.VOTED:
            self._say_call()

    @property
    def may_check(self) -> bool:
        """No reader reads the version before the result of the check is known."""
        return self.phase is Phase.VOTED

    def waits_for(self, request: int) -> bool:
        return super().waits_for(request) or self.coverage.waits_for(request)

    def _may_be_committed(self) -> bool:
        return True

    def unheard_of(self, error: Exception) -> None:
        """Repeat the call under a new key, unless the model was rolled back. Other ranks may know
        of an end of their calls that the new coordinator does not know. So it names its former
        keys: it counts only with calls that had one of them, and still run. A coordinator of the
        release before tells of no lineage, and understands neither: there a repeat could join a
        later call of another rank.
        """
        if self._lineage is None or self._context.session.lineage is None:
            self.aborted(error)
            return
        self._is_repeated = True
        self._take_key()
        self._say_call()

    def committed(self, version: VersionInfo) -> None:
        self._context.session.lineage = version.lineage
        self._memory.publish(version)
        self._finish_committed(version)

    def aborted(self, error: Exception) -> None:
        self._memory.break_promise()
        self.finish(error=error)

    def _give_up(self, error: Exception) -> None:
        match self.phase:
            case Phase.VOTED:
                self.error = error
                self.enter(Phase.ABANDONING)
                self._abandon(error)
            case Phase.ABANDONING:
                self._doubt(error)
            case _:
                raise InvariantBroken(
                    f"{self} is in no phase of a publish. Story:\n{self._memory.story}"
                )
