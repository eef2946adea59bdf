"""Models of every kind whose local steps are measured: kinfed's own, and such as users write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

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
        nobody = Ragged.empty(self.clients)
        return Federation(
            features=Features(raw),
            labels=torch.randint(CLASSES, (total,), generator=generator),
            problem=Problem.of_classes(CLASSES),
            train=Ragged(torch.arange(0, total + 1, each), torch.arange(total)),
            val=nobody,
            test=nobody,
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
