"""The yardstick: FedAvg as a careful user of PyTorch writes it, without kinfed's engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from kinfed.bench.workload import Workload
from kinfed.data.federation import Federation
from kinfed.engine.task import make_task
from kinfed.server.schedule import Schedule

Example = tuple[Tensor, Tensor]


class PlainLoop:
    """Images are float32 and standardized before the first round: four times the engine's memory, and no cost later."""

    def __init__(self, workload: Workload, federation: Federation) -> None:
        self.training = workload.training
        self.shared, self.own = conventional(workload), conventional(workload)
        task = make_task(workload.build)
        with torch.no_grad():
            for p, value in zip(self.shared.parameters(), task.unflatten(task.init(0)).values(), strict=True):
                p.copy_(value)
        self.images = federation.features.gather(torch.arange(len(federation.features)))
        self.labels = federation.labels
        self.rows = federation.train.lists()
        self.schedule = Schedule(workload.participation)
        self.completed = 0

    def round(self) -> None:
        self.completed += 1
        active = self.schedule.active(0, self.completed, len(self.rows)).tolist()
        self.train(active, self.batches)

    def batches(self, client: int) -> Iterator[Example]:
        rows = self.rows[client]
        size = min(self.training.batch, len(rows))
        order, position = torch.randperm(len(rows)), 0
        for _ in range(self.training.steps or 0):
            if position + size > len(rows):
                order, position = torch.randperm(len(rows)), 0
            index = rows[order[position : position + size]]
            position += size
            yield self.images[index], self.labels[index]

    def train(self, clients: Sequence[int], batches: Callable[[int], Iterable[Example]]) -> None:
        optimizer = torch.optim.SGD(self.own.parameters(), lr=self.training.lr)
        criterion = nn.CrossEntropyLoss()
        total = [torch.zeros_like(p) for p in self.shared.parameters()]
        for client in clients:
            self.own.load_state_dict(self.shared.state_dict())
            for x, y in batches(client):
                optimizer.zero_grad()
                criterion(self.own(x), y).backward()
                optimizer.step()
            with torch.no_grad():
                for so_far, p in zip(total, self.own.parameters(), strict=True):
                    so_far.add_(p, alpha=len(self.rows[client]))
        examples = sum(len(self.rows[client]) for client in clients)
        with torch.no_grad():
            for p, so_far in zip(self.shared.parameters(), total, strict=True):
                p.copy_(so_far / examples)

    def parameters(self) -> Tensor:
        """[P] of the shared model."""
        return torch.cat([p.detach().reshape(-1) for p in self.shared.parameters()])


def conventional(workload: Workload) -> nn.Module:
    """The workload's model with every ReLU before its pooling, as it is usually written."""
    layers = list(workload.build().children())
    for i in range(len(layers) - 1):
        if isinstance(layers[i], nn.MaxPool2d) and isinstance(layers[i + 1], nn.ReLU):
            layers[i], layers[i + 1] = layers[i + 1], layers[i]
    return nn.Sequential(*layers)
