"""A model tried on a few examples before it is trained: failures and silent mistakes of later are found here.

    try_model(task, example, outputs=10)                 refuses, or returns

Tried is the module itself, in training and in evaluation, at its own start: that it takes the examples, gives [B, C]
finite float32 logits (not probabilities) that depend on what is trained, leaves the examples as they are, treats every
example alone in evaluation, is the same function when it is called again with the same draws, and keeps nothing from
call to call in attributes of Python (kinfed.engine.rows.python_state).

A float buffer that `state_dict` holds may be statistics that training moves, or a table. By default it is taken for
statistics, which is never wrong and costs its bytes in every message. It is a constant where it is seen to be one: the
module begins with the same values whatever the seed, and two training passes over different examples leave them as they
are. Training looks at constants after every pass (`WorkingCopy.check_still`), and a model that moves one after all is
refused by its name.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kinfed.data import Batch
from kinfed.engine.rows.keyed_random import KeyedDraws
from kinfed.engine.rows.layout import STILL, Norm, statistics
from kinfed.engine.rows.model_calls import packing_of
from kinfed.engine.rows.module_task import ModuleTask
from kinfed.engine.rows.python_state import changed_attribute, python_state
from kinfed.errors import KinfedError, ModelError

# Outputs that differ by more than this share of the largest one are not the same function of an example: rounding
# alone, which depends on the size of the batch, stays far below it.
ROUNDING = 1e-3
ROUNDING_OF_16_BITS = 0.1
PROBABILITY_ROUNDING = 1e-5  # by which a sum of probabilities may miss 1


OutputShapes = int | tuple[tuple[int, ...], ...] | None  # of one example: [C] by C, any of several, or any at all


def try_model(task: ModuleTask, example: Tensor, outputs: OutputShapes = None) -> None:
    """Refuse a task whose module does not work on the batch `example` [B, ...], with the reason and what to do;
    `outputs` is the number of classes, or 1 for a regression, where it is known, or all shapes that may be."""
    example = example.to(task.device)
    z = _output(task, example, training=True)
    _check_output(z, len(example), outputs, "in training")
    if not z.requires_grad:
        raise ModelError(
            "the model's output does not depend on its trained parameters, as far as autograd knows; leave out "
            "detach(), torch.no_grad() and argmax() in its forward"
        )
    has_16_bits = any(p.dtype in (torch.float16, torch.bfloat16) for p in task.module.parameters())
    tolerance = ROUNDING_OF_16_BITS if has_16_bits else ROUNDING
    again = _output(task, example, training=True)
    _check_python_state(task, example, training=True)
    if not _close(z, again, tolerance):
        raise ModelError(
            "the model gives something else when it is called again on the same examples: it draws random numbers "
            "outside of torch (random, numpy), or keeps state between calls outside of float32 buffers; draw with "
            "torch.rand or torch.randn, and keep such state in a float32 buffer (register_buffer)"
        )
    z = _output(task, example, training=False)
    _check_output(z, len(example), outputs, "in evaluation")
    sums_are_one = task.classifies and z.shape[1] > 1 and bool(((z.sum(1) - 1).abs() < PROBABILITY_ROUNDING).all())
    if sums_are_one and bool((z >= 0).all()):
        raise ModelError(
            "the model gives probabilities, which are 0 or more and add up to 1 for every example; leave out the "
            "softmax at its end: the loss expects logits; with probabilities training would silently go badly"
        )
    _output(task, example, training=False)
    _check_python_state(task, example, training=False)
    alone = [_output(task, example[i : i + 1], training=False) for i in range(len(example))]
    for one in alone:
        _check_output(one, 1, outputs, "in evaluation")
    if not _close(z, torch.cat(alone), tolerance):
        raise ModelError(
            "the model's prediction for an example depends on the other examples of its batch; the batch is the first "
            "axis: recurrent and attention layers take batch_first=True, and means and softmax another axis than 0"
        )


@contextmanager
def failures_as_model_errors(module: nn.Module, example: Tensor, where: str = "") -> Iterator[None]:
    """A context for code of the module's author: whatever it raises on these examples becomes an error that says so."""
    try:
        yield
    except (KinfedError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the code of a stranger may raise anything
        raise ModelError(_failure(module, example, error, where)) from error


def _output(task: ModuleTask, example: Tensor, *, training: bool) -> Any:
    """The output of the module, from the task's start and with the draws of a first step."""
    working = task._working_copy(training=training)
    working.bind(task.flatten(task.module.state_dict()), moving=False)
    x, y = example.clone(), torch.zeros(1, len(example), dtype=torch.int64)
    working.draws.begin(Batch(x[None], y, y.to(torch.float32), torch.zeros(1, dtype=torch.int64)), 0)
    with (
        failures_as_model_errors(task.module, example),
        torch.set_grad_enabled(training),
        KeyedDraws(working.draws) as caught,
    ):
        z = working.module(x)
    if caught.operations and not training:
        raise ModelError(
            f"the model draws random numbers by torch.{min(caught.operations)} in evaluation, so that predictions "
            "would not repeat; draw in training alone: if self.training, or dropout(x, p, self.training)"
        )
    if not torch.equal(x, example):
        raise ModelError(
            "the model changes its input in place, and the same examples are used again; begin its forward with "
            "x = x.clone(), or give the first layer inplace=False"
        )
    return z


def _check_python_state(task: ModuleTask, example: Tensor, *, training: bool) -> None:
    """Refuse a module whose third call on the same examples changes an attribute: the first two may set some."""
    module = task._working_copy(training=training).module
    before = python_state(module)
    _output(task, example, training=training)
    changed = changed_attribute(before, python_state(module))
    if changed is None:
        return
    where = f"layer {changed.layer!r}" if changed.layer else "the model"
    raise ModelError(
        f"{where} changes its attribute {changed.name!r} in every call, in {'training' if training else 'evaluation'} "
        f"({changed.before}, then {changed.after}); copies of the model serve many clients in turn, so that results "
        "would depend on threads and on who was trained before: leave that out of forward, or keep it in a float32 "
        "buffer (register_buffer), which every client has for itself"
    )


def _failure(module: nn.Module, example: Tensor, error: Exception, where: str) -> str:
    reason = str(error).partition("\n")[0]
    kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
    kinds = {type(layer) for layer in module.modules()}
    hint = ""
    if example.is_floating_point() and kinds & {nn.Embedding, nn.EmbeddingBag}:
        hint = "; the model embeds tokens, and the examples are no whole numbers (tokens=True where data are read)"
    elif isinstance(error, IndexError) and not example.is_floating_point():
        hint = f"; the largest token is {int(example.max())}, so that an nn.Embedding has at least one row more"
    elif not example.is_floating_point():
        hint = "; the examples are tokens (int64), which a model embeds (nn.Embedding) or turns into x.float()"
    packing = packing_of(module)
    shape = f"shape {list(example.shape[1:])}" if packing is None else packing.in_words()
    return f"the model fails on examples of {shape}{where}: {kind}{reason}{hint}"


def _check_output(z: Any, examples: int, outputs: OutputShapes, when: str) -> None:
    if isinstance(outputs, tuple) and [len(shape) for shape in outputs] == [1]:
        ((outputs,),) = outputs
    what = "one number per example" if outputs == 1 else "one row of logits per example"
    wanted = f"the model should give {what}, [{examples}, {outputs or 'classes'}]"
    if isinstance(outputs, tuple):
        shapes = [str([examples, *shape]) for shape in outputs] or [f"[{examples}, ...]"]
        wanted = f"the model should give {' or '.join(shapes)}"
    if not isinstance(z, Tensor):
        raise ModelError(f"{wanted}; {when} it gives a {type(z).__name__}: return the tensor of logits alone")
    if isinstance(outputs, tuple):
        if z.dim() == 0 or len(z) != examples or (outputs and tuple(z.shape[1:]) not in outputs):
            raise ModelError(f"{wanted}; {when} it gives {list(z.shape)}: see what the problem's outputs are")
    elif z.dim() != 2 or len(z) != examples or (outputs is not None and z.shape[1] != outputs):
        raise ModelError(f"{wanted}; {when} it gives {list(z.shape)}: {_advice(z, examples, outputs)}")
    if z.dtype != torch.float32:
        raise ModelError(f"{wanted} of float32; {when} it gives {z.dtype}: return logits, by .float() if needed")
    if bool((torch.isnan(z) | torch.isposinf(z)).any()):
        raise ModelError(
            f"the model gives NaN or infinite logits at its start, {when}; look for log, root or division of what may "
            "be 0 or negative in its forward, and at the scale of its weights and of the data"
        )


def _advice(z: Tensor, examples: int, outputs: int | None) -> str:
    if z.dim() == 2 and len(z) == examples:
        if outputs == 1:
            return f"its last layer has {z.shape[1]} outputs, and the target is one number (a regression)"
        one = " (two classes have two logits)" if z.shape[1] == 1 else ""
        return (
            f"its last layer has {z.shape[1]} output{'s' * (z.shape[1] > 1)}, and the data have {outputs} classes{one}"
        )
    if z.dim() == 1:
        return "leave out squeeze, argmax and means over the batch"
    if z.dim() > 2 and len(z) == examples:
        return "flatten or pool what is left of other axes, before the last linear layer"
    return "keep the examples on the first axis, all of them"


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    a, b = (torch.nan_to_num(x.detach(), neginf=0.0) for x in (a, b))
    return bool((a - b).abs().max() <= tolerance * (1e-3 + a.abs().max()))


Examples = tuple[Tensor, ...]  # any of which the module may take


def mark_still_buffers(module: nn.Module, build_other: Callable[[], nn.Module], candidates: Examples) -> None:
    """Mark buffers that never move as constants. The module, and one that `build_other` makes with other random
    numbers, is tried on the first of the candidates [B, ...] that it takes; where it takes none, nothing is marked."""
    values = {
        name: value.clone()
        for name, value in statistics(module)
        if not isinstance(module.get_submodule(name.rpartition(".")[0]), Norm)
    }
    if not values:
        return
    twin = build_other().state_dict()
    same = {name: value for name, value in values.items() if name in twin and torch.equal(twin[name], value)}
    if not same:
        return
    after = _after_training(module, candidates) or {}
    for name, value in same.items():
        if name in after and torch.equal(after[name], value):
            owner, _, own = name.rpartition(".")
            layer = module.get_submodule(owner)
            setattr(layer, STILL, {own, *getattr(layer, STILL, ())})


def _after_training(module: nn.Module, candidates: Examples) -> dict[str, Tensor] | None:
    """The module's state after two passes over different examples; torch's generator is left as it was."""
    for example in candidates:
        trial = copy.deepcopy(module).train()
        try:
            with failures_as_model_errors(module, example), torch.no_grad(), torch.random.fork_rng(devices=[]):
                trial(example.clone())
                trial(example.flip(0) + 1 if example.is_floating_point() else example.flip(0))
        except ModelError:  # a model that takes none is refused by its trial
            continue
        return trial.state_dict()
    return None


def example_like(shape: tuple[int, ...]) -> Examples:
    """Examples of a shape, where none are at hand: numbers, and tokens that every embedding has."""
    numbers = torch.linspace(-1, 1, 2 * max(1, torch.Size(shape).numel())).view(2, *shape)
    return numbers, torch.tensor([0, 1]).view(2, *(1 for _ in shape)).expand(2, *shape).contiguous()
