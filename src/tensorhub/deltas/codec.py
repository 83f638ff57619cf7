"""From bytes to frames and back, with numpy and zstandard; see the package.

Words are compared, listed and changed in blocks that stay in a core's cache; each call on a block
lets go of the GIL. Not responsible for the form of a frame (`frames`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final, TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from tensorhub.deltas import Counts, Listed
from tensorhub.deltas.frames import AHEAD_MAX, UNIT, WIDTHS, Frame, expect
from tensorhub.errors import ProtocolError
from tensorhub.model.manifest import CHUNK_BYTES_MAX

Words: TypeAlias = NDArray[np.unsignedinteger[Any]]
Bytes: TypeAlias = NDArray[np.uint8]
Indices: TypeAlias = NDArray[np.int64]
Places: TypeAlias = NDArray[np.int32]  # half the memory; of words in a chunk of 2**30 bytes at most

BLOCK = 2**16  # of 8 bytes; with all that is made of them, they fit a cache of 2 MiB
LISTED = 2**15  # words that differ, at a time
SAMPLE = 2**10  # words that are compared before all are
PAYS = 7 / 8  # a longer frame, of the chunk's bytes, is not worth the time of its reader
_TYPES: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32}

# Level 1 with the least table of matches: of differences, which do not depend on one another, a
# match that is found by chance takes more than its symbols would.
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6)


def encode(base: memoryview, new: memoryview, width: int) -> bytes | None:
    """See the package."""
    if width not in WIDTHS or not base.nbytes == new.nbytes <= CHUNK_BYTES_MAX:
        raise ValueError(f"words of {width} bytes; {base.nbytes} and {new.nbytes} bytes")
    old, fresh = _words_of(base, width), _words_of(new, width)
    parts = _some(old, fresh) or (np.empty(0, np.uint8), _planes_of_all(old, fresh))
    return _frame(width, *parts, new[fresh.nbytes :], new.nbytes)


def advance(base: memoryview, changes: Listed, width: int) -> bytes | None:
    """See the package."""
    words, places = _words_of(base, width), np.frombuffer(changes.places, np.int32)
    differences = np.frombuffer(changes.differences, words.dtype)
    apart = _apart(words)
    if 2 * np.count_nonzero(places % apart == 0) * apart > words.size:  # of the sample
        before = memoryview(bytes(base))
        _add(words, places, differences)
        return encode(before, base, width)
    _add(words, places, differences)
    tokens = _tokens_of(np.concatenate([np.full(1, -1, np.int32), places]))
    return _frame(width, tokens, _planes_of(_zigzag(differences)), base[:0], base.nbytes)


def _frame(width: int, tokens: Bytes, planes: Bytes, tail: memoryview, nbytes: int) -> bytes | None:
    pack = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    streams = tuple([_pack(pack, stream) for stream in (tokens, *planes)])
    frame = Frame(width, nbytes, planes.shape[1], tokens.size, streams, tail).encode()
    return frame if len(frame) <= PAYS * nbytes else None


def listed(frame: bytes | bytearray | memoryview, nbytes: int) -> tuple[Listed, int, Counts] | None:
    """See the package."""
    parts = Frame.decode(frame, nbytes)
    if parts.lists_all or len(parts.tail):
        return None
    tokens, *planes = _streams(zstandard.ZstdDecompressor(), parts)
    _check(tokens, parts)
    places = np.concatenate([np.empty(0, np.int32), *_places_of(tokens)], dtype=np.int32)
    differences = _differences(planes, 0, parts.changed, np.dtype(_TYPES[parts.width]))
    counts = Counts(parts.words, parts.changed)
    return Listed(places.data, differences.data), parts.width, counts


def apply(frames: Sequence[bytes | bytearray | memoryview], target: memoryview) -> Counts:
    """See the package."""
    unpack, counts = zstandard.ZstdDecompressor(), Counts()
    for group in _groups([Frame.decode(frame, target.nbytes) for frame in frames]):
        words = _words_of(target, group[0].width)
        if len(group) > 1:
            changed = _apply_several(unpack, group, words)
        else:
            changed = _apply_one(unpack, group[0], words)
        target[words.nbytes :] = group[-1].tail
        counts = counts.and_of(Counts(len(group) * words.size, changed))
    return counts


def _groups(frames: Iterable[Frame]) -> Iterator[list[Frame]]:
    """Those that together list few words are applied together, because numpy's calls take as long
    for few as for many.
    """
    group, tokens = list[Frame](), 0
    for parts in frames:
        its = parts.tokens or LISTED
        if group and (tokens + its > LISTED or parts.width != group[0].width):
            yield group
            group, tokens = [], 0
        group.append(parts)
        tokens += its
    if group:
        yield group


def _apply_one(unpack: zstandard.ZstdDecompressor, parts: Frame, words: Words) -> int:
    """How many words that changes."""
    tokens, *planes = _streams(unpack, parts)
    if parts.lists_all:
        changed = 0
        for start in range(0, words.size, LISTED):
            end = start + LISTED
            by = _differences(planes, start, end, words.dtype)
            words[start:end] += by
            changed += int(np.count_nonzero(by))
        return changed
    _check(tokens, parts)
    first = 0
    for places in _places_of(tokens):
        last = first + places.size
        _add(words, places, _differences(planes, first, last, words.dtype))
        first = last
    return parts.changed


def _add(words: Words, places: Places | Indices, differences: Words) -> None:
    new = words.take(places)
    new += differences
    words[places] = new


def _apply_several(unpack: zstandard.ZstdDecompressor, group: Sequence[Frame], words: Words) -> int:
    tokens, *planes = zip(*[_streams(unpack, parts) for parts in group], strict=True)
    places = _places_of_several(tokens, group)
    joined = [np.concatenate(plane) for plane in planes]
    # differences add up where several frames list a word
    np.add.at(words, places, _differences(joined, 0, places.size, words.dtype))
    return places.size


def _streams(unpack: zstandard.ZstdDecompressor, parts: Frame) -> list[Bytes]:
    sizes = parts.tokens, *[parts.changed] * parts.width
    pairs = zip(parts.streams, sizes, strict=True)
    return [_unpack(unpack, stream, nbytes) for stream, nbytes in pairs]


def _words_of(view: memoryview, width: int) -> Words:
    return np.frombuffer(view, _TYPES[width], view.nbytes // UNIT * UNIT // width)


# --------------------------------------------------------------------------------------------------
# which words, and by how much


def _some(old: Words, new: Words) -> tuple[Bytes, Bytes] | None:
    """The gaps and planes of the words that differ; None: more than half do, in a sample or all."""
    apart = _apart(new)
    if 2 * np.count_nonzero(old[::apart] != new[::apart]) * apart > new.size:
        return None
    places, zigzag = _changes(old, new)
    return None if 2 * zigzag.size > new.size else (_tokens_of(places), _planes_of(zigzag))


def _apart(words: Words) -> int:
    """The words of the sample."""
    return words.size // SAMPLE | 1


def _changes(old: Words, new: Words) -> tuple[Places, Words]:
    """-1 and the places of the words that differ, ascending; the zigzag of their differences."""
    olds, news, each = old.view(np.uint64), new.view(np.uint64), UNIT // new.itemsize
    is_changed = np.zeros(min(BLOCK, -(-news.size // 8) * 8), np.bool_)
    places, differences = [np.full(1, -1)], [np.empty(0, new.dtype)]
    for start in range(0, news.size, BLOCK):
        before, after = olds[start : start + BLOCK], news[start : start + BLOCK]
        is_changed[after.size :] = False
        np.not_equal(before, after, out=is_changed[: after.size])
        found = _true_in(is_changed)
        by = after.take(found).view(new.dtype) - before.take(found).view(new.dtype)
        words = np.flatnonzero(by != 0)
        differences.append(by.take(words))
        found = (found + start) * each
        places.append(found.take(words >> each.bit_length() - 1) + (words & each - 1))
    return np.concatenate(places, dtype=np.int32), _zigzag(np.concatenate(differences))


def _true_in(flags: NDArray[np.bool_]) -> Indices:
    """As `np.flatnonzero`, which takes 30 ns for each index where less than a tenth is true, and
    else 1 ns for each flag. So groups of 8 flags are looked at, with enough true ones added.
    """
    groups = flags.view(np.uint64)
    added = groups.size // 8 + 1
    some = np.ones(groups.size + added, np.bool_)
    np.not_equal(groups, 0, out=some[: groups.size])
    found = np.flatnonzero(some)[:-added]
    if found.size > 0.6 * groups.size:  # a tenth of the flags, if they are independent
        return np.flatnonzero(flags)
    near = np.flatnonzero(groups.take(found).view(np.bool_))
    places: Indices = found.take(near >> 3) * 8 + (near & 7)
    return places


def _zigzag(differences: Words) -> Words:
    """Small numbers of small differences of either sign: 0, -1, 1, -2 become 0, 1, 2, 3."""
    below_zero: Words = np.negative(differences >> 8 * differences.itemsize - 1)  # 0, or all ones
    return (differences + differences) ^ below_zero


def _planes_of(zigzag: Words) -> Bytes:
    """A row for each byte of a word."""
    return np.stack([(zigzag >> 8 * byte).astype(np.uint8) for byte in range(zigzag.itemsize)])


def _planes_of_all(old: Words, new: Words) -> Bytes:
    planes = np.empty((new.itemsize, new.size), np.uint8)
    for start in range(0, new.size, LISTED):
        block = slice(start, start + LISTED)
        planes[:, block] = _planes_of(_zigzag(new[block] - old[block]))
    return planes


def _differences(planes: list[Bytes], first: int, last: int, dtype: np.dtype[Any]) -> Words:
    zigzag: Words = planes[0][first:last].astype(dtype)
    for number, plane in enumerate(planes[1:], 1):
        zigzag |= plane[first:last].astype(dtype) << 8 * number
    below_zero: Words = np.negative(zigzag & 1)
    half: Words = np.right_shift(zigzag, 1)
    return half ^ below_zero


# --------------------------------------------------------------------------------------------------
# gaps


def _tokens_of(places: Places) -> Bytes:
    gaps = np.diff(places)
    tokens = gaps.astype(np.uint8)
    far = np.flatnonzero(gaps > AHEAD_MAX)
    if not far.size:
        return tokens
    jumps = (gaps[far] - 1) // AHEAD_MAX
    tokens[far] = gaps[far] - AHEAD_MAX * jumps
    return np.insert(tokens, np.repeat(far, jumps), 0)


def _check(tokens: Bytes, parts: Frame) -> None:
    """Whether these gaps are of so many words, and lead to none beyond the last."""
    jumps = tokens.size - int(np.count_nonzero(tokens))
    expect(tokens.size - jumps == parts.changed, "its gaps are of another number of words")
    end = int(tokens.sum(dtype=np.uint64)) + AHEAD_MAX * jumps
    expect(end <= parts.words, "its gaps lead beyond the chunk")


def _places_of_several(tokens: Sequence[Bytes], group: Sequence[Frame]) -> Indices:
    """Of all frames, one after the other, checked as above."""
    some = np.concatenate(tokens)
    is_jump = some == 0
    starts = [0, *accumulate(parts.tokens for parts in group[:-1])]
    listed = np.add.reduceat(~is_jump, starts, dtype=np.int64)
    same = listed == [parts.changed for parts in group]
    expect(bool(same.all()), "its gaps are of another number of words")
    ahead = (some - is_jump).astype(np.int64)  # 0 becomes 255
    ends = np.add.reduceat(ahead, starts)
    expect(int(ends.max()) <= group[0].words, "its gaps lead beyond the chunk")
    ahead[0] -= 1
    ahead[starts[1:]] -= ends[:-1]
    places: Indices = np.cumsum(ahead)[~is_jump]
    return places


def _places_of(tokens: Bytes) -> Iterator[Indices]:
    last = -1
    for start in range(0, tokens.size, LISTED):
        some = tokens[start : start + LISTED]
        places = (some - (some == 0)).astype(np.int64)  # 0 becomes 255
        np.cumsum(places, out=places)
        places += last
        last = int(places[-1])
        yield places if some.all() else places[some != 0]


# --------------------------------------------------------------------------------------------------
# streams


def _pack(compressor: zstandard.ZstdCompressor, stream: Bytes) -> bytes:
    if not stream.any():
        return b""
    plain = stream.tobytes()
    packed = compressor.compress(plain)
    return packed if len(packed) < len(plain) else plain


def _unpack(
    decompressor: zstandard.ZstdDecompressor, stream: bytes | memoryview, nbytes: int
) -> Bytes:
    """What a stream holds, which must be so many bytes: nothing is made where it says another
    number.
    """
    if not len(stream):
        return np.zeros(nbytes, np.uint8)
    if len(stream) == nbytes:
        return np.frombuffer(stream, np.uint8)
    try:
        says = zstandard.get_frame_parameters(stream).content_size
        expect(says == nbytes, f"a stream is of {says} bytes, and not of {nbytes}")
        plain = decompressor.decompress(stream, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"bad delta: a stream is damaged ({error})") from None
    expect(len(plain) == nbytes, "a stream is damaged")
    return np.frombuffer(plain, np.uint8)
