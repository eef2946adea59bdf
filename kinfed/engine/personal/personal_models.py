"""Personal models: a plain model, a mixture of several, a model with an extension, or trees. Each is one flat row, and
the type says which task and module belong to it and how its numbers are called. Rows travel and are stored without
their type: it is read from the width and the mark of a row, and from the names of a file's tensors.

    plain      [P]
    mixture    [K (P + 1)]        the parameters of K components one after the other, then their weights π
    tempered   [K (P + 2) + 1]    a mixture, then the temperatures T of its components, and a mark that says so
    extended   [P + E + 1]        the plain model's columns, E numbers of its `Extension`, and a mark that says which
    trees      [W]                structure, thresholds and leaf values of an ensemble, and a mark; nothing of a plain
                                  model (kinfed.engine.trees.tree_models)
    joint      [2 P + 1]          two bodies under one head, and a mark (kinfed.engine.personal.joint_models)

A mixture gives p(y | x) = Σ_k π_k p_k(y | x), whose p_k has logits z_k / T_k if there are temperatures: those of a
model that ends in a linear layer can be put into that layer, those of any other stand beside it. Where models predict a
number (one output), so does the mixture: Σ_k π_k f_k(x). Such mixtures, and those with temperatures, are used, not
trained. No width is both P and K (P + 1).

Some methods predict with a second network between features and logits, or beside the head (FedCP's gate, GPFL's valve,
the neighbours of kNN-Per): their models have extensions. An extension is registered (`kinfed.register("extension",
...)`), so that files with its mark are read. An `ExtendedTask` also trains: the gradient of a loss in features, head
and extension comes from autograd there, that of the body from the engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from kinfed.core import registry_of
from kinfed.data import Batch, LocalTraining
from kinfed.engine.contract.columns import ParameterSlot
from kinfed.engine.contract.descent import PLAIN, Terms
from kinfed.engine.contract.feature_loss import Deltas, cross_entropy, refuse_feature_loss
from kinfed.engine.contract.head import Head, HeadProbe, find_head
from kinfed.engine.personal.architectures import Architectures
from kinfed.engine.personal.joint_models import JOINT, JointModule, JointTask
from kinfed.engine.personal.joint_models import PREFIX as HALVES
from kinfed.engine.personal.wider_task import WiderTask
from kinfed.engine.rows.layout import RowLayout
from kinfed.engine.task_factory import ModuleTask, Task
from kinfed.engine.trees.tree_models import PREFIX, TreeModule, TreeShape, TreeTask, tree_tensors
from kinfed.errors import ModelError

LEAST_SHARE = 1e-30  # of an example in a component: as good as none, but an example that is there
TEMPERED = -0.5  # the mark at the end of a mixture with temperatures; those of extensions are whole numbers


class MixtureTask(WiderTask):
    """Rows [n, K (P + 1)]. Training changes the components and leaves π as it is. Rows [n, K (P + 2) + 1] of `tempered`
    mixtures are not trained."""

    backend = "mixture"
    kind = "a mixture of several"

    def __init__(self, task: Task, components: int, *, tempered: bool = False) -> None:
        super().__init__(task)
        self.components, self.tempered = components, tempered
        P = task.num_params
        weights_end = components * (P + 1)
        self.num_params = weights_end + (components + 1 if tempered else 0)
        parts = [
            replace(slot, name=f"components.{k}.{slot.name}", start=k * P + slot.start, stop=k * P + slot.stop)
            for k in range(components)
            for slot in task.slots
        ]
        temperature = (ParameterSlot("temperature", (components + 1,), weights_end, self.num_params),)
        self.slots = (
            *parts, ParameterSlot("pi", (components,), components * P, weights_end), *(temperature if tempered else ()),
        )  # fmt: skip

    def split(self, theta: Tensor) -> tuple[list[Tensor], Tensor]:
        """Views: the components, each [n, P], and π [n, K]."""
        P, K = self.task.num_params, self.components
        return [theta[:, k * P : (k + 1) * P] for k in range(K)], theta[:, K * P : K * (P + 1)]

    def init(self, seed: int, number: int = 0) -> Tensor:
        first = number * self.components
        models = torch.stack([self.task.init(seed, first + k) for k in range(self.components)])[None]
        pi = models.new_full((1, self.components), 1 / self.components)
        return mixture_rows(models, pi, torch.ones_like(pi) if self.tempered else None)[0]

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        """log Σ_k π_k softmax(z_k / T_k), whose softmax is the mixture's own; Σ_k π_k z_k where models predict
        numbers."""
        models, pi = self.split(theta)
        outputs = [self.task.logits(model, x) for model in models]
        if self.tempered:
            temperature = theta[:, -self.components - 1 : -1]
            outputs = [z / temperature[:, k, None, None] for k, z in enumerate(outputs)]
        return mixed(outputs, pi[:, None, None, :], self.classifies)

    def weighted(self, theta: Tensor, batch: Batch) -> list[Batch]:
        """The batch as each component sees it: the gradient of the mixture's loss in θ_k is Σ_b weight q_k ∇f_k."""
        if not self.classifies:
            raise ModelError("a mixture of models that predict numbers is not trained as a whole; set finetune to 0")
        if self.tempered:
            raise ModelError("a mixture of models at temperatures of their own is not trained; set finetune to 0")
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
        """bool [K (P + 1)]: what may be trained, where weight decay would shrink π, and running statistics, which lie
        among the components' parameters; else None (the gradient of π is 0)."""
        if not training.weight_decay:
            return None
        mask = torch.zeros(self.num_params, dtype=torch.bool)
        for slot in self.slots:
            mask[slot.start : slot.stop] = slot.trainable and slot.name != "pi"
        return mask.to(self.device)

    def module_of(self, row: Tensor) -> MixtureModule:
        """A ready module with the parameters of one row."""
        (models, pi), make = self.split(row[None]), self._modules().module_of
        temperature = row[-self.components - 1 :].detach().clone() if self.tempered else None
        return MixtureModule([make(model[0]) for model in models], pi[0].detach().clone(), temperature).eval()


