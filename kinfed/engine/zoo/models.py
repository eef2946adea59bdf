"""The registry of models: one line each. A model is a function of (input shape, number of classes) and of its options.

    _add(name, file, summary, example, "Options", path, trained=7_850)

`family` (mlr, mlp, cnn, resnet) says which settings of a preset are for the model (kinfed.config.presets).
`example` is the input (shape, number of classes) for which `kinfed list models` says how many parameters there are:
`trained` ones, and `frozen` ones that all clients share. `path` says how its gradients are computed, and after a stroke
how in other runs: "fused" in long ones, "batched" where steps are small. All this is written down because finding it
out needs torch; a test does. Where a model needs files, `outline` names a function of (shape, classes) that builds it
without them, for such counts. Functions are imported when they are first used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kinfed.core import NoOptions, Registry, imported, make_options
from kinfed.data import Problem
from kinfed.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from kinfed.data import Packing

Builder = Callable[..., "nn.Module"]  # (input shape, number of classes, **options); of several inputs their shapes
Example = tuple[tuple[int, ...], int]  # input shape, number of classes

MODELS: Registry[Builder] = Registry("model")

_DIGITS: Example = ((1, 28, 28), 10)
_CIFAR: Example = ((3, 32, 32), 10)
_TEXT: Example = ((64,), 2)


def _add(
    name: str, file: str, summary: str, example: Example, options: str = "", path: str = "rows", **about: Any
) -> None:
    module = f"kinfed.engine.zoo.{file}"
    where = f"{module}:{options}" if options else NoOptions
    MODELS.register(name, f"{module}:{name}", summary=summary, options=where, **about, example=example, path=path)


_add("mlr", "classics", "multinomial logistic regression", _DIGITS, "", "stacked/fused", trained=7_850, family="mlr")
_add("mlp", "classics", "one hidden layer of 128 ReLU units",
     _DIGITS, "", "stacked/fused", trained=101_770, family="mlp")  # fmt: skip
_add("lenet5", "classics", "conv 6/16 5x5, fc 120/84, tanh (LeCun et al. 1998)",
     _DIGITS, "LeNetOptions", trained=61_706, family="cnn")  # fmt: skip
_add("cnn_tutorial", "classics", "conv 6/16 5x5, fc 120/84 (Self-FL on CIFAR-10)",
     _CIFAR, trained=62_006, family="cnn")  # fmt: skip
_add("cnn_fomo", "classics", "conv 32/64/64 3x3, fc 64 (FedFomo)", _CIFAR, trained=122_570, family="cnn")
_add("cnn", "classics", "conv 32/64 5x5, fc 512 (CGPFL on CIFAR-10)", _CIFAR, trained=878_538, family="cnn")
_add("cnn_small", "classics", "conv 16/32 3x3, fc 64, for images from 8x8",
     ((1, 8, 8), 10), trained=13_706, family="cnn")  # fmt: skip
_add("wakeword_cnn", "classics", "seven conv 3x3 and four pools, 3 million parameters (Self-FL on wake words)",
     ((1, 40, 50), 2), "WakewordCNNOptions", trained=2_958_818)  # fmt: skip
_add("resnet18", "classics", "18 layers for images from 8x8 (He et al. 2016)",
     _CIFAR, "ResNetOptions", trained=11_173_962, family="resnet")  # fmt: skip
_add("mobilenet", "classics", "MobileNetV2 for images from 8x8 (2018)",
     _CIFAR, "MobileNetOptions", trained=2_236_682)  # fmt: skip
_add("lstm", "classics", "two LSTM layers of 256 for sequences of vectors (Self-FL on Sent140)",
     ((25, 300), 2), "LSTMOptions", "rows/fused", trained=1_098_242)  # fmt: skip
_add("gru", "classics", "a GRU layer of 64 for sequences of vectors",
     ((25, 300), 2), "GRUOptions", "stacked", trained=70_402)  # fmt: skip
_add("transformer", "encoder", "a small encoder from scratch, for tokens or for images in patches",
     _TEXT, "TransformerOptions", trained=4_180_482)  # fmt: skip
_add("minilm", "pretrained", "pretrained all-MiniLM-L6-v2, frozen, with LoRA adapters and a head, for texts",
     _TEXT, "MiniLMOptions", "rows/batched", outline="kinfed.engine.zoo.pretrained:minilm_outline", trained=74_498,
     frozen=22_565_376)  # fmt: skip


def build_model(name: str, shape: Any, classes: int, options: Mapping[str, Any] | None = None) -> nn.Module:
    """The registered model for examples of this shape."""
    entry = MODELS[name]
    values = {**entry.preset, **(options or {})}
    return entry.target(shape, classes, **asdict(make_options(entry.options, values, f"model {name}")))


def own_model(build: Builder, shape: Any, classes: int) -> Callable[[], nn.Module]:
    """A user's function as one without arguments: as it is, or, where it requires two, as a model of the registry is
    called, with the shape of an example and the number of classes."""
    is_module = hasattr(build, "named_parameters") and not isinstance(build, type)  # which is refused
    return (lambda: build(shape, classes)) if not is_module and _required_arguments(build) == 2 else build


def model_for(
    problem: Problem, shape: tuple[int, ...], model: str | Builder, options: Mapping[str, Any] | None = None,
    packing: Packing | None = None,
) -> Callable[[], nn.Module]:  # fmt: skip
    """A function that makes the model of a problem for examples of this shape: a registered one by its name, or what a
    user's function makes. Of classes in an order it makes the score, and thresholds are added (zoo/adapted.py). Of
    several inputs, which `packing` describes, a model is told the shapes, and called with them as they are."""
    in_order = problem.kind == "ordinal"
    outputs = 1 if in_order else problem.outputs
    inputs = shape if packing is None else packing.shapes
    if isinstance(model, str):
        if packing is not None and MODELS.is_own(model):
            raise ConfigError(
                f"model {model} takes one input, and the data have several, {packing.in_words()}: give a module whose "
                "forward takes these (model=), or make one array of them"
            )
        make: Callable[[], nn.Module] = partial(build_model, model, inputs, outputs, options)
    else:
        make = own_model(model, inputs, outputs)
    if packing is not None or not isinstance(model, str):
        make = partial(_prepared, make, packing)
    return partial(_with_thresholds, make, problem.num_classes) if in_order else make


def _prepared(make: Callable[[], nn.Module], packing: Packing | None) -> nn.Module:
    from kinfed.engine.rows.model_calls import make_prepared  # with torch

    return make_prepared(make, packing)


def _with_thresholds(make: Callable[[], nn.Module], classes: int) -> nn.Module:
    from kinfed.engine.zoo.adapted import Thresholds  # with torch

    return Thresholds(make(), classes)


def _required_arguments(build: Builder) -> int:
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):  # of builtins
        return 0
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)


@dataclass(frozen=True)
class ModelOutline:
    shape: tuple[int, ...]  # of the example that the figures are for
    classes: int
    trained: int  # parameters
    statistics: int  # running ones, beside them in a client's row
    frozen: int  # parameters that all clients share
    backend: str  # gradient path


def model_outline(name: str) -> ModelOutline | None:
    """The size and gradient path of a model with default options for its registered example; None without one."""
    import torch

    from kinfed.engine.task_factory import make_task

    facts = MODELS[name].facts
    if "example" not in facts:
        return None
    shape, classes = facts["example"]
    instead = imported(facts.get("outline"))

    def build() -> nn.Module:
        with torch.device("meta"):  # sizes without memory
            module: nn.Module = build_model(name, shape, classes) if instead is None else instead(shape, classes)
            return module

    task = make_task(build, device="meta")
    trained = task.trainable.stop
    frozen = sum(p.numel() for p in task.module.parameters() if not p.requires_grad)
    return ModelOutline(shape, classes, trained, task.num_params - trained, frozen, task.backend)
