"""FedFomo where clients share latent distributions of similar images (Tables 2 and 5, Figure 1).

What the other FedFomo recipes have in common with these experiments is here: methods, data, split, local work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kinfed.core import storage
from kinfed.reproduce import Claim, Column, Found, Part, Recipe, Table, Untestable, published
from kinfed.reproduce.recipe import FEDFOMO, BySeed, Measured, Scale
from kinfed.reproduce.studies.kinship import differences_of_classes, kinship, minus

METHODS = {
    "local": "Local training",
    "fedavg": "FedAvg",
    "fedavg_data": "FedAvg + data",
    "fedprox": "FedProx",
    "lgfedavg": "LG-FedAvg",
    "mocha_deep": "MOCHA (deep variant)",
    "cfl": "CFL",
    "perfedavg": "Per-FedAvg",
    "pfedme": "pFedMe",
    "fedfomo-5": "FedFomo, n = 5",
    "fedfomo-10": "FedFomo, n = 10",
}
OURS = ("fedfomo-5", "fedfomo-10")
RIVALS = tuple(label for label in METHODS if label not in OURS)
ONE_MODEL = ("fedavg", "fedavg_data", "fedprox")  # whose published accuracy is that of the model all clients share
SEVERAL_MODELS = ("lgfedavg", "mocha_deep", "cfl", "perfedavg", "pfedme")

SCORED = "scored.accuracy"  # what the paper's tables compare: ONE_MODEL by the shared model, others by personal ones
LAST_TRAINED = "personal.accuracy"  # of ONE_MODEL: each client's model after its own last training

# Appendix A.6; the batch and the floor are the released code's.
WORK: dict[str, Any] = {"lr": 0.1, "weight_decay": 1e-4, "lr_decay": 0.99, "lr_floor": 1e-4}
PAPER_BATCHES = {"batch": 50, "epochs": 5}
COLOUR = {"standardize": "imagenet"}
FEW_STEPS = 10  # not quite an epoch: eleven methods in several parts within minutes


def methods(labels: Iterable[str], scale: Scale, lr: float = 0.1) -> dict[str, dict[str, Any]]:
    """Options where a method's defaults and the common rate do not fit; everything else is common to all."""
    options: dict[str, dict[str, Any]] = {
        "fedfomo-5": {"method": "fedfomo", "models": 5},
        "fedfomo-10": {"method": "fedfomo", "models": 10},
        # Its own thresholds fit another network, and wait for 20 rounds, which is when these runs end.
        "cfl": {"t_min": 5, "eps1_rel": 0.6, "eps2_rel": 0.5},
        # λ lr must stay below 1; and it takes five gradients on each batch, so that few batches are much work.
        "pfedme": {"lr": min(lr, 0.05), **({} if scale == "paper" else {"steps": 8})},
    }
    if scale == "smoke":
        options["lgfedavg"] = {"shared_layers": 1}  # of two layers
    return {label: {"method": label, **options.get(label, {})} for label in labels}


def setting(scale: Scale, groups: int = 5, data: str = "cifar10", clients: int = 15, steps: int = 20) -> dict[str, Any]:
    """Data, split, model, local work and budget: 15 clients that all take part, or 100 of which a tenth does. `steps`
    are those of 15 clients on CIFAR-10 at the scale small."""
    partition: dict[str, Any] = {"name": "latent", "groups": groups}
    if groups == 10 and data == "cifar10":
        partition["by_label"] = True  # as the released code does
    elif scale == "small":
        partition["embedder"] = "cnn"
    elif scale == "paper":
        partition |= {"embedder": "vgg11", "image_size": 224, "epochs": 5 if data == "cifar10" else 100}
    common = {
        **WORK,
        "partition": partition,
        "clients": clients,
        "participation": 1.0 if clients == 15 else 0.1,
        "validation": 0.2,
        "rounds": 20 if clients == 15 else 60 if scale == "small" else 100,
        "seeds": [0, 1, 2],
    }
    if scale == "paper":
        images = {"name": data, **COLOUR}
        return common | PAPER_BATCHES | {"dataset": images, "model": "cnn_fomo", "augment": "crop_flip"}
    common |= {"batch": 20, "steps": 5 if clients == 100 else 10 if data == "cifar100" else steps}
    if scale == "smoke":
        return common | {"dataset": "digits", "model": "mlp", "steps": 5, "rounds": 6, "seeds": [0, 1]}
    some = {"name": "cifar100_subset"} if data == "cifar100" else {"name": data, "examples": 6000}
    return common | {"dataset": {**some, **COLOUR}, "model": "cnn_tutorial"}


