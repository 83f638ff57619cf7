"""Names of transports: order, entry points, and errors that list what there is."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from typing import cast

import pytest

from tensorhub.errors import TransportUnavailable
from tensorhub.transport import registry
from tensorhub.transport.base import Transport
from tensorhub.transport.registry import Local, Registry, TransportFactory
from tensorhub.types import Incarnation, Options

LOCAL = Local(Incarnation("i"), (b"",), Options())


def made(name: str) -> TransportFactory:
    return lambda local: cast(Transport, name)


def missing(local: Local) -> Transport:
    raise TransportUnavailable("install rdma-core")


def third_party(local: Local) -> Transport:
    return cast(Transport, "third")


@pytest.fixture
def known() -> Registry:
    return Registry({"rdma": missing, "cma": made("cma"), "tcp": made("tcp")})


def named(made: object) -> object:
    """The factories here make names, which are enough to tell them apart."""
    return made


def test_all_that_work_best_first(known: Registry) -> None:
    assert known.names() == ("rdma", "cma", "tcp")
    assert named(known.make(LOCAL)) == ("cma", "tcp")


def test_only_the_wanted_in_their_order(known: Registry) -> None:
    assert named(known.make(LOCAL, ["tcp", "cma", "tcp"])) == ("tcp", "cma")


def test_what_works_and_why_the_rest_does_not(known: Registry) -> None:
    assert known.probe(LOCAL) == {"rdma": "install rdma-core", "cma": None, "tcp": None}


@pytest.mark.parametrize(
    ("wanted", "says"),
    [(["udp"], "there are rdma, cma, tcp"), (["rdma"], "install"), ([], "no transport is allowed")],
)
def test_what_there_is_not(known: Registry, wanted: list[str], says: str) -> None:
    with pytest.raises(TransportUnavailable, match=says):
        known.make(LOCAL, wanted)


def test_what_is_only_used_by_name(known: Registry) -> None:
    known = Registry({"nixl": made("nixl"), **known.built_in}, only_by_name={"nixl"})
    assert known.names() == ("nixl", "rdma", "cma", "tcp")
    assert named(known.make(LOCAL)) == ("cma", "tcp")
    assert named(known.make(LOCAL, ["nixl", "tcp"])) == ("nixl", "tcp")
    assert known.probe(LOCAL)["nixl"] is None


def test_none_at_all() -> None:
    with pytest.raises(TransportUnavailable, match="none is known"):
        Registry({}).make(LOCAL)


def test_third_parties_come_through_entry_points(
    known: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = registry.ENTRY_POINT_GROUP
    points = EntryPoints(
        [
            EntryPoint("third", f"{__name__}:third_party", group),
            EntryPoint("broken", "no_such_module:x", group),
        ]
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    assert known.names() == ("rdma", "cma", "tcp", "broken", "third")
    assert named(known.make(LOCAL, ["third"])) == ("third",)
    with pytest.raises(TransportUnavailable, match=r"'broken'.*cannot be loaded"):
        known.make(LOCAL, ["broken"])
