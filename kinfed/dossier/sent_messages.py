"""Messages that left each site: their fields as the method declares them, how often and how many bytes, as the journal
counted them, and what a node's own ledger says."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kinfed.algorithms import AnyAlgorithm, sample_update
from kinfed.config import RunConfig
from kinfed.data import Population, TablePreprocessing
from kinfed.deploy import Roster, Vault, audit_log, made_up_cohort, sent_fields
from kinfed.engine import Architectures
from kinfed.errors import KinfedError
from kinfed.newcomers import FinishedRun
from kinfed.records import RoundRecord, TrialRecord

Facts = dict[str, Any]
AGREES = 0.001  # share by which the bytes of a message may differ from what is declared


def fields_of_update(ended: FinishedRun, algorithm: AnyAlgorithm) -> list[Facts]:
    """Fields of an update as its declaration has them. Sizes come from an update of made-up examples of the run's
    shape; they are None if the method cannot be tried on these, such as with several architectures."""
    if not algorithm.sends:
        return []
    about, inputs = ended.description, ended.inputs
    try:
        models = ended.models()
        if not isinstance(models, Architectures):
            counts = torch.tensor([about.sizes(split) for split in ("train", "val", "test")]).T
            groups = [str(number) for number in about.groups] if about.groups else []
            roster = Roster(list(about.names), counts, inputs.shape, [], inputs.tokens, groups)
            server = algorithm.init_server(models, roster.population(ended.seed, 1.0))
            cohort, clients = made_up_cohort(roster, about.problem), Population(len(about.names), 0)
            update = sample_update(algorithm, models, server, cohort, clients).named()
            return [sized(name, one.shape, one.element_size()) for name, one in update.items()]
    except KinfedError:  # of models that the caller had built, and methods that need more than a client's examples
        pass
    return named_fields(sent_fields(algorithm))


def named_fields(names: Iterable[str]) -> list[Facts]:
    """Fields whose sizes are not known."""
    return [{"name": name, "numbers": None, "bytes": None} for name in names]


def recorded_fields(record: Mapping[str, Any]) -> list[Facts]:
    """Fields of an update as a deployment has written them down (messages.json)."""
    widths = {name: getattr(torch, kind).itemsize for name, (_, kind) in record.items()}
    return [sized(name, shape, widths[name]) for name, (shape, _) in record.items()]


def sized(name: str, shape: Sequence[int], width: int) -> Facts:
    return {"name": name, "numbers": math.prod(shape), "bytes": math.prod(shape) * width}


def counted_bytes(trials: Sequence[TrialRecord]) -> Facts:
    """Bytes as the journal has them: in all, and of one answer on average. What is exchanged once (statistics of
    columns) stands in the first round of a trial."""
    rounds = [one for trial in trials for one in trial.rounds]
    later = [one for trial in trials for one in trial.rounds[1:]] or rounds
    answers = sum(_answers(one) for one in later)
    return {
        "answers": sum(map(_answers, rounds)), "lost": sum(one.dropped for one in rounds),
        "bytes_up": sum(one.bytes_up for one in rounds), "bytes_down": sum(one.bytes_down for one in rounds),
        "bytes_of_one": sum(one.bytes_up for one in later) / answers if answers else 0.0,
    }  # fmt: skip


def _answers(round: RoundRecord) -> int:
    return round.active - round.dropped


def as_declared(bytes_of_one: float, fields: Sequence[Facts], config: RunConfig) -> bool | None:
    """Tell whether updates were as long as they are declared to be; None if something changes them on the way
    (masks, a codec), or where sizes are not known."""
    if config.secure is not None or config.codec is not None or any(field["bytes"] is None for field in fields):
        return None
    declared: int = sum(field["bytes"] for field in fields)
    return abs(bytes_of_one - declared) <= AGREES * declared


def calls_by_site(config: RunConfig, names: Sequence[str], trials: Sequence[TrialRecord]) -> dict[str, int] | None:
    """Number of calls of every site, by the schedule, which follows from the seed; None if records have another
    number: of asynchronous runs, say."""
    calls = torch.zeros(len(names), dtype=torch.int64)
    for trial in trials:
        first = trial.rounds[0].number
        if trial.rounds[-1].number - first >= len(trial.rounds):  # the journal may name any number, and has some lines
            return None
        calls += config.schedule.calls(trial.seed, range(first, first + len(trial.rounds)), len(names))
    active = sum(one.active for trial in trials for one in trial.rounds)
    return dict(zip(names, calls.tolist(), strict=True)) if int(calls.sum()) == active else None


def statistics_bytes(record: Mapping[str, Any] | None) -> int:
    """Bytes of the statistics of columns that all sites together send before the first round, by the record of what
    columns became."""
    learnt = None if record is None else TablePreprocessing.from_json(record)
    return 0 if learnt is None or learnt.learns_nothing else learnt.message_bytes


def transfer_facts(folder: Path, nodes: Iterable[Vault]) -> Facts | None:
    """Messages that came from every site, by kind, as the server's audit log has them, and whether the nodes' own logs
    agree; None without a log. A log that was changed is refused."""
    server = audit_log.AuditLog(folder / audit_log.TRANSFERS)
    entries = server.read()
    if not entries:
        return None
    sites: dict[str, dict[str, Facts]] = {}
    for entry in entries:
        if entry.get("event") == audit_log.CAME:
            counts = sites.setdefault(entry["client"], {}).setdefault(entry["kind"], {"messages": 0, "bytes": 0})
            counts["messages"], counts["bytes"] = counts["messages"] + 1, counts["bytes"] + entry["bytes"]
    own = {log.client: vault.audit_log(log.client) for vault in nodes for log in vault.privacy_logs()}
    agreeing = {
        client: {"head": str(log.verify()), "lacks": len(audit_log.unmatched(log, server, client))}
        for client, log in own.items()
    }
    return {"head": str(server.verify()), "sites": sites, "nodes": agreeing}


def ledger_facts(vault: Vault) -> dict[str, Facts]:
    """The ledgers of a node by client: what has left over all runs and servers, and its cost in ε."""
    from kinfed.privacy import epsilon_over_noises

    books = {}
    for log in vault.privacy_logs():
        page = log.read()
        spent = {name: epsilon_over_noises(one, page.rules["delta"]) if one else 0.0
                 for name, one in page.accounts().items()}  # fmt: skip
        books[log.client] = {
            "runs": {run: dict(rules) for run, rules in page.released.items()}, "priced": len(page.answers),
            "epsilon": {name: value if math.isfinite(value) else None for name, value in spent.items()},
            "rules": {name: value for name, value in page.rules.items() if value not in (None, False, 0, "", [], {})},
        }  # fmt: skip
    return books
