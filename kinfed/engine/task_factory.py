"""Tasks of torch modules, with any of several ways to compute the same gradient. `make_task` picks the backend per
model:

  fused    compiled loops over clients of dense and LSTM networks, without the interpreter's lock (extra `fast`), for
           runs long enough to earn what loading compiled code costs
  stacked  hand-written forward and backward on [n, ...]: dense layers, 5-9x a plain loop, LSTM and GRU layers
  rows     one row after the other: by hand for chains of convolutions, which gain nothing from stacking, with autograd
           for anything else
  batched  many clients in one forward pass through what is frozen, for adapters and heads
  vmap     torch.func on small modules of any other kind

All agree to 1e-5 and are tested against each other and against plain autograd.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from kinfed.data import Batch
from kinfed.engine.backends.joint_tasks import BatchedTask, VmapTask, few_positions, stacked_net
from kinfed.engine.backends.joint_tasks import StackedTask as StackedTask
from kinfed.engine.backends.rows_task import RowsTask as RowsTask
from kinfed.engine.compiled.fused_task import FusedTask, compiles, is_installed
from kinfed.engine.contract.linear import runs_batched
from kinfed.engine.contract.objective import CROSS_ENTROPY, Objective
from kinfed.engine.contract.task import Task as Task
from kinfed.engine.rows.keyed_random import drops
from kinfed.engine.rows.layout import RowLayout, still_buffers
from kinfed.engine.rows.model_calls import packing_of
from kinfed.engine.rows.model_trial import (
    OutputShapes,
    example_like,
    failures_as_model_errors,
    mark_still_buffers,
    try_model,
)
from kinfed.engine.rows.module_checks import check_values
from kinfed.engine.rows.module_task import Build, build_seeded, checked_module
from kinfed.engine.rows.module_task import ModuleTask as ModuleTask
from kinfed.errors import ModelError

# Of a module, up to which vmap is faster than rows. Processor time of rows / vmap for two dense layers, 20 clients,
# steps of 10: 3.1 at 2,410 parameters, 1.6 at 8,906, 1.2 at 24,040, 0.8 at 49,330, 0.7 at 50,890 (medians of 7 turns).
FEW_PARAMETERS = 30_000
# Multiplications and additions of local training in a whole run, from which `auto` takes the fused path: a third of a
# second on the stacked one, of which it saves more than its machine code takes to load (0.06 s). The first run on a
# machine waits for the compiler, ten seconds. That must not count: the path is part of a run's identity.
FUSED_FROM = 2e9
LONG_RUN = 2e10  # from which a run without numba says so: two to three seconds
_ROW_BY_ROW = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.MultiheadAttention)
_KINDS: tuple[type[ModuleTask], ...] = (FusedTask, StackedTask, RowsTask, BatchedTask, VmapTask)
_BACKENDS = {kind.backend: kind for kind in _KINDS}


def make_task(
    build: Build, *, backend: str = "auto", device: torch.device | str = "cpu", frozen: tuple[str, ...] = (),
    head: str | None = None, example: Tensor | None = None, shape: tuple[int, ...] | None = None,
    batch: int | None = None, outputs: OutputShapes = None, objective: Objective = CROSS_ENTROPY, examples: float = 0,
) -> ModuleTask:  # fmt: skip
    """The task for the module that `build()` makes; `backend` forces one of fused, stacked, rows, batched, vmap;
    `frozen` are patterns of parameters that are not trained; `head` names the last linear layer where the module does
    not declare it last; `shape` defaults to that of an example; `batch` is how many examples a step has, by
    which adapters are trained batched or in rows; `outputs` are the shapes that the output of an example may have, or
    its length; `objective` is the loss (kinfed.engine.contract.objective); `examples` is how many all local steps of a
    run have together, by which compiled loops are worth loading.

    On an `example` batch [B, ...] the model is tried at once: one that fails, or gives anything but `outputs`
    per example, is refused here and not in the first round, and one that only works for one client at a time (it
    branches on its data, draws random numbers, or holds an operation that torch runs in a loop over clients anyway)
    trains row by row."""
    if backend != "auto" and backend not in _BACKENDS:
        raise ModelError(f"backend is one of auto, {', '.join(_BACKENDS)}; got {backend!r}")
    module = checked_module(build, frozen)
    if example is not None:
        check_values(module)
    if example is not None or shape is not None:
        candidates = example_like(shape or ()) if example is None else (example,)
        mark_still_buffers(module, lambda: build_seeded(build, 1), candidates)
    task = _task_for(module, build, backend, device, example, batch, objective, examples)
    if example is not None:
        if isinstance(task, StackedTask):  # knows the inputs of its layers, and says more than torch
            _try(task, example, clients=1)
        try_model(task, example, outputs)
        task = _that_works(task, example, backend)
        with failures_as_model_errors(task.module, example, " on the way back"):
            _try(task, example, clients=1)
    task = task if head is None else task.with_head(head)
    if example is not None:
        task.no_features = _reason_without_features(task, example)
    return task


def upper_task(
    whole: ModuleTask, above: Callable[[nn.Module], nn.Module], layers: list[nn.Module], *, backend: str = "auto",
    example: Tensor | None = None, batch: int | None = None,
) -> ModuleTask:  # fmt: skip
    """A task on the activations below `layers`, which hold all that `whole` trains: `above` makes a module's forward
    pass begin there. Rows, starts and exported models are those of `whole`; the other arguments are `make_task`'s."""
    module = above(whole.layout.working_copy(whole.module))
    upper = nn.Sequential(*layers)
    trained = sum(p.numel() for p in upper.parameters() if p.requires_grad)
    is_all = trained == whole.num_params == sum(p.numel() for p in upper.parameters())
    net = stacked_net(upper, whole.objective) if is_all and backend in ("auto", "stacked", "fused") else None
    task: ModuleTask
    if net is not None:
        kind = FusedTask if backend == "fused" else StackedTask
        task = kind(whole.build, whole.device, module=module, net=net, objective=whole.objective)
    else:
        task = _task_for(module, whole.build, backend, whole.device, example, batch, whole.objective)
    if example is not None:
        task = _that_works(task, example, backend)
    return task.as_part_of(whole)


