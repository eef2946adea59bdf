"""Models of every kind whose local steps are measured: kinfed's own, and such as users write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, scaled_dot_product_attention

from kinfed.data import Features, Federation, LocalTraining, Problem, Ragged
from kinfed.engine import build_model
from kinfed.engine.zoo import minilm, random_minilm

CLASSES = 10
BATCHES = 2  # of different examples that every client has


class PlainMLP(nn.Module):
    """784-128-10 as tutorials write it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 128)
        self.dropout = nn.Dropout(dropout) if dropout else None
        self.fc2 = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = relu(self.fc1(x.flatten(1)))
        out: Tensor = self.fc2(h if self.dropout is None else self.dropout(h))
        return out


class PlainTransformer(nn.Module):
    """Embeddings, torch's own encoder, the mean over positions, and a head."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.words(tokens)).mean(1))
        return out


class PlainLSTM(nn.Module):
    """Embeddings, torch's LSTM, and a head on its last output."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(vocabulary, 8)
        self.lstm = nn.LSTM(8, hidden, batch_first=True)
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.letters(tokens))[0][:, -1])
        return out


class PlainGRU(nn.Module):
    """Embeddings, torch's GRU, and a head on its last output."""

    def __init__(self, vocabulary: int, hidden: int, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.letters = nn.Embedding(vocabulary, 8)
        self.gru = nn.GRU(8, hidden, layers, batch_first=True, dropout=dropout)
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.gru(self.letters(tokens))[0][:, -1])
        return out


