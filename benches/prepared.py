"""Child interpreters that have imported already: a server forks them, because a small child costs
little but its imports.

Where `prepared` is installed, `subprocess.Popen` of this Python with `-c` or `-m` is such a fork.
The fork is a process like any other: a child of this process, with the descriptors, the directory,
the environment and the limit of descriptors that it would have. It runs the program in `__main__`,
with modules that nobody has used yet, and ends as an interpreter ends. Its priority, namespaces and
signal handlers are the server's. Every other command is started as ever, and so is whatever a child
starts. What a program imports cannot be seen here: see tests/test_lazy_imports.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benches.child_processes import _GOES_ON

SERVER = "import benches.prepared; exec(*benches.prepared.serve())"
ROOT = Path(__file__).parents[1]
PR_SET_CHILD_SUBREAPER = 36
_LENGTH_BYTES = 4


# --------------------------------------------------------------------------------------------------
# the parent's side


_Popen = subprocess.Popen


class _Server:
    """A process that has imported `modules` and forks itself when it is asked to."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._one_at_a_time = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", SERVER, str(theirs.fileno()), *self._modules]
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            }
            self._process = _Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
            )

    def start(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """The process id of a child of this process that does so, with these as its standard input,
        output and error.
        """
        body = json.dumps(request).encode()
        with self._one_at_a_time, _adopting():
            try:
                socket.send_fds(
                    self._channel, [len(body).to_bytes(_LENGTH_BYTES, "big")], descriptors
                )
                self._channel.sendall(body)
                return int.from_bytes(_exactly(self._channel, _LENGTH_BYTES), "big")
            except (
                BaseException
            ):  # such as a test's deadline: the next request would be given this one's answer
                self._channel.close()
                self._process.kill()
                self._process.wait()
                self._begin()
                raise


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Whoever loses its parent meanwhile becomes a child of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


_execute_child = _Popen._execute_child  # type: ignore[attr-defined]
_PARAMETERS = inspect.signature(_execute_child)


def _request(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a server is asked for instead of this start; None if it must be a new interpreter."""
    command, environment = (
        list(given["args"]) if isinstance(given["args"], list | tuple) else [],
        given["env"],
    )
    environment = dict(os.environ if environment is None else environment)
    if (
        given["preexec_fn"]
        or given["pass_fds"]
        or given["shell"]
        or command[:1] != [sys.executable]
    ):
        return None
    if _for_python(environment) != _for_python(os.environ):
        return None
    # how the harness begins, before it becomes the command behind it
    goes_on = command[1:4] == ["-IS", "-c", _GOES_ON]
    command = command[4:] if goes_on and command[4:5] == [sys.executable] else command
    warns = command[1:3] == ["-W", "error"]
    how, what, *arguments = [*command[3 if warns else 1 :], "", ""]
    if how not in ("-c", "-m"):
        return None
    return {
        how: what,
        "arguments": arguments[:-2],
        "warns": warns,
        "goes_on": goes_on,
        "environment": environment,
        "directory": os.path.abspath(given["cwd"] or "."),
        "session": given["start_new_session"],
        "group": given["process_group"],
        "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE),
    }


def _for_python(environment: Mapping[str, str]) -> dict[str, str]:
    """What an interpreter reads before its program does; where it looks for modules, and how it
    hashes, is the server's.
    """
    others = ("PYTHONPATH", "PYTHONHASHSEED")
    return {
        name: value
        for name, value in environment.items()
        if name.startswith("PYTHON") and name not in others
    }


@functools.cache
def popen(*modules: str) -> type[subprocess.Popen[Any]]:
    """What takes the place of `subprocess.Popen`: its children have imported these modules."""
    server = _Server(modules)

    class Popen(_Popen[Any]):
        def _execute_child(self, *arguments: Any) -> None:
            given = _PARAMETERS.bind(self, *arguments).arguments
            request = _request(given)
            if request is None:
                _execute_child(self, *arguments)
                return
            theirs = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
            try:
                self.pid = server.start(
                    request, [n if each == -1 else each for n, each in enumerate(theirs)]
                )
                self._child_created = True
            finally:
                ours = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
                self._close_pipe_fds(*(given[name] for name in ours))  # type: ignore[attr-defined]

    return Popen


# --------------------------------------------------------------------------------------------------
# the child's side


def _exactly(channel: socket.socket, length: int) -> bytes:
    found = b""
    while len(found) < length:
        part = channel.recv(length - len(found))
        if not part:
            raise EOFError
        found += part
    return found


def serve() -> tuple[str, dict[str, Any]]:
    """In the server: returns at its end, with nothing to do. In each child: returns its program,
    and the globals of that.
    """
    channel = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.collect()
    # a child collects among its own objects, not in all modules; that takes it longest when it ends
    gc.freeze()
    while True:
        head, descriptors, _, _ = socket.recv_fds(channel, _LENGTH_BYTES, 3)
        if not head:
            return "", {}
        request = json.loads(_exactly(channel, int.from_bytes(head, "big")))
        wait, go = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork() != 0:
                os._exit(0)  # its child becomes one of who asked for it
            os.close(go)
            os.read(wait, 1)
            os.close(wait)
            return _prepared(request, channel, descriptors)
        os.close(wait)
        os.waitpid(between, 0)
        os.close(go)
        for each in descriptors:
            os.close(each)


def _prepared(
    request: dict[str, Any], channel: socket.socket, descriptors: Sequence[int]
) -> tuple[str, dict[str, Any]]:
    """In a child: be as was asked, and tell the parent. Its program and the globals of that, which
    nothing keeps alive.
    """
    if request["session"]:
        os.setsid()
    if request["group"] not in (None, -1):
        os.setpgid(0, request["group"])
    resource.setrlimit(resource.RLIMIT_NOFILE, request["descriptors"])
    for number, each in enumerate(descriptors):
        os.dup2(each, number)
        os.close(each)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["warns"]:
        warnings.simplefilter("error")
    sys.argv = ["-c", *request["arguments"]]
    if request["goes_on"]:
        exec(_GOES_ON.rpartition("os.execvp")[0], {})
    with channel:
        channel.sendall(os.getpid().to_bytes(_LENGTH_BYTES, "big"))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    module = request.get("-m", "")
    sys.modules.pop(module, None)
    run = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return request.get("-c", run), main.__dict__
