"""FedFomo for targets that a client has no data of: validation and test sets change hands (Table 3, Figure 4)."""

from __future__ import annotations

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
    parse_published,
)
from kinfed_papers.recipe import FEDFOMO, BySeed, Margins, Scale
from kinfed_papers.recipes.common_fedfomo import (
    EMBEDDINGS,
    FEW_STEPS,
    METHODS,
    NETWORK,
    OURS,
    RIVALS,
    SCORED,
    SMOKE_STAND_IN,
    above_chance,
    latent_metrics,
    latent_settings,
    lead,
    method_options,
)

DATA = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
PLACE = "Section 4 (out-of-local-distribution personalization), Table 3"
BLIND = tuple(label for label in RIVALS if label != "fedavg_data")  # neither target data nor others' examples


def parts(scale: Scale) -> list[RunPart]:
    plan = []
    for data in DATA if scale != "smoke" else ("cifar10",):
        settings = latent_settings(scale, 5, data, steps=FEW_STEPS)
        settings |= {"foreign_targets": True, "algorithms": method_options(METHODS, scale)}
        if scale == "paper":
            settings["seeds"] = [0, 1, 2, 3, 4]  # each seed shuffles anew: five shuffles
        plan.append(RunPart(data, settings, latent_metrics))
    return plan


def _kin_above_chance(data: str) -> Margins:
    return lambda results: {METHODS[row]: above_chance(results, data, row) for row in OURS}


def _mixture_above_training(results: Results) -> dict[str, BySeed]:
    return {
        METHODS[row]: difference(*(results.get("cifar10", row, metric) for metric in (SCORED, "post_train.accuracy")))
        for row in OURS
    }


TABLE_3 = parse_published("""
    method      | CIFAR-10     | CIFAR-100
    local       | 20.39 ± 3.36 | 7.40 ± 1.31
    fedavg      | 23.11 ± 2.51 | 13.06 ± 1.48
    fedavg_data | 42.15 ± 2.16 | 24.98 ± 4.98
    fedprox     | 39.79 ± 8.57 | 14.39 ± 2.85
    lgfedavg    | 38.95 ± 1.85 | 18.50 ± 1.10
    mocha_deep  | 30.80 ± 2.60 | 13.73 ± 2.83
    cfl         | 29.73 ± 3.67 | 19.75 ± 1.58
    perfedavg   | 39.8 ± 5.38  | 21.30 ± 1.35
    pfedme      | 43.7 ± 7.27  | 25.41 ± 2.33
    fedfomo-5   | 64.06 ± 2.80 | 34.43 ± 1.48
    fedfomo-10  | 63.98 ± 1.81 | 40.94 ± 1.62
""")

RECIPE = Recipe(
    name="fedfomo-foreign",
    paper=FEDFOMO,
    reproduces="Table 3 and Figure 4",
    title="FedFomo for targets outside a client’s own data",
    about="15 clients in 5 latent distributions, all active, 20 rounds. The pairs of validation and test set are "
    "shuffled among the clients: each trains on its own data and is judged on what another client has. Only FedFomo "
    "looks at the validation examples.",
    parts=parts,
    tables=[
        ResultTable(
            "Accuracy on the target’s test set (%) (Table 3)",
            METHODS,
            ResultColumn.by_part(DATA, SCORED, digits=2),
            TABLE_3,
        ),
        ResultTable(
            "The same runs seen otherwise",
            METHODS,
            [
                ResultColumn(f"{name}, {text}", data, metric)
                for text, metric in (
                    ("after the last own training", "personal.accuracy"),
                    ("FedFomo before mixing", "post_train.accuracy"),
                    ("worst tenth of clients", "personal.worst10"),
                )
                for data, name in DATA.items()
            ],
        ),
        ResultTable(
            "Does FedFomo find the clients that train on its target? (%)",
            METHODS,
            [
                *(ResultColumn(f"{name}, top places", data, "kin.top") for data, name in DATA.items()),
                *(
                    ResultColumn(f"{name}, of what is mixed from others", data, "kin.mixed")
                    for data, name in DATA.items()
                ),
                ResultColumn("by chance", "cifar10", "kin.chance"),
            ],
            caption="The paper shows this for three clients (Figure 4) and for all as curves (Figure 6).",
        ),
    ],
    claims=[
        *(
            Claim.above(
                f"FedFomo ({number}) above all alternatives on foreign targets, {name}",
                data,
                row,
                RIVALS,
                SCORED,
                place=PLACE,
                main=True,
            )
            for data, name in DATA.items()
            for row, number in zip(OURS, ("n = 5", "n = 10"), strict=True)
        ),
        *(
            Claim.above(
                f"Sharing data stands out among the others on foreign targets, {name}",
                data,
                "fedavg_data",
                BLIND,
                SCORED,
                place=PLACE,
            )
            for data, name in DATA.items()
        ),
        Claim(
            "FedFomo gives top places to clients that train on the target, CIFAR-10",
            _kin_above_chance("cifar10"),
            place="Section 4 (out-of-local-distribution personalization), Figure 4",
        ),
        Question(
            "FedFomo gives top places to clients that train on the target, CIFAR-100", _kin_above_chance("cifar100")
        ),
        Question.above(
            "Ten models better than five, foreign targets, CIFAR-100 (Table 3: 40.94 and 34.43)",
            "cifar100",
            "fedfomo-10",
            ["fedfomo-5"],
            SCORED,
        ),
        Question(
            "FedFomo’s mixture above its model after training, foreign targets, CIFAR-10",
            _mixture_above_training,
            main=True,
        ),
        Question(
            "FedFomo above FedAvg’s one model, foreign targets, CIFAR-10",
            lambda results: {METHODS[row]: lead(results, "cifar10", row, "fedavg") for row in OURS},
        ),
        Untestable(
            "With two distributions the others do better, because targets coincide more often",
            "the paper gives no numbers for two distributions here",
            "Section 4 (out-of-local-distribution personalization)",
        ),
        Untestable("The curves", "the paper prints no numbers for them", "Figure 4"),
    ],
    notes=[
        "FedFomo alone uses the target’s validation examples here; the comparison is between having a hint of the "
        "target and having none. The paper’s rivals are given none either.",
        "FedFomo is scored after a mixture without further training: training pulls a client back to its own data. The "
        "model before mixing stands in the second table.",
        "A client whose candidates are all worse than where it began discards its last training. Out of distribution "
        "this happens in most rounds.",
        "The paper repeats the shuffle five times; here each seed splits the data and shuffles again. Five seeds at "
        "the scale paper, three at small.",
        "Table 3 has pFedMe (43.7 and 25.41) above FedAvg + data (42.15 and 24.98), against the text.",
        "FedAvg, FedAvg + data and FedProx count by the shared model. Rates and thresholds as in fedfomo-latent.",
    ],
    stand_ins={
        "smoke": SMOKE_STAND_IN,
        "small": "6,000 of CIFAR-10’s images, a subset of CIFAR-100 (2,400 images, 20 classes), "
        f"{EMBEDDINGS}, {NETWORK}, 10 steps of 20 examples instead of "
        "5 epochs, no augmentation. Compare rankings, not levels.",
    },
    method_figures=[("cifar10", "fedfomo-5")],
)
