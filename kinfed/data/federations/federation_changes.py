"""Federations made from others: rows set aside for validation or made public, tests exchanged, clients pooled.

Methods of Federation of the same names, of which these are the bodies; a federation itself never changes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.data.examples.ragged import SPLITS, Ragged
from kinfed.data.federations.example_weights import BALANCED
from kinfed.data.federations.stratified import split_stratified
from kinfed.errors import ConfigError

if TYPE_CHECKING:
    from kinfed.data.federations.federation import Federation

PUBLIC_EXAMPLES = "public_examples"  # in a description: how many of the clients' own examples were made public


def with_validation(
    data: Federation, fraction: float, seed: int, ids: Tensor | None = None, *, stratify: bool = False
) -> Federation:
    if not 0 <= fraction < 1:
        raise ConfigError(f"the validation share must lie in [0, 1); got {fraction}")
    if fraction == 0:
        return data
    n = data.train.count
    needs = data.val.count == 0
    single = needs & (n == 1)
    share = (n.to(torch.float64) * fraction + 1e-9).to(torch.int64)
    size = torch.where(n < 5, 1, share.clamp_min(1)).minimum(n - 1) * needs
    keys = rng.fold(rng.root(seed, "validation"), torch.arange(data.num_clients) if ids is None else ids)
    if stratify:
        val, train = split_stratified(data.train, size, data.labels, data.problem, keys)
        val = val.joined(data.train.filter(single[data.train.owner]))
    else:
        shuffled = data.train.shuffled(keys)
        val, _ = shuffled.split_at(size + single.to(torch.int64))
        _, train = shuffled.split_at(size)
    notes = list(data.notes)
    if bool(single.any()):
        notes.append(f"{int(single.sum())} client(s) with one example validate on that example")
    return replace(data, train=train.ascending(), val=val.joined(data.val).ascending(), notes=notes)


def with_public(data: Federation, fraction: float, seed: int) -> Federation:
    if not 0 < fraction < 1:
        raise ConfigError(f"the public share must lie in (0, 1); got {fraction}")
    keys = rng.fold(rng.root(seed, "public"), torch.arange(data.num_clients))
    size = (data.train.count.to(torch.float64) * fraction + 1e-9).to(torch.int64).minimum(data.train.count - 1)
    shared, _ = data.train.shuffled(keys).split_at(size)
    judged = torch.cat([data.val.rows, data.test.rows])
    public = torch.unique(shared.rows)
    public = public[~torch.isin(public, judged)]
    if not len(public):
        raise ConfigError(f"no client has enough examples to make a share of {fraction:g} of them public; raise it")
    train = data.train.filter(~torch.isin(data.train.rows, public))
    return replace(data, train=train, public=public, description={**data.description, PUBLIC_EXAMPLES: len(public)})


def with_foreign_targets(data: Federation, seed: int) -> Federation:
    order = rng.permutation(rng.root(seed, "foreign-targets"), data.num_clients)
    before = data.description.get("target_of", range(data.num_clients))
    return replace(
        data,
        val=data.val.take(order),
        test=data.test.take(order),
        description={**data.description, "foreign_targets": seed, "target_of": [before[k] for k in order.tolist()]},
    )


def pooled(data: Federation) -> Federation:
    train, val, test = (Ragged.of([torch.unique(data.split(name).rows)]) for name in SPLITS)
    names, table = ["all clients"], data.class_weights
    one = replace(data, train=train, val=val, test=test, names=names, groups=None, group_names=None, class_weights=None)
    if table is None:
        return one
    same = bool((table == table[0]).all())
    return replace(one, class_weights=table[:1]) if same else one.with_class_weights(BALANCED)
