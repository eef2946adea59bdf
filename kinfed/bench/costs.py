"""What does a round of each method cost, beside FedAvg's and beside what its gradients explain?

    print_costs(measure_costs("mlp", ["ditto", "pfedme"], repeats=9))

Every method takes turns with FedAvg (A B A B ...) on one core, on the same data; a ratio is the median over the turns
of processor time against the FedAvg round next to it, so that a busy machine meets both. Gradients are counted where
the task computes them, in units of one gradient of the work's batch; a forward pass alone is a third of one, because
the backward pass takes two products for each one of the forward pass. The gradient that pFedHN's server takes through
its own network counts too. What is left, `overhead`, is the time that gradients do not explain: passes over state,
server work, steps that cannot be fused.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kinfed.algorithms import ALGORITHMS, make_algorithm, prepare_data
from kinfed.algorithms.base import Algorithm
from kinfed.algorithms.pfedhn import PFedHN
from kinfed.bench.workload import Workload, synthetic
from kinfed.data.batches import Batch
from kinfed.data.federation import Federation
from kinfed.data.ragged import Ragged
from kinfed.engine.descent import Descent, Pull
from kinfed.engine.task import Task, make_task
from kinfed.errors import ConfigError, ModelError, unknown_name
from kinfed.pools.local_pool import LocalPool
from kinfed.server.loop import Loop

LIMIT = 1.3  # times what its gradients explain
FORWARD = 1 / 3  # of a gradient

SETTINGS = {
    workload.name: workload
    for workload in (
        Workload("mlr", "mlr", (1, 28, 28), 40, 0.5, 10, 20, 120, 120, (20, 784, 10)),
        Workload("mlp", "mlp", (1, 28, 28), 40, 0.5, 10, 20, 120, 120, (20, 784, 128)),
    )
}
VALIDATION = 20  # of each client's examples
ROUNDS = 2  # of a turn

REMARKS = {
    "cfl": "similarities of all updates on the server",
    "cgpfl": "k-means on the server",
    "cgpfl_heur": "k-means for every K in the first round",
    "fedfomo": "each client judges other models on validation examples",
    "fedfomo_ma": "each client judges averages on validation examples",
    "flhc": "hierarchical clustering in one round",
    "mocha": "coordinate ascent in the dual, no gradients",
    "pfedhn": "a hypernetwork on the server",
    "selffl_augmented": "trains to convergence beside the round",
}


@dataclass
class Cost:
    method: str
    seconds: float  # of processor time, per round
    gradients: float  # per client and round, in batches of the work; a forward pass is a third
    time_ratio: float  # to FedAvg: median over the turns
    best_ratio: float  # of the shortest turns: what a busy machine has least to do with
    gradient_ratio: float
    remark: str

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
    grad, descend, descent, logits = task.grad, task.descend_, task.descent, task.logits

    def counted_grad(theta: Tensor, batch: Batch) -> Tensor:
        with count.of(batch.y.numel()):
            return grad(theta, batch)

    def counted_descend(theta: Tensor, batch: Batch, lr: float | Tensor, pull: Pull | None = None) -> None:
        with count.of(batch.y.numel()):
            descend(theta, batch, lr, pull)

    def counted_descent(theta: Tensor, steps: int, pull: Pull | None = None, drift: Tensor | None = None) -> Descent:
        return _CountedDescent(descent(theta, steps, pull, drift), count)

    def counted_logits(theta: Tensor, x: Tensor) -> Tensor:
        with count.of(x.shape[0] * x.shape[1], FORWARD):
            return logits(theta, x)

    own = {"grad": counted_grad, "descend_": counted_descend, "descent": counted_descent, "logits": counted_logits}
    vars(task).update(own)
    try:
        yield count
    finally:
        for name in own:
            delattr(task, name)


def measure_costs(
    model: str = "mlr",
    methods: Sequence[str] = (),
    repeats: int = 9,
    *,
    steps: int | None = None,
    batch: int | None = None,
    quick: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Cost]:
    """Every named method (all where none is named) against FedAvg; those that refuse the model are left out. `steps`
    and `batch` replace the setting's."""
    if model not in SETTINGS:
        raise unknown_name("model", model, SETTINGS)
    for name in methods:
        if name not in ALGORITHMS:
            raise unknown_name("algorithm", name, ALGORITHMS)
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1; got {repeats}")
    setting = SETTINGS[model]
    setting = setting.with_work(steps, batch)
    if quick:
        setting = replace(setting.quick(), fewest=setting.quick().examples)  # clients of one size, as in the full one
    federation = with_validation(synthetic(setting), 2 if quick else VALIDATION)
    costs = []
    for name in methods or ALGORITHMS:
        progress(name)
        try:
            algorithm = make_algorithm(name, setting.training)
            loop = _loop(algorithm, setting, federation)
        except (ConfigError, ModelError):
            if methods:
                raise
            continue
        usual = _loop(make_algorithm("fedavg", setting.training), setting, federation)
        costs.append(_cost(name, loop, usual, setting, repeats, REMARKS.get(name, "")))
    return costs


