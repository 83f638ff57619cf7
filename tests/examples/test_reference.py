"""Every public name has an example, and every example runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import partial

import anyio.to_thread
import pytest

import tensorhub
from examples.reference import EXAMPLES, RAISES, Example
from tensorhub import sync
from tests.rig import begin_store, nothing_left


def public_names() -> Iterator[str]:
    for prefix, module in (("", tensorhub), ("sync.", sync)):
        for name in module.__all__:
            yield prefix + name
            thing = getattr(module, name)
            if inspect.isclass(thing) and thing.__module__.endswith(
                ("hub", "sync", "fetched", "weights")
            ):
                yield from (
                    f"{prefix}{name}.{member}"
                    for member in vars(thing)
                    if not member.startswith("_")
                )


@pytest.mark.parametrize("name", sorted(public_names()))
def test_every_public_name_has_an_example(name: str) -> None:
    assert name in EXAMPLES, f"examples/reference.py: add @shows({name!r})"


@pytest.mark.parametrize(
    "example", [pytest.param(e, id=e.__name__) for e in dict.fromkeys(EXAMPLES.values())]
)
async def test_examples_run(example: Example, tmp_path: object) -> None:
    wanted = inspect.signature(example).parameters
    begin_store()
    async with nothing_left(), AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(tensorhub.serve(token=""))
        given: dict[str, object] = {"address": coordinator.address, "tmp_path": tmp_path}
        for name in ("trainer", "rollout"):
            if name in wanted:
                given[name] = await stack.enter_async_context(
                    tensorhub.connect(coordinator.address, name=name)
                )
        run = partial(example, **{name: given[name] for name in wanted})
        if example in RAISES:
            with pytest.raises(BaseException) as caught:  # noqa: PT011 - looked at below
                await run()
            assert isinstance(leaf(caught.value), RAISES[example])
        elif inspect.iscoroutinefunction(example):
            await run()
        else:
            await anyio.to_thread.run_sync(run)


def leaf(error: BaseException) -> BaseException:
    """The error itself, out of a task group's."""
    return leaf(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
