"""Scores of models on clients' examples: sums by client, their errors, and the figures that tables compare, in float64.

A client without test examples has no accuracy, so it is left out of every figure, also of the M in "10% of M
clients". Ten percent means ceil(M / 10) clients, so at least one.

The error of a client's metric comes from values over examples drawn anew from the client's own with replacement: an
accuracy from eight rows should say how little it means. The deviation of the draws is its standard error, and as all
models of a client are judged on the same draws, the deviation of the differences that of a gain.

Detectors are compared where they miss equally often: `relative_false_accepts` is FA(model) / FA(start) with FR(model) =
FR(start), below 1 where a model is better than the one that all methods start from; client by client, at the number of
false rejects that is FALSE_REJECT of the client's own positive rows, rounded up, on the straight lines between
thresholds. It needs the start's predictions, which are computed only where it is a run's headline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.data import IGNORED, Batch, Problem, Split
from kinfed.engine.scoring.metric_catalogue import METRICS
from kinfed.engine.scoring.metrics import Drawn, Judged, Metric

REPLICATES = 100
OUTPUTS_AT_ONCE = 2_000_000  # rows times classes of bootstrap draws that are judged together
FEW_EXAMPLES = 500  # of a client, up to which the error of its figure is estimated
FEW_CLIENTS, SLOW_REPLICATES = 20, 25  # up to which that is done for metrics that are slow, and how often


def error_draws(metric: Metric, judged: Judged, ids: Tensor) -> Tensor:
    """[R, n] `bootstrap_draws` of the size that every evaluation can afford; NaN at clients with more than FEW_EXAMPLES
    or none, and at all of many clients where the metric is slow."""
    if metric.slow and judged.clients > FEW_CLIENTS:
        return no_draws(metric, judged.clients)
    return bootstrap_draws(metric, judged, ids, replicates=_replicates(metric), most=FEW_EXAMPLES)


def no_draws(metric: Metric, clients: int) -> Tensor:
    """[R, n] NaN: `error_draws` where nothing is known."""
    return torch.full((_replicates(metric), clients), torch.nan, dtype=torch.float64)


def _replicates(metric: Metric) -> int:
    return SLOW_REPLICATES if metric.slow else REPLICATES


def bootstrap_draws(
    metric: Metric, judged: Judged, ids: Tensor, *, replicates: int = REPLICATES, most: int | None = None
) -> Tensor:
    """[R, n] the metric over examples drawn anew with replacement from every client's own; NaN where it is undefined,
    and at clients with none or with more than `most`. Draws are named by `ids`, the same for all models."""
    count = judged.examples
    start = np.r_[0, np.cumsum(count)[:-1]]
    few = (count > 0) if most is None else (count > 0) & (count <= most)
    owner = np.repeat(np.flatnonzero(few), count[few])
    if not len(owner):
        return torch.full((replicates, judged.clients), torch.nan, dtype=torch.float64)
    position = torch.from_numpy(np.concatenate([np.arange(c) for c in count[few]]))
    keys = rng.fold(rng.root(0, "bootstrap"), ids)[torch.from_numpy(owner)]
    values, together = [], max(1, OUTPUTS_AT_ONCE // (len(owner) * judged.output.shape[1]))
    for first in range(0, replicates, together):
        turn = torch.arange(first, min(first + together, replicates))  # [r]
        u = rng.to_unit(rng.at(rng.fold(keys, turn[:, None]), position)).numpy()  # [r, rows]
        index = start[owner] + np.minimum((u * count[owner]).astype(np.int64), count[owner] - 1)
        # Every replicate of a client is judged like a client of its own.
        apart = (np.arange(len(turn))[:, None] * judged.clients + owner).reshape(-1)
        resample = Drawn(judged, index.reshape(-1), apart, len(turn) * judged.clients)
        sums = np.stack(metric.sums(resample), 1)
        values.append(metric.value(torch.from_numpy(sums.astype(np.float64))).reshape(len(turn), -1))
    return torch.cat(values)


def deviation_of_draws(draws: Tensor) -> Tensor:
    """[n] the standard deviation of draws [R, n]; NaN where most of them are undefined."""
    known = ~torch.isnan(draws)
    number = known.sum(0)
    mean = torch.where(known, draws, 0.0).sum(0) / number.clamp_min(1)
    square = torch.where(known, (draws - mean) ** 2, 0.0).sum(0) / (number - 1).clamp_min(1)
    return torch.where(number > len(draws) // 2, square.sqrt(), torch.nan)


@dataclass(frozen=True)
class ClientScores:
    """The clients that have test examples, one entry each, in float64. What a metric of clients is computed from."""

    accuracy: Tensor | None  # [M]; None for a task without accuracy
    loss: Tensor  # [M] mean over a client's examples
    n_test: Tensor  # [M]
    n_train: Tensor  # [M]

    def figures(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        if self.accuracy is not None:
            tenth = _tenth(self.accuracy)
            largest = self.n_train.argsort(descending=True, stable=True)[:tenth]
            figures = {
                "accuracy": _weighted_mean(self.accuracy, self.n_test),
                "accuracy_mean": self.accuracy.mean().item(),
                "accuracy_std": self.accuracy.std(correction=0).item(),
                "worst10": self.accuracy.sort().values[:tenth].mean().item(),
                "top10": _weighted_mean(self.accuracy[largest], self.n_test[largest]),
            }
        figures["loss"] = _weighted_mean(self.loss, self.n_test)
        metrics = map(METRICS.named, METRICS)
        registered = {metric.name: metric.function(self) for metric in metrics if metric.of == "clients"}
        return figures | {name: value for name, value in registered.items() if value is not None}


def summarize(
    correct: Tensor | None, loss: Tensor, n_test: Tensor, n_train: Tensor, sums: Mapping[str, Tensor] | None = None
) -> dict[str, float]:
    """The figures of one evaluation, from sums over each client's test examples: accuracy and loss, every registered
    metric of clients, and of every metric with `sums` [K, 2] `auroc` of all clients, `auroc_mean`, `auroc_std` and
    `auroc_worst10` over those where it is defined.

    `correct=None` is a task without accuracy. A figure that does not exist is absent, never NaN: no client has test
    examples -> {}. A NaN or infinite loss is a result (a diverged model) and is passed on."""
    _check(correct, loss, n_test, n_train)
    seen = n_test > 0
    if not seen.any():
        return {}
    examples = n_test[seen].double()
    accuracy = None if correct is None else correct[seen].double() / examples
    figures: dict[str, float] = {}
    for name, pairs in (sums or {}).items():
        figures |= _spread_of(METRICS.named(name), pairs[seen])
    return figures | ClientScores(accuracy, loss[seen].double() / examples, examples, n_train[seen]).figures()


def _spread_of(metric: Metric, sums: Tensor) -> dict[str, float]:
    """Figures of all clients together, and over those where the metric is defined; {} if it is defined nowhere."""
    values = metric.value(sums)
    values = values[~values.isnan()].sort(descending=not metric.higher_is_better).values
    if not len(values):
        return {}
    return {
        metric.name: metric.value(sums.sum(0)).item(),
        f"{metric.name}_mean": values.mean().item(),
        f"{metric.name}_std": values.std(correction=0).item(),
        f"{metric.name}_worst10": values[: _tenth(values)].mean().item(),
    }


def _tenth(values: Tensor) -> int:
    return (len(values) + 9) // 10


def _weighted_mean(values: Tensor, weight: Tensor) -> float:
    return (values * weight).sum().item() / weight.sum().item()


def _check(correct: Tensor | None, loss: Tensor, n_test: Tensor, n_train: Tensor) -> None:
    tensors = {"correct": correct, "loss": loss, "n_test": n_test, "n_train": n_train}
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if n_test.dim() != 1 or any(shape != shapes["n_test"] for shape in shapes.values()):
        raise ValueError(f"metrics need one entry per client, all of shape [K]; got {shapes}")
    if (n_test < 0).any() or (n_train < 0).any():
        raise ValueError("numbers of examples cannot be negative")
    if correct is not None and ((correct < 0) | (correct > n_test)).any():
        client = int(((correct < 0) | (correct > n_test)).nonzero()[0])
        raise ValueError(
            f"client {client} has {correct[client].item():g} correct of {n_test[client].item()} test examples; "
            "`correct` is a number of examples between 0 and n_test"
        )


@dataclass
class Score:
    """Sums over some examples, one entry per client."""

    correct: Tensor  # [n] float64; 0 where the task has no classes
    loss: Tensor  # [n] float64
    count: Tensor  # [n] int64
    sums: dict[str, Tensor] = field(default_factory=dict)  # [n, 2] by metric (kinfed.engine.scoring.metrics)
    # [n] the error, [R, n] draws that it comes from, or what makes these; see `error` and `draws`
    error_or_draws: Tensor | Callable[[], Tensor] | None = None
    error_of_gain: Tensor | None = None  # [n] where it has been compared with another score; see `compare`

    @property
    def draws(self) -> Tensor | None:
        """[R, n] the headline metric over examples drawn anew; None if no more than the error is known. Computed at
        first use: it takes longer than all metrics together, and most evaluations do not need it."""
        known = self._known()
        return known if known is not None and known.dim() == 2 else None

    @property
    def error(self) -> Tensor | None:
        """[n] standard error of the headline metric, NaN where it is not known."""
        known = self._known()
        return known if known is None or known.dim() == 1 else deviation_of_draws(known)

    def _known(self) -> Tensor | None:
        """[R, n] draws, or [n] the error itself if no more is known."""
        if self.error_or_draws is not None and not isinstance(self.error_or_draws, Tensor):
            self.error_or_draws = self.error_or_draws()
        return self.error_or_draws

    def compare(self, other: Score) -> None:
        """Find `error_of_gain`, the standard error of the difference of the headline metric between the two: smaller
        than both errors together, where models err on the same examples. The draws of this score are dropped."""
        if self is other:
            self.error_of_gain = torch.zeros_like(self.loss)
            return
        if self.error_of_gain is None and self.draws is not None and other.draws is not None:
            self.error_of_gain = deviation_of_draws(self.draws - other.draws)
        self.drop_draws()

    def drop_draws(self) -> None:
        """Keep the error alone."""
        self.error_or_draws = self.error

    def __getstate__(self) -> dict[str, object]:
        """The state for other processes, with draws that have been made."""
        return dict(self.__dict__, error_or_draws=self._known())

    def metric(self, name: str) -> Tensor:
        """[n] the value of a metric at every client; NaN where it is undefined."""
        return METRICS.named(name).value(self.sums[name])

    def judged_by(self, headline: Metric, judged: Judged, ids: Tensor) -> Score:
        """The score with the sums of every metric of the problem, and the function that draws the headline's error."""
        sums = {one.name: one.sums(judged) for one in METRICS.of_problem(judged.problem, headline)}
        tensors = {name: torch.from_numpy(np.stack(pair, 1).astype(np.float64)) for name, pair in sums.items()}
        return replace(self, sums=tensors, error_or_draws=partial(error_draws, headline, judged, ids))

    def summary(self, n_train: Tensor, classifies: bool) -> dict[str, float]:
        """The figures of all clients together (kinfed.engine.scoring.score)."""
        return summarize(self.correct if classifies else None, self.loss, self.count, n_train, self.sums)

    def take(self, rows: Tensor) -> Score:
        """The score of some of the clients, in that order."""
        whole = self.error_or_draws

        def chosen() -> Tensor:
            known = self._known()
            assert known is not None
            return known[..., rows]

        sums = {name: values[rows] for name, values in self.sums.items()}
        return Score(self.correct[rows], self.loss[rows], self.count[rows], sums, None if whole is None else chosen)

    @classmethod
    def joined(cls, parts: Sequence[Score], order: Tensor | None = None) -> Score:
        """The clients of all parts one after the other, or in that order."""

        def rows(tensors: list[Tensor], axis: int = 0) -> Tensor:
            whole = torch.cat(tensors, axis)
            return whole if order is None else whole.index_select(axis, order)

        sums = {name: rows([part.sums[name] for part in parts]) for name in parts[0].sums}
        known = all(part.error_or_draws is not None for part in parts)
        correct, loss, count = (rows([getattr(part, name) for part in parts]) for name in ("correct", "loss", "count"))

        def error_or_draws() -> Tensor:
            draws = [part.draws for part in parts if part.draws is not None]
            if len(draws) == len(parts):
                return rows(draws, axis=1)
            return rows([part.error for part in parts if part.error is not None])

        return cls(correct, loss, count, sums, error_or_draws if known else None)


