"""Dense and LSTM networks in compiled loops: one call, without the interpreter's lock, takes all local steps of some
clients.

Networks are those of kinfed.engine.backends.dense and kinfed.engine.backends.recurrent, whose torch code serves where a
feature loss is given, and is the oracle in tests. Each client is trained by itself: its numbers depend neither on the
clients beside it nor on the number of threads, bit for bit.
"""

import contextlib
import importlib.util
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.core import threads
from kinfed.data import MOST_EXAMPLES, Batch, Batches, Features, LocalTraining, Split
from kinfed.engine.backends.joint_tasks import StackedNet, StackedTask
from kinfed.engine.compiled import kernel_arguments as args
from kinfed.engine.compiled.fused_net import Shape, fused_net, make_program
from kinfed.engine.compiled.machine_code import compiled_kernel, is_compiled
from kinfed.engine.contract.descent import PLAIN, Descent, ProximalTerm, StepwiseDescent, Terms
from kinfed.engine.contract.feature_loss import FeatureLoss
from kinfed.engine.contract.objective import Absolute, CrossEntropy, Huber, Objective, Squared
from kinfed.engine.contract.task import Task, WholeLoop, WholeProgram
from kinfed.engine.contract.update_program import Instruction
from kinfed.engine.scoring.score import OutputCollector, Score
from kinfed.errors import ModelError

SCORED_TOGETHER = 48  # examples of a client: their activations stay in the cache, and tiles of three rows are full

_KINDS = {"sgd": 1, "adam": 2, "adamw": 3}  # as kinfed.engine.compiled.fused_steps numbers them
_PLAIN = 0
_EVERY_RUN = ("train", "score")  # kernels that nearly all methods call; others wait until they are called


def begin_compiling(task: Task) -> bool:
    """Compile what the task trains and scores with in a thread of its own, where the cache folder does not hold it.
    False where nothing is to be compiled, as for all tasks of other backends."""
    if not isinstance(task, FusedTask) or task.is_compiled():
        return False
    threading.Thread(target=task.compile, name="compiling").start()
    return True


def is_installed() -> bool:
    """Whether numba, which compiles, is there."""
    return importlib.util.find_spec("numba") is not None


def compiles(net: StackedNet | None, device: torch.device | str, objective: Objective) -> bool:
    """Whether there are compiled loops for such a network on this device."""
    fits = net is not None and net.compiles_up_to > 0
    return fits and torch.device(device).type == "cpu" and _loss_rule(objective) is not None


