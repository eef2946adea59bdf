"""The task of rows that hold more than one plain model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor

from kinfed.data import Batch
from kinfed.engine.contract.feature_loss import FeatureLoss, refuse_feature_loss
from kinfed.engine.task_factory import ModuleTask, Task
from kinfed.errors import ModelError


class WiderTask(Task):
    """Rows that hold more than one plain model of `task`. A loss at features or logits is refused."""

    kind: str  # of model, as the refusal names it

    def __init__(self, task: Task) -> None:
        self.task, self.device, self.one_row_at_a_time = task, task.device, task.one_row_at_a_time
        self.classifies, self.objective = task.classifies, task.objective
        self.problem, self.metric = task.problem, task.metric

    @property
    def plain_task(self) -> Task:
        return self.task.plain_task

    def grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        refuse_feature_loss(feature_loss, self.kind)
        return self._joined(self.task.grad, theta, batch)

    def training_grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        refuse_feature_loss(feature_loss, self.kind)
        return self._joined(self.task.training_grad, theta, batch)

    @abstractmethod
    def _joined(self, grad: Callable[..., Tensor], theta: Tensor, batch: Batch) -> Tensor:
        """[n, width] gradient of the wide rows, by the plain task's `grad` or `training_grad`."""

    def _modules(self) -> ModuleTask:
        if not isinstance(self.task, ModuleTask):
            raise ModelError(f"models of a {type(self.task).__name__} are not torch modules")
        return self.task
