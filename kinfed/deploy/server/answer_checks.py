"""Checks of clients' answers, against what the method sends and what each client declared at its enrolment."""

from collections.abc import Mapping
from dataclasses import fields

import torch
from torch import Tensor

from kinfed.algorithms import COUNT
from kinfed.core import EXAMPLES, Tree
from kinfed.data import SPLITS
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.wire import MessageError, Packet, message_types, plain_text, received_tensors, tree_of
from kinfed.engine import METRICS, Task
from kinfed.privacy import Event, Events, PrivateTask, dominates, planned_costs
from kinfed.updates import UpdateSpec, trained_columns

LARGEST_LOSS = 1e6  # of one example
LARGEST_FIGURE = 1e100  # beyond what any unit makes of a number; its square is one, too
LONGEST_FIGURE = 60  # characters of a name


class AnswerChecks:
    """Every check raises MessageError, which names what is wrong; the answer is then left out, and the run goes on."""

    def __init__(self, deployment: Deployment, counts: Tensor, task: Task, up: Mapping[str, Tensor]) -> None:
        """`counts` [K, 3]: training, validation and test examples as declared; `up`: an update as it should be."""
        self._deployment, self._declared = deployment, counts
        self._private = isinstance(task, PrivateTask)
        self.up = message_types(deployment.algorithm)[1]
        self._counts = {field.name for field in fields(self.up) if field.metadata.get(EXAMPLES)}
        self._widths = {name: sample.shape[1] for name, sample in up.items() if sample.dim() > 1}
        trained = trained_columns(deployment.algorithm, task)
        self._spec = UpdateSpec.from_update(up, deployment.run.largest_norm, trained)

    # ---- updates and evaluations ----

    def update(self, k: int, tensors: Mapping[str, Tensor]) -> Tree:
        """The update of client k, if its fields, types, shapes, norm and number of examples are as they should be."""
        tensors = received_tensors(self.up, tensors, self._widths)
        violation = self._spec.violation(tensors)
        if violation is not None:
            raise MessageError(violation)
        for name in self._counts & tensors.keys():
            self._check_examples(k, name, tensors[name])
        if COUNT in tensors:
            self._check_count(k, 0, float(tensors[COUNT].sum()))
        return tree_of(self.up, tensors)

    def _check_examples(self, k: int, name: str, numbers: Tensor) -> None:
        """Refuse more examples than the client has: they decide its weight in parts of the average."""
        declared = int(self._declared[k, 0])
        most = (1 + self._deployment.drift) * declared
        if bool((numbers < 0).any()) or float(numbers.sum()) > most:
            raise MessageError(
                f"its {name} counts {float(numbers.sum()):g} examples ({float(numbers.min()):g} at least), and it said "
                f"{declared} at the start"
            )

    def _check_count(self, k: int, split: int, count: float) -> None:
        """Refuse another count than at the enrolment: counts are weights, and only the client knows them."""
        declared = int(self._declared[k, split])
        if not abs(count - declared) <= self._deployment.drift * declared:  # NaN is not
            raise MessageError(
                f"it says {count:g} {SPLITS[split]} examples, and said {declared} at the start; drift allows a change "
                f"by {100 * self._deployment.drift:g} %"
            )

    def score(self, k: int, split: int, tensors: Mapping[str, Tensor], *, exact: bool = True) -> None:
        """Check an evaluation of client k on the split with this number; one with noise has fewer figures."""
        plain = ("correct", "loss", "count")
        if any(name not in tensors or tensors[name].numel() != 1 for name in plain):
            raise MessageError("an evaluation without correct, loss and count of one client")
        problem = self._deployment.problem
        headline = METRICS.headline(problem, self._deployment.run.metric)
        wanted = {f"sums.{one.name}" for one in METRICS.of_problem(problem, headline)} if exact else set()
        if tensors.keys() - {*plain, "error"} - wanted or wanted - tensors.keys():
            raise MessageError("an evaluation by metrics other than the run's; all must have the same plugins")
        if any(tensors[name].shape != (1, 2) or not bool(torch.isfinite(tensors[name]).all()) for name in wanted):
            raise MessageError("an evaluation whose metrics are not two finite sums each")
        if "error" in tensors and tensors["error"].numel() != 1:
            raise MessageError("an evaluation whose error is not one number")
        correct, loss, count = (float(tensors[name]) for name in ("correct", "loss", "count"))
        self._check_count(k, split, count)
        if not (count == int(count) and 0 <= correct <= count):
            raise MessageError(f"an evaluation with {correct:g} of {count:g} examples correct")
        if not 0 <= loss <= LARGEST_LOSS * count:
            raise MessageError(f"an evaluation with a loss of {loss:g} over {count:g} examples")

    # ---- privacy ----

    def planned(self, k: int) -> tuple[Events, Events]:
        """The largest cost of a round, and of an evaluation, in privacy."""
        if not self._private:
            return (), ()
        round, after = planned_costs(self._deployment.algorithm, self._declared[k : k + 1, 0])
        assert round is not None  # checked before the run
        return round[0], after[0]

    def events(self, answer: Packet, most: Events) -> list[Event]:
        """Cost of the answer in privacy, as it says itself; no more than `most`."""
        if not self._private:
            return []
        events = _reported_events(answer)
        planned, actual = (max((event.q for event in some), default=0.0) for some in (most, events))
        if most and actual > planned:
            raise MessageError(
                f"it takes each of its examples with chance {actual:.3g}, and {planned:.3g} follows from the number "
                f"that it said at the start: it has about {100 * (1 - planned / actual):.0f} % fewer training examples "
                "now. Give it its data back, or begin another run (out)"
            )
        if not dominates(most, tuple(sorted(events))):
            raise MessageError("it computed more private gradients than the method takes")
        return events


def check_same_request(order: Packet, answer: Packet) -> None:
    for key in ("run", "round", "number", "kind", "name"):
        if answer.header.get(key) != order.header[key]:
            theirs = repr(answer.header.get(key))[:60]
            raise MessageError(f"an answer with {key} {theirs} instead of {order.header[key]!r}")


def is_number(value: object) -> bool:
    """Whether a value of a header is a number that can be computed with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_FIGURE


def check_figures(figures: Mapping[str, Tensor]) -> None:
    """Refuse diagnostics of the method that are not one number each."""
    for name, tensor in figures.items():
        if tensor.numel() != 1 or name != plain_text(name, LONGEST_FIGURE):
            raise MessageError(f"a figure {name} that is not one number")


def _reported_events(answer: Packet) -> list[Event]:
    events = []
    for entry in answer.require("gradients", list):
        if not isinstance(entry, list) or len(entry) != 3 or not all(type(value) in (int, float) for value in entry):
            raise MessageError("an answer without a readable list of the questions to its data")
        q, gradients, samples = entry
        if not (0 < q <= 1 and type(gradients) is int and type(samples) is int and gradients > 0 and samples > 0):
            raise MessageError("an answer with an impossible number of private gradients")
        events.append(Event(float(q), gradients, samples))
    return events