class FusedTask(StackedTask):
    backend = "fused"
    shares_rows = True

    def _prepare(self) -> None:
        super()._prepare()
        if not self.net.compiles_up_to:
            raise ModelError("the fused path has no loops for GRU layers; use backend = stacked or auto with them")
        fused, loss = fused_net(self.net), _loss_rule(self.objective)
        if loss is None:
            raise ModelError(
                f"the fused path does not know the loss {self.objective.name}; use backend = stacked with it"
            )
        if self.device.type != "cpu":
            raise ModelError(f"the fused path computes on the processor; use backend = stacked on {self.device}")
        if not is_installed():
            raise ModelError("backend = fused needs numba: pip install 'kinfed[fast]', or use backend = stacked")
        self._fused, self._loss_rule = fused, loss
        self._all_train, _ = fused.trained(None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make the arrays anew: Ray hands out those of a pickle read-only, and kernels take none of these."""
        super().__setstate__(state)
        self._prepare()

    def whole_loop(self, batches: Batches) -> WholeLoop | None:
        return partial(self._train, batches) if self._takes(batches) else None

    def whole_program(self, streams: Sequence[Batches], models: Mapping[str, Tensor]) -> WholeProgram | None:
        fits = all(map(self._takes, streams)) and all(map(args.is_readable, models.values()))
        return partial(self._run_program, streams) if fits else None

    def _takes(self, batches: Batches) -> bool:
        """Whether compiled loops take all steps on these batches."""
        training, split = batches.training, batches.split
        fits = len(split.rows) <= MOST_EXAMPLES or int(split.count.max()) <= MOST_EXAMPLES
        return training.augment is None and not training.poisson and fits and self._reads(split.features)

    def _train(
        self, batches: Batches, theta: Tensor, rate: float, terms: Terms, mask: Tensor | None,
        moments: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        split, training, n = batches.split, batches.training, len(theta)
        lam, center = (0.0, None) if terms.proximal is None else (terms.proximal[0], args.readable(terms.proximal[1]))
        drift, windows = args.readable(terms.drift), batches.windows()
        trains, whole_layers = self._fused.trained(mask)
        plain = training.is_plain and whole_layers
        shape = self._shape(split.features.shape)
        columns = np.ones(self.num_params, np.uint8) if mask is None else mask.numpy().astype(np.uint8)
        first, second = moments.get("velocity", moments.get("first")), moments.get("second")
        taken = moments.get("steps", torch.zeros(n)).numpy()
        rates, lams, steps = args.by_client(rate, n), args.by_client(lam, n), batches.steps.numpy()
        kernel, source, rule = self._compiled("train"), args.source_of(split, shape), _rule(training, plain)

        def train_rows(rows: slice) -> None:
            start, count, epochs = windows.start[rows], windows.count[rows], windows.epochs[rows]
            work = args.WorkMemory(self._fused, shape, min(training.batch, int(count.max(initial=0))), split.labels)
            gradient = np.empty(0 if plain else self.num_params, np.float32)
            memory = args.rows_of(first, rows), args.rows_of(second, rows)
            order = np.empty(int((count * epochs).max(initial=0)), np.int64)
            kernel(
                self._network(shape, trains), args.rows_of(theta, rows), source,
                args.windows_of(split, start, count, steps[rows], training.batch, windows.by_epoch),
                args.OrderDraws(windows.key[rows], epochs, order, np.empty_like(order)),
                args.ClientTerms(rates[rows], lams[rows], args.rows_of(center, rows), args.rows_of(drift, rows)),
                args.OptimizerMemory(rule, columns, *memory, taken[rows], gradient.ctypes.data), work.argument,
            )  # fmt: skip

        threads.share_rows(train_rows, steps * self._operations(shape, training.batch))

    def _run_program(
        self, streams: Sequence[Batches], instructions: Sequence[Instruction], models: Mapping[str, Tensor],
        numbers: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        batches, program = streams[0], make_program(instructions, models, numbers)
        split, training, windows = batches.split, batches.training, [stream.windows() for stream in streams]
        shape, steps = self._shape(split.features.shape), batches.steps.numpy()
        order, batches_of = np.array([window.order for window in windows]), windows[0]
        kernel, source = self._compiled("program"), args.source_of(split, shape)

        def run_rows(rows: slice) -> None:
            count = batches_of.count[rows]
            work = args.WorkMemory(self._fused, shape, min(training.batch, int(count.max(initial=0))), split.labels)
            spare = np.empty((len(program.models) - len(models) + program.learns, self.num_params), np.float32)
            passing = [(row.ctypes.data, 0) for row in spare]
            rows_of_models = [args.rows_of(model, rows) for model in models.values()]
            address, distance = np.array(rows_of_models + passing, np.int64).T.copy()
            values = np.zeros((len(program.numbers), len(count)))
            for value, number in zip(values, numbers.values(), strict=False):  # others last for one batch
                value[:] = number[rows].numpy()
            gradient = passing[-1][0] if program.learns else 0
            kernel(
                self._network(shape, self._all_train), source,
                args.windows_of(split, batches_of.start[rows], count, steps[rows], training.batch, batches_of.by_epoch),
                args.OrderStreams(order, batches_of.offset[rows]),
                args.ProgramTables(program.what, program.amount, address, distance, values, gradient), work.argument,
            )  # fmt: skip
            for number, value in zip(numbers.values(), values, strict=False):
                number[rows] = torch.from_numpy(value)

        threads.share_rows(run_rows, steps * (program.gradients * self._operations(shape, training.batch)))

    def grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        if feature_loss is not None or not self._fits(theta, batch):
            return super().grad(theta, batch, feature_loss)
        out = torch.empty_like(theta, memory_format=torch.contiguous_format)
        self._step(theta, batch, 0.0, None, out)
        return out

    def take_step_(self, theta: Tensor, batch: Batch, lr: float | Tensor, terms: Terms) -> None:
        if terms.feature_loss is not None or not self._fits(theta, batch):
            super().take_step_(theta, batch, lr, terms)
        else:
            self._step(theta, batch, lr, terms.proximal, None)

    def descent(self, theta: Tensor, steps: int, terms: Terms = PLAIN, mask: Tensor | None = None) -> Descent | None:
        if terms.feature_loss is not None or mask is not None:
            return super().descent(theta, steps, terms, mask)
        return StepwiseDescent(self.take_step_, theta, terms)

    def _scored(self, theta: Tensor, part: Split, outputs: OutputCollector | None) -> Score:
        if not self._scores_in_place(theta, part) or not len(part.count):
            return super()._scored(theta, part, outputs)
        n, shape = len(part.count), self._shape(part.features.shape)
        start, count = part.start.numpy(), part.count.numpy()
        z = None if outputs is None else np.empty((int(count.sum()), self._fused.outputs), np.float32)
        before, correct, loss = count.cumsum() - count, np.zeros(n), np.zeros(n)
        kernel, source = self._compiled("score"), args.source_of(part, shape)

        def score_rows(rows: slice) -> None:
            work = args.WorkMemory(self._fused, shape, min(SCORED_TOGETHER, int(count[rows].max())), part.labels)
            kernel(
                self._network(shape, self._all_train), args.rows_of(theta, rows), source,
                args.ScoredPart(part.rows.numpy(), start[rows], count[rows], work.width),
                args.Scores(correct[rows], loss[rows], 0 if z is None else z[before[rows.start] :].ctypes.data),
                work.argument,
            )  # fmt: skip

        threads.share_rows(score_rows, count * (self._operations(shape, 1) // 3))
        if z is not None and outputs is not None:
            outputs.add_all(part, torch.from_numpy(z))
        return Score(torch.from_numpy(correct), torch.from_numpy(loss), part.count)

    def mean_losses(self, models: Sequence[Tensor], split: Split) -> Tensor:
        if models and split.weights is None and all(self._scores_in_place(theta, split) for theta in models):
            return torch.stack([self.mean_loss(theta, split) for theta in models], 1)
        return super().mean_losses(models, split)

    def scores_alone(self, theta: Tensor, part: Split) -> bool:
        return self._scores_in_place(theta, part)

    def _scores_in_place(self, theta: Tensor, part: Split) -> bool:
        """Whether kernels read these examples where they lie, so that scoring several models fetches none twice."""
        return self._reads(part.features) and args.is_readable(theta)

    def _step(
        self, theta: Tensor, batch: Batch, lr: float | Tensor, proximal: ProximalTerm | None, out: Tensor | None
    ) -> None:
        x, n = batch.x.contiguous(), len(theta)
        lam, center = (0.0, None) if proximal is None else (proximal[0], args.readable(proximal[1]))
        shape = self._shape(tuple(batch.x.shape[2:]))
        work = args.WorkMemory(self._fused, shape, batch.y.shape[1], batch.y)
        labels, weights = batch.y.contiguous().numpy(), batch.weight.contiguous().numpy()
        self._compiled("step")(
            self._network(shape, self._all_train), args.rows_of(theta),
            args.GivenBatch(args.Rows(x.data_ptr(), x[0].numel()), shape.length, shape.width, labels, weights),
            args.ClientTerms(args.by_client(lr, n), args.by_client(lam, n), args.rows_of(center), args.NOWHERE),
            args.rows_of(out), work.argument,
        )  # fmt: skip

    def is_compiled(self) -> bool:
        """Whether training and scoring begin without waiting for the compiler."""
        return all(is_compiled(name, *self._kernel_kind) for name in _EVERY_RUN)

    def compile(self) -> None:
        """Load or compile what training and scoring call; a call of it meanwhile waits."""
        with contextlib.suppress(ModelError):  # the call says it again, where it is heard
            for name in _EVERY_RUN:
                self._compiled(name)

    @property
    def _kernel_kind(self) -> tuple[str, str]:
        return self._fused.network, "classes" if self.objective.classifies else "numbers"

    def _compiled(self, name: str) -> Callable[..., None]:
        return compiled_kernel(name, *self._kernel_kind)

    def _network(self, shape: Shape, trains: np.ndarray) -> args.Network:
        return args.Network(self._fused.argument(shape), trains, self._fused.outputs, self.num_params, self._loss_rule)

    def _operations(self, shape: Shape, batch: int) -> int:
        """Additions and multiplications of a gradient, about."""
        return 6 * self.num_params * shape.length * batch

    def _shape(self, example: tuple[int, ...]) -> Shape:
        shape = self._fused.shape_of(example)
        assert shape is not None  # callers of a kernel have asked before
        return shape

    def _reads(self, features: Features) -> bool:
        """Whether compiled loops can read these examples where they are."""
        shape, vectors = self._fused.shape_of(features.shape), features.vectors
        stored = args.STORED if vectors is None else args.NUMBERED
        return (
            type(features) is Features  # others look up their examples in a way of their own
            and features.raw.dtype in stored
            and features.raw.is_contiguous()
            and shape is not None
            and (vectors is None or (vectors.is_contiguous() and tuple(features.raw.shape[1:]) == (shape.length,)))
        )

    def _fits(self, theta: Tensor, batch: Batch) -> bool:
        """Whether the compiled step takes these; the torch path says what is wrong with others."""
        return (
            args.is_readable(theta)
            and batch.x.dtype == batch.weight.dtype == torch.float32
            and len(theta) > 0
            and self._fused.shape_of(tuple(batch.x.shape[2:])) is not None
        )


def _rule(training: LocalTraining, plain: bool) -> np.ndarray:
    kind = _PLAIN if plain else _KINDS[training.optimizer]
    clip = training.largest_gradient or 0.0
    return np.array(
        [kind, training.weight_decay, training.momentum, training.nesterov, clip, *training.betas, training.eps], float
    )


def _loss_rule(objective: Objective) -> np.ndarray | None:
    """SIGN and THRESHOLD of a loss of residuals (kinfed.engine.compiled.fused_steps); None if it is another loss."""
    if isinstance(objective, Huber):
        return np.array([0.0, objective.threshold])
    known = {CrossEntropy: (0.0, 0.0), Squared: (0.0, np.inf), Absolute: (1.0, np.inf)}
    return np.array(known[type(objective)]) if type(objective) in known else None
