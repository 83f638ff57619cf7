"""A process of a benchmark, as the benchmark sees it, and what makes it obey its pipe. Imports no
torch.
"""

import multiprocessing
import sys
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import anyio
import anyio.to_thread

REPLY_S = 180.0

Command = Callable[..., Awaitable[object]]
Commands = dict[str, Command]


class Remote:
    """A process, as the benchmark sees it."""

    def __init__(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=target, args=(theirs, *arguments), name=name, daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        theirs.close()

    def __repr__(self) -> str:
        return f"<Remote {self.name}: {'alive' if self._process.is_alive() else 'ended'}>"

    def tell(self, command: str, *arguments: object) -> None:
        self._pipe.send((command, *arguments))

    def hear(self) -> Any:
        """The answer to the oldest unanswered command; RuntimeError if it is an error, or does not
        come.
        """
        if not self._pipe.poll(REPLY_S):
            raise RuntimeError(f"{self.name} has not answered for {REPLY_S:g} s")
        try:
            good, answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.name} ended; its reason is above") from None
        if not good:
            raise RuntimeError(f"{self.name}: {answer}")
        return answer

    def ask(self, command: str, *arguments: object) -> Any:
        self.tell(command, *arguments)
        return self.hear()

    def kill(self) -> None:
        """As a machine's failure does."""
        self._process.kill()
        self.end()

    def end(self) -> None:
        self._pipe.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


async def obey(pipe: Connection, commands: Commands) -> None:
    """Do and answer what comes, until the pipe ends."""
    while True:
        try:
            command, *arguments = await anyio.to_thread.run_sync(pipe.recv)
        except (EOFError, ConnectionResetError):
            return
        try:
            answer = await commands[command](*arguments)
        except Exception as error:
            print(f"{command} failed: {error!r}", file=sys.stderr, flush=True)
            pipe.send((False, repr(error)))
        else:
            pipe.send((True, answer))