class OutputCollector:
    """Outputs of the models of n clients on their examples, from batches of these. Of dense problems three sums of
    every example stand for its outputs: -log probabilities and hits over its positions, and their number."""

    def __init__(self, n: int, problem: Problem) -> None:
        self._n, self._problem = n, problem
        # Client, outputs [...], target [...] and weight of examples and padding [m]: the client at the host, all else
        # where it was computed until the last batch is in, because an accelerator would stop for every copy.
        self._pieces: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def add(self, rows: Tensor | slice, z: Tensor, batch: Batch) -> None:
        """Outputs z [m, B, C] of the clients `rows` on a batch, whose padding is left out."""
        if self._problem.kind == "dense":
            z = position_sums(z, batch.y, self._problem)
        owner = torch.arange(self._n)[rows].repeat_interleave(batch.weight.shape[1])
        self._pieces.append((owner, z.flatten(0, 1), batch.y.flatten(0, 1), batch.weight.flatten()))

    def add_all(self, part: Split, z: Tensor) -> None:
        """Outputs z [examples, C] of all clients, one after the other."""
        owner = torch.repeat_interleave(torch.arange(self._n), part.count)
        first = torch.cumsum(part.count, 0) - part.count
        place = part.start[owner] + torch.arange(len(owner)) - first[owner]
        self._pieces.append((owner, z, part.targets(part.rows[place]), torch.ones(len(owner))))

    def judged(self) -> Judged:
        """An output that is not a number is as wrong as can be: it must not make a metric of others undefined."""
        problem = self._problem
        owner, output, target, weight = (torch.cat(parts).cpu() for parts in zip(*self._pieces, strict=True))
        order = torch.argsort(owner, stable=True)
        order = order[weight[order] > 0]
        output, target = output[order].to(torch.float64), target[order]
        if target.is_floating_point():
            target = target.to(torch.float64)
        if not problem.is_regression:
            output = torch.nan_to_num(output, nan=0.0, posinf=1e30, neginf=-1e30)
        return Judged(output.numpy(), target.numpy(), owner[order].numpy(), self._n, problem)


