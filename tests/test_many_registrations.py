"""Several registrations in one process: two sets of one model that take turns, and several models
behind one hub.
"""

from __future__ import annotations

from tests.rig import cluster, holds, tensors, write


async def test_a_trainer_publishes_from_one_set_and_writes_the_other() -> None:
    async with cluster("trainer", "reader") as c:
        sets = [tensors(), tensors()]
        weights = [
            await c.hubs[0].register("m", each, group=f"set{at}") for at, each in enumerate(sets)
        ]
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
