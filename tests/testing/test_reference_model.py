"""The reference model alone: what it takes for possible, and what not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tensorhub.testing import GuaranteeBroken
from tensorhub.testing.sim.judges.reference_model import (
    Call,
    Pinning,
    Publishing,
    Reading,
    ReferenceModel,
    Retaining,
    RollingBack,
)
from tensorhub.types import AVAILABLE, LATEST, PREVIOUS, Selector, VersionInfo


def info(number: int, content_id: str = "") -> VersionInfo:
    return VersionInfo("actor", number, content_id or f"c{number}", 1, 1)


class Callers:
    """Calls that begin and end, in short."""

    def __init__(self, *published: int) -> None:
        self.model = ReferenceModel()
        for number in published:
            self.publish(number)

    def publishing(self, number: int, who: str = "trainer") -> Publishing:
        call = Publishing(who, number)
        self.model.begins(call)
        return call

    def publish(self, number: int, content_id: str = "", who: str = "trainer") -> None:
        self.model.published(self.publishing(number, who), info(number, content_id))

    def reading(
        self, selector: Selector = LATEST, at_least: int | None = None, holds: int | None = None
    ) -> Reading:
        call = Reading("reader", selector, at_least, info(holds) if holds is not None else None)
        self.model.begins(call)
        return call

    def read(self, number: int, selector: Selector = LATEST, content_id: str = "") -> None:
        self.model.read(self.reading(selector), info(number, content_id))

    def rolling_back(self, to: int) -> RollingBack:
        call = RollingBack("operator", to)
        self.model.begins(call)
        return call

    def rollback(self, to: int) -> None:
        self.model.rolled_back(self.rolling_back(to))

    def retaining(self, latest: int) -> Retaining:
        call = Retaining("operator", latest)
        self.model.begins(call)
        return call

    def retain(self, latest: int) -> None:
        self.model.retained(self.retaining(latest))

    def pin(self, number: int) -> Pinning:
        call = Pinning("evaluator", number)
        self.model.begins(call)
        self.model.pinned(call)
        return call

    def call(self) -> Call:
        call = Call("leaver")
        self.model.begins(call)
        return call


def impossible(match: str) -> pytest.RaisesExc[GuaranteeBroken]:
    return pytest.raises(GuaranteeBroken, match=match)


# -- latest, latest-1


def test_latest_is_the_newest_that_was_returned() -> None:
    users = Callers(1, 2)
    users.read(2)
    with impossible("selectors: reader asked for latest, and got 1"):
        users.read(1)


def test_latest_may_be_what_was_the_newest_at_any_moment_of_the_call() -> None:
    users = Callers(1)
    first, second = users.reading(), users.reading()
    users.publish(2)
    users.model.read(first, info(1))
    users.model.read(second, info(2))


def test_what_one_reader_has_seen_no_later_one_may_miss() -> None:
    users = Callers(1)
    users.publishing(2)  # which never returns
    users.read(1)
    users.read(2)
    with impossible("got 1"):
        users.read(1)


def test_what_nobody_publishes_is_never_seen() -> None:
    users = Callers(1)
    with impossible("publication numbers: .*version=2.* is seen, and nobody has published it"):
        users.read(2)


def test_a_publish_that_has_failed_is_seen_by_none_that_calls_later() -> None:
    users = Callers(1)
    call, early = users.publishing(2), users.reading(2)
    users.model.not_published(call)
    users.model.read(early, info(2))
    users = Callers(1)
    users.model.not_published(users.publishing(2))
    with impossible("nobody has published it"):
        users.read(2)


def test_the_one_before_the_newest_is_neither_the_newest_nor_older() -> None:
    users = Callers(1, 2, 3)
    users.read(2, PREVIOUS)
    for number in (1, 3):
        with impossible(f"asked for latest-1, and got {number}"):
            users.read(number, PREVIOUS)


def test_a_publish_of_which_nobody_has_heard_may_have_made_the_newest_the_one_before() -> None:
    users = Callers(1, 2)
    users.publishing(3)
    users.read(2, PREVIOUS)
    users.read(1, PREVIOUS)
    users.read(2)


# -- numbers


def test_published_numbers_grow() -> None:
    users = Callers(5)
    with impossible(
        "publication numbers: .*version=4.* was published although its number was not the largest"
    ):
        users.publish(4)


def test_a_smaller_number_may_have_been_published_before_a_larger_one_returned() -> None:
    users = Callers(1)
    smaller = users.publishing(2)
    users.publish(3, who="other")
    users.model.published(smaller, info(2))


def test_a_number_that_is_seen_before_its_publish_returns_was_the_largest_too() -> None:
    users = Callers(2)
    users.publishing(1)
    with impossible(
        "publication numbers: .*version=1.* was published although its number was not the largest"
    ):
        users.read(1, 1)
    users = Callers()
    users.publishing(1, "other")
    users.publish(2)
    users.read(1, 1)  # the other's may have come first
    with impossible(
        "publication numbers: .*version=1.* was published although its number was not the largest"
    ):
        users.publish(1)


def test_a_number_is_published_once() -> None:
    users = Callers(1)
    with impossible("publication numbers"):
        users.publish(1, "another")


def test_a_number_is_refused_only_where_it_was_or_may_have_been_used() -> None:
    users = Callers(2)
    for number in (1, 2):
        users.model.not_published(users.publishing(number), taken=True)
    with impossible(
        "publication numbers: trainer may not publish 3, and nothing stands in its way"
    ):
        users.model.not_published(users.publishing(3), taken=True)
    users.publishing(4, "other")
    users.model.not_published(users.publishing(3), taken=True)


def test_a_groups_own_call_stands_in_its_way_only_once_nobody_waits_for_it() -> None:
    users = Callers(1)
    first = users.publishing(2)
    with impossible("nothing stands in its way"):
        users.model.not_published(users.publishing(2), taken=True)
    first.left = True
    users.model.not_published(users.publishing(2), taken=True)


# -- other selectors


def test_a_number_is_what_was_asked_for_and_is_there() -> None:
    users = Callers(1, 2, 3)
    users.read(1, 1)
    with impossible("reader asked for 1, and got 2"):
        users.read(2, 1)
    users.rollback(1)
    with impossible("visibility: reader asked for 3, and got 3, which was not there"):
        users.read(3, 3)


def test_at_least_is_at_least_that() -> None:
    users = Callers(1)
    with impossible("selectors: .* got 1, not at least 2"):
        users.model.read(users.reading(LATEST, at_least=2), info(1))


def test_available_may_be_older_than_the_newest_but_not_than_what_is_held() -> None:
    users = Callers(1, 2, 3)
    users.model.read(users.reading(AVAILABLE, holds=1), info(2))
    with impossible("selectors: reader asked for available, and got 1, and held 2"):
        users.model.read(users.reading(AVAILABLE, holds=2), info(1))
    users.rollback(1)
    users.model.read(users.reading(AVAILABLE, holds=2), info(1))


def test_it_is_not_denied_that_a_number_is_there() -> None:
    users = Callers(1, 2)
    users.model.denied(users.reading(3), 3)
    with impossible("selectors: reader was told that there is no 1, which there is"):
        users.model.denied(users.reading(1), 1)
    users.publish(3)
    users.model.denied(users.reading(1), 1)  # it may be forgotten by now


@pytest.mark.parametrize(
    "keep", [lambda users: users.retain(3), lambda users: users.pin(1)], ids=["retained", "pinned"]
)
def test_what_must_stay_is_not_forgotten(keep: Callable[[Callers], None]) -> None:
    users = Callers(1, 2)
    keep(users)
    users.publish(3)
    with impossible("there is no 1, which there is"):
        users.model.denied(users.reading(1), 1)


# -- rollback


def test_after_a_rollback_the_newest_is_an_older_one_and_numbers_are_free_again() -> None:
    users = Callers(1, 2)
    users.rollback(1)
    users.read(1)
    with impossible("nothing stands in its way"):
        users.model.not_published(users.publishing(2), taken=True)
    users.publish(2, "another")
    users.read(2, content_id="another")
    with impossible("got 2"):
        users.read(2)


def test_while_a_rollback_runs_either_may_be_the_newest() -> None:
    users = Callers(1, 2)
    call = users.rolling_back(1)
    users.read(2)
    users.read(1)
    users.model.not_published(users.publishing(3), taken=True)
    users.model.rolled_back(call)
    with impossible("got 2"):
        users.read(2)


def test_a_rollback_that_is_refused_changes_nothing() -> None:
    users = Callers(1, 2)
    users.model.not_rolled_back(users.rolling_back(1))
    with impossible("got 1"):
        users.read(1)
    users.model.not_rolled_back(users.rolling_back(3), beyond=True)
    with impossible("durable mark: operator may not roll back to 2, which was published"):
        users.model.not_rolled_back(users.rolling_back(2), beyond=True)


def test_what_is_seen_after_a_rollback_that_may_have_struck_it_surely_is_there_again() -> None:
    users = Callers(1)
    call = users.rolling_back(1)
    users.publish(2)
    users.model.rolled_back(call)
    users.read(1)  # 2 may have come first
    users.read(2)
    with impossible("got 1"):
        users.read(1)


def test_a_coordinator_without_its_state_begins_anew() -> None:
    users = Callers(1, 2)
    users.retain(2)
    users.pin(1)
    users.model.state_lost()
    users.publish(1, "another")
    users.read(1, content_id="another")
    assert not users.model.must_stay(users.call())
    with impossible("got 2"):
        users.read(2)


# -- the newest, as it is announced


def test_news_may_be_late_but_never_go_back() -> None:
    users = Callers()
    users.model.listens("hub")
    users.model.announced("hub", None)
    for number in (1, 2, 3):
        users.publish(number)
    users.model.announced("hub", info(1))
    users.model.announced("hub", info(3))
    for older in (info(2), None):
        with impossible("visibility: hub was told that"):
            users.model.announced("hub", older)


def test_news_are_not_older_than_the_listener() -> None:
    users = Callers(1, 2)
    users.model.listens("hub")
    with impossible("which it is not, or is no more"):
        users.model.announced("hub", info(1))


def test_news_that_a_publish_is_about_to_return_never_go_back() -> None:
    users = Callers()
    users.model.listens("hub")
    users.publishing(1)
    users.model.announced("hub", info(1))
    with impossible("None is the newest"):
        users.model.announced("hub", None)


def test_news_go_back_by_a_rollback_only() -> None:
    users = Callers()
    users.model.listens("hub")
    users.publish(1)
    users.publish(2)
    users.model.announced("hub", info(2))
    users.rollback(1)
    users.model.announced("hub", info(1))
    with impossible("visibility"):
        users.model.announced("hub", None)


def test_after_a_rollback_the_newest_may_be_one_that_nobody_remembers() -> None:
    users = Callers(1, 2)
    users.model.announced("hub", info(2))
    users.rollback(1)
    users.model.announced("hub", None)


def test_what_nobody_remembers_may_be_newer_than_what_was_heard_last() -> None:
    users = Callers(1, 2, 3)
    users.model.announced("hub", info(1))
    users.rollback(2)
    users.model.announced("hub", None)


def test_a_rollback_that_is_not_over_may_strike_what_comes_back_unseen() -> None:
    users = Callers(1)
    users.publishing(2)  # a record of it is found, and no caller has heard of it
    users.rolling_back(1)
    users.model.state_lost()
    for found in (info(1), info(2)):
        users.model.restored(found)
    users.model.announced("hub", info(2))
    users.model.announced("hub", info(1))


def test_a_rollback_that_an_older_state_has_lost_takes_nothing_away() -> None:
    """Its caller hears that it is done when the state has gone back already."""
    users = Callers(1, 2)
    rollback = users.rolling_back(1)
    users.model.state_lost()
    for found in (info(1), info(2)):
        users.model.restored(found)
    users.model.rolled_back(rollback)
    users.model.listens("hub")
    users.model.announced("hub", info(2))


# -- what must stay


def test_the_newest_ones_must_stay_while_every_retain_that_may_count_says_so() -> None:
    users = Callers(1, 2, 3)
    assert not users.model.must_stay(users.call())
    users.retain(2)
    leaver = users.call()
    assert users.model.must_stay(leaver) == {"c2", "c3"}
    fewer = users.retaining(1)
    assert users.model.must_stay(leaver) == {"c3"}  # it may count already
    users.model.not_retained(fewer, unknown=False)
    assert users.model.must_stay(leaver) == {"c2", "c3"}
    users.retain(0)
    users.retain(2)
    assert not users.model.must_stay(leaver)  # for a while nothing had to
    assert users.model.must_stay(users.call()) == {"c2", "c3"}


def test_a_retain_without_an_answer_may_count_until_a_later_one_is_done() -> None:
    users = Callers(1)
    users.retain(1)
    lost = users.retaining(0)
    users.model.not_retained(lost, unknown=True)
    users.call()
    assert not users.model.must_stay(users.call())
    users.retain(1)
    assert users.model.must_stay(users.call()) == {"c1"}


def test_a_retain_without_an_answer_may_count_for_nothing() -> None:
    users = Callers(1)
    users.retaining(1)
    assert not users.model.must_stay(users.call())


def test_a_newer_version_lets_an_older_one_go_from_the_begin_of_its_publish() -> None:
    users = Callers(1)
    users.retain(1)
    leaver = users.call()
    call = users.publishing(2)
    assert not users.model.must_stay(leaver)
    users.model.published(call, info(2))
    assert users.model.must_stay(users.call()) == {"c2"}


def test_a_pin_counts_from_its_return_to_its_end() -> None:
    users = Callers(1, 2)
    leaver = users.call()
    pin = users.pin(1)
    assert not users.model.must_stay(leaver)
    leaver = users.call()
    assert users.model.must_stay(leaver) == {"c1"}
    users.rollback(0)
    assert not users.model.must_stay(leaver)
    users.model.unpinned(pin)
    users.publish(1, "another")
    assert not users.model.must_stay(users.call())


def test_a_pin_that_crosses_a_rollback_may_keep_what_was_there_before() -> None:
    users = Callers(1)
    pin = Pinning("evaluator", 1)
    users.model.begins(pin)
    users.rollback(0)
    users.publish(1, "another")
    users.model.pinned(pin)
    assert not users.model.must_stay(users.call())
