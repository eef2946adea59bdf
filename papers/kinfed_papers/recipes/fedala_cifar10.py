"""FedALA against other personalized methods on CIFAR-10, class shares from Dirichlet(0.1)."""

from __future__ import annotations

from typing import Any

from kinfed_papers import Recipe, RunPart, parse_published
from kinfed_papers.recipe import FEDALA, Scale
from kinfed_papers.recipes.common_popular import (
    ONE_RATE,
    SMALL_IMAGES,
    SMOKE_IMAGES,
    above_alternatives,
    beyond_rivals,
    image_settings,
    personal_table,
)

METHODS = {
    "local": "Local",
    "fedavg_model": "FedAvg",
    "fedavg": "FedAvg, fine-tuned (ours)",
    "fedprox": "FedProx",
    "perfedavg": "Per-FedAvg",
    "perfedavg-slow": "Per-FedAvg, rate 0.02",
    "fedper": "FedPer",
    "fedrep": "FedRep",
    "pfedme": "pFedMe",
    "ditto": "Ditto",
    "fedamp": "FedAMP",
    "fedphp": "FedPHP",
    "fedfomo": "FedFomo",
    "fedala": "FedALA",
}
# Per-FedAvg with a rate at which it does not diverge.
SLOW = {"perfedavg-slow": {"method": "perfedavg", "lr": 0.02}}
NOT_COMPARED = ("local", "fedavg", "fedala", "perfedavg")
RIVALS = tuple(name for name in METHODS if name not in NOT_COMPARED)
PART = "cifar10"
ALIASES = {"fedavg_model": ("fedavg", "server")}
TABLE_2 = parse_published("""
    method       | Accuracy
    fedavg_model | 59.16 ± 0.47
    fedavg       | 90.34 ± 0.01
    fedprox      | 90.33 ± 0.01
    perfedavg    | 87.74 ± 0.19
    fedrep       | 90.40 ± 0.24
    pfedme       | 88.09 ± 0.32
    ditto        | 90.59 ± 0.01
    fedamp       | 88.70 ± 0.18
    fedphp       | 88.92 ± 0.02
    fedfomo      | 88.06 ± 0.02
    fedala       | 90.67 ± 0.03
""")


def parts(scale: Scale) -> list[RunPart]:
    settings = image_settings(scale, {"name": "dirichlet", "alpha": 0.1}, 20, 1.0)
    methods: dict[str, dict[str, Any]] = {name: {} for name in METHODS if name not in (*ALIASES, *SLOW)}
    return [
        RunPart(PART, {**settings, "algorithms": methods}),
        RunPart(f"{PART}-slow", {**settings, "algorithms": SLOW}, merge_into=PART),
    ]


RECIPE = Recipe(
    name="fedala-cifar10",
    paper=FEDALA,
    reproduces="the comparison on CIFAR-10, Dirichlet(0.1)",
    title="FedALA on CIFAR-10, Dirichlet(0.1)",
    about="20 clients with class shares from Dirichlet(0.1), all active. Before it trains, a client mixes the server’s "
    "model with its own, parameter by parameter in the last layer, by what lowers its loss.",
    parts=parts,
    tables=[personal_table("Personal models, CIFAR-10 (%)", PART, METHODS, TABLE_2)],
    claims=[
        above_alternatives(PART, "fedala", "FedALA", RIVALS, "Abstract; Table 2"),
        *beyond_rivals(PART, "fedala", "FedALA", ["fedavg", "local"]),
    ],
    notes=[
        "Published figures: Table 2, CIFAR-10 with Dirichlet(0.1), from a public transcription of it; of all images, a "
        "larger network and 2,000 rounds. FedAvg and FedProx, fine-tuned, are its FedAvg-C and FedProx-C.",
        ONE_RATE,
        "Of the eleven baselines that the paper’s abstract counts, those that kinfed has are run.",
        "With the common rate of 0.05 Per-FedAvg diverges with one seed of three; FedALA is compared with Per-FedAvg "
        "at 0.02, the first lower rate that was tried.",
        "No examples are set aside for validation: FedFomo judges others’ models by training examples.",
    ],
    stand_ins={"smoke": SMOKE_IMAGES, "small": SMALL_IMAGES},
    aliases=ALIASES,
)
