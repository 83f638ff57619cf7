"""`tensorhub doctor`: which transports work on this machine, why a transport does not, what deltas
cost, and how many workers may connect.
"""

from __future__ import annotations

import json
import resource
from dataclasses import asdict

from tensorhub import deltas
from tensorhub.cli.common import JsonOption
from tensorhub.cli.descriptors import descriptors
from tensorhub.cuda import cupy_device
from tensorhub.errors import TensorHubError
from tensorhub.protocol.certificates import open_certificates, resolve_tls
from tensorhub.transport import cma, pace, unix
from tensorhub.transport.built_in import TRANSPORTS
from tensorhub.transport.nixl import agents as nixl
from tensorhub.transport.rdma import ports as rdma
from tensorhub.transport.registry import Local
from tensorhub.types import Incarnation, Options


def _tls() -> str:
    try:
        certificates = open_certificates(resolve_tls(None))
        return "off" if certificates is None else f"on, with {certificates.tls.cert}"
    except TensorHubError as error:
        return f"cannot be used: {error}"


def doctor(as_json: JsonOption = False) -> None:
    """List the transports that work on this machine, best first; then those that do not, each with
    its reason and advice.

    Two workers use the best transport that both have and that connects them; a fetch's report names
    it (`report.sources`). See docs/transports.md. The last lines say how fast deltas are applied
    here (docs/deltas.md), whether the environment names files for TLS, and for how many workers
    `tensorhub serve` has room.
    """
    faults = TRANSPORTS.probe(Local(Incarnation("doctor"), (b"",), Options()))
    if faults["cuda_ipc"] is None:  # workers look no closer before they have a GPU's tensor
        faults["cuda_ipc"] = cupy_device.fault_here()
    ports = rdma.find_ports()
    limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    memlock_bytes = None if limit_bytes == resource.RLIM_INFINITY else limit_bytes
    notes = {
        "cuda_ipc": f"for tensors on a GPU, outside of torch's expandable segments; "
        f"{unix.given_to()}",
        "shm": f"for tensors that tensorhub.shared_empty_like has made; {unix.given_to()}",
        "cma": cma.restriction(),
        "rdma": rdma.memlock_note(),
        "nixl": f"NIXL {nixl.version()}; used by workers that name it in transports= only",
        "archive": "for readers with Options.direct, of archived versions only",
    }
    rows = [
        {"name": name, "available": fault is None, "reason": fault or notes.get(name) or ""}
        for name, fault in faults.items()
    ]
    room, tls = descriptors(), _tls()
    no_deltas = deltas.fault_here()
    codec_rate = pace.rate_here() if no_deltas is None else None
    if as_json:
        shown = [asdict(port) | {"gid": rdma.gid_text(port.gid)} for port in ports]
        print(
            json.dumps(
                {
                    "transports": rows,
                    "rdma_ports": shown,
                    "memlock_bytes": memlock_bytes,
                    "deltas": {
                        "available": no_deltas is None,
                        "reason": no_deltas or "",
                        "codec_bytes_per_s": codec_rate,
                        "pay_below_bytes_per_s": codec_rate and pace.WORTH * codec_rate,
                    },
                    "coordinator": asdict(room),
                    "tls": tls,
                }
            )
        )
        return
    for row in rows:
        verdict = "available" if row["available"] else "not available"
        print(f"{row['name']}: {verdict}{': ' if row['reason'] else ''}{row['reason']}")
    for port in ports:
        print(
            f"RDMA port {port}: {port.link}, {port.state}, {port.gbits:g} "
            f"Gb/s{': ' if port.fault else ''}{port.fault}"
        )
    if ports:
        print(
            f"memory that may be registered: "
            f"{'unlimited' if memlock_bytes is None else f'{memlock_bytes} bytes'}"
        )
    if codec_rate is None:
        print(f"deltas: not available: {no_deltas}")
    else:
        print(
            f"deltas: available: applied at {codec_rate / 2**30:.1f} GiB/s by a thread, where "
            f"1.5 % of the words change; they pay over connections slower than "
            f"{8 * pace.WORTH * codec_rate / 1e9:.1f} Gbit/s"
        )
    print(f"TLS: {tls}")
    print(f"a coordinator: room for {room.room}{': ' if room.advice else ''}{room.advice}")
