"""The compiled calls of the fused backend: all local steps of some clients, an update program, one step on a batch, and
scores.

Each call takes many clients, one after the other, and runs without the interpreter's lock. Its arguments are words in
memory, as kinfed.engine.compiled.machine_code puts them there, which also keeps what is compiled. One text of a kernel
serves all networks and losses; each combination has machine code of its own, for which the types of arguments say:

    network.layers   a table (dense layers), or Unrolled (LSTM layers)
    work.y           int64 (classes), or float32 (numbers)
"""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, get_type_hints

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import compiler
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload
from numba.np.arrayobj import make_array, populate_array

from kinfed.engine.compiled import fused_net as form
from kinfed.engine.compiled import fused_steps as steps
from kinfed.engine.compiled import kernel_arguments as args
from kinfed.engine.compiled.fused_recurrent import recurrent_backward, recurrent_forward
from kinfed.engine.compiled.fused_steps import compiled, copy, floats, read_batch, row_of
from kinfed.engine.compiled.machine_code import MachineCode
from kinfed.engine.compiled.products import products_of_rows, slope_tile
from kinfed.engine.compiled.vector_code import Builder, Value, whole_number

_OPTIONS = {"nogil": True, "error_model": "numpy"}


def _chosen(is_first: Callable[[Mapping[str, Any]], bool], first: Any, second: Any) -> Callable[..., Any]:
    """A function for compiled code: `first` or `second`, which take the same arguments, by the types of these."""
    form = signature(first)

    def function(*arguments: Any) -> Any:
        raise NotImplementedError

    def choose(*kinds: Any) -> Any:
        return first if is_first(dict(zip(form.parameters, kinds, strict=True))) else second

    for one in (function, choose):
        one.__signature__ = form  # type: ignore[attr-defined]  # which numba reads
    overload(function, jit_options=_OPTIONS)(choose)
    return function


def _type_of(kind: Any, name: str) -> Any:
    """The type of a named tuple's entry."""
    return kind.types[kind.fields.index(name)]


def _is_dense(kinds: Mapping[str, Any]) -> bool:
    return isinstance(_type_of(kinds["network"], "layers"), types.Array)


def _has_classes(kinds: Mapping[str, Any]) -> bool:
    return isinstance(_type_of(kinds["work"], "y").dtype, types.Integer)


# The address of the outputs for x [T, B, D], with T = 1 for dense layers; `work` keeps what `backward` needs.
forward = _chosen(_is_dense, steps.dense_forward, recurrent_forward)
# Adds scale * gradient to `target`; where that is the row itself, its columns make the rest of the step before.
backward = _chosen(_is_dense, steps.dense_backward, recurrent_backward)
# weight * ∂loss/∂z [B, C].
delta_of_loss = _chosen(_has_classes, steps.delta_of_cross_entropy, steps.delta_of_residuals)
# Adds the losses of a batch, and how many predictions are right, to entry i.
add_losses = _chosen(_has_classes, steps.add_cross_entropies, steps.add_residual_losses)

TOGETHER = 4096  # numbers whose products are summed in their own type


@compiled
def mix(result, base, toward, share, count):
    """Mix as torch.lerp does: exactly `base` at share 0, and exactly `toward` at 1."""
    out, a, b = floats(result, count), floats(base, count), floats(toward, count)
    near, far = np.float32(share), np.float32(1.0) - np.float32(share)
    if near < np.float32(0.5):
        for i in range(count):
            out[i] = a[i] + near * (b[i] - a[i])
    else:
        for i in range(count):
            out[i] = b[i] - far * (b[i] - a[i])


@compiled
def add_scaled(target, source, scale, count):
    """target <- target + scale * source."""
    x, y, factor = floats(target, count), floats(source, count), np.float32(scale)
    for i in range(count):
        x[i] += factor * y[i]


@compiled
def add(result, base, direction, scale, count):
    """result <- base + scale * direction."""
    out, x, y, factor = floats(result, count), floats(base, count), floats(direction, count), np.float32(scale)
    for i in range(count):
        out[i] = x[i] + factor * y[i]


@compiled
def norm(model, count, sums):
    """The norm of a model, whose squares are added up in float64."""
    total, part = 0.0, floats(sums, 1)
    for begin in range(0, count, TOGETHER):
        size, place = min(np.int64(TOGETHER), count - begin), model + 4 * begin
        products_of_rows(np.int64(1), np.int64(1), size, place, size, place, size, sums, np.int64(1))
        total += np.float64(part[0])
    return np.sqrt(total)


