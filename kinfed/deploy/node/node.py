"""A node's answers to the server: its clients, common sums, a round of training, an evaluation.

A node trusts nothing but the numbers in a message, and sends nothing but what the method declares in its Up. Its
personal state stays in the vault (kinfed.deploy.node.vault); which of the last two states a round starts from, the
server says by naming the last round of this client that counted. So a round that was lost on the way, came too late,
was rejected or is repeated after a restart leaves no trace in what follows.

Nothing leaves but through the gate (kinfed.deploy.node.gate), not even the text of an error, which may quote examples:
the settings of a run could name a column as the label, and read it value by value in sentences about unknown classes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kinfed.algorithms import averaged_rows, deployed_models
from kinfed.core import storage
from kinfed.data import SPLITS, LoopMemory, Moments, with_memory
from kinfed.deploy.node.gate import Gate, Released, Withheld, error_outside
from kinfed.deploy.node.gated_requests import gated_request
from kinfed.deploy.node.node_data import load_client_data
from kinfed.deploy.node.node_settings import NodeSettings, Refused
from kinfed.deploy.node.requests import Preparation, prepare, stored_state, with_weights
from kinfed.deploy.node.vault_entry import VaultEntry
from kinfed.deploy.operations.audit_log import LEFT, REFUSED
from kinfed.deploy.operations.checks import version_advice
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport import wire
from kinfed.deploy.transport.wire import (
    MessageError,
    Packet,
    message_types,
    plain_text,
    sent_tensors,
    tree_of,
    unbundled,
)
from kinfed.engine import module_for
from kinfed.errors import ConfigError, KinfedError
from kinfed.privacy import EVALUATION, TRAINING, Record, new_nonce, recorded
from kinfed.serving import ModelInputs
from kinfed.updates import SecureSum, user_level
from kinfed.version import __version__

if TYPE_CHECKING:
    from kinfed.deploy.secure.secure_session import SecureSession

SERVER_NAME = "KINFED_SERVER"  # the variable with the server's address, which the audit log names


LONGEST_RUN = 100  # characters of a run's name, which is in names of files, and in the ledger for good


class Node:
    """A supernode with one client or several. A new one is made for every message: all memory is in the vaults."""

    def __init__(self, clients: Mapping[str, NodeClient], number: int) -> None:
        self.clients, self.number = clients, number

    @classmethod
    def of(cls, node_config: Mapping[str, Any], run_config: Mapping[str, Any], number: int = 0) -> Node:
        """`number`: the one under which the transport knows this node."""
        deployment = Deployment.parse(run_config)
        kind: type[NodeClient] = NodeClient
        if deployment.search is not None:
            from kinfed.deploy.node.fit_client import FitClient as kind  # these are made of NodeClients
        elif deployment.question:
            from kinfed.deploy.node.question_client import QuestionClient as kind

        return cls({one.client: kind(one, deployment) for one in NodeSettings.parse_all(node_config)}, number)

    def answer(self, kind: str, order: Packet) -> Released:
        """The answer, or the error that takes its place; the audit logs of the clients have it before it leaves."""
        try:
            answer = self._answer(kind, order)
        except Exception as error:
            self._log_message(kind, order, {"event": REFUSED, "rule": type(error).__name__, "text": str(error)[:500]})
            raise
        rule = "; ".join(rule if times == 1 else f"{times} times {rule}" for rule, times in answer.rules.items())
        about = {"event": LEFT, "rule": rule[:500], "bytes": answer.nbytes, "content": answer.digest()}
        self._log_message(kind, order, about)
        return answer

    def _log_message(self, kind: str, order: Packet, about: Mapping[str, Any]) -> None:
        """Append a line to the log of the client of a message, or of all. What cannot be noted does not leave."""
        name = str(order.header.get("name"))
        whose = [self.clients[name]] if name in self.clients else list(self.clients.values())
        # A server's words are cut: a line that is too long to be read again would end the log.
        place: dict[str, Any] = {
            key: _short(order.header[key]) for key in ("run", "round", "split") if key in order.header
        }
        for client in whose:
            price = {"epsilon": dict(client.gate.spent)} if client.gate.spent else {}
            to = {"to": os.environ[SERVER_NAME]} if SERVER_NAME in os.environ else {}
            try:
                client.vault.audit_log(client.name).append(
                    [{"client": client.name, **place, "kind": kind, **about, **price, **to}]
                )
            except KinfedError as error:
                raise error_outside(error, client.name, client.settings.paths) from None

    def _answer(self, kind: str, order: Packet) -> Released:
        if kind == wire.HELLO:
            nonce = order.require("nonce", str)
            check_version(str(order.header.get("kinfed", "")))
            greetings = [self._passed(name, lambda client: client.hello(nonce, self.number)) for name in self.clients]
            return Released.together("clients", greetings)
        name = order.require("name", str)
        if name not in self.clients:
            everyone = ", ".join(self.clients)
            raise MessageError(f"a message for client {name!r} has reached the node of {everyone}; nothing was done")
        if kind == wire.TOGETHER:
            client = self.clients[name]
            with client.gate.released_errors():
                parts = unbundled(order)
                with client.together(parts):
                    answers = [self._part(name, part) for part in parts]
                return Released.bundled(answers)
        return self._answered(name, kind, order, alone=True)

    def _part(self, name: str, order: Packet) -> Released:
        """The answer to one of several requests; an error is of this one alone."""
        try:
            return self._answered(name, order.require("kind", str), order)
        except Exception as error:
            return Released.of_error(error)

    def _answered(self, name: str, kind: str, order: Packet, *, alone: bool = False) -> Released:
        if len(str(order.header.get("run", ""))) > LONGEST_RUN:
            raise MessageError(f"a run's name has {LONGEST_RUN} characters at most")

        def answer(client: NodeClient) -> Packet:
            with client.together([order]) if alone else nullcontext():  # the last run of a search comes by itself
                return client.answer(kind, order)

        return self._passed(name, answer)

    def _passed(self, name: str, answer: Callable[[NodeClient], Packet]) -> Released:
        """A client's answer, if it comes from the gate."""
        client = self.clients[name]
        with client.gate.released_errors():
            result = answer(client)
            if not isinstance(result, Released):
                raise Withheld(f"an answer of {name} has not passed the gate; it was not sent")
            return result


