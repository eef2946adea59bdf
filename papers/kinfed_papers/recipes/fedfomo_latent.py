"""What fedfomo-latent runs, and margins of its claims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kinfed_papers import (
    Results,
    RunPart,
    difference,
)
from kinfed_papers.recipe import BySeed, Scale
from kinfed_papers.recipes.common_fedfomo import (
    FEW_STEPS,
    METHODS,
    ONE_MODEL,
    SCORED,
    SEVERAL_MODELS,
    latent_metrics,
    latent_settings,
    lead,
    method_options,
)


def parts(scale: Scale) -> list[RunPart]:
    """At the scale small all methods where clients differ most: D = 5, and ten clusters; few for the trend over D."""
    trend = ("local", "fedavg", "fedfomo-5")
    few = (*trend, "fedavg_data", "fedprox")
    plan: list[tuple[str, int, int, Iterable[str]]] = [("cifar10", 5, 15, METHODS)]
    if scale == "paper":
        plan += [("cifar10", groups, 15, METHODS) for groups in (2, 3, 4, 10)]
        plan += [("cifar100", groups, 15, METHODS) for groups in NUMBERS]
        plan += [("cifar10", groups, 100, METHODS) for groups in NUMBERS]
    elif scale == "small":
        plan += [("cifar10", 2, 15, trend), ("cifar10", 10, 15, trend), ("cifar10", 5, 100, trend)]
        plan += [("cifar100", 5, 15, METHODS)]
    else:
        plan += [("cifar10", groups, 15, few) for groups in (2, 10)]
    runs = [
        RunPart(
            f"{data}-{groups}" + ("-many" if clients == 100 else ""),
            latent_settings(scale, groups, data, clients, FEW_STEPS) | {"algorithms": method_options(labels, scale)},
            latent_metrics,
        )
        for data, groups, clients, labels in plan
    ]
    if scale != "smoke":
        clusters = latent_settings(scale, 10, steps=FEW_STEPS, by_label=False)
        runs.append(RunPart(CLUSTERS, clusters | {"algorithms": method_options(METHODS, scale)}, latent_metrics))
    return runs


NUMBERS = (2, 3, 4, 5, 10)
CLUSTERS = "cifar10-10-clusters"


def moderate(results: Results) -> Mapping[str, BySeed]:
    """Against Local and FedAvg, wherever the clients' EMD lies in [1, 2] by the released formula."""
    margins: dict[str, BySeed] = {}
    for groups in NUMBERS:
        part = f"cifar10-{groups}"
        emd = results.get(part, "federation", "emd_code")
        if emd and 1 <= sum(emd.values()) / len(emd) <= 2:
            margins |= {f"{METHODS[r]}, D = {groups}": lead(results, part, "fedfomo-5", r) for r in ("local", "fedavg")}
    return margins


def at_every_number(results: Results, row: str, rivals: Iterable[str]) -> Mapping[str, BySeed]:
    """Margins of `row` over each rival at every D that was run, CIFAR-10."""
    return {
        f"{METHODS[rival]}, D = {groups}": lead(results, f"cifar10-{groups}", row, rival)
        for rival in rivals
        for groups in NUMBERS
    }


def growing_lead(results: Results, more: str, fewer: str) -> Mapping[str, BySeed]:
    """Growth of FedFomo's lead over FedAvg from one part to another."""
    return {"": difference(*(lead(results, part, "fedfomo-5", "fedavg") for part in (more, fewer)))}


def local_gains(results: Results, part: str) -> Mapping[str, BySeed]:
    """Margin by which training alone is better in a part than with two distributions."""
    return {"": difference(*(results.get(place, "local", SCORED) for place in (part, "cifar10-2")))}


def several_above_one(results: Results) -> Mapping[str, BySeed]:
    return {
        f"{METHODS[one]}, by {METHODS[row]}": lead(results, "cifar10-5", row, one)
        for row in SEVERAL_MODELS
        for one in ONE_MODEL
    }
