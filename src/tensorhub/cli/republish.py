"""`tensorhub republish`: a model's versions a second time, quantized once for all engines."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import anyio.to_thread
import typer

import tensorhub
from tensorhub import sync
from tensorhub.cli import common
from tensorhub.errors import LeaseLost, TensorHubError, VersionConflict
from tensorhub.types import Options, VersionInfo, check_name, printable

if TYPE_CHECKING:
    from tensorhub.integrations.quantized import Republisher

RETRY_S = 1.0  # before a version that could not be read is asked for again


def republish(
    model: Annotated[str, typer.Argument(help="The model to follow.")],
    target: Annotated[str, typer.Argument(help="The model to publish.")],
    quantization: Annotated[
        str,
        typer.Option(
            metavar="SCHEME",
            help="Of compressed-tensors (FP8_DYNAMIC, FP8_BLOCK, W4A16); or a config.json.",
        ),
    ],
    site: common.SiteOption = None,
    address: common.AddressOption = None,
    token_file: common.TokenFileOption = None,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Publish the versions of a model a second time, quantized, under the same numbers, until
    Ctrl-C or SIGTERM.

    It runs beside the trainer: engines then fetch half of the bytes, or a quarter. It needs the
    package compressed-tensors, and memory for two quantized copies. A version that is replaced
    before it is quantized is left out. One line goes to stdout for each version ({"model",
    "version", "bytes", "of_bytes", "seconds"} with --json). After the first line, SIGTERM is the
    ordinary way to stop it: exit code 0.
    """
    from tensorhub.integrations.quantized import Quantizer, quantization_config

    with common.checking():
        check_name("model", model)
        check_name("model", target)
        config = quantization_config(quantization)
        Quantizer(config)
        here = common.location(site)
    connect = common.connecting(address, token_file, Options())
    connect_blocking = partial(
        sync.connect, common.check_address(address), token=token_file, location=here
    )
    republishing = Republishing(model, target, config, connect, connect_blocking, as_json, quiet)
    logs = logging.ERROR if quiet else logging.WARNING
    common.run(republishing.run, logs=logs, sigterm_is_ordinary=lambda: republishing.has_begun)


@dataclass
class Republishing:
    model: str
    target: str
    config: dict[str, Any]
    connect: common.Connect
    connect_blocking: Callable[[], sync.Hub]
    as_json: bool
    quiet: bool
    has_begun: bool = False
    complaint: str = ""  # said last: a retry that fails alike says nothing

    async def run(self) -> int:
        from tensorhub.integrations.quantized import Republisher

        if not self.quiet:
            overrides = json.dumps({"quantization_config": self.config})
            text = f"start engines of {self.target} with --hf-overrides '{overrides}'"
            print(text, file=sys.stderr, flush=True)
        async with self.connect() as hub:
            if not self.quiet:
                await common.tell_if_unpublished(hub, self.model, "until it is")
            with self.connect_blocking() as blocking:
                republisher = Republisher(blocking, self.model, self.target, self.config)
                await self._follow(hub, republisher)
        return 0

    async def _follow(self, hub: tensorhub.Hub, republisher: Republisher) -> None:
        watcher = hub.watch(self.model)
        while True:
            try:
                info = await anext(watcher)
                while not await self._publish(republisher, info):
                    await anyio.sleep(RETRY_S)
                    info = hub.newest(self.model) or info
            except LeaseLost as error:  # the coordinator has no state_dir
                print(f"begins anew: {printable(str(error))}", file=sys.stderr, flush=True)

    async def _publish(self, republisher: Republisher, info: VersionInfo) -> bool:
        """False: not now; try again."""
        try:
            report = await anyio.to_thread.run_sync(
                republisher.publish, info.version, abandon_on_cancel=True
            )
        except LeaseLost:
            raise
        except VersionConflict as error:  # an earlier process has published it
            print(f"left out: {printable(str(error))}", file=sys.stderr, flush=True)
            return True
        except TensorHubError as error:
            if not error.retryable:
                raise
            complaint = f"not published yet: {printable(str(error))}"
            if complaint != self.complaint:
                print(complaint, file=sys.stderr, flush=True)
            self.complaint = complaint
            return False
        self.complaint = ""
        self.has_begun = True
        seconds = report.reclaim_s + report.convert_s + report.publish_s
        if self.as_json:
            said = {"model": self.target, "version": report.version, "bytes": report.nbytes}
            said |= {"of_bytes": info.nbytes, "seconds": round(seconds, 3)}
            print(json.dumps(said), flush=True)
        else:
            print(
                f"published {self.target} version {report.version} "
                f"({report.nbytes:,} of {info.nbytes:,} bytes, {seconds:.3f} s)",
                flush=True,
            )
        return True
