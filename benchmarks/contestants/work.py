"""The rounds that all contestants of benchmarks/rivals.py compute, and the data they compute them on.

Needs numpy alone: every contestant imports it in an environment of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HELD_OUT = 10_000
SIGNAL, NOISE = 0.12, 48.0  # strength of a class's image, and the standard deviation of noise in shades of grey
# Of methods that have any; equal for all contestants.
FEDPROX_MU = 0.1
DITTO_LAM = 1.0
APFL_ALPHA = 0.5
PFEDME_LAM, PFEDME_STEPS = 15.0, 5
LSTM_UNITS, RESNET_WIDTH, TRANSFORMER_WIDTH = 80, 16, 64  # of models


@dataclass(frozen=True)
class Work:
    """Rounds of one kind. Local work is counted in epochs, the only unit that means the same to all libraries."""

    name: str
    title: str
    model: str  # mlr, mlp, dense, cnn, lstm, resnet18 or transformer
    shape: tuple[int, ...]  # of an image; of sequences length and width
    classes: int
    clients: int
    active: int
    batch: int
    lr: float
    examples: int  # of a client, on average
    fewest: int  # as many as `examples`: all clients have the same number
    epochs: int = 1
    methods: tuple[str, ...] = ("fedavg",)
    turn: int = 1  # rounds of a turn, for all contestants: enough to forget what ran before
    rounds: int = 0  # of the whole job; 0: only rounds are measured
    held_out: int = HELD_OUT  # examples that models are tested on


EIGHT = ("fedavg", "fedprox", "scaffold", "apfl", "ditto", "pfedme", "perfedavg", "fedrep")

WORKS = {
    work.name: work
    for work in (
        Work(
            name="W1",
            title="logistic regression 784-10, 100 of 1,000 clients of 100 examples, two epochs: 20 steps of 10",
            model="mlr", shape=(1, 28, 28), classes=10, clients=1000, active=100, batch=10, lr=0.03,
            examples=100, fewest=100, epochs=2, turn=20,
        ),
        Work(
            name="W1_UNEQUAL",
            title="the same with clients of 10 to thousands of examples, 100 on average",
            model="mlr", shape=(1, 28, 28), classes=10, clients=1000, active=100, batch=10, lr=0.03,
            examples=100, fewest=10, epochs=2, turn=20,
        ),
        Work(
            name="W2",
            title="MLP 784-128-10, 40 clients of 400 examples, 20 steps of 20",
            model="mlp", shape=(1, 28, 28), classes=10, clients=40, active=40, batch=20, lr=0.03,
            examples=400, fewest=400, methods=EIGHT,
        ),
        Work(
            name="W3",
            title="CNN (conv 32 and 64 of 5x5, dense 512), 15 clients of 640 examples, 20 steps of 32",
            model="cnn", shape=(3, 32, 32), classes=10, clients=15, active=15, batch=32, lr=0.03,
            examples=640, fewest=640,
        ),
        Work(
            name="LR_MNIST",
            title="FLUTE's LR_MNIST: logistic regression, 10 of 1,000 clients, one epoch in batches of 10, 100 rounds",
            model="mlr", shape=(1, 28, 28), classes=10, clients=1000, active=10, batch=10, lr=0.03,
            examples=60, fewest=10, turn=100, rounds=100,
        ),
        Work(
            name="APFL_EMNIST",
            title="fedjax's APFL on data like EMNIST: dense 784-200-200-62, 340 of 3,400 clients, one epoch of 20",
            model="dense", shape=(1, 28, 28), classes=62, clients=3400, active=340, batch=20, lr=0.03,
            examples=50, fewest=10, methods=("apfl",),
        ),
        Work(
            name="LSTM",
            title="LSTM of 80 over the 28 rows of an image, 10 clients of 200 examples, 10 steps of 20",
            model="lstm", shape=(28, 28), classes=10, clients=10, active=10, batch=20, lr=0.03,
            examples=200, fewest=200,
        ),
        Work(
            name="RESNET18",
            title="ResNet-18 with BatchNorm, 16 channels at first, 4 clients of 80 examples, 5 steps of 16",
            model="resnet18", shape=(3, 32, 32), classes=10, clients=4, active=4, batch=16, lr=0.03,
            examples=80, fewest=80, held_out=1000,
        ),
        Work(
            name="TRANSFORMER",
            title="nn.TransformerEncoder of 2 x 64 over the 28 rows of an image, 8 clients of 160 examples, 10 steps "
            "of 16",
            model="transformer", shape=(28, 28), classes=10, clients=8, active=8, batch=16, lr=0.03,
            examples=160, fewest=160,
        ),
    )
}  # fmt: skip


@dataclass
class Images:
    """uint8 images of all clients, one client after the other, and held-out ones."""

    x: NDArray[np.uint8]  # [N, ...]
    y: NDArray[np.int64]
    offsets: NDArray[np.int64]  # [K + 1] where each client's examples begin
    test_x: NDArray[np.uint8]
    test_y: NDArray[np.int64]

    def standardized(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Training and held-out images as float32, for libraries that do not take bytes."""
        return tuple((x.astype(np.float32) - MEAN) / SCALE for x in (self.x, self.test_x))  # type: ignore[return-value]

    def save(self, path: Path) -> None:
        np.savez(path, **vars(self))

    @staticmethod
    def load(path: Path) -> Images:
        with np.load(path) as file:
            return Images(**{name: file[name] for name in file.files})


MEAN, SCALE = np.float32(127.5), np.float32(73.9)


def make_images(work: Work, seed: int = 0) -> Images:
    """Every class is a random image; an example is a faint one of them with noise. Sizes of clients are
    `fewest` plus lognormal(0, 2) scaled to the mean."""
    draw = np.random.default_rng(seed)
    share = np.exp(2.0 * draw.standard_normal(work.clients))
    more = (work.examples - work.fewest) * work.clients
    count = work.fewest + (share * (more / share.sum())).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(count)])
    typical = draw.uniform(64, 192, (work.classes, *work.shape)).astype(np.float32)

    def images(number: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        y = draw.integers(work.classes, size=number)
        x = np.empty((number, *work.shape), np.uint8)
        for begin in range(0, number, 10_000):  # in pieces: floats of all images at once would fill the memory
            some = y[begin : begin + 10_000]
            noise = NOISE * draw.standard_normal((len(some), *work.shape), dtype=np.float32)
            x[begin : begin + 10_000] = np.clip(128 + SIGNAL * (typical[some] - 128) + noise, 0, 255)
        return x, y

    x, y = images(int(offsets[-1]))
    test_x, test_y = images(work.held_out)
    return Images(x, y, offsets, test_x, test_y)


class Side:
    """One contestant at one work and method. Making it loads data and may compile; `rounds` is what is measured."""

    has_processes = False  # whether other processes compute for it

    def __init__(self, work: Work, images: Images, method: str, cores: int) -> None:
        raise NotImplementedError

    def rounds(self, count: int) -> None:
        raise NotImplementedError

    def accuracy(self) -> float:
        """Of the server's model on the held-out examples."""
        raise NotImplementedError

    def versions(self) -> dict[str, Any]:
        raise NotImplementedError

    def close(self) -> None:
        """End what was started."""


def versions_of(*packages: str) -> dict[str, str]:
    from importlib.metadata import version

    return {package: version(package) for package in packages}
