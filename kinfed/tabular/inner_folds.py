"""Nested validation: the training rows of every site in folds, each of which is validated by models that the others
train. Test rows are in none of them, so nothing that is chosen here has seen one.

What columns become, and mean and scale of a number to predict, are learnt anew in every fold from the rows that train.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.data import Federation, fold_numbers, make_federation, name_keys
from kinfed.data.sources import Source, take_rows
from kinfed.errors import DataError

NEVER = -1  # the fold of a row that always trains


def assign_folds(data: Federation, folds: int, seed: int) -> Tensor:
    """[T] the fold in which each entry of `data.train.rows` is validated; the only row of a site always trains."""
    fold = fold_numbers(data.train, folds, data.labels, name_keys(rng.root(seed, "fit-folds"), data.names))
    if not bool((fold >= 0).any()):
        raise DataError(
            f"none of the {data.num_clients} sites has two training rows, so methods cannot be compared; give more "
            "rows, or another client_column if this one identifies rows rather than sites"
        )
    return fold


def fold_federation(source: Source, data: Federation, fold_of: Tensor, fold: int, seed: int) -> Federation:
    """The sites with the training rows outside of a fold, and those inside it in the place of test rows."""
    marked = torch.zeros(len(source), dtype=torch.bool)
    marked[data.train.rows[fold_of == fold]] = True
    rows = data.train.rows.sort().values
    part = replace(take_rows(source, rows), is_test=marked[rows], is_val=None)
    return make_federation(part, "column", None, None, seed)


def fold_rows(data: Federation, fold_of: Tensor, fold: int) -> Tensor:
    """[T_f] places in `data.train.rows` of a fold's test rows, in the order of `fold_federation(...).test.rows`."""
    inside = (fold_of == fold).nonzero().squeeze(1)
    owner, row = data.train.owner[inside], data.train.rows[inside]
    return inside[torch.from_numpy(np.lexsort((row.numpy(), owner.numpy())))]
