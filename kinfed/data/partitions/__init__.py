"""Ways to share a data set out among clients, one class each, by name in PARTITIONS."""

from __future__ import annotations

from kinfed.data.partitions.base import Assignment, CountPartition, Partition
from kinfed.data.partitions.classes import Classes, Pathological
from kinfed.data.partitions.dirichlet import Dirichlet
from kinfed.data.partitions.feature_shift import FeatureShift
from kinfed.data.partitions.generators import FirstComeFirstServed, Lognormal, Powerlaw
from kinfed.data.partitions.hidden_groups import HiddenGroups
from kinfed.data.partitions.iid import Iid, NaturalClients
from kinfed.data.partitions.latent import Latent
from kinfed.data.partitions.partition import make_federation
from kinfed.data.sources.registered import PARTITIONS

__all__ = [
    "PARTITIONS",
    "Assignment",
    "Classes",
    "CountPartition",
    "Dirichlet",
    "FeatureShift",
    "FirstComeFirstServed",
    "HiddenGroups",
    "Iid",
    "Latent",
    "Lognormal",
    "NaturalClients",
    "Partition",
    "Pathological",
    "Powerlaw",
    "make_federation",
]
