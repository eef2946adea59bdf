"""Splits of every client's rows that keep its mixture of labels: train and test, and the folds of a cross-validation.

A stratum is a class, or of a number a quarter of the client's own rows by rank. Of n rows of which m are to be split
off, a stratum of n_s gives m n_s / n, rounded down, and the rows still lacking come from the strata with the largest
remainders: no stratum is ever a whole row away from its share.

Folds deal out all rows: in order of label (rows of one label at random) every row goes to the next fold, from a random
first one on. Sizes of a client's folds differ by one at most, and so do their numbers of every class. A client with
fewer rows than folds is tested in as many folds as it has rows. One that has a single row trains on it in all folds,
and is not tested.
"""

import numpy as np
import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import Ragged
from kinfed.errors import ConfigError

QUARTERS = 4


def strata(rows: Ragged, labels: Tensor, problem: Problem) -> tuple[Tensor, int]:
    """[total] the stratum of every entry, and how many strata there are."""
    own = labels[rows.rows]
    if not problem.is_regression:
        return own, problem.num_classes
    order = np.lexsort((own.numpy(), rows.owner.numpy()))
    rank = torch.empty(len(own), dtype=torch.int64)
    rank[torch.from_numpy(order)] = rows.position  # of a client's list, whose entries lie side by side in the order too
    return rank * QUARTERS // rows.count[rows.owner], QUARTERS


def split_stratified(
    rows: Ragged, head: Tensor, labels: Tensor, problem: Problem, keys: Tensor
) -> tuple[Ragged, Ragged]:
    """head[k] entries of every list k, drawn at random in proportion to its strata, and the rest; keys [K]."""
    stratum, number = strata(rows, labels, problem)
    clients = len(rows)
    parts = Ragged.grouped(rows.rows, rows.owner * number + stratum, clients * number)
    sizes = parts.count.reshape(clients, number)
    quota = sizes * head[:, None].to(torch.float64) / rows.count.clamp_min(1)[:, None]
    take = (quota + 1e-9).floor().to(torch.int64)
    # Largest remainders first, ties at random.
    tie = rng.to_unit(rng.at(rng.fold(keys, 1)[:, None].expand(-1, number), torch.arange(number)))
    remainder = torch.where(take < sizes, quota - take, -1.0)
    order = np.lexsort((tie.numpy(), -np.round(remainder.numpy(), 9)), axis=1)
    place = torch.empty_like(take)
    place.scatter_(1, torch.from_numpy(order), torch.arange(number).expand(clients, -1).contiguous())
    take += (place < (head - take.sum(1))[:, None]).to(torch.int64)
    stratum_keys = rng.fold(keys.repeat_interleave(number), 2, torch.arange(number).repeat(clients))
    first, second = (
        Ragged.grouped(part.rows, part.owner // number, clients).ascending()
        for part in parts.shuffled(stratum_keys).split_at(take.reshape(-1))
    )
    return first, second


def fold_numbers(rows: Ragged, folds: int, labels: Tensor, keys: Tensor) -> Tensor:
    """[total] in [0, folds): the fold in which every entry is tested; -1 for the only row of a client."""
    if folds < 2:
        raise ConfigError(f"a cross-validation has at least two folds; got {folds}")
    draw = rng.to_unit(rng.at(rng.fold(keys, 1)[rows.owner], rows.position)).numpy()
    label, owner = labels[rows.rows].numpy(), rows.owner.numpy()
    order = np.lexsort((draw, label, owner))
    number = torch.empty(len(rows.rows), dtype=torch.int64)
    first = (rng.to_unit(rng.at(rng.fold(keys, 2), torch.zeros_like(keys))) * folds).to(torch.int64)
    number[torch.from_numpy(order)] = (rows.position + first[rows.owner]) % folds
    if labels.is_floating_point():  # neighbours by rank, one for each fold, in random order
        block = rows.position // folds
        inside = np.lexsort((draw[order], block.numpy(), owner))
        shuffled = torch.from_numpy(order)[torch.from_numpy(inside)]
        number[shuffled] = (rows.position + first[rows.owner]) % folds
    return torch.where(rows.count[rows.owner] == 1, -1, number)


def split_fold(rows: Ragged, fold: int, folds: int, labels: Tensor, keys: Tensor) -> tuple[Ragged, Ragged]:
    """(train, test) rows of every client in one fold."""
    tested = fold_numbers(rows, folds, labels, keys) == fold
    return rows.filter(~tested).ascending(), rows.filter(tested).ascending()
