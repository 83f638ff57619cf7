"""How messages, calls and values are shown in a trace: as short as its reader wants them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum

from tensorhub.messages import ErrorInfo, Grant
from tensorhub.types import OpKey, VersionInfo

UNTOLD = {
    "manifest",
    "manifest_id",
    "endpoints",
    "location",
    "layout_id",
    "pid",
    "request",
    "nbytes",
    "chunks",
    "spot",
}
UNTOLD |= {
    "medium",
    "purpose",
    "registration",
    "incarnation",
    "cluster",
    "retryable",
    "world_size",
    "known",
    "staged",
}
UNTOLD |= {"shard", "serves", "host_bytes", "manifest_ids", "release", "term"}
TOLD_IF_ANY = {"publication", "origin", "selection", "in_lineage", "former"}
TRIVIAL: tuple[object, ...] = (None, False, (), b"")


def show(value: object) -> str:
    """A message, call or value in one line."""
    match value:
        case OpKey():
            return f"{value.group}@{show_epoch(value.epoch)}#{value.sequence}"
        case VersionInfo():
            return f"v{value.version}/{value.content_id}"
        case Grant():
            filling = "" if value.complete else ", filling"
            return f"{value.lease}:{value.source}({value.generation}{filling})"
        case ErrorInfo():
            return f"{value.kind}({value.message!r})"
        case Enum():
            return str(value.value)
        case tuple():
            return f"[{', '.join(map(show, value))}]"
        case float():
            return f"{value:g}"
        case int() if value >= 1 << 32:
            return show_epoch(value)
        case _ if is_dataclass(value) and not isinstance(value, type):
            told = [(f.name, getattr(value, f.name)) for f in fields(value) if f.name not in UNTOLD]
            told = [(name, item) for name, item in told if item or name not in TOLD_IF_ANY]
            words = [
                f"{name}={show(item)}" for name, item in told if not any(item is t for t in TRIVIAL)
            ]
            return " ".join([type(value).__name__, *words])
        case _:
            return str(value)


def show_epoch(epoch: int) -> str:
    """A group's epoch: which coordinator minted it, and as which of its own."""
    return f"{epoch >> 32}.{epoch & 0xFFFFFFFF}"


def show_error(error: BaseException | None) -> str:
    """An error with its text and what it says of the memory."""
    return (
        "ok"
        if error is None
        else f"{type(error).__name__}({error}) memory={getattr(error, 'memory', '?')}"
    )
