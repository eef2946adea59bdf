"""What recipes of popular methods share. Each asks a claim of the method's own paper on data and a split that fit two
cores, which are not those of its tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from kinfed_papers.recipe import Claim, PublishedNumber, Question, ResultColumn, ResultTable, Scale

ABSTRACT = "Abstract"  # of the paper: where the claim stands in words

NO_NUMBERS = (
    "The claim comes from the paper’s abstract; its tables use other data, networks and budgets, and no published "
    "figures are shown next to ours."
)
ONE_RATE = (
    "All methods have the same learning rate, batches and local steps, and options at their defaults; the paper tunes "
    "its methods. `kinfed tune` chooses fairly."
)
SMOKE_IMAGES = "digits and a smaller network in place of images in colour."


def image_settings(scale: Scale, partition: dict[str, Any], clients: int, participation: float) -> dict[str, Any]:
    """CIFAR-10 with a small convolutional network: 12,000 images and 40 rounds at the scale small."""
    common: dict[str, Any] = {"partition": partition, "clients": clients, "participation": participation, "batch": 20}
    if scale == "smoke":
        smaller = {"dataset": "digits", "model": "cnn_small", "clients": min(clients, 20)}
        return common | smaller | {"steps": 3, "rounds": 4, "lr": 0.05, "seeds": [0, 1]}
    common |= {"model": "cnn_tutorial", "lr": 0.05, "seeds": [10, 11, 12]}
    if scale == "small":
        return common | {"dataset": {"name": "cifar10", "examples": 12000}, "steps": 10, "rounds": 40}
    return common | {"dataset": "cifar10", "epochs": 1, "rounds": 200, "seeds": [10, 11, 12, 13, 14]}


SMALL_IMAGES = (
    "12,000 of CIFAR-10’s images, a network of two convolutions and three dense layers (62,006 parameters), 10 steps "
    "of 20 examples in 40 rounds: far from converged. Compare rankings, not levels."
)


def personal_table(
    title: str,
    part: str,
    methods: Mapping[str, str],
    published: Mapping[tuple[str, str], PublishedNumber] = MappingProxyType({}),
) -> ResultTable:
    """Accuracy of the personal models and of the tenth of clients with the lowest, of every method."""
    metrics = {"Accuracy": "personal.accuracy", "Worst 10 %": "personal.worst10"}
    return ResultTable(title, methods, ResultColumn.by_metric(part, metrics), published)


def beyond_rivals(part: str, row: str, name: str, rivals: Iterable[str]) -> list[Question]:
    """Questions of ours that the papers of these methods leave open: is the method above fine-tuning, and above
    training alone?"""
    rival_names = {"fedavg": "fine-tuned FedAvg", "local": "every client alone"}
    return [Question.above(f"{name} above {rival_names[rival]}", part, row, [rival], main=True) for rival in rivals]


def above_alternatives(part: str, row: str, name: str, rivals: Iterable[str], place: str = ABSTRACT) -> Claim:
    return Claim.above(
        f"{name} above the personalized methods it is compared with", part, row, rivals, place=place, main=True
    )