def position_sums(z: Tensor, y: Tensor, problem: Problem) -> Tensor:
    """[m, B, 3] sums over an example's positions that have a class: -log of its probability, hits, and their number;
    from logits z [m, B, *shape, C] or [m, B, C, *shape] and classes y [m, B, *shape]."""
    last = z if z.shape[2:] == (*problem.shape, problem.num_classes) else z.movedim(2, -1)
    known = y != IGNORED
    losses = -last.double().log_softmax(-1).gather(-1, torch.where(known, y, 0)[..., None])[..., 0]
    hits = (last.argmax(-1) == y) & known
    return torch.stack([x.flatten(2).sum(2).double() for x in (torch.where(known, losses, 0.0), hits, known)], -1)


FALSE_REJECT = 0.05  # the share of positive rows that a detector misses where it is compared


def relative_sums(
    scores: np.ndarray, start_scores: np.ndarray, positive: np.ndarray, owner: np.ndarray, clients: int
) -> tuple[np.ndarray, np.ndarray]:
    """[n] false accepts of the model, and of the start; both 0 at a client without positive or negative rows."""
    accepted = np.zeros((2, clients))
    ends = np.searchsorted(owner, np.arange(clients + 1))
    for client in range(clients):
        rows = slice(ends[client], ends[client + 1])
        own = torch.from_numpy(positive[rows])
        positives = int(own.sum())
        if 0 < positives < len(own):
            rejected = math.ceil(FALSE_REJECT * positives)
            for place, one in enumerate((scores, start_scores)):
                accepted[place, client] = false_accepts_at(rejected, torch.from_numpy(one[rows]), own)
    return accepted[0], accepted[1]


def false_accepts_at(rejected: int, scores: Tensor, positive: Tensor) -> float:
    """The false accepts that come with a number of false rejects, on the straight lines between thresholds."""
    _, rejects, accepts = operating_points(scores, positive)
    # The last point that rejects no more: of several with equal rejects, the one with fewest accepts.
    below = int(torch.searchsorted(rejects, float(rejected), right=True)) - 1
    if rejects[below] == rejected:
        return accepts[below].item()
    step = (rejected - rejects[below]) / (rejects[below + 1] - rejects[below])
    return (accepts[below] + step * (accepts[below + 1] - accepts[below])).item()


def operating_points(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every distinct score as a threshold, ascending, then infinity: (threshold, false rejects, false accepts)."""
    ordered, order = scores.to(torch.float64).sort()
    distinct, sizes = torch.unique_consecutive(ordered, return_counts=True)
    first = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0).cpu()])  # examples below each threshold
    positives_below = torch.cat([torch.zeros(1), positive[order].cpu().cumsum(0)]).to(torch.float64)[first]
    negatives_below = first - positives_below
    thresholds = torch.cat([distinct.cpu(), torch.tensor([torch.inf], dtype=torch.float64)])
    return thresholds, positives_below, negatives_below[-1] - negatives_below
