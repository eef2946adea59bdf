"""FedFomo where every client holds two classes (Table 1): MNIST and CIFAR-10, 15 and 100 clients."""

from __future__ import annotations

from typing import Any

from kinfed_papers import (
    Claim,
    Question,
    Recipe,
    ResultColumn,
    ResultTable,
    RunPart,
    Untestable,
    difference,
    parse_published,
)
from kinfed_papers.recipe import FEDFOMO, Margins, Scale
from kinfed_papers.recipes.common_fedfomo import (
    COLOUR,
    FIXED_CLIENTS_NOTE,
    LAST_TRAINED,
    LOCAL_TRAINING,
    METHODS,
    ONE_MODEL,
    OURS,
    PAPER_BATCHES,
    RIVALS,
    SCORED,
    SEEDS,
    lead,
    method_options,
    scored_accuracy,
)

HEADINGS = {
    "mnist-15": "MNIST, 15 clients",
    "mnist-100": "MNIST, 100 clients",
    "cifar10-15": "CIFAR-10, 15 clients",
    "cifar10-100": "CIFAR-10, 100 clients",
}
FEW_CLIENTS, MANY_CLIENTS = ("mnist-15", "cifar10-15"), ("mnist-100", "cifar10-100")


def parts(scale: Scale) -> list[RunPart]:
    names = ("mnist-15",) if scale == "smoke" else HEADINGS
    return [RunPart(name, column_settings(name, scale), scored_accuracy) for name in names]


def column_settings(name: str, scale: Scale) -> dict[str, Any]:
    """Of a column of Table 1."""
    data, _, clients = name.partition("-")
    gray = data == "mnist"
    common = {
        **LOCAL_TRAINING,
        "partition": "pathological",
        "clients": int(clients),
        "validation": 0.2,
        "seeds": list(SEEDS[:3]),
        "participation": 1.0 if clients == "15" else 0.1,
        "rounds": 20 if clients == "15" else 100,
    }
    if scale == "paper":
        lr = 0.01 if gray else 0.1
        images: dict[str, Any] = {"name": data} if gray else {"name": data, **COLOUR}
        common |= PAPER_BATCHES | {"lr": lr, "dataset": images, "model": "cnn_fomo"}
        common |= {"algorithms": method_options(METHODS, scale, lr)} | ({} if gray else {"augment": "crop_flip"})
        return common
    common |= {"algorithms": method_options(METHODS, scale), "batch": 20, "steps": 20 if clients == "15" else 10}
    if scale == "smoke":
        return common | {"dataset": "digits", "model": "mlp", "steps": 5, "rounds": 6, "seeds": [0, 1]}
    if gray:
        return common | {"dataset": {"name": "mnist", "examples": 14000}, "model": "mlp"}
    examples, steps = (6000, 15) if clients == "15" else (20000, 10)
    images = {"name": "cifar10", "examples": examples, **COLOUR}
    return common | {"dataset": images, "model": "cnn_tutorial", "steps": steps}


def _growing_lead(data: str, rival: str) -> Margins:
    """By how much FedFomo's lead over a rival is larger with 100 clients than with 15."""
    return lambda results: {
        "": difference(*(lead(results, f"{data}-{clients}", "fedfomo-5", rival) for clients in (100, 15)))
    }


def _above_local(part: str) -> Margins:
    return lambda results: {METHODS[row]: lead(results, part, row, "local") for row in OURS}


PLACE = "Section 4 (pathological non-IID), Table 1"
TABLE_1 = parse_published("""
    method      | MNIST, 15 clients | MNIST, 100 clients | CIFAR-10, 15 clients | CIFAR-10, 100 clients
    local       | 99.62 ± 0.21      | 94.25 ± 4.28       | 92.73 ± 0.87         | 85.42 ± 4.06
    fedavg      | 91.97 ± 2.17      | 78.83 ± 9.68       | 57.12 ± 1.14         | 53.08 ± 7.40
    fedavg_data | 91.99 ± 2.14      | 78.85 ± 9.66       | 58.5 ± 1.67          | 56.62 ± 8.92
    fedprox     | 90.94 ± 1.85      | 79.06 ± 10.88      | 54.60 ± 3.26         | 52.92 ± 5.56
    lgfedavg    | 99.79 ± 0.07      | 84.17 ± 1.92       | 92.36 ± 1.00         | 84.17 ± 4.45
    mocha_deep  | 94.74 ± 2.27      | 84.58 ± 5.80       | 93.85 ± 2.04         | 76.09 ± 8.49
    cfl         | 95.00 ± 3.61      | 92.26 ± 3.91       | 85.07 ± 8.16         | 77.75 ± 1.78
    perfedavg   | 92.39 ± 4.72      | 85.32 ± 12.93      | 81.96 ± 8.12         | 72.40 ± 4.06
    pfedme      | 97.70 ± 1.26      | 88.40 ± 10.86      | 83.85 ± 5.11         | 71.75 ± 6.78
    fedfomo-5   | 99.62 ± 2.91      | 98.81 ± 1.26       | 93.01 ± 0.96         | 92.10 ± 5.20
    fedfomo-10  | 99.63 ± 0.07      | 98.71 ± 2.86       | 92.73 ± 0.96         | 92.67 ± 4.21
""")

