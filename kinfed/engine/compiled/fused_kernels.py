"""The compiled calls of the fused backend: all local steps of some clients, one step on a batch, and scores.

Each call takes many clients, one after the other, and runs without the interpreter's lock. Compiling takes time;
kinfed.engine.compiled.machine_code does it once, and keeps what comes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, get_type_hints

import numpy as np
from numba import njit, types
from numba.core import compiler
from numba.core.registry import cpu_target

from kinfed.engine.compiled.fused_choice import add_losses, backward, delta_of_loss, forward
from kinfed.engine.compiled.fused_orders import draw_orders
from kinfed.engine.compiled.fused_steps import (
    DECAY,
    KIND,
    PLAIN,
    copy,
    floats,
    optimizer_step,
    read_batch,
    read_example,
    row_of,
)
from kinfed.engine.compiled.kernel_arguments import (
    BatchWindows,
    ClientTerms,
    ExampleSource,
    GivenBatch,
    IntRows,
    Network,
    OptimizerMemory,
    OrderDraws,
    Rows,
    ScoredPart,
    Scores,
    StepTerms,
    Unrolled,
    Work,
)
from kinfed.engine.compiled.kernel_words import described, make_reader, numba_type
from kinfed.engine.compiled.machine_code import MachineCode
from kinfed.engine.compiled.program_steps import run_program

_LAYERS = {"dense": IntRows, "recurrent": Unrolled}
_LABELS = {"classes": "int64", "numbers": "float32"}


def compile_kernel(name: str, network: str, target: str) -> MachineCode:
    """`train`, `program`, `step` or `score` of a `dense` or `recurrent` network for `classes` or `numbers`."""
    function, choice = _KERNELS[name], {"layers": _LAYERS[network], "label": _LABELS[target]}
    forms = get_type_hints(function, include_extras=True)
    del forms["return"]
    return compile_function(function, tuple(numba_type(form, choice) for form in forms.values()))


def compile_function(function: Callable[..., Any], arguments: tuple[Any, ...]) -> MachineCode:
    """Machine code of a function with arguments of these types (numba's)."""
    described_arguments = {
        name: described(kind) for name, kind in zip(signature(function).parameters, arguments, strict=True)
    }
    kernel, read = njit(nogil=True, error_model="numpy")(function), make_reader(arguments)

    def entry(words):
        kernel(*read(words))

    flags = compiler.Flags()
    flags.error_model, flags.nrt = "numpy", True
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True  # both would ask for numba when they are linked
    result = compiler.compile_extra(
        cpu_target.typing_context, cpu_target.target_context, entry, (types.intp,), types.void, flags, {}
    )
    _, _, (content, _) = result.library.serialize_using_object_code()
    return MachineCode(result.fndesc.llvm_func_name, described_arguments, content)


def train(
    network: Network,
    theta: Rows,
    source: ExampleSource,
    windows: BatchWindows,
    draws: OrderDraws,
    terms: ClientTerms,
    optimizer: OptimizerMemory,
    work: Work,
) -> None:
    """All local steps of every client, on the windows of kinfed.data.examples.windows: theta changes in place."""
    rule, nothing = optimizer.rule, np.int64(0)
    for i in range(len(windows.steps)):
        row, rate = row_of(theta, i), terms.rates[i]
        rest = StepTerms(rate, terms.lams[i], row_of(terms.center, i), row_of(terms.drift, i), rule[DECAY])
        draw_orders(draws.key[i], windows.counts[i], draws.epochs[i], draws.order, draws.places)
        for s in range(windows.steps[i]):
            size = read_batch(source, windows, draws.order, nothing, i, s, work)
            outputs = forward(network, row, work.x, work, size)
            delta_of_loss(network, outputs, work, size)
            if rule[KIND] == PLAIN:
                backward(network, row, row, -rate, work.x, work, size, rest)
            else:
                floats(optimizer.gradient, network.columns)[:] = np.float32(0.0)
                backward(network, row, optimizer.gradient, 1.0, work.x, work, size, rest)
                optimizer.taken[i] += np.float32(1.0)
                optimizer_step(row, optimizer, rest, i)


def step(network: Network, theta: Rows, batch: GivenBatch, terms: ClientTerms, gradient: Rows, work: Work) -> None:
    """On one batch per client, either its gradient or a step of plain descent in place."""
    length, width, labels, weights, y, weight = (
        batch.length, batch.width, batch.labels, batch.weights, work.y, work.weight
    )  # fmt: skip
    for i in range(len(labels)):
        row, values, target = row_of(theta, i), row_of(batch.examples, i), row_of(gradient, i)
        size = np.int64(0)
        for b in range(labels.shape[1]):
            y[b], weight[b] = labels[i, b], weights[i, b]
            if weight[b] != 0:
                size = np.int64(b + 1)
        if length > 1:  # [B, T, D] becomes [T, B, D]
            for b in range(size):
                for t in range(length):
                    copy(values + 4 * (b * length + t) * width, work.x + 4 * (t * size + b) * width, width)
            values = work.x
        if gradient.address != 0:
            floats(target, network.columns)[:] = np.float32(0.0)
        rate = terms.rates[i]
        rest = StepTerms(rate, terms.lams[i], row_of(terms.center, i), row_of(terms.drift, i), 0.0)
        outputs = forward(network, row, values, work, size)
        delta_of_loss(network, outputs, work, size)
        if gradient.address != 0:
            backward(network, row, target, 1.0, values, work, size, rest)
        else:
            backward(network, row, row, -rate, values, work, size, rest)


def score(network: Network, theta: Rows, source: ExampleSource, part: ScoredPart, scores: Scores, work: Work) -> None:
    """Correct predictions and summed loss of every client's model on its examples, some at a time; outputs of all
    examples [.., classes] are written, client after client, where scores have an address for them."""
    written, width = np.int64(0), source.width
    for i in range(len(part.start)):
        row = row_of(theta, i)
        for begin in range(0, part.counts[i], part.together):
            size = min(part.together, part.counts[i] - begin)
            for b in range(size):
                number = part.rows[part.start[i] + begin + b]
                read_example(source, number, size * width, work.x + 4 * b * width)
                work.y[b] = source.labels[number]
            outputs = forward(network, row, work.x, work, size)
            add_losses(network, outputs, work, size, scores, i)
            if scores.outputs != 0:
                copy(outputs, scores.outputs + 4 * written * network.outputs, size * network.outputs)
                written += size


_KERNELS: dict[str, Callable[..., Any]] = {"train": train, "program": run_program, "step": step, "score": score}
