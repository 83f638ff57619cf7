"""Whether a reader's tensors can hold a source's version, and what to do where they cannot.

Not responsible for readers of another layout: `layouts` makes their transfer plans.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches

from tensorhub.errors import ManifestMismatch, shown, some
from tensorhub.model.manifest import Manifest, TensorSpec

# torch.compile's, DDP's, FSDP's
WRAPPERS_PREFIXES = ("_orig_mod.", "module.", "_fsdp_wrapped_module.")


def differences(source: Manifest, reader: Manifest) -> tuple[str, ...]:
    """Why the reader's tensors cannot hold the source's version, a sentence each; none if they can.

    Chunk size, digest, order, region numbers, offsets and metadata are the publisher's affair and
    make no difference.
    """
    found = []
    if source.layout_id != reader.layout_id:
        layouts = f"{source.layout_id!r} at the source and {reader.layout_id!r} at the reader"
        found.append(f"the layout is {layouts}")
    theirs = {tensor.name: tensor for tensor in source.tensors}
    mine = {tensor.name: tensor for tensor in reader.tensors}
    found += [f"tensor {name!r} is missing at the reader" for name in theirs if name not in mine]
    found += [f"tensor {name!r} is unknown to the source" for name in mine if name not in theirs]
    for name, tensor in theirs.items():
        if name in mine:
            found += _tensor_differences(tensor, mine[name])
    return (*found, *_tie_differences(theirs, reader))


def _tensor_differences(source: TensorSpec, reader: TensorSpec) -> list[str]:
    found = []
    if source.dtype != reader.dtype:
        dtypes = f"{source.dtype} at the source and {reader.dtype} at the reader"
        found.append(f"tensor {source.name!r} is {dtypes}")
    elif source.quantization != reader.quantization:
        quantizations = (
            f"{source.quantization} at the source and {reader.quantization} at the reader"
        )
        found.append(f"tensor {source.name!r} has (scale, zero point) {quantizations}")
    if source.global_shape != reader.global_shape:
        shapes = f"{source.global_shape} at the source and {reader.global_shape} at the reader"
        found.append(f"tensor {source.name!r} has shape {shapes}")
    elif source.slices != reader.slices:
        slices = f"{_brackets(source)} at the source and {_brackets(reader)} at the reader"
        found.append(f"of tensor {source.name!r}, the shard holds {slices}")
    return found


def _brackets(tensor: TensorSpec) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in tensor.slices)}]"


def _tie_differences(source: Mapping[str, TensorSpec], reader: Manifest) -> list[str]:
    """R13: what shares memory at the reader only would be overwritten there with two tensors'
    bytes.
    """
    found = []
    first_at: dict[tuple[int, int], TensorSpec] = {}
    for tensor in reader.tensors:
        if tensor.name not in source or not tensor.nbytes:
            continue
        first = first_at.setdefault((tensor.region, tensor.offset), tensor)
        one, other = source[first.name], source[tensor.name]
        if (one.region, one.offset) != (other.region, other.offset):
            found.append(
                f"tensors {first.name!r} and {tensor.name!r} share memory at the reader only"
            )
    return found


def check_compatible(source: Manifest, reader: Manifest) -> None:
    """Raise ManifestMismatch, with every difference, unless the reader can hold the source's
    version.
    """
    if found := differences(source, reader):
        theirs, mine = (
            {tensor.name: tensor.dtype for tensor in manifest.tensors}
            for manifest in (source, reader)
        )
        advice = _prefix_advice(source, reader) or missing_advice(
            theirs.keys() - mine, mine.keys() - theirs
        )
        advice += dtype_advice((theirs.get(name, dtype), dtype) for name, dtype in mine.items())
        text = f"{len(found)} difference(s): {some(found, '; ')}{advice}"
        raise ManifestMismatch(text, differences=found)


def missing_advice(unread: Collection[str], unknown: Collection[str]) -> str:
    """What to do where the reader leaves out published tensors, or registers tensors that are not
    published: perhaps under another name.
    """
    advice = ""
    for name in sorted(unknown):
        if close := get_close_matches(name, unread, 1):
            advice += f". {shown(name)}: did you mean {shown(close[0])}?"
            break
    if unread:
        advice += (
            ". A reader that leaves published tensors unread says so: register(..., partial=True)"
        )
    if unknown:
        advice += (
            f". A reader's own tensor has an empty entry, and is left alone: "
            f"sources={{{shown(min(unknown))}: []}}"
        )
    return advice


def dtype_advice(pairs: Iterable[tuple[str, str]]) -> str:
    """What to do where the source and the reader have a tensor in two dtypes."""
    if all(source == reader for source, reader in pairs):
        return ""
    return (
        ". Nothing is converted on the way: let the publisher publish a copy in the reader's "
        "dtype (tensorhub.conversion)"
    )


def _prefix_advice(source: Manifest, reader: Manifest) -> str:
    """Advice for names that differ between source and reader only by a wrapper's prefix."""
    theirs, mine = ({tensor.name for tensor in manifest.tensors} for manifest in (source, reader))
    for prefix in WRAPPERS_PREFIXES:
        for side, names, others in (("source", theirs, mine), ("reader", mine, theirs)):
            if names == {prefix + name for name in others}:
                return (
                    f". All names begin with {prefix!r} at the {side}, as a wrapper's do: "
                    f"register the module that it wraps"
                )
    return ""