class MixtureModule(nn.Module):
    """log Σ_k π_k softmax(component_k(x) / T_k); Σ_k π_k component_k(x) where these predict a number. `temperature`
    [K + 1] ends in the mark of a row, as a row does; None: 1 for all."""

    pi: Tensor
    temperature: Tensor | None

    def __init__(self, components: Sequence[nn.Module], pi: Tensor, temperature: Tensor | None = None) -> None:
        super().__init__()
        self.components = nn.ModuleList(components)
        self.register_buffer("pi", pi)
        self.register_buffer("temperature", temperature)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [component(x) for component in self.components]
        if self.temperature is not None:
            outputs = [z / self.temperature[k] for k, z in enumerate(outputs)]
        return mixed(outputs, self.pi, classifies=outputs[0].shape[-1] > 1)


def mixed(outputs: Sequence[Tensor], pi: Tensor, classifies: bool) -> Tensor:
    """One output [..., C] of those of the components, with π [..., K] to be broadcast behind C."""
    if not classifies:
        return (torch.stack(list(outputs), -1) * pi).sum(-1)
    log_p = torch.stack([torch.log_softmax(z, -1) for z in outputs], -1)
    return torch.logsumexp(log_p + pi.log(), -1)


def mixture_rows(models: Tensor, pi: Tensor, temperature: Tensor | None = None) -> Tensor:
    """[n, K (P + 1)] from models [n, K, P] and weights [n, K]; [n, K (P + 2) + 1] with temperatures [n, K]."""
    rows = [models.flatten(1), pi.to(models.dtype)]
    if temperature is not None:
        rows += [temperature.to(models.dtype), models.new_full((len(models), 1), TEMPERED)]
    return torch.cat(rows, 1)


def num_components(width: int, num_params: int, *, tempered: bool = False) -> int:
    """K of a row of that width; other widths are refused."""
    components, rest = divmod(width - 1, num_params + 2) if tempered else divmod(width, num_params + 1)
    if rest or not components:
        raise ModelError(
            f"a row of {width} numbers is neither a model of {num_params} parameters nor a mixture of such models"
        )
    return components


class Extension(Protocol):
    """The work of the further numbers of a row. Its class is registered, and made without arguments."""

    mark: int  # negative, and used nowhere else: the weights of a mixture, which rows may end in too, are not

    def logits(self, phi: Tensor, weight: Tensor, bias: Tensor | None, extra: Tensor) -> Tensor:
        """z [n, B, C] of features [n, B, d_f], the head W [n, C, d_f] and b [n, C], and `extra` [n, E]; differentiable
        in all of them where a method trains it."""


# (φ [n, B, d_f], W, b, extra [n, E], batch, rows [n]) to the loss of every client, [n]
TopLoss = Callable[[Tensor, Tensor, Tensor | None, Tensor, Batch, Tensor], Tensor]


