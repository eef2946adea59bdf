"""Which methods serve clients with several architectures: those of whose messages none depends on the model.

That is declared ("any architecture": predictions, prototypes, a model of the server's own) or follows from the parts
that a method shares, where these are alike in all architectures: the last layers, of equal shapes.
"""

from kinfed.algorithms.base import AnyAlgorithm, check_algorithm_settings
from kinfed.algorithms.common.message_shape import update_template
from kinfed.data import Federation, Population
from kinfed.engine import Architectures, Task
from kinfed.errors import ConfigError

_REMEDY = (
    "leave it out, or give all clients one model. Methods that exchange predictions, prototypes, heads or layers of "
    "equal shapes serve several architectures (docs/methods.md)"
)


def check_architectures(
    algorithm: AnyAlgorithm, architectures: Architectures, data: Federation, population: Population
) -> None:
    """Refuse a method that needs one architecture, and settings that any of these does not admit."""
    method = type(algorithm).__name__
    if algorithm.knn:
        raise ConfigError("knn: nearest neighbours go with models of one architecture; set knn to 0, or give one model")
    for task in architectures.tasks:
        check_algorithm_settings(algorithm, task, population)
    first, *others = zip(architectures.names, architectures.tasks, strict=True)
    for other in others:
        if algorithm.sends and "any architecture" not in algorithm.traits:
            _check_shared(method, algorithm, first, other)
        _check_messages(method, algorithm, first, other, data, population)


Named = tuple[str, Task]


def _check_shared(method: str, algorithm: AnyAlgorithm, one: Named, other: Named) -> None:
    """Refuse a method whose shared layers are other ones in the second architecture."""
    (name, parts), (other_name, others) = (_shared(algorithm, one), _shared(algorithm, other))
    if parts == others:
        return
    if len(parts) != len(others):
        why = f"{len(parts)} parameters of {name} and {len(others)} of {other_name}"
    else:
        a, b = next((a, b) for a, b in zip(parts, others, strict=True) if a != b)
        why = f"{a[0]} {a[1]} {list(a[2])} of {name}, where {other_name} has {b[0]} {b[1]} {list(b[2])}"
    raise ConfigError(f"{method} averages parameters, and these differ between architectures: {why}; {_REMEDY}")


def _shared(algorithm: AnyAlgorithm, named: Named) -> tuple[str, list[tuple[str, str, tuple[int, ...]]]]:
    """Kind, name within its layer, and shape of every parameter of which something is sent."""
    name, task = named
    sent = algorithm.sent_columns(task)
    slots = [slot for slot in task.slots if bool(sent[slot.start : slot.stop].any())]
    return name, [(slot.kind, slot.name.rpartition(".")[2], slot.shape) for slot in slots]


def _check_messages(
    method: str, algorithm: AnyAlgorithm, one: Named, other: Named, data: Federation, population: Population
) -> None:
    """Refuse a method whose server or updates have other shapes with the second architecture."""
    shapes = []
    for _, task in (one, other):
        server = algorithm.init_server(task, population)
        update = update_template(algorithm, task, data, server)
        shapes.append({
            (name, whose): list(tensor.shape)
            for whose, tree in (("its server", server), ("its updates", update))
            for name, tensor in tree.named().items()
        })  # fmt: skip
    for (name, whose), shape in shapes[0].items():
        if (others := shapes[1].get((name, whose))) != shape:
            raise ConfigError(
                f"{method} needs one architecture: {name} of {whose} are {shape} with {one[0]} and {others} with "
                f"{other[0]}; {_REMEDY}"
            )
