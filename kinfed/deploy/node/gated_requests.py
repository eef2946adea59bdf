"""Requests of training and evaluation at the gate, from when they are read until their answers have left.

A request under differential privacy is held against the owner's budget, gets noise and samples of its own, and is
entered in the ledger before its answer is kept or leaves (kinfed.deploy.node.gate says by which rules).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.core import storage
from kinfed.data import SPLITS, Cohort, Split
from kinfed.deploy.node.gate import LARGEST_LOSS, SPARE_BYTES, Gate, Released, at_rate, epsilon_with, hold
from kinfed.deploy.node.node_settings import Refused
from kinfed.deploy.node.privacy_log import HELD_OUT_ROWS, SCORES, Answered
from kinfed.deploy.node.requests import Preparation
from kinfed.deploy.node.vault_entry import VaultEntry, now
from kinfed.deploy.transport.wire import EVALUATE, EXACT, TRAIN, Arrays, Packet
from kinfed.engine import Score, Task, task_for
from kinfed.privacy import Event, Events, Privacy, PrivateTask, Record, merge, new_nonce, planned_costs


def gated_request(gate: Gate, prepared: Preparation, entry: VaultEntry, state: Mapping[str, Tensor]) -> PlainRequest:
    """The request of a client that starts from this state."""
    privacy = gate.deployment.run.privacy
    return PlainRequest(gate, prepared) if privacy is None else PrivateRequest(gate, prepared, privacy, entry, state)


@dataclass
class PlainRequest:
    """A request that is answered without privacy, from when it is read until its answer leaves."""

    gate: Gate
    prepared: Preparation

    def stored(self) -> Packet | None:
        """The answer, if it has been given before."""
        return None

    def protect(self, task: Task, cohort: Cohort) -> tuple[Task, Cohort]:
        """The task and data that the answer is computed with. In a secure sum batches are the node's secret: drawn by
        the run's seed they are the same in two runs, whose sums then differ by one client if one client differs."""
        gate, order = self.gate, self.prepared.order
        if gate.deployment.run.secure is None or not gate.algorithm.sends or self.prepared.kind != TRAIN:
            return task, cohort
        gate.check_model(storage.checksum(order.group("down")), order.require("run", str))
        draws = gate.vault.secret(gate.client).draws(bytes.fromhex(order.digest()), new_nonce())
        return task, draws.with_secret_sampling(cohort)

    def settle(self, record: Record | None) -> None:
        """Called after the answer is computed, and before anything is stored or sent."""

    def scores(self, models: Mapping[str, Tensor], split: Split) -> tuple[dict[str, Arrays], str]:
        """Figures of models on a split, by name, and on what terms they leave."""
        task, rules = self.prepared.task, self.gate.rules
        if rules.hides_client and not rules.exact_scores:
            return {}, f"the owner of {self.gate.client} keeps figures of evaluations (user_epsilon)"
        return {name: _sums(task_for(task, theta).evaluate(theta, split)) for name, theta in models.items()}, EXACT

    def keep(self, answer: Packet) -> None:
        """Store an answer that may be asked for again."""

    def leave(self, answer: Packet, rule: str) -> Released:
        """Let an answer out: the kept one, or what takes its place in a secure sum."""
        return self.gate.release(self.prepared.kind, answer, rule, self.prepared.order.require("run", str))


