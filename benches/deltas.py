"""How small and how fast deltas between two versions of a real model are.

The model is all-MiniLM-L6-v2, trained in fp32 by AdamW with a policy gradient: 32 contexts of
random tokens, at each token an action from a softmax over the vocabulary (tied to the embeddings),
and a reward if the action is odd. A pair is two neighbouring steps as they are published: bf16,
fp32, or fp8 with a scale for each tensor. The learning rate decides how many words change.

`full / sent`: each tensor is cut into chunks of 8 MiB. `of bound`: how many bytes places and
differences take at least where they do not depend on one another, over the bytes sent. Speeds: full
bytes by the CPU seconds of one thread, all tensors in a row in chunks of 8 MiB, in turns with a copy
(memmove) and with zstd level 1 on the new bytes; `of copy` compares within a round. `2 threads`:
twice the wall seconds of one thread over those of two that do as much each; `copy` says what the
machine has to give.

    python -m benches deltas --lr 1e-6 3e-6 1e-5 1e-4 --rounds 15
"""

from __future__ import annotations

import argparse
import ctypes
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benches.comparison.facts import facts
from benches.one_to_n import spread
from tensorhub import deltas
from tensorhub.types import Options

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

CONTEXTS, TOKENS = 32, 16
STEPS = 31
LEARNING_RATES = (1e-6, 3e-6, 1e-5, 1e-4)
WIDTHS = {"bf16": 2, "fp32": 4, "fp8": 1}
FP8_MAX = 448.0
CHUNK = Options().chunk_bytes
WAYS = ("encode", "decode", "copy", "zstd-1")

Chunk = tuple[memoryview, memoryview]  # before, after


class Pair(NamedTuple):
    """Two neighbouring versions: the bytes of each tensor before and after."""

    tensors: list[Chunk]
    width: int  # bytes of a word

    def chunks(self) -> list[Chunk]:
        return [chunk for tensor in self.tensors for chunk in _cut(tensor)]

    def whole_chunks(self) -> list[Chunk]:
        """Without the rest."""
        base, new = (memoryview(b"".join(each)) for each in zip(*self.tensors, strict=True))
        return [chunk for chunk in _cut((base, new)) if chunk[1].nbytes == CHUNK]

    def differences(self) -> NDArray[np.unsignedinteger[Any]]:
        import numpy as np

        base, new = (
            np.frombuffer(b"".join(each), f"u{self.width}")
            for each in zip(*self.tensors, strict=True)
        )
        differences: NDArray[np.unsignedinteger[Any]] = new - base
        return differences


def _cut(tensor: Chunk) -> list[Chunk]:
    base, new = tensor
    cuts = [slice(start, start + CHUNK) for start in range(0, new.nbytes, CHUNK)]
    return [(base[cut], new[cut]) for cut in cuts]


# --------------------------------------------------------------------------------------------------
# training


def pairs_of(learning_rate: float, dtypes: Sequence[str], steps: int = STEPS) -> dict[str, Pair]:
    """Of the step after so many."""
    training = islice(training_of(learning_rate), steps, steps + 2)
    before, after = (
        {dtype: published([*parameters.values()], dtype) for dtype in dtypes}
        for parameters in training
    )
    return {
        dtype: Pair(list(zip(before[dtype], after[dtype], strict=True)), WIDTHS[dtype])
        for dtype in dtypes
    }


def training_of(learning_rate: float, contexts: int = CONTEXTS) -> Iterator[Mapping[str, Tensor]]:
    """The parameters, trained in place: before the first step, and after each."""
    import torch

    from examples.encoder import load

    torch.manual_seed(1)
    model: Any = load()
    model.train()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=learning_rate)
    while True:
        yield parameters
        _step(model, optimizer, contexts)


def _step(model: Any, optimizer: Any, contexts_each: int) -> None:
    import torch

    embeddings = model.embeddings.word_embeddings.weight
    contexts = torch.randint(len(embeddings), (contexts_each, TOKENS))
    hidden, mask = model.embeddings(contexts), torch.ones_like(contexts, dtype=torch.bool)
    for layer in model.encoder["layer"].children():
        hidden = layer(hidden, mask)
    says = torch.log_softmax(hidden @ embeddings.T, dim=-1).flatten(0, 1)
    actions = torch.multinomial(says.detach().exp(), 1)
    rewards = (actions % 2).float()
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    optimizer.zero_grad()
    torch.autograd.backward(-(advantages * says.gather(-1, actions)).mean())
    optimizer.step()


