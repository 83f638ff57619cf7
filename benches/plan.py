"""What a reader's plan costs: a mixture of experts of 1.01T parameters in 98,947 tensors, from 64
ranks to one of 16.

For each pair of layouts: the bytes that the reader gets about all ranks (catalogue, arrangements,
coordinates); the CPU seconds that it takes to decode them, to plan, to make every cell, and to make
the reading (the plan included: what the reader's chunks are, and the selections that it sends to
its sources); the memory that plan and reading take at most and keep; the CPU seconds that a source
takes to decode and check all selections; how many cells, runs, chunks and strips there are. "By
name" has its tensors in the order of their names, as text. Nothing is read, and no weights are
made. See README.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple, TypeVar

from tensorhub.layouts import (
    Arrangement,
    Catalogue,
    Coordinates,
    Kind,
    Piece,
    Plan,
    Publication,
    Reading,
    Selection,
    arrange,
    plan,
    reading_of,
)
from tensorhub.layouts.boxes import Box, span, volume
from tensorhub.layouts.catalogue import catalogue_of
from tensorhub.layouts.pieces import packed
from tensorhub.layouts.plan import Row
from tensorhub.layouts.sharding import Cut, cut
from tensorhub.types import Options

LAYERS, EXPERTS, HIDDEN, INNER, HEADS, KEY_VALUE_HEADS, HEAD, VOCABULARY = (
    64,
    512,
    7168,
    1408,
    128,
    8,
    128,
    163_840,
)
SOURCES, READERS = 64, 16
CHUNK_BYTES = Options().chunk_bytes

T = TypeVar("T")


class Tensor(NamedTuple):
    """`columns`: whether tensor parallelism cuts its columns; None: not at all. `units`: equal
    parts that are not cut.
    """

    name: str
    shape: tuple[int, ...]
    columns: bool | None = None
    units: int = 0
    expert: int | None = None


def tensors() -> Iterator[Tensor]:
    yield Tensor("model.embed_tokens.weight", (VOCABULARY, HIDDEN), False, VOCABULARY)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        yield Tensor(f"{at}.self_attn.q_proj.weight", (HEADS * HEAD, HIDDEN), False, HEADS)
        yield Tensor(
            f"{at}.self_attn.k_proj.weight",
            (KEY_VALUE_HEADS * HEAD, HIDDEN),
            False,
            KEY_VALUE_HEADS,
        )
        yield Tensor(
            f"{at}.self_attn.v_proj.weight",
            (KEY_VALUE_HEADS * HEAD, HIDDEN),
            False,
            KEY_VALUE_HEADS,
        )
        yield Tensor(f"{at}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD), True, HEADS)
        yield Tensor(f"{at}.self_attn.q_norm.weight", (HEAD,))
        yield Tensor(f"{at}.self_attn.k_norm.weight", (HEAD,))
        yield Tensor(f"{at}.input_layernorm.weight", (HIDDEN,))
        yield Tensor(f"{at}.post_attention_layernorm.weight", (HIDDEN,))
        yield Tensor(f"{at}.mlp.gate.weight", (EXPERTS, HIDDEN))
        yield Tensor(f"{at}.mlp.gate.e_score_correction_bias", (EXPERTS,))
        for expert in range(EXPERTS):
            its = f"{at}.mlp.experts.{expert}"
            yield Tensor(f"{its}.gate_proj.weight", (INNER, HIDDEN), False, INNER, expert)
            yield Tensor(f"{its}.up_proj.weight", (INNER, HIDDEN), False, INNER, expert)
            yield Tensor(f"{its}.down_proj.weight", (HIDDEN, INNER), True, INNER, expert)
    yield Tensor("model.norm.weight", (HIDDEN,))
    yield Tensor("lm_head.weight", (VOCABULARY, HIDDEN), False, VOCABULARY)


TENSORS = tuple(tensors())


# --------------------------------------------------------------------------------------------------
# layouts


def kind_of(tensor: Tensor) -> Kind:
    return Kind("bfloat16", tensor.shape)


def by_rows(tensor: Tensor, ranks: int, rank: int) -> Box:
    """FSDP."""
    return tuple([its[0] for its in cut(tensor.shape, [Cut(0, ranks, rank)]).runs])


def by_units(tensor: Tensor, ranks: int, rank: int) -> Box:
    """Tensor parallelism: where there are more ranks than units, several have the same one."""
    box = [span(0, size) for size in tensor.shape]
    if tensor.columns is not None:
        units = min(ranks, tensor.units)
        dimension = int(tensor.columns)
        part = tensor.shape[dimension] // units
        box[dimension] = span(rank * units // ranks * part, part)
    return tuple(box)


def rank_of(held: Iterable[tuple[Tensor, Box]], catalogue: Catalogue | None) -> Coordinates:
    """Each tensor in a region of its own."""
    pieces = (
        Piece(tensor.name, kind_of(tensor), box, region, 0, packed([its.size for its in box], 2))
        for region, (tensor, box) in enumerate(held)
    )
    return arrange(pieces, catalogue)


def experts_of(
    ranks: int, rank: int, others: Callable[[Tensor, int, int], Box]
) -> Iterator[tuple[Tensor, Box]]:
    """Expert parallelism; the rest is cut as `others` says."""
    for tensor in TENSORS:
        if tensor.expert is None:
            yield tensor, others(tensor, ranks, rank)
        elif tensor.expert * ranks // EXPERTS == rank:
            yield tensor, tuple([span(0, size) for size in tensor.shape])


def fsdp(ranks: int) -> list[Coordinates]:
    """All ranks share their arrangement, so only their boxes are worked out anew."""
    catalogue = catalogue_of((tensor.name, kind_of(tensor)) for tensor in TENSORS)
    first = rank_of(((tensor, by_rows(tensor, ranks, 0)) for tensor in TENSORS), catalogue)
    kinds = {box: catalogue.kinds[kind] for kind, box, _ in first.arrangement.forms}
    shapes = [Tensor("", kinds[number].shape) for number in range(len(kinds))]
    return [
        Coordinates(first.arrangement, tuple([by_rows(each, ranks, rank) for each in shapes]))
        for rank in range(ranks)
    ]


def experts(ranks: int) -> list[Coordinates]:
    return [rank_of(experts_of(ranks, rank, by_rows), None) for rank in range(ranks)]


PUBLISHERS = {f"FSDP {SOURCES}": fsdp, f"EP {SOURCES}": experts}
READING: dict[str, Callable[[int], Iterable[tuple[Tensor, Box]]]] = {
    f"EP {READERS}": lambda rank: experts_of(READERS, rank, by_units),
    f"TP {READERS}": lambda rank: ((tensor, by_units(tensor, READERS, rank)) for tensor in TENSORS),
    f"TP {READERS} by name": lambda rank: (
        (tensor, by_units(tensor, READERS, rank)) for tensor in sorted(TENSORS)
    ),
}


# --------------------------------------------------------------------------------------------------
# measuring


def timed(call: Callable[[], T]) -> tuple[float, T]:
    gc.collect()
    started = time.process_time()
    result = call()
    return time.process_time() - started, result


class Wire(NamedTuple):
    """What the ranks say, each part once."""

    catalogues: dict[str, bytes]
    arrangements: dict[str, tuple[str, bytes]]
    coordinates: list[tuple[str, bytes]]

    @property
    def nbytes(self) -> int:
        parts = [
            *self.catalogues.values(),
            *(blob for _, blob in (*self.arrangements.values(), *self.coordinates)),
        ]
        return sum(map(len, parts))

    def decoded(self) -> list[Coordinates]:
        catalogues = {key: Catalogue.decode(blob) for key, blob in self.catalogues.items()}
        arrangements = {
            key: Arrangement.decode(blob, catalogues[catalogue])
            for key, (catalogue, blob) in self.arrangements.items()
        }
        return [
            Coordinates.decode(blob, arrangements[arrangement])
            for arrangement, blob in self.coordinates
        ]


def said(ranks: Sequence[Coordinates]) -> Wire:
    distinct = {each.arrangement.arrangement_id: each.arrangement for each in ranks}
    return Wire(
        {each.catalogue.catalogue_id: each.catalogue.encode() for each in ranks},
        {key: (each.catalogue.catalogue_id, each.encode()) for key, each in distinct.items()},
        [(each.arrangement.arrangement_id, each.encode()) for each in ranks],
    )


def rows_made(made: Plan) -> list[Row]:
    """All of them, as a reading asks for them."""
    return [row for source in made.needs for row in made.rows(source)]


def measure(rank: int) -> Iterator[dict[str, object]]:
    for publisher, layout in PUBLISHERS.items():
        wire = said(layout(SOURCES))
        decode_s, ranks = timed(wire.decoded)
        merge_s, publication = timed(lambda ranks=ranks: checked(ranks))  # type: ignore[misc]
        for name, held in READING.items():
            arrange_s, reader = timed(
                lambda held=held, p=publication: rank_of(held(rank), p.catalogue)  # type: ignore[misc]
            )
            sources = [each.coordinates for each in publication.classes]

            def planned(
                reader: Coordinates = reader, sources: Sequence[Coordinates] = sources
            ) -> Plan:
                return plan(reader, sources, turn=rank)

            plan_s, made = timed(planned)
            rows_s, rows = timed(lambda made=made: rows_made(made))  # type: ignore[misc]
            assert sum(made.needs.values()) == reader.nbytes
            cells, families, needs = sum(row[4] for row in rows), len(rows), len(made.needs)
            runs = sum(row[4] * prod([times for times, _, _ in row[6]]) for row in rows)
            del made, rows
            kept, most = traced(planned)
            yield {
                "layouts": f"{publisher} -> {name}",
                "wire_mb": round(wire.nbytes / 1e6, 2),
                "catalogues_mb": round(sum(map(len, wire.catalogues.values())) / 1e6, 2),
                "decode_s": round(decode_s, 3),
                "check_s": round(merge_s, 3),
                "arrange_reader_s": round(arrange_s, 3),
                "plan_s": round(plan_s, 3),
                "plan_peak_mb": round(most / 1e6, 1),
                "plan_kept_mb": round(kept / 1e6, 1),
                "families": families,
                "cells": cells,
                "runs": runs,
                "us_per_family": round(1e6 * rows_s / families, 3),
                "gb": round(reader.nbytes / 1e9, 1),
                "sources": needs,
                **reading_row(publication, reader),
            }


def reading_row(publication: Publication, reader: Coordinates) -> dict[str, object]:
    def read() -> Reading:
        return reading_of(publication, reader, chunk_bytes=CHUNK_BYTES)

    reading_s, reading = timed(read)
    assert reading.nbytes == reader.nbytes
    parts = reading.parts
    blobs = [part.selection.encode() for part in parts]
    decode_s, selections = timed(lambda: list(map(Selection.decode, blobs)))
    sizes = [[*sizes_of(publication.ranks[part.shard])] for part in parts]
    fault_s, faults = timed(lambda: list(map(Selection.fault, selections, sizes)))
    assert not any(faults)
    row: dict[str, object] = {
        "reading_s": round(reading_s, 3),
        "selections_decoded_s": round(decode_s, 3),
        "selections_checked_s": round(fault_s, 3),
        "selections_mb": round(sum(map(len, blobs)) / 1e6, 3),
        "selection_mb_max": round(max(map(len, blobs)) / 1e6, 3),
        "chunks": len(reading.sizes),
        "chunk_mb_mean": round(reading.nbytes / len(reading.sizes) / 1e6, 2),
        "strips": sum(map(len, reading.places)),
        "strips_max": max(map(len, reading.places)),
    }
    kept, most = traced(read)
    return row | {"reading_peak_mb": round(most / 1e6, 1), "reading_kept_mb": round(kept / 1e6, 1)}


def sizes_of(rank: Coordinates) -> Iterator[int]:
    """Of its regions, each of which has one piece."""
    nbytes = [volume(box) * kind.itemsize for kind, box, _ in rank.geometry]
    return map(nbytes.__getitem__, rank.arrangement.form_of)


def traced(call: Callable[[], T]) -> tuple[int, int]:
    """What it keeps and what it takes at most, in bytes."""
    gc.collect()
    tracemalloc.start()
    result = call()
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    return kept, most


def checked(ranks: Sequence[Coordinates]) -> Publication:
    publication = Publication(tuple(ranks)).check()
    _ = publication.catalogue.number_of, publication.classes
    return publication


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benches plan", description=__doc__)
    parser.add_argument("--rank", type=int, default=5, help="which of the 16 reading ranks")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    print(f"{len(TENSORS):,} tensors", flush=True)
    for row in measure(options.rank):
        print(
            json.dumps(row)
            if options.json
            else "\n  ".join(f"{key} {value}" for key, value in row.items()),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
