"""The demo's processes begin and end together."""

import anyio
import pytest

from tensorhub.cli.common import USAGE, CommandError
from tensorhub.cli.demo_crew import Crew, Event, hire
from tests.cli.processes import alive

BASE = ("--address", "tcp://127.0.0.1:1")
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # the command line's own


async def test_a_child_that_cannot_start_is_named_with_its_last_words() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with hire({"odd": ["juggler", "--name", "odd", *BASE]}, "secret") as crew:
            await crew.event(60)
    assert caught.group_contains(CommandError, match="odd ended with exit code 2: .*invalid choice: 'juggler'")


async def test_a_weights_file_that_only_the_child_can_judge(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("weights") / "bad.safetensors"
    path.write_bytes(b"no")
    arguments = ["trainer", "--name", "trainer", *BASE, "--weights", str(path)]
    with pytest.raises(ExceptionGroup) as caught:
        async with hire({"trainer": arguments}, "secret") as crew:
            await crew.event(60)
    (error,) = caught.value.exceptions
    assert isinstance(error, CommandError)
    assert (error.kind, error.code) == ("usage", USAGE)
    assert str(error).startswith(f"{path} is not a safetensors file: ")


async def test_no_child_survives_the_end_of_the_block() -> None:
    async with hire({name: ["rollout", "--name", name, *BASE] for name in "ab"}, "secret") as crew:
        pids = [process.pid for process in crew.processes.values()]
        assert len(alive(pids)) == 2
        assert repr(crew) == "<Crew: 2 of 2 alive>"
    assert alive(pids) == []


async def test_silence_has_a_deadline() -> None:
    send, receive = anyio.create_memory_object_stream[Event](1)
    with send, receive, pytest.raises(CommandError, match=r"news for 0\.01 s"):
        await Crew(receive).event(0.01)
