"""Arguments of a kernel from words in memory, as kinfed.engine.compiled.machine_code puts them there, and their
types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from kinfed.engine.compiled.vector_code import Builder, Value, whole_number

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
        def generate(context: Any, builder: Builder, signature: Any, args: list[Value]) -> Value:
            words = _Words(context, builder, args[0])
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
        """In C order."""
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
