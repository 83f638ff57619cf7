"""TensorHub: the trainer trains in place between two publications, and a rollout reads from whoever
has the version.

`options`: "prefetch" has a rollout update once the version is in its host memory; "seeds", once the
seed of its site has it; "deltas" gives trainer and rollouts memory for deltas.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.to_thread

import tensorhub
from benches.testbed.systems.base import Got, Phases, System as Base
from tensorhub.cli.seed import Seeder
from tensorhub.errors import TensorHubError

PORT = 7000
MODEL = "m"
POLL_S = 0.1  # how often a rollout with a seed looks whether that has a version
PATIENCE = 3.0  # copies over the WAN: a seed that has not got a version by then has died


class System(Base):
    async def open(self) -> None:
        setting = self.setting
        address = f"tcp://{setting.addresses['coordinator']}:{PORT}"
        if setting.role == "coordinator":
            serving = tensorhub.serve(
                host=setting.addresses["coordinator"], port=PORT, state_dir=setting.scratch
            )
            await self.stack.enter_async_context(serving)
            return
        self._place = tensorhub.Location(site=setting.site, host=setting.host)
        if setting.role == "seed":
            await self._seed(address)
            return
        # lines
        deltas = bool(setting.options.get("deltas"))
        room = 2 * setting.nbytes if setting.options.get("prefetch") or deltas else 0
        options = tensorhub.Options(
            chunk_bytes=setting.chunk_bytes,
            host_memory_bytes=room,
            deltas="auto" if deltas else "off",
        )
        connecting = tensorhub.connect(
            address, name=setting.name, location=self._place, options=options
        )
        self._hub = await self.stack.enter_async_context(connecting)
        spot = bool(setting.options.get("spot"))
        # end of lines
        sources = {
            name: tensorhub.source(name, shape=self.share.whole)[self.share.part]
            for name in self.share.tensors
        }
        group = {
            "group": setting.group,
            "rank": setting.group_rank,
            "world_size": setting.group_size,
            "sources": sources,
        }
        its: dict[str, Any] = group if setting.group_size > 1 else {}
        # lines
        self._weights = await self._hub.register(MODEL, self.share.tensors, spot=spot, **its)
        self._hub.newest(MODEL)  # begins to watch it
        # end of lines
        self._ready = 0

    async def _seed(self, address: str) -> None:
        def connect(**given: Any) -> Any:
            return tensorhub.connect(address, name=self.setting.name, **given)

        options = tensorhub.Options(host_memory_bytes=2 * self.setting.nbytes)
        seeder = Seeder(MODEL, None, options, self._place, connect, True, True)
        self._in_background(seeder.run())

    def _in_background(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.stack.callback(task.cancel)

    async def publish(self, version: int, write: Callable[[], None]) -> Phases:
        # lines
        began_s = time.monotonic()
        async with self._weights.mutate(version):
            writes_s = time.monotonic()
            await anyio.to_thread.run_sync(write)
            written_s = time.monotonic()
        # end of lines
        return {"wait": time.monotonic() - written_s + writes_s - began_s}

    def newest(self) -> int:
        # lines
        newest = self._hub.newest(MODEL)
        # end of lines
        if self._looks_ahead:
            return self._ready
        return -1 if newest is None else newest.version

    async def first(self) -> Got:
        got = await self.update()
        self._ready = got.version
        if self._looks_ahead:
            self._in_background(self._look_ahead())
        return got

    @property
    def _looks_ahead(self) -> bool:
        """Whether it updates to a version only once that is near."""
        return bool(self.setting.options.get("prefetch") or self.setting.options.get("seeds"))

    async def update(self) -> Got:
        began_s = time.monotonic()
        # lines
        report = await self._weights.update()
        # end of lines
        took_s, phases = time.monotonic() - began_s, report.phases
        transfer_s = phases.get("transfer", 0.0)
        copy_s = phases.get("verify", 0.0) + phases.get("unpack", 0.0)
        told = {"wait": took_s - transfer_s - copy_s, "transfer": transfer_s, "copy": copy_s}
        sources = {source.name: source.bytes_read for source in report.sources}
        return Got(report.version, told, sources, report.changed)

    async def _look_ahead(self) -> None:
        """Note each version once an update to it is a short one."""
        while True:
            with contextlib.suppress(TensorHubError):  # e.g. a newer version has taken its place
                info = await self._hub.wait_for(MODEL, at_least=self._ready + 1, timeout=3600)
                if self.setting.options.get("prefetch"):
                    report = await self._weights.prefetch()
                    self._ready = report.version
                else:
                    await self._until_seeded(info.version)
                    self._ready = info.version
                continue
            await anyio.sleep(POLL_S)

    async def _until_seeded(self, version: int) -> None:
        deadline_s = time.monotonic() + PATIENCE * self.setting.wan_s
        while time.monotonic() < deadline_s:
            model = await self._hub.describe(MODEL)
            here = {
                worker.name for worker in model.workers if worker.location.site == self.setting.site
            }
            for replica in model.replicas:
                at_home = any(shard.worker in here for shard in replica.shards)
                if replica.version >= version and replica.state == "ready" and at_home:
                    return
            await anyio.sleep(POLL_S)
