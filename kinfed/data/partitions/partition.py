"""Sharing a data set out among clients.

    make_federation(load_source("mnist"), "classes", num_clients=40, options={"classes": 3}, seed=0)

A partition is a frozen dataclass: its fields are its options, `share` is the rule (rules/). The result is a pure
function of (source, options, number of clients, seed). A new rule is such a class and one `register_partition` line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kinfed.core.options import build
from kinfed.data.federation import Federation, Ragged
from kinfed.data.partitions import RULES, Partition
from kinfed.data.partitions.latent import Latent
from kinfed.data.source import Source
from kinfed.errors import ConfigError, unknown_name

__all__ = ["PARTITIONS", "Partition", "make_federation", "register_partition"]

PARTITIONS: dict[str, type[Partition]] = {}


def register_partition(rule: type[Partition]) -> None:
    if rule.name in PARTITIONS:
        raise ConfigError(f"partition {rule.name!r} is registered already")
    PARTITIONS[rule.name] = rule


for _rule in (*RULES, Latent):
    register_partition(_rule)


def make_federation(
    source: Source,
    partition_name: str,
    num_clients: int | None,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Federation:
    """Share `source` out. `num_clients` may be None only where the data set knows its clients (column)."""
    if partition_name not in PARTITIONS:
        raise unknown_name("partition", partition_name, PARTITIONS)
    rule = build(PARTITIONS[partition_name], options or {}, f"partition {partition_name}")
    if num_clients is not None and not 1 <= num_clients <= len(source):
        raise ConfigError(
            f"{source.name} has {len(source):,} examples, so there can be 1 to {len(source):,} clients; "
            f"got {num_clients}"
        )
    shares = rule.share(source, num_clients, seed)
    clients = len(shares.train)
    width = len(str(clients - 1))
    notes = [*source.notes, *shares.notes]
    untested = int((shares.test.count == 0).sum())
    if untested and len(shares.test.rows):
        notes.append(f"{untested} of {clients} clients have no test example")
    if source.is_val is not None and bool(source.is_val.any()) and shares.val is None:
        notes.append(f"partition {partition_name} does not keep the validation marks of {source.name}")
    return Federation(
        features=source.features.standardized(shares.train.rows) if source.standardize else source.features,
        labels=source.labels,
        num_classes=source.num_classes,
        train=shares.train,
        val=shares.val or Ragged.empty(clients),
        test=shares.test,
        names=shares.names or [f"client-{k:0{width}d}" for k in range(clients)],
        groups=shares.groups,
        group_names=shares.group_names,
        class_names=source.class_names,
        description={
            "dataset": source.name,
            "dataset_options": source.options,
            "partition": partition_name,
            "options": dataclasses.asdict(rule),
            "clients": clients,
            "seed": seed,
        },
        notes=notes,
        tags=source.tags,
        tag_names=source.tag_names,
    )
