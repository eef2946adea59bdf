"""What sites say in a search, as the server reads it: MessageError if it cannot be; and what follows for columns.

A *part* of a search is the training rows of all sites outside of one fold or, the last one, all of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kinfed.data import Problem, TablePreprocessing, TableStatistics, ValueMoments, parse_kinds
from kinfed.deploy.server.answer_checks import LARGEST_FIGURE, is_number
from kinfed.deploy.transport.wire import MessageError, Packet
from kinfed.errors import DataError
from kinfed.tabular import SiteChoices

Figures = dict[tuple[str, int], tuple[float, float]]  # by contender and try: numerator and denominator of a score


@dataclass(frozen=True)
class Part:
    """The rows of all sites outside of one fold, or all training rows."""

    preprocessing: dict[str, Any]
    problem: Problem
    counts: Tensor  # [K, 3]
    validated: Tensor  # [K, 3] of methods that keep some training rows for validation

    def to_json(self) -> dict[str, Any]:
        return {
            "preprocessing": self.preprocessing, "problem": self.problem.to_json(),
            "counts": self.counts.tolist(), "validated": self.validated.tolist(),
        }  # fmt: skip

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Part:
        counts, validated = (torch.tensor(record[name], dtype=torch.int64) for name in ("counts", "validated"))
        return cls(record["preprocessing"], Problem.from_json(record["problem"]), counts, validated)

    def shape(self) -> tuple[int, ...]:
        return (len(TablePreprocessing.from_json(self.preprocessing).features),)


@dataclass(frozen=True)
class SiteStatistics:
    """One part at one site."""

    columns: TableStatistics
    target: ValueMoments  # of a number to predict; of classes that of no row
    counts: list[int]  # training, validation and test rows
    validated: list[int]  # of methods that keep some training rows for validation


def learnt_parts(
    of_sites: Sequence[Sequence[SiteStatistics]], problem: Problem, columns: str | None, outputs: tuple[str, ...]
) -> list[Part]:
    """What columns and targets become in every part, by the statistics of all sites; `columns` declares kinds, and
    columns that not every site has get effects on `outputs`."""
    declared, parts = parse_kinds(columns), []
    for sites in zip(*of_sites, strict=True):
        merged = TableStatistics.merged([one.columns for one in sites], declared)
        learnt = TablePreprocessing.from_statistics(merged, declared, outputs=outputs)
        moments = ValueMoments()
        for one in sites:
            moments = moments.merge(one.target)
        fitted = problem.of_sums(moments.count, moments.mean, moments.square) if moments.count else problem
        counts, validated = (torch.tensor([getattr(one, name) for one in sites]) for name in ("counts", "validated"))
        parts.append(Part(learnt.to_json(), fitted, counts, validated))
    if problem.kind == "counts":  # outputs are ratios to the mean of all training rows
        return [replace(part, problem=parts[-1].problem) for part in parts]
    return parts


def read_statistics(
    answer: Packet, folds: int, rows: int, largest: float, *, whole: bool = False
) -> list[SiteStatistics]:  # fmt: skip
    """Statistics of every part at a site that has `rows` and values up to `largest`; `whole`: those of every part are
    of all rows."""
    records = answer.require("parts", list)
    if len(records) != folds + 1:
        raise MessageError(f"statistics of {len(records)} parts; a search in {folds} folds has {folds + 1}")
    return [_statistics_of(record, rows, largest, records[-1] if whole else record) for record in records]


def _statistics_of(record: Any, rows: int, largest: float, of_rows: Any) -> SiteStatistics:
    try:
        columns = TableStatistics.from_json(record["statistics"])
        counts, validated = record["counts"], record["validated"]
        if not all(len(some) == 3 and all(type(n) is int and 0 <= n <= rows for n in some)
                   for some in (counts, validated)):  # fmt: skip
            raise DataError(f"numbers of training, validation and test rows, of {rows}, were asked for")
        columns.check_size(int(of_rows["counts"][0]), largest)
        mean, square = (float(record["target"][name]) for name in ("mean", "square"))
        target = ValueMoments(int(record["target"]["count"]), mean, square)
    except (DataError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise MessageError(str(error)) from None
    if target.count not in (0, counts[0]) or not (abs(mean) <= largest and 0 <= square < math.inf):
        raise MessageError("sums of a target that cannot be those of its rows")
    return SiteStatistics(columns, target, counts, validated)


def read_figures(answer: Packet) -> Figures:
    """Figures of all tries at a site."""
    figures: Figures = {}
    for entry in answer.require("figures", list):
        if not (isinstance(entry, list) and len(entry) == 4 and isinstance(entry[0], str) and type(entry[1]) is int):
            raise MessageError("figures are a contender, a try and two numbers each")
        name, number, *sums = entry
        if not all(map(is_number, sums)) or sums[1] < 0:
            raise MessageError(f"figures of {name} are not two finite numbers")
        figures[name, number] = float(sums[0]), float(sums[1])
    return figures


def read_advantages(answer: Packet, count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Advantages [M] of that many contenders at a site, and their covariance [M, M]."""
    numbers = answer.group("advantages")
    if {name: tuple(one.shape) for name, one in numbers.items()} != {"seen": (count,), "covariance": (count, count)}:
        raise MessageError(f"{count} advantages and their covariance were asked for")
    seen, covariance = (numbers[name].double().numpy() for name in ("seen", "covariance"))
    largest = max(np.nanmax(np.abs(some), initial=0.0) for some in (seen, np.sqrt(np.abs(covariance))))
    if bool((np.diagonal(covariance) < 0).any()) or largest > LARGEST_FIGURE:
        raise MessageError("advantages are finite numbers, or unknown, and no variance is below zero")
    return seen, covariance