def published(parameters: Sequence[Tensor], dtype: str) -> list[memoryview]:
    """Copies of their bytes as they are published."""
    import torch

    found = []
    for parameter in parameters:
        value = parameter.detach()
        if dtype != "fp32":
            value = value.to(torch.bfloat16)
        if dtype == "fp8":
            scale = value.abs().max().float().clamp(min=1e-12) / FP8_MAX
            value = (value.float() / scale).to(torch.float8_e4m3fn)
        found.append(memoryview(value.contiguous().view(torch.uint8).numpy().tobytes()))
    return found


# --------------------------------------------------------------------------------------------------
# measuring


def sizes(pair: Pair) -> dict[str, Any]:
    """Each frame is applied, and the result compared."""
    import numpy as np

    full = sent = 0
    for base, new in pair.chunks():
        frame = deltas.encode(base, new, pair.width)
        full += new.nbytes
        sent += new.nbytes if frame is None else len(frame)
        if frame is not None:
            target = memoryview(bytearray(base))
            deltas.apply([frame], target)
            if target != new:
                raise AssertionError("a frame has made other bytes than the new ones")
    differences = pair.differences()
    _, counts = np.unique(differences, return_counts=True)
    bound = float(-(counts * np.log2(counts / differences.size)).sum() / 8)
    return {
        "changed %": round(100 * int(np.count_nonzero(differences)) / differences.size, 3),
        "full / sent": round(full / sent, 1),
        "of bound": round(bound / sent, 3),
    }


class Worker:
    """One thread's work, with targets of its own."""

    def __init__(self, pair: Pair) -> None:
        self.chunks, self.width = pair.whole_chunks(), pair.width
        self.frames = [deltas.encode(base, new, pair.width) for base, new in self.chunks]
        self.targets = [memoryview(bytearray(base)) for base, _ in self.chunks]
        self.news = [(ctypes.c_char * CHUNK).from_buffer_copy(new) for _, new in self.chunks]
        self.ways: dict[str, Callable[[], None]] = {
            "encode": self.encode,
            "decode": self.decode,
            "copy": self.copy,
            "zstd-1": self.zstd,
        }

    def encode(self) -> None:
        for base, new in self.chunks:
            deltas.encode(base, new, self.width)

    def decode(self) -> None:
        """Of the right base only the first time, which takes no other time."""
        for frame, target in zip(self.frames, self.targets, strict=True):
            if frame is not None:
                deltas.apply([frame], target)

    def copy(self) -> None:
        for new, target in zip(self.news, self.targets, strict=True):
            ctypes.memmove((ctypes.c_char * CHUNK).from_buffer(target), new, CHUNK)

    def zstd(self) -> None:
        import zstandard

        compressor = zstandard.ZstdCompressor(level=1)
        for _, new in self.chunks:
            compressor.compress(new)


def speeds(pair: Pair, rounds: int) -> dict[str, Any]:
    """The first round does not count."""
    workers = [Worker(pair), Worker(pair)]
    gib = len(workers[0].chunks) * CHUNK / 2**30
    rates, scaling = {way: list[float]() for way in WAYS}, {way: list[float]() for way in WAYS}
    for round_ in range(rounds + 1):
        for way in WAYS if round_ % 2 else WAYS[::-1]:
            began, cpu = time.perf_counter(), time.thread_time()
            workers[0].ways[way]()
            one, cpu = time.perf_counter() - began, time.thread_time() - cpu
            two = _together([worker.ways[way] for worker in workers])
            if round_:
                rates[way].append(gib / cpu)
                scaling[way].append(2 * one / two)
    row: dict[str, Any] = {f"{way} GiB/s": spread(rates[way]) for way in WAYS}
    for way in WAYS[:2]:
        pairs = zip(rates[way], rates["copy"], strict=True)
        row[f"{way} of copy"] = spread([mine / copy for mine, copy in pairs])
    return row | {f"{way}, 2 threads": spread(scaling[way]) for way in WAYS[:3]}


def _together(ways: Sequence[Callable[[], None]]) -> float:
    threads = [threading.Thread(target=way) for way in ways]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches deltas", description=__doc__)
    parser.add_argument("--lr", type=float, nargs="+", default=LEARNING_RATES)
    parser.add_argument("--dtypes", nargs="+", choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--steps", type=int, default=STEPS, help="before the pair")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write facts and rows")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("give at least 1 round")
    if fault := deltas.fault_here():
        parser.error(fault)
    known = facts()
    for name, value in known.items():
        print(f"{name}: {value}")
    rows = []
    for learning_rate in options.lr:
        for dtype, pair in pairs_of(learning_rate, options.dtypes, options.steps).items():
            row = {"lr": learning_rate, "dtype": dtype, **sizes(pair)}
            rows.append(row | speeds(pair, options.rounds))
            print("  ".join(f"{name}: {value}" for name, value in rows[-1].items()), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": known, "rows": rows}))
    return 0
