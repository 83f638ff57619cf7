"""`--tls-cert`, `--tls-key` and `--tls-ca`, which each command has that connects or serves."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from tensorhub.cli.common import checking

_HELP = {
    "cert": "This process' certificate, for TLS; --tls-key and --tls-ca belong to it.",
    "key": "The key of --tls-cert.",
    "ca": "The authorities that sign the cluster's certificates.",
}
# as in `protocol.certificates`, which help does not import
_VARIABLES = {name: f"TENSORHUB_TLS_{name.upper()}" for name in _HELP}


def _option(name: str) -> inspect.Parameter:
    how = typer.Option(envvar=_VARIABLES[name], metavar="FILE", help=_HELP[name])
    return inspect.Parameter(
        f"tls_{name}",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, how],
    )


def with_tls(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with these options, if it has `token_file`."""
    signature = inspect.signature(command, eval_str=True)
    if "token_file" not in signature.parameters:
        return command

    @functools.wraps(command)
    def wrapped(*arguments: Any, **options: Any) -> None:
        given = {variable: options.pop(f"tls_{name}") for name, variable in _VARIABLES.items()}
        with _in_environment({variable: path for variable, path in given.items() if path}):
            command(*arguments, **options)

    parameters = [*signature.parameters.values(), *map(_option, _HELP)]
    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return wrapped


@contextlib.contextmanager
def _in_environment(given: dict[str, str]) -> Iterator[None]:
    """Have the environment name these files: `connect`, `serve` and child processes look there. A
    usage error if they cannot be used now.
    """
    before = {variable: os.environ.get(variable) for variable in given}
    os.environ |= given
    try:
        if given:
            from tensorhub.protocol.certificates import open_certificates, resolve_tls

            with checking():
                open_certificates(resolve_tls(None))
        yield
    finally:
        for variable, path in before.items():
            os.environ.pop(variable)
            if path is not None:
                os.environ[variable] = path
