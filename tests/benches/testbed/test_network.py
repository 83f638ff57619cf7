"""Networks are made as they were asked for, and nothing is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benches.testbed import network
from benches.testbed.network import Host, Network, Wan
from tests.cli.processes import eventually

HOSTS = [Host("a", "near", 100.0), Host("b", "near", 100.0), Host("c", "far", 50.0)]
WAN = Wan(25.0, 20.0)


def inside(net: Network, host: str, *command: str) -> str:
    return subprocess.run(
        [*net.prefix(host), *command], capture_output=True, text=True, check=True, timeout=20
    ).stdout


def spaces() -> set[str]:
    """All network namespaces in which there is a process, or that this process holds."""
    found = set[str]()
    for link in [*Path("/proc").glob("[0-9]*/ns/net"), *Path("/proc/self/fd").iterdir()]:
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("net:"):
            found.add(target)
    return found


@pytest.fixture
def can_be_made() -> None:
    if (reason := network.why_not()) is not None:
        pytest.skip(reason)


def of(net: Network) -> set[str]:
    """Those of this network."""
    return {os.readlink(net.path(name)) for name in ("near", "far", "a", "b", "c")}


@pytest.mark.root
@pytest.mark.usefixtures("can_be_made")
def test_hosts_reach_each_other_and_nothing_is_left() -> None:
    with Network(HOSTS, WAN) as net:
        made = of(net)
        assert len(made) == len(HOSTS) + 2  # and one for each site's bridge
        assert made <= spaces()
        assert "root rate 100Mbit" in inside(net, "a", "tc", "class", "show", "dev", "eth0")
        net.set_mbit("a", 10.0)
        assert "root rate 10Mbit" in inside(net, "a", "tc", "class", "show", "dev", "eth0")
        hear = (
            "import socket; l = socket.create_server(('', 7)); print('on', flush=True); "
            "print(l.accept()[0].recv(9))"
        )
        server = subprocess.Popen(
            [*net.prefix("c"), sys.executable, "-c", hear], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        assert server.stdout.readline() == "on\n"
        say = (
            f"import socket; socket.create_connection(({net.address('c')!r}, 7), "
            f"10).sendall(b'across')"
        )
        inside(net, "a", sys.executable, "-c", say)  # over the WAN
        assert server.communicate(timeout=20)[0] == "b'across'\n"
    eventually(lambda: not made & spaces())
    named = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout
    assert "testbed" not in named


@pytest.mark.root
@pytest.mark.usefixtures("can_be_made")
def test_a_link_is_shared_by_who_reads() -> None:
    """Each address has a queue of its own, at the host for whom it sends to, and behind it for whom
    it hears from.
    """
    with Network(HOSTS, WAN) as net:
        out, into = (
            inside(net, *where, "tc", "-s", "filter", "show", "dev", device)
            for where, device in ((("a",), "eth0"), (("near",), "to-0"))
        )
        # of the destination, and of the source, in an IP packet
        for text, offset in ((out, 16), (into, 12)):
            for address in ("0ad50001", "0ad50002", "0ad50101"):
                assert f"match {address}/ffffffff at {offset}" in text