def joined_choices(contenders: Sequence[str], sites: Sequence[str], answers: Mapping[int, Any]) -> SiteChoices:
    """What every site takes, by the advantages of all; MessageError in the name of a site with whose they cannot be
    joined."""
    seen, covariance = (np.stack([answers[k][place] for k in range(len(sites))]) for place in (0, 1))
    try:
        return SiteChoices.of(contenders, seen, covariance)
    except np.linalg.LinAlgError:
        largest = int(np.nanargmax(np.nanmax(np.abs(seen), 1, initial=0.0)))
        raise MessageError(
            f"{sites[largest]}: its advantages, up to {np.nanmax(np.abs(seen[largest])):.3g}, cannot be joined with "
            "those of the others"
        ) from None


def read_settled(answer: Packet, contenders: Collection[str], own: Sequence[str]) -> dict[str, Any]:
    """What a site says of what it takes: its rows, gains with their intervals, and what `own` columns buy there."""
    record: dict[str, Any] = {"taken": answer.require("taken", str), "rows": answer.require("rows", list)}
    record["test_gain"] = answer.require("test_gain", list)
    if record["taken"] not in contenders:
        raise MessageError("what a site takes is one of the contenders")
    if len(record["test_gain"]) != 2 or not all(one is None or is_number(one) for one in record["test_gain"]):
        raise MessageError("a gain on test rows and its variance were asked for")
    if len(record["rows"]) != 3 or not all(type(rows) is int and rows >= 0 for rows in record["rows"]):
        raise MessageError("numbers of training, validated and test rows were asked for")
    for name in ("gain", "gain_chosen"):
        estimate = answer.require(name, dict)
        if estimate.keys() != {"value", "low", "high", "at_least"} or not all(
            value is None or is_number(value) for value in estimate.values()
        ):
            raise MessageError(f"{name} should be a value with its interval")
        record[name] = estimate
    record["own_columns"] = answer.require("own_columns", list)
    if not all(map(_is_worth, record["own_columns"])) or [one[0] for one in record["own_columns"]] != list(own):
        raise MessageError(
            "of columns that not every site has, names were asked for as they were sent, what each buys where it is "
            "held, and its error"
        )
    return record


def _is_worth(one: Any) -> bool:
    """Whether this is a column's name, whether a site holds it, and what it buys there with its error, or neither."""
    if not (isinstance(one, list) and len(one) == 4 and isinstance(one[0], str) and isinstance(one[1], bool)):
        return False
    _, held, gain, error = one
    return (gain is None and error is None) or (held and is_number(gain) and is_number(error) and error >= 0)
