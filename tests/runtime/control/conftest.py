"""A real etcd server for each module that asks for one, and a prefix in it for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensorhub.runtime.control.etcd import Place
from tests.etcd_rig import Member, etcd_servers, place_at


@pytest.fixture(scope="module")
def member(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Member]:
    with etcd_servers(tmp_path_factory.mktemp("etcd")) as members:
        yield members[0]


@pytest.fixture
def place(member: Member) -> Place:
    return place_at(member)
