"""A cluster that is shut down completely, and starts again from a bucket at the exact version.

    python -m examples.restart_from_bucket [URL]

Without a URL, a directory stands for the bucket.
"""

import sys
import tempfile

import anyio
import torch

import tensorhub

OPTIONS = tensorhub.Options(host_memory_bytes=2**26)


async def train(url: str) -> dict[str, torch.Tensor]:
    """Five versions, of which the archive keeps each. Returns the last."""
    weights = {"w": torch.zeros(1000, 1000, dtype=torch.bfloat16)}
    async with (
        tensorhub.serve() as coordinator,
        tensorhub.connect(coordinator.address, options=OPTIONS) as archiver,
        tensorhub.connect(coordinator.address) as trainer,
        tensorhub.archive(archiver, "actor", url) as there,
    ):
        handle = await trainer.register("actor", weights)
        for version in range(1, 6):
            async with handle.mutate(version):
                weights["w"][version] += 0.5
            await there.wait_for(at_least=version)
        for each in there.versions:
            print(f"version {each.version}: {each.stored_bytes:,} of {each.nbytes:,} bytes")
    return weights


async def restart(url: str) -> dict[str, torch.Tensor]:
    """A new coordinator, which knows nothing, and no trainer."""
    async with (
        tensorhub.serve() as coordinator,
        tensorhub.connect(coordinator.address, options=OPTIONS) as archiver,
        tensorhub.archive(archiver, "actor", url, serve=True),
        tensorhub.connect(coordinator.address) as trainer,
    ):
        fetched = await trainer.fetch("actor", 5)
        print(
            f"restarted at version {fetched.info.version}, {fetched.report.bytes_read:,} bytes read"
        )
        weights = dict(fetched)
        handle = await trainer.register("actor", weights)
        await handle.publish(6)  # training goes on
    return weights


async def main(url: str) -> None:
    before = await train(url)
    after = await restart(url)
    assert torch.equal(before["w"], after["w"])
    print("equal, bit for bit")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        anyio.run(main, sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as directory:
            anyio.run(main, f"file://{directory}")
