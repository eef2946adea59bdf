"""Models that have no gradient of one example alone are refused under differential privacy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kinfed.engine.task_factory import make_task
from kinfed.errors import ModelError
from kinfed.privacy.dpsgd import PrivateTask
from kinfed.privacy.noise import seeded_noise


class NoisyNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x + 0.1 * torch.randn_like(x) if self.training else x)


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3))


def layer_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))


@pytest.mark.parametrize("build", [batch_norm, dropout, NoisyNet])
def test_running_statistics_and_random_operations_are_refused(build: type[nn.Module]) -> None:
    task = make_task(build, example=torch.randn(5, 4))
    with pytest.raises(ModelError, match=r"every example's own gradient.*use GroupNorm or LayerNorm"):
        PrivateTask(task, 1.0, 1.0, seeded_noise(0))


def test_others_are_taken() -> None:
    for task in (make_task(layer_norm), make_task(batch_norm, frozen=("1",))):
        assert PrivateTask(task, 1.0, 1.0, seeded_noise(0)).norm_layers() == task.norm_layers()