class NodeClient:
    def __init__(self, settings: NodeSettings, deployment: Deployment) -> None:
        self.settings, self.deployment, self.name = settings, deployment, settings.client
        self.algorithm, self.gate = deployment.algorithm, Gate(settings, deployment)
        self.vault = self.gate.vault
        self.run = deployment.run if deployment.question else with_weights(deployment.run, settings.weights)
        torch.set_num_threads(settings.threads)

    def answer(self, kind: str, order: Packet) -> Packet:
        if kind in wire.SECURE_KINDS:
            return self.secure_answer(kind, order)
        answers = {wire.SUMS: self.sums, wire.TRAIN: self.train, wire.EVALUATE: self.evaluate}
        if kind not in answers:
            raise MessageError(f"a request of kind {kind}; a run asks for {', '.join(answers)}")
        return answers[kind](order)

    def together(self, orders: Sequence[Packet]) -> AbstractContextManager[None]:
        """Around the answers to requests that came together."""
        return nullcontext()

    def hello(self, nonce: str, node: int) -> Packet:
        """The client's greeting, signed, with the shape of its data: counts, not contents."""
        from kinfed.deploy.transport.client_keys import sign_greeting

        greeting = {"kinfed": __version__, "name": self.name, "group": self.settings.group, **self.shape_of_data()}
        where, key = self._identity()
        return self.gate.release(wire.HELLO, Packet(sign_greeting(key, where, greeting, nonce, node)), "a greeting")

    def shape_of_data(self) -> dict[str, Any]:
        """What the greeting says of the client's data."""
        own = load_client_data(self.settings, self.deployment)
        federation, features = own.divided(own.federation, self.deployment), own.federation.features
        return {
            "columns": own.inputs, "counts": [int(federation.split(name).count[0]) for name in SPLITS],
            "shape": list(features.shape), "rows": int(own.federation.train.count[0]), "tokens": features.is_tokens,
            "own_roles": bool(own.roles),
        }  # fmt: skip

    def _identity(self) -> tuple[Path, bytes]:
        """File of the client's private key, and the key."""
        if not self.settings.key:
            return self.vault.identity(self.name)
        path = Path(self.settings.key).expanduser()
        with storage.storage_errors("read the node's key", path):
            return path, path.read_bytes()

    def sums(self, order: Packet) -> Packet:
        """This client's contribution to the common encoding and scaling: the statistics of its columns or, for arrays,
        the sum of every feature and, once the common mean is known, of squared distances from it."""
        self.gate.check_sums()
        own = load_client_data(self.settings, self.deployment)
        if own.table is not None:
            statistics = own.statistics()
            self.gate.check_categories(statistics.columns_with_categories)
            answer = Packet({"name": self.name, "statistics": statistics.to_json()})
            return self.gate.release(wire.SUMS, answer, "statistics of columns")
        answer = Packet({"name": self.name}, {"sums": {"total": own.sums(order.group("sums").get("mean"))}})
        return self.gate.release(wire.SUMS, answer, "sums of features")

    def train(self, order: Packet) -> Packet:
        """A round. The new state is in the vault before the update leaves."""
        round, accepted = order.require("round", int), order.require("accepted", int)
        effort = order.require("effort", float)
        if not 0 < effort <= 1:
            raise MessageError(f"effort is a share of the local work in (0, 1]; the message says {effort}")
        prepared, entry = self._prepare(wire.TRAIN, order), self._entry(order)
        with self.gate.locked_if_private(), entry.locked():
            self._check_order(round, entry.newest_round)
            if self.deployment.run.secure is not None:
                if (again := self._again(order, entry)) is not None:
                    return self.gate.release(wire.TRAIN, again, "keys of a secure sum", entry.run)
                self._session(order, entry).check_round(round)  # before anything is computed
            self.gate.check_share(self._share(order), entry.run)
            before = prepared.state(entry, accepted)
            client, moments, lost = before
            request = gated_request(self.gate, prepared, entry, stored_state(client, moments))
            if (answer := request.stored()) is not None:
                return request.leave(*self._sent(order, entry, answer))
            task, cohort = request.protect(prepared.task, prepared.cohort(round, effort))
            memory = LoopMemory(1, moments) if self.algorithm.training.optimizer_state == "kept" else None
            with recorded(task, TRAINING) as record:
                client, up = self.algorithm.client_update(task, client, prepared.down, with_memory(cohort, memory))
            request.settle(record)
            moments = Moments() if memory is None else memory.moments
            header = self._reply_header(order) | {"lost": lost, "gradients": _gradient_counts(record)}
            trees = {"update": up, "new state": client, "optimizer": moments}
            broken = [what for what, tree in trees.items() if not bool(tree.finite_rows(1).all())]
            if broken and self.gate.noises_update:
                # That it is not finite would tell of the data, under a model of the server's choosing.
                up, (client, moments, _) = up.map(torch.zeros_like), before
            elif broken:
                answer = Packet(header | {"refused": f"its {broken[0]} is not finite"})
                request.keep(answer)
                return request.leave(answer, "no update")
            entry.keep(round, stored_state(client, moments), accepted, self.deployment.method)
            answer = Packet(header, {"up": sent_tensors(up)})
            request.keep(answer)
            return request.leave(*self._sent(order, entry, answer))

    def _sent(self, order: Packet, entry: VaultEntry, answer: Packet) -> tuple[Packet, str]:
        """The answer to a round as it is sent, and by what rule: with the update or, for a secure sum, with keys that
        will mask it."""
        secure = self.deployment.run.secure
        if secure is None or not self.algorithm.sends or "up" not in answer.groups:
            return answer, "an update"
        averages = secure.averaged_fields(self.deployment.method, self.algorithm)
        update = tree_of(message_types(self.algorithm)[1], answer.group("up"))
        secure.check_update(self.deployment.method, self.algorithm, answer.group("up"), secure.least)
        terms = ""
        if (share := self._share(order)) is not None:
            honest = max(secure.least, self.settings.rules.least_clients) - self.settings.rules.conspirators
            noise = self.vault.secret(self.name).draws(bytes.fromhex(order.digest()), new_nonce()).whole_noise
            vector, terms = share.encode(averaged_rows(update, averages), noise, honest), share.terms
        else:
            sums = SecureSum(secure, averages, order.require("total", int))
            if sums.out_of_range(update):
                # Not by how much: a range near zero would ask every client for its largest number.
                return Packet(answer.header | {"refused": "its update holds a number beyond secure_range"}), "no update"
            vector = sums.encode(update)
        keys = self._session(order, entry).open(order, self.deployment.run, vector, terms, answer.header)
        return keys, "keys of a secure sum"

    def _share(self, order: Packet) -> user_level.Share | None:
        """What the client adds to a secure sum under user-level privacy."""
        privacy, secure = self.deployment.run.user_privacy, self.deployment.run.secure
        if privacy is None or secure is None:
            return None
        return user_level.Share.of(
            privacy, order.require("num_clients", int), order.require("user_noise", float), secure.least
        )

    def secure_answer(self, kind: str, order: Packet) -> Packet:
        """Answer a request after training, until the sum of a round is there. A masked update with a share of noise has
        its price in the ledger before it leaves."""
        entry = self._entry(order)
        with self.gate.locked_for_sum(kind), entry.locked():
            session = self._session(order, entry)
            answer = session.answer(kind, order)
            if kind == wire.MASK:
                self.gate.enter_sum(session.digest, entry.run, order.require("round", int), session.noise)
        return self.gate.release(kind, Packet(self._reply_header(order), answer.groups), "a secure sum", entry.run)

    def _again(self, order: Packet, entry: VaultEntry) -> Packet | None:
        """The keys of a secure sum that this very order has got before, where the state that it led to is kept: a
        server that stopped within a round begins it again. An order that was refused once, for its model, may have left
        its state behind, so the model is held against what other runs have summed again."""
        again = self._session(order, entry).again(order) if entry.newest_round == order.header["round"] else None
        if again is not None:
            self.gate.check_model(storage.checksum(order.group("down")), entry.run)
        return again

    def _least_in_sum(self) -> int:
        """The fewest clients in a sum that this one is in."""
        assert self.deployment.run.secure is not None
        return max(self.deployment.run.secure.least, self.settings.rules.least_clients)

    def _session(self, order: Packet, entry: VaultEntry) -> SecureSession:
        from kinfed.deploy.secure.secure_session import Owner, SecureSession

        if self.deployment.run.secure is None:
            raise Refused(f"the run declares no secure_sum, so {self.name} takes part in none")
        owner = Owner(
            order.require("number", int), self.name, self._identity(), self._least_in_sum(),
            self.deployment.secure_threshold, self.settings.peers,
        )  # fmt: skip
        return SecureSession(entry, owner)

    def evaluate(self, order: Packet) -> Packet:
        """Evaluate the personal model on the client's own held-out examples, and keep it in the vault, ready to use."""
        round, accepted = order.require("round", int), order.require("accepted", int)
        split = order.require("split", str)
        self.gate.check_split(split)
        prepared, entry = self._prepare(wire.EVALUATE, order), self._entry(order)
        with self.gate.locked_if_private(), entry.locked():
            self._check_order(round, entry.model_round)
            client, moments, lost = prepared.state(entry, accepted)
            request = gated_request(self.gate, prepared, entry, stored_state(client, moments))
            if (answer := request.stored()) is not None:
                return request.leave(answer, "the same figures again")
            task, cohort = request.protect(prepared.task, prepared.cohort(round))
            with recorded(task, EVALUATION) as record:
                models = deployed_models(
                    self.algorithm, task, client, prepared.down, cohort,
                    trained=torch.tensor([accepted > 0 and not lost]),
                    server_model=asked_server_model(order),
                )  # fmt: skip
            request.settle(record)
            theta = next(iter(models.values()))
            if bool(torch.isfinite(theta).all()):
                self.keep_model(entry, prepared, theta[0], round)
            elif not self.settings.rules.hides_client:  # else this would tell of its data, too
                raise ConfigError(f"the personal model of {self.name} holds NaN or infinity; it was not kept")
            groups, terms = request.scores(_judged_models(models, order), getattr(cohort, split))
            header = self._reply_header(order) | {"lost": lost, "gradients": _gradient_counts(record), "scores": terms}
            # In a secure sum a method's numbers of one client would tell of its training what the sum hides.
            if terms == wire.EXACT and self.deployment.run.secure is None:
                groups["figures"] = dict(self.algorithm.client_figures(client))
            answer = Packet(header, groups)
            request.keep(answer)
            return request.leave(answer, f"figures on {split} rows, {terms}")

    def _check_order(self, round: int, newest: int) -> None:
        """Refuse orders of earlier rounds: what a server sent before it died may arrive after orders of its successor,
        and the result would overwrite newer state."""
        if round < newest:
            raise Refused(
                f"{self.name} has done round {newest}, and round {round} is asked for: an old message. If "
                "the server went back by more than a round, clear the run here (kinfed vault clear) to begin anew"
            )

    def _reply_header(self, order: Packet) -> dict[str, Any]:
        """Fields that tell the server which request this answers."""
        same = {key: order.header.get(key) for key in ("run", "round", "number", "kind")}
        return same | {"name": self.name}

    def _prepare(self, kind: str, order: Packet) -> Preparation:
        return prepare(self.gate, kind, order, self.run)

    def _entry(self, order: Packet) -> VaultEntry:
        return self.vault.entry(order.require("run", str), self.name)

    def keep_model(self, entry: VaultEntry, prepared: Preparation, row: Tensor, round: int) -> None:
        model, data, enrolment = self.run.model, prepared.data, prepared.enrolment
        inputs = ModelInputs(
            data.features.shape, data.problem, data.features.is_tokens, enrolment.mean, enrolment.std,
            data.preprocessing, prepared.own.text, model.options,
        )  # fmt: skip
        metadata = {
            "algorithm": self.deployment.method, "round": str(round), "seed": str(self.deployment.seed),
            "model": model.name, "inputs": inputs.to_json(),
        }  # fmt: skip
        entry.keep_model(module_for(prepared.task, row.detach()).state_dict(), metadata)


