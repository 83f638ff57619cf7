"""How memory is registered, with a stand-in for pyverbs. Whether a device understands:
tests/rdma.
"""

from __future__ import annotations

import errno
import importlib.util
import mmap
import os
import sys
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tensorhub.transport.rdma import verbs
from tests.cuda.double import Double

NBYTES = 5000


class VerbsFault(Exception):
    """pyverbs' PyverbsError."""

    def __init__(self, code: int) -> None:
        super().__init__("it fails")
        self.error_code = code


class WithDmaBuf(Double):
    """Its memory begins 512 bytes into what each descriptor stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []

    def dma_buf(self, address: int, nbytes: int) -> tuple[int, int]:
        self.given.append(os.memfd_create("dma-buf"))
        return self.given[-1], address - 512


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is registered. A key "refused" of the first: which of both kinds are refused."""
    found: list[dict[str, Any]] = [{"refused": ()}]

    def registers(kind: str) -> Any:
        def register(domain: Any, nbytes: int, access: int, **named: Any) -> Any:
            if kind in found[0]["refused"]:
                raise VerbsFault(errno.EFAULT)
            if "dmabuf" in named:
                os.fstat(named["dmabuf"])  # it is open
            found.append({"kind": kind, "nbytes": nbytes, "access": access, **named})
            return SimpleNamespace(lkey=1, rkey=2, close=lambda: found.append({"kind": "close"}))

        return register

    context = SimpleNamespace(
        query_device=lambda: SimpleNamespace(max_qp_init_rd_atom=1, max_qp_rd_atom=1, max_qp_wr=1),
        close=lambda: found.append({"kind": "close device"}),
    )
    domain = SimpleNamespace(close=lambda: found.append({"kind": "close domain"}))
    stand_in = SimpleNamespace(
        device=SimpleNamespace(Context=lambda name: context),
        pd=SimpleNamespace(PD=lambda context: domain),
        mr=SimpleNamespace(MR=registers("address"), DmaBufMR=registers("dma-buf")),
        enums=SimpleNamespace(IBV_ACCESS_LOCAL_WRITE=1, IBV_ACCESS_REMOTE_READ=4),
        errors=SimpleNamespace(PyverbsError=VerbsFault),
    )
    monkeypatch.setattr(verbs, "verbs", lambda: stand_in)
    return found


class Memory:
    """See `verbs.Spanned`."""

    def __init__(self, device: Double) -> None:
        self.device = device
        self.spans = [(8192, NBYTES)]


def test_gpu_memory_is_registered_as_a_dma_buf(made: list[dict[str, Any]]) -> None:
    device = WithDmaBuf()
    keys = verbs.Registered("domain", Memory(device)).keys(9000, 10)
    assert made[1:] == [
        {"kind": "dma-buf", "nbytes": NBYTES, "access": 5, "dmabuf": device.given[0], "offset": 512}
    ]
    assert keys == verbs.Keys(1, 2, 512 - 8192)  # addresses begin with the dma-buf
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(device.given[0])


def test_gpu_memory_is_registered_by_its_address_where_that_is_known(
    made: list[dict[str, Any]],
) -> None:
    made[0]["refused"] = ("dma-buf",)
    for device in (Double(), WithDmaBuf()):
        assert verbs.Registered("domain", Memory(device)).keys(8192, NBYTES) == verbs.Keys(1, 2)
        assert made.pop() == {"kind": "address", "nbytes": NBYTES, "access": 5, "address": 8192}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(device.given[0])  # type: ignore[attr-defined]


def test_gpu_memory_that_cannot_be_reached_is_tried_once(made: list[dict[str, Any]]) -> None:
    made[0]["refused"] = ("dma-buf", "address")
    memory = Memory(WithDmaBuf())
    registered, gone = verbs.Registered("domain", memory), weakref.ref(memory)
    with pytest.raises(
        OSError,
        match=r"double:0 and this device do not reach each other \(dma-buf: .*; peer memory: .*\)",
    ):
        registered.keys(8192, 1)
    made[0]["refused"] = ()
    with pytest.raises(OSError, match="do not reach each other"):
        registered.keys(8192, 1)
    assert made[1:] == []
    del memory
    assert gone() is None  # no error keeps it


def kinds(made: list[dict[str, Any]]) -> list[str]:
    """What happened since the last time."""
    found = [each["kind"] for each in made[1:]]
    del made[1:]
    return found


def test_memory_is_deregistered_once_when_it_is_released(made: list[dict[str, Any]]) -> None:
    device, memory, other = verbs.Device("mlx5_0"), Memory(Double()), Memory(Double())
    for each in (memory, memory, other):
        device.keys(each, 8192, 1)
    assert kinds(made) == ["address", "address"]
    device.release(memory)
    device.release(memory)
    assert kinds(made) == ["close"]
    device.keys(memory, 8192, 1)
    assert kinds(made) == ["address"]


def test_a_device_ends_after_all_that_is_registered_there(made: list[dict[str, Any]]) -> None:
    device, memory = verbs.Device("mlx5_0"), Memory(Double())
    device.keys(memory, 8192, 1)
    page = mmap.PAGESIZE
    assert [device.page_key(at) for at in (page, page + 8, 2 * page)] == [2, 2, 2]
    assert kinds(made) == ["address"] * 3
    device.close()
    assert kinds(made) == ["close"] * 3 + ["close domain", "close device"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (VerbsFault(errno.ENOMEM), errno.ENOMEM),
        (VerbsFault(0), errno.EIO),
        (VerbsFault(-1), errno.EIO),
        (OverflowError("too much"), errno.EINVAL),
    ],
)
def test_an_error_of_verbs_is_one_of_the_system_and_names_the_attempt(
    made: list[dict[str, Any]], error: Exception, code: int
) -> None:
    with pytest.raises(OSError, match="ibv_reg_mr: ") as caught, verbs.named("ibv_reg_mr"):
        raise error
    assert caught.value.errno == code


def test_the_system_s_pyverbs_is_found_and_nothing_that_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "python{}.{}".format(*sys.version_info)
    for name, text in (("__init__", "is_run = True"), ("addr", "")):
        (place / "pyverbs").mkdir(parents=True, exist_ok=True)
        (place / "pyverbs" / f"{name}.py").write_text(text)
    (place / "beside_pyverbs.py").touch()
    monkeypatch.setattr(
        verbs, "_SYSTEM_PATHS", (f"{tmp_path}/missing", f"{tmp_path}/python{{0}}.{{1}}")
    )
    for name in ("pyverbs", "pyverbs.addr"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # it goes with the test
        del sys.modules[name]
    verbs._find_system_pyverbs()
    assert sys.modules["pyverbs"].is_run
    assert importlib.import_module("pyverbs.addr").__file__ == f"{place}/pyverbs/addr.py"
    assert importlib.util.find_spec("beside_pyverbs") is None
