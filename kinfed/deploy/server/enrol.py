"""Enrolment: clients appear, say what data they have, and agree on what models are fed.

All of it happens once, before the first round, and is written down (deployment.json); a run that is resumed reads it.
"""

import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kinfed.core import storage
from kinfed.data import Population, TablePreprocessing, TableStatistics, parse_kinds, spread
from kinfed.deploy.settings import STANDARD, Deployment
from kinfed.deploy.transport.exchange import Exchange, Take
from kinfed.deploy.transport.wire import SUMS, MessageError, Packet, plain_text
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
    keys: list[str] = field(default_factory=list)  # [K] the public key that each client belongs to
    preprocessing: dict[str, Any] | None = None  # what the columns of tables become, as JSON; learnt from all clients
    exchanged: tuple[int, int] = (0, 0)  # bytes down and up that this took

    @property
    def group_names(self) -> list[str]:
        return sorted(set(self.groups))

    def group(self, number: int) -> int:
        return self.group_names.index(self.groups[number]) if self.groups else -1

    def population(self, seed: int, participation: float) -> Population:
        groups = torch.tensor([self.group(k) for k in range(len(self.names))]) if self.groups else None
        return Population(len(self.names), seed, participation, groups, len(self.group_names), exchanged=self.exchanged)


def enrol_clients(deployment: Deployment, exchange: Exchange, path: Path) -> tuple[str, Roster]:
    """The run's own name and its clients: from the file, if there is one, else from the nodes that appear. From then on
    every client belongs to its key. Keys that the operator wrote down come before all others."""
    exchange.largest_count = deployment.largest_count
    if deployment.keys:
        from kinfed.deploy.transport.client_keys import read_public_keys

        exchange.keys, exchange.only_known = read_public_keys(Path(deployment.keys).expanduser(), exchange.say), True
    if path.exists():
        run, roster = _load_roster(path)
        if not exchange.only_known:  # else a key that was revoked since would be believed again
            exchange.keys = dict(zip(roster.names, roster.keys, strict=True))
        return run, roster
    if deployment.joined_names:
        raise ConfigError(
            "joined names sites that come into a run that has begun; this one begins: name them in clients"
        )
    roster = _enrol(deployment, exchange)
    run = secrets.token_hex(8)
    write_roster(path, run, roster)
    return run, roster


def write_roster(path: Path, run: str, roster: Roster) -> None:
    storage.write_json(path, {"run": run, **roster.__dict__})


def _load_roster(path: Path) -> tuple[str, Roster]:
    record = storage.read_json(path, "the clients of a deployment")
    run = record.pop("run")
    tensors = {name: None if record[name] is None else torch.tensor(record[name]) for name in ("mean", "std")}
    counts = torch.tensor(record["counts"], dtype=torch.int64)
    shape, exchanged = tuple(record["shape"]), tuple(record["exchanged"])
    return run, Roster(**record | tensors | {"counts": counts, "shape": shape, "exchanged": exchanged})


def _enrol(deployment: Deployment, exchange: Exchange) -> Roster:
    names = _await_clients(deployment, exchange)
    roster = _roster(names, exchange, learnt=deployment.scaling == STANDARD)
    if deployment.question:
        return roster  # columns of a search are learnt in every fold, and others ask for none
    if deployment.scaling != STANDARD:
        divisor = deployment.divisor
        return replace(roster, std=None if divisor is None else torch.tensor(divisor, dtype=torch.float32))
    if roster.tokens:
        return roster
    return (_learn_columns if roster.columns else _learn_scaling)(deployment, exchange, roster)


def _await_clients(deployment: Deployment, exchange: Exchange) -> list[str]:
    """Names of the clients in the order of their numbers: as listed, else sorted."""
    wanted, listed = deployment.num_clients, deployment.client_names

    def present() -> list[str]:
        names = exchange.present()
        return sorted(names if listed is None else names & set(listed))

    exchange.say(f"waiting for {wanted} clients" + (f": {', '.join(listed)}" if listed else ""))
    exchange.find(lambda: len(present()) >= wanted, deployment.wait, wanted, listed or ())
    names = present()
    if len(names) < wanted:
        lacking = "" if listed is None else f"; missing: {', '.join(sorted(set(listed) - set(names)))}"
        troubles = "".join(f"; {stranger}" for stranger in exchange.strangers())
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


