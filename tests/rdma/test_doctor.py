"""`tensorhub doctor` shows what there is."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tensorhub.cli.app import app

pytestmark = pytest.mark.rdma


def test_the_devices_and_the_transport_are_shown() -> None:
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    usable = [port for port in found["rdma_ports"] if not port["fault"]]
    assert usable
    assert all(port["state"] == "ACTIVE" for port in usable)
    assert [row["available"] for row in found["transports"] if row["name"] == "rdma"] == [True]
