"""Self-FL on tweets (Figures 7 and 8): a warm start with FedAvg, then every method from there."""

from __future__ import annotations

from typing import Any

from kinfed_papers import (
    Claim,
    Question,
    Recipe,
    ResultColumn,
    Results,
    ResultTable,
    RunPart,
    Untestable,
    difference,
)
from kinfed_papers.recipe import ACCURACY, SELF_FL, BySeed, Scale, either_way
from kinfed_papers.recipes.common_selffl import COMPARED, SEEDS, TRAINING_ACCURACY, named, training_accuracy

METHODS = named(*COMPARED)
RIVALS = ("ditto", "pfedme", "perfedavg")


def parts(scale: Scale) -> list[RunPart]:
    """A tenth of the users active, two local epochs; a fifth of every user's tweets is for testing.

    Parts on the biased subset have names of their own: no claim is judged by them."""
    common: dict[str, Any] = {"partition": {"name": "column", "test_fraction": 0.2}, "participation": 0.1}
    common |= {"lr": 0.3, "batch": 10, "epochs": 2, "save_models": True}
    if scale == "paper":
        common |= {"dataset": "sentiment140", "clients": 772, "model": "lstm", "seeds": [0, 1, 2], "eval_every": 20}
        prefix, warm, rounds = "", 200, 400
    else:
        small = scale == "small"
        common |= {"dataset": "sentiment140_subset", "model": {"name": "lstm", "hidden": 64 if small else 16}}
        common |= {"seeds": list(SEEDS[:5]) if small else [0, 1]}
        prefix, warm, rounds = "trial-", *((40, 40) if small else (4, 4))
    methods: dict[str, dict[str, Any]] = {label: {"method": label} for label in METHODS}
    methods["selffl"]["fixed_epochs"] = 2  # the control takes the run's two epochs like everyone else
    methods["pfedme"]["lam"] = 2.0  # its usual 15 overshoots: the step towards a personal model is lr * lam
    scratch = {**common, "rounds": warm, "algorithms": "fedavg"}
    continued = {**common, "warm_start": warm, "rounds": rounds, "algorithms": methods}
    return [
        RunPart(f"{prefix}scratch", scratch, training_accuracy),
        RunPart(f"{prefix}warm", continued, training_accuracy),
    ]


def saturated(results: Results) -> dict[str, BySeed]:
    """By how much a method's test accuracy has risen, or fallen, since the warm start."""
    start = results.get("scratch", "fedavg", ACCURACY)
    cases: dict[str, BySeed] = {}
    for row in ("fedavg", *RIVALS, "selffl"):
        change = difference(results.get("warm", row, ACCURACY), start)
        cases |= either_way(change, f"{METHODS[row]} rises", f"{METHODS[row]} falls")
    return cases


FIGURES = {
    "Training": TRAINING_ACCURACY,
    "Test": "personal.accuracy",
    "Test, client mean": "personal.accuracy_mean",
    "Test, global model": "server.accuracy",
}
TRIALS = {"": "", "trial-": ", trial of the code on biased data"}  # prefix of a part -> ending of its title
BIASED = (
    "a small and biased part of Sentiment140 (94 users with at least 5 tweets; the label follows the date), 50-d "
    "vectors and a smaller LSTM: a trial of the code. No figure here says anything about Sent140."
)

RECIPE = Recipe(
    name="selffl-sent140",
    paper=SELF_FL,
    reproduces="Figures 7 and 8",
    title="Self-FL on tweets with 772 users",
    about="Sentiment140 by user (those with at least 30 tweets, FedProx), two LSTM layers of 256 on 300-d GloVe "
    "vectors of 25 words, learning rate 0.3, 77 of 772 users active, two local epochs. FedAvg for 200 rounds "
    "(Figure 7), then every method for 400 more from its model (Figure 8); Self-FL takes two epochs too. The paper "
    "has curves only.",
    parts=parts,
    tables=[
        *(
            ResultTable(
                f"FedAvg from scratch (Figure 7){ending}",
                {"fedavg": METHODS["fedavg"]},
                ResultColumn.by_metric(f"{prefix}scratch", FIGURES),
            )
            for prefix, ending in TRIALS.items()
        ),
        *(
            ResultTable(
                f"After the warm start (Figure 8){ending}", METHODS, ResultColumn.by_metric(f"{prefix}warm", FIGURES)
            )
            for prefix, ending in TRIALS.items()
        ),
    ],
    claims=[
        Claim.above(
            "Self-FL trains better than Ditto, pFedMe and Per-FedAvg",
            "warm",
            "selffl",
            RIVALS,
            TRAINING_ACCURACY,
            place="Appendix E.3, Figure 8a",
        ),
        Claim.above(
            "FedAvg trains better than Ditto, pFedMe and Per-FedAvg",
            "warm",
            "fedavg",
            RIVALS,
            TRAINING_ACCURACY,
            place="Appendix E.3, Figure 8a",
        ),
        Claim(
            "Test accuracy hardly changes after the warm start, all methods (by at most 2 points, a limit of ours)",
            saturated,
            place="Appendix E.3, Figure 8b",
            limit=0.02,
            at_most=True,
        ),
        Question.above("Self-FL above smoothing alone, test accuracy", "warm", "selffl", ["selffl_control"]),
        Untestable("The curves", "the paper prints no numbers for them", "Appendix E.3, Figures 7 and 8"),
    ],
    notes=[
        "FedProx draws 30 % of the tweets before it counts; here 772 of all users with at least 30 tweets are drawn.",
        "The paper says 25 characters; FedProx's code, which it follows, reads 25 words, and so does this.",
        "Ditto's λ and the settings of pFedMe and Per-FedAvg are not in the paper; ours are the methods' defaults, but "
        "λ = 2 for pFedMe: with the usual 15 its steps overshoot at this learning rate.",
    ],
    stand_ins={"smoke": BIASED, "small": BIASED},
    other_data=("trial-scratch", "trial-warm"),
    method_figures=[("warm", "selffl"), ("trial-warm", "selffl")],
)
