"""Methods that learn by sums: a client answers with sums over its rows, the server solves; there are no gradient steps.

They fit the coefficients of a linear model, or of any model that trains nothing but its last layer: the design X has a
column of ones and the features that this layer is given. A client's sums travel as one vector of float64, in units of
2^10 rows, so that those of a million rows are within the usual range of secure sums; the unit is a power of two, which
changes no digit.

The personal model is the posterior of a client's coefficients: a row with its mean and, as an extension, the variance
of predictions (`Posterior`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kinfed.algorithms.base import AveragingAlgorithm, Client, Down, Server
from kinfed.algorithms.common.bending import BENDS, FORM, bent, count_rows
from kinfed.author import ConfigError, Population, PrivacyProfile, RoundInfo, Split, Task, Tree, exact
from kinfed.engine import extended_rows
from kinfed.errors import ModelError

Array = NDArray[np.float64]

UNIT = 1024.0  # rows that sums travel in units of
SUMS = "sums"
NOISE_SHARE = 0.01  # of the longest total that clients can make, above which noise may spoil a fit
MOST_CURVED = 40  # columns: with curves, sums have the square of ten times as many


@dataclass
class SumsUp(Tree):
    sums: Tensor = field(metadata=exact())  # [n, W] float64, in units of UNIT rows


class Posterior:
    """Numbers of the extension: σ² of a row's own noise, then a lower triangular factor L of the variance of the
    coefficients (ones first), LL' = V, row after row, and the degrees of freedom that V is known by, 0 where it is as
    good as known (files of an earlier version end before it). Predictions are those of the plain model."""

    mark = -4

    def logits(self, phi: Tensor, weight: Tensor, bias: Tensor | None, extra: Tensor) -> Tensor:
        return torch.bmm(phi, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), phi, weight.mT)

    def uncertainty(self, phi: Tensor, extra: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(x'Vx [n, B], σ² [n, 1], degrees of freedom [n, 1]), for features [n, B, d_f] and extra [n, E]."""
        p = phi.shape[-1] + 1
        end = 1 + p * (p + 1) // 2
        rows, columns = torch.tril_indices(p, p)
        factor = phi.new_zeros(len(extra), p, p)
        factor[:, rows, columns] = extra[:, 1:end].to(phi)
        spread = factor[:, :1] + torch.bmm(phi, factor[:, 1:])
        freedom = extra[:, end:] if extra.shape[1] > end else torch.zeros_like(extra[:, :1])
        return spread.square().sum(-1), extra[:, :1].to(phi), freedom.to(phi)


