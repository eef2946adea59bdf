"""Class counts, sizes and how far clients are from the whole, for people and for run folders.

`emd` is the distance sum_y |p_k(y) - p(y)| between a client's class distribution and that of all training data,
in [0, 2]. `emd_code` is what FedFomo's released function computes: classes that both distributions contain count
twice, so one class of ten is 2.70 instead of 1.80. Published tables use `emd_code` (P-11); compare like with like.
"""

from typing import Any

import torch
from torch import Tensor

from kinfed.data.descriptions.description import Description
from kinfed.data.examples.ragged import SPLITS
from kinfed.data.federations.federation import Federation


def describe(federation: Federation, ids: Tensor | None = None) -> Description:
    """Describe all clients, or only those of `ids` [n], measured against all."""
    everyone, regression = slice(None) if ids is None else ids, federation.problem.is_regression
    counts = {split: federation.class_counts(split)[everyone].tolist() for split in SPLITS}
    trained = federation.class_counts()
    return Description(
        **counts,
        names=list(federation.names) if ids is None else [federation.names[k] for k in ids.tolist()],
        problem=federation.problem,
        groups=None if federation.groups is None else federation.groups[everyone].tolist(),
        group_names=federation.group_names,
        emd=None if regression else emd(trained)[everyone].tolist(),
        emd_code=None if regression else emd_code(trained)[everyone].tolist(),
        description=federation.description,
        notes=list(federation.notes),
        inputs=_inputs(federation),
        targets=_targets(federation, ids) if regression else None,
        listed=None if ids is None else ids.tolist(),
        clients=None if ids is None else federation.num_clients,
    )


def _targets(federation: Federation, ids: Tensor | None) -> list[tuple[float, float]]:
    lists = (federation.train if ids is None else federation.train.take(ids)).lists()
    own = [federation.labels[rows].to(torch.float64) for rows in lists]
    return [(float(y.mean()), float(y.std(correction=0))) for y in own]


def _inputs(federation: Federation) -> dict[str, Any]:
    features, learnt = federation.features, federation.preprocessing
    scale = {"mean": features.mean, "std": features.std} if learnt is None else {"mean": None, "std": None}
    plain = {name: None if value is None else value.tolist() for name, value in scale.items()}
    columns = {} if learnt is None else {"preprocessing": learnt.to_json()}
    return {"shape": list(features.shape), "tokens": features.is_tokens} | plain | columns


def emd(counts: Tensor) -> Tensor:
    """[K] distance of every client's class distribution from that of all clients together; counts [K, C]."""
    own, whole = _distributions(counts)
    return (own - whole).abs().sum(1)


def emd_code(counts: Tensor) -> Tensor:
    """[K] the same with classes in both supports counted twice, as FedFomo's released code does."""
    own, whole = _distributions(counts)
    times = (own > 0).to(torch.float64) + (whole > 0).to(torch.float64)
    return ((own - whole).abs() * times).sum(1)


def _distributions(counts: Tensor) -> tuple[Tensor, Tensor]:
    exact = counts.to(torch.float64)
    whole = exact.sum(0)
    return exact / exact.sum(1, keepdim=True).clamp_min(1), whole / whole.sum().clamp_min(1)
