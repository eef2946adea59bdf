"""A request to a client, from when it is read until its answer may leave: the examples as all clients have them, the
model and the server's message that the answer is computed from, and what privacy asks of it.

Without privacy nothing happens to the answer. Under differential privacy

  * noise and samples are drawn for this answer alone: from the client's secret, a digest of all that the answer depends
    on (the order, the run's settings, the node's settings, data and state) and random bytes that are then forgotten;
  * its cost is held against the owner's budget before anything is computed, and is in the privacy log, on the disk,
    before anything is kept or leaves;
  * the answer is kept. The same request again, after an answer was lost on the way, gets that answer and costs
    nothing; once a later answer has taken its place, the request is refused. It never gets noise anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kinfed.config import Named, RunConfig
from kinfed.core import Tree, storage
from kinfed.data import SPLITS, Cohort, Federation, Moments, TablePreprocessing
from kinfed.deploy.node.node_data import ClientData, Enrolment, load_client_data
from kinfed.deploy.node.node_settings import NodeSettings, Refused
from kinfed.deploy.node.privacy_log import Answered, ByNoise
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.node.vault_entry import VaultEntry, now
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.wire import EVALUATE, TRAIN, MessageError, Packet, message_types, received_tensors, tree_of
from kinfed.engine import ModuleTask, Task
from kinfed.errors import ConfigError, DataError, StorageError
from kinfed.privacy import Events, Privacy, PrivateTask, Record, merge, new_nonce, planned_costs
from kinfed.runs import build_task

_MOMENTS = "optimizer/"  # before names of moments in the vault; no field of a state has such a name


@dataclass(frozen=True)
class Preparation:
    kind: str  # of the request
    order: Packet
    settings: NodeSettings
    deployment: Deployment
    own: ClientData
    enrolment: Enrolment
    data: Federation  # scaled as all are, with validation examples
    task: ModuleTask
    down: Tree

    @property
    def vault(self) -> Vault:
        return Vault(self.settings.vault)

    def cohort(self, round: int, effort: float = 1.0) -> Cohort:
        return self.enrolment.cohort(self.data, self.deployment.seed, round, effort)

    def log_locked(self) -> AbstractContextManager[None]:
        private = self.deployment.run.privacy is not None
        return self.vault.privacy_log(self.settings.client).locked() if private else nullcontext()

    def state(self, entry: VaultEntry, accepted: int) -> tuple[Tree, Moments, bool]:
        """State and moments after the last round that counted; new ones, and True, if the vault has lost them."""
        fresh: Tree = self.deployment.algorithm.init_client(self.task, self.cohort(0))
        if accepted == 0:
            return fresh, Moments(), False
        stored = entry.state(accepted)
        if stored is None:
            return fresh, Moments(), True
        moments = {name.removeprefix(_MOMENTS): t for name, t in stored.items() if name.startswith(_MOMENTS)}
        state = {name: tensor for name, tensor in stored.items() if not name.startswith(_MOMENTS)}
        expected = fresh.named()
        if state.keys() != expected.keys() or any(
            state[name].shape != t.shape or state[name].dtype != t.dtype for name, t in expected.items()
        ):
            raise StorageError(
                f"the state of {entry.client} in {entry.folder} does not fit this method and model; another version of "
                "the data or of kinfed made it"
            )
        return fresh.like(state), Moments(moments), False

    def request(self, entry: VaultEntry, state: Mapping[str, Tensor]) -> PlainRequest:
        """The request of a client that starts from this state."""
        privacy = self.deployment.run.privacy
        return PlainRequest() if privacy is None else PrivateRequest(self, privacy, entry, state)


def stored_state(client: Tree, moments: Moments) -> dict[str, Tensor]:
    return client.named() | {_MOMENTS + name: tensor for name, tensor in moments.named().items()}


def prepare(kind: str, order: Packet, settings: NodeSettings, deployment: Deployment, run: RunConfig) -> Preparation:
    """Read an order; Refused if the owner's rules say so. `run` has the model's files as this machine has them."""
    own, client, rules = load_client_data(settings, deployment), settings.client, settings.rules
    enrolment = _enrolment(order)
    data = own.prepared(enrolment, deployment)
    noise = 0.0 if deployment.run.privacy is None else order.require("noise", float)
    rules.check_method(client, deployment, deployment.algorithm, data.train.count)
    rules.check_noise(client, deployment, noise)
    task = build_task(run, data.features.shape, deployment.problem)
    if order.require("frozen", str) != task.frozen_digest():
        raise ConfigError(
            f"the node of {client} has other frozen weights in its model {run.model.name} than the server, so that "
            "nothing they exchange would fit; give both the same files (model.weights at the server, weights in "
            "--node-config)"
        )
    message, widths = message_types(deployment.algorithm)[0], order.header.get("widths")
    tensors = received_tensors(message, order.group("down"), widths if isinstance(widths, dict) else {})
    return Preparation(kind, order, settings, deployment, own, enrolment, data, task, tree_of(message, tensors))


def _enrolment(order: Packet) -> Enrolment:
    inputs, longest = order.group("inputs"), order.require("longest", list)
    if len(longest) != 3 or not all(isinstance(most, int) and 0 <= most < 2**40 for most in longest):
        raise MessageError("longest should be three numbers of examples")
    record = order.header.get("preprocessing")
    try:
        preprocessing = None if record is None else TablePreprocessing.from_json(record)
    except DataError as error:
        raise MessageError(str(error)) from None
    return Enrolment(
        order.require("number", int), order.require("num_clients", int), (longest[0], longest[1], longest[2]),
        order.require("group", int), inputs.get("mean"), inputs.get("std"), preprocessing,
    )  # fmt: skip


def with_weights(run: RunConfig, folder: str) -> RunConfig:
    """The run with the weights of its model in another folder."""
    if "weights" not in run.model.options:
        raise ConfigError(
            f"weights in --node-config says where this machine has what the deployment calls model.weights; the "
            f"deployment names none for model {run.model.name}"
        )
    return replace(run, model=Named(name=run.model.name, options={**run.model.options, "weights": folder}))


class PlainRequest:
    """A request that is answered without privacy."""

    def stored(self) -> Packet | None:
        """The answer, if it has been given before."""
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
class PrivateRequest(PlainRequest):
    """Hold the lock of the client's privacy log from before one is made until its answer is kept."""

    prepared: Preparation
    privacy: Privacy
    entry: VaultEntry
    state: Mapping[str, Tensor]  # that the client starts from

    def __post_init__(self) -> None:
        prepared, client = self.prepared, self.prepared.settings.client
        self.client, self.kind, self.order, self.rules = client, prepared.kind, prepared.order, prepared.settings.rules
        self.log = prepared.vault.privacy_log(client)
        self.noise = float(self.order.require("noise", float))
        self._cost: Events = ()
        page = self.log.read()
        rows = {name: prepared.data.split(name).rows for name in SPLITS}
        roles = "" if prepared.own.names_rows(prepared.deployment) else storage.checksum(rows)
        if roles and page.roles and roles != page.roles:
            raise Refused(
                f"{client} has trained privately with another division of its rows into training, "
                "validation and test rows; rows that training has used would be evaluated. Use the same seed, "
                "test_fraction and validation, or name the rows in the data (split in --node-config)"
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
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    # ---- the contract of a request ----

    def stored(self) -> Packet | None:
        if not self._page.knows(self.digest):
            self._check_budget(self._declared(self.kind))
            return None
        answer = self.entry.answer(self.kind, self.digest)
        if answer is None:
            raise Refused(
                f"{self.client} has answered this question before and no longer has the answer; computing "
                "it again would reveal more than epsilon says"
            )
        return answer

    def protect(self, task: Task, cohort: Cohort) -> tuple[Task, Cohort]:
        draws = self.prepared.vault.secret(self.client).draws(bytes.fromhex(self.digest), new_nonce())
        return PrivateTask(task, self.privacy.clip, self.noise, draws.noise), draws.with_secret_sampling(cohort)

    def settle(self, record: Record | None) -> None:
        assert record is not None  # of a private task
        number = int(self.order.require("number", int))
        self._cost = record.ledger().events(number + 1)[number]
        if not self._cost:
            return  # nothing was computed from training examples
        self._check_budget(self._cost)
        run, round = self.order.require("run", str), self.order.require("round", int)
        self.log.enter(Answered(self.digest, run, self.kind, round, self.noise, self._cost, now()))

    def keep(self, answer: Packet) -> Packet:
        if self._cost:
            self.entry.keep_answer(self.kind, self.digest, answer)
        return answer

    # ---- budget ----

    def _declared(self, kind: str) -> Events:
        """The most that an answer of this kind can cost, as far as the method says."""
        round, after = planned_costs(self.prepared.deployment.algorithm, self.prepared.data.train.count)
        events = round if kind == TRAIN else after
        return () if events is None else events[0]

    def _check_budget(self, events: Events) -> None:
        client, rules, limit = self.client, self.rules, self.privacy.limit
        if not math.isinf(rules.epsilon):
            self._hold(self._page.spent(), events, rules.delta, rules.epsilon, f"the owner of {client} allows")
        if self.kind == TRAIN and limit is not None:
            # As the server plans it: with one personal model to be made and published at the end.
            spent = self._page.spent(self.order.require("run", str), TRAIN)
            events = merge(events, self._declared(EVALUATE))
            self._hold(spent, events, self.privacy.delta, limit, f"the run promises {client}")

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
