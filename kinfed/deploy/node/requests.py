"""A request to a client as it is read: the examples as all clients have them, the model and the server's message that
the answer is computed from. kinfed.deploy.node.gate says whether it is answered, and on what terms the answer leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kinfed.config import Named, RunConfig
from kinfed.core import Tree
from kinfed.data import Cohort, Federation, Moments, TablePreprocessing
from kinfed.deploy.node.node_data import ClientData, Enrolment, load_client_data
from kinfed.deploy.node.node_settings import NodeSettings, Refused
from kinfed.deploy.node.vault_entry import VaultEntry
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.wire import MessageError, Packet, message_types, received_tensors, tree_of
from kinfed.engine import ModuleTask
from kinfed.errors import ConfigError, DataError, StorageError
from kinfed.runs import build_task

if TYPE_CHECKING:
    from kinfed.deploy.node.gate import Gate

MOST_CLIENTS, MOST_EXAMPLES = 10**7, 10**7  # that a message may speak of: some methods keep a number for each
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

    def cohort(self, round: int, effort: float = 1.0) -> Cohort:
        return self.enrolment.cohort(self.data, self.deployment.seed, round, effort)

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


def stored_state(client: Tree, moments: Moments) -> dict[str, Tensor]:
    return client.named() | {_MOMENTS + name: tensor for name, tensor in moments.named().items()}


def prepare(
    gate: Gate, kind: str, order: Packet, run: RunConfig, rows: tuple[ClientData, Federation] | None = None
) -> Preparation:
    """Read an order; Refused if the owner's rules say so. `run` has the model's files as this machine has them; `rows`
    are the client's, raw and prepared, where the order is of a part of them."""
    settings, deployment, client = gate.settings, gate.deployment, gate.client
    enrolment = enrolment_of(order)
    if rows is None:
        own = load_client_data(settings, deployment)
        rows = own, own.prepared(enrolment, deployment)
    own, data = rows
    gate.check_run(data.train.count, 0.0 if deployment.run.privacy is None else order.require("noise", float))
    task = build_task(run, data.features.shape, deployment.problem)
    if order.require("frozen", str) != task.frozen_digest():
        raise ConfigError(
            f"the node of {client} has other frozen weights in its model {run.model.name} than the server, so that "
            "nothing they exchange would fit; give both the same files (model.weights at the server, weights in "
            "node.toml)"
        )
    message, widths = message_types(deployment.algorithm)[0], order.header.get("widths")
    tensors = received_tensors(message, order.group("down"), widths if isinstance(widths, dict) else {})
    return Preparation(kind, order, settings, deployment, own, enrolment, data, task, tree_of(message, tensors))


def enrolment_of(order: Packet) -> Enrolment:
    """What an order says of the client among all."""
    inputs, longest = order.group("inputs"), order.require("longest", list)
    if len(longest) != 3 or not all(isinstance(most, int) and 0 <= most <= MOST_EXAMPLES for most in longest):
        raise MessageError(f"longest should be three numbers of examples, up to {MOST_EXAMPLES}")
    number, clients = order.require("number", int), order.require("num_clients", int)
    if not 0 <= number < clients <= MOST_CLIENTS:
        raise MessageError(f"number should be one of num_clients, of which there are {MOST_CLIENTS} at most")
    record = order.header.get("preprocessing")
    try:
        preprocessing = None if record is None else TablePreprocessing.from_json(record)
    except DataError as error:
        raise MessageError(str(error)) from None
    return Enrolment(
        number, clients, (longest[0], longest[1], longest[2]),
        order.require("group", int), inputs.get("mean"), inputs.get("std"), preprocessing,
    )  # fmt: skip


def with_weights(run: RunConfig, folder: str) -> RunConfig:
    """The run with the weights of its model in the folder that the node's owner names. A path that the run brings is
    never opened here: whether it can be read would tell what lies on this machine."""
    if folder and "weights" not in run.model.options:
        raise ConfigError(
            f"weights in node.toml says where this machine has what the deployment calls model.weights; the "
            f"deployment names none for model {run.model.name}"
        )
    return replace(run, model=Named(name=run.model.name, options=own_files(run.model.name, run.model.options, folder)))


def own_files(model: str, options: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Options of a model that a server names, with the owner's folder in place of the server's."""
    if "weights" not in options:
        return dict(options)
    if not folder:
        raise Refused(
            f"model {model[:40]} has weights in a file of the server, and a node reads none but its owner's: name "
            "the folder here (weights in node.toml)"
        )
    return {**options, "weights": folder}
