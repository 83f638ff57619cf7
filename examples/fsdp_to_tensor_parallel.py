"""FSDP2 trains on 4 ranks, and a tensor-parallel rollout of 2 ranks reads its weights: nobody
gathers anything.

    python examples/fsdp_to_tensor_parallel.py

Each trainer rank registers its module: of every parameter it publishes the rows that FSDP2 keeps
there. (Few of the sizes divide by 4.) Each rollout rank registers the tensors of an inference
engine, and says what they are made of: q, k and v as one tensor, gate and up as one, each cut by
columns or rows for two ranks, and an embedding whose vocabulary is padded. Then `update()` brings
each byte in place, from the rank that has it.

Each version is checked: what a rollout rank has equals `full_tensor()` of every parameter, cut and
fused by hand, to the byte. Needs torch: `pip install 'tensorhub-ros[torch]'`. In an
installed TensorHub this file is `tensorhub._examples.fsdp_to_tensor_parallel`.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tensorhub
from tensorhub import sync

TRAINERS, ROLLOUTS, VERSIONS, PATIENCE_S = 4, 2, 3, 120.0
VOCABULARY, PADDED, HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 53, 54, 36, 90, 6, 2, 2
HEAD = HIDDEN // HEADS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * HEAD, bias=False)
        self.k = nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False)
        self.v = nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False)
        self.o = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, INNER, bias=False)
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        self.norm = nn.RMSNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
        attended = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        x = self.norm(x + self.o(attended))
        made: Tensor = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return made


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.T


# --------------------------------------------------------------------------------------------------
# training


def train(rank: int, address: str, folder: Path) -> None:
    """One rank of the trainer."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=TRAINERS
    )
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (TRAINERS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    with sync.connect(address, name=f"trainer-{rank}") as hub:
        weights = hub.register("actor", model, group="trainer", rank=rank, world_size=TRAINERS)
        for version in range(1, VERSIONS + 1):
            with weights.mutate(version):
                tokens = torch.randint(VOCABULARY, (4, 16))
                logits = model(tokens)
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                note_for_the_check(model, folder / f"{version}.pt", rank)
            wait_for(folder, version)
        weights.close()
    dist.destroy_process_group()


def note_for_the_check(model: nn.Module, path: Path, rank: int) -> None:
    """What this example compares with; a trainer needs none of it."""
    full = {
        name: parameter.full_tensor().detach() for name, parameter in model.state_dict().items()
    }
    if rank == 0:
        torch.save(full, path)


def wait_for(folder: Path, version: int) -> None:
    """Until every rollout rank has checked that version, which is gone with the next one."""
    until = time.monotonic() + PATIENCE_S
    while not all((folder / f"{version}-{rank}.ok").exists() for rank in range(ROLLOUTS)):
        if (folder / "failed").exists() or time.monotonic() > until:
            sys.exit("a rollout rank has failed")
        time.sleep(0.01)


# --------------------------------------------------------------------------------------------------
# rollout


def cut(rank: int, name: str) -> slice:
    """Which rows, heads or columns this rollout rank has."""
    size = {
        "q": HEADS * HEAD,
        "k": KV_HEADS * HEAD,
        "v": KV_HEADS * HEAD,
        "inner": INNER,
        "vocabulary": PADDED,
    }[name]
    each = size // ROLLOUTS
    return slice(rank * each, (rank + 1) * each)


def engine(rank: int) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The tensors of an inference engine, and what they are made of."""
    tensors: dict[str, Tensor] = {}
    sources: dict[str, object] = {}
    rows = cut(rank, "vocabulary")
    tensors["embed"] = torch.zeros(rows.stop - rows.start, HIDDEN)
    # the padding behind the vocabulary stays as it is
    there = slice(rows.start, min(rows.stop, VOCABULARY))
    sources["embed"] = [
        (tensorhub.at[: there.stop - there.start], tensorhub.source("embed.weight")[there])
    ]
    for layer in range(LAYERS):
        q, k, v, o, gate, up, down = (
            tensorhub.source(f"blocks.{layer}.{name}.weight")
            for name in ("q", "k", "v", "o", "gate", "up", "down")
        )
        inner = cut(rank, "inner")
        fused = {
            "qkv": [q[cut(rank, "q")], k[cut(rank, "k")], v[cut(rank, "v")]],
            "o": o[:, cut(rank, "q")],
            "gate_up": [gate[inner], up[inner]],
            "down": down[:, inner],
        }
        shapes = {
            "qkv": ((HEADS + 2 * KV_HEADS) * HEAD // ROLLOUTS, HIDDEN),
            "o": (HIDDEN, HEADS * HEAD // ROLLOUTS),
            "gate_up": (2 * INNER // ROLLOUTS, HIDDEN),
            "down": (HIDDEN, INNER // ROLLOUTS),
        }
        for name, what in fused.items():
            tensors[f"{layer}.{name}"] = torch.zeros(shapes[name])
            sources[f"{layer}.{name}"] = what
        norm = f"blocks.{layer}.norm.weight"
        tensors[norm] = torch.zeros(HIDDEN)
        # each rank has all of it, and only its engine knows that
        sources[norm] = tensorhub.source(norm)
    return tensors, sources


def expected(full: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The same out of the whole tensors, by hand."""
    rows = cut(rank, "vocabulary")
    embed = F.pad(full["embed.weight"], (0, 0, 0, PADDED - VOCABULARY))
    found = {"embed": embed[rows]}
    for layer in range(LAYERS):
        whole = {
            name: full[f"blocks.{layer}.{name}.weight"]
            for name in ("q", "k", "v", "o", "gate", "up", "down", "norm")
        }
        inner = cut(rank, "inner")
        found[f"{layer}.qkv"] = torch.cat([whole[name][cut(rank, name)] for name in "qkv"])
        found[f"{layer}.o"] = whole["o"][:, cut(rank, "q")]
        found[f"{layer}.gate_up"] = torch.cat([whole["gate"][inner], whole["up"][inner]])
        found[f"{layer}.down"] = whole["down"][:, inner]
        found[f"blocks.{layer}.norm.weight"] = whole["norm"]
    return found


def roll_out(rank: int, address: str, folder: Path) -> None:
    """One rank of the rollout."""
    torch.set_num_threads(1)
    tensors, sources = engine(rank)
    with sync.connect(address, name=f"rollout-{rank}") as hub:
        weights = hub.register(
            "actor", tensors, sources=sources, group="rollout", rank=rank, world_size=ROLLOUTS
        )
        for version in range(1, VERSIONS + 1):
            report = weights.update("latest", at_least=version, timeout=PATIENCE_S)
            wanted = expected(torch.load(folder / f"{version}.pt"), rank)
            unlike = [
                name for name, tensor in wanted.items() if not torch.equal(tensors[name], tensor)
            ]
            if unlike or wanted.keys() != tensors.keys():
                sys.exit(
                    f"rollout rank {rank}: version {version} is not what was trained: {unlike}"
                )
            names = ", ".join(sorted({source.name for source in report.sources}))
            print(f"rollout rank {rank}: version {version}, {report.bytes_read} bytes from {names}")
            (folder / f"{version}-{rank}.ok").touch()
        weights.close()


def main() -> None:
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as made, sync.serve() as coordinator:
        folder = Path(made)
        ranks = [(train, rank) for rank in range(TRAINERS)] + [
            (roll_out, rank) for rank in range(ROLLOUTS)
        ]
        started = [
            processes.Process(target=run, args=(rank, coordinator.address, folder))
            for run, rank in ranks
        ]
        for process in started:
            process.start()
        while any(process.is_alive() for process in started) and not any(
            process.exitcode for process in started
        ):
            time.sleep(0.05)
        if any(process.exitcode for process in started):
            (folder / "failed").touch()  # so that no rank waits for it
        for process in started:
            process.join()
        if any(process.exitcode for process in started):
            sys.exit("a rank has failed")
    print(
        f"{VERSIONS} versions of {TRAINERS} trainer ranks were equal on {ROLLOUTS} rollout ranks, "
        f"to the byte"
    )


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