def _that_works(task: ModuleTask, example: Tensor, backend: str) -> ModuleTask:
    """The task, or, unless the backend was chosen, one in rows where many clients at once fail or gain nothing."""
    if not isinstance(task, VmapTask | BatchedTask) or (isinstance(task, VmapTask) and backend != "auto"):
        return task
    rows = RowsTask(task.build, task.device, module=task.module, objective=task.objective)
    if _gains_from_vmap(task, example) if isinstance(task, VmapTask) else _agree(task, rows, example):
        return task
    if backend != "auto":
        raise ModelError(
            "the batched path gives other gradients than one client after the other: between the model's layers the "
            'examples of a batch must stay on the first axis, each by itself; use backend="rows" or "auto"'
        )
    return rows


def _agree(many: ModuleTask, single: ModuleTask, example: Tensor) -> bool:
    """Whether both give the same gradient: what a `forward` does between layers cannot be read off them."""
    start = many.flatten(many.module.state_dict()).to(many.device)
    theta = torch.stack([start, start + 0.1 * torch.sin(torch.arange(len(start), device=start.device))])
    x = torch.stack([example, example.flip(0)]).to(many.device)
    batch = _batch(many, x)
    try:
        ours = many.grad(theta, batch)
    except (ModelError, RuntimeError):
        return False
    wanted = single.grad(theta, batch)
    return bool(torch.allclose(ours, wanted, rtol=1e-2, atol=1e-3 * float(wanted.abs().max())))


