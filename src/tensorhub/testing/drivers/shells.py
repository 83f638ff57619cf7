"""When the shells of simulated handles and workers go on, in virtual time, and what a trace shows of it.

A shell carries out its actions one by one. Between two actions its process may do something else first. Not responsible
for the effect of an action (`sim.handle`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tensorhub.testing.drivers.timeline import Timeline
from tensorhub.testing.sim.ports import HandlePort, SimWorkerPort
from tensorhub.worker.calls import Fence, Say

GAP = 0.1  # how often a shell does something else between two actions


class Shells:
    """All shells of one world: its driver."""

    fence_grace_s = 1.0

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._touched: dict[HandlePort, None] = {}
        self._doing: set[HandlePort] = set()  # whose next action is on its way; never iterated over
        self._wakes: dict[object, float] = {}  # when the deadline of which machine will be looked at

    # -- telling

    def note(self, line: str) -> None:
        self._timeline.note(line)

    def took(self, path: str) -> None:
        self._timeline.paths[path] += 1

    # -- what is to be checked

    def touch(self, handle: HandlePort) -> None:
        """Have it checked after this event."""
        self._touched[handle] = None

    def take_touched(self) -> Iterable[HandlePort]:
        """The handles to check now."""
        if not self._touched:
            return ()
        touched, self._touched = self._touched, {}
        return touched

    # -- going on

    def handle_moved(self, handle: HandlePort) -> None:
        self._touched[handle] = None
        if handle.interpreter.has_more:
            self._do_soon(handle, 0.0)
        self._wake_in_time(handle)

    def _wake_in_time(self, handle: HandlePort) -> None:
        self.wake_at(handle.member.next_deadline(), handle, handle.worker, lambda: self._tick(handle))

    def _tick(self, handle: HandlePort) -> None:
        self._touched[handle] = None
        handle.apply(handle.member.tick(self._timeline.now))

    def wake_at(self, due: float | None, machine: object, worker: SimWorkerPort, tick: Callable[[], None]) -> None:
        if due is not None and self._wakes.get(machine) != due:
            self._wakes[machine] = due
            self._timeline.at(max(due, self._timeline.now), worker, self._wake, machine, due, tick)

    def _wake(self, machine: object, due: float, tick: Callable[[], None]) -> None:
        if self._wakes.get(machine) == due:
            del self._wakes[machine]
            tick()

    def _do_soon(self, handle: HandlePort, seconds: float) -> None:
        if handle not in self._doing:
            self._doing.add(handle)
            self._timeline.after(seconds, handle.worker, self._do, handle)

    def _do(self, handle: HandlePort) -> None:
        """Its shell carries out its actions, up to one that takes time."""
        self._doing.discard(handle)
        self._touched[handle] = None
        todo = handle.todo
        while handle.interpreter.has_more:
            action, left = todo[0] if todo else None, len(todo)
            handle.do_next()
            self._wake_in_time(handle)
            if todo and todo[0] is action and len(todo) >= left:
                return  # it takes time, and whoever ends it comes back here
            if todo and not isinstance(action, Say) and self._timeline.random.random() < GAP:
                self._do_soon(handle, self._timeline.wake())
                return

    def fence_begun(self, handle: HandlePort, fence: Fence) -> None:
        self._timeline.after(self.fence_grace_s, handle.worker, self._fence_again, handle)
        if fence.until is not None:
            self._timeline.at(max(fence.until, self._timeline.now), handle.worker, self._fence_again, handle)

    def _fence_again(self, handle: HandlePort) -> None:
        self.access_ended(handle)

    def access_ended(self, handle: HandlePort) -> None:
        if handle.fencing_since is not None:
            self._do_soon(handle, 0.0)
