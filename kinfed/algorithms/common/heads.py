"""Features, logits and labels: what methods ask of a model's last layer and of a client's examples."""

import math

import torch
from torch import Tensor

from kinfed.author import ClassSums, ConfigError, Head, Split, Task, rng
from kinfed.errors import ModelError


def required_head(method: str, task: Task, *, reads_features: bool = True) -> Head:
    """The last linear layer of the model, or a ConfigError that says why the method cannot do without. Methods that do
    not read features, its input, only need to know which parameters are the layer's."""
    try:
        return task.feature_head if reads_features else task.head
    except ModelError as error:
        raise ConfigError(
            f"{method} works at the features and outputs of a model's last linear layer, which this one does not end "
            f"in: {error}"
        ) from error


def required_body(method: str, task: Task, *, reads_features: bool = True) -> Head:
    """The last linear layer of a model that also trains layers below it; refuses others like `required_head`."""
    head = required_head(method, task, reads_features=reads_features)
    if bool(head.mask[task.trainable].all()):
        raise ConfigError(
            f"{method} shapes the features below the last layer, and this model trains no layer but {head.name!r}: its "
            "features are fixed; choose a deeper model"
        )
    return head


def class_counts(split: Split, classes: int) -> Tensor:
    """[n, C] int64: N_mc, how many examples of each class a client holds. All of them count, whatever batches see."""
    owner = torch.repeat_interleave(torch.arange(len(split.count)), split.count)
    first = torch.cumsum(split.count, 0) - split.count
    position = split.start[owner] + torch.arange(len(owner)) - first[owner]
    y = split.targets(split.rows[position])
    return torch.bincount(owner.to(y.device) * classes + y, minlength=len(split.count) * classes).view(-1, classes)


@torch.no_grad()
def features_by_client(task: Task, theta: Tensor, split: Split) -> list[tuple[Tensor, Tensor]]:
    """(φ [N, d_f], y [N]) of every client's examples under its model in theta [n, P], on the processor and in the order
    of the split."""
    width = task.head.inputs
    pieces = [[(torch.empty(0, width), torch.empty(0, dtype=torch.int64))] for _ in theta]
    everyone = torch.arange(len(theta))
    for rows, batch in split.in_order():
        phi, valid = task.features(theta[rows], batch.x).cpu(), (batch.weight > 0).cpu()
        for place, i in enumerate(everyone[rows].tolist()):
            pieces[i].append((phi[place][valid[place]], batch.y[place].cpu()[valid[place]]))
    return [(torch.cat([phi for phi, _ in parts]), torch.cat([y for _, y in parts])) for parts in pieces]


def class_means(sums: ClassSums) -> Tensor:
    """[n, C, d_f] float64: a client's mean feature of every class; zeros for classes that it lacks."""
    return sums.total / sums.count.clamp_min(1)[..., None]


def mean_prototypes(prototypes: Tensor, weight: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """([C, d_f], [C] bool): the mean over clients of what they sent for every class, prototypes [n, C, d_f] by weight
    [n, C], and which classes anyone sent; the others keep their `last` [C, d_f]."""
    weight = weight.to(torch.float64)
    total = weight.sum(0)
    sums = torch.einsum("nc,ncd->cd", weight, prototypes.to(torch.float64))
    fresh = (sums / total.clamp_min(1)[:, None]).to(last.dtype)
    new = total > 0
    return torch.where(new[:, None], fresh, last), new


def linear_start(key: Tensor, inputs: int, outputs: int) -> Tensor:
    """[inputs · outputs + outputs]: weights [inputs, outputs] and biases of a layer, drawn as torch starts one."""
    draws = rng.uniform(key, inputs * outputs + outputs)
    return ((2 * draws - 1) / math.sqrt(inputs)).to(torch.float32)


def affine_norm(x: Tensor, scale_and_shift: Tensor, eps: float = 1e-5) -> Tensor:
    """LayerNorm of x [n, B, d] over its last axis, with a scale and a shift for every row: [n, 2 d]."""
    scale, shift = scale_and_shift.unsqueeze(1).chunk(2, -1)
    return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps) * scale + shift
