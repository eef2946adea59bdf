"""Methods agree with independent implementations, which notice a method that computes something else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.ditto import Ditto
from kinfed.algorithms.fedavg import FedAvg
from kinfed.data.examples.batches import LocalTraining
from kinfed.testing import REFERENCES, ContractError, ReferenceCase, check_reference, reference

WORK = LocalTraining(lr=0.1, batch=100, steps=2)


@pytest.mark.parametrize("name", REFERENCES)
def test_methods_agree_with_independent_implementations(name: str) -> None:
    assert check_reference(name) < 1e-6


@dataclass(frozen=True)
class ForgetsTheRate(Ditto):
    def client_update(self, task: Any, client: Any, down: Any, data: Any) -> Any:
        other = Ditto(self.training, lam=self.lam / self.training.lr)
        return other.client_update(task, client, down, data)


def test_a_method_that_computes_something_else_is_noticed() -> None:
    check_reference("ditto", Ditto(WORK, lam=0.5))
    with pytest.raises(ContractError, match=r"ditto: client v of client \d is off by .* after round 1"):
        check_reference("ditto", ForgetsTheRate(WORK, lam=0.5))
    with pytest.raises(ContractError, match="fedavg: round 1 takes"):
        check_reference("fedavg", FedAvg(WORK, weights="equal"))


def test_references_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REFERENCES, "fedavg", REFERENCES["fedavg"])

    @reference("fedavg", weights="equal")
    def halves(case: ReferenceCase, weights: str) -> Iterator[dict[str, Tensor]]:
        w = case.start
        for active in case.rounds:
            w = torch.stack([case.train(m, w) for m in active]).mean(0)
            yield {"server w": w}

    assert check_reference("fedavg") < 1e-6
    with pytest.raises(ContractError, match="server w is off"):
        check_reference("fedavg", make_algorithm("fedavg", WORK))
