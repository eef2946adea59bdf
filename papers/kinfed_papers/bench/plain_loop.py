"""The yardstick: FedAvg as a careful user of PyTorch writes it, without kinfed's engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from kinfed.data import Federation, LocalTraining
from kinfed.engine import make_task
from kinfed.server import Schedule
from kinfed_papers.bench.workload import Workload

Example = tuple[Tensor, Tensor]


class PlainLoop:
    """Examples are float32 (or tokens) and standardized before the first round: of images that takes four times the
    engine's memory, and costs nothing later. Clients begin at the shared model, of which only what is trained, and
    running statistics, is copied."""

    def __init__(
        self,
        module: nn.Module,
        start: Iterable[Tensor],
        federation: Federation,
        training: LocalTraining,
        participation: float = 1.0,
    ) -> None:
        """`start` are the values of the module's trained parameters, then of its running statistics."""
        self.own, self.training = module.train(), training
        self._trained = [p for p in module.parameters() if p.requires_grad]
        statistics = [buffer for buffer in module.buffers() if buffer.dtype == torch.float32]
        self._state = [p.detach() for p in self._trained] + statistics
        self._shared = [value.detach().clone() for value in start]
        self.examples = federation.features.gather(torch.arange(len(federation.features)))
        self.labels = federation.labels
        self.rows = federation.train.lists()
        self.schedule = Schedule(participation)
        self.completed = 0

    @classmethod
    def of_round(cls, workload: Workload, federation: Federation) -> PlainLoop:
        """The loop for a round of a named model, from the engine's start."""
        task = make_task(workload.build)
        start = task.unflatten(task.init(0)).values()
        return cls(conventional(workload), start, federation, workload.training, workload.participation)

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
            yield self.examples[index], self.labels[index]

    def train(self, clients: Sequence[int], batches: Callable[[int], Iterable[Example]]) -> None:
        criterion = nn.CrossEntropyLoss()
        total = [torch.zeros_like(value) for value in self._shared]
        for client in clients:
            _copy(self._shared, self._state)
            optimizer = torch.optim.SGD(self._trained, lr=self.training.lr, momentum=self.training.momentum)
            for x, y in batches(client):
                optimizer.zero_grad()
                criterion(self.own(x), y).backward()
                optimizer.step()
            for so_far, value in zip(total, self._state, strict=True):
                so_far.add_(value, alpha=len(self.rows[client]))
        examples = sum(len(self.rows[client]) for client in clients)
        _copy([so_far / examples for so_far in total], self._shared)

    def parameters(self) -> Tensor:
        """[P] of the shared model."""
        return torch.cat([value.reshape(-1) for value in self._shared])


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def conventional(workload: Workload) -> nn.Module:
    """The workload's model with every ReLU before its pooling, as it is usually written."""
    layers = list(workload.build().children())
    for i in range(len(layers) - 1):
        if isinstance(layers[i], nn.MaxPool2d) and isinstance(layers[i + 1], nn.ReLU):
            layers[i], layers[i + 1] = layers[i + 1], layers[i]
    return nn.Sequential(*layers)
