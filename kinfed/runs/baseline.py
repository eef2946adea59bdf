"""What it takes no model to reach: the share of each class, or the mean, of a client's own training rows.

Every client predicts the same for all its test rows: the class that most of its training rows have, with the shares of
classes there as probabilities ((n_c + 1) / (n + C), so that a class it has never seen has a chance), or the mean of its
training target. A method that does no better has learnt nothing of the features. It costs nothing and sends nothing, is
the same for all methods of a seed, and stands in every table of results, never among the methods that are ranked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kinfed.data.problem import Problem

MAJORITY, MEAN = "majority class", "mean"


@dataclass(frozen=True)
class Baseline:
    """Of one seed."""

    seed: int
    name: str
    personal: dict[str, float]  # metrics over the clients that are evaluated
    clients: dict[str, float | None]  # the headline metric of every client; None where it is undefined

    def __repr__(self) -> str:
        return f"Baseline({self.name}, seed {self.seed}: {len(self.clients)} clients)"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Baseline:
        return cls(int(record["seed"]), str(record["name"]), dict(record["personal"]), dict(record["clients"]))


def baseline_name(problem: Problem) -> str:
    return MEAN if problem.is_regression else MAJORITY
