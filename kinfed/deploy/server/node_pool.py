"""The pool of all nodes, as the server loop sees it (kinfed.pools.base).

States are on the nodes. What the server keeps of them is one number per client: the last round of it that counted. It
goes into every message and every checkpoint, and is all a node needs to go on from the right state.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kinfed.core import Tree
from kinfed.data import SPLITS, Cohort, Features, Problem, Split
from kinfed.deploy.server.answer_checks import AnswerChecks, check_figures, check_same_request
from kinfed.deploy.server.enrol import Roster
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.exchange import Exchange
from kinfed.deploy.transport.node_request import NodeRequest
from kinfed.deploy.transport.wire import (
    EVALUATE,
    EXACT,
    TRAIN,
    MessageError,
    Packet,
    masked_widths,
    plain_text,
    sent_tensors,
)  # fmt: skip
from kinfed.engine import Score, Task, make_objective
from kinfed.errors import CheckpointError, ConfigError
from kinfed.pools import Download, Evaluation, ServerModelOf, Steps
from kinfed.privacy import EVALUATION, TRAINING, Event, PrivateTask, Record
from kinfed.updates import Updates


class NodePool:
    def __init__(
        self, deployment: Deployment, run: str, roster: Roster, exchange: Exchange, task: Task,
        up: Mapping[str, Tensor], about: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`up` is an update as it should be (kinfed.algorithms.sample_update). `about`: what orders say of a run among
        many; the reasons why clients are missing are then kept in `reasons`, and the log has none of them."""
        self.deployment, self.run, self.roster, self.exchange = deployment, run, roster, exchange
        self.algorithm = deployment.algorithm
        self.accepted = torch.zeros(len(roster.names), dtype=torch.int64)  # [K] last round that counted; 0: none yet
        self.rounds_without_quorum = 0  # the last ones, in a row
        self.evaluations = torch.zeros(3, dtype=torch.float64)  # seconds, bytes down and up of all so far
        self.reasons: dict[str, str] | None = None  # by client, of the last request; None: there was none
        self.no_sum = ""  # why the last round has none, where updates are added up at nodes
        self._about = about
        self._round = 0  # the last one that was asked for
        self._terms: set[tuple[str, str]] = set()  # on which clients' figures leave, as far as the log has them
        self._train_terms: dict[str, Any] = {}  # what else an order to train says
        self._sample = dict(up)
        self._checks = AnswerChecks(deployment, roster.counts, task, up)
        self._noise = task.noise if isinstance(task, PrivateTask) else 0.0
        self._private = isinstance(task, PrivateTask)
        self._frozen = (task.inner if isinstance(task, PrivateTask) else task).frozen_digest()
        self._longest = roster.counts.max(0).values.tolist()

    # ---- the contract of a pool ----

    def train(
        self, ids: Tensor, download: Download, round: int, effort: Tensor | None = None, *, hold: bool = False,
        only_mean: bool = False,
    ) -> Steps[Updates]:  # fmt: skip
        """One round. Nodes hold their new states by themselves until a later message says whether it counted."""
        efforts = torch.ones(len(ids)) if effort is None else effort
        orders = {
            self.roster.names[k]: self._order(
                TRAIN, k, round, download(one[None]), effort=float(e), **self._train_terms
            )
            for k, one, e in zip(ids.tolist(), ids, efforts, strict=True)
        }
        answers: dict[int, Any] = {}
        events: dict[int, list[Event]] = {}
        nbytes, rejections = 0, dict[int, str]()

        def take(k: int, answer: Packet) -> None:
            nonlocal nbytes
            nbytes += answer.nbytes
            try:
                gradients = self._checks.events(answer, self._checks.planned(k)[0])
                if refused := answer.header.get("refused"):
                    raise MessageError(str(refused))
                update = self._read_update(k, orders[self.roster.names[k]], answer)
            except MessageError as error:
                rejections[k] = str(error)
                raise
            if answer.header.get("lost"):
                lost = f"{self.roster.names[k]} has lost its state of round {int(self.accepted[k])}"
                self.exchange.say(f"{lost} and begins anew from what it is sent")
            answers[k], events[k] = update, gradients

        # Under user-level privacy whatever came counts, where the model must not tell if one client more has answered.
        user_privacy = self.deployment.run.user_privacy
        hidden = user_privacy is not None and not user_privacy.at_nodes
        needed = 0 if hidden else self.deployment.needed_updates(len(ids))
        yield from self._ask(TRAIN, orders, take, needed, f"round {round}", rejections)
        record = self._record(ids, events) if self._private else None
        updates = Updates(ids[:0], None, nbytes, dict(sorted(rejections.items())), record=record)
        if answers and len(answers) >= needed:
            updates = yield from self._combine(answers, round, needed, updates)
        elif hidden:
            self.exchange.say(f"round {round}: none of {len(ids)} updates; the model gets its noise nevertheless")
        elif self._about is None:
            self.exchange.say(
                f"round {round}: {len(answers)} of {len(ids)} updates, and {needed} are needed; nothing was changed"
            )
        self.rounds_without_quorum = 0 if len(updates.ids) else self.rounds_without_quorum + 1
        self._round = round
        return updates

    def commit(self, ids: Tensor) -> None:
        self.accepted[ids] = self._round

    def _read_update(self, k: int, order: Packet, answer: Packet) -> Any:
        """The content of a client's answer to a round; MessageError if it cannot be used."""
        if unknown := answer.groups.keys() - {"up"}:
            raise MessageError(f"an answer to a round holds an update and nothing else; got {min(unknown)} too")
        return self._checks.update(k, answer.group("up"))

    def _combine(self, answers: Mapping[int, Any], round: int, needed: int, updates: Updates) -> Steps[Updates]:
        yield from ()
        numbers = sorted(answers)
        return replace(updates, ids=torch.tensor(numbers), rows=self._checks.up.stack([answers[k] for k in numbers]))

    def evaluate(
        self, ids: Tensor, download: Download, round: int, *,
        split: str = "test", server_model: ServerModelOf | None = None, keep_models: bool = False,
    ) -> Steps[Evaluation]:  # fmt: skip
        """Scores of the clients that answer. Personal models stay where they are: asking for them is an error."""
        if keep_models:
            raise ConfigError("personal models of a deployment are in the vaults of the nodes; they are not sent")
        began, nbytes_up = self.exchange.clock(), 0
        orders = self._orders_to_evaluate(ids, download, round, split, server_model)
        by_client: dict[int, Packet] = {}
        events: dict[int, list[Event]] = {}

        def take(k: int, answer: Packet) -> None:
            nonlocal nbytes_up
            nbytes_up += answer.nbytes
            terms = answer.require("scores", str)
            events[k] = self._checks.events(answer, self._checks.planned(k)[1])
            if terms != EXACT:
                self._say_terms(self.roster.names[k], terms)
            if not answer.groups:
                return  # the model is made, and its figures stay at the node
            scores = {"personal", *(name for name in answer.groups if name.startswith("other."))}
            for group in sorted(scores | ({"server_model"} if server_model is not None else set())):
                self._checks.score(k, SPLITS.index(split), answer.group(group), exact=terms == EXACT)
            check_figures(answer.group("figures"))
            by_client[k] = answer

        yield from self._ask(EVALUATE, orders, take, 1, f"evaluation after round {round}")
        seconds, nbytes_down = self.exchange.clock() - began, sum(order.nbytes for order in orders.values())
        self.evaluations += torch.tensor([seconds, nbytes_down, nbytes_up], dtype=torch.float64)
        numbers = sorted(by_client)
        answers = [by_client[k] for k in numbers]
        record = _make_record(events, EVALUATION) if self._private else None
        if not numbers:
            return Evaluation(ids[:0], None, None, record=record)
        others = {name for name in set.intersection(*(set(a.groups) for a in answers)) if name.startswith("other.")}
        figures = set.intersection(*(set(a.group("figures")) for a in answers))
        return Evaluation(
            torch.tensor(numbers), _scores(answers, "personal"),
            None if server_model is None else _scores(answers, "server_model"),
            {name: torch.cat([a.group("figures")[name].reshape(1) for a in answers]) for name in sorted(figures)},
            alternatives={name.removeprefix("other."): _scores(answers, name) for name in sorted(others)},
            record=record,
        )  # fmt: skip

    def _orders_to_evaluate(
        self, ids: Tensor, download: Download, round: int, split: str, server_model: ServerModelOf | None
    ) -> dict[str, Packet]:
        orders = {}
        for k, one in zip(ids.tolist(), ids, strict=True):
            down, model = download(one[None]), None if server_model is None else server_model(one[None])
            # A model that is in the message already does not travel twice.
            same = (
                None if model is None else next((n for n, t in sent_tensors(down).items() if torch.equal(t, model)), "")
            )
            groups = {"server_model": {"model": model}} if model is not None and not same else {}
            header = {"server_model": same} if same else {}
            orders[self.roster.names[k]] = self._order(EVALUATE, k, round, down, groups, split=split, **header)
        return orders

    def judging(
        self, ids: Tensor, download: Download, round: int, server_model: ServerModelOf | None
    ) -> Steps[None]:  # fmt: skip
        """Have personal models made and judged at home: no figure of this run leaves a node by itself."""
        orders = self._orders_to_evaluate(ids, download, round, "test", server_model)
        yield from self._ask(EVALUATE, orders, lambda k, answer: None, len(orders), f"judging after round {round}")

    @property
    def sends(self) -> tuple[str, ...]:
        """Fields of an update."""
        return tuple(self._sample)

    def _say_terms(self, name: str, terms: str) -> None:
        """Tell the operator once that figures of a client are not exact."""
        if (name, terms) not in self._terms:
            self._terms.add((name, terms))
            self.exchange.say(f"figures of {name}: {plain_text(terms)}")

    def states(self) -> dict[str, Tensor]:
        return {"accepted": self.accepted.clone(), "evaluations": self.evaluations.clone()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        accepted = tensors.get("accepted")
        if accepted is None or accepted.shape != self.accepted.shape or accepted.dtype != torch.int64:
            raise CheckpointError("the checkpoint is not of a deployment with these clients; choose another folder")
        self.accepted = accepted.clone()
        self.evaluations = tensors.get("evaluations", self.evaluations).clone()  # earlier versions counted none

    def close(self) -> None:
        """Connections are the transport's."""

    # ---- messages ----

    def _ask(
        self, kind: str, orders: Mapping[str, Packet], take: Callable[[int, Packet], None], needed: int, what: str,
        rejected: Collection[int] = (),
    ) -> Steps[None]:  # fmt: skip
        """Send orders by client's name; the log says who is missing, but for `rejected`, whom the run reports."""

        def take_by_name(name: str, answer: Packet) -> None:
            check_same_request(orders[name], answer)
            take(self.roster.names.index(name), answer)

        reasons = yield NodeRequest(self.exchange, kind, orders, self.deployment.deadline, take_by_name, needed)
        self.reasons = reasons
        for name, reason in sorted(reasons.items() if self._about is None else ()):
            if self.roster.names.index(name) not in rejected:
                self.exchange.say(f"{what}: without {name}: {reason}")

    def _order(self, kind: str, k: int, round: int, down: Tree, groups: Mapping[str, Any] = {}, **more: Any) -> Packet:
        scale = {"mean": self.roster.mean, "std": self.roster.std}
        inputs = {name: tensor for name, tensor in scale.items() if tensor is not None}
        header = {
            "kind": kind, "run": self.run, "round": round, "number": k, "name": self.roster.names[k],
            "accepted": int(self.accepted[k]), "num_clients": len(self.roster.names), "longest": self._longest,
            "group": self.roster.group(k), "noise": self._noise, "frozen": self._frozen, **(self._about or {}), **more,
        }  # fmt: skip
        if self.roster.preprocessing is not None:
            header["preprocessing"] = self.roster.preprocessing
        if widths := masked_widths(down):
            header["widths"] = widths
        return Packet(header, {"down": sent_tensors(down), "inputs": inputs, **groups})

    def _record(self, ids: Tensor, events: Mapping[int, list[Event]]) -> Record:
        """Gradients of every client that was called. One that did not answer may have computed them all the same, and
        its answer may yet be read: it is charged in full."""
        return _make_record({k: events.get(k) or list(self._checks.planned(k)[0]) for k in ids.tolist()}, TRAINING)


def make_pool(
    deployment: Deployment, run: str, roster: Roster, exchange: Exchange, task: Task, up: Mapping[str, Tensor],
    about: Mapping[str, Any] | None = None,
) -> NodePool:  # fmt: skip
    """The pool of a run, with secure sums if it declares them; refuses updates that these could not hide."""
    secure, algorithm = deployment.run.secure, deployment.algorithm
    if secure is None or not algorithm.sends:
        return NodePool(deployment, run, roster, exchange, task, up, about)
    from kinfed.deploy.secure.secure_round import SecureNodePool

    secure.check_update(deployment.method, algorithm, up, deployment.run.schedule.size(len(roster.names)))
    return SecureNodePool(secure, deployment, run, roster, exchange, task, up, about)


def made_up_cohort(roster: Roster, problem: Problem) -> Cohort:
    """One client with made-up examples, as large as the roster's: for an update as real ones will be."""
    dtype = torch.int64 if roster.tokens else torch.float32
    features = Features(torch.zeros(2, *roster.shape, dtype=dtype))
    labels = torch.arange(2) % problem.num_classes if problem.has_classes else _made_up_targets(problem)
    ids, start, one, rows = torch.tensor([0]), torch.tensor([0]), torch.tensor([1]), torch.arange(2)
    longest = roster.counts.max(0).values.tolist()
    train, val, test = (Split(features, labels, ids, start, one, rows, 0, 1, None, most) for most in longest)
    groups = torch.tensor([roster.group(0)]) if roster.groups else None
    return Cohort(ids, train, val, test, 0, 1, groups)


def _made_up_targets(problem: Problem) -> Tensor:
    target = make_objective(problem).example_target
    return target.expand(2, *target.shape).contiguous()


def _make_record(events: Mapping[int, list[Event]], phase: int) -> Record:
    """A record as the budget takes it, with made-up keys of samples: the real ones do not leave a node."""
    record = Record(phase)
    for k, own in sorted(events.items()):
        for event in own:
            for _ in range(event.batches):
                key = len(record.calls) if phase == TRAINING else -1 - len(record.calls)
                record.calls[key], record.samples[key] = event.gradients, (k, event.q)
    return record


def _scores(answers: list[Packet], group: str) -> Score:
    rows = [answer.group(group) for answer in answers]

    def column(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.cat([row[name].reshape(1).to(dtype) for row in rows])

    names = sorted(name for name in set.intersection(*map(set, rows)) if name.startswith("sums."))
    sums = {name.removeprefix("sums."): torch.cat([row[name].to(torch.float64) for row in rows]) for name in names}
    error = column("error") if all("error" in row for row in rows) else None
    return Score(column("correct"), column("loss"), column("count", torch.int64), sums, error)
