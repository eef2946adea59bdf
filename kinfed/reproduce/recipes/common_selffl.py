"""What recipes of Self-FL share: methods and their options, columns of tables, two federations, seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch

from kinfed.engine import task_for
from kinfed.records import RunFiles
from kinfed.records import RunRecord as Run
from kinfed.reproduce.recipe import Claim, Measurements, Question, ResultColumn, RunPart, Scale
from kinfed.runs import RunInputs, read_config

NAMES = {
    "local": "Local",
    "fedavg": "FedAvg, fine-tuned",
    "fedavg-40": "FedAvg, 40 steps",
    "ditto-40": "Ditto, 40 steps",
    "pfedme-40": "pFedMe, 40 steps",
    "perfedavg-40": "Per-FedAvg, 40 steps",
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
    "selffl-rough": "Self-FL without smoothing",
    "selffl-gd": "Self-FL, steps by (8)",
    "selffl-sum": "Self-FL, batch sums",
    "selffl-printed": "Self-FL as printed in Algorithm 1 (long version)",
    "selffl-printed-neurips": "Self-FL as printed in Algorithm 1 (NeurIPS version)",
    "fedavg-fast": "FedAvg at the rate of a batch sum",
    "ditto-fast": "Ditto at the rate of a batch sum",
    "perfedavg-fast": "Per-FedAvg at the rate of a batch sum",
}
READINGS: dict[str, dict[str, Any]] = {  # where the paper's versions differ or the text leaves a choice
    "selffl-rough": {"method": "selffl", "smoothing": 1.0},
    "selffl-gd": {"method": "selffl", "contraction": "gd"},
    "selffl-sum": {"method": "selffl", "reduction": "sum"},
}
PRINTED: dict[str, dict[str, Any]] = {  # Algorithm 1 to the letter: several of these readings at once
    "selffl-printed": {"method": "selffl", "smoothing": 1.0, "reduction": "sum"},
    "selffl-printed-neurips": {"method": "selffl", "smoothing": 1.0, "contraction": "gd"},
}
FASTER = ("fedavg-fast", "ditto-fast", "perfedavg-fast")  # the sum over a batch of B is B times the rate
ONE_MODEL = "fedavg-global"  # FedAvg by its one model for all
ALIASES = {ONE_MODEL: ("fedavg", "server")}
READINGS_NOTES = (  # judged like the first reading, beside it
    "Equations: (18) gives the model that a client starts a round from, (19) its number of steps, (20) the weights of "
    "the average on the server; docs/selffl.md explains them, and the exact posterior.",
    "FedAvg is shown by its one model and fine-tuned; the paper does not say which it compares with.",
    "Smoothing: the server keeps 1 − C of its last model. Section 4 has this, Algorithm 1 has not: both are run.",
    "Steps: (8), which Algorithm 1 of the NeurIPS version names, is (19) without the batch: both are run. (Section 4.2 "
    "of that version says “Eqn. (16)”, which is not in its text.)",
    "Gradients: the mean over a batch, as for all methods here, and its sum, as in Algorithm 1 of the long version.",
    "Algorithm 1 as it is printed has no smoothing; in the long version it sums over the batch and takes (19), in the "
    "NeurIPS version it takes (8). Both are run as printed, too.",
)
FASTER_NOTE = (
    "The sum over a batch of B examples is B times the learning rate, so baselines at B times theirs stand beside it; "
    "pFedMe is not among them, because λ = 15 times that rate overshoots."
)
COMPARED = ("fedavg", "selffl_control", "ditto", "pfedme", "perfedavg", "selffl")
VARIANTS = ("selffl_init", "selffl_steps", "selffl_agg", "selffl_exact")
RIVALS = ("fedavg", "ditto", "pfedme", "perfedavg")

ACCURACIES: Mapping[str, str] = {
    "Accuracy": "personal.accuracy",
    "Client mean": "personal.accuracy_mean",
    "Worst 10 %": "personal.worst10",
    "Largest 10 %": "personal.top10",
    "Global model": "server.accuracy",
}

_LETTERS = "16x8 lower-case letters (Taskar, Kassel) in place of FEMNIST."
LETTERS_STAND_INS: Mapping[Scale, str] = {
    "smoke": "digits with 40 clients in place of letters.",
    "small": _LETTERS,
    "paper": _LETTERS,
}


ROUGHNESS = "personal.second_difference"
TRAINING_ACCURACY = "train.accuracy"

# None of them was looked at while readings and defaults were chosen.
SEEDS = tuple(range(10, 20))


def roughness(run: Run) -> Measurements:
    """How much the accuracy of personal models bends: the mean absolute second difference |a_{t+1} − 2 a_t + a_{t−1}|
    of evaluations in the second half of the rounds. The paper sees "more stable convergence" in its curves and prints
    no number for it. Second differences, because a curve that still rises steadily is no rougher for that."""
    measured: Measurements = {}
    for trial in run.trials:
        curve = [
            (record.all_clients or record.metrics)["personal"]["accuracy"]
            for record in trial.rounds
            if "personal" in record.metrics
        ]
        late = curve[len(curve) // 2 :]
        moves = [after - before for before, after in pairwise(late)]
        bends = [abs(after - before) for before, after in pairwise(moves)]
        if bends:
            measured.setdefault(trial.algorithm, {}).setdefault(ROUGHNESS, {})[trial.seed] = fmean(bends)
    return measured


def training_accuracy(run: Run) -> Measurements:
    """Accuracy of the personal models on their clients' training examples, weighted by these; needs saved models."""
    config = read_config(run.path)
    inputs = RunInputs(config)
    measured: Measurements = {}
    for label in config.algorithms:
        for seed in config.seeds:
            models = RunFiles(run.path).models(label, seed).personal
            data, task = inputs.federation(seed), inputs.task()
            score = task_for(task, models).score(models, data.cohort(torch.arange(len(data)), seed, 0).train)
            accuracy = float(score.correct.sum() / score.count.sum())
            measured.setdefault(label, {}).setdefault(TRAINING_ACCURACY, {})[seed] = accuracy
    return measured


