"""From per-client counts to the figures that tables compare.

The inputs are sums over each client's test examples, as `Task.score` returns them: `correct [K]`, `loss [K]`,
`n_test [K]`, and the training sizes `n_train [K]`. Everything is computed in float64.

A client without test examples has no accuracy, so it is left out of every figure, also of the M in "10% of M
clients". Ten percent means ceil(M / 10) clients, so at least one.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


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