def _roster(names: list[str], exchange: Exchange, learnt: bool) -> Roster:
    """The roster from the clients' greetings; DataError if data that are not `learnt` together do not fit."""
    greetings = [exchange.greetings[name] for name in names]
    first = greetings[0]
    same = [("shape", "shape of an example"), ("columns", "feature columns"), ("tokens", "kind of features")]
    if learnt and all(greeting.columns and not greeting.tokens for greeting in greetings):
        same = []
    for key, what in same:
        for name, greeting in zip(names, greetings, strict=True):
            ours, theirs = getattr(first, key), getattr(greeting, key)
            if ours != theirs:
                raise DataError(
                    f"{names[0]} and {name} differ in the {what}: {_short(ours)} and {_short(theirs)}. Make the data "
                    "alike, or list the columns in their order in the setting features"
                )
    counts = torch.tensor([greeting.counts for greeting in greetings], dtype=torch.int64)
    groups = [greeting.group for greeting in greetings]
    if any(groups) and not all(groups):
        raise ConfigError(f"{names[groups.index('')]} has no group, and others have; give every node one, or none")
    # Claims decide how much clients weigh; people should see them.
    share = counts[:, 0] / counts[:, 0].sum().clamp_min(1)
    claims = [f"{name} {n} ({100 * p:.0f} %)" for name, n, p in zip(names, counts[:, 0].tolist(), share, strict=True)]
    if int(counts.sum()):
        exchange.say(f"training examples, as the clients say: {', '.join(claims)}")
    if own := [name for name, greeting in zip(names, greetings, strict=True) if greeting.own_roles]:
        exchange.say(f"which rows are for training and test is the choice of the owners of {', '.join(own)}")
    return Roster(
        names, counts, first.shape, list(first.columns), first.tokens, groups if any(groups) else [],
        keys=[exchange.keys[name] for name in names],
    )  # fmt: skip


def _learn_columns(deployment: Deployment, exchange: Exchange, roster: Roster) -> Roster:
    """Learn the encoding of tables from statistics of each client; unusable ones add nothing."""
    messages: dict[str, TableStatistics] = {}

    def take(name: str, answer: Packet) -> None:
        try:
            statistics = TableStatistics.from_json(answer.require("statistics", dict))
            statistics.check_size(exchange.greetings[name].rows, deployment.largest_value)
        except DataError as error:
            raise MessageError(str(error)) from None
        messages[name] = statistics

    _ask(deployment, exchange, roster, roster.names, {}, take, "learning columns")
    declared = parse_kinds(deployment.run.columns)
    merged = TableStatistics.merged([messages[name] for name in roster.names if name in messages], declared)
    for name in [*(deployment.feature_columns or ()), *declared]:
        if name not in merged.columns and declared.get(name) != "skip":
            raise ConfigError(f"no client has a column {name!r}, which the settings name")
    sent = sum(statistics.nbytes for statistics in messages.values())
    learnt = TablePreprocessing.from_statistics(merged, declared, message_bytes=sent, outputs=deployment.own_outputs)
    for sentence in learnt.sentences():
        exchange.say(sentence)
    record = learnt.to_json()
    sizes = (len(roster.names) * len(storage.to_json(record).encode()), sent)
    return replace(roster, shape=(len(learnt.features),), columns=learnt.columns, preprocessing=record, exchanged=sizes)


def _learn_scaling(deployment: Deployment, exchange: Exchange, roster: Roster) -> Roster:
    """Learn mean and deviation of every feature over all clients' training rows, from two sums of each client."""
    mean_parts = _sums(deployment, exchange, roster, roster.names, None)
    rows = sum(exchange.greetings[name].rows for name in mean_parts)
    mean = torch.stack(list(mean_parts.values())).sum(0) / max(rows, 1)
    parts = _sums(deployment, exchange, roster, list(mean_parts), mean)  # whose first sums cannot be is not asked on
    rows = sum(exchange.greetings[name].rows for name in parts)
    std = spread(mean, torch.stack(list(parts.values())).sum(0), rows)
    return replace(roster, mean=mean.to(torch.float32), std=std.to(torch.float32))


def _sums(
    deployment: Deployment, exchange: Exchange, roster: Roster, names: list[str], mean: Tensor | None
) -> dict[str, Tensor]:
    """Sums of features of these clients or, given the mean, of squared distances; unusable ones are left out."""
    parts: dict[str, Tensor] = {}

    def take(name: str, answer: Packet) -> None:
        part = answer.group("sums").get("total")
        if part is None or tuple(part.shape) != roster.shape or not bool(torch.isfinite(part).all()):
            raise MessageError("no finite sum per feature")
        rows, largest = exchange.greetings[name].rows, deployment.largest_value
        most, least = (rows * largest, -rows * largest) if mean is None else (4 * rows * largest**2, 0.0)
        if not least <= float(part.min()) <= float(part.max()) <= most:
            raise MessageError(
                f"sums from {float(part.min()):.3g} to {float(part.max()):.3g} cannot be those of {rows} rows with "
                f"features up to {largest:g} (largest_value)"
            )
        parts[name] = part.to(torch.float64)

    groups = {} if mean is None else {"sums": {"mean": mean}}
    _ask(deployment, exchange, roster, names, groups, take, "the common scaling")
    return {name: parts[name] for name in names if name in parts}


def _ask(
    deployment: Deployment, exchange: Exchange, roster: Roster, names: list[str], groups: dict[str, Any], take: Take,
    what: str,
) -> None:  # fmt: skip
    """Ask these clients for sums. Says whose answers could not be used; refuses if too few could."""
    packets = {name: Packet({"kind": SUMS, "name": name}, groups) for name in names}
    reasons = sorted(exchange.request(SUMS, packets, deployment.wait, take).items())
    for name, reason in reasons:
        exchange.say(f"{what} is without {name}: {reason}")
    needed = deployment.needed_updates(len(roster.names))
    if len(names) - len(reasons) < needed:
        name, reason = reasons[0]
        raise TooFewClients(f"{what} needs {needed} clients; {name}: {reason}")


def _short(value: Any) -> str:
    return plain_text(str(list(value) if isinstance(value, tuple) else value), 80)
