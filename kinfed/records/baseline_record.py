"""The record of what it takes no model to reach, which kinfed.runs.baseline computes. Needs no torch: pages show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


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
