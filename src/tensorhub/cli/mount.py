"""`tensorhub mount`: versions as a directory."""

from __future__ import annotations

import json
import logging
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import anyio
import anyio.to_thread
import typer

from tensorhub.cli import common
from tensorhub.types import check_name

if TYPE_CHECKING:
    from tensorhub.fs import TensorHubFileSystem
    from tensorhub.fs.mounting import Mount

POLL_S = 0.25  # how often the mount is looked at: another process may unmount it


def mount(
    model: Annotated[
        str, typer.Argument(metavar="MODEL[@VERSION]", help="A model, or one version of it.")
    ],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="An empty directory to mount it at.")
    ],
    files: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also show the files of this directory, such as a configuration and a tokenizer; "
            "not its weights.",
        ),
    ] = None,
    cache: Annotated[
        int, typer.Option(parser=common.size, metavar="SIZE", help="Memory for fetched bytes.")
    ] = 2**30,
    timeout: Annotated[
        float,
        common.seconds_option(0.1, math.inf, help="A read that takes longer fails."),
    ] = 60.0,
    allow_other: Annotated[
        bool, typer.Option("--allow-other", help="Other users may read it, too.")
    ] = False,
    address: common.AddressOption = None,
    token_file: common.TokenFileOption = None,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Mount a model's versions as a directory, read-only, until Ctrl-C or SIGTERM.

    With @VERSION (a number, latest, latest-1 or available) DIR is that version's directory, and
    stays that version. Without it, DIR has a directory for each version that can be fetched now,
    and the link "latest" to the newest. Any loader of safetensors files reads them; bytes come from
    the memory of the workers that hold the version, verified. A read fails with EIO if nothing
    arrives within --timeout, and with ESTALE if the version cannot be fetched any more. It needs
    the extra "mount", libfuse, and /dev/fuse. One line goes to stdout when it is mounted ({"model",
    "version", "directory"} with --json). From then on SIGTERM is the ordinary way to stop it: exit
    code 0.
    """
    name, _, version = model.rpartition("@") if "@" in model else (model, "", "")
    with common.checking():
        check_name("model", name)
        _check_empty(directory)
        common.check_token_file(token_file)
        from tensorhub.fs import TensorHubFileSystem

        fs = TensorHubFileSystem(
            common.check_address(address),
            token_file=token_file,
            files=files,
            timeout=min(timeout, 1e8),
            cache_bytes=cache,
            skip_instance_cache=True,
        )
        from tensorhub.fs import mounting as _  # noqa: F401 - it may be missing
    mounter = Mounter(fs, name, version, directory, allow_other, as_json, quiet)
    logs = logging.ERROR if quiet else logging.WARNING
    common.run(mounter.run, logs=logs, sigterm_is_ordinary=lambda: mounter.is_mounted)


def _check_empty(directory: Path) -> None:
    """A usage error unless it can be mounted at: it is empty, or a killed process has left it."""
    try:
        is_empty = not any(directory.iterdir())
    except OSError as error:
        from tensorhub.fs.mountpoints import is_stale

        if is_stale(error):
            return
        raise
    from tensorhub.fs.mountpoints import check_free

    check_free(directory)
    if not is_empty:
        raise common.usage(f"{directory} is not empty: give an empty directory")


@dataclass
class Mounter:
    fs: TensorHubFileSystem
    model: str
    version: str
    directory: Path
    allow_other: bool
    as_json: bool
    quiet: bool
    is_mounted: bool = False

    async def run(self) -> int:
        mount: Mount | None = None
        try:
            mount = await anyio.to_thread.run_sync(self._mount)
            self.is_mounted = True
            while mount.is_mounted:  # noqa: ASYNC110 - another process may unmount it
                await anyio.sleep(POLL_S)
        finally:
            with anyio.CancelScope(shield=True):
                if mount is not None:
                    await anyio.to_thread.run_sync(mount.unmount)
                await anyio.to_thread.run_sync(self.fs.close)
        return 0

    def _mount(self) -> Mount:
        from tensorhub.fs.mounting import Files, Mount

        path, version, what = quote(self.model, safe=""), None, ""
        try:
            if self.version:
                version, _ = self.fs.version(f"{path}/{self.version}")
                what = f" version {version.info.version}"
            else:
                self.fs.info(path)
        except FileNotFoundError as error:
            raise error.__cause__ or error from None
        mount = Mount(Files(self.fs, path, version), self.directory, allow_other=self.allow_other)
        number = None if version is None else version.info.version
        said = {"model": self.model, "version": number, "directory": str(self.directory)}
        text = f"mounted {self.model}{what} at {self.directory}"
        print(json.dumps(said) if self.as_json else text, flush=True)
        if not (self.quiet or self.as_json):
            print("Ctrl-C unmounts it", file=sys.stderr, flush=True)
        return mount
