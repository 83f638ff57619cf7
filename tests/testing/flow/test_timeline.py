"""What is due when, in which order, and until when."""

from __future__ import annotations

from tensorhub.testing.flow.timeline import Timeline


def test_what_is_due_at_one_moment_is_done_in_the_order_in_which_it_was_said_and_settled_once() -> (
    None
):
    timeline, done = Timeline(), list[object]()
    timeline.settled = lambda: done.append(timeline.now)
    timeline.at(2.0, lambda: done.append("late"))
    timeline.at(1.0, lambda: done.append("first"))
    timeline.at(1.0, lambda: timeline.after(0.0, lambda: done.append("of the second")))
    timeline.run(10.0)
    assert done == ["first", "of the second", 1.0, "late", 2.0]


def test_what_is_past_is_due_at_once_and_time_never_goes_back() -> None:
    timeline, times = Timeline(), list[float]()
    timeline.at(5.0, lambda: None)
    timeline.run(10.0)
    timeline.at(1.0, lambda: times.append(timeline.now))
    timeline.run(10.0)
    assert (times, timeline.now) == ([5.0], 5.0)


def test_it_ends_at_its_time_or_when_it_is_over() -> None:
    timeline, done = Timeline(), list[float]()
    for when in (1.0, 2.0, 3.0, 4.0):
        timeline.at(when, lambda: done.append(timeline.now))
    timeline.run(2.0)
    assert done == [1.0, 2.0]
    timeline.run(10.0, lambda: len(done) == 3)
    assert done == [1.0, 2.0, 3.0]
