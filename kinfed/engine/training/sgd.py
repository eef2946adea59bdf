"""Local loops: steps of an optimizer on every row, for clients with equal or unequal numbers of steps, and programs
that update several models (kinfed.engine.contract.update_program) with every batch.

A program runs in one compiled call per cohort where the task has one (kinfed.engine.compiled.fused_kernels), else one
step after the other in torch: that says what they mean, and is the oracle of the compiled ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from kinfed.core import copied_rows, kernels, runs
from kinfed.data import Batch, Batches
from kinfed.engine.contract.descent import Descent, ProximalTerm, Terms, take_if_tensor
from kinfed.engine.contract.feature_loss import FeatureLoss
from kinfed.engine.contract.task import Task
from kinfed.engine.contract.update_program import Add, Collect, Gradient, GradientStep, Instruction, Mix, Norm, changes
from kinfed.engine.training.optimizers import blank_moments, clipped, make_optimizer


def sgd(
    task: Task, theta: Tensor, batches: Batches, *, lr: float | None = None, proximal: ProximalTerm | None = None,
    drift: Tensor | None = None, mask: Tensor | None = None, feature_loss: FeatureLoss | None = None,
) -> Tensor:  # fmt: skip
    """theta [n, P] after local training; the argument is left as it was.

        for every batch:  g <- gradient + lam * (theta - center) + drift, of norm `clip` at most
                          theta <- theta moved along g by the optimizer

    With plain SGD the last line is theta - lr * (g + weight_decay * theta). `lr` replaces the rate of the local
    training, `proximal` is (lam, center [n, P]) with lam a number or one per client, `drift` is [n, P] or one for all
    ([P]), `mask` [P] confines training to some parameters, `feature_loss` changes the loss at features and logits.
    Optimizer, weight decay and clip are those of the local training. Like the proximal term and drift they concern
    trainable columns only; running statistics move with the forward passes, except those outside the mask, which
    stay."""
    training = batches.training
    rate = batches.lr if lr is None else lr
    trainable = task.trainable.stop
    if drift is not None:
        drift = drift.to(theta).expand_as(theta)
        if trainable < theta.shape[1]:
            drift = drift.clone()
            drift[:, trainable:] = 0
    terms = Terms(proximal, drift, feature_loss)
    whole_loop = task.whole_loop(batches) if feature_loss is None else None
    if whole_loop is not None:
        x = theta.clone(memory_format=torch.contiguous_format)
        columns = [slice(0, x.shape[1])] if mask is None else runs(mask)
        with _remembered(batches, columns, x) as remembered:
            blank = blank_moments(training, columns, x) if remembered is None else remembered
            whole_loop(x, rate, terms, mask, blank)
        return x
    order = _longest_first(batches.steps)
    if order is not None:
        some = vars(terms.rows(order, len(theta)))
        return sgd(task.of_rows(order), theta[order], batches.take(order), lr=lr, mask=mask, **some)[
            torch.argsort(order)
        ]
    descent = _plain_descent(task, theta, batches, terms, mask)
    if descent is not None:
        for rows, batch in batches.reusing_memory():
            assert isinstance(rows, slice)  # step counts fall
            descent.step(rows, batch, rate)
        return descent.result()
    return _with_optimizer(task, theta, batches, rate, terms, mask)


def _with_optimizer(
    task: Task, theta: Tensor, batches: Batches, rate: float, terms: Terms, mask: Tensor | None
) -> Tensor:
    """The loop of any task and optimizer, for clients whose step counts fall."""
    training, trainable = batches.training, task.trainable.stop
    x = copied_rows(theta)
    pieces = task.gradient_pieces(mask)
    still = [] if mask is None else runs(mask[trainable:] == 0)
    fixed = [slice(trainable + block.start, trainable + block.stop) for block in still]
    largest = training.largest_gradient
    with _remembered(batches, pieces.columns, x) as moments:
        optimizer = make_optimizer(training, pieces.columns, x, moments)
        for rows, batch in batches.reusing_memory():
            assert isinstance(rows, slice)  # step counts fall
            now = x[rows]
            # A task's own: it may even be a view of `now`, so it is not changed in place. The rows of a feature loss
            # are those of `now`: step counts fall, so the clients that still train are the first ones.
            gradient = pieces.gradient(now, batch, terms.feature_loss)
            for block in fixed:  # the forward pass moved all running statistics
                now[:, block] = theta[rows, block]
            gradient = [
                _with_terms(g, now[:, block], block, rows, terms)
                for g, block in zip(gradient, pieces.columns, strict=True)
            ]
            optimizer.step(rows, now, gradient if largest is None else clipped(gradient, largest), rate)
            del gradient  # before the next one is computed: its memory serves that one
    return x


def _plain_descent(task: Task, theta: Tensor, batches: Batches, terms: Terms, mask: Tensor | None) -> Descent | None:
    """The task's own loop, where every step is lr times the gradient with these terms; None if it needs more."""
    training, trainable, proximal = batches.training, task.trainable.stop, terms.proximal
    no_terms = proximal is None and terms.drift is None and training.weight_decay == 0
    if not training.is_plain or not (trainable == theta.shape[1] or no_terms):
        return None
    if (training.weight_decay and proximal is not None) or (mask is not None and terms.drift is not None):
        return None
    decay = toward_zero(theta, training.weight_decay) if proximal is None else proximal
    return task.descent(theta, len(batches), replace(terms, proximal=decay), mask)