def stable_convergence(part: str, heading: str, place: str) -> Claim:
    return Claim.above(
        f"Self-FL converges more stably: its curve bends less than all baselines' (second half of the rounds), "
        f"{heading}",
        part,
        "selffl",
        RIVALS,
        ROUGHNESS,
        lower_is_better=True,
        place=place,
    )


def columns_with_stability(part: str) -> list[ResultColumn]:
    bend = ResultColumn("Bend of the curve", part, ROUGHNESS, digits=3, lower_is_better=True)
    return [*ResultColumn.by_metric(part, ACCURACIES), bend]


def named(*labels: str) -> dict[str, str]:
    """Rows of a table: these methods and their names."""
    return {label: NAMES[label] for label in labels}


def method_options(labels: Iterable[str]) -> dict[str, dict[str, object]]:
    """Self-FL takes at most 40 steps."""
    return {
        label: {
            "method": label,
            **({"l_max": 40} if label.startswith("selffl") else {}),
            **(READINGS | PRINTED).get(label, {}),
        }
        for label in labels
    }


def printed_part(part: str, settings: Mapping[str, Any]) -> RunPart:
    """PRINTED on the data of another part."""
    return RunPart(f"{part}-printed", {**settings, "algorithms": method_options(PRINTED)}, merge_into=part)


def printed_readings(part: str, heading: str) -> list[Question]:
    return [
        Question.above(f"{NAMES[label]} above all baselines, {heading}", part, label, RIVALS, main=True)
        for label in PRINTED
    ]


def other_readings(parts: Mapping[str, str]) -> list[Question]:
    """Each reading against the baselines of each part (by its heading), FedAvg as one model and fine-tuned."""
    questions = [
        Question.above(
            f"{NAMES[label]} above all baselines, {heading}", part, label, RIVALS, main=label == "selffl-rough"
        )
        for part, heading in parts.items()
        for label in READINGS
    ]
    return questions + [
        Question.above(f"{NAMES[label]} above FedAvg as one model, {heading}", part, label, [ONE_MODEL])
        for part, heading in parts.items()
        for label in ("selffl", *READINGS)
    ]


def faster_baselines(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """FASTER at the rate that the sum over a batch comes to, with a part's settings."""
    rate = settings["batch"] * settings["lr"]
    return {label: {"method": label.removesuffix("-fast"), "lr": rate} for label in FASTER}


def batch_sums(part: str, heading: str) -> list[Question]:
    """What sums over a batch, against baselines at the rate that this comes to."""
    return [
        Question.above(
            f"{NAMES[label]} above FedAvg, Ditto and Per-FedAvg at the rate of a batch sum, {heading}",
            part,
            label,
            FASTER,
            main=label in PRINTED,
        )
        for label in ("selffl-sum", "selffl-printed")
    ]


def mnist_settings(clients: int, rounds: int, participation: float = 0.1, seeds: int = 3) -> dict[str, Any]:
    """FedProx's split of MNIST, logistic regression, 20 local steps."""
    return {
        "dataset": {"name": "mnist", "standardize": "pixel"},
        "partition": "powerlaw",
        "model": "mlr",
        "lr": 0.03,
        "batch": 10,
        "steps": 20,
        "clients": clients,
        "rounds": rounds,
        "participation": participation,
        "seeds": list(SEEDS[:seeds]),
    }


def letters_settings(scale: Scale, seeds: int = 5) -> dict[str, Any]:
    """200 users, five of ten letters each, lognormal sizes, a tenth of the users active."""
    common: dict[str, Any] = {"model": "mlr", "lr": 0.01, "batch": 10, "steps": 20, "participation": 0.1}
    if scale == "smoke":
        split = {"name": "lognormal", "mean": 3.0}
        return {**common, "dataset": "digits", "partition": split, "clients": 40, "rounds": 20, "seeds": [0, 1]}
    letters = {
        "dataset": "letters",
        "partition": "lognormal",
        "clients": 200,
        "rounds": 200,
        "seeds": list(SEEDS[:seeds]),
    }
    return {**common, **letters}