def _short(value: Any) -> Any:
    return value if isinstance(value, int) and abs(value) < 1 << 63 else plain_text(str(value), 100)


def check_version(server: str) -> None:
    """Refuse a server of another minor version than this node's."""
    if advice := version_advice(plain_text(server, 20)):
        raise Refused(advice)


def asked_server_model(order: Packet) -> Tensor | None:
    """The server's model for the client, if there is one: its own, or a tensor of the method's message."""
    name = order.header.get("server_model")
    if name is None:
        return order.group("server_model").get("model")
    if not isinstance(name, str) or name not in order.group("down"):
        raise MessageError("server_model should name a tensor of the message")
    return order.group("down")[name]


def _judged_models(models: Mapping[str, Tensor], order: Packet) -> dict[str, Tensor]:
    """The personal model, the server's, and the method's other models, by the names of their figures."""
    (_, theta), *others = models.items()
    judged = {"personal": theta}
    if (model := asked_server_model(order)) is not None:
        judged["server_model"] = model
    return judged | {f"other.{name}": model for name, model in others}


def _gradient_counts(record: Record | None) -> list[list[float]]:
    """[q, gradients on each sample, samples]; the keys of samples come from the client's secret and are not sent."""
    batches = {} if record is None else record.ledger().batches
    return [[q, gradients, samples] for (_, q, gradients), samples in sorted(batches.items())]
