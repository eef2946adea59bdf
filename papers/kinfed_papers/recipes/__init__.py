"""One file per table or figure of a paper, by its name: selffl-mnist.toml; sites.py with a RECIPE where it is computed.
Functions that a TOML file names are in the Python file of the same name (selffl-steps.toml: selffl_steps.py).

A recipe says what is run at each scale, which numbers the paper has, and which claims are to be checked:

    smoke   under 60 seconds on two cores, on data that is always there: does everything work?
    small   minutes, the longest about an hour, on the real data
    paper   the published settings

Seeds from 10 on were not looked at while readings, rates and thresholds were chosen.

See kinfed_papers.recipe_file for what a recipe is made of. A new one is a file and its line in RECIPES; texts that
several recipes share are in shared.toml."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from kinfed.errors import unknown_name

if TYPE_CHECKING:
    from kinfed_papers.recipe import Recipe

RECIPES: dict[str, str] = {
    "certificates": (
        "Statements that hold: mixtures, bounds, expectations and sets (kinfed: our questions on what fits print)"
    ),
    "selffl-ablation": "The three parts of Self-FL, one at a time (Self-FL: Figure 2b)",
    "selffl-algorithms": "Self-FL's Algorithm 1 and Algorithm 2 (Self-FL: Figure 6)",
    "selffl-cifar10": "Self-FL on CIFAR-10 (Self-FL: Figure 2a)",
    "selffl-femnist": (
        "Self-FL on handwritten letters with 200 clients (Self-FL: Figure 1b, Table 1, the run with 40 local steps)"
    ),
    "selffl-mnist": "Self-FL on MNIST with 1,000 clients (Self-FL: Figures 1a and 9)",
    "selffl-sent140": "Self-FL on tweets with 772 users (Self-FL: Figures 7 and 8)",
    "selffl-steps": "The number of local steps, client by client (Self-FL: Figures 10 and 11)",
    "selffl-synthetic": "Self-FL on the two-level Gaussian task (Self-FL: Figures 3, 4 and 5)",
    "selffl-users": "How well single users are served (Self-FL: Figure 3 of the NeurIPS version)",
    "selffl-wakeword": (
        "Self-FL on wake words, five types of devices (substitute data) (Self-FL: Tables 2, 3, 4, 6, 7 and 8)"
    ),
    "fedfomo-exploration": "FedFomo’s exploration and number of models (FedFomo: Figure 3)",
    "fedfomo-foreign": "FedFomo for targets outside a client’s own data (FedFomo: Table 3 and Figure 4)",
    "fedfomo-latent": "FedFomo on latent distributions (FedFomo: Tables 2 and 5, Figure 1)",
    "fedfomo-pathological": "FedFomo with two classes per client (FedFomo: Table 1)",
    "fedfomo-privacy": "FedFomo under differential privacy (FedFomo: Tables 4 and 6, Figure 5)",
    "fedfomo-validation": "FedFomo’s share of validation data (FedFomo: Figure 9)",
    "fedfomo-weights": "Whom FedFomo favours (FedFomo: Figures 2, 6 and 7)",
    "fedfomo-work": "FedFomo with the paper’s local work (FedFomo: Table 2, D = 5; Table 1, MNIST)",
    "cgpfl-cifar10": "CGPFL and seven competitors on CIFAR-10 (CGPFL: Table 1, last column)",
    "cgpfl-contexts": "CGPFL for several numbers of contexts (CGPFL: Figures 1 and 2)",
    "cgpfl-heur": "How many contexts: CGPFL-Heur against every K (CGPFL: Figure 3)",
    "cgpfl-table1": "CGPFL and seven competitors on MNIST and Fashion-MNIST (CGPFL: Table 1)",
    "adapters-text": (
        "Personal adapters of a pretrained encoder on reviews of 16 domains "
        "(FedSA-LoRA: its question on other data; no table)"
    ),
    "flamby-tcga": (
        "Survival with breast cancer in six regions, on FLamby's fold (FLamby: Fed-TCGA-BRCA, stored results)"
    ),
    "fedbn-features": (
        "FedBN on CIFAR-10 with a camera of each client's own (FedBN: its question on planted shifts; no table)"
    ),
    "ditto-fairness": "Ditto: accurate and fair (Ditto: accuracy and fairness on clean data)",
    "pfedme-mnist": "pFedMe on MNIST (pFedMe: the comparison on MNIST)",
    "fedrep-cifar10": (
        "FedRep on CIFAR-10 with two classes per client "
        "(FedRep: the comparison on CIFAR-10, 100 clients of two classes)"
    ),
    "fedbabu-cifar10": ("FedBABU on CIFAR-10: bodies without heads (FedBABU: personalization after fine-tuning)"),
    "fedala-cifar10": "FedALA on CIFAR-10, Dirichlet(0.1) (FedALA: the comparison on CIFAR-10, Dirichlet(0.1))",
    "ifca-rotated": "IFCA on rotated MNIST (IFCA: the comparison on rotated MNIST, four clusters)",
    "scaffold-rounds": (
        "SCAFFOLD: rounds until the server’s model is good enough "
        "(SCAFFOLD: rounds to a level of accuracy, logistic regression)"
    ),
    "kin-ablation": "Kin without one of its parts (kinfed: our question about its parts)",
    "kin-everywhere": (
        "Kin against nine methods, wherever clients may differ (kinfed: our question on nineteen federations)"
    ),
    "methods-cifar10": ("All methods on CIFAR-10, with tuned settings (kinfed: which method when labels are skewed)"),
    "sites": "Learning alone or together at real sites (kinfed: our question on eleven real tables)",
    "tables": (
        "Tables with sites: ours beside what people would take instead (kinfed: our question on ten real tables)"
    ),
}  # name -> what `kinfed list recipes` says: title (paper: what is reproduced)

# What the scale small takes in minutes on one core: which recipes are long, and how much is left of all of them.
# Processor time where the page has it, or estimated from a few rounds; otherwise what it took on busy machines.
MINUTES: dict[str, float] = {
    "selffl-ablation": 2.5,
    "selffl-algorithms": 2,
    "selffl-cifar10": 15,
    "selffl-femnist": 10,
    "selffl-mnist": 20,
    "selffl-sent140": 2,
    "selffl-steps": 0.5,
    "selffl-synthetic": 4,
    "selffl-users": 2.5,
    "selffl-wakeword": 60,
    "fedfomo-exploration": 20,
    "fedfomo-foreign": 22,
    "fedfomo-latent": 30,
    "fedfomo-pathological": 47,
    "fedfomo-privacy": 11,
    "fedfomo-validation": 14,
    "fedfomo-weights": 13,
    "fedfomo-work": 120,
    "cgpfl-cifar10": 35,
    "cgpfl-contexts": 26,
    "cgpfl-heur": 10,
    "cgpfl-table1": 60,
    "adapters-text": 25,
    "fedbn-features": 60,
    "ditto-fairness": 0.5,
    "pfedme-mnist": 2,
    "fedrep-cifar10": 11,
    "fedbabu-cifar10": 11,
    "fedala-cifar10": 30,
    "ifca-rotated": 5,
    "scaffold-rounds": 8,
    "kin-ablation": 10,
    "kin-everywhere": 81,
    "methods-cifar10": 40,
    "sites": 8,
    "tables": 300,
}


def load_recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    file = Path(__file__).with_name(f"{name}.toml")
    if file.exists():
        from kinfed_papers.recipe_file import read_recipe

        return read_recipe(file)
    recipe: Recipe = importlib.import_module(f"kinfed_papers.recipes.{name.replace('-', '_')}").RECIPE
    return recipe


def summary(recipe: Recipe) -> str:
    """What a recipe says of itself in one line, as RECIPES has it without importing the recipe."""
    return f"{recipe.title} ({recipe.paper.name}: {recipe.reproduces})"
