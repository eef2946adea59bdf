"""Ties between rows, which every division into parts respects: rows of one person, and an order in time.

    persons   all rows of a person at a client are in one part: drawn are persons, not rows
    order     a part that is judged on comes after the part that is trained on, as in use: test and validation rows are
              a client's last, and folds have a rolling origin: its rows, in order, lie in folds + 1 blocks, and fold f
              judges block f + 1 by models of the blocks before it. Later blocks are in no part of that fold, and the
              first block is never judged

Rows of the same moment are never divided. With both, a person counts at the moment of the last row: nothing that trains
is later than what it is judged by, and no person is on both sides; earlier rows of a person who is judged are judged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kinfed.data.examples.ragged import Ragged, fold_numbers, hold_out
from kinfed.errors import ConfigError


@dataclass(frozen=True)
class RowTies:
    """At least one of the two is given."""

    persons: Tensor | None = None  # [N] int64
    order: Tensor | None = None  # [N] float64

    @staticmethod
    def of(persons: Tensor | None, order: Tensor | None) -> RowTies | None:
        return None if persons is None and order is None else RowTies(persons, order)

    def hold_out(self, rows: Ragged, fraction: float, keys: Tensor) -> tuple[Ragged, Ragged]:
        """Every list without, and with, about this share of it: its last rows, or random persons; one row or person at
        least stays. keys [K]."""
        person, home = self._persons(rows)
        if self.order is None:
            _, others = hold_out(home, fraction, keys)
            chosen = torch.zeros(len(home.rows), dtype=torch.bool)
            chosen[others.rows] = True
            inside = chosen[person]
        else:
            first, count = _place_in_order(rows, self._moments(rows, person)), rows.count[rows.owner]
            head = ((1 - fraction) * count.to(torch.float64) + 1e-9).to(torch.int64).clamp_min(1)
            place = rows.offsets[rows.owner] + first
            end = first + torch.bincount(place, minlength=len(place))[place]  # of the rows of one moment
            # The moment that the cut would divide goes where most of it lies, but the last of all is held.
            last = (first >= head) | ((end > head) & ((2 * head <= first + end) | (end == count)))
            inside = last & (first > 0)
        return rows.filter(~inside).ascending(), rows.filter(inside).ascending()

    def fold_numbers(self, rows: Ragged, folds: int, labels: Tensor, keys: Tensor) -> Tensor:
        """[total] the fold that judges every entry, or -1: it always trains; keys [K]."""
        if folds < 2:
            raise ConfigError(f"a cross-validation has at least two folds; got {folds}")
        person, home = self._persons(rows)
        if self.order is not None:
            first = _place_in_order(rows, self._moments(rows, person))
            return first * (folds + 1) // rows.count[rows.owner].clamp_min(1) - 1
        of_person = torch.empty(len(home.rows), dtype=torch.int64)
        of_person[home.rows] = fold_numbers(home, folds, labels[rows.rows[self._first_rows(person)]], keys)
        return of_person[person]

    def trains(self, number: Tensor, fold: int) -> Tensor:
        """bool like `number`: entries that train where a fold is judged."""
        return number < fold if self.order is not None else number != fold

    def _persons(self, rows: Ragged) -> tuple[Tensor, Ragged]:
        """[total] the person of every entry, numbered anew at every client, and the persons of every client; an entry
        is one of its own where none are known."""
        if self.persons is None:
            numbers = torch.arange(len(rows.rows))
            return numbers, Ragged(rows.offsets, numbers)
        pairs = torch.stack([rows.owner, self.persons[rows.rows]])
        different, person = torch.unique(pairs, dim=1, return_inverse=True)
        return person, Ragged.grouped(torch.arange(different.shape[1]), different[0], len(rows))

    @staticmethod
    def _first_rows(person: Tensor) -> Tensor:
        """[P] the first entry of every person."""
        count = int(person.max()) + 1 if len(person) else 0
        return torch.full((count,), len(person)).scatter_reduce(0, person, torch.arange(len(person)), "amin")

    def _moments(self, rows: Ragged, person: Tensor) -> Tensor:
        """[total] float64: the last moment of the person of every entry."""
        assert self.order is not None
        own = self.order[rows.rows].to(torch.float64)
        last = torch.full((int(person.max()) + 1 if len(person) else 0,), -torch.inf, dtype=torch.float64)
        return last.scatter_reduce(0, person, own, "amax")[person]


def _place_in_order(rows: Ragged, moment: Tensor) -> Tensor:
    """[total] how many entries of the same list come before; entries of one moment share the place of the first."""
    owner = rows.owner
    order = torch.from_numpy(np.lexsort((moment.numpy(), owner.numpy())))
    sorted_owner, sorted_moment = owner[order], moment[order]
    begins = torch.ones(len(order), dtype=torch.bool)
    begins[1:] = (sorted_owner[1:] != sorted_owner[:-1]) | (sorted_moment[1:] != sorted_moment[:-1])
    places = torch.where(begins, torch.arange(len(order)) - rows.offsets[sorted_owner], 0)
    starts = torch.cummax(torch.where(begins, torch.arange(len(order)), 0), 0).values
    first = torch.empty(len(order), dtype=torch.int64)
    first[order] = places[starts] if len(order) else places
    return first


def split_fold(
    rows: Ragged, fold: int, folds: int, labels: Tensor, keys: Tensor, ties: RowTies | None = None
) -> tuple[Ragged, Ragged]:
    """(train, test) rows of every client in one fold."""
    if ties is None:
        number = fold_numbers(rows, folds, labels, keys)
        trains = number != fold
    else:
        number = ties.fold_numbers(rows, folds, labels, keys)
        trains = ties.trains(number, fold)
    return rows.filter(trains).ascending(), rows.filter(number == fold).ascending()
