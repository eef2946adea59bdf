"""The privacy of one method under one seed: what every client's data have been asked, and who may still be asked.

Epsilon covers all gradients of a client's training data in all rounds, also those of a personal model that never leaves
the client, and those of one personalization at the end: the client may publish its model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithm import Algorithm
from kinfed.errors import CheckpointError, ConfigError
from kinfed.privacy.ledger import Event, Events, Ledger, covers
from kinfed.privacy.mechanism import EVALUATION, PrivateTask
from kinfed.privacy.settings import Privacy

Method = Algorithm[Any, Any, Any, Any]


class Accounts:
    """Opened with a private task; the server loop enters here what it does with it."""

    def __init__(
        self,
        privacy: Privacy,
        algorithm: Method,
        task: PrivateTask,
        count: Tensor,
        calls: Tensor,
        spent: Ledger | None = None,
    ) -> None:
        """`count` [K] training examples, `calls` [K] how often each client will be called as far as one can tell, and
        what was `spent` before this method began (in a warm start)."""
        self.delta = privacy.delta
        self.noise, self.clip = task.noise, task.clip
        self.limit = privacy.limit
        self.ledger = Ledger() if spent is None else spent
        self.personal = Ledger()  # of the last evaluation
        self.refused = torch.zeros(len(count), dtype=torch.bool)  # clients once called in vain
        self._algorithm = algorithm
        self._task = task
        self._round = _events(algorithm.gradients(count), algorithm, count)
        self._after = _events(algorithm.personal_gradients(count), algorithm, count)
        self._calls = calls.clone()
        self._cleared = torch.zeros(len(count), dtype=torch.int64)  # rounds that surely fit into the limit

    # ---- who may be asked ----

    def admit(self, ids: Tensor) -> Tensor:
        """Those of the clients whose budget allows one more round. Decided before the round, from what it can take at
        most; clients left out are sent nothing."""
        if self.limit is None:
            return ids
        unsure = ids[self._cleared[ids] == 0]
        if len(unsure):
            self._clear(unsure, self.limit)
        allowed = self._cleared[ids] > 0
        self.refused[ids[~allowed]] = True
        self._cleared[ids[allowed]] -= 1
        self._calls[ids[allowed]] -= 1
        return ids[allowed]

    def _clear(self, ids: Tensor, limit: float) -> None:
        from kinfed.privacy.accounting import most_rounds, together

        assert self._round is not None  # checked before the run
        assert self._after is not None
        spent = self.ledger.events(len(self.refused))
        for client in ids.tolist():
            far = max(int(self._calls[client]), 1)
            used = together(spent[client], self._after[client])
            self._cleared[client] = most_rounds(used, self._round[client], self.noise, self.delta, limit, far)

    # ---- what is asked ----

    @contextmanager
    def training(self) -> Iterator[None]:
        with self._task.recording() as record:
            yield
        asked = record.ledger()
        self._hold_against_plan(asked)
        if record.judged and not self._algorithm.leaked():
            raise ConfigError(
                f"{type(self._algorithm).__name__} judges models on a client's examples while it trains, and does not "
                "say in `leaks` what of this leaves the client; epsilon would not cover it"
            )
        self.ledger = self.ledger.join(asked)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with self._task.recording(EVALUATION) as record:
            yield
        self.personal = record.ledger()

    def _hold_against_plan(self, asked: Ledger) -> None:
        if self._round is None:
            return
        for client, events in enumerate(asked.events(len(self.refused))):
            if not covers(self._round[client], events):
                raise ConfigError(
                    f"{type(self._algorithm).__name__} computed more gradients in a round than its `gradients` says: "
                    f"{_in_words(events)} at client {client} instead of {_in_words(self._round[client])}"
                )

    # ---- what it amounts to ----

    def events(self) -> list[Events]:
        """Of every client, were it to publish its personal model now."""
        return self.ledger.join(self.personal).events(len(self.refused))

    def epsilon(self) -> list[float]:
        from kinfed.privacy.accounting import epsilon

        return [epsilon(events, self.noise, self.delta) for events in self.events()]

    def largest_epsilon(self) -> float:
        from kinfed.privacy.accounting import largest

        return largest(self.events(), self.noise, self.delta)

    def figures(self) -> dict[str, Any]:
        """For the journal."""
        return {"epsilon_max": self.largest_epsilon(), "refused": int(self.refused.sum())}

    def summary(self, names: list[str]) -> dict[str, Any]:
        """For the summary; an epsilon that is not finite stands as null."""
        from kinfed.privacy.accounting import largest, renyi_epsilon

        each = self.epsilon()
        return {
            "noise": self.noise, "clip": self.clip, "delta": self.delta, "limit": self.limit,
            "epsilon_max": max(each), "epsilon_mean": sum(each) / len(each), "epsilon": each,
            "epsilon_max_rdp": largest(self.events(), self.noise, self.delta, renyi_epsilon),
            "refused": [names[k] for k in self.refused.nonzero().squeeze(1).tolist()],
            "not_covered": list(self._algorithm.leaked()),
        }  # fmt: skip

    # ---- for a checkpoint ----

    def named(self) -> dict[str, Tensor]:
        return self.ledger.named() | {"cleared": self._cleared, "calls": self._calls, "refused": self.refused}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.ledger = Ledger.load(tensors)
        for name, mine in (("cleared", self._cleared), ("calls", self._calls), ("refused", self.refused)):
            if name not in tensors or tensors[name].shape != mine.shape:
                raise CheckpointError(f"the checkpoint has no record of clients' privacy ({name}) that fits this run")
            mine.copy_(tensors[name])


def _events(gradients: dict[int, Tensor] | None, algorithm: Method, count: Tensor) -> list[Events] | None:
    """[K] what a round asks of each client at most; None where there is no bound."""
    if gradients is None:
        return None
    q = (algorithm.work.batch / count.to(torch.float64)).clamp_max(1.0).tolist()
    columns = {k: batches.tolist() for k, batches in gradients.items()}
    return [
        tuple(sorted(Event(q[m], k, batches[m]) for k, batches in columns.items() if batches[m] and count[m]))
        for m in range(len(count))
    ]


def _in_words(events: Events) -> str:
    return " and ".join(f"{e.gradients} on each of {e.batches} batches" for e in events) or "none"
