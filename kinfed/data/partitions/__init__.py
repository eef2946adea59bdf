"""Ways to share a data set out among clients, one class each, by name in PARTITIONS."""

from kinfed.data.partitions.base import Assignment, Partition
from kinfed.data.partitions.partition import make_federation
from kinfed.data.sources.registered import PARTITIONS

__all__ = ["PARTITIONS", "Assignment", "Partition", "make_federation"]