def _try(task: ModuleTask, example: Tensor, clients: int) -> None:
    """Compute one gradient of `clients` clients on the example batch."""
    theta = task.flatten(task.module.state_dict()).repeat(clients, 1)
    batch = _batch(task, example.to(task.device).expand(clients, *example.shape))
    if isinstance(task, FusedTask):  # by torch, which says the same and needs no compiler
        StackedTask.grad(task, theta, batch)
    else:
        task.grad(theta, batch)


def _reason_without_features(task: ModuleTask, example: Tensor) -> str:
    """Why methods that work at features cannot use the model (its output is not that of its last linear layer, as
    where it ends in log_softmax), before one of them fails in the middle of a run; "" if they can."""
    theta = task.flatten(task.module.state_dict()).to(task.device)[None]
    try:
        task.features_and_logits(theta, example.to(task.device)[None])
    except ModelError as error:
        return str(error)
    return ""


def _batch(task: ModuleTask, x: Tensor) -> Batch:
    """Examples x [n, B, ...] with labels of 0; in survival, events at the end of the first period."""
    target = task.objective.example_target.to(task.device)
    y = target.expand(*x.shape[:2], *target.shape).contiguous()
    weight = torch.full(x.shape[:2], 1 / x.shape[1], device=task.device)
    return Batch(x, y, weight, torch.arange(len(x)))


def _gains_from_vmap(task: ModuleTask, example: Tensor) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _try(task, example, clients=2)
        except ModelError:
            return False
    return not any("performance drop" in str(warning.message) for warning in caught)


def worth_compiling(num_params: int, examples: float) -> bool:
    """Whether local training on `examples` of all rounds and clients is long enough for the fused path."""
    return _operations(num_params, examples) >= FUSED_FROM


def _operations(num_params: int, examples: float) -> float:
    return 6.0 * num_params * examples


def would_compile(task: ModuleTask, examples: float) -> bool:
    """Whether a task on the stacked path would be on the fused one if numba were installed, and gain much by it."""
    return (
        task.backend == StackedTask.backend
        and isinstance(task, StackedTask)
        and compiles(task.net, task.device, task.objective)
        and _operations(task.num_params, examples) >= LONG_RUN
        and not is_installed()
    )


def _task_for(
    module: nn.Module, build: Build, backend: str, device: torch.device | str, example: Tensor | None,
    batch: int | None, objective: Objective, examples: float = 0,
) -> ModuleTask:  # fmt: skip
    """The task of a module that `build` made, by a rule that was measured (docs/models.md)."""
    if backend != "auto":
        if objective.couples and backend not in ("rows", "stacked"):
            raise ModelError(f"loss {objective.name} needs whole batches of one client; use backend rows or stacked")
        return _BACKENDS[backend](build, device, module=module, objective=objective)
    layout = RowLayout.of(module)
    net = stacked_net(module, objective) if layout.is_plain(module) else None
    may = net is not None and compiles(net, device, objective) and layout.num_params <= net.compiles_up_to
    if may and is_installed() and worth_compiling(layout.num_params, examples):
        return FusedTask(build, device, module=module, net=net, objective=objective)
    if net is not None and layout.num_params <= net.stacks_up_to:
        return StackedTask(build, device, module=module, net=net, objective=objective)
    if (
        example is not None
        and batch is not None
        and runs_batched(module)
        and few_positions(example, batch, packing_of(module))
    ):
        return BatchedTask(build, device, module=module, objective=objective)
    has_state = layout.has_statistics or bool(still_buffers(module))
    weights = sum(p.numel() for p in module.parameters())  # frozen ones too: their products are the work of a step
    gains_nothing = has_state or drops(module) or weights > FEW_PARAMETERS or objective.couples
    if gains_nothing or any(isinstance(child, _ROW_BY_ROW) for child in module.modules()):
        return RowsTask(build, device, module=module, objective=objective)
    return VmapTask(build, device, module=module, objective=objective)
