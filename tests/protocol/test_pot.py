"""Room for large frames: taken before they are received, in order, and given back whatever
happens.
"""

from __future__ import annotations

import anyio
import anyio.lowlevel

from tensorhub.protocol.pot import Pot


async def settle() -> None:
    for _ in range(10):
        await anyio.lowlevel.checkpoint()


async def test_who_asks_first_is_served_first_however_much_it_asks_for() -> None:
    pot, order = Pot(100), list[int]()

    async def take(nbytes: int) -> None:
        await pot.take(nbytes)
        order.append(nbytes)

    await pot.take(60)
    async with anyio.create_task_group() as tasks:
        for nbytes in (100, 10, 20):
            tasks.start_soon(take, nbytes)
            await settle()
        assert (order, pot.free) == ([], 40)
        pot.give_back(60)
        await settle()
        assert (order, pot.free) == ([100], 0)
        pot.give_back(100)
    assert (sorted(order), pot.free) == ([10, 20, 100], 70)


async def test_who_is_cancelled_takes_nothing_and_keeps_nobody_waiting() -> None:
    pot = Pot(100)
    await pot.take(60)
    async with anyio.create_task_group() as tasks:
        first = anyio.CancelScope()

        async def give_up() -> None:
            with first:
                await pot.take(70)

        tasks.start_soon(give_up)
        await settle()
        tasks.start_soon(pot.take, 40)
        await settle()
        assert pot.free == 40
        first.cancel()
    assert pot.free == 0


async def test_who_is_cancelled_as_its_turn_comes_gives_it_back() -> None:
    pot = Pot(100)
    await pot.take(100)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pot.take, 100)
        await settle()
        pot.give_back(100)
        tasks.cancel_scope.cancel()
    assert pot.free in (0, 100)  # it had it by then, or has given it back
    assert "0 waiting" in repr(pot)
