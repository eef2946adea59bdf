"""Models that are mixtures: K models of one task, and how much each of them counts.

A mixture is one flat row like any other model, only wider: [K (P + 1)], the parameters of the K components one after
the other, then their weights π. No width is both P and K (P + 1), so a row tells by its width what it is
(kinfed.engine.personal.personal_models); p(y | x) = Σ_k π_k p_k(y | x). Where models predict a number (one output), so
does the mixture: Σ_k π_k f_k(x); such mixtures are used, not trained.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from kinfed.data import Batch, LocalTraining
from kinfed.engine.contract.columns import ParameterSlot
from kinfed.engine.contract.descent import PLAIN, Terms
from kinfed.engine.contract.feature_loss import FeatureLoss, refuse_feature_loss
from kinfed.engine.task_factory import ModuleTask, Task
from kinfed.errors import ModelError

LEAST_SHARE = 1e-30  # of an example in a component: as good as none, but an example that is there


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


class MixtureTask(WiderTask):
    """Rows [n, K (P + 1)]. Training changes the components and leaves π as it is."""

    backend = "mixture"
    kind = "a mixture of several"

    def __init__(self, task: Task, components: int) -> None:
        super().__init__(task)
        self.components = components
        P = task.num_params
        self.num_params = components * (P + 1)
        parts = [
            replace(slot, name=f"components.{k}.{slot.name}", start=k * P + slot.start, stop=k * P + slot.stop)
            for k in range(components)
            for slot in task.slots
        ]
        self.slots = (*parts, ParameterSlot("pi", (components,), components * P, self.num_params))

    def split(self, theta: Tensor) -> tuple[list[Tensor], Tensor]:
        """Views: the components, each [n, P], and π [n, K]."""
        P = self.task.num_params
        return [theta[:, k * P : (k + 1) * P] for k in range(self.components)], theta[:, self.components * P :]

    def init(self, seed: int, number: int = 0) -> Tensor:
        first = number * self.components
        models = torch.stack([self.task.init(seed, first + k) for k in range(self.components)])
        return mixture_rows(models[None], models.new_full((1, self.components), 1 / self.components))[0]

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        """log Σ_k π_k softmax(z_k): logits of which the softmax is the mixture's own probabilities; Σ_k π_k z_k where
        the models predict numbers."""
        models, pi = self.split(theta)
        return mixed([self.task.logits(model, x) for model in models], pi[:, None, None, :], self.classifies)

    def weighted(self, theta: Tensor, batch: Batch) -> list[Batch]:
        """The batch as each component sees it: the gradient of the mixture's loss in θ_k is Σ_b weight q_k ∇f_k."""
        if not self.classifies:
            raise ModelError("a mixture of models that predict numbers is not trained as a whole; set finetune to 0")
        models, pi = self.split(theta)
        # No share is 0, which would mean padding: all components see the same examples, and normalize by them where
        # they normalize by the batch.
        q = self.responsibilities(models, pi, batch).clamp_min(LEAST_SHARE)
        return [replace(batch, weight=batch.weight * q[..., k], may_pad=True) for k in range(q.shape[-1])]

    def responsibilities(self, models: Sequence[Tensor], pi: Tensor, batch: Batch) -> Tensor:
        """[n, B, K] q_k ∝ π_k exp(−f_k): the chance that an example belongs to component k. Log-sum-exp inside."""
        losses = torch.stack([self.task.losses(model, batch) for model in models], -1)
        return torch.softmax(pi.log()[:, None, :].to(losses.dtype) - losses, -1)

    def _joined(self, grad: Callable[..., Tensor], theta: Tensor, batch: Batch) -> Tensor:
        models, pi = self.split(theta)
        parts = zip(models, self.weighted(theta, batch), strict=True)
        return torch.cat([*(grad(model, part) for model, part in parts), torch.zeros_like(pi)], 1)

    def take_step_(self, theta: Tensor, batch: Batch, lr: float | Tensor, terms: Terms) -> None:
        refuse_feature_loss(terms.feature_loss, self.kind)
        models, _ = self.split(theta)
        own = [PLAIN] * self.components
        if terms.proximal is not None:
            lam, center = terms.proximal
            own = [Terms((lam, part)) for part in self.split(center)[0]]
        for model, part, of_model in zip(models, self.weighted(theta, batch), own, strict=True):
            self.task.take_step_(model, part, lr, of_model)

    def mask(self, training: LocalTraining) -> Tensor | None:
        """bool [K (P + 1)]: what may be trained, where weight decay would shrink π; else None (its gradient is 0).

        Running statistics lie among the components' parameters and would shrink as well: only forward passes move
        them."""
        if not training.weight_decay:
            return None
        mask = torch.zeros(self.num_params, dtype=torch.bool)
        for slot in self.slots:
            mask[slot.start : slot.stop] = slot.trainable and slot.name != "pi"
        return mask.to(self.device)

    def module_of(self, row: Tensor) -> MixtureModule:
        """A ready module with the parameters of one row."""
        (models, pi), make = self.split(row[None]), self._modules().module_of
        return MixtureModule([make(model[0]) for model in models], pi[0].detach().clone()).eval()


class MixtureModule(nn.Module):
    """log Σ_k π_k softmax(component_k(x)): argmax and cross-entropy of it are those of the mixture. Of components with
    one output, which predict a number, Σ_k π_k component_k(x)."""

    pi: Tensor

    def __init__(self, components: Sequence[nn.Module], pi: Tensor) -> None:
        super().__init__()
        self.components = nn.ModuleList(components)
        self.register_buffer("pi", pi)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [component(x) for component in self.components]
        return mixed(outputs, self.pi, classifies=outputs[0].shape[-1] > 1)


def mixed(outputs: Sequence[Tensor], pi: Tensor, classifies: bool) -> Tensor:
    """One output [..., C] of those of the components, with π [..., K] to be broadcast behind C."""
    if not classifies:
        return (torch.stack(list(outputs), -1) * pi).sum(-1)
    log_p = torch.stack([torch.log_softmax(z, -1) for z in outputs], -1)
    return torch.logsumexp(log_p + pi.log(), -1)


def mixture_rows(models: Tensor, pi: Tensor) -> Tensor:
    """[n, K (P + 1)] from models [n, K, P] and weights [n, K]."""
    return torch.cat([models.flatten(1), pi.to(models.dtype)], 1)


def num_components(width: int, num_params: int) -> int:
    """K of a row of that width; other widths are refused."""
    components, rest = divmod(width, num_params + 1)
    if rest or not components:
        raise ModelError(
            f"a row of {width} numbers is neither a model of {num_params} parameters nor a mixture of such models"
        )
    return components
