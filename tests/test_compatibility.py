"""Whether a reader can hold what a source has: what makes a difference, what makes none, and what
is said of it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub.errors import ManifestMismatch
from tensorhub.model.compatibility import check_compatible, differences
from tensorhub.model.manifest import Manifest, RegionSpec, TensorSpec
from tests.test_manifest import manifest, spec


def test_what_makes_a_difference() -> None:
    source = manifest(
        spec("gone", "uint8"),
        spec("dtype", "bfloat16", 2, region=1),
        spec("shape", "uint8", 4, 4, region=2),
        TensorSpec("slice", "uint8", (8,), ((0, 4),), 3, 0),
        replace(spec("scale", "qint8", 2, region=6), quantization=(0.5, 0)),
        spec("one", "uint8", 2, region=4),
        spec("two", "uint8", 2, region=5),
        layout_id="tp2",
    )
    reader = manifest(
        spec("new", "uint8"),
        spec("dtype", "float16", 2, region=1),
        spec("shape", "uint8", 2, 8, region=2),
        TensorSpec("slice", "uint8", (8,), ((4, 8),), 3, 0),
        replace(spec("scale", "qint8", 2, region=5), quantization=(0.5, -3)),
        spec("one", "uint8", 2, region=4),
        spec("two", "uint8", 2, region=4),
    )
    found = differences(source, reader)
    assert found == (
        "the layout is 'tp2' at the source and '' at the reader",
        "tensor 'gone' is missing at the reader",
        "tensor 'new' is unknown to the source",
        "tensor 'dtype' is bfloat16 at the source and float16 at the reader",
        "tensor 'shape' has shape (4, 4) at the source and (2, 8) at the reader",
        "of tensor 'slice', the shard holds [0:4] at the source and [4:8] at the reader",
        "tensor 'scale' has (scale, zero point) (0.5, 0) at the source and (0.5, -3) at the reader",
        "tensors 'one' and 'two' share memory at the reader only",
    )
    with pytest.raises(
        ManifestMismatch, match=r"8 difference\(s\): the layout.*tensorhub.conversion"
    ) as caught:
        check_compatible(source, reader)
    assert caught.value.differences == found


def test_a_message_lists_ten_differences_and_counts_the_rest() -> None:
    source = manifest(*[spec(f"t{i}", "uint8", region=i) for i in range(12)])
    with pytest.raises(
        ManifestMismatch, match=r"12 .*'t9' is missing at the reader \(and 2 more\)"
    ) as caught:
        check_compatible(source, manifest())
    assert "t10" not in str(caught.value)
    assert len(caught.value.differences) == 12


def test_what_a_reader_may_leave_out_is_said() -> None:
    source, reader = manifest(spec("a", "uint8")), manifest(spec("b", "uint8"))
    with pytest.raises(
        ManifestMismatch,
        match=r"unread says so: register\(\.\.\., partial=True\).*sources={'b': \[\]}",
    ):
        check_compatible(source, reader)


def test_who_leaves_nothing_out_is_not_told_how() -> None:
    source, reader = manifest(spec("a", "uint8")), manifest(spec("a", "uint8", 2))
    with pytest.raises(ManifestMismatch) as caught:
        check_compatible(source, reader)
    assert "partial=" not in str(caught.value)
    assert "sources=" not in str(caught.value)


def test_names_that_differ_by_a_wrappers_prefix_alone_are_said_to() -> None:
    plain, wrapped = (
        manifest(spec(f"{prefix}a", "uint8"), spec(f"{prefix}b", "uint8", region=1))
        for prefix in ("", "module.")
    )
    for source, reader, side in ((plain, wrapped, "reader"), (wrapped, plain, "source")):
        with pytest.raises(ManifestMismatch, match=f"begin with 'module.' at the {side}, as a wr"):
            check_compatible(source, reader)


def test_a_name_that_is_almost_a_published_one_is_named_with_it() -> None:
    source = manifest(spec("bias", "uint8"), spec("weight", "uint8", region=1))
    reader = manifest(spec("zeros", "uint8"), spec("weigth", "uint8", region=1))
    with pytest.raises(ManifestMismatch, match=r"\. 'weigth': did you mean 'weight'\?"):
        check_compatible(source, reader)


def test_what_makes_none() -> None:
    source = manifest(
        spec("a", "uint8", 2), spec("b", "uint8", 3, region=1), spec("e", "uint8", 0, region=2)
    )
    reader = Manifest(
        (spec("e", "uint8", 0), spec("b", "uint8", 3, offset=8), spec("a", "uint8", 2)),
        (RegionSpec(11),),
        8192,
        "none",
        "",
    )
    check_compatible(source, reader)
    check_compatible(reader, source)


def test_a_source_may_tie_what_its_reader_keeps_apart() -> None:
    tied = manifest(spec("a", "uint8", 2), spec("b", "uint8", 2), spec("c", "uint8", 2, region=1))
    apart = manifest(*[spec(name, "uint8", 2, region=i) for i, name in enumerate("abc")])
    other = manifest(
        spec("a", "uint8", 2), spec("b", "uint8", 2, region=1), spec("c", "uint8", 2, region=1)
    )
    check_compatible(tied, apart)
    assert differences(apart, tied) == ("tensors 'a' and 'b' share memory at the reader only",)
    assert differences(tied, other) == ("tensors 'b' and 'c' share memory at the reader only",)
    packed = manifest(*[spec(name, "uint8", 2, offset=2 * i) for i, name in enumerate("abc")])
    assert differences(packed, tied) == ("tensors 'a' and 'b' share memory at the reader only",)
