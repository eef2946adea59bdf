"""Self-FL on MNIST: 1,000 clients of two digits each, a tenth of them active (Figure 1a; Figure 9 with C = 0.02)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kinfed.reproduce import Claim, Column, Part, Recipe, Table, Untestable
from kinfed.reproduce.recipe import SELF_FL, Scale

METHODS = {
    "local": "Local",
    "fedavg": "FedAvg",
    "fedavg-40": "FedAvg, 40 steps",
    "selffl_control": "Control: smoothing only",
    "control-40": "Control: smoothing only, 40 steps",
    "ditto": "Ditto",
    "pfedme": "pFedMe",
    "perfedavg": "Per-FedAvg",
    "selffl": "Self-FL",
    "selffl_init": "Self-FL, start (18) only",
    "selffl_steps": "Self-FL, steps (19) only",
    "selffl_agg": "Self-FL, weights (20) only",
    "selffl_exact": "Self-FL, exact posterior (ours)",
}
LATER = ("control-40", "fedavg-40")  # as many steps as Self-FL may take, in a run of their own
RIVALS = ("fedavg", "ditto", "pfedme", "perfedavg")


def mnist(clients: int, rounds: int, participation: float = 0.1) -> dict[str, Any]:
    """FedProx's split of MNIST, logistic regression, 20 local steps."""
    return {
        "dataset": {"name": "mnist", "standardize": "pixel"}, "partition": "powerlaw", "model": "mlr", "lr": 0.03,
        "batch": 10, "steps": 20, "clients": clients, "rounds": rounds, "participation": participation,
        "seeds": [0, 1, 2],
    }  # fmt: skip


def parts(scale: Scale) -> list[Part]:
    if scale == "smoke":
        digits = {**mnist(50, 20), "dataset": "digits", "seeds": [0, 1]}
        return [Part("active-10", {**digits, "algorithms": options(METHODS)})]
    seeds = {} if scale == "small" else {"seeds": [0, 1, 2, 3, 4]}
    tenth, fiftieth = {**mnist(1000, 200), **seeds}, {**mnist(1000, 200, 0.02), **seeds}
    longer = {"control-40": {"method": "selffl_control", "steps": 40}, "fedavg-40": {"method": "fedavg", "steps": 40}}
    return [
        Part("active-10", {**tenth, "algorithms": options(METHODS)}),
        Part("active-10-longer", {**tenth, "algorithms": longer}, under="active-10"),
        Part("active-2", {**fiftieth, "algorithms": options(["fedavg", "ditto", "selffl_control", "selffl"])}),
    ]


def options(labels: Iterable[str]) -> dict[str, dict[str, object]]:
    """Self-FL takes at most 40 steps."""
    return {
        label: {"method": label, **({"l_max": 40} if label.startswith("selffl") else {})}
        for label in labels
        if label not in LATER
    }


FIGURES = (("Accuracy", "personal.accuracy"), ("Client mean", "personal.accuracy_mean"),
           ("Worst 10 %", "personal.worst10"), ("Largest 10 %", "personal.top10"),
           ("Global model", "server.accuracy"))  # fmt: skip

RECIPE = Recipe(
    name="selffl-mnist",
    paper=SELF_FL,
    shows="Figures 1a and 9",
    title="Self-FL on MNIST with 1,000 clients",
    about="Two digits per client, lognormal sizes (FedProx), logistic regression, 200 rounds from scratch; the "
    "baselines take 20 local steps, Self-FL at most 40. The paper has curves and no table; the control with "
    "only Self-FL's smoothing average stands beside it.",
    parts=parts,
    tables=[
        Table("A tenth of the clients active", METHODS, [Column(h, "active-10", m) for h, m in FIGURES]),
        Table("One client in fifty active (Figure 9)", METHODS, [Column(h, "active-2", m) for h, m in FIGURES]),
    ],
    claims=[
        Claim.above("Self-FL above all baselines, personal models (Fig. 1a)", "active-10", "selffl", RIVALS),
        Claim.above("Self-FL above all baselines, worst 10 %", "active-10", "selffl", RIVALS, "personal.worst10"),
        Claim.above("Self-FL's global model above FedAvg's", "active-10", "selffl", ["fedavg"], "server.accuracy"),
        *(Claim.above(f"With C = 0.02 Self-FL converges more slowly than FedAvg and Ditto, {kind} models (Fig. 9)",
                      "active-2", "selffl", ["fedavg", "ditto"], f"{kind}.accuracy", lower_is_better=True)
          for kind in ("personal", "server")),
        Claim.above("Self-FL above smoothing alone, personal models", "active-10", "selffl", ["selffl_control"],
                    asked_by="kinfed"),
        Claim.above("Steps (19) alone above smoothing alone", "active-10", "selffl_steps", ["selffl_control"],
                    asked_by="kinfed"),
        Claim.above("Steps (19) alone above smoothing alone with 40 steps, the most it may take", "active-10",
                    "selffl_steps", ["control-40"], asked_by="kinfed"),
        Claim.above("Self-FL above smoothing alone, worst 10 %", "active-10", "selffl", ["selffl_control"],
                    "personal.worst10", asked_by="kinfed"),
        Claim.above("The exact posterior above the paper's", "active-10", "selffl_exact", ["selffl"],
                    asked_by="kinfed"),
        Claim.above("Self-FL above every client alone", "active-10", "selffl", ["local"], asked_by="kinfed"),
        Untestable("The curves of Figure 1a", "the paper prints no numbers for them"),
    ],
    notes=[
        "The partition follows FedProx's generator, whose draws have no seed; sizes differ from seed to seed.",
        "Ditto's λ and the settings of pFedMe and Per-FedAvg are not in the paper; ours are the methods' defaults.",
        "Clients with one or two test examples decide the worst tenth here; the client mean says more.",
    ],
    stand_ins={"smoke": "digits with 50 clients in place of MNIST with 1,000; these figures say nothing about MNIST."},
    inside=[("active-10", "selffl")],
)  # fmt: skip
