"""What a node does when the server asks: say whose it is, add to common sums, train a round, evaluate.

A node trusts nothing but the numbers in a message, and sends nothing but what the method declares in its Up. Its
personal state stays in the vault (kinfed.deploy.vault); which of the last two states a round starts from, the server
says by naming the last round of this client that counted. So a round that was lost on the way, came too late, was
rejected or is repeated after a restart leaves no trace in what follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms.base import deployed_models
from kinfed.core.loop_memory import LoopMemory, Moments
from kinfed.core.tree import Tree
from kinfed.data.federation import SPLITS, Cohort, with_memory
from kinfed.deploy.node_data import ClientData, Enrolment, NodeSettings, load_client_data
from kinfed.deploy.settings import Deployment
from kinfed.deploy.vault import Vault, VaultEntry
from kinfed.deploy.wire import MessageError, Packet, message_types, tree_of
from kinfed.engine.mixture import module_for, task_for
from kinfed.engine.models import build_model
from kinfed.engine.task import ModuleTask, Score, Task, make_task
from kinfed.errors import ConfigError, StorageError
from kinfed.privacy.dpsgd import EVALUATION, TRAINING, PrivateTask, Record, recorded
from kinfed.runs.export import inputs_metadata

_MOMENTS = "optimizer/"  # before names of moments in the vault; no field of a state has such a name
HELLO, SUMS, TRAIN, EVALUATE = "hello", "sums", "train", "evaluate"


class Node:
    """A supernode with one client or several. A new one is made for every message: all memory is in the vaults."""

    def __init__(self, clients: Mapping[str, NodeClient]) -> None:
        self.clients = clients

    @classmethod
    def of(cls, node_config: Mapping[str, Any], run_config: Mapping[str, Any]) -> Node:
        deployment = Deployment.parse(run_config)
        return cls({one.client: NodeClient(one, deployment) for one in NodeSettings.parse_all(node_config)})

    def answer(self, kind: str, order: Packet) -> Packet:
        if kind == HELLO:
            return Packet({"clients": [client.hello() for client in self.clients.values()]})
        name = order.require("name", str)
        if name not in self.clients:
            raise MessageError(
                f"a message for client {name!r} has come to the node of {', '.join(self.clients)}; nothing was done"
            )
        client = self.clients[name]
        return {SUMS: client.sums, TRAIN: client.train, EVALUATE: client.evaluate}[kind](order)


class NodeClient:
    """One client at a node."""

    def __init__(self, settings: NodeSettings, deployment: Deployment) -> None:
        self.settings, self.deployment = settings, deployment
        self.algorithm = deployment.algorithm
        self.vault = Vault(settings.vault)
        torch.set_num_threads(int(settings.threads))

    def hello(self) -> dict[str, Any]:
        """Who this is and the shape of its data: counts, not contents."""
        own = load_client_data(self.settings, self.deployment)
        federation = own.prepared(Enrolment(0, 1, (0, 0, 0)), self.deployment)
        features = own.federation.features
        return {
            "name": self.settings.client, "group": self.settings.group, "columns": own.columns,
            "counts": [int(federation.split(name).count[0]) for name in SPLITS], "shape": list(features.shape),
            "rows": int(own.federation.train.count[0]), "tokens": features.is_tokens,
        }  # fmt: skip

    def sums(self, order: Packet) -> Packet:
        """This client's part of the mean of every feature or, given that mean, of the variance."""
        own = load_client_data(self.settings, self.deployment)
        return Packet({"name": self.settings.client}, {"sums": {"total": own.sums(order.group("sums").get("mean"))}})

    def train(self, order: Packet) -> Packet:
        """A round. The new state is in the vault before the update leaves."""
        round, accepted = order.require("round", int), order.require("accepted", int)
        own, enrolment, task = self._prepare(order)
        data = own.prepared(enrolment, self.deployment)
        cohort = enrolment.cohort(data, self.deployment.seed, round, order.require("effort", float))
        cohort = self._with_secret_sampling(cohort)
        down = tree_of(message_types(self.algorithm)[0], order.group("down"))
        entry = self._entry(order)
        with entry.locked():
            client, moments, lost = self._state(entry, accepted, task, enrolment.cohort(data, self.deployment.seed, 0))
            memory = LoopMemory(1, moments) if self.algorithm.training.optimizer_state == "kept" else None
            with recorded(task, TRAINING) as record:
                client, up = self.algorithm.client_update(task, client, down, with_memory(cohort, memory))
            moments = Moments() if memory is None else memory.moments
            header = self._reply_header(order) | {"lost": lost, "gradients": _gradient_counts(record)}
            for what, tree in (("update", up), ("new state", client), ("optimizer", moments)):
                if not bool(tree.finite_rows(1).all()):
                    return Packet(header | {"refused": f"its {what} is not finite"})
            kept = {_MOMENTS + name: tensor for name, tensor in moments.named().items()}
            entry.keep(round, client.named() | kept, accepted, self.deployment.method)
        return Packet(header, {"up": up.named()})

    def evaluate(self, order: Packet) -> Packet:
        """The personal model on the client's own held-out examples; it is kept in the vault, ready to use."""
        round, accepted = order.require("round", int), order.require("accepted", int)
        split = order.require("split", str)
        if split not in SPLITS:
            raise MessageError(f"a split is one of {', '.join(SPLITS)}; the message asks for {split!r}")
        own, enrolment, task = self._prepare(order)
        data = own.prepared(enrolment, self.deployment)
        cohort = self._with_secret_sampling(enrolment.cohort(data, self.deployment.seed, round))
        down = tree_of(message_types(self.algorithm)[0], order.group("down"))
        entry, algorithm = self._entry(order), self.algorithm
        with entry.locked():
            client, _, lost = self._state(entry, accepted, task, enrolment.cohort(data, self.deployment.seed, 0))
            with recorded(task, EVALUATION) as record:
                (_, theta), *others = deployed_models(
                    algorithm, task, client, down, cohort, trained=torch.tensor([accepted > 0 and not lost]),
                    server_model=order.group("server_model").get("model"),
                ).items()  # fmt: skip
            if not bool(torch.isfinite(theta).all()):
                raise ConfigError(
                    f"the personal model of {self.settings.client} holds NaN or infinity; it was not kept"
                )
            self._keep_model(entry, task, theta[0], round, enrolment, own)
        part = getattr(cohort, split)
        scores = {"personal": task_for(task, theta).score(theta, part)}
        if "model" in order.group("server_model"):
            scores["server_model"] = task.score(order.group("server_model")["model"], part)
        scores |= {f"other.{name}": task_for(task, model).score(model, part) for name, model in others}
        groups = {name: _score(score) for name, score in scores.items()}
        groups["figures"] = dict(algorithm.client_figures(client))
        return Packet(self._reply_header(order) | {"lost": lost, "gradients": _gradient_counts(record)}, groups)

    def _reply_header(self, order: Packet) -> dict[str, Any]:
        """By which the server knows what this is an answer to."""
        return {key: order.header.get(key) for key in ("run", "round", "number", "kind")} | {
            "name": self.settings.client
        }

    def _prepare(self, order: Packet) -> tuple[ClientData, Enrolment, Task]:
        own = load_client_data(self.settings, self.deployment)
        inputs = order.group("inputs")
        longest = order.require("longest", list)
        enrolment = Enrolment(
            order.require("number", int), order.require("num_clients", int), (longest[0], longest[1], longest[2]),
            order.require("group", int), inputs.get("mean"), inputs.get("std"),
        )  # fmt: skip
        shape, model = own.federation.features.shape, self.deployment.run.model
        classes = len(self.deployment.class_names)
        task: Task = make_task(lambda: build_model(model.name, shape, classes, model.options))
        return own, enrolment, self._private(task, order)

    def _private(self, task: Task, order: Packet) -> Task:
        """The task with this node's own noise, where the deployment is private."""
        privacy, minimum = self.deployment.run.privacy, float(self.settings.min_noise)
        noise = order.require("noise", float) if privacy is not None else 0.0
        if privacy is not None and privacy.noise is not None:
            minimum = max(minimum, privacy.noise)
        if noise < minimum:
            raise ConfigError(
                f"{self.settings.client} trains with noise of at least {minimum:g} only, and the server asks for "
                f"{noise:g}; nothing was computed"
            )
        if privacy is None:
            return task
        return PrivateTask(task, privacy.clip, noise, self.vault.secret(self.settings.client).noise)

    def _with_secret_sampling(self, cohort: Cohort) -> Cohort:
        if self.deployment.run.privacy is None:
            return cohort
        return self.vault.secret(self.settings.client).with_secret_sampling(cohort)

    def _entry(self, order: Packet) -> VaultEntry:
        return self.vault.entry(order.require("run", str), self.settings.client)

    def _state(self, entry: VaultEntry, accepted: int, task: Task, cohort: Cohort) -> tuple[Tree, Moments, bool]:
        """The state after the last round that counted, with the moments of local optimizers that belong to it; a new
        one, and True, where the vault has lost it."""
        fresh: Tree = self.algorithm.init_client(task, cohort)
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

    def _keep_model(
        self, entry: VaultEntry, task: Task, row: Tensor, round: int, enrolment: Enrolment, own: ClientData
    ) -> None:
        plain = task.inner if isinstance(task, PrivateTask) else task
        assert isinstance(plain, ModuleTask)
        model = self.deployment.run.model
        metadata = {
            "client": entry.client, "run": entry.run, "algorithm": self.deployment.method, "round": str(round),
            "seed": str(self.deployment.seed), "model": model.name,
            "inputs": inputs_metadata(
                own.federation.features.shape, own.federation.features.is_tokens, enrolment.mean, enrolment.std,
                own.columns or None, self.deployment.class_names, model.options,
            ),
        }  # fmt: skip
        entry.keep_model(module_for(plain, row.detach()).state_dict(), metadata)


def _score(score: Score) -> dict[str, Tensor]:
    return {"correct": score.correct, "loss": score.loss, "count": score.count}


def _gradient_counts(record: Record | None) -> list[list[float]]:
    """[q, gradients on each sample, samples] of what this client's data were asked. Keys of samples stay: they come
    from the secret."""
    if record is None:
        return []
    return [[q, gradients, samples] for (_, q, gradients), samples in sorted(record.ledger().batches.items())]