def measured(folder: Path) -> Measured:
    """SCORED of every method, kin of FedFomo, and how different the clients are."""
    found = scored(folder) | differences_of_classes(folder)
    for label, metrics in kinship(folder).items():
        found[label] |= metrics
    return found


def scored(folder: Path) -> Measured:
    found: Measured = {}
    for result in storage.read_json(folder / "summary.json")["results"]:
        kind = "server" if result["algorithm"] in ONE_MODEL else "personal"
        by_seed = found.setdefault(result["algorithm"], {}).setdefault(SCORED, {})
        by_seed[int(result["seed"])] = float(result[kind]["accuracy"])
    return found


def parts(scale: Scale) -> list[Part]:
    few = ("local", "fedavg", "fedavg_data", "fedprox", "fedfomo-5") if scale == "smoke" else METHODS
    plan: list[tuple[str, int, int, Iterable[str]]] = [("cifar10", 5, 15, METHODS)]
    if scale == "paper":
        plan += [("cifar10", groups, 15, METHODS) for groups in (2, 3, 4, 10)]
        plan += [("cifar100", groups, 15, METHODS) for groups in (2, 3, 4, 5, 10)]
        plan += [("cifar10", groups, 100, METHODS) for groups in (2, 3, 4, 5, 10)]
    elif scale == "small":
        trend = ("local", "fedavg", "fedfomo-5")
        plan += [("cifar10", 2, 15, trend), ("cifar10", 10, 15, trend), ("cifar10", 5, 100, trend)]
        plan += [("cifar100", 5, 15, (*trend, "cfl", "fedfomo-10"))]
    else:
        plan += [("cifar10", 2, 15, few), ("cifar10", 10, 15, few)]
    return [
        Part(
            f"{data}-{groups}" + ("-many" if clients == 100 else ""),
            setting(scale, groups, data, clients, FEW_STEPS) | {"algorithms": methods(labels, scale)},
            measured,
        )
        for data, groups, clients, labels in plan
    ]


TABLE_2 = published("""
    method      | D = 2         | D = 3        | D = 4         | D = 5         | D = 10
    local       | 60.03 ± 9.22  | 66.61 ± 9.90 | 69.12 ± 12.07 | 76.52 ± 11.46 | 92.64 ± 7.32
    fedavg      | 38.92 ± 11.88 | 21.56 ± 9.14 | 22.34 ± 12.36 | 32.13 ± 1.95  | 10.10 ± 3.65
    fedavg_data | 53.43 ± 2.89  | 33.87 ± 2.53 | 65.73 ± 1.07  | 63.32 ± 0.49  | 41.61 ± 0.92
    fedprox     | 66.42 ± 1.79  | 31.38 ± 2.54 | 50.61 ± 1.53  | 48.20 ± 0.14  | 13.41 ± 3.39
    lgfedavg    | 70.87 ± 1.12  | 74.16 ± 2.37 | 67.25 ± 1.97  | 63.64 ± 2.52  | 94.42 ± 1.25
    mocha_deep  | 83.79 ± 1.54  | 73.68 ± 2.80 | 71.23 ± 4.08  | 69.02 ± 2.93  | 94.28 ± 0.81
    cfl         | 72.58 ± 10.30 | 75.69 ± 1.11 | 78.31 ± 12.90 | 70.04 ± 13.56 | 85.22 ± 6.70
    perfedavg   | 63.85 ± 5.11  | 69.70 ± 7.27 | 72.60 ± 9.28  | 76.61 ± 6.65  | 93.97 ± 2.34
    pfedme      | 49.87 ± 3.16  | 66.95 ± 10.65 | 69.00 ± 4.97 | 78.66 ± 3.72  | 94.57 ± 1.95
    fedfomo-5   | 77.823 ± 2.24 | 82.38 ± 0.66 | 84.45 ± 0.21  | 85.050 ± 0.13 | 95.55 ± 0.26
    fedfomo-10  | 79.59 ± 0.34  | 83.66 ± 0.72 | 84.35 ± 0.38  | 85.534 ± 0.53 | 95.55 ± 0.06
""")

