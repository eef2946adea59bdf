"""The privacy budget of one method under one seed: which gradients of every client's data were taken, and who has
enough left for another round.

Epsilon covers all gradients of a client's training data in all rounds, also those of a personal model that never leaves
the client, and those of one personalization: a client may publish the model it uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms import AnyAlgorithm, PrivacyProfile, privacy_profile
from kinfed.engine import Task
from kinfed.errors import CheckpointError, ConfigError
from kinfed.privacy.dpsgd import EVALUATION, PrivateTask, Record
from kinfed.privacy.ledger import Event, Events, Ledger, dominates, merge
from kinfed.privacy.noise import Source
from kinfed.privacy.policy import Privacy


def make_budget(
    privacy: Privacy, algorithm: AnyAlgorithm, task: Task, source: Source, count: Tensor, calls: Tensor,
    spent: Ledger | None = None,
) -> PrivacyBudget:  # fmt: skip
    """The private form of a task (`budget.task`) and what is counted of it.

    `count` [K] training examples, `calls` [K] how often each client will be called as far as one can tell, `spent`
    what was asked before this method began (in a warm start)."""
    spent = Ledger() if spent is None else spent
    noise = privacy.noise
    if noise is None:
        from kinfed.privacy.accountant import noise_for

        assert privacy.epsilon is not None  # one of the two is given
        each, after = planned_costs(algorithm, count)
        assert each is not None  # checked before the run
        before = spent.events(len(count))
        planned = [merge(merge(before[m], each[m], int(calls[m])), after[m]) for m in range(len(count))]
        noise = noise_for(privacy.epsilon, planned, privacy.delta)
    return PrivacyBudget(privacy, algorithm, PrivateTask(task, privacy.clip, noise, source), count, calls, spent)


class PrivacyBudget:
    """Ledger of what the server loop does with the private task."""

    def __init__(
        self, privacy: Privacy, algorithm: AnyAlgorithm, task: PrivateTask, count: Tensor, calls: Tensor, spent: Ledger
    ) -> None:
        self.task = task
        self.noise, self.clip, self.delta = task.noise, task.clip, privacy.delta
        self.limit = privacy.limit
        self.ledger = spent
        self.refused = torch.zeros(len(count), dtype=torch.bool)  # clients once called in vain
        self._algorithm = algorithm
        self._round, self._after = planned_costs(algorithm, count)
        self._uncovered = list(_declared(algorithm, count).uncovered)
        self._holds = count > 0
        self._samples: set[int] = set()  # of the last round, by their keys
        self._calls = calls.clone()
        self._allowance = torch.zeros(len(count), dtype=torch.int64)  # rounds that surely fit into the limit still

    # ---- who may take part ----

    def within_budget(self, ids: Tensor) -> Tensor:
        """Ids of the clients whose budget allows what one more round can take at most; others are sent nothing."""
        if self.limit is None:
            return ids
        used_up = ids[self._allowance[ids] == 0]
        if len(used_up):
            self._renew_allowance(used_up, self.limit)
        allowed = self._allowance[ids] > 0
        self.refused[ids[~allowed]] = True
        self._allowance[ids[allowed]] -= 1
        self._calls[ids[allowed]] -= 1
        return ids[allowed]

    def _renew_allowance(self, ids: Tensor, limit: float) -> None:
        """Find for these clients how many more rounds the limit allows, up to as many as they will be called."""
        from kinfed.privacy.accountant import most_rounds

        assert self._round is not None  # checked before the run
        spent = self.ledger.events(len(self.refused))
        for client in ids.tolist():
            horizon = max(int(self._calls[client]), 1)
            used = merge(spent[client], self._after[client])
            self._allowance[client] = most_rounds(used, self._round[client], self.noise, self.delta, limit, horizon)

    # ---- what was computed ----

    @contextmanager
    def recording(self, ids: Tensor) -> Iterator[Record]:
        """Record the training of these clients. Records of tasks in other processes are to be joined to this one."""
        with self.task.recording() as record:
            yield record
        if bool(self._holds[ids].any()) and not record.calls:
            raise RuntimeError("clients have trained, and no gradient was recorded: their epsilon would be wrong")
        self.record_round(record)

    def record_round(self, record: Record) -> None:
        round, self._samples = record.ledger(), set(record.calls)
        self._check_declared(round)
        if record.evaluated_models and not self._uncovered:
            raise ConfigError(
                f"{type(self._algorithm).__name__} judges models on a client's examples while it trains, and does not "
                "say in its privacy profile what of this leaves the client (uncovered); epsilon would not cover it"
            )
        self.ledger = self.ledger.join(round)

    @contextmanager
    def evaluating(self) -> Iterator[Record]:
        with self.task.recording(EVALUATION) as record:
            yield record
        name = type(self._algorithm).__name__
        if record.calls and not any(self._after):
            raise ConfigError(f"{name} takes gradients to personalize, but its privacy profile says it does not")
        if self._samples & record.calls.keys():
            raise ConfigError(
                f"{name} personalizes on the samples of its last round; give those batches a stream of their own"
            )

    def _check_declared(self, round: Ledger) -> None:
        """Refuse a round that took more than the method's privacy profile says."""
        if self._round is None:
            return
        for client, events in enumerate(round.events(len(self.refused))):
            if not dominates(self._round[client], events):
                raise ConfigError(
                    f"{type(self._algorithm).__name__} computed more gradients in a round than its privacy profile "
                    f"says: {_in_words(events)} at client {client} instead of {_in_words(self._round[client])}"
                )

    # ---- what it amounts to ----

    def events(self) -> list[Events]:
        """Events of every client, were it to make and publish its personal model now."""
        spent = self.ledger.events(len(self.refused))
        return [merge(before, after) for before, after in zip(spent, self._after, strict=True)]

    def epsilon(self) -> list[float]:
        from kinfed.privacy.accountant import epsilon

        return [epsilon(events, self.noise, self.delta) for events in self.events()]

    def largest_epsilon(self) -> float:
        from kinfed.privacy.accountant import largest

        return largest(self.events(), self.noise, self.delta)

    def figures(self) -> dict[str, Any]:
        return {
            "noise": self.noise, "clip": self.clip, "delta": self.delta, "epsilon_max": self.largest_epsilon(),
            "refused": int(self.refused.sum()), "not_covered": self._uncovered,
        }  # fmt: skip

    def summary(self, names: list[str]) -> dict[str, Any]:
        """Diagnostics for the summary; an epsilon that is not finite stands as null."""
        from kinfed.privacy.accountant import largest, renyi_epsilon

        each = self.epsilon()
        return {
            "accountant": "pld", "noise": self.noise, "clip": self.clip, "delta": self.delta, "limit": self.limit,
            "epsilon_max": max(each), "epsilon_mean": sum(each) / len(each), "epsilon": each,
            "epsilon_max_rdp": largest(self.events(), self.noise, self.delta, renyi_epsilon),
            "refused": [names[k] for k in self.refused.nonzero().squeeze(1).tolist()],
            "not_covered": self._uncovered,
        }  # fmt: skip

    # ---- for a checkpoint ----

    def named(self) -> dict[str, Tensor]:
        return self.ledger.named() | {"allowance": self._allowance, "calls": self._calls, "refused": self.refused}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.ledger = Ledger.load(tensors)
        for name, counter in (("allowance", self._allowance), ("calls", self._calls), ("refused", self.refused)):
            if name not in tensors or tensors[name].shape != counter.shape:
                raise CheckpointError(f"the checkpoint has no record of clients' privacy ({name}) that fits this run")
            counter.copy_(tensors[name])


def planned_costs(algorithm: AnyAlgorithm, count: Tensor) -> tuple[list[Events] | None, list[Events]]:
    """[K] what a round asks of each client at most, None without a bound; and what one personalization does."""
    profile = _declared(algorithm, count)
    q = (algorithm.training.batch / count.to(torch.float64)).clamp_max(1.0).tolist()

    def events(gradients: Mapping[int, Tensor]) -> list[Events]:
        columns = {k: batches.tolist() for k, batches in gradients.items()}
        return [
            tuple(sorted(Event(q[m], k, batches[m]) for k, batches in columns.items() if batches[m] and count[m]))
            for m in range(len(count))
        ]

    return None if profile.per_round is None else events(profile.per_round), events(profile.per_personalization)


def _declared(algorithm: AnyAlgorithm, count: Tensor) -> PrivacyProfile:
    profile = privacy_profile(algorithm, count)
    if profile is None or profile.impossible:
        raise ConfigError(f"{type(algorithm).__name__} has no privacy profile that an epsilon could be computed from")
    return profile


def _in_words(events: Events) -> str:
    return " and ".join(f"{e.gradients} on each of {e.batches} batches" for e in events) or "none"
