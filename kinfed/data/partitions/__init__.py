"""The rules by which a data set is shared out, one class each."""

from __future__ import annotations

from kinfed.data.partitions.base import CountRule, Partition, Shares
from kinfed.data.partitions.classes import Classes, Pathological
from kinfed.data.partitions.dirichlet import Dirichlet
from kinfed.data.partitions.generators import Lognormal, PFedMe, Powerlaw
from kinfed.data.partitions.iid import Column, Iid

__all__ = ["RULES", "CountRule", "Partition", "Shares"]

RULES: tuple[type[Partition], ...] = (
    Iid, Classes, Pathological, Powerlaw, PFedMe, Lognormal, Dirichlet, Column,
)  # fmt: skip
