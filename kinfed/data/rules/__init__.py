"""The rules by which a data set is shared out, one class each."""

from __future__ import annotations

from kinfed.data.rules.base import CountRule, Partition, Shares
from kinfed.data.rules.classes import Classes, Pathological
from kinfed.data.rules.dirichlet import Dirichlet
from kinfed.data.rules.generators import Lognormal, PFedMe, Powerlaw
from kinfed.data.rules.plain import Column, Iid

__all__ = ["RULES", "CountRule", "Partition", "Shares"]

RULES: tuple[type[Partition], ...] = (
    Iid, Classes, Pathological, Powerlaw, PFedMe, Lognormal, Dirichlet, Column,
)  # fmt: skip