def _with_terms(g: Tensor, now: Tensor, block: slice, rows: slice, terms: Terms) -> Tensor:
    """The gradient of some columns with proximal term and drift; a new tensor if there is either."""
    if terms.proximal is not None:
        lam = take_if_tensor(terms.proximal[0], rows)
        g = g + (lam[:, None] if isinstance(lam, Tensor) else lam) * (now - terms.proximal[1][rows, block])
    return g if terms.drift is None else g + terms.drift[rows, block]


def _remembered(
    batches: Batches, columns: Sequence[slice], theta: Tensor
) -> AbstractContextManager[dict[str, Tensor] | None]:
    """Moments of this loop in the clients' memory, to be changed in place and stored at the end. None if the loop
    starts anew: because the training says so, or outside of a client's round, which has no memory."""
    view = batches.split.memory
    if view is None or batches.training.optimizer_state == "reset":
        return nullcontext()
    return view.of_loop(batches.loop, blank_moments(batches.training, columns, theta))


def gradient(task: Task, theta: Tensor, batch: Batch, weight_decay: float, *, training: bool = False) -> Tensor:
    """[n, P] gradient of every row's loss with weight decay, for methods with steps of their own; with `training` the
    running statistics of theta move in place. May be `theta` itself: not to be changed in place."""
    g = task.training_grad(theta, batch) if training else task.grad(theta, batch)
    if not weight_decay:
        return g
    g = g.clone()
    g[:, task.trainable].add_(theta[:, task.trainable], alpha=weight_decay)
    return g


def toward_zero(theta: Tensor, weight_decay: float) -> ProximalTerm | None:
    """Weight decay as a proximal term, for `task.descend_`."""
    return (weight_decay, theta.new_zeros(1).expand_as(theta)) if weight_decay else None


def each_step(batches: Batches, *rows: Tensor) -> Iterator[tuple[Batch, list[Tensor]]]:
    """Yield (batch, [active rows of every tensor]) per step, for methods with a loop of their own.

    Change the yielded rows in place; the tensors given [n, ...] then hold the result, whichever clients have
    finished before others."""
    for active, batch in batches:
        views = [tensor[active] for tensor in rows]
        yield batch, views
        if not isinstance(active, slice):  # the views are copies
            for tensor, view in zip(rows, views, strict=True):
                tensor[active] = view


def _longest_first(steps: Tensor) -> Tensor | None:
    """An order in which step counts fall, so that active rows are a prefix (a view); None if they already do."""
    if bool((steps[:-1] >= steps[1:]).all()):
        return None
    return torch.argsort(steps, descending=True, stable=True)


