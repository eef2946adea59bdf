"""FedNova: coefficients of gradients, a round by hand, FedAvg where all work alike, and the objective it keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from method_bench import LR, TWO_STEPS, by_hand, info, run, server, two_bowls
from torch import nn

from kinfed.algorithms.common.averaging import ModelState
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.fednova import FedNova, Up, accumulation
from kinfed.algorithms.fedprox import FedProx
from kinfed.data.examples.batches import LocalTraining
from kinfed.errors import ConfigError

STEPS = LocalTraining(batch=5, steps=4)
# One example per batch: the clients of `two_bowls` take 1 and 3 steps, on examples that are all alike.
ONE_AND_THREE = LocalTraining(lr=LR, batch=1, steps=None, epochs=1)


def counted(steps: int, rho: float, eta_mu: float) -> float:
    """‖a‖₁ from the definition: minus the end of local training in which every gradient is 1 and η is 1."""
    theta, velocity = 0.0, 0.0
    for _ in range(steps):
        velocity = rho * velocity + 1.0 + eta_mu * theta
        theta -= velocity
    return -theta


@pytest.mark.parametrize(
    ("steps", "rho", "eta_mu", "norm"), [(3, 0.9, 0.0, 5.61), (3, 0.0, 0.1, 2.71), (7, 0.0, 0.0, 7.0)]
)
def test_what_the_gradients_of_a_round_count_for(steps: int, rho: float, eta_mu: float, norm: float) -> None:
    assert float(accumulation(torch.tensor([steps]), rho, eta_mu)) == pytest.approx(norm)
    assert counted(steps, rho, eta_mu) == pytest.approx(norm)
    assert float(accumulation(torch.tensor([0]), rho, eta_mu)) == pytest.approx(0, abs=1e-12)


def test_one_step_and_three_by_hand() -> None:
    """θ = (0.9, 2.971), directions (1, −6.57), τ_eff = 2."""
    with two_bowls(FedNova(ONE_AND_THREE, weights="equal")) as loop:
        loop.round()
        assert float(server(loop)) == pytest.approx(1.557)


def test_who_works_more_does_not_pull_the_model_to_itself() -> None:
    """The mean of both losses is least at 3. FedAvg goes to Σ K a z / Σ K a = 3.6 for small rates."""
    training = replace(ONE_AND_THREE, lr=0.02)
    with two_bowls(FedNova(training, weights="equal")) as loop, two_bowls(FedAvg(training, weights="equal")) as plain:
        for _ in range(150):
            loop.round()
            plain.round()
        assert float(server(loop)) == pytest.approx(3, abs=0.06)
        assert float(server(plain)) == pytest.approx(3.6, abs=0.06)


def test_equal_work_is_fedavg() -> None:
    for ours, theirs in (
        (FedNova(STEPS), FedAvg(STEPS)),
        (FedNova(replace(STEPS, momentum=0.9)), FedAvg(replace(STEPS, momentum=0.9))),
        (FedNova(STEPS, mu=0.3), FedProx(STEPS, mu=0.3)),
    ):
        one, other = run(ours, 3), run(theirs, 3)
        for name in ("server.w", "clients.rows.theta", "personal models"):
            assert torch.equal(one[name], other[name]), name


def test_partial_work_of_stragglers_is_used() -> None:
    with by_hand(FedNova(STEPS), stragglers=0.9) as loop:
        assert loop.round().dropped == 0


def test_who_took_no_step_weighs_in_the_mean_and_has_no_direction() -> None:
    """Weights 1 and 3, one idle: τ_eff = 3/4 · 2, and the step is τ_eff · 3/4 · Δ/2. Statistics take the mean."""
    up = Up(torch.tensor([[0.0, 0.0], [4.0, 4.0]]), torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0]))
    told = replace(info(), trainable=slice(0, 1))
    new = FedNova().aggregate(ModelState(torch.zeros(2)), torch.arange(2), up, told)
    assert new.w.tolist() == pytest.approx([1.5 * 0.75 * 2, 3.0])


def test_statistics_stay_variances() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 3))

    training = LocalTraining(batch=2, steps=None, epochs=1)
    with by_hand(FedNova(training), model=model, sizes=(2, 16, 7)) as loop:
        for _ in range(3):
            loop.round()
        variance = next(slot for slot in loop.task.slots if slot.name.endswith("running_var"))
        assert bool((server(loop)[variance.start : variance.stop] > 0).all())


def test_bytes() -> None:
    for weights, numbers in (("examples", 17), ("equal", 16)):
        with by_hand(FedNova(TWO_STEPS, weights=weights)) as loop:
            report = loop.round()
            assert (report.bytes_down, report.bytes_up) == (3 * 15 * 4, 3 * numbers * 4)


@pytest.mark.parametrize(
    ("changes", "mu"),
    [
        ({"momentum": 0.9}, 0.1),
        ({"momentum": 0.9, "nesterov": True}, 0.0),
        ({"momentum": 0.9, "optimizer_state": "kept"}, 0.0),
        ({"optimizer": "adam"}, 0.0),
        ({"clip": 1.0}, 0.0),
    ],
)
def test_training_whose_gradients_count_for_unknown_amounts_is_refused(changes: dict[str, object], mu: float) -> None:
    with pytest.raises(ConfigError, match="FedNova must know"):
        FedNova(replace(STEPS, **changes), mu=mu)  # type: ignore[arg-type]