TABLE_5 = published("""
    method      | D = 2        | D = 3         | D = 4        | D = 5         | D = 10
    local       | 23.36 ± 0.33 | 23.89 ± 2.03  | 28.44 ± 1.97 | 23.11 ± 9.44  | 41.26 ± 1.31
    fedavg      | 28.01 ± 0.74 | 18.95 ± 0.22  | 25.69 ± 0.41 | 21.26 ± 0.89  | 18.19 ± 0.987
    fedavg_data | 28.12 ± 0.63 | 19.01 ± 0.27  | 25.85 ± 0.27 | 25.18 ± 0.39  | 18.23 ± 0.835
    fedprox     | 28.21 ± 0.79 | 27.78 ± 0.000 | 25.79 ± 0.05 | 24.93 ± 0.38  | 18.18 ± 0.82
    lgfedavg    | 26.97 ± 7.52 | 24.69 ± 4.29  | 24.79 ± 4.50 | 25.62 ± 5.70  | 27.53 ± 9.12
    mocha_deep  | 33.66 ± 4.14 | 33.61 ± 7.88  | 29.44 ± 8.30 | 32.34 ± 7.09  | 34.72 ± 7.80
    cfl         | 41.50 ± 6.66 | 36.36 ± 10.72 | 37.41 ± 8.30 | 36.78 ± 12.05 | 34.43 ± 10.14
    perfedavg   | 32.14 ± 6.90 | 32.22 ± 7.37  | 34.50 ± 5.81 | 36.58 ± 6.72  | 38.41 ± 7.41
    pfedme      | 31.53 ± 3.83 | 32.39 ± 5.36  | 30.86 ± 3.75 | 30.86 ± 3.80  | 37.70 ± 2.13
    fedfomo-5   | 35.44 ± 1.91 | 36.21 ± 4.92  | 38.41 ± 2.58 | 42.96 ± 1.24  | 44.29 ± 1.22
    fedfomo-10  | 37.09 ± 1.95 | 37.09 ± 3.84  | 39.94 ± 0.74 | 43.06 ± 0.42  | 43.75 ± 1.74
""")

EMD = published("""
    rows       | CIFAR-10, D = 2 | D = 3 | D = 4 | D = 5 | D = 10 | CIFAR-100, D = 5
    federation | 1.05            | 1.41  | 1.28  | 2.80  | 2.70   | 2.41
""")

NUMBERS = (2, 3, 4, 5, 10)


def columns(data: str, metric: str = SCORED, ending: str = "") -> list[Column]:
    return [Column(f"D = {groups}", f"{data}-{groups}{ending}", metric, digits=2) for groups in NUMBERS]


def lead(found: Found, part: str, row: str, rival: str, metric: str = SCORED) -> BySeed:
    return minus(found.of(part, row, metric), found.of(part, rival, metric))


def _moderate(found: Found) -> Mapping[str, BySeed]:
    """Against Local and FedAvg, wherever the clients' EMD lies in [1, 2] by the released formula."""
    margins: dict[str, BySeed] = {}
    for groups in NUMBERS:
        part = f"cifar10-{groups}"
        emd = found.of(part, "federation", "emd_code")
        if emd and 1 <= sum(emd.values()) / len(emd) <= 2:
            margins |= {f"{METHODS[r]}, D = {groups}": lead(found, part, "fedfomo-5", r) for r in ("local", "fedavg")}
    return margins