def run_program(
    task: Task, streams: Sequence[Batches], program: Sequence[Instruction], models: Mapping[str, Tensor],
    numbers: Mapping[str, Tensor] | None = None,
) -> None:  # fmt: skip
    """Run the program with every batch, in place; with several streams of batches, one of each at every step."""
    numbers = numbers or {}
    whole_program = task.whole_program(streams, models)
    if whole_program is not None:
        whole_program(program, models, numbers)
        return
    state, changed = {**models, **numbers}, {name for step in program for name in changes(step)}
    others = [iter(stream) for stream in streams[1:]]
    for active, batch in streams[0]:
        batches = [batch, *(next(other)[1] for other in others)]
        now = {name: tensor[active] for name, tensor in state.items()}
        for step in program:
            _execute(task, step, now, batches)
        if not isinstance(active, slice):  # these are copies
            for name in changed & state.keys():
                state[name][active] = now[name]


def mixture(base: Tensor, toward: Tensor, share: float | Tensor, trainable: slice) -> Tensor:
    """[n, P] of `Mix`."""
    if isinstance(share, Tensor):
        share = share[:, None].to(base.dtype)
    mixed = torch.lerp(base, toward, share)
    mixed[:, trainable.stop :] = toward[:, trainable.stop :]
    return mixed


def _execute(task: Task, step: Instruction, now: dict[str, Tensor], batches: Sequence[Batch]) -> None:
    match step:
        case GradientStep():
            _descend(task, step, now, batches[step.stream])
        case Gradient():
            at = now[step.at]
            _put(now, step.result, gradient(task, at, batches[step.stream], step.decay, training=True))
            _take_statistics(task, now[step.result], at)
        case Mix():
            share = now[step.share] if isinstance(step.share, str) else step.share
            _put(now, step.result, mixture(now[step.base], now[step.toward], share, task.trainable))
        case Add():
            base, direction = now[step.base], now[step.direction]
            scale = _scale(step.scale, step.number, now, base)
            _put(now, step.result, base + scale * direction)
            _take_statistics(task, now[step.result], direction)
        case Norm():
            length = kernels.norm(now[step.model][:, task.trainable]).clamp_min(step.least)
            _put(now, step.number, step.scale * length**step.power)
        case Collect():
            _collect(step, now, batches[0].step, now[step.model][:, task.trainable])


def _put(now: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Write to a model or number that is kept; one that lasts for a batch becomes a copy, to be changed at will."""
    if name in now:
        now[name].copy_(value)
    else:
        now[name] = value.clone()


def _take_statistics(task: Task, model: Tensor, source: Tensor) -> None:
    model[:, task.trainable.stop :] = source[:, task.trainable.stop :]


def _scale(scale: float, number: str | None, now: Mapping[str, Tensor], like: Tensor) -> float | Tensor:
    return scale if number is None else (scale * now[number])[:, None].to(like)


def _collect(step: Collect, now: Mapping[str, Tensor], number: int, model: Tensor) -> None:
    begin, width = now[step.begin], now[step.width]
    inside = number >= begin
    window = torch.where(inside, (number - begin) // width, 0).to(model.device, torch.int64)
    share = torch.where(inside, 1 / width, 0.0).to(model)
    windows = now[step.result].view(len(model), -1, model.shape[1])
    windows[torch.arange(len(model), device=model.device), window] += share[:, None] * model


def _descend(task: Task, step: GradientStep, now: dict[str, Tensor], batch: Batch) -> None:
    model = now[step.model]
    if step.at is None or step.at == step.model:
        proximal = _proximal(step, now)
        for _ in range(step.times):
            task.descend_(model, batch, step.rate, proximal)
        return
    at = now[step.at]
    g = gradient(task, at, batch, step.decay, training=step.measures)
    change = g * _scale(step.rate, step.number, now, g)
    if step.learn is not None and not (step.learn.first_only and batch.step):
        learn = step.learn
        slope = (g * (now[learn.toward] - now[learn.base])).sum(1, dtype=torch.float64)
        now[learn.number].sub_(learn.rate * slope).clamp_(0, 1)
    model[:, task.trainable].sub_(change[:, task.trainable])
    if step.measures:
        _take_statistics(task, model, at)


def _proximal(step: GradientStep, now: dict[str, Tensor]) -> ProximalTerm | None:
    """Proximal term and weight decay in one: λ (θ − c) + κ θ = (λ + κ) (θ − c λ / (λ + κ))."""
    lam, center = (0.0, None) if step.proximal is None else (step.proximal[0], now[step.proximal[1]])
    total = lam + step.decay
    if center is None or not total:
        return toward_zero(now[step.model], step.decay)
    return total, center * (lam / total) if step.decay else center
