"""Gradients that the engine counts: by hand, by every backend alike, and without changing a bit."""

from __future__ import annotations

import pytest
import torch

from kinfed.config import make_config
from kinfed.engine import GradientCount
from kinfed.runs import Experiment

CLIENTS, ROUNDS, STEPS, BATCH = 4, 2, 3, 5
USUAL = CLIENTS * ROUNDS * STEPS * BATCH
# Gradients on every batch, by the methods' own rules; Per-FedAvg takes one step more when it is used.
EXPECTED = {
    "local": USUAL,
    "fedavg": USUAL,
    "ditto": 2 * USUAL,
    "pfedme": 5 * USUAL,
    "perfedavg": 2 * USUAL + CLIENTS * BATCH,
}


def counted(method, backend, **more):
    """The count, and the personal models' logits with and without it."""
    settings = {"algorithms": method, "rounds": ROUNDS, "batch": BATCH, "clients": CLIENTS, "participation": 1.0}
    local = {"steps": STEPS} if "epochs" not in more else {}
    settings |= {"backend": backend, "model": "mlr", "dataset": "digits", "seeds": [0], **local, **more}
    experiment, count = Experiment(make_config(None, settings)), GradientCount()
    models = []
    for own in (count, None):
        with experiment.make_loop(experiment.inputs.algorithms[method], 0, count=own) as loop:
            list(loop.rounds(ROUNDS))
            models.append(loop.evaluate(keep_models=True).models)
    return count.examples, models


@pytest.mark.parametrize("backend", ["fused", "stacked", "rows"])
@pytest.mark.parametrize("method", list(EXPECTED))
def test_gradients_are_counted_as_computed_by_hand(method, backend):
    examples, (with_count, without) = counted(method, backend)
    assert examples == EXPECTED[method]
    assert torch.equal(with_count, without)


def test_epochs_count_every_example_once():
    examples, _ = counted("fedavg", "fused", epochs=2)
    config = make_config(None, {"dataset": "digits", "clients": CLIENTS, "algorithms": "fedavg"})
    rows = int(Experiment(config).inputs.federation(0).train.count.sum())
    assert examples == 2 * ROUNDS * rows


def test_optimizers_with_moments_and_terms_are_counted():
    assert counted("fedprox", "stacked", optimizer="adam")[0] == USUAL
    assert counted("scaffold", "fused")[0] == USUAL
