"""All methods that have a tuned setting for networks with convolutions, on CIFAR-10: a table to look a method up in."""

from __future__ import annotations

from typing import Any

from kinfed.algorithms import ALGORITHMS
from kinfed.config import preset_methods
from kinfed_papers import Question, Recipe, ResultColumn, ResultTable, RunPart
from kinfed_papers.recipe import PAPERS, Scale
from kinfed_papers.recipes.common_presets import PRESET, preset_notes

TUNED = preset_methods(PRESET, "cnn")
METHODS = {name: entry.title for name, entry in ALGORITHMS.items() if name in TUNED} | {"fedavg": "FedAvg, fine-tuned"}
PARTITIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "dirichlet": ("Dirichlet(0.1)", {"name": "dirichlet", "alpha": 0.1}),
    "two-classes": ("two classes per client", {"name": "pathological", "shards": 2}),
}


def parts(scale: Scale) -> list[RunPart]:
    """The same settings on both partitions."""
    common: dict[str, Any] = {
        "dataset": "cifar10", "model": "cnn_tutorial", "clients": 20, "participation": 0.5, "validation": 0.2,
        "algorithms": list(METHODS), "preset": PRESET, "rounds": 200, "steps": 20, "batch": 20, "seeds": [0, 1, 2],
        "eval_every": 0,
    }  # fmt: skip
    if scale == "smoke":
        common |= {"dataset": "digits", "model": "cnn_small", "clients": 10, "rounds": 1, "steps": 1, "seeds": [0, 1]}
    if scale == "small":
        # As many rounds as let a part end within half an hour of one core. Each client trains in seven or eight of
        # them: more than three passes over its rows.
        common |= {"dataset": {"name": "cifar10", "examples": 6000}, "rounds": 15, "steps": 10, "batch": 10}
    return [RunPart(name, {**common, "partition": partition}) for name, (_, partition) in PARTITIONS.items()]


def _table(part: str) -> ResultTable:
    return ResultTable(
        f"CIFAR-10, {PARTITIONS[part][0]}",
        METHODS,
        [
            *ResultColumn.by_metric(part, {"Personal %": "personal.accuracy", "Worst tenth %": "personal.worst10"}),
            ResultColumn("against Local", part, against="local"),
            ResultColumn("against FedAvg, fine-tuned", part, against="fedavg"),
            ResultColumn("Server model %", part, "server.accuracy"),
            ResultColumn("MB per round", part, "bytes", factor=1e-6, digits=2, lower_is_better=True),
        ],
        caption="Differences in personal accuracy, in points, paired by seed, ± half of Student's 95 % interval: a "
        "difference smaller than its ± may be chance. Elsewhere ± is the standard deviation over seeds.",
    )


RECIPE = Recipe(
    name="methods-cifar10",
    paper=PAPERS["kinfed"],
    reproduces="which method when labels are skewed",
    title="All methods on CIFAR-10, with tuned settings",
    about="Twenty clients, half of them active in a round, a small convolutional network; classes are shared out by "
    f"Dirichlet(0.1), or every client has two. Methods have their settings of the preset {PRESET}, found with equal "
    "budgets on other seeds and without the test images; those for which none was found are left out. A fifth of the "
    "training rows is set aside for validation in all methods alike.",
    parts=parts,
    tables=[_table(part) for part in PARTITIONS],
    claims=[
        Question.above(f"{METHODS[row]} above {METHODS[rival]}, {heading}", part, row, [rival])
        for part, (heading, _) in PARTITIONS.items()
        for row, rival in (("fedavg", "local"), ("kin", "local"), ("kin", "fedavg"))
    ],
    notes=[
        "Rounds are few at the scale small, and the order of methods may be another after more of them.",
        "Tuned settings were found by a few trials in shorter runs with ten clients (benchmarks/presets.py): better "
        "ones may exist for every method.",
        *preset_notes(parts("small")),
    ],
    stand_ins={
        "smoke": "digits in place of CIFAR-10, one round of one step.",
        "small": "6,000 of 60,000 images; 15 rounds of 10 steps on 10 images.",
    },
)
