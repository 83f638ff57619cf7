"""`tensorhub doctor`: each transport with what is in its way."""

from __future__ import annotations

import json
import resource
import sys

import pytest
from typer.testing import CliRunner

from tensorhub import deltas
from tensorhub.cli.app import app
from tensorhub.cuda import cupy_device
from tensorhub.transport import archive, cma, pace, unix
from tensorhub.transport.nixl import agents as nixl
from tensorhub.transport.rdma import ports as rdma
from tensorhub.transport.rdma.ports import Port

NO_RDMA = "not available: this machine has no RDMA device (nothing is in /sys/class/infiniband)"
NO_NIXL = (
    "nixl: not available: NIXL 1.1 or newer is needed (import of nixl._api halted; None in "
    "sys.modules): "
    "pip install 'tensorhub-ros[nixl]'"
)
DELTAS = (
    "deltas: available: applied at 4.0 GiB/s by a thread, where 1.5 % of the words change; they "
    "pay over connections slower than 24.1 Gbit/s"
)
TLS = "TLS: off"
ROOM = "a coordinator: room for 16,384 workers"
ARCHIVE = "for readers with Options.direct, of archived versions only"
SHARED = f"for tensors that tensorhub.shared_empty_like has made; {unix.given_to()}"


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["doctor", *arguments])
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(autouse=True)
def _nothing_special(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cma, "restriction", lambda: None)
    monkeypatch.setattr(rdma, "find_ports", lambda wanted=None, *_: [])
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda kind: (1024 if kind == resource.RLIMIT_NOFILE else 2**20, 2**20),
    )
    monkeypatch.setattr(archive, "find_spec", lambda name: name)
    monkeypatch.setattr(cupy_device, "missing", lambda: "no cupy")
    monkeypatch.setattr(deltas, "fault_here", lambda: None)
    monkeypatch.setattr(pace, "rate_here", lambda: 4.0 * 2**30)


@pytest.fixture(autouse=True)
def _no_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)


@pytest.mark.skipif(cma.fault_here() is not None, reason=str(cma.fault_here()))
def test_what_works() -> None:
    assert run().splitlines() == [
        "cuda_ipc: not available: no cupy",
        f"shm: available: {SHARED}",
        "cma: available",
        f"rdma: {NO_RDMA}",
        NO_NIXL,
        f"archive: available: {ARCHIVE}",
        "tcp: available",
        DELTAS,
        TLS,
        ROOM,
    ]
    assert json.loads(run("--json")) == {
        "transports": [
            {"name": "cuda_ipc", "available": False, "reason": "no cupy"},
            {"name": "shm", "available": True, "reason": SHARED},
            {"name": "cma", "available": True, "reason": ""},
            {"name": "rdma", "available": False, "reason": NO_RDMA.partition(": ")[2]},
            {
                "name": "nixl",
                "available": False,
                "reason": NO_NIXL.partition(": not available: ")[2],
            },
            {"name": "archive", "available": True, "reason": ARCHIVE},
            {"name": "tcp", "available": True, "reason": ""},
        ],
        "rdma_ports": [],
        "memlock_bytes": 2**20,
        "deltas": {
            "available": True,
            "reason": "",
            "codec_bytes_per_s": 2**32,
            "pay_below_bytes_per_s": pytest.approx(0.7 * 2**32),
        },
        "tls": "off",
        "coordinator": {"hard": 2**20, "sessions": 16_384, "needed": 20_608},
    }


def test_without_the_extra_there_are_no_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "fault_here", lambda: "deltas need numpy")
    assert run().splitlines()[-3] == "deltas: not available: deltas need numpy"
    assert json.loads(run("--json"))["deltas"] == {
        "available": False,
        "reason": "deltas need numpy",
        "codec_bytes_per_s": None,
        "pay_below_bytes_per_s": None,
    }


def test_how_many_workers_may_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    # of which a quarter is for pending connections
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    assert run().splitlines()[-1] == (
        "a coordinator: room for 640 workers (`ulimit -Hn` is 1024): raise it to 20608 for 16,384 "
        "(LimitNOFILE= in systemd, --ulimit nofile= for containers)"
    )
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    assert run().splitlines()[-1] == ROOM


def test_a_gpu_is_looked_at_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_device, "missing", lambda: None)
    for fault, said in (
        ("no driver", "not available: no driver"),
        (None, "available: for tensors on a GPU"),
    ):
        monkeypatch.setattr(cupy_device, "fault_here", lambda fault=fault: fault)
        assert run().splitlines()[0].startswith(f"cuda_ipc: {said}")


def test_rdma_ports_are_shown_also_if_they_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gid = bytes(10) + b"\xff\xff\x0a\x00\x00\x01"
    found = [
        Port("mlx5_0", 1, "ethernet", 3, gid, 100.0, "ACTIVE"),
        Port(
            "mlx5_1",
            1,
            "infiniband",
            0,
            bytes(16),
            400.0,
            "DOWN",
            "the port is DOWN: check its cable",
        ),
    ]
    monkeypatch.setattr(rdma, "find_ports", lambda wanted=None, *_: found)
    assert run().splitlines()[7:] == [
        "RDMA port mlx5_0:1:3 (10.0.0.1): ethernet, ACTIVE, 100 Gb/s",
        "RDMA port mlx5_1:1:0 (::): infiniband, DOWN, 400 Gb/s: the port is DOWN: check its cable",
        "memory that may be registered: 1048576 bytes",
        DELTAS,
        TLS,
        ROOM,
    ]
    shown = json.loads(run("--json"))["rdma_ports"]
    assert [(port["device"], port["gid"], port["fault"]) for port in shown] == [
        ("mlx5_0", "10.0.0.1", ""),
        ("mlx5_1", "::", found[1].fault),
    ]


@pytest.mark.nixl
@pytest.mark.skipif(nixl.version() is None, reason="NIXL is not installed")
def test_nixl_is_shown_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert f"nixl: available: NIXL {nixl.version()}; used by workers that name it" in run()