@compiled
def collect(windows, model, step, begin, width, count):
    """Add model / width to the window of the step."""
    if step >= begin:
        window = np.int64((step - begin) // width)
        add_scaled(windows + 4 * window * count, model, 1.0 / width, count)


@compiled
def slope(gradient, base, toward, count, sums):
    """⟨gradient, toward - base⟩, whose parts are added up in float64."""
    total, part = 0.0, floats(sums, 1)
    for begin in range(0, count, TOGETHER):
        size, place = min(np.int64(TOGETHER), count - begin), 4 * begin
        slope_tile(gradient + place, base + place, toward + place, size, sums)
        total += np.float64(part[0])
    return total


@compiled
def number_of(numbers, which, i):
    """A client's number; 1 if there is none."""
    return 1.0 if which == form.NONE else numbers[which, i]


def run_program(
    network: args.Network, source: args.ExampleSource, windows: args.BatchWindows, streams: args.OrderStreams,
    tables: args.ProgramTables, work: args.Work,
) -> None:  # fmt: skip
    """All steps of an update program (kinfed.engine.contract.update_program) with every batch of every client; streams
    have batches of the same sizes. tables.address becomes that of the next client, and of the next."""
    nothing, columns, spare = np.int64(0), network.columns, work.spare
    what, amount, address = tables.what, tables.amount, tables.address
    numbers, gradient = tables.numbers, tables.gradient
    for i in range(len(windows.steps)):
        for s in range(windows.steps[i]):
            size, stream = nothing, np.int64(-1)
            for m in range(len(what)):
                code, by = what[m], amount[m]
                model, at = address[code[form.RESULT]], address[code[form.AT]]
                rate = by[form.RATE] * number_of(numbers, code[form.NUMBER], i)
                if code[form.KIND] == form.MIX:
                    mix(model, at, address[code[form.OTHER]], rate, columns)
                    continue
                if code[form.KIND] == form.ADD:
                    add(model, at, address[code[form.OTHER]], rate, columns)
                    continue
                if code[form.KIND] == form.NORM:  # `spare` is free between two gradients
                    size_of_model = max(norm(at, columns, spare), by[form.LEAST])
                    numbers[code[form.LEARNT], i] = by[form.RATE] * size_of_model ** by[form.POWER]
                    continue
                if code[form.KIND] == form.COLLECT:
                    collect(model, at, s, numbers[code[form.NUMBER], i], numbers[code[form.LEARNT], i], columns)
                    continue
                if code[form.STREAM] != stream:
                    stream = code[form.STREAM]
                    size = read_batch(source, windows, streams.order[stream], streams.offset[i], i, s, work)
                learns = code[form.LEARNT] != form.NONE and (s == 0 or code[form.FIRST_ONLY] == 0)
                center = nothing if model != at or code[form.OTHER] == form.NONE else address[code[form.OTHER]]
                target, scale = (gradient, 1.0) if learns else (model, -rate)
                if learns or code[form.KIND] == form.GRADIENT:
                    floats(target, columns)[:] = np.float32(0.0)
                for _ in range(code[form.TIMES]):  # the rest of a step is part of it where the target is the row itself
                    outputs = forward(network, at, work.x, work, size)
                    delta_of_loss(network, outputs, work, size)
                    terms = args.StepTerms(rate, by[form.LAM], center, nothing, by[form.DECAY])
                    backward(network, at, target, scale, work.x, work, size, terms)
                if model != at and by[form.DECAY] != 0:
                    add_scaled(target, at, scale * by[form.DECAY], columns)
                if learns:
                    along = slope(gradient, address[code[form.BASE]], address[code[form.TOWARD]], columns, spare)
                    number = numbers[code[form.LEARNT], i] - by[form.LEARN_RATE] * along
                    numbers[code[form.LEARNT], i] = min(max(number, 0.0), 1.0) if number == number else number
                    add_scaled(model, gradient, -rate, columns)
        for place in range(len(address)):
            address[place] += 4 * tables.distance[place]


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
    names = signature(function).parameters
    described_arguments = {name: described(kind) for name, kind in zip(names, arguments, strict=True)}
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
        rest = args.StepTerms(rate, terms.lams[i], row_of(terms.center, i), row_of(terms.drift, i), rule[steps.DECAY])
        steps.draw_orders(draws.key[i], windows.counts[i], draws.epochs[i], draws.order, draws.places)
        for s in range(windows.steps[i]):
            size = read_batch(source, windows, draws.order, nothing, i, s, work)
            outputs = forward(network, row, work.x, work, size)
            delta_of_loss(network, outputs, work, size)
            if rule[steps.KIND] == steps.PLAIN:
                backward(network, row, row, -rate, work.x, work, size, rest)
            else:
                floats(optimizer.gradient, network.columns)[:] = np.float32(0.0)
                backward(network, row, optimizer.gradient, 1.0, work.x, work, size, rest)
                optimizer.taken[i] += np.float32(1.0)
                steps.optimizer_step(row, optimizer, rest, i)


def step(
    network: args.Network, theta: args.Rows, batch: args.GivenBatch, terms: args.ClientTerms, gradient: args.Rows,
    work: args.Work,
) -> None:  # fmt: skip
    """The gradient on one batch per client, or a step of plain descent in place."""
    length, width, labels, weights = batch.length, batch.width, batch.labels, batch.weights
    y, weight = work.y, work.weight
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
                steps.read_example(source, number, size * width, work.x + 4 * b * width)
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
        def generate(context: Any, builder: Builder, signature: Any, values: list[Value]) -> Value:
            words = _Words(context, builder, values[0])
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
