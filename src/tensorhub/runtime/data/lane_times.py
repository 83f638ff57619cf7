"""What reading from one source cost its reader: the seconds of a lane's threads, as observers are
told them.
"""

from __future__ import annotations

from tensorhub.messages import Grant
from tensorhub.observed import LinkTiming
from tensorhub.runtime.data.thread_time import Spent


def link_timing(
    grant: Grant,
    transport: str,
    kind: str,
    nbytes: int,
    seconds: float,
    spent: Spent,
    digest_s: float,
    codec_s: float,
    *,
    on_device: bool,
) -> LinkTiming:
    """`digest_s`, `codec_s`: by the clock, so with a part of the delays; here it is left out.
    `on_device`: a device makes the digests, and the thread only waits for it.
    """
    link_s, cpu_s = spent.blocked_s, spent.cpu_s
    share = cpu_s / max(cpu_s + spent.delay_s + spent.gil_s, 1e-9)
    codec_s = min(cpu_s, share * codec_s)
    if on_device:
        digest_s = min(link_s, digest_s)
        link_s -= digest_s
    else:
        digest_s = min(cpu_s - codec_s, share * digest_s)
        cpu_s -= digest_s
    return LinkTiming(
        grant.lease,
        grant.source,
        transport,
        kind,
        nbytes,
        seconds,
        link_s,
        spent.empty_s,
        cpu_s - codec_s,
        spent.delay_s,
        spent.gil_s,
        digest_s,
        codec_s,
        grant.location.site,
    )
