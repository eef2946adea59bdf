"""What a round of each method costs beside FedAvg's, Self-FL's at equal local steps, and CGPFL's beside pFedMe's.

    python benchmarks/costs.py                                 all methods on mlr and mlp, and Self-FL
    python benchmarks/costs.py --cgpfl                         CGPFL / pFedMe, and the share of clustering
    python benchmarks/costs.py --models mlp --methods ditto,apfl --repeats 15
    python benchmarks/costs.py --methods fedfomo,pfedhn --steps 50 --batch 64
    python benchmarks/costs.py --selffl --repeats 25           Self-FL / FedAvg only

Every method takes turns with FedAvg (A B A B ...) on one core, on the same data; a ratio is the median over the turns
of processor time against the FedAvg round next to it, so that a busy machine meets both. Gradients are counted where
the task computes them, in units of one gradient of a local step's batch; a forward pass alone is a third of one,
because the backward pass takes two products for each one of the forward pass. What is left, `overhead`, is the time
that clients' gradients do not explain: passes over state, work of the server, steps that cannot be fused. Above 1.3 it
is marked.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from kinfed.algorithms import ALGORITHMS, make_algorithm, prepare_data
from kinfed.algorithms.base import Algorithm, RoundInfo
from kinfed.algorithms.cgpfl.cgpfl import CGPFL, Server
from kinfed.algorithms.common.clustering import Clusters
from kinfed.algorithms.pfedme import PFedMe
from kinfed.algorithms.selffl.selffl import SelfFL
from kinfed.data.examples.batches import Batch
from kinfed.data.examples.ragged import Ragged
from kinfed.data.federations.federation import Federation
from kinfed.engine.contract.descent import PLAIN, Descent, ProximalTerm, Terms
from kinfed.engine.contract.feature_loss import FeatureLoss
from kinfed.engine.task_factory import Task, make_task
from kinfed.errors import ConfigError, ModelError, unknown_name
from kinfed.pools.local_pool import LocalPool
from kinfed.report.tables import TableColumn, TextTable
from kinfed.server.loop import Loop
from kinfed_papers.bench.machine import describe_machine
from kinfed_papers.bench.workload import WORKLOADS, Workload, synthetic

LIMIT = 1.3  # times what its gradients explain
FORWARD = 1 / 3  # of a gradient

# Clients of one size, half of them active.
SETTINGS = {
    name: replace(WORKLOADS[name], clients=40, participation=0.5, steps=10, batch=20, examples=120, fewest=120)
    for name in ("mlr", "mlp")
}
SELFFL = [
    WORKLOADS["mlr"],
    WORKLOADS["mlp"],
    replace(WORKLOADS["mlp"], name="mlp-10", batch=10),
    WORKLOADS["cnn"],
]
VALIDATION = 20  # of each client's examples
PUBLIC = 0.1  # of all training examples, for methods that distil over public ones
ROUNDS_OF_A_TURN = 2
WARM_UP = 8  # rounds: nearly all clients have been seen, and methods know what they need to decide

AnyAlgorithm = Algorithm[Any, Any, Any, Any]


@dataclass
class Cost:
    method: str
    seconds: float  # of processor time, per round
    gradients: float  # per client and round, in batches of a local step; a forward pass is a third
    time_ratio: float  # to FedAvg: median over the turns
    best_ratio: float  # of the shortest turns: what a busy machine has least to do with
    gradient_ratio: float

    @property
    def overhead(self) -> float | None:
        """Time in units of what the gradients explain; None where there are none."""
        return self.time_ratio / self.gradient_ratio if self.gradient_ratio else None

    def figures(self) -> dict[str, Any]:
        return asdict(self) | {"overhead": self.overhead}


class GradientCount:
    """Examples whose gradient (or, by a third, whose loss) a task was asked for."""

    def __init__(self) -> None:
        self.examples = 0.0
        self._inside = threading.local()

    @contextmanager
    def of(self, examples: int, share: float = 1.0) -> Iterator[None]:
        """One question to the task; what it asks of itself to answer it is not counted again."""
        outermost = not getattr(self._inside, "busy", False)
        if outermost:
            self.examples += share * examples
            self._inside.busy = True
        try:
            yield
        finally:
            if outermost:
                self._inside.busy = False


class _CountedDescent(Descent):
    def __init__(self, descent: Descent, count: GradientCount) -> None:
        self._descent, self._count = descent, count

    def step(self, rows: slice, batch: Batch, lr: float | Tensor) -> None:
        with self._count.of(batch.y.numel()):
            self._descent.step(rows, batch, lr)

    def result(self) -> Tensor:
        return self._descent.result()


@contextmanager
def counted(task: Task) -> Iterator[GradientCount]:
    """Count what is asked of this task inside the block."""
    count = GradientCount()
    grad, descend, descent = task.grad, task.descend_, task.descent
    logits, features_and_logits = task.logits, task.features_and_logits

    def counted_grad(theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        with count.of(batch.y.numel()):
            return grad(theta, batch, feature_loss)

    def counted_descend(
        theta: Tensor,
        batch: Batch,
        lr: float | Tensor,
        proximal: ProximalTerm | None = None,
        feature_loss: FeatureLoss | None = None,
    ) -> None:
        with count.of(batch.y.numel()):
            descend(theta, batch, lr, proximal, feature_loss)

    def counted_descent(theta: Tensor, steps: int, terms: Terms = PLAIN, mask: Tensor | None = None) -> Descent | None:
        inner = descent(theta, steps, terms, mask)
        return None if inner is None else _CountedDescent(inner, count)

    def counted_features(theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        with count.of(x.shape[0] * x.shape[1], FORWARD):
            return features_and_logits(theta, x)

    def counted_logits(theta: Tensor, x: Tensor) -> Tensor:
        with count.of(x.shape[0] * x.shape[1], FORWARD):
            return logits(theta, x)

    own = {
        "grad": counted_grad, "descend_": counted_descend, "descent": counted_descent, "logits": counted_logits,
        "features_and_logits": counted_features,
    }  # fmt: skip
    vars(task).update(own)
    try:
        yield count
    finally:
        for name in own:
            delattr(task, name)


def setting_of(model: str, steps: int | None = None, batch: int | None = None) -> Workload:
    """The setting of a model, with other local steps or another batch where they are given."""
    if model not in SETTINGS:
        raise unknown_name("model", model, SETTINGS)
    setting = SETTINGS[model]
    return replace(
        setting, steps=setting.steps if steps is None else steps, batch=setting.batch if batch is None else batch
    )


def measure_costs(
    setting: Workload,
    methods: Sequence[str] = (),
    repeats: int = 9,
    *,
    validation: int = VALIDATION,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Cost]:
    """Every named method (all where none is named) against FedAvg; of all, those that refuse the model are left out."""
    for name in methods:
        if name not in ALGORITHMS:
            raise unknown_name("algorithm", name, ALGORITHMS)
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1; got {repeats}")
    federation = with_validation(synthetic(setting), validation)
    costs = []
    for name in methods or ALGORITHMS:
        progress(name)
        try:
            loop = _loop(make_algorithm(name, setting.training), setting, federation)
        except (ConfigError, ModelError):
            if methods:
                raise
            continue
        fedavg = _loop(make_algorithm("fedavg", setting.training), setting, federation)
        costs.append(_cost(name, loop, fedavg, setting, repeats, WARM_UP))
    return costs


def compare(
    method: AnyAlgorithm,
    workload: Workload,
    federation: Federation,
    repeats: int,
    warm_up: int,
    other: AnyAlgorithm | None = None,
) -> Cost:
    """One method, with options of its own, against FedAvg or another one, on any workload."""
    other_loop = _loop(other or make_algorithm("fedavg", workload.training), workload, federation)
    return _cost(type(method).__name__, _loop(method, workload, federation), other_loop, workload, repeats, warm_up)


def with_validation(federation: Federation, count: int) -> Federation:
    """The last `count` training examples of every client as its validation examples."""
    lists = federation.train.lists()
    return replace(
        federation, train=Ragged.of([rows[:-count] for rows in lists]), val=Ragged.of([rows[-count:] for rows in lists])
    )


def _loop(algorithm: AnyAlgorithm, setting: Workload, federation: Federation) -> Loop:
    task = make_task(setting.build)
    if "needs public data" in algorithm.traits and federation.public is None:
        federation = federation.with_public(PUBLIC, 0)
    federation, clients = prepare_data(algorithm, federation, federation.population(0, setting.participation))
    return Loop(algorithm, task, LocalPool(algorithm, task, federation, 0, workers=1), clients)


def _cost(name: str, loop: Loop, fedavg: Loop, setting: Workload, repeats: int, warm_up: int) -> Cost:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for each in (fedavg, loop):
            for _ in each.rounds(warm_up):
                pass
        turns = [(_processor_time(fedavg), _processor_time(loop)) for _ in range(repeats)]
        gradients, fedavg_gradients = (_gradients(each, setting) for each in (loop, fedavg))
    finally:
        torch.set_num_threads(threads)
        for each in (fedavg, loop):
            each.pool.close()
    return Cost(
        name,
        statistics.median(own for _, own in turns) / ROUNDS_OF_A_TURN,
        gradients,
        statistics.median(own / other for other, own in turns),
        min(own for _, own in turns) / min(other for other, _ in turns),
        gradients / fedavg_gradients,
    )


def _processor_time(loop: Loop) -> float:
    began = time.process_time()
    for _ in loop.rounds(ROUNDS_OF_A_TURN):
        pass
    return time.process_time() - began


def _gradients(loop: Loop, setting: Workload) -> float:
    """Per client and round, of the rounds after those that were timed: counting would slow them down."""
    rounds = 4
    with counted(loop.task) as count:
        for _ in loop.rounds(rounds):
            pass
    return count.examples / (setting.batch * setting.active * rounds)


def cost_table(costs: Sequence[Cost], title: str) -> TextTable:
    headings = ("ms", "gradients", "time", "of best", "explained", "overhead")
    rows = []
    for cost in costs:
        mark = " !" if cost.overhead is not None and cost.overhead > LIMIT else ""
        overhead = "" if cost.overhead is None else f"{cost.overhead:.2f}{mark}"
        ratios = (f"{ratio:.2f}" for ratio in (cost.time_ratio, cost.best_ratio, cost.gradient_ratio))
        rows.append([cost.method, f"{1000 * cost.seconds:.1f}", f"{cost.gradients:.1f}", *ratios, overhead])
    return TextTable.of(title, [TableColumn("method", "name"), *headings], rows)


@dataclass(frozen=True)
class TimedCGPFL(CGPFL):
    """CGPFL that remembers how long it took to find contexts, in processor seconds per round."""

    seconds: list[float] = field(default_factory=list)

    def assign(self, server: Server, members: Tensor, uploads: Tensor, round: RoundInfo) -> Clusters:
        began = time.process_time()
        clusters = super().assign(server, members, uploads, round)
        self.seconds.append(time.process_time() - began)
        return clusters


def print_clustering(model: str, repeats: int, console: Console) -> None:
    """CGPFL does what pFedMe does, and clusters the uploads: here of 40 clients, all active."""
    workload = replace(setting_of(model), participation=1.0)
    federation = synthetic(workload)
    training = replace(workload.training, lr=0.005)
    for contexts in (1, 20):
        method = TimedCGPFL(training=training, contexts=contexts)
        cost = compare(method, workload, federation, repeats, 4, other=PFedMe(training=training))
        share = statistics.median(method.seconds) / cost.seconds
        console.print(
            f"CGPFL (K = {contexts}) / pFedMe, {workload.title}: {cost.time_ratio:.3f} ({cost.best_ratio:.3f} of the "
            f"best); clustering takes {share:.1%} of a round, {max(method.seconds) / cost.seconds:.0%} in the first",
            soft_wrap=True,
        )


def selffl_cost(workload: Workload, repeats: int) -> Cost:
    """Self-FL against FedAvg with the same local steps."""
    warm_up = 60 if workload.participation < 1 else 4  # until all clients have a state
    method = SelfFL(training=workload.training, use_steps=False)
    turns = repeats if workload.model != "cnn" else -(-repeats // 5)  # its rounds take seconds
    return compare(method, workload, synthetic(workload), turns, warm_up)


def main() -> None:
    parser = argparse.ArgumentParser("costs.py")
    parser.add_argument("--models", default=",".join(SETTINGS))
    parser.add_argument("--methods", default="", help="names separated by commas; all where none is named")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, help="local steps of the table's methods instead of the setting's")
    parser.add_argument("--batch", type=int, help="examples of a step, likewise")
    parser.add_argument("--selffl", action="store_true", help="only Self-FL against FedAvg at equal local steps")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--cgpfl", action="store_true", help="only CGPFL against pFedMe, for K = 1 and 20")
    arguments = parser.parse_args()
    console = Console()
    models = arguments.models.split(",")
    if arguments.cgpfl:
        for model in models:
            print_clustering(model, arguments.repeats, console)
        return
    costs: dict[str, list[Cost]] = {}
    for model in models if not arguments.selffl else ():
        setting = setting_of(model, arguments.steps, arguments.batch)
        names = [name for name in arguments.methods.split(",") if name]
        with console.status("") as status:
            costs[model] = measure_costs(setting, names, arguments.repeats, progress=status.update)
        console.print(cost_table(costs[model], setting.title))
    for workload in SELFFL if arguments.selffl or not arguments.methods else ():
        cost = selffl_cost(workload, arguments.repeats)
        costs[f"selffl {workload.name}"] = [cost]
        console.print(f"Self-FL / FedAvg, {workload.title}: {cost.time_ratio:.3f} ({cost.best_ratio:.3f} of the best)")
    machine = describe_machine()
    console.print(f"{datetime.date.today()}, {machine['processor']}, {machine['cores']} core(s), {machine['torch']}")
    if arguments.json is not None:
        figures = {setting: [cost.figures() for cost in listed] for setting, listed in costs.items()}
        arguments.json.write_text(json.dumps({"machine": machine, "costs": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