def _for_every_number(row: str, rivals: Iterable[str], data: str = "cifar10") -> Any:
    """Margins of `row` over each rival at every D that was run."""
    return lambda found: {
        f"{METHODS[rival]}, D = {groups}": lead(found, f"{data}-{groups}", row, rival)
        for rival in rivals
        for groups in NUMBERS
    }


RECIPE = Recipe(
    name="fedfomo-latent",
    paper=FEDFOMO,
    shows="Tables 2 and 5, Figure 1",
    title="FedFomo on latent distributions",
    about="Images are embedded by a network and clustered into D distributions; clients are spread evenly over them. "
    "15 clients that all take part in 20 rounds, or 100 of which a tenth does in 100. FedAvg, FedAvg + data and "
    "FedProx count by the model that all clients share, as in the paper; what the clients' own models after their "
    "last training reach stands in a table of its own.",
    parts=parts,
    tables=[
        Table("CIFAR-10, 15 clients, test accuracy (%) (Table 2)", METHODS, columns("cifar10"), TABLE_2),
        Table("CIFAR-100, 15 clients, test accuracy (%) (Table 5)", METHODS, columns("cifar100"), TABLE_5),
        Table("CIFAR-10, 100 clients, a tenth active (Figure 1, which has no numbers)", METHODS,
              columns("cifar10", ending="-many")),
        Table("The same models seen otherwise, CIFAR-10, D = 5", METHODS, [
            Column("After the last own training", "cifar10-5", LAST_TRAINED),
            Column("FedFomo before mixing", "cifar10-5", "post_train.accuracy"),
            Column("Worst tenth of clients", "cifar10-5", "personal.worst10"),
            Column("MB per round", "cifar10-5", "bytes", 1e-6, lower_is_better=True),
        ]),
        Table("Does FedFomo find its own? Top places held by clients of one's distribution (%)", METHODS, [
            *(Column(f"CIFAR-10, D = {groups}", f"cifar10-{groups}", "kin.top") for groups in NUMBERS),
            Column("by chance, D = 5", "cifar10-5", "kin.chance"),
            Column("100 clients, D = 5", "cifar10-5-many", "kin.top"),
            Column("CIFAR-100, D = 5", "cifar100-5", "kin.top"),
        ]),
        Table("How different the clients are", {"federation": "EMD, by the released formula"}, [
            Column("CIFAR-10, D = 2", "cifar10-2", "emd_code", 1, 2),
            *(Column(f"D = {groups}", f"cifar10-{groups}", "emd_code", 1, 2) for groups in NUMBERS[1:]),
            Column("CIFAR-100, D = 5", "cifar100-5", "emd_code", 1, 2),
        ], EMD, "That formula counts classes which two distributions share twice: one class of ten is 2.70, not 1.80."),
    ],
    claims=[
        *(Claim.above(f"FedFomo above every other method where data are highly non-IID, {name}", part, "fedfomo-10",
                      RIVALS, SCORED)
          for part, name in (("cifar10-5", "CIFAR-10, D = 5"), ("cifar100-5", "CIFAR-100, D = 5"))),
        Claim("FedFomo above every other method where data are highly non-IID, CIFAR-10, D = 10",
              lambda found: {METHODS[r]: lead(found, "cifar10-10", "fedfomo-5", r) for r in RIVALS}),
        Claim("The lead over FedAvg grows as clients differ more (D = 10 against D = 2)",
              lambda found: {"": minus(lead(found, "cifar10-10", "fedfomo-5", "fedavg"),
                                       lead(found, "cifar10-2", "fedfomo-5", "fedavg"))}),
        Claim("The lead over FedAvg grows with the number of clients (100 against 15, D = 5)",
              lambda found: {"": minus(lead(found, "cifar10-5-many", "fedfomo-5", "fedavg"),
                                       lead(found, "cifar10-5", "fedfomo-5", "fedavg"))}),
        Claim("FedFomo above Local and FedAvg in moderately non-IID settings (EMD from 1 to 2)", _moderate),
        Claim.above("FedFomo competitive with Local in the most extreme case (at most 2 points below), D = 10",
                    "cifar10-10", "fedfomo-5", ["local"], SCORED, by=-0.02),
        Claim("FedFomo above MOCHA and LG-FedAvg", _for_every_number("fedfomo-5", ["mocha_deep", "lgfedavg"])),
        Claim("Sharing a little data helps FedAvg at every D", _for_every_number("fedavg_data", ["fedavg"])),
        Claim("FedProx above FedAvg at every D", _for_every_number("fedprox", ["fedavg"])),
        Claim("Methods with several models above FedAvg, D = 5",
              lambda found: {f"FedAvg, by {METHODS[m]}": lead(found, "cifar10-5", m, "fedavg")
                             for m in SEVERAL_MODELS}),
        Claim("Local training gets better with more distributions (D = 10 against D = 2)",
              lambda found: {"": minus(found.of("cifar10-10", "local", SCORED),
                                       found.of("cifar10-2", "local", SCORED))}),
        Claim.above("FedFomo above every client alone, CIFAR-10, D = 5", "cifar10-5", "fedfomo-5", ["local"], SCORED,
                    asked_by="kinfed"),
        Claim.above("FedFomo above FedAvg whose clients keep their last trained model, D = 5", "cifar10-5", "fedfomo-5",
                    ["fedavg"], LAST_TRAINED, asked_by="kinfed"),
        Claim.above("Ten models better than five, D = 5", "cifar10-5", "fedfomo-10", ["fedfomo-5"], SCORED,
                    asked_by="kinfed"),
        Claim("Top places go to clients of one's own distribution more often than by chance, D = 5",
              lambda found: {METHODS[m]: minus(found.of("cifar10-5", m, "kin.top"),
                                               found.of("cifar10-5", m, "kin.chance")) for m in OURS},
              asked_by="kinfed"),
        Untestable("Up to 70 % improvement in some settings (abstract)", "it says neither where nor over what"),
        Untestable("The curves of Figure 1", "the paper prints no numbers for them"),
    ],
    notes=[
        "FedAvg’s numbers in the paper can only be those of the shared model (10.10 at D = 10). A client that simply "
        "keeps the model of its last own training is a rival that the paper does not have; ours does.",
        "The published D = 5 (EMD 2.80) cannot be more different than one class per client (2.70 by the same formula); "
        "CIFAR-100’s value for D = 5 is 2.41.",
        "Where D = 10 on CIFAR-10, the released code takes the classes themselves for distributions; so do we.",
        "The published commands also offer every client six averages of groups found by the server. The text does not "
        "know them; they are off here (subglobal = 0).",
        "n models means n candidates with the client’s own among them, as in the released code.",
        "With 100 clients the released code seeds the sampling anew in every round, so that the same ten clients are "
        "active throughout; here every round draws ten others.",
        "MOCHA on a network is its deep variant; the rows of MOCHA, LG-FedAvg and CFL come from repositories with "
        "known errors (a relation matrix of ones, convolutions shared instead of kept, clients in the wrong clusters).",
        "Rates: the common one for all but pFedMe, for which λ lr must stay below 1 (λ = 15, lr 0.05; 0.1 for its "
        "inner steps was worse). CFL may split from round 5 on, by thresholds relative to the first updates; its own "
        "would never split within 20 rounds. These thresholds are the first that were tried. pFedMe’s rate is one of "
        "five tried on another seed by validation accuracy, none of which reached Local; nothing else was tuned.",
    ],
    stand_ins={
        "smoke": "digits in place of CIFAR-10, pixels’ principal components in place of VGG-11, 6 rounds.",
        "small": "6,000 of CIFAR-10’s images, a subset of CIFAR-100 (2,400 images, 20 classes), embeddings of a small "
        "network trained on them, conv 6/16 instead of 32/64/64, 10 (100 clients: 5, in 60 rounds) steps of 20 "
        "examples instead of 5 epochs, no augmentation; all methods at D = 5 only. Compare orders, not levels.",
    },
    inside=[("cifar10-5", "fedfomo-5")],
)  # fmt: skip
