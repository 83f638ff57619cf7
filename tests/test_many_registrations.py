"""Several registrations in one process: two sets of one model that take turns, and several models behind one hub."""

from __future__ import annotations

import anyio

from tests.rig import cluster, connect, gated, holds, tensors, until, write


async def test_a_trainer_publishes_from_one_set_and_writes_the_other() -> None:
    async with cluster("trainer", "reader") as c:
        sets = [tensors(), tensors()]
        weights = [await c.hubs[0].register("m", each, group=f"set{at}") for at, each in enumerate(sets)]
        mine = tensors()
        replica = await c.hubs[1].register("m", mine)
        for version in range(1, 6):
            at = version % 2
            if weights[at].state == "ready":
                await weights[at].unpublish()
            write(sets[at], version)  # while the other set is published, and may be read
            await weights[at].publish(version)
            await replica.update()
            assert holds(mine, version)
            if version > 1:
                assert weights[1 - at].version == version - 1
                assert (await c.hubs[1].fetch("m", "latest-1")).info.version == version - 1


async def test_one_set_serves_while_the_other_is_filled() -> None:
    with gated(3) as gate:
        async with cluster("relay") as c:
            relay = c.hubs[0]
            gate.open()
            async with connect(c.address, "trainer") as trainer, connect(c.address, "reader") as reader:
                one, two, source, mine = tensors(), tensors(), tensors(1), tensors()
                published = await trainer.register("m", source)
                await published.publish(1)
                first, second = [await relay.register("m", each, group=name) for name, each in (("1", one), ("2", two))]
                await first.replicate()
                async with published.mutate(2):
                    write(source, 2)
                gate.close(3)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(second.replicate)
                    await until(lambda: gate.holds)
                    assert (first.state, second.state) == ("ready", "filling")
                    fetched = reader.fetch("m", 1)  # from the first set, by a worker whose reads nobody holds
                    gate.open()
                    assert (await fetched).report.sources[0].name == "relay"
                assert (first.version, second.version) == (1, 2)
                assert holds(one, 1)
                assert holds(two, 2)
                replica = await reader.register("m", mine)
                await replica.replicate()
                assert holds(mine, 2)
                await first.update()  # over loopback, from the other set or the trainer
                assert holds(one, 2)