class ExtendedTask(WiderTask):
    """Rows [n, P + E + 1]. `loss` takes the place of the cross-entropy in training."""

    backend = "extended"
    kind = "a model with a network of its own between features and logits"

    def __init__(self, task: Task, extension: Extension, width: int, loss: TopLoss | None = None) -> None:
        """`width` is E."""
        super().__init__(task)
        self.extension, self.loss = extension, loss
        P = task.num_params
        self.num_params = P + width + 1
        parts = [replace(slot, name=f"model.{slot.name}") for slot in task.slots]
        self.slots = (*parts, ParameterSlot("extra", (width + 1,), P, self.num_params))

    @property
    def head(self) -> Head:
        return replace(self.task.head, width=self.num_params)

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Views: the plain models [n, P], and their extensions [n, E]."""
        P = self.task.num_params
        return theta[:, :P], theta[:, P:-1]

    def init(self, seed: int, number: int = 0) -> Tensor:
        extra = torch.zeros(1, self.num_params - self.task.num_params - 1, device=self.device)
        return extended_rows(self.task.init(seed, number)[None], extra, self.extension)[0]

    @torch.no_grad()
    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        model, extra = self.split(theta)
        return self.extension.logits(self.task.features(model, x), *self.task.head.split(model), extra)

    def _joined(self, grad: Callable[..., Tensor], theta: Tensor, batch: Batch) -> Tensor:
        model, _ = self.split(theta)
        top = _TopGradient(self, theta, torch.zeros_like(theta))
        result = top.gradient
        result[:, : model.shape[1]] += grad(model, batch, top)  # zero at the head, of which dz = 0 says nothing
        return result

    def of_rows(self, order: Tensor) -> Task:
        loss = self.loss
        if loss is None:
            return self
        own = copy.copy(self)
        own.loss = lambda phi, weight, bias, extra, batch, rows: loss(phi, weight, bias, extra, batch, order[rows])
        return own

    def training_loss(self, phi: Tensor, theta: Tensor, batch: Batch, rows: Tensor) -> Tensor:
        """[n] of rows theta whose features are φ."""
        model, extra = self.split(theta)
        weight, bias = self.task.head.split(model)
        if self.loss is not None:
            return self.loss(phi, weight, bias, extra, batch, rows)
        return cross_entropy(self.extension.logits(phi, weight, bias, extra), batch)

    def mask(self, training: LocalTraining) -> Tensor | None:
        """bool [P + E + 1]: what fine-tuning may train, where weight decay would shrink the rest; else None."""
        return self.trained_columns() if training.weight_decay else None

    def trained_columns(self) -> Tensor:
        """bool [P + E + 1]: trainable parameters of the model, and its extension."""
        mask = torch.zeros(self.num_params, dtype=torch.bool, device=self.device)
        mask[self.task.trainable] = True
        mask[self.task.num_params : -1] = True
        return mask

    def module_of(self, row: Tensor) -> ExtendedModule:
        """A ready module with the parameters of one row."""
        P = self.task.num_params
        return ExtendedModule(self._modules().module_of(row[:P]), row[P:].detach().clone(), self.extension).eval()


class _TopGradient:
    """The feature loss that differentiates in features, head and extension, and keeps what is not the body's."""

    def __init__(self, task: ExtendedTask, theta: Tensor, gradient: Tensor) -> None:
        self.task, self.theta, self.gradient = task, theta, gradient
        self.top = task.head.mask.to(theta.device)
        self.top[task.task.num_params : -1] = True

    def __call__(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        with torch.enable_grad():
            features = phi.detach().requires_grad_()
            theta = self.theta[rows].detach().requires_grad_()
            total = self.task.training_loss(features, theta, batch, rows).sum()
            dphi, g = torch.autograd.grad(total, (features, theta), allow_unused=True, materialize_grads=True)
        self.gradient[rows] = torch.where(self.top, g, 0.0)
        return torch.zeros_like(z), dphi


class ExtendedModule(nn.Module):
    """The plain module, whose features go through the extension; it is "model." in the state dict, beside "extra"."""

    extra: Tensor

    def __init__(self, model: nn.Module, extra: Tensor, extension: Extension) -> None:
        super().__init__()
        self.model = model
        self.extension = extension
        self.register_buffer("extra", extra)
        self._head = find_head(model, RowLayout.of(model).slots).name

    def _features(self, x: Tensor) -> Tensor:
        with HeadProbe(self.model, self._head) as probe:
            return probe.features(self.model(x))

    def uncertainty(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """What is not known of a prediction, in units of the output: the variance of its linear predictor [B], that of
        a row's own noise [1], and the degrees of freedom that the former is known by [1], 0 where it is as good as
        known. None if the extension does not know."""
        known = getattr(self.extension, "uncertainty", None)
        if known is None:
            return None
        spread, noise, freedom = known(self._features(x)[None], self.extra[None, :-1])
        return spread[0], noise[0], freedom[0]

    def forward(self, x: Tensor) -> Tensor:
        phi = self._features(x)
        head = self.model.get_submodule(self._head)
        assert isinstance(head, nn.Linear)  # as find_head says
        bias = None if head.bias is None else head.bias[None]
        return self.extension.logits(phi[None], head.weight[None], bias, self.extra[None, :-1])[0]


def extended_rows(models: Tensor, extra: Tensor, extension: Extension) -> Tensor:
    """[n, P + E + 1] from models [n, P] and further numbers [n, E]."""
    mark = models.new_full((len(models), 1), float(extension.mark))
    return torch.cat([models, extra.to(models), mark], 1)


def _extension_of(row: Tensor) -> Extension | None:
    """The extension whose mark ends a row; None without a mark."""
    mark = float(row[-1])
    if not mark < 0:
        return None
    extensions: dict[str, type[Extension]] = {name: entry.target for name, entry in registry_of("extension").items()}
    for extension in extensions.values():
        if extension.mark == mark:
            return extension()
    raise ModelError(
        f"a row ends in the mark {mark:g} of an extension; those known here are {', '.join(extensions)}: load the "
        "plugin that registers it"
    )


def _is_tempered(row: Tensor) -> bool:
    return float(row[-1]) == TEMPERED


def _form(row: Tensor, num_params: int) -> Extension | TreeShape | type[JointTask] | int | None:
    """The extension of a row, the shape of its trees, its task where it is joint, or the number of components of a
    mixture; None of a plain model [num_params]."""
    if (shape := TreeShape.of_row(row)) is not None:  # which may be as long as a plain model
        return shape
    if len(row) == num_params:
        return None
    if _is_tempered(row):
        return num_components(len(row), num_params, tempered=True)
    if float(row[-1]) == JOINT and len(row) == 2 * num_params + 1:
        return JointTask
    return _extension_of(row) or num_components(len(row), num_params)


def task_for(task: Task, theta: Tensor) -> Task:
    """The task that rows [n, width] belong to."""
    P, width = task.num_params, theta.shape[-1]
    if not len(theta) and width == P:
        return task
    tempered = _is_tempered(theta[0]) if len(theta) else width % (P + 1) != 0
    form = _form(theta[0], P) if len(theta) else num_components(width, P, tempered=tempered)
    if form is None:
        return task
    if isinstance(form, int):
        return MixtureTask(task, form, tempered=tempered)
    if isinstance(form, TreeShape):
        return TreeTask(task, form)
    if isinstance(form, type):
        return form(task)
    return ExtendedTask(task, form, width - P - 1)


def module_for(task: ModuleTask | Architectures, row: Tensor) -> nn.Module:
    """A ready module for one row."""
    own = task_for(task, row[None])
    # By task_for, of a module's task.
    assert isinstance(own, ModuleTask | MixtureTask | ExtendedTask | JointTask | TreeTask | Architectures)
    return own.module_of(row)


def trained_columns(task: Task, training: LocalTraining) -> Tensor | None:
    """bool [width]: the columns that fine-tuning confines itself to; None if it may move all."""
    if isinstance(task, JointTask):
        return task.trained_columns()
    return task.mask(training) if isinstance(task, MixtureTask | ExtendedTask) else None


def module_from(make: Callable[[], nn.Module], tensors: Mapping[str, Tensor]) -> nn.Module:
    """A module for the state dict of a personal model; `make` builds a plain one."""
    if tensors and all(name.startswith(PREFIX) for name in tensors):
        return TreeModule(dict(tensors))
    if tensors and all(name.startswith(HALVES) for name in tensors):
        return JointModule(make(), make())
    components = len({name.split(".")[1] for name in tensors if name.startswith("components.")})
    if components:
        return MixtureModule([make() for _ in range(components)], tensors["pi"], tensors.get("temperature"))
    if "extra" in tensors and all(name == "extra" or name.startswith("model.") for name in tensors):
        extension = _extension_of(tensors["extra"])
        if extension is not None:
            return ExtendedModule(make(), tensors["extra"], extension)
    return make()


def named_parameters(row: Tensor, num_params: int, plain: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The state dict of a row of a personal model, where `plain` names the parameters of a row [P] of a plain one."""
    form = _form(row, num_params)
    if form is None:
        return plain(row)
    if isinstance(form, int):
        models, pi = row[: form * num_params].chunk(form), row[form * num_params : form * (num_params + 1)]
        parts = {f"components.{k}.{name}": t for k, model in enumerate(models) for name, t in plain(model).items()}
        temperature = {"temperature": row[-form - 1 :].clone()} if _is_tempered(row) else {}
        return {"pi": pi.clone()} | temperature | parts
    if isinstance(form, TreeShape):
        return tree_tensors(row)
    if isinstance(form, type):
        halves = row[: 2 * num_params].chunk(2)
        return {f"{HALVES}{k}.{name}": t for k, half in enumerate(halves) for name, t in plain(half).items()}
    model = {f"model.{name}": tensor for name, tensor in plain(row[:num_params]).items()}
    return model | {"extra": row[num_params:].clone()}
