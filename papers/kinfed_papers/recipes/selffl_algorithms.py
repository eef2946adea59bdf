"""Self-FL's two algorithms side by side (Figure 6; Table 6 is in selffl-wakeword)."""

from __future__ import annotations

from collections.abc import Iterator

from kinfed_papers import Claim, Question, Recipe, ResultColumn, Results, ResultTable, RunPart, Untestable
from kinfed_papers.recipe import ACCURACY, SELF_FL, BySeed, Margins, Scale, difference, either_way
from kinfed_papers.recipes.common_selffl import (
    NAMES,
    TRAINING_ACCURACY,
    letters_settings,
    method_options,
    mnist_settings,
    training_accuracy,
)

METHODS = {"selffl": "Algorithm 1", "selffl_augmented": "Algorithm 2", "selffl_control": NAMES["selffl_control"]}
HEADINGS = {"mnist": "MNIST", "letters": "Letters"}


def parts(scale: Scale) -> list[RunPart]:
    common = {"algorithms": method_options(METHODS), "save_models": True}
    letters = RunPart("letters", {**letters_settings(scale), **common}, training_accuracy)
    if scale == "smoke":
        return [letters]
    mnist = mnist_settings(1000, 200) if scale == "paper" else mnist_settings(200, 100)
    return [RunPart("mnist", {**mnist, **common}, training_accuracy), letters]


def within_a_point(part: str, metric: str) -> Claim:
    """The paper says "smaller than 1 %" of training accuracy on FEMNIST alone."""

    def margins(results: Results) -> dict[str, BySeed]:
        one, two = (results.get(part, row, metric) for row in ("selffl", "selffl_augmented"))
        return either_way(difference(one, two), "Algorithm 1 ahead", "Algorithm 2 ahead")

    kind = "training" if metric == TRAINING_ACCURACY else "test"
    text = f"The two differ by less than a point of {kind} accuracy, {HEADINGS[part]}"
    if part == "letters" and metric == TRAINING_ACCURACY:
        return Claim(text, margins, place="Appendix E.2, Figure 6b", limit=0.01, at_most=True)
    return Question(text, margins, limit=0.01, at_most=True)


def traffic(row: str, results: Results, metric: str = "bytes") -> Iterator[tuple[str, BySeed]]:
    """(part, bytes of a round in units of FedAvg's, which are the control's: it sends what FedAvg sends)."""
    for part, heading in HEADINGS.items():
        own, fedavg = (results.get(part, label, metric) for label in (row, "selffl_control"))
        yield heading, {seed: own[seed] / fedavg[seed] for seed in own.keys() & fedavg.keys()}


def _distance_from_twice(metric: str) -> Margins:
    """How far Algorithm 2's traffic is from twice FedAvg's."""

    def margins(results: Results) -> dict[str, BySeed]:
        cases: dict[str, BySeed] = {}
        for heading, ratios in traffic("selffl_augmented", results, metric):
            beyond = {seed: ratio - 2 for seed, ratio in ratios.items()}
            cases |= either_way(beyond, f"{heading}, more than twice", f"{heading}, less than twice")
        return cases

    return margins


RECIPE = Recipe(
    name="selffl-algorithms",
    paper=SELF_FL,
    reproduces="Figure 6",
    title="Self-FL's Algorithm 1 and Algorithm 2",
    about="Algorithm 2 trains a second model to convergence at every client and sends both: cleaner uncertainties for "
    "twice the upload and many more steps. The paper finds hardly a difference.",
    parts=parts,
    tables=[
        ResultTable(
            "Personal training accuracy (%) (Figure 6)", METHODS, ResultColumn.by_part(HEADINGS, TRAINING_ACCURACY)
        ),
        ResultTable("Personal test accuracy (%)", METHODS, ResultColumn.by_part(HEADINGS)),
        ResultTable(
            "Megabytes a round",
            METHODS,
            ResultColumn.by_part(HEADINGS, "bytes", factor=1e-6, digits=2, lower_is_better=True),
        ),
    ],
    claims=[
        within_a_point("letters", TRAINING_ACCURACY),
        within_a_point("mnist", TRAINING_ACCURACY),
        within_a_point("letters", ACCURACY),
        within_a_point("mnist", ACCURACY),
        Claim(
            "Algorithm 1 sends as much as FedAvg (at most 1 % more, a limit of ours)",
            lambda results: dict(traffic("selffl", results)),
            "times FedAvg’s",
            1.0,
            "Section 1.1",
            limit=1.01,
            at_most=True,
        ),
        Claim(
            "With Algorithm 2 clients send twice what FedAvg’s send (within 0.1 times FedAvg’s, a limit of ours)",
            _distance_from_twice("bytes_up"),
            "times FedAvg’s",
            1.0,
            "Appendix D",
            limit=0.1,
            at_most=True,
        ),
        Question(
            "With Algorithm 2 twice as much travels, downloads included (within 0.1 times FedAvg’s)",
            _distance_from_twice("bytes"),
            "times FedAvg’s",
            1.0,
            limit=0.1,
            at_most=True,
        ),
        Untestable("The curves on MNIST", "the paper prints no numbers for them", "Appendix E.2, Figure 6a"),
    ],
    notes=[
        "The second model is trained until the training loss changes by less than 1e-4 in an epoch, ten at most.",
        "Appendix D says that two local models are sent and that this doubles the communication overhead. It doubles "
        "what clients send; what they receive stays as it is, so the sum is half as much again. Both are judged.",
    ],
    stand_ins={
        "smoke": "digits with 40 clients in place of letters; no MNIST.",
        "small": "16x8 letters in place of FEMNIST; MNIST with 200 clients and 100 rounds instead of 1,000 and 200.",
        "paper": "16x8 letters in place of FEMNIST.",
    },
    other_data=("letters",),
)
