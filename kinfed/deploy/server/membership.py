"""Sites that come into a deployment that has begun, and sites that leave it, between two of its rounds.

    joined = "d"        their names after those of clients, in the order in which they came; never taken out again
    left = "b"          is asked for nothing any more, until its name is taken out of here

    <out>/members.json  {"joined": {name: round}, "left": {name: round}}: after which round

The run stays the one that it is: numbers, batches and draws of the others do not change, a newcomer gets the next
number and begins as a client that has never taken part, and what columns become is what the first sites learnt. A site
that has left is one that does not come. So a deployment gives the models of a simulation in which a newcomer was absent
before, and who has left is absent from then on. Methods whose server and clients remember the same of as many clients
as there are take no newcomer; nor do runs whose noise was planned for the sites that they began with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kinfed.core import storage
from kinfed.deploy.server.enrol import Roster, TooFewClients, write_roster
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.exchange import Exchange
from kinfed.errors import ConfigError, DataError
from kinfed.records import Checkpoints
from kinfed.server import Loop

FILE = "members.json"
_OF_ALL_CLIENTS = ("allowance", "calls", "refused")  # what a privacy budget keeps, beside a list of any length


def with_newcomers(deployment: Deployment, exchange: Exchange, run: str, roster: Roster, path: Path) -> Roster:
    """The roster with the sites that have joined since it was written; it is written again with them."""
    names = [name for name in deployment.joined_names if name not in roster.names]
    if not names:
        return roster
    exchange.say(f"waiting for {', '.join(names)}, who join this run")
    exchange.find(lambda: set(names) <= exchange.present(), deployment.wait, len(names), names)
    if missing := sorted(set(names) - exchange.present()):
        raise TooFewClients(
            f"{', '.join(missing)} did not appear within {deployment.wait:g} s, and should join the run"
        )
    greetings = [exchange.greetings[name] for name in names]
    for name, greeting in zip(names, greetings, strict=True):
        alike = roster.preprocessing is not None and bool(greeting.columns) and not greeting.tokens
        theirs = tuple(greeting.shape), list(greeting.columns), greeting.tokens
        if not alike and theirs != (tuple(roster.shape), list(roster.columns), roster.tokens):
            raise DataError(f"{name} has other feature columns, or examples of another shape, than the run began with")
        if bool(roster.groups) != bool(greeting.group):
            raise ConfigError(f"give {name} a group if all others have one, and none if they have none")
    counts = torch.tensor([greeting.counts for greeting in greetings], dtype=torch.int64)
    roster = replace(
        roster, names=[*roster.names, *names], counts=torch.cat([roster.counts, counts]),
        groups=[*roster.groups, *(greeting.group for greeting in greetings)] if roster.groups else [],
        keys=[*roster.keys, *(exchange.keys[name] for name in names)],
    )  # fmt: skip
    write_roster(path, run, roster)
    return roster


def present(deployment: Deployment, names: Sequence[str]) -> Tensor | None:
    """[n] numbers of the sites that have not left; None: all."""
    gone = set(deployment.left_names)
    if unknown := sorted(gone - set(names)):
        raise ConfigError(f"left: {unknown[0]} is not in this run; its sites are {', '.join(names)}")
    if len(gone) == len(names):
        raise ConfigError("left: all sites have left, and none is there to learn")
    return torch.tensor([k for k, name in enumerate(names) if name not in gone]) if gone else None


def note_members(folder: Path, deployment: Deployment, round: int) -> list[str]:
    """Write down who has come or left after this round; a sentence for each that is new."""
    path, sentences = folder / FILE, []
    record = storage.read_json(path, "members of a deployment") if path.exists() else {"joined": {}, "left": {}}
    for what, names in (("joined", deployment.joined_names), ("left", deployment.left_names)):
        new = [name for name in names if name not in record[what]]
        sentences += [f"{name} has {what} after round {round}" for name in new]
        record[what] |= dict.fromkeys(new, round)
    back = [name for name in record["left"] if name not in deployment.left_names]
    sentences += [f"{name} is back after round {round}" for name in back]
    record["left"] = {name: number for name, number in record["left"].items() if name not in back}
    if sentences:
        storage.write_json(path, record)
    return sentences


def widen_checkpoint(checkpoints: Checkpoints, label: str, loop: Loop) -> None:
    """Give newcomers their place in the newest checkpoint: as clients that have never taken part."""
    snapshot, clients = checkpoints.latest(label), loop.population.num_clients
    if snapshot is None or (before := len(snapshot.tensors["took_part"])) == clients:
        return
    fresh = loop.state()
    if fresh.keys() != snapshot.tensors.keys():
        raise ConfigError(f"the checkpoint of {label} keeps other things than the method now; no site can join")
    tensors = {name: _widened(name, old, fresh[name], before) for name, old in snapshot.tensors.items()}
    checkpoints.save(label, snapshot.round, tensors, snapshot.extra)


def _widened(name: str, old: Tensor, fresh: Tensor, before: int) -> Tensor:
    """What a fresh state keeps of all clients, with what is known of the first ones."""
    if old.shape == fresh.shape or (name.startswith("privacy.") and not name.endswith(_OF_ALL_CLIENTS)):
        return old
    sizes = list(zip(old.shape, fresh.shape, strict=False))
    if old.dim() != fresh.dim() or any(a != b and a != before for a, b in sizes):
        raise ConfigError(f"what the server keeps ({name}) has no place for one more site; begin a new run with it")
    wide = fresh.clone()
    wide[tuple(slice(size) for size in old.shape)] = old
    return wide
