"""Optimizers of local training on rows of models: SGD with momentum, Adam and AdamW, as torch.optim defines them.

    optimizer = make_optimizer(training, columns, theta)
    optimizer.step(rows, x, g, lr)        moves x [m, P] along the gradient pieces g, one per block of columns

Every row is a client with moments and a step number of its own. Columns outside `columns` are never touched. What an
optimizer remembers from one loop to the next is handed in (`blank_moments` before the first step), and changes in
place.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from kinfed.core import LARGE, empty_rows
from kinfed.data import LocalTraining

STEPS = "steps"  # the moment that counts them, [n]
CLIP_MARGIN = 1e-6  # added to a norm that divides, as torch.nn.utils.clip_grad_norm_ does


class Optimizer(ABC):
    names: tuple[str, ...]  # of moments as wide as the columns

    def __init__(
        self, training: LocalTraining, columns: Sequence[slice], theta: Tensor, moments: Mapping[str, Tensor] | None
    ) -> None:
        self._training, self._columns = training, columns
        self._pieces = {
            name: _blank_pieces(theta, columns) if moments is None else [moments[name][:, block] for block in columns]
            for name in self.names
        }
        self._steps = (moments or {}).get(STEPS, _no_steps(theta))

    @abstractmethod
    def step(self, rows: slice, x: Tensor, gradient: Sequence[Tensor], lr: float) -> None:
        """One step of the clients `rows`, whose models x [m, P] change in place. `gradient` has one [m, width] for each
        block of columns and is left as it is; it may be a view of x."""

    def _moments_of(self, name: str, rows: slice) -> list[Tensor]:
        return _one_by_one(piece[rows] for piece in self._pieces[name])

    def _models(self, x: Tensor) -> list[Tensor]:
        return _one_by_one(x[:, block] for block in self._columns)


class PlainSGD(Optimizer):
    """x ← x − lr (g + κ x)."""

    names = ()

    def step(self, rows: slice, x: Tensor, gradient: Sequence[Tensor], lr: float) -> None:
        decay = self._training.weight_decay
        for block, g in zip(self._columns, gradient, strict=True):
            now = x[:, block]
            now.add_(g.add(now, alpha=decay) if decay else g, alpha=-lr)


class Momentum(Optimizer):
    """g ← g + κ x,  v ← μ v + g,  x ← x − lr v;  Nesterov's form steps along g + μ v.

    By torch's own fused step, which passes over memory once: 6.5 ms of processor time for 11 million
    parameters, where three passes took 10.8 and torch.optim.SGD as it comes 12.0 (medians of 11 turns)."""

    names = ("velocity",)

    def step(self, rows: slice, x: Tensor, gradient: Sequence[Tensor], lr: float) -> None:
        training = self._training
        velocity: list[Tensor | None] = [*self._moments_of("velocity", rows)]
        sgd(
            self._models(x), _one_by_one(_readable_beside(x, g) for g in gradient), velocity, fused=True, lr=lr,
            weight_decay=training.weight_decay, momentum=training.momentum, nesterov=training.nesterov, dampening=0.0,
            maximize=False,
        )  # fmt: skip


class Adam(Optimizer):
    """Adam (Kingma, Ba, 2015), whose weight decay enters the gradient, and AdamW (Loshchilov, Hutter, 2019), whose
    weight decay shrinks x by lr κ beside the step.

    Rows are tensors of torch's own fused step, which passes over memory once and knows a step number per tensor."""

    names = ("first", "second")

    def step(self, rows: slice, x: Tensor, gradient: Sequence[Tensor], lr: float) -> None:
        training, steps = self._training, self._steps[rows]
        taken = list(steps.repeat(len(gradient)).unbind())  # copies: the step of every block would count them up
        adam(
            self._models(x), _one_by_one(_readable_beside(x, g) for g in gradient), self._moments_of("first", rows),
            self._moments_of("second", rows), [], taken, fused=True, lr=lr, weight_decay=training.weight_decay,
            decoupled_weight_decay=training.optimizer == "adamw", beta1=training.betas[0], beta2=training.betas[1],
            eps=training.eps, amsgrad=False, maximize=False,
        )  # fmt: skip
        steps += 1


def make_optimizer(
    training: LocalTraining, columns: Sequence[slice], theta: Tensor, moments: Mapping[str, Tensor] | None = None
) -> Optimizer:
    """The optimizer of a loop that trains these columns of theta [n, P]; it goes on from `moments`, if any."""
    return _kind(training)(training, columns, theta, moments)


def blank_moments(training: LocalTraining, columns: Sequence[slice], theta: Tensor) -> dict[str, Tensor]:
    """The moments before the first step: [n, T] each, up to the last trained column, and [n] steps where they count."""
    width = max((block.stop for block in columns), default=0)
    moments = {name: theta.new_zeros(len(theta), width) for name in _kind(training).names}
    return moments | ({} if training.optimizer == "sgd" else {STEPS: _no_steps(theta)})


def _kind(training: LocalTraining) -> type[Optimizer]:
    if training.optimizer != "sgd":
        return Adam
    return Momentum if training.momentum else PlainSGD


def _blank_pieces(theta: Tensor, columns: Sequence[slice]) -> list[Tensor]:
    """Zeros [n, width] for each block of columns; together, where they are large."""
    n, widths = len(theta), [block.stop - block.start for block in columns]
    if n * sum(widths) * theta.element_size() <= LARGE:
        return [theta.new_zeros(n, width) for width in widths]
    pieces = torch.split(empty_rows(theta, n * sum(widths)).zero_(), [n * width for width in widths])
    return [piece.view(n, width) for piece, width in zip(pieces, widths, strict=True)]


def _no_steps(theta: Tensor) -> Tensor:
    return torch.zeros(len(theta), device=theta.device)  # float32, as torch.optim counts


def clipped(gradient: Sequence[Tensor], largest: float) -> list[Tensor]:
    """The gradient, in pieces [m, width], with the Euclidean norm of every row over all pieces at most `largest`."""
    if not gradient:
        return []
    # [m, pieces]: along a row numbers are added up in the same order whether it is alone or not, which keeps its bits.
    norms = torch.stack([torch.linalg.vector_norm(piece, dim=1) for piece in gradient], 1)
    factor = (largest / (torch.linalg.vector_norm(norms, dim=1) + CLIP_MARGIN)).clamp_max(1.0)
    if bool((factor == 1).all()):
        return list(gradient)
    return [piece * factor[:, None] for piece in gradient]


def _one_by_one(blocks: Iterable[Tensor]) -> list[Tensor]:
    """The rows of every block [m, width], block after block."""
    return [row for block in blocks for row in block.unbind()]


def _readable_beside(x: Tensor, g: Tensor) -> Tensor:
    """The gradient in rows of contiguous memory that does not change with x: what the fused step needs."""
    same_memory = g.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    return g.clone(memory_format=torch.contiguous_format) if same_memory or g.stride(1) != 1 else g
