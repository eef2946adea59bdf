"""A question to a client, from when it is read until its answer may leave.

Without privacy nothing happens to it. Under differential privacy

  * noise and samples are drawn for this answer alone: from the client's secret, a digest of all that the answer depends
    on (the order, the run's settings, the node's settings, data and state) and random bytes that are then forgotten;
  * what it costs is held against the owner's budget before anything is computed, and is in the books, on the disk,
    before anything is kept or leaves;
  * the answer is kept. The same question again, after an answer was lost on the way, gets that answer and costs
    nothing; once a later answer has taken its place, the question is refused. It never gets noise anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms import AnyAlgorithm, privacy_profile
from kinfed.core import storage
from kinfed.data import SPLITS, Cohort, Federation
from kinfed.deploy.node.node_settings import NodeSettings
from kinfed.deploy.node.owner_policy import NodeRules, Refused
from kinfed.deploy.node.privacy_log import Answered, ByNoise, Page, now
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.node.vault_entry import VaultEntry
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.wire import Packet
from kinfed.engine import Task
from kinfed.privacy import Events, Privacy, PrivateTask, Record, merge, new_nonce, planned_events

HELLO, SUMS, TRAIN, EVALUATE = "hello", "sums", "train", "evaluate"
SECURE_KINDS = SHARE, MASK, CONFIRM, UNMASK = "share", "mask", "confirm", "unmask"  # of secure sums, after training


class PlainQuestion:
    """A question that is answered without privacy."""

    def stored(self) -> Packet | None:
        """The answer, where it has been given before."""
        return None

    def protect(self, task: Task, cohort: Cohort) -> tuple[Task, Cohort]:
        """The task and data that the answer is computed with."""
        return task, cohort

    def settle(self, record: Record | None) -> None:
        """Called after the answer is computed, and before anything is stored or sent."""

    def keep(self, answer: Packet) -> Packet:
        """The answer, which may now leave."""
        return answer


@dataclass
class PrivateQuestion(PlainQuestion):
    """Hold the lock of the client's books from before one is made until its answer is kept."""

    kind: str
    order: Packet
    settings: NodeSettings
    rules: NodeRules
    deployment: Deployment
    privacy: Privacy
    data: Federation  # as training sees it
    names_rows: bool  # the node says itself which rows are for training, validation and test
    state: Mapping[str, Tensor]  # that the client starts from
    vault: Vault
    entry: VaultEntry

    def __post_init__(self) -> None:
        self.books = self.vault.books(self.settings.client)
        self.noise = float(self.order.require("noise", float))
        self._cost: Events = ()
        page = self.books.read()
        roles = "" if self.names_rows else _roles_digest(self.data)
        if roles and page.roles and roles != page.roles:
            raise Refused(
                f"{self.settings.client} has trained privately with another division of its rows into training, "
                "validation and test rows; rows that training has used would be evaluated. Use the same seed, "
                "test_fraction and validation, or name the rows in the data (split in --node-config)"
            )
        self._page = self.books.note(self.rules.named(), roles or page.roles)
        self.digest = self._digest()

    # ---- the contract of a question ----

    def stored(self) -> Packet | None:
        if not self._page.knows(self.digest):
            self._check_budget(self._page, self._planned())
            return None
        answer = self.entry.answer(self.kind, self.digest)
        if answer is None:
            raise Refused(
                f"{self.settings.client} has answered this question before and no longer has the answer; computing "
                "it again would reveal more than epsilon says"
            )
        return answer

    def protect(self, task: Task, cohort: Cohort) -> tuple[Task, Cohort]:
        draws = self.vault.secret(self.settings.client).draws(bytes.fromhex(self.digest), new_nonce())
        return PrivateTask(task, self.privacy.clip, self.noise, draws.noise), draws.with_secret_sampling(cohort)

    def settle(self, record: Record | None) -> None:
        assert record is not None  # of a private task
        number = int(self.order.require("number", int))
        self._cost = record.ledger().events(number + 1)[number]
        if not self._cost:
            return  # nothing was computed from training examples
        self._check_budget(self._page, self._cost)
        run, round = self.order.require("run", str), self.order.require("round", int)
        self.books.enter(Answered(self.digest, run, self.kind, round, self.noise, self._cost, now()))

    def keep(self, answer: Packet) -> Packet:
        if self._cost:
            self.entry.keep_answer(self.kind, self.digest, answer)
        return answer

    # ---- budget ----

    def _planned(self) -> Events:
        """The most that the answer can cost, as far as the method says."""
        return _declared(self.deployment.algorithm, self.data.train.count, self.kind)

    def _check_budget(self, page: Page, events: Events) -> None:
        client, limit = self.settings.client, self.privacy.limit
        if not math.isinf(self.rules.epsilon):
            self._hold(page.spent(), events, self.rules.delta, self.rules.epsilon, f"the owner of {client} allows")
        if self.kind == TRAIN and limit is not None:
            # As the server plans it: with one personal model to be made and published at the end.
            after = _declared(self.deployment.algorithm, self.data.train.count, EVALUATE)
            spent = page.spent(self.order.require("run", str), TRAIN)
            self._hold(spent, merge(events, after), self.privacy.delta, limit, f"the run promises {client}")

    def _hold(self, spent: ByNoise, events: Events, delta: float, limit: float, who: str) -> None:
        from kinfed.privacy import epsilon_over_noises

        by_noise = dict(spent)
        by_noise[self.noise] = merge(by_noise.get(self.noise, ()), events)
        epsilon = epsilon_over_noises(tuple(sorted(by_noise.items())), delta)
        if epsilon > limit:
            raise Refused(
                f"{who} no more than epsilon {limit:g} (delta {delta:g}), and an answer would take it to {epsilon:g}; "
                "nothing was sent"
            )

    # ---- identity ----

    def _digest(self) -> str:
        """Of all that the answer depends on. How many rounds there will be is not of it: a run may be prolonged."""
        run = self.deployment.run.dump() | {"rounds": 0}
        settings, data, state = dataclasses.asdict(self.settings), _data_digest(self.data), storage.checksum(self.state)
        parts = [self.kind, self.order.digest(), run, settings, data, state]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _declared(algorithm: AnyAlgorithm, count: Tensor, kind: str) -> Events:
    profile = privacy_profile(algorithm, count)
    assert profile is not None  # checked by the rules
    gradients = profile.per_round if kind == TRAIN else profile.per_personalization
    events = planned_events(gradients, algorithm, count)
    return () if events is None else events[0]


def _roles_digest(data: Federation) -> str:
    return storage.checksum({name: data.split(name).rows for name in SPLITS})


def _data_digest(data: Federation) -> str:
    rows = {name: data.split(name).rows for name in SPLITS}
    scale = {"mean": data.features.mean, "std": data.features.std}
    tensors = {"raw": data.features.raw, "labels": data.labels, **rows}
    return storage.checksum(tensors | {name: torch.as_tensor(t) for name, t in scale.items() if t is not None})
