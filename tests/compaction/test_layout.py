"""Where tiny tensors are in a packed region: for all names and sizes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, strategies as st

from benches import catalogue
from tensorhub.compaction.layout import ALIGNMENT, lay_out, pack_tiny
from tensorhub.model.compatibility import check_compatible
from tensorhub.model.manifest import Manifest, TensorDescription, build_manifest

SIZES = st.dictionaries(st.text(min_size=1, max_size=4), st.integers(0, 10_000), max_size=20)


@given(SIZES)
def test_tensors_are_apart_and_aligned_and_take_little_more_than_they_have(
    sizes: dict[str, int],
) -> None:
    offsets, nbytes = lay_out(sizes)
    assert list(offsets) == sorted(sizes)
    spans = [(offsets[name], offsets[name] + sizes[name]) for name in offsets]
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(start % ALIGNMENT == 0 for start, _ in spans)
    assert nbytes == (spans[-1][1] if spans else 0)
    assert sum(sizes.values()) <= nbytes <= sum(sizes.values()) + (ALIGNMENT - 1) * len(sizes)


# --------------------------------------------------------------------------------------------------
# manifests


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Tensors of all sizes, tied ones among them, as they are registered."""
    tensors: list[TensorDescription] = []
    for number, size in enumerate(draw(st.lists(st.integers(0, 200), min_size=1, max_size=12))):
        address, nbytes = (number + 1) << 20, size
        if tensors and draw(st.sampled_from([False, True])):
            tied = draw(st.sampled_from(tensors))
            address, nbytes = tied.address, tied.nbytes
        tensors.append(TensorDescription(f"t{number}", "uint8", (nbytes,), address, nbytes))
    return build_manifest(draw(st.permutations(tensors)), 4096, "xxh3-64")


@given(manifests(), st.integers(0, 200))
def test_a_packed_manifest_holds_the_same_tensors(plain: Manifest, bytes_max: int) -> None:
    packed = pack_tiny(plain, bytes_max)
    assert Manifest.decode(packed.encode()) == packed
    check_compatible(packed, plain)
    check_compatible(plain, packed)
    assert [(t.name, t.dtype, t.slices) for t in packed.tensors] == [
        (t.name, t.dtype, t.slices) for t in plain.tensors
    ]
    if packed is plain:
        tiny = {tensor.region for tensor in plain.tensors if 0 < tensor.nbytes <= bytes_max}
        assert len(tiny) < 2
    else:
        assert {tensor.name for tensor in packed.by_region[0]} == {
            t.name for t in plain.tensors if 0 < t.nbytes <= bytes_max
        }
        assert all(
            len({(t.offset, t.nbytes) for t in tensors}) == 1 for tensors in packed.by_region[1:]
        )


@given(manifests(), st.randoms())
def test_where_a_tensor_is_does_not_depend_on_the_order_of_registration(
    plain: Manifest, random: object
) -> None:
    described = [
        TensorDescription(t.name, t.dtype, t.shape, (t.region + 1) << 20, t.nbytes)
        for t in plain.tensors
    ]
    random.shuffle(described)  # type: ignore[attr-defined]
    one, other = pack_tiny(plain, 200), pack_tiny(build_manifest(described, 4096, "xxh3-64"), 200)
    if one is not plain:
        assert one.regions[0] == other.regions[0]
        assert {t.name: t.offset for t in one.by_region[0]} == {
            t.name: t.offset for t in other.by_region[0]
        }


def test_padded_rows_keep_their_region() -> None:
    rows = TensorDescription("rows", "uint8", (4, 4), 0, 16, strides=(8, 1))
    tiny = [TensorDescription(name, "uint8", (9,), 2**n, 9) for n, name in enumerate("abc", 8)]
    plain = build_manifest([rows, *tiny], 4096, "none")
    assert [region.nbytes for region in pack_tiny(plain, 64).regions] == [16 + 16 + 9, 28]


def test_a_real_model_has_a_region_less_for_each_tiny_tensor() -> None:
    plain = catalogue.manifest("DeepSeek-V3", ranks=64)
    packed = pack_tiny(plain, 16 * 2**10)
    assert (len(plain.regions), plain.chunk_count) == (2731, 3494)
    assert (len(packed.regions), packed.chunk_count) == (1245, 2008)
    assert 0 <= packed.nbytes - plain.nbytes < ALIGNMENT * 1487