def compare(
    method: Algorithm[Any, Any, Any, Any],
    workload: Workload,
    federation: Federation,
    repeats: int,
    warm_up: int,
    against: Algorithm[Any, Any, Any, Any] | None = None,
) -> Cost:
    """One method, with options of its own, against FedAvg or another one, on any workload."""
    usual = _loop(against or make_algorithm("fedavg", workload.training), workload, federation)
    name = type(method).__name__
    return _cost(name, _loop(method, workload, federation), usual, workload, repeats, "", warm_up)


def with_validation(federation: Federation, count: int) -> Federation:
    """The last `count` training examples of every client as its validation examples."""
    lists = federation.train.lists()
    return replace(
        federation, train=Ragged.of([rows[:-count] for rows in lists]), val=Ragged.of([rows[-count:] for rows in lists])
    )


def _loop(algorithm: Algorithm[Any, Any, Any, Any], setting: Workload, federation: Federation) -> Loop:
    task = make_task(setting.build)
    federation, clients = prepare_data(algorithm, federation, federation.population(0, setting.participation))
    return Loop(algorithm, task, LocalPool(algorithm, task, federation, 0, workers=1), clients)


def _cost(
    name: str, loop: Loop, usual: Loop, setting: Workload, repeats: int, remark: str, warm_up: int = 8
) -> Cost:  # eight rounds: nearly all clients have been seen, and methods know what they need to decide
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for each in (usual, loop):
            for _ in each.rounds(warm_up):
                pass
        times: list[tuple[float, float]] = []
        for _ in range(repeats):
            times.append((_processor_time(usual), _processor_time(loop)))
        gradients, fedavg_gradients = (_gradients(each, setting) for each in (loop, usual))
    finally:
        torch.set_num_threads(before)
        for each in (usual, loop):
            each.pool.close()
    return Cost(
        name,
        statistics.median(own for _, own in times) / ROUNDS,
        gradients,
        statistics.median(own / fedavg for fedavg, own in times),
        min(own for _, own in times) / min(fedavg for fedavg, _ in times),
        gradients / fedavg_gradients,
        remark,
    )


def _processor_time(loop: Loop) -> float:
    began = time.process_time()
    for _ in loop.rounds(ROUNDS):
        pass
    return time.process_time() - began


def _gradients(loop: Loop, setting: Workload) -> float:
    """Per client and round, of the rounds after those that were timed: counting would slow them down."""
    rounds = 4
    with counted(loop.task) as count:
        for _ in loop.rounds(rounds):
            pass
    return count.examples / (setting.batch * setting.active * rounds) + _of_server(loop.algorithm) / setting.batch


def _of_server(algorithm: Algorithm[Any, Any, Any, Any]) -> int:
    """Gradients on the server, per client: how many examples' through the model take as many products."""
    return algorithm.hidden + 1 if isinstance(algorithm, PFedHN) else 0  # the head's weights, per parameter


def print_costs(costs: Sequence[Cost], title: str, console: Console | None = None) -> None:
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 0, 0, 1))
    table.add_column("method", no_wrap=True)
    for heading in ("ms", "gradients", "time", "of best", "explained", "overhead"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("beside gradients")
    for cost in costs:
        over = cost.overhead is not None and cost.overhead > LIMIT
        table.add_row(
            cost.method,
            f"{1000 * cost.seconds:.1f}",
            f"{cost.gradients:.1f}",
            f"{cost.time_ratio:.2f}",
            f"{cost.best_ratio:.2f}",
            f"{cost.gradient_ratio:.2f}",
            "" if cost.overhead is None else f"{cost.overhead:.2f}{' !' if over else ''}",
            cost.remark,
        )
    (console or Console()).print(table)
