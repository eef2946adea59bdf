"""What recipes of FedFomo share: methods and options, clients in latent distributions, how they are scored, and margins
of claims."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kinfed.records import RunRecord
from kinfed_papers.recipe import BySeed, Measurements, Results, Scale, difference
from kinfed_papers.studies.kinship import differences_of_classes, kinship

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

# Appendix A.6; the batch and the floor are the released code's.
LOCAL_TRAINING: dict[str, Any] = {"lr": 0.1, "weight_decay": 1e-4, "lr_decay": 0.99, "lr_floor": 1e-4}
PAPER_BATCHES = {"batch": 50, "epochs": 5}
COLOUR = {"standardize": "imagenet"}
SEEDS = tuple(range(10, 20))  # none was looked at while rates and thresholds were chosen
FEW_STEPS = 10  # not quite an epoch: eleven methods in several parts within minutes


def method_options(labels: Iterable[str], scale: Scale) -> dict[str, dict[str, Any]]:
    """Options where a method's defaults and the common rate do not fit; everything else is common to all."""
    options: dict[str, dict[str, Any]] = {
        "fedfomo-5": {"method": "fedfomo", "models": 5},
        "fedfomo-10": {"method": "fedfomo", "models": 10},
        # Its own thresholds fit another network, and wait for 20 rounds, which is when these runs end.
        "cfl": {"t_min": 5, "eps1_rel": 0.6, "eps2_rel": 0.5},
        # λ lr must stay below 1; and it takes five gradients on each batch, so that few batches are much work.
        "pfedme": {"lr": 0.05, **({} if scale == "paper" else {"steps": 8})},
    }
    if scale == "smoke":
        options["lgfedavg"] = {"shared_layers": 1}  # of two layers
    return {label: {"method": label, **options.get(label, {})} for label in labels}


def latent_settings(
    scale: Scale,
    groups: int = 5,
    data: str = "cifar10",
    clients: int = 15,
    steps: int = 20,
    by_label: bool | None = None,
) -> dict[str, Any]:
    """Data, split, model, local work and budget: 15 clients that all take part, or 100 of which a tenth does. `steps`
    are those of 15 clients on CIFAR-10 at the scale small. `by_label` takes classes for distributions, as the released
    code does with ten of CIFAR-10 (and so does None); otherwise they are clusters, as the text says."""
    partition: dict[str, Any] = {"name": "latent", "groups": groups}
    if (groups == 10 and data == "cifar10") if by_label is None else by_label:
        partition["by_label"] = True
    elif scale == "small":
        partition["embedder"] = "cnn"
    elif scale == "paper":
        partition |= {"embedder": "vgg11", "image_size": 224, "epochs": 5 if data == "cifar10" else 100}
    common = {
        **LOCAL_TRAINING,
        "partition": partition,
        "clients": clients,
        "participation": 1.0 if clients == 15 else 0.1,
        "validation": 0.2,
        "rounds": 20 if clients == 15 else 60 if scale == "small" else 100,
        "seeds": list(SEEDS[:3]),
    }
    if scale == "paper":
        images = {"name": data, **COLOUR}
        return common | PAPER_BATCHES | {"dataset": images, "model": "cnn_fomo", "augment": "crop_flip"}
    common |= {"batch": 20, "steps": 5 if clients == 100 else 10 if data == "cifar100" else steps}
    if scale == "smoke":
        return common | {"dataset": "digits", "model": "mlp", "steps": 5, "rounds": 6, "seeds": [0, 1]}
    some = {"name": "cifar100_subset"} if data == "cifar100" else {"name": data, "examples": 6000}
    return common | {"dataset": {**some, **COLOUR}, "model": "cnn_tutorial"}


def latent_metrics(run: RunRecord) -> Measurements:
    """SCORED of every method, kin of FedFomo, and how different the clients are."""
    measured = scored_accuracy(run) | differences_of_classes(run)
    for label, metrics in kinship(run).items():
        measured[label] |= metrics
    return measured


def scored_accuracy(run: RunRecord) -> Measurements:
    measured: Measurements = {}
    for trial in run.trials:
        metrics = trial.final.metrics["server" if trial.algorithm in ONE_MODEL else "personal"]
        measured.setdefault(trial.algorithm, {}).setdefault(SCORED, {})[trial.seed] = metrics["accuracy"]
    return measured


def lead(results: Results, part: str, row: str, rival: str, metric: str = SCORED) -> BySeed:
    return difference(results.get(part, row, metric), results.get(part, rival, metric))


def above_chance(results: Results, part: str, row: str, metric: str = "kin.top") -> BySeed:
    """How much more of what `metric` counts kin hold than they would by chance."""
    return difference(results.get(part, row, metric), results.get(part, row, "kin.chance"))


def kin_above_chance(results: Results, part: str) -> dict[str, BySeed]:
    return {METHODS[row]: above_chance(results, part, row) for row in OURS}


def five_above_chance(results: Results, part: str) -> dict[str, BySeed]:
    return {"": above_chance(results, part, "fedfomo-5")}


def above(results: Results, part: str, rival: str) -> dict[str, BySeed]:
    """FedFomo with both numbers of models above a rival."""
    return {METHODS[row]: lead(results, part, row, rival) for row in OURS}


def mixture_above_training(results: Results) -> dict[str, BySeed]:
    return {
        METHODS[row]: difference(*(results.get("cifar10", row, metric) for metric in (SCORED, "post_train.accuracy")))
        for row in OURS
    }


def growing_lead(results: Results, data: str, rival: str) -> dict[str, BySeed]:
    """Growth of FedFomo's lead over a rival from 15 clients to 100."""
    return {"": difference(*(lead(results, f"{data}-{clients}", "fedfomo-5", rival) for clients in (100, 15)))}