class CurvedPosterior(Posterior):
    """Numbers of the extension: those of `Posterior` with the variance of all coefficients, then γ [d · BENDS] and the
    form [d, FORM] of curves (kinfed.algorithms.common.bending)."""

    mark = -5

    def _parts(self, phi: Tensor, extra: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What bends the features [n, B, d · BENDS], γ, and the numbers of `Posterior`."""
        d = phi.shape[-1]
        known, gamma, form = torch.split(extra, [extra.shape[1] - d * (BENDS + FORM), d * BENDS, d * FORM], 1)
        return bent(phi, form.reshape(-1, 1, d, FORM).to(phi)), gamma.to(phi), known

    def logits(self, phi: Tensor, weight: Tensor, bias: Tensor | None, extra: Tensor) -> Tensor:
        bends, gamma, known = self._parts(phi, extra)
        z = super().logits(phi, weight, bias, known)
        return z + torch.bmm(bends, gamma[:, :, None]) * z.new_tensor(_signs(z.shape[-1]))

    def uncertainty(self, phi: Tensor, extra: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bends, _, known = self._parts(phi, extra)
        return super().uncertainty(torch.cat([phi, bends], -1), known)


@dataclass(frozen=True)
class BySums(AveragingAlgorithm[Server, Client, Down, SumsUp]):
    """What these methods have in common. They take no local steps: settings of local training do not matter. Nor does
    participation: a round that is needed at all needs every client; one that does not answer is missing from the
    sum."""

    fields = (SUMS,)
    adds_up = True
    traits = frozenset({"no example weights"})

    def privacy(self, count: Tensor) -> PrivacyProfile:
        """One row changes products of its columns by any amount."""
        return PrivacyProfile(None, impossible="sums of its rows", sensitivity={SUMS: math.inf})

    def clients_for_noise(self, task: Task, noise: float) -> float:
        """A total of K clients is at most K C long, and noise in it z C √W for W = (p + 1)(p + 2) / 2 numbers. In
        simulations (3 and 10 columns, 50 to 4,000 sites) fits were no better than the mean of the target now and then
        until noise was less than a hundredth of that."""
        p = num_columns(task)
        return noise * math.sqrt((p + 1) * (p + 2) / 2) / NOISE_SHARE

    def check(self, task: Task, population: Population) -> None:
        name = type(self).__name__
        try:
            whole = bool(task.head.mask.all()) and task.head.dense.bias is not None
        except ModelError:
            whole = False
        if not whole:
            raise ConfigError(
                f"{name} fits the coefficients of a linear model: choose --model mlr, or a model that trains nothing "
                "but its last layer, with a bias"
            )
        if self.finetune:
            raise ConfigError(f"{name}'s models are exact, so that there is nothing to fine-tune; set finetune to 0")

    def plan(self, server: Server, active: Tensor, round: RoundInfo) -> tuple[Server, Tensor]:
        """Everybody is asked, until a step would gain nothing."""
        everyone = torch.arange(round.population.num_clients)
        return server, everyone[:0] if self.is_done(server) else everyone


def num_columns(task: Task) -> int:
    """p: the features, and the column of ones."""
    return task.head.inputs + 1


def check_curves(task: Task, name: str) -> None:
    if task.head.inputs > MOST_CURVED:
        raise ConfigError(
            f"{name} with curves takes up to {MOST_CURVED} columns, for its sums have the square of ten times as many; "
            f"got {task.head.inputs}: set curves to false, or leave columns out"
        )


def numpy_of(tensor: Tensor) -> Array:
    return np.asarray(tensor.detach().to("cpu", torch.float64).numpy())


def tensor_of(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.float64))


@torch.no_grad()
def design(task: Task, x: Tensor, form: Tensor | None = None) -> Tensor:
    """[n, B, p] float64: ones, then what the last layer is given; then what bends these columns, if they have a form
    [d, FORM]."""
    theta = torch.zeros(len(x), task.num_params, device=x.device)
    phi = task.features(theta, x).to("cpu", torch.float64)
    bends = () if form is None or not form.numel() else (bent(phi, form.to("cpu", torch.float64)),)
    return torch.cat([torch.ones(*phi.shape[:2], 1, dtype=torch.float64), phi, *bends], 2)


def width_of(task: Task, form: Tensor | None) -> int:
    """Columns of the design."""
    return num_columns(task) + (task.head.inputs * BENDS if form is not None and form.numel() else 0)


def moments(task: Task, split: Split, form: Tensor | None = None) -> Array:
    """[n, p + 1, p + 1] S = [X y]'[X y] of every client."""
    width = width_of(task, form) + 1
    total = torch.zeros(len(split.count), width, width, dtype=torch.float64)
    for rows, batch in split.in_order():
        valid = (batch.weight > 0).to("cpu", torch.float64)[:, :, None]
        both = torch.cat([design(task, batch.x, form), batch.y.to("cpu", torch.float64)[:, :, None]], 2)
        both = torch.where(valid > 0, both, 0.0)
        total[rows] += torch.bmm(both.mT, both)
    return numpy_of(total)


def counts_by_client(task: Task, split: Split) -> Array:
    """[n, d · CELLS] rows of every client by column and cell, for the form of curves."""
    x, _, count = rows_by_client(task, split)
    return count_rows(x[:, 1:], np.concatenate([[0], np.cumsum(count)]))


def rows_by_client(task: Task, split: Split, form: Tensor | None = None) -> tuple[Array, Array, NDArray[np.int64]]:
    """(X [N, p], y [N, ...], rows of each client [n]) of all clients, one after the other."""
    count = split.count.numpy()
    first, total = np.cumsum(count) - count, int(count.sum())
    x, y = np.zeros((total, width_of(task, form))), np.zeros((total, *task.objective.example_target.shape))
    done, everyone = np.zeros(len(count), dtype=np.int64), torch.arange(len(count))
    for rows, batch in split.in_order():
        both, target = design(task, batch.x, form).numpy(), numpy_of(batch.y)
        for place, client in enumerate(everyone[rows].tolist()):
            size = int((batch.weight[place] > 0).sum())
            here = slice(first[client] + done[client], first[client] + done[client] + size)
            x[here], y[here] = both[place, :size], target[place, :size]
            done[client] += size
    return x, y, count


def packed(*parts: Array) -> Tensor:
    """[n, W]: parts [n, ...] side by side, square matrices by their lower triangles, in units of UNIT rows."""
    flat = []
    for part in parts:
        if part.ndim == 3:
            rows, columns = np.tril_indices(part.shape[1])
            flat.append(part[:, rows, columns])
        else:
            flat.append(part.reshape(len(part), -1))
    return tensor_of(np.concatenate(flat, 1) / UNIT)


def not_finite_where(answer: Tensor, spoilt: NDArray[np.bool_]) -> Tensor:
    """The answer [n, W] with NaN in the rows of clients whose data are not finite."""
    answer[torch.from_numpy(spoilt)] = torch.nan
    return answer


def unpacked_parts(vectors: Tensor, *shapes: tuple[int, ...]) -> list[Array]:
    """The parts of vectors [n, W], of these shapes [...] each; two axes are a symmetric matrix."""
    values, start, parts = numpy_of(vectors) * UNIT, 0, []
    for shape in shapes:
        symmetric = len(shape) == 2
        size = shape[0] * (shape[0] + 1) // 2 if symmetric else math.prod(shape)
        piece = values[:, start : start + size]
        start += size
        if symmetric:
            rows, columns = np.tril_indices(shape[0])
            whole = np.zeros((len(values), *shape))
            whole[:, rows, columns] = whole[:, columns, rows] = piece
            parts.append(whole)
        else:
            parts.append(piece.reshape(len(values), *shape))
    return parts


def places_of(task: Task) -> Tensor:
    """[C, p] int64: where a model's row holds the coefficients of each output, that of the ones first."""
    dense = task.head.dense
    assert dense.bias is not None  # as `BySums.check` asks
    outputs = torch.arange(dense.outputs)[:, None]
    return torch.cat([dense.bias + outputs, dense.weight + outputs * dense.inputs + torch.arange(dense.inputs)], 1)


def linear_rows(places: Tensor, coefficients: Array) -> Tensor:
    """[n, P] models with these coefficients [n, p]: of a number, or of the log odds of two classes, as two logits of
    which it is the difference."""
    theta, c = torch.zeros(len(coefficients), places.numel()), tensor_of(coefficients).to(torch.float32)
    for sign, columns in zip(_signs(len(places)), places.cpu(), strict=True):
        theta[:, columns] = sign * c
    return theta


def _signs(outputs: int) -> tuple[float, ...]:
    return (1.0,) if outputs == 1 else (-0.5, 0.5)


def posterior_rows(
    places: Tensor, mean: Array, variance: Array, noise: float, freedom: float = 0.0, form: Tensor | None = None
) -> Tensor:
    """[n, P + E + 1]: models with coefficients `mean` [n, p] that are known up to `variance` [n, p, p], which is itself
    known by these degrees of freedom; 0: as good as known. With a form, coefficients behind the linear ones bend."""
    linear, n = places.shape[1], len(mean)
    values, vectors = np.linalg.eigh((variance + np.swapaxes(variance, 1, 2)) / 2)
    root = vectors * np.sqrt(np.maximum(values, 0))[:, None, :]
    lower = np.swapaxes(np.linalg.qr(np.swapaxes(root, 1, 2), mode="r"), 1, 2)  # V = LL' also where V is singular
    rows, columns = np.tril_indices(mean.shape[1])
    extra, extension = [np.full((n, 1), noise), lower[:, rows, columns], np.full((n, 1), freedom)], Posterior()
    if form is not None and form.numel():
        extra += [mean[:, linear:], np.tile(numpy_of(form).reshape(1, -1), (n, 1))]
        extension = CurvedPosterior()
    plain = linear_rows(places, mean[:, :linear])
    return extended_rows(plain, tensor_of(np.concatenate(extra, 1)), extension).to(places.device)
