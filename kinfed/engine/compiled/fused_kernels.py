"""The compiled calls of the fused backend: all local steps of some clients, one step on a batch, and scores.

Each call takes many clients, one after the other, and runs without the interpreter's lock. Its arguments are words in
memory, as kinfed.engine.compiled.machine_code puts them there, which also keeps what is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, get_type_hints

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import compiler
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from kinfed.engine.compiled import kernel_arguments as args
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
from kinfed.engine.compiled.machine_code import MachineCode
from kinfed.engine.compiled.program_steps import run_program
from kinfed.engine.compiled.vector_code import Builder, Value, whole_number

_LAYERS = {"dense": args.IntRows, "recurrent": args.Unrolled}
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
    network: args.Network, theta: args.Rows, source: args.ExampleSource, windows: args.BatchWindows,
    draws: args.OrderDraws, terms: args.ClientTerms, optimizer: args.OptimizerMemory, work: args.Work,
) -> None:  # fmt: skip
    """All local steps of every client, on the windows of kinfed.data.examples.windows: theta changes in place."""
    rule, nothing = optimizer.rule, np.int64(0)
    for i in range(len(windows.steps)):
        row, rate = row_of(theta, i), terms.rates[i]
        rest = args.StepTerms(rate, terms.lams[i], row_of(terms.center, i), row_of(terms.drift, i), rule[DECAY])
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


def step(
    network: args.Network, theta: args.Rows, batch: args.GivenBatch, terms: args.ClientTerms, gradient: args.Rows,
    work: args.Work,
) -> None:  # fmt: skip
    """The gradient on one batch per client, or a step of plain descent in place."""
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
        rest = args.StepTerms(rate, terms.lams[i], row_of(terms.center, i), row_of(terms.drift, i), 0.0)
        outputs = forward(network, row, values, work, size)
        delta_of_loss(network, outputs, work, size)
        if gradient.address != 0:
            backward(network, row, target, 1.0, values, work, size, rest)
        else:
            backward(network, row, row, -rate, values, work, size, rest)


def score(
    network: args.Network, theta: args.Rows, source: args.ExampleSource, part: args.ScoredPart, scores: args.Scores,
    work: args.Work,
) -> None:  # fmt: skip
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


_INT64 = ir.IntType(64)
_WORDS = {int: types.intp, bool: types.boolean}


def numba_type(form: Any, choice: Mapping[str, Any]) -> Any:
    """numba's type of what kinfed.engine.compiled.kernel_arguments describes, with a choice of labels and layers."""
    if form in _WORDS:
        return _WORDS[form]
    if hasattr(form, "_fields"):
        hints = get_type_hints(form, include_extras=True).values()
        return types.BaseTuple.from_types(tuple(numba_type(hint, choice) for hint in hints), form)
    kind, *axes = form.__metadata__
    if not axes:
        return numba_type(choice[kind], choice)
    return types.Array(getattr(types, choice.get(kind, kind)), axes[0], "C")


def described(kind: Any) -> Any:
    """A type of numba's, as kinfed.engine.compiled.machine_code.MachineCode names it."""
    if isinstance(kind, types.Array) and kind.layout == "C":
        return [str(kind.dtype), kind.ndim]
    if isinstance(kind, types.BaseNamedTuple):
        return {name: described(part) for name, part in zip(kind.fields, kind.types, strict=True)}
    if isinstance(kind, types.Integer | types.Boolean):
        return "word"
    raise TypeError(
        f"a kernel's argument cannot be {kind}: whole numbers, arrays in C order and named tuples of these can"
    )


def make_reader(kinds: tuple[Any, ...]) -> Callable[..., Any]:
    """read(address): a tuple of values of these types. Arrays are where the caller has them, and stay the caller's."""

    @intrinsic
    def read(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Builder, signature: Any, given: list[Value]) -> Value:
            words = _Words(context, builder, given[0])
            return context.make_tuple(builder, signature.return_type, [words.value_of(kind) for kind in kinds])

        return types.Tuple(kinds)(types.intp), generate

    return read


class _Words:
    """Instructions that read one word after the other."""

    def __init__(self, context: Any, builder: Builder, address: Value) -> None:
        self._context, self._b = context, builder
        self._first, self._next = builder.inttoptr(address, _INT64.as_pointer()), 0

    def value_of(self, kind: Any) -> Value:
        if isinstance(kind, types.Array):
            return self._array(kind)
        if isinstance(kind, types.BaseTuple):
            return self._context.make_tuple(self._b, kind, [self.value_of(part) for part in kind.types])
        return self._context.cast(self._b, self._word(), types.intp, kind)

    def _word(self) -> Value:
        word = self._b.load(self._b.gep(self._first, [whole_number(self._next)]))
        self._next += 1
        return word

    def _array(self, kind: Any) -> Value:
        """An array in C order."""
        numbers = self._context.get_data_type(kind.dtype).as_pointer()
        data = self._b.inttoptr(self._word(), numbers)
        shape = [self._word() for _ in range(kind.ndim)]
        size = whole_number(kind.dtype.bitwidth // 8)
        strides = [size]
        for length in shape[:0:-1]:
            strides.insert(0, self._b.mul(strides[0], length))
        array = make_array(kind)(self._context, self._b)
        populate_array(array, data=data, shape=shape, strides=strides, itemsize=size, meminfo=None)
        return array._getvalue()