class AttentionBlock(nn.Module):
    """A layer as Hugging Face's transformers writes those of BERT, or where `causal` those of GPT-2."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.drop_attention, self.drop_output = nn.Dropout(dropout), nn.Dropout(dropout)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        share = self.dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(q, k, v, dropout_p=share, is_causal=self.causal)
        out: Tensor = self.drop_attention(self.out(mixed.transpose(1, 2).reshape(x.shape)))
        return out

    def feed(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop_output(self.down(gelu(self.up(x))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        if self.causal:  # normalized before
            x = x + self.attend(self.first(x))
            return x + self.feed(self.second(x))
        x = self.first(x + self.attend(x))
        out: Tensor = self.second(x + self.feed(x))
        return out


class PlainEncoder(nn.Module):
    """BERT or, where `causal`, GPT-2 for sequences: embeddings of tokens and positions, layers, and a head."""

    def __init__(
        self, vocabulary: int, length: int, width: int, layers: int, *, dropout: float = 0.1, causal: bool = False
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)
        self.layers = nn.ModuleList([AttentionBlock(width, 4, dropout, causal) for _ in range(layers)])
        self.head = nn.Linear(width, CLASSES)
        self.causal = causal

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight
        x = self.drop(x if self.causal else self.norm(x))
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x)[:, -1] if self.causal else x[:, 0])
        return out


@dataclass(frozen=True)
class StepWorkload:
    """Local steps of some clients."""

    name: str
    what: str
    module: Callable[[str], nn.Module]  # of the folder with pretrained weights, "" for none
    shape: tuple[int, ...]  # of one example
    clients: int
    steps: int
    batch: int
    vocabulary: int = 0  # of examples that are tokens; 0: they are numbers
    momentum: float = 0.0
    lr: float = 0.03
    # Who trains on activations below what is trained, computed before: "both", or "kinfed" alone, beside a loop that
    # passes through the whole model in every step.
    cached: Literal["", "kinfed", "both"] = ""

    @property
    def title(self) -> str:
        return f"{self.what}; {self.clients} clients, {self.steps} steps of {self.batch} x {list(self.shape)}"

    @property
    def training(self) -> LocalTraining:
        return LocalTraining(lr=self.lr, batch=self.batch, steps=self.steps, momentum=self.momentum)

    def quick(self) -> StepWorkload:
        """So small that it takes a moment: shows that everything runs, says nothing about speed."""
        return replace(self, clients=2, steps=1, batch=2)

    def federation(self) -> Federation:
        """Random examples, as many for every client."""
        generator = torch.Generator().manual_seed(0)
        each = BATCHES * self.batch
        total = each * self.clients
        if self.vocabulary:
            raw = torch.randint(1, self.vocabulary, (total, *self.shape), generator=generator)
        else:
            raw = torch.randn(total, *self.shape, generator=generator)
        no_client = Ragged.empty(self.clients)
        return Federation(
            features=Features(raw),
            labels=torch.randint(CLASSES, (total,), generator=generator),
            problem=Problem.of_classes(CLASSES),
            train=Ragged(torch.arange(0, total + 1, each), torch.arange(total)),
            val=no_client,
            test=no_client,
            names=[str(client) for client in range(self.clients)],
            description={"dataset": "synthetic", "partition": "equal"},
        )


def _own(name: str, shape: tuple[int, ...], **options: object) -> Callable[[str], nn.Module]:
    return lambda _: build_model(name, shape, CLASSES, options)


def _minilm(length: int, **options: object) -> Callable[[str], nn.Module]:
    def build(weights: str) -> nn.Module:
        make = minilm if weights else random_minilm
        return make((length,), CLASSES, **options, **({"weights": weights} if weights else {}))

    return build


_DIGITS, _CIFAR, _VECTORS, _WORDS = (1, 28, 28), (3, 32, 32), (25, 300), 30522

_ALL = (
    StepWorkload("user-mlp", "nn.Module 784-128-10 with F.relu", lambda _: PlainMLP(), _DIGITS, 20, 20, 10),
    StepWorkload("user-dropout", "the same with nn.Dropout", lambda _: PlainMLP(0.5), _DIGITS, 20, 20, 10),
    StepWorkload(
        "user-lstm", "nn.Embedding and nn.LSTM of 64", lambda _: PlainLSTM(80, 64), (32,), 20, 10, 10, vocabulary=80
    ),
    StepWorkload("gru", "model gru, one layer of 64", _own("gru", (32, 8)), (32, 8), 8, 10, 10),
    StepWorkload("gru-two", "model gru, two layers of 64", _own("gru", (32, 8), layers=2), (32, 8), 8, 10, 10),
    StepWorkload(
        "user-gru", "nn.Embedding and nn.GRU of 64", lambda _: PlainGRU(80, 64), (32,), 20, 10, 10, vocabulary=80
    ),
    StepWorkload(
        "gru-dropout", "the same, two layers of 128 with dropout between", lambda _: PlainGRU(80, 128, 2, 0.2), (32,),
        8, 10, 10, vocabulary=80,
    ),
    StepWorkload(
        "bert-tiny", "BERT of 2 x 32 with dropout, as transformers writes it", lambda _: PlainEncoder(1000, 16, 32, 2),
        (16,), 8, 20, 8, vocabulary=1000,
    ),
    StepWorkload(
        "gpt2-tiny", "GPT-2 of 2 x 32 with dropout, as transformers writes it",
        lambda _: PlainEncoder(1000, 16, 32, 2, causal=True), (16,), 8, 20, 8, vocabulary=1000,
    ),
    StepWorkload(
        "bert-plain", "the BERT without dropout", lambda _: PlainEncoder(1000, 16, 32, 2, dropout=0.0), (16,), 8, 20, 8,
        vocabulary=1000,
    ),
    StepWorkload(
        "bert-small", "BERT of 4 x 128 with dropout", lambda _: PlainEncoder(1000, 32, 128, 4), (32,), 4, 5, 16,
        vocabulary=1000,
    ),
    StepWorkload("lstm", "model lstm, two layers of 256", _own("lstm", _VECTORS), _VECTORS, 4, 5, 10),
    StepWorkload(
        "lstm-small", "model lstm, one layer of 80", _own("lstm", (40, 50), hidden=80, layers=1), (40, 50), 20, 10, 10
    ),
    StepWorkload(
        "user-transformer", "nn.TransformerEncoder of 2 x 64", lambda _: PlainTransformer(2000, 64, 2), (32,),
        8, 10, 16, vocabulary=2000,
    ),
    StepWorkload(
        "transformer", "model transformer, 2 x 128", _own("transformer", (32,), vocabulary=2000), (32,), 8, 5, 16,
        vocabulary=2000,
    ),
    StepWorkload(
        "resnet18", "model resnet18 with BatchNorm, width 16", _own("resnet18", _CIFAR, width=16), _CIFAR, 4, 4, 16
    ),
    StepWorkload(
        "resnet18-momentum", "model resnet18 with BatchNorm, width 64, and momentum", _own("resnet18", _CIFAR), _CIFAR,
        2, 2, 10, momentum=0.9, lr=0.003,  # at 0.03 twenty steps on noise differ by 1e-3 from rounding alone
    ),
    StepWorkload("minilm", "MiniLM, LoRA of rank 8", _minilm(32), (32,), 20, 1, 16, vocabulary=_WORDS),
    StepWorkload("minilm-small", "the same in small steps", _minilm(8), (8,), 20, 1, 4, vocabulary=_WORDS),
    StepWorkload(
        "minilm-last2", "MiniLM, LoRA of rank 8 in the last two layers; kinfed on activations, the loop through all",
        _minilm(32, lora_layers=2), (32,), 20, 1, 16, vocabulary=_WORDS, cached="kinfed",
    ),
    StepWorkload(
        "minilm-last2-cached", "the same, both on activations", _minilm(32, lora_layers=2), (32,), 20, 2, 16,
        vocabulary=_WORDS, cached="both",
    ),
    StepWorkload(
        "minilm-head", "MiniLM, the head alone; kinfed on features, the loop through all", _minilm(32, lora_rank=0),
        (32,), 20, 1, 16, vocabulary=_WORDS, cached="kinfed",
    ),
    StepWorkload(
        "minilm-head-cached", "the same, both on features", _minilm(32, lora_rank=0), (32,), 20, 20, 16,
        vocabulary=_WORDS, cached="both",
    ),
)  # fmt: skip

STEP_WORKLOADS = {workload.name: workload for workload in _ALL}
