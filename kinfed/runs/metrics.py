"""From per-client counts to the figures that tables compare.

The inputs are sums over each client's test examples, as `Task.score` returns them: `correct [K]`, `loss [K]`,
`n_test [K]`, and the training sizes `n_train [K]`. Everything is computed in float64.

A client without test examples has no accuracy, so it is left out of every figure, also of the M in "10% of M
clients". Ten percent means ceil(M / 10) clients, so at least one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kinfed.errors import DataError

MIN_FALSE_REJECTS = 20  # fewer than this make a rate at which nothing can be compared


def summarize(
    correct: Tensor | None,
    loss: Tensor,
    n_test: Tensor,
    n_train: Tensor,
    weight: Literal["test", "train"] = "test",
) -> dict[str, float]:
    """The metrics of one evaluation.

    accuracy       average of client accuracies, weighted by `weight` examples ("test": all correct / all examples)
    accuracy_mean  average with one vote per client
    accuracy_std   population standard deviation over clients (divides by M)
    worst10        mean accuracy of the ceil(M/10) clients with the lowest one
    top10          weighted accuracy of the ceil(M/10) clients with most training examples (ties: lower id first)
    loss           average of client mean losses, weighted like `accuracy`

    `correct=None` (a task without accuracy) gives the loss only. A figure that does not exist is absent, never NaN:
    nobody has test examples -> {}; weight="train" and nobody evaluated has training examples -> no weighted figure.
    A NaN or infinite loss is a result (a diverged model) and is passed on.
    """
    _check(correct, loss, n_test, n_train)
    if weight not in ("test", "train"):
        raise ValueError(f'weight must be "test" or "train"; got {weight!r}')
    seen = n_test > 0
    if not seen.any():
        return {}
    examples = n_test[seen].to(torch.float64)
    size = n_train[seen]
    share = examples if weight == "test" else size.to(torch.float64)
    weighted = bool(share.sum() > 0)
    found: dict[str, float] = {}
    if correct is not None:
        accuracy = correct[seen].to(torch.float64) / examples
        tenth = (len(accuracy) + 9) // 10
        largest = torch.argsort(size, descending=True, stable=True)[:tenth]
        if weighted:
            found["accuracy"] = _weighted_mean(accuracy, share)
        found["accuracy_mean"] = accuracy.mean().item()
        found["accuracy_std"] = accuracy.std(correction=0).item()
        found["worst10"] = accuracy.sort().values[:tenth].mean().item()
        if weighted:
            found["top10"] = _weighted_mean(accuracy[largest], share[largest])
    if weighted:
        found["loss"] = _weighted_mean(loss[seen].to(torch.float64) / examples, share)
    return found


def histogram(correct: Tensor, n_test: Tensor, bins: int = 20) -> Tensor:
    """int64 [bins]: how many clients have an accuracy in [b/bins, (b+1)/bins); the last bin includes 1."""
    _check(correct, correct, n_test, n_test)
    seen = n_test > 0
    # Dividing last keeps accuracies on a bin edge (3 of 20) in the bin that starts there.
    bin_of = torch.floor(correct[seen].to(torch.float64) * bins / n_test[seen]).to(torch.int64)
    return torch.bincount(bin_of.clamp(max=bins - 1), minlength=bins)


@dataclass(frozen=True)
class RelativeFalseAccepts:
    """Two detectors compared where they miss equally often; all rates in [0, 1]."""

    ratio: float | None  # false accepts of the model per false accept of the baseline; None if the baseline has none
    false_reject: float  # of both
    false_accept: float  # of the model
    baseline_false_accept: float
    baseline_threshold: float  # the one given, or the one it had to be moved to


def relative_false_accepts(
    scores: Tensor, baseline_scores: Tensor, positive: Tensor, baseline_threshold: float
) -> RelativeFalseAccepts:
    """FA(model) / FA(baseline) with the model's threshold set so that FR(model) / FR(baseline) = 1; lower is better.

    `positive` [N] bool marks the examples that should be accepted; an example is accepted if score >= threshold.
    The baseline works at its given threshold. Where it rejects no positive there, the ratio of false rejects does
    not exist, and it is moved to the lowest threshold with at least 20 false rejects.
    Operating points are joined by straight lines, so that examples with equal scores, which no threshold can
    separate, give the rate expected if they were split at random. Among thresholds with the same false rejects the
    one with fewest false accepts counts, for the baseline as for the model: a model against itself gives exactly 1.
    """
    if positive.dtype != torch.bool:
        raise ValueError(f"positive must be bool, one entry per example; got {positive.dtype}")
    for name, values in (("scores", scores), ("baseline_scores", baseline_scores)):
        if values.shape != positive.shape or values.dim() != 1:
            raise ValueError(f"{name} must be [N] like positive {list(positive.shape)}; got {list(values.shape)}")
        if not torch.isfinite(values).all():
            raise DataError(f"{name} holds values that are not finite; a ROC needs one finite score per example")
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if positives == 0 or negatives == 0:
        raise DataError(
            f"false rejects and false accepts need positive and negative examples; got {positives} and {negatives}"
        )

    rejected = int((positive & (baseline_scores < baseline_threshold)).sum())
    if rejected == 0:
        if positives < MIN_FALSE_REJECTS:
            raise DataError(
                f"the baseline rejects none of {positives} positive examples at threshold {baseline_threshold:g}, and "
                f"another operating point needs at least {MIN_FALSE_REJECTS}; add positive test examples or "
                "raise the threshold"
            )
        thresholds, rejects, _ = _operating_points(baseline_scores, positive)
        first = int((rejects >= MIN_FALSE_REJECTS).nonzero()[0])
        baseline_threshold, rejected = thresholds[first].item(), int(rejects[first])
    accepted = _false_accepts_at(rejected, scores, positive)
    baseline_accepted = _false_accepts_at(rejected, baseline_scores, positive)
    return RelativeFalseAccepts(
        ratio=accepted / baseline_accepted if baseline_accepted else None,
        false_reject=rejected / positives,
        false_accept=accepted / negatives,
        baseline_false_accept=baseline_accepted / negatives,
        baseline_threshold=baseline_threshold,
    )


def _false_accepts_at(rejected: int, scores: Tensor, positive: Tensor) -> float:
    """The false accepts that come with a number of false rejects, on the straight lines between thresholds."""
    _, rejects, accepts = _operating_points(scores, positive)
    # The last point that rejects no more: of several with equal rejects, the one with fewest accepts.
    below = int(torch.searchsorted(rejects, float(rejected), right=True)) - 1
    if rejects[below] == rejected:
        return accepts[below].item()
    step = (rejected - rejects[below]) / (rejects[below + 1] - rejects[below])
    return (accepts[below] + step * (accepts[below + 1] - accepts[below])).item()


def _operating_points(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every distinct score as a threshold, ascending, then infinity: (threshold, false rejects, false accepts)."""
    ordered, order = scores.to(torch.float64).sort()
    distinct, sizes = torch.unique_consecutive(ordered, return_counts=True)
    first = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0).cpu()])  # examples below each threshold
    positives_below = torch.cat([torch.zeros(1), positive[order].cpu().cumsum(0)]).to(torch.float64)[first]
    negatives_below = first - positives_below
    thresholds = torch.cat([distinct.cpu(), torch.tensor([torch.inf], dtype=torch.float64)])
    return thresholds, positives_below, negatives_below[-1] - negatives_below


def _weighted_mean(values: Tensor, share: Tensor) -> float:
    # A client of weight 0 must not matter even where its value is not finite.
    return (torch.where(share > 0, values, 0.0) * share).sum().item() / share.sum().item()


def _check(correct: Tensor | None, loss: Tensor, n_test: Tensor, n_train: Tensor) -> None:
    given = {"correct": correct, "loss": loss, "n_test": n_test, "n_train": n_train}
    shapes = {name: list(tensor.shape) for name, tensor in given.items() if tensor is not None}
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