@dataclass
class PrivateRequest(PlainRequest):
    """Hold the lock of the client's ledger from before one is made until its answer has left."""

    privacy: Privacy
    entry: VaultEntry
    state: Mapping[str, Tensor]  # that the client starts from

    def __post_init__(self) -> None:
        prepared, client = self.prepared, self.gate.client
        self.client, self.kind, self.order, self.rules = client, prepared.kind, prepared.order, self.gate.rules
        self.log = self.gate.ledger
        self.noise = float(self.order.require("noise", float))
        self._has_price = False
        page = self.log.read()
        rows = {name: prepared.data.split(name).rows for name in SPLITS}
        roles = prepared.own.roles
        if roles is None:
            roles = "" if prepared.own.names_rows(prepared.deployment) else storage.checksum(rows)
        if roles and page.roles and roles != page.roles:
            raise Refused(
                f"{client} has trained privately with another division of its rows into training, "
                "validation and test rows; rows that training has used would be evaluated. Use the same seed, "
                "test_fraction and validation, or name the rows in the data (split in node.toml)"
            )
        self._page = self.log.note(self.rules.named(), roles or page.roles)
        self.digest = self._digest(rows)

    def _digest(self, rows: Mapping[str, Tensor]) -> str:
        """Digest of all that the answer depends on. The number of rounds is not of it: a run may be prolonged."""
        features, prepared = self.prepared.data.features, self.prepared
        scale = {"mean": features.mean, "std": features.std}
        tensors = {"raw": features.raw, "labels": prepared.data.labels, **rows}
        data = storage.checksum(tensors | {name: torch.as_tensor(t) for name, t in scale.items() if t is not None})
        run, settings = prepared.deployment.run.dump() | {"rounds": 0}, dataclasses.asdict(prepared.settings)
        parts = [self.kind, self.order.digest(), run, settings, data, storage.checksum(self.state)]
        return storage.record_digest(parts)

    # ---- the contract of a request ----

    def stored(self) -> Packet | None:
        if not self._page.knows(self.digest):
            self._check_budget(self._declared(self.kind))
            self._check_room()
            return None
        answer = self.entry.answer(self.kind, self.digest)
        if answer is None:
            raise Refused(
                f"{self.client} has answered this question before and no longer has the answer; computing "
                "it again would reveal more than epsilon says"
            )
        return answer

    def protect(self, task: Task, cohort: Cohort) -> tuple[Task, Cohort]:
        draws = self.gate.vault.secret(self.client).draws(bytes.fromhex(self.digest), new_nonce())
        return PrivateTask(task, self.privacy.clip, self.noise, draws.noise), draws.with_secret_sampling(cohort)

    def settle(self, record: Record | None) -> None:
        assert record is not None  # of a private task
        cost = at_rate(record.ledger().events_of(int(self.order.require("number", int))), self.gate.least_rate)
        if cost:  # else nothing was computed from training examples
            epsilon = self._check_budget(cost)
            self._enter(self.kind, self.noise, cost)
            if epsilon is not None:
                self.gate.spent["training"] = epsilon, self.rules.epsilon

    def scores(self, models: Mapping[str, Tensor], split: Split) -> tuple[dict[str, Arrays], str]:
        """Exact, unless the owner demands privacy: then how many rows are right and the sum of bounded losses, with
        noise, for the personal model and the server's, as long as the owner's epsilon allows it for these rows."""
        if self.rules.hides_client or not self.rules.noises_scores:
            return super().scores(models, split)
        models = {name: theta for name, theta in models.items() if not name.startswith("other.")}
        noise, cost = self.rules.evaluation_noise, (Event(1.0, 1, len(models)),)
        if not noise:
            return {}, f"the owner of {self.client} keeps figures of evaluations (evaluation_noise = 0)"
        if not math.isinf(self.rules.epsilon):
            spent = epsilon_with(self._page.spent(kinds=HELD_OUT_ROWS), noise, cost, self.rules.delta)
            if spent > self.rules.epsilon:
                return {}, f"figures would take the rows that {self.client} evaluates on beyond its owner's epsilon"
            self.gate.spent["held-out"] = spent, self.rules.epsilon
        self._enter(SCORES, noise, cost)
        draws = self.gate.vault.secret(self.client).draws(bytes.fromhex(self.digest), new_nonce())
        count = int(split.count[0])
        groups = {}
        for number, (name, theta) in enumerate(models.items()):
            sums = _bounded_sums(task_for(self.prepared.task, theta), theta, split)  # [2], each of one row at most 1
            sums = sums + math.sqrt(2) * noise * draws.noise(torch.tensor([number]), sums[None])[0]
            # Whole rows and hundredths: no digit beyond the noise leaves.
            correct, loss = sums[0].round().clamp(0, count), (100 * sums[1]).round().clamp(0, 100 * count) / 100
            groups[name] = {
                "correct": correct[None], "loss": LARGEST_LOSS * loss[None], "count": split.count.clone(),
            }  # fmt: skip
        return groups, f"noise {noise:g}"

    def keep(self, answer: Packet) -> None:
        if self._has_price:
            self.entry.keep_answer(self.kind, self.digest, answer)

    def leave(self, answer: Packet, rule: str) -> Released:
        """The ledger has the price already, or else gets the rule."""
        return Released.of(answer, f"{rule}, at a price") if self._has_price else super().leave(answer, rule)

    # ---- budget ----

    def _enter(self, kind: str, noise: float, cost: Events) -> None:
        run, round = self.order.require("run", str), self.order.require("round", int)
        self.log.enter(Answered(self.digest, run, kind, round, noise, cost, now()))
        self._has_price = True

    def _check_room(self) -> None:
        """Nothing is paid for an answer that the disk could not hold: two states, the answer, a model, the ledger."""
        state = sum(tensor.numel() * tensor.element_size() for tensor in self.state.values())
        ledger = self.log.path.stat().st_size
        self.entry.check_room(2 * state + 2 * self.order.nbytes + 2 * ledger + SPARE_BYTES)

    def _declared(self, kind: str) -> Events:
        """The most that an answer of this kind can cost, as far as the method says."""
        round, after = planned_costs(self.prepared.deployment.algorithm, self.prepared.data.train.count)
        events = round if kind == TRAIN else after
        return () if events is None else at_rate(events[0], self.gate.least_rate)

    def _check_budget(self, events: Events) -> float | None:
        """Epsilon of training rows with these events, where the owner set a limit; Refused beyond it."""
        client, rules, limit, epsilon = self.client, self.rules, self.privacy.limit, None
        if not math.isinf(rules.epsilon):
            spent, who = self._page.spent(), f"the owner of {client} allows"
            epsilon = hold(spent, self.noise, events, rules.delta, rules.epsilon, who)
        if self.kind == TRAIN and limit is not None:
            # As the server plans it: with one personal model to be made and published at the end.
            spent = self._page.spent(self.order.require("run", str), [TRAIN])
            events = merge(events, self._declared(EVALUATE))
            hold(spent, self.noise, events, self.privacy.delta, limit, f"the run promises {client}")
        return epsilon


def _sums(score: Score) -> Arrays:
    plain = {"correct": score.correct, "loss": score.loss, "count": score.count}
    errors = {} if score.error is None else {"error": score.error}
    return plain | errors | {f"sums.{name}": sums for name, sums in score.sums.items()}


@torch.no_grad()
def _bounded_sums(task: Task, theta: Tensor, split: Split) -> Tensor:
    """float64 [2]: how many rows are right, and the sum of losses in units of the largest that counts."""
    total = torch.zeros(2, dtype=torch.float64)
    for _, batch in split.in_order():
        z, here = task.logits(theta, batch.x), batch.weight > 0
        losses = task.objective.losses(z, batch.y).nan_to_num(LARGEST_LOSS, LARGEST_LOSS).clamp(0, LARGEST_LOSS)
        if task.classifies:
            total[0] += ((z.argmax(-1) == batch.y) & here).sum().cpu()
        total[1] += torch.where(here, losses, 0.0).sum().cpu() / LARGEST_LOSS
    return total
