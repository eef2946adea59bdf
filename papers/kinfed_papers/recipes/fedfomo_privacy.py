"""What fedfomo-privacy runs, its accountant, margins and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kinfed.analysis import Comparison
from kinfed.report.drawing import axis
from kinfed_papers import (
    Results,
    RunPart,
    Study,
    difference,
)
from kinfed_papers.recipe import BySeed, Measurements, RecipeFigure, Scale
from kinfed_papers.recipe_figures import line_chart
from kinfed_papers.recipes.common_fedfomo import (
    SCORED,
    SEEDS,
    above_chance,
    latent_metrics,
    latent_settings,
)

METHODS = {
    "local": "Local training (ours)",
    "fedavg": "FedAvg",
    "fedfomo": "FedFomo",
    "fedfomo_ma": "FedFomo, averages (MA)",
}
PRIVATE = ("fedavg", "fedfomo", "fedfomo_ma")  # the paper's
NOISES = (0, 1, 2)
DATA = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
DELTA = 1e-5
PLACE, AVERAGES = "Section 4 (locally private FedFomo), Table 4", "Appendix A.4, Table 6"

# The paper's clients: on average 3,333 examples, four fifths of them for training, in batches of 50.
TRAINED, BATCH = 2667, 50
EPOCHS = (20, 50, 100)


def parts(scale: Scale) -> list[RunPart | Study]:
    plan: list[RunPart | Study] = [
        Study("accountant", accountant, {"examples": TRAINED, "batch": BATCH, "epochs": EPOCHS, "delta": DELTA})
    ]
    for data in DATA if scale == "paper" else ("cifar10",):
        for noise in NOISES:
            settings = private_settings(scale, data) | {"dp_noise": float(noise)}
            plan.append(RunPart(f"{data}-{noise}", settings, latent_metrics))
    return plan


def private_settings(scale: Scale, data: str) -> dict[str, Any]:
    settings = {key: value for key, value in latent_settings(scale, 5, data).items() if key != "epochs"}
    settings |= {"algorithms": {label: {} for label in METHODS}, "dp_clip": 1.0, "dp_delta": DELTA}
    if scale == "paper":
        return settings | {"steps": 5 * (TRAINED // BATCH)}  # five epochs, as numbers of random samples
    if scale == "smoke":
        return settings | {"model": "mlr", "rounds": 3, "seeds": [0, 1]}
    # Noise asks for many examples and few parameters: logistic regression, which is quick, on half of the images.
    settings["dataset"] |= {"examples": 30000}
    settings["partition"] |= {"epochs": 3}
    return settings | {"model": "mlr", "batch": BATCH, "steps": 40, "seeds": list(SEEDS[:5])}


def accountant(seeds: Sequence[int] | None, settings: Mapping[str, Any]) -> Measurements:
    """Epsilon of the paper's local training. No chance is in it, so that seeds do not matter."""
    from kinfed.privacy import Event, epsilon, renyi_epsilon  # needs the extra dp

    measured: Measurements = {}
    for epochs in EPOCHS:
        events = (Event(BATCH / TRAINED, 1, epochs * (TRAINED // BATCH)),)
        row = measured.setdefault(f"epochs-{epochs}", {})
        for noise in (1, 2):
            row[f"pld-{noise}"] = {0: epsilon(events, float(noise), DELTA)}
            row[f"rdp-{noise}"] = {0: renyi_epsilon(events, float(noise), DELTA)}
            row[f"rdp-2017-{noise}"] = {0: renyi_epsilon(events, float(noise), DELTA, "2017")}
    return measured


def accuracy(results: Results, method: str, noise: int, data: str = "cifar10") -> BySeed:
    return results.get(f"{data}-{noise}", method, SCORED)


def spent(results: Results, method: str, noise: int, data: str) -> BySeed:
    return results.get(f"{data}-{noise}", method, "epsilon")


def over(
    results: Results, data: str, better: str, noises: Sequence[int], rival: str, rival_noise: int | None = None
) -> Mapping[str, BySeed]:
    """Margins of a method at some noises over a rival at the same noise, or at one of its own."""
    by_rival = {}
    for noise in noises:
        other = noise if rival_noise is None else rival_noise
        by_rival[f"{METHODS[rival]} with σ = {other}, by σ = {noise}"] = difference(
            accuracy(results, better, noise, data), accuracy(results, rival, other, data)
        )
    return by_rival


def less_with_noise(results: Results, data: str) -> Mapping[str, BySeed]:
    return {
        METHODS[method]: difference(spent(results, method, 1, data), spent(results, method, 2, data))
        for method in PRIVATE
    }


def less_than_fedavg(results: Results, data: str) -> Mapping[str, BySeed]:
    return {
        f"σ = {noise}": difference(spent(results, "fedavg", noise, data), spent(results, "fedfomo", noise, data))
        for noise in (1, 2)
    }


def found_under_noise(results: Results) -> Mapping[str, BySeed]:
    return {f"σ = {n}": above_chance(results, f"cifar10-{n}", "fedfomo") for n in (1, 2)}


def figures(results: Results, runs: Mapping[str, Comparison]) -> list[RecipeFigure]:
    return [
        RecipeFigure(
            f"Accuracy over noise, {name}",
            line_chart(
                axis("σ", tickvals=list(NOISES)),
                {METHODS[m]: [(float(n), accuracy(results, m, n, data)) for n in NOISES] for m in METHODS},
                "Test accuracy",
                f"Accuracy of private methods over the noise, {name}.",
            ),
        )
        for data, name in DATA.items()
        if f"{data}-0" in results
    ]
