"""Who takes part in a deployment: clients appear, say what data they have, and agree on what models are fed.

All of it happens once, before the first round, and is written down (deployment.json); a run that is resumed reads it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kinfed.core import storage
from kinfed.data.features import spread
from kinfed.data.federation import Population
from kinfed.deploy.exchange import Exchange
from kinfed.deploy.questions import SUMS
from kinfed.deploy.settings import STANDARD, Deployment
from kinfed.deploy.wire import MessageError, Packet
from kinfed.errors import ConfigError, DataError, KinfedError


class TooFewClients(KinfedError):
    """Clients did not appear, or too few answered for too long. What was done is saved."""


@dataclass(frozen=True)
class Roster:
    """The clients of a deployment, in the order of their numbers; what the server knows of them."""

    names: list[str]
    counts: Tensor  # [K, 3] training, validation and test examples
    shape: tuple[int, ...]  # of an example
    columns: list[str]
    tokens: bool = False
    groups: list[str] = field(default_factory=list)  # [K] names of groups, where nodes have any
    mean: Tensor | None = None  # [*shape] or one number; None: 0
    std: Tensor | None = None  # likewise; None: 1

    @property
    def group_names(self) -> list[str]:
        return sorted(set(self.groups))

    def group(self, number: int) -> int:
        return self.group_names.index(self.groups[number]) if self.groups else -1

    def population(self, seed: int, participation: float) -> Population:
        groups = torch.tensor([self.group(k) for k in range(len(self.names))]) if self.groups else None
        return Population(len(self.names), seed, participation, groups, len(self.group_names))


def enrol_clients(deployment: Deployment, exchange: Exchange, path: Path) -> tuple[str, Roster]:
    """The run's own name and its clients: as the file says, where there is one, else from the nodes that appear."""
    if path.exists():
        return _load_roster(path)
    roster = _enrol(deployment, exchange)
    run = secrets.token_hex(8)
    storage.write_json(path, {"run": run, **roster.__dict__})
    return run, roster


def _load_roster(path: Path) -> tuple[str, Roster]:
    record = storage.read_json(path, "the clients of a deployment")
    run = record.pop("run")
    tensors = {name: None if record[name] is None else torch.tensor(record[name]) for name in ("mean", "std")}
    counts = torch.tensor(record["counts"], dtype=torch.int64)
    return run, Roster(**record | tensors | {"counts": counts, "shape": tuple(record["shape"])})


def _enrol(deployment: Deployment, exchange: Exchange) -> Roster:
    """All clients are there for the first time."""
    names = _await_clients(deployment, exchange)
    roster = _roster(names, exchange)
    if deployment.scaling == STANDARD:
        mean, std = _common_scaling(deployment, exchange, roster)
    else:
        mean, std = None, None if deployment.divisor is None else torch.tensor(deployment.divisor, dtype=torch.float32)
    return replace(roster, mean=mean, std=std)


def _await_clients(deployment: Deployment, exchange: Exchange) -> list[str]:
    """Their names in the order of their numbers: as listed, else sorted."""
    wanted, listed = deployment.num_clients, deployment.client_names

    def present() -> list[str]:
        names = exchange.present()
        return sorted(names if listed is None else names & set(listed))

    exchange.say(f"waiting for {wanted} clients" + (f": {', '.join(listed)}" if listed else ""))
    exchange.find(lambda: len(present()) >= wanted, deployment.wait)
    names = present()
    if len(names) < wanted:
        lacking = "" if listed is None else f"; missing: {', '.join(sorted(set(listed) - set(names)))}"
        troubles = "".join(f"; a node said: {trouble}" for trouble in exchange.troubles.values())
        raise TooFewClients(
            f"{len(names)} of {wanted} clients appeared within {deployment.wait:g} s "
            f"({', '.join(names) or 'none'}){lacking}{troubles}"
        )
    if len(names) > wanted:
        raise ConfigError(
            f"there are {len(names)} clients ({', '.join(names)}), and the configuration says {wanted}; set clients to "
            "how many there are, or to the names of those that take part"
        )
    return listed or names


def _roster(names: list[str], exchange: Exchange) -> Roster:
    """From what the clients say of themselves; DataError where their data do not fit together."""
    hellos = [exchange.hellos[name] for name in names]
    for key, what in (("shape", "shape of an example"), ("columns", "feature columns"), ("tokens", "kind of features")):
        for name, hello in zip(names, hellos, strict=True):
            ours, theirs = hellos[0].header.get(key), hello.header.get(key)
            if ours != theirs:
                raise DataError(
                    f"{names[0]} and {name} differ in the {what}: {_short(ours)} and {_short(theirs)}. Make the data "
                    "alike, or list the columns in their order in the setting features"
                )
    counts = torch.tensor([hello.require("counts", list) for hello in hellos], dtype=torch.int64)
    groups = [str(hello.header.get("group", "")) for hello in hellos]
    if any(groups) and not all(groups):
        raise ConfigError(f"{names[groups.index('')]} has no group, and others have; give every node one, or none")
    shape = tuple(int(side) for side in hellos[0].require("shape", list))
    columns = [str(column) for column in hellos[0].require("columns", list)]
    return Roster(names, counts, shape, columns, hellos[0].require("tokens", bool), groups if any(groups) else [])


def _common_scaling(deployment: Deployment, exchange: Exchange, roster: Roster) -> tuple[Tensor | None, Tensor | None]:
    """Mean and deviation of every feature over all clients' training rows, from two sums of each client."""
    if roster.tokens:
        return None, None
    rows = sum(exchange.hellos[name].require("rows", int) for name in roster.names)

    def total(mean: Tensor | None) -> Tensor:
        groups = {} if mean is None else {"sums": {"mean": mean}}
        questions = {name: Packet({"kind": SUMS, "name": name}, groups) for name in roster.names}
        parts: dict[str, Tensor] = {}

        def take(name: str, answer: Packet) -> None:
            part = answer.group("sums").get("total")
            if part is None or tuple(part.shape) != roster.shape or not bool(torch.isfinite(part).all()):
                raise MessageError("no finite sum per feature")
            parts[name] = part.to(torch.float64)

        reasons = exchange.request(SUMS, questions, deployment.wait, take)
        if reasons:
            name, reason = next(iter(sorted(reasons.items())))
            raise TooFewClients(f"the common scaling needs every client, and {name} did not answer: {reason}")
        return torch.stack([parts[name] for name in roster.names]).sum(0)

    mean = total(None) / max(rows, 1)
    return mean.to(torch.float32), spread(mean, total(mean), rows).to(torch.float32)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
