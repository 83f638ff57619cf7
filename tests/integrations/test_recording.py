"""What the recorder says of a loader, filled by real hubs, is byte for byte what the loader itself
does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from torch import nn

from tensorhub import sync
from tensorhub.errors import ManifestMismatch, RegistrationError
from tensorhub.integrations.recording import Padding, Recording, left_out, record

Pairs = Iterable[tuple[str, torch.Tensor]]
Specs = dict[str, tuple[str, tuple[int, ...]]]


class Loading(nn.Module):
    """Parameters by name, and a loader of vLLM's kind: whatever `loaders` says of a published
    name.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], loaders: Mapping[str, Callable[..., object]]
    ) -> None:
        super().__init__()
        self.tensors = {
            name: nn.Parameter(tensor, requires_grad=False) for name, tensor in parameters.items()
        }
        self.loaders = loaders

    def load_weights(self, weights: Pairs) -> None:
        for name, loaded in weights:
            self.loaders[name](self.tensors, loaded)


def columns(name: str, first: int, count: int, of: int = 0, dim: int = 0) -> Callable[..., object]:
    """vLLM's weight_loader of a fused or sharded parameter: narrow both, and copy."""

    def load(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        target = tensors[name].data.narrow(dim, first, count)
        part = loaded.narrow(dim, of, count)
        assert target.shape == part.shape
        target.copy_(part)

    return load


def whole(name: str) -> Callable[..., object]:
    return lambda tensors, loaded: tensors[name].data.copy_(loaded)


def specs(**shapes: tuple[int, ...]) -> Specs:
    return {name: ("bfloat16", shape) for name, shape in shapes.items()}


def values(published: Specs) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return {
        name: torch.randn(shape).to(getattr(torch, dtype))
        for name, (dtype, shape) in published.items()
    }


def recorded(model: Loading, published: Specs, device: str = "meta") -> Recording:
    parameters = {
        name: nn.Parameter(each.to(device), requires_grad=False)
        for name, each in model.tensors.items()
    }
    found = record(Loading(parameters, model.loaders).load_weights, parameters, published)
    assert not found.computed
    return found


def filled(
    model: Loading, found: Recording, checkpoint: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The parameters as the recording fills them, out of the memory of a publisher."""
    tensors = {name: torch.full_like(tensor.data, 77) for name, tensor in model.tensors.items()}
    for name, place, value in found.filled:
        tensors[name][place] = value
    with sync.serve() as coordinator, sync.connect(coordinator.address) as hub:
        hub.register("actor", dict(checkpoint)).publish(1)
        hub.register("actor", tensors, sources=found.sources, partial=True).replicate(1)
    return tensors


def check(model: Loading, published: Specs) -> Recording:
    found, checkpoint = recorded(model, published), values(published)
    by_hub = filled(model, found, checkpoint)
    for tensor in model.tensors.values():
        tensor.data.fill_(77)
    model.load_weights(checkpoint.items())
    for name, tensor in model.tensors.items():
        assert torch.equal(words(by_hub[name]), words(tensor.data)), name
    return found


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def test_fused_and_sharded_parameters() -> None:
    """Rank 1 of 2: qkv of a grouped attention, gate and up, and a matrix cut by columns."""
    loaders = {
        "q": columns("qkv", 0, 8, of=8),
        "k": columns("qkv", 8, 4, of=4),
        "v": columns("qkv", 12, 4, of=4),
        "gate": columns("gate_up", 0, 6, of=6),
        "up": columns("gate_up", 6, 6, of=6),
        "down": columns("down", 0, 6, of=6, dim=1),
        "norm": whole("norm"),
    }
    model = Loading(
        {"qkv": bf16(16, 4), "gate_up": bf16(12, 4), "down": bf16(4, 6), "norm": bf16(4)}, loaders
    )
    published = specs(
        q=(16, 4), k=(8, 4), v=(8, 4), gate=(12, 4), up=(12, 4), down=(4, 12), norm=(4,)
    )
    found = check(model, published)
    assert not found.gaps
    assert not found.unread
    assert found.needs["qkv"] == ("q", "k", "v")


def test_a_live_parameter_is_not_written() -> None:
    model = Loading({"w": bf16(4, 4)}, {"w": whole("w")})
    parameters = dict(model.tensors)
    record(model.load_weights, parameters, specs(w=(4, 4)))
    assert not parameters["w"].any()


def test_stacked_experts_one_by_one_and_as_one_transposed_tensor() -> None:
    def expert(number: int, half: int) -> Callable[..., object]:
        def load(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
            tensors["w13"].data[number].narrow(0, 3 * half, 3).copy_(loaded.narrow(0, 3, 3))

        return load

    def stacked(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        tensors["w2"].data.copy_(loaded.transpose(-1, -2).narrow(2, 3, 3))

    halves = [(number, half) for number in range(4) for half in (0, 1)]
    loaders: dict[str, Callable[..., object]] = {
        f"{number}.{half}": expert(number, half) for number, half in halves
    }
    published = dict.fromkeys(loaders, ("bfloat16", (6, 4))) | specs(down=(4, 6, 5))
    found = check(
        Loading({"w13": bf16(4, 6, 4), "w2": bf16(4, 5, 3)}, {**loaders, "down": stacked}),
        published,
    )
    assert not found.gaps
    assert len(found.sources["w13"]) == 8
    assert len(found.sources["w2"]) == 1


def test_views_that_split_and_join_dimensions() -> None:
    """Megatron's interleaved qkv: rows are (heads, 3, size); and a published matrix that is a
    vector here.
    """

    def interleaved(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        for part in range(3):
            tensors["qkv"].data.narrow(0, 8 * part, 8).copy_(
                loaded.view(2, 3, 4, 5)[:, part].reshape(8, 5)
            )

    def split(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        tensors["qkv"].data.view(3, 2, 4, 5).copy_(loaded.view(2, 3, 4, 5).transpose(0, 1))

    def flat(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        tensors["flat"].data.copy_(loaded.view(-1))

    published = specs(qkv=(24, 5), flat=(3, 4))
    check(Loading({"qkv": bf16(24, 5), "flat": bf16(12)}, {"qkv": split, "flat": flat}), published)
    model = Loading({"qkv": bf16(24, 5)}, {"qkv": interleaved})
    found = record(model.load_weights, model.tensors, specs(qkv=(24, 5)))
    # `reshape` copies: two heads of a part are not neighbours
    assert "computed" in found.computed["qkv"]


def test_padding_is_filled_and_numbers_without_dimensions_are_copied() -> None:
    def vocabulary(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        tensors["embed"][: len(loaded)].data.copy_(loaded)
        tensors["embed"][len(loaded) :].data.fill_(0)

    model = Loading(
        {"embed": bf16(8, 3), "scale": bf16()}, {"embed": vocabulary, "scale": whole("scale")}
    )
    found = check(model, specs(embed=(5, 3), scale=()))
    assert not found.gaps
    assert found.filled == [("embed", (slice(5, 8, 1), slice(0, 3, 1)), 0)]


def test_what_is_computed_is_told_by_name_with_its_reason() -> None:
    def cast(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        tensors["cast"].data.copy_(loaded)

    def contiguous(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        tensors["turned"].data.copy_(loaded.t().contiguous())

    def added(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        tensors["sum"].data.copy_(loaded + 1)

    def in_place(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        tensors["mul"].data.copy_(loaded)
        tensors["mul"].data.mul_(2)

    def repeated(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        tensors["scale"].data.copy_(loaded)

    loaders = {
        "a": cast,
        "b": contiguous,
        "c": added,
        "d": in_place,
        "e": repeated,
        "w": whole("w"),
    }
    parameters = {name: bf16(4, 4) for name in ("cast", "turned", "sum", "mul", "w")} | {
        "scale": bf16(3)
    }
    model = Loading(parameters, loaders)
    published = specs(b=(4, 4), c=(4, 4), d=(4, 4), e=(1,), w=(4, 4)) | {"a": ("float32", (4, 4))}
    found = record(model.load_weights, model.tensors, published)
    assert found.computed == {
        "cast": "cast from float32 to bfloat16, of 'a'",
        "turned": "it is computed, of 'b'",
        "sum": "it is computed, of 'c'",
        "mul": "aten.mul_.Tensor, of no published tensor",
        "scale": "elements are repeated, of 'e'",
    }
    assert found.casts == {"a": ("float32", "bfloat16")}
    assert set(found.sources) == {"w"}
    assert not found.gaps
    assert found.needs["mul"] == ("d",)


def test_what_is_not_loaded_and_what_is_not_read() -> None:
    loaders = {"q": columns("qkv", 0, 4), "rope": lambda tensors, loaded: None}
    model = Loading({"qkv": bf16(8, 4), "norm": bf16(4)}, loaders)
    found = record(model.load_weights, model.tensors, specs(q=(4, 4), rope=(2,)))
    assert found.gaps == {"qkv": 16, "norm": 4}
    assert found.unread == ("rope",)


def test_unknown_names_are_all_listed() -> None:
    model = Loading({"w": bf16(4)}, {"w": whole("w")})
    found = record(model.load_weights, model.tensors, specs(x=(4,), w=(4,), y=(4,)))
    assert list(found.refused) == ["x", "y"]


def test_wrong_shapes_are_all_listed_with_those_that_the_loader_wants() -> None:
    """Though it says the same of each, and nothing of their shapes."""

    def rows(first: int) -> Callable[..., object]:
        def load(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
            target = tensors["qkv"].data.narrow(0, first, 4)
            if target.shape != loaded.shape:
                raise AssertionError
            target.copy_(loaded)

        return load

    model = Loading({"qkv": bf16(12, 4)}, {"q": rows(0), "k": rows(4), "v": rows(8)})
    published = specs(q=(4, 5), k=(4, 5), v=(4, 4))
    said = "AssertionError: its shape is (4, 5), and that of its place (4, 4)"
    found = record(model.load_weights, model.tensors, published)
    assert found.refused == {"q": said, "k": said}
    usual = specs(q=(4, 4), k=(4, 4), v=(4, 4))
    found = record(model.load_weights, model.tensors, published, usual)
    assert list(found.refused) == ["q", "k"]
    assert "and that of the engine's checkpoint (4, 4)" in found.refused["q"]


def test_a_tensor_that_the_loader_cuts_is_refused_where_its_usual_shape_is_known() -> None:
    model = Loading({"w": bf16(4, 4)}, {"w": columns("w", 0, 4)})
    published = specs(w=(5, 4))
    assert not record(model.load_weights, model.tensors, published).refused
    found = record(model.load_weights, model.tensors, published, specs(w=(4, 4)))
    assert found.refused == {"w": "its shape is (5, 4), and that of the engine's checkpoint (4, 4)"}


@pytest.mark.parametrize("dim", [0, 1])
def test_a_tensor_is_cut_if_all_ranks_together_read_a_part_of_it(dim: int) -> None:
    """Though another one of theirs is cast, and one is left alone by a rank."""
    shape = (8, 5) if dim == 0 else (5, 8)
    ranks = []
    for rank in range(2):
        loaders = {
            "whole": columns("w", 0, 4, of=4 * rank, dim=dim),
            "cut": columns("x", 0, 3, of=3 * rank, dim=dim),
            "cast": columns("y", 0, 4, of=4 * rank, dim=dim),
            "expert": columns("z", 0, 8, dim=dim) if rank else lambda tensors, loaded: None,
        }
        sizes = {"w": 4, "x": 3, "y": 4, "z": 8}
        mine = {
            n: bf16(*(each if each == 5 else size for each in shape)) for n, size in sizes.items()
        }
        model = Loading(mine, loaders)
        published = {**dict.fromkeys(loaders, ("bfloat16", shape)), "cast": ("float32", shape)}
        ranks.append(record(model.load_weights, model.tensors, published).parts)
        usual = record(model.load_weights, model.tensors, published, published)
        assert not usual.parts
    read = (6, 5) if dim == 0 else (5, 6)
    assert left_out(ranks) == {"cut": f"its shape is {shape}, and the engine reads {read} of it"}


def fill_then_copy(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
    """As SGLang's loaders pad on a CPU."""
    place = tensors["w"].data.narrow(0, 0, 4)
    place.narrow(0, len(loaded), 4 - len(loaded)).zero_()
    place.narrow(0, 0, len(loaded)).copy_(loaded)


def append(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
    """As they do on a GPU."""
    numbers = torch.zeros((4 - len(loaded), *loaded.shape[1:]), dtype=loaded.dtype, device="meta")
    tensors["w"].data.narrow(0, 0, 4).copy_(torch.cat([loaded, numbers]))


def nothing_but_numbers(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
    """As on a rank that all of the tensor lies before."""
    place = tensors["w"].data.narrow(0, 0, 4)
    place.copy_(torch.zeros_like(place))


@pytest.mark.parametrize("pad", [fill_then_copy, append, nothing_but_numbers])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_tensor_that_does_not_fill_its_place_is_told_with_both_shapes(
    pad: Callable[..., None], dtype: str
) -> None:
    """Beside one that does, one that is padded whatever its shape is, and numbers that have nothing
    to do with the tensor that was loaded last.
    """

    def with_bias(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        columns("w", 4, 4)(tensors, loaded)
        tensors["bias"].data.zero_()

    def vocabulary(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        tensors["embed"][: len(loaded)].data.copy_(loaded)
        tensors["embed"][len(loaded) :].data.fill_(0)

    model = Loading(
        {"w": bf16(8, 4), "bias": bf16(8), "embed": bf16(8, 4)},
        {"gate": pad, "up": with_bias, "embed": vocabulary},
    )
    published = {**specs(up=(4, 4), embed=(5, 4)), "gate": (dtype, (3, 4))}
    found = record(model.load_weights, model.tensors, published)
    lost = 16 if pad is nothing_but_numbers else 4
    assert found.padded == {
        "gate": Padding("w", lost, (4, 4)),
        "embed": Padding("embed", 12, (8, 4)),
    }
    (name,), (text,) = zip(*found.too_small(published, ["embed"]).items(), strict=True)
    assert name == "gate"
    assert "its shape is (3, 4), which is too small" in text
    assert f"{lost} elements of its place (4, 4) on a rank (in 'w')" in text
    assert not record(model.load_weights, model.tensors, published, published).padded


@pytest.mark.parametrize(
    "cast",
    [
        lambda to, loaded: to.copy_(loaded),
        lambda to, loaded: to.copy_(loaded.to(to.dtype)),
        lambda to, loaded: to.copy_(torch.cat([loaded, loaded.new_zeros(2, 4)])[:4]),
        lambda to, loaded: to.copy_(torch.nn.functional.pad(loaded, (0, 0, 0, 1))[:4]),
    ],
)
def test_a_cast_of_codes_is_told_unless_the_usual_load_has_it(cast: Callable[..., object]) -> None:
    model = Loading({"w": bf16(4, 4)}, {"w": lambda to, loaded: cast(to["w"].data, loaded)})
    for dtype in ("int8", "float8_e4m3fn", "uint8"):
        published: Specs = {"w": (dtype, (4, 4))}
        found = record(model.load_weights, model.tensors, published)
        text = f"it is {dtype}, and the engine's parameter bfloat16"
        assert found.miscast({}) == {"w": text}
        assert found.miscast(specs(w=(4, 4))) == {"w": text}
        assert not found.miscast(published)
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        found = record(model.load_weights, model.tensors, {"w": (dtype, (4, 4))})
        assert not found.miscast({})


def test_what_is_computed_of_codes_is_no_cast() -> None:
    def dequantize(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        tensors["w"].data.copy_(loaded.to(torch.float32) * 0.5)

    model = Loading({"w": bf16(4, 4)}, {"w": dequantize})
    assert not record(model.load_weights, model.tensors, {"w": ("int8", (4, 4))}).miscast({})


def test_a_loader_that_reads_ahead_has_not_refused_what_it_was_given_last() -> None:
    model = Loading({"w": bf16(4)}, dict.fromkeys("wxy", whole("w")))

    def load(weights: Pairs) -> None:
        if "x" in dict(weights):
            raise ValueError("no x")

    with pytest.raises(ManifestMismatch, match=r"refuses 1 published tensor.*perhaps others"):
        record(load, model.tensors, specs(x=(4,), w=(4,), y=(4,)))


def test_a_loader_that_needs_values_is_refused_by_name() -> None:
    def choose(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        if loaded.sum().item() > 0:
            tensors["w"].data.copy_(loaded)

    model = Loading({"w": bf16(4)}, {"w": choose})
    with pytest.raises(RegistrationError, match="cannot be recorded at 'w'"):
        record(model.load_weights, model.tensors, specs(w=(4,)))


def test_memory_that_is_given_is_refused_by_name() -> None:
    def replace(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        tensors["w"].data = loaded

    model = Loading({"w": bf16(4).to("meta")}, {"w": replace})
    with pytest.raises(RegistrationError, match="gives parameter 'w' another memory"):
        record(model.load_weights, model.tensors, specs(w=(4,)))


def test_parameters_that_share_a_storage_are_told_apart_by_their_places() -> None:
    """As a model has them that lays all of its parameters into one buffer."""
    flat = bf16(12, 4)

    def padded(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        tensors["c"].data[:1].fill_(3)
        tensors["c"].data[1:].copy_(loaded)

    loaders = {"x": whole("b"), "y": padded, "z": whole("a")}
    model = Loading({"a": flat[:4], "b": flat[4:8], "c": flat[8:]}, loaders)
    published = specs(x=(4, 4), y=(3, 4), z=(4, 4))
    found = record(model.load_weights, model.tensors, published)
    assert not found.computed
    assert not found.gaps
    assert found.filled == [("c", (0, slice(0, 4, 1)), 3)]
    checkpoint = values(published)
    by_hub = filled(model, found, checkpoint)
    model.load_weights(checkpoint.items())
    assert all(torch.equal(by_hub[name], tensor.data) for name, tensor in model.tensors.items())


def test_a_write_over_several_parameters_is_not_taken_for_one() -> None:
    flat = bf16(8, 4)
    model = Loading(
        {"a": flat[:4], "b": flat[4:]}, {"x": lambda tensors, loaded: flat[2:6].copy_(loaded)}
    )
    found = record(model.load_weights, model.tensors, specs(x=(4, 4)))
    assert not found.sources
    assert set(found.computed) == {"a", "b"}
    assert "writes several parameters that share memory, of 'x'" in found.computed["a"]
    assert found.needs == {"a": ("x",), "b": ("x",)}


def test_a_parameter_that_is_not_contiguous() -> None:
    model = Loading({"w": bf16(6, 4).t()}, {"w": whole("w")})
    found = record(model.load_weights, model.tensors, specs(w=(4, 6)))
    assert found.computed == {"w": "the parameter is not contiguous, of 'w'"}


def test_results_that_go_straight_into_a_parameter() -> None:
    """One is computed; of several at once nothing can be said."""

    def add(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        torch.add(loaded, loaded, out=tensors["w"].data)

    def largest(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        torch.max(
            loaded, 0, out=(tensors["w"].data, torch.empty(4, dtype=torch.int64, device="meta"))
        )

    model = Loading({"w": bf16(4).to("meta")}, {"x": add, "y": largest})
    assert record(model.load_weights, model.tensors, specs(x=(4,))).computed == {
        "w": "aten.add.out, of 'x'"
    }
    with pytest.raises(RegistrationError, match=r"cannot be recorded at 'y': .* writes 'w'"):
        record(model.load_weights, model.tensors, specs(y=(3, 4)))


def test_what_is_no_box_of_both_tensors_is_told_with_its_reason() -> None:
    def rows(first: int, last: int) -> Callable[..., object]:
        return lambda tensors, loaded: tensors[f"{first}"].data.copy_(loaded.view(-1)[first:last])

    def diagonal(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        tensors["diagonal"].data.copy_(loaded.diagonal())

    def pieces(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        tensors["pieces"].data.view(320, 320, 320).copy_(
            loaded.view(320, 320, 320).permute(2, 1, 0)
        )

    loaders = {"a": rows(2, 6), "b": rows(4, 12), "c": rows(0, 6), "d": diagonal, "e": pieces}
    parameters = {
        "2": bf16(4),
        "4": bf16(8),
        "0": bf16(6),
        "diagonal": bf16(4),
        "pieces": bf16(1).expand(320**3),
    }
    meta = {
        name: torch.empty(each.shape, dtype=each.dtype, device="meta")
        for name, each in parameters.items()
    }
    model = Loading(meta, loaders)
    published = specs(a=(3, 4), b=(3, 4), c=(3, 4), d=(4, 4), e=(320**3,))
    found = record(model.load_weights, model.tensors, published)
    assert found.computed == {
        "2": "it crosses rows, of 'a'",
        "0": "it crosses rows, of 'c'",
        "diagonal": "it goes diagonally, of 'd'",
        "pieces": "it falls into too many pieces, of 'e'",
    }
    assert set(found.sources) == {"4"}


def test_padding_before_the_copies_and_over_them() -> None:
    def before(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        tensors["w"].data.fill_(3)
        tensors["w"].data[:2].copy_(loaded)

    found = check(Loading({"w": bf16(4, 2)}, {"a": before}), specs(a=(2, 2)))
    assert not found.gaps
    assert [value for _, _, value in found.filled] == [3]

    def after(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        tensors["w"].data.copy_(loaded)
        tensors["w"].data[2:].zero_()

    model = Loading({"w": bf16(4, 2)}, {"a": after})
    found = record(model.load_weights, model.tensors, specs(a=(4, 2)))
    assert found.computed == {
        "w": "it is filled with a number after it was copied, of no published tensor"
    }
    assert not found.filled


def test_a_gap_of_one_element_and_one_behind_a_fill_that_copies_overlap() -> None:
    def overlapped(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        tensors["w"].data[:4].fill_(0)
        tensors["w"].data[2:6].copy_(loaded)

    model = Loading({"v": bf16(4), "w": bf16(8)}, {"a": columns("v", 0, 3), "b": overlapped})
    found = record(model.load_weights, model.tensors, specs(a=(3,), b=(4,)))
    assert found.gaps == {"v": 1, "w": 2}
    assert found.filled == [("w", (slice(0, 2, 1),), 0)]


def test_places_that_share_one_row_or_are_stepped_through_otherwise() -> None:
    def stepped(step: int, first: int) -> Callable[..., object]:
        return lambda tensors, loaded: tensors["w"].data[first::step].copy_(loaded)

    rows = Loading({"w": bf16(4, 2)}, {"a": columns("w", 0, 3), "b": columns("w", 2, 2)})
    found = record(rows.load_weights, rows.tensors, specs(a=(3, 2), b=(2, 2)))
    assert "copied to twice" in found.computed["w"]
    # both write element 4
    steps = Loading({"w": bf16(8)}, {"a": stepped(2, 0), "b": stepped(3, 1)})
    found = record(steps.load_weights, steps.tensors, specs(a=(4,), b=(3,)))
    assert "copied to twice" in found.computed["w"]


def test_what_is_made_of_another_parameter_needs_what_that_is_made_of() -> None:
    def tie(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        tensors["w"].data.copy_(loaded)
        tensors["scaled"].data.copy_(tensors["w"].data * 2)

    def joined(tensors: Mapping[str, nn.Parameter], loaded: torch.Tensor) -> None:
        kept.append(loaded)
        if len(kept) == 2:
            tensors["sum"].data.copy_(kept[0] + kept[1])

    kept: list[torch.Tensor] = []
    model = Loading(
        {"w": bf16(4), "scaled": bf16(4), "sum": bf16(4)}, {"a": tie, "b": joined, "c": joined}
    )
    found = record(model.load_weights, model.tensors, specs(a=(4,), b=(4,), c=(4,)))
    assert found.needs == {"w": ("a",), "scaled": ("a",), "sum": ("b", "c")}
    assert set(found.sources) == {"w"}
    assert not found.unread


def test_of_two_copies_to_one_place_the_later_one_stays() -> None:
    """As of a scale that experts' two halves share."""
    model = Loading({"w": bf16(4)}, {"a": columns("w", 0, 2), "b": columns("w", 0, 2)})
    found = record(model.load_weights, model.tensors, specs(a=(2,), b=(2,)))
    assert [view.name for _, view in found.sources["w"]] == ["b"]
    assert (found.needs["w"], found.unread) == (("a", "b"), ())
