"""What a client computes an answer from: its examples as all clients have them, the model, and the server's message."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from torch import Tensor

from kinfed.config import Named, RunConfig
from kinfed.core import Tree
from kinfed.data import Cohort, Federation, TablePreprocessing
from kinfed.deploy.node.node_data import ClientData, Enrolment, load_client_data
from kinfed.deploy.node.node_settings import NodeSettings
from kinfed.deploy.node.requests import PlainQuestion, PrivateQuestion
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.node.vault_entry import VaultEntry
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.wire import MessageError, Packet, message_types, received_tensors, tree_of
from kinfed.engine import ModuleTask
from kinfed.errors import ConfigError, DataError
from kinfed.runs import build_task


@dataclass(frozen=True)
class Preparation:
    kind: str  # of the question
    order: Packet
    settings: NodeSettings
    deployment: Deployment
    vault: Vault
    own: ClientData
    enrolment: Enrolment
    data: Federation  # scaled as all are, with validation examples
    task: ModuleTask
    down: Tree

    def cohort(self, round: int, effort: float = 1.0) -> Cohort:
        return self.enrolment.cohort(self.data, self.deployment.seed, round, effort)

    def books_locked(self) -> AbstractContextManager[None]:
        private = self.deployment.run.privacy is not None
        return self.vault.books(self.settings.client).locked() if private else nullcontext()

    def question(self, entry: VaultEntry, state: Mapping[str, Tensor]) -> PlainQuestion:
        privacy = self.deployment.run.privacy
        if privacy is None:
            return PlainQuestion()
        return PrivateQuestion(
            self.kind, self.order, self.settings, self.settings.rules, self.deployment, privacy, self.data,
            self.own.names_rows(self.deployment), state, self.vault, entry,
        )  # fmt: skip


def prepare(
    kind: str, order: Packet, settings: NodeSettings, deployment: Deployment, run: RunConfig, vault: Vault
) -> Preparation:
    """Refused where the owner's rules say so. `run` is the deployment's, with the model's files as this machine has
    them."""
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
    return Preparation(kind, order, settings, deployment, vault, own, enrolment, data, task, tree_of(message, tensors))


def with_weights(run: RunConfig, folder: str) -> RunConfig:
    """The run with the weights of its model in another folder."""
    if "weights" not in run.model.options:
        raise ConfigError(
            f"weights in --node-config says where this machine has what the deployment calls model.weights; the "
            f"deployment names none for model {run.model.name}"
        )
    model = Named(name=run.model.name, options={**run.model.options, "weights": folder})
    return replace(run, model=model)


def _enrolment(order: Packet) -> Enrolment:
    inputs, longest = order.group("inputs"), order.require("longest", list)
    if len(longest) != 3 or not all(isinstance(most, int) and 0 <= most < 2**40 for most in longest):
        raise MessageError("longest should be three numbers of examples")
    return Enrolment(
        order.require("number", int), order.require("num_clients", int), (longest[0], longest[1], longest[2]),
        order.require("group", int), inputs.get("mean"), inputs.get("std"), _preprocessing(order),
    )  # fmt: skip


def _preprocessing(order: Packet) -> TablePreprocessing | None:
    """What the columns of tables become, where the server has learnt it."""
    record = order.header.get("preprocessing")
    if record is None:
        return None
    try:
        return TablePreprocessing.from_json(record)
    except DataError as error:
        raise MessageError(str(error)) from None