RECIPE = Recipe(
    name="fedfomo-pathological",
    paper=FEDFOMO,
    reproduces="Table 1",
    title="FedFomo with two classes per client",
    about="Every client gets two shards of one class each. Either 15 clients, all active, for 20 rounds, or 100 "
    "clients, a tenth of them active per round, for 100 rounds. FedAvg, FedAvg + data and FedProx are scored by the "
    "model that all clients share, as in the paper.",
    parts=parts,
    tables=[
        ResultTable("Test accuracy (%) (Table 1)", METHODS, ResultColumn.by_part(HEADINGS, SCORED, digits=2), TABLE_1),
        ResultTable(
            "After the last own training, and the worst tenth of clients (%)",
            METHODS,
            [
                *ResultColumn.by_part(HEADINGS, LAST_TRAINED),
                *(
                    ResultColumn(f"{heading}, worst tenth", part, "personal.worst10")
                    for part, heading in HEADINGS.items()
                ),
            ],
        ),
    ],
    claims=[
        *(
            Claim.above(
                f"FedFomo (n = 10) above every other method, {HEADINGS[part]}",
                part,
                "fedfomo-10",
                RIVALS,
                SCORED,
                place=PLACE,
                main=True,
            )
            for part in MANY_CLIENTS
        ),
        *(
            Claim.above(
                f"FedFomo (n = 10) competitive (at most 2 points below any other, a limit of ours), {HEADINGS[part]}",
                part,
                "fedfomo-10",
                RIVALS,
                SCORED,
                limit=-0.02,
                place=PLACE,
                main=True,
            )
            for part in FEW_CLIENTS
        ),
        *(
            Claim.above(
                f"Training alone above methods with a single model, {heading}",
                part,
                "local",
                ONE_MODEL,
                SCORED,
                place=PLACE,
            )
            for part, heading in HEADINGS.items()
        ),
        *(
            Claim(
                f"FedFomo’s lead (n = 5) over {METHODS[rival]} is larger with 100 clients than with 15, {name}",
                _growing_lead(data, rival),
                place="Section 1; Table 1, caption",
            )
            for data, name in (("mnist", "MNIST"), ("cifar10", "CIFAR-10"))
            for rival in ("local", "fedavg")
        ),
        *(
            Question(f"FedFomo above every client alone, {heading}", _above_local(part))
            for part, heading in HEADINGS.items()
        ),
        *(
            Question.above(
                f"FedFomo (n = 5) above fine-tuned FedAvg, {heading}",
                part,
                "fedfomo-5",
                ["fedavg"],
                LAST_TRAINED,
                main=True,
            )
            for part, heading in HEADINGS.items()
        ),
        Untestable(
            "Methods with a single robust model have mixed success over FedAvg", "mixed success is no order", PLACE
        ),
    ],
    notes=[
        "A client can get two shards of the same class, in the paper’s split too; its task is then trivial.",
        "The released network does not fit MNIST’s 28x28 pixels, and no MNIST data module was released; ours fits its "
        "first dense layer to the image.",
        "In the published numbers FedAvg counts by its shared model. Clients of FedAvg that keep the model of their "
        "last own training are a rival of ours.",
        FIXED_CLIENTS_NOTE,
        "Clients that are never drawn are judged too: FedFomo’s by a mixture of others, Local’s by the starting model.",
        "LG-FedAvg begins at a FedAvg model in its authors’ code and reports each client’s best round on test data; "
        "here it begins with the others and counts by the last round.",
        "Rates and thresholds as in fedfomo-latent; for MNIST the scale paper has the paper’s 0.01, the scale small, "
        "which takes far fewer steps, the common 0.1.",
    ],
    stand_ins={
        "smoke": "digits with 15 clients in place of MNIST and CIFAR-10, 6 rounds.",
        "small": "14,000 images of MNIST with one hidden layer of 128, 6,000 of CIFAR-10 (20,000 with 100 clients) "
        "with conv 6/16, 10 to 20 steps of 20 examples instead of 5 epochs (pFedMe: 8), no augmentation. Compare "
        "orders, not levels.",
    },
    method_figures=[("mnist-15", "fedfomo-5")],
)
