"""The registry of models: one line each. A model is a function of (input shape, number of classes) and of its options.

    _add(name, "module:function", summary, example, options="Options", trained=7_850)

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
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kinfed.core import NoOptions, Registry, make_options

if TYPE_CHECKING:
    from torch import nn

Builder = Callable[..., "nn.Module"]  # (input shape, number of classes, **options)
Example = tuple[tuple[int, ...], int]  # input shape, number of classes

MODELS: Registry[Builder] = Registry("model")

_DIGITS: Example = ((1, 28, 28), 10)
_CIFAR: Example = ((3, 32, 32), 10)
_TEXT: Example = ((64,), 2)


def _add(
    name: str, location: str, summary: str, example: Example, options: str = "", path: str = "rows", **about: Any
) -> None:
    module = f"kinfed.engine.zoo.{location.partition(':')[0]}"
    where = f"{module}:{options}" if options else NoOptions
    about |= {"example": example, "path": path}
    MODELS.register(name, f"kinfed.engine.zoo.{location}", summary=summary, options=where, **about)


_add(
    "mlr",
    "classics:mlr",
    "multinomial logistic regression",
    _DIGITS,
    path="stacked/fused",
    trained=7_850,
    family="mlr",
)
_add(
    "mlp",
    "classics:mlp",
    "one hidden layer of 128 ReLU units",
    _DIGITS,
    path="stacked/fused",
    trained=101_770,
    family="mlp",
)
_add(
    "lenet5",
    "classics:lenet5",
    "conv 6/16 5x5, fc 120/84, tanh (LeCun et al. 1998)",
    _DIGITS,
    "LeNetOptions",
    trained=61_706,
    family="cnn",
)
_add(
    "cnn_tutorial",
    "classics:cnn_tutorial",
    "conv 6/16 5x5, fc 120/84 (Self-FL on CIFAR-10)",
    _CIFAR,
    trained=62_006,
    family="cnn",
)
_add("cnn_fomo", "classics:cnn_fomo", "conv 32/64/64 3x3, fc 64 (FedFomo)", _CIFAR, trained=122_570, family="cnn")
_add("cnn", "classics:cnn", "conv 32/64 5x5, fc 512 (CGPFL on CIFAR-10)", _CIFAR, trained=878_538, family="cnn")
_add(
    "cnn_small",
    "classics:cnn_small",
    "conv 16/32 3x3, fc 64, for images from 8x8",
    ((1, 8, 8), 10),
    trained=13_706,
    family="cnn",
)
_add(
    "wakeword_cnn",
    "classics:wakeword_cnn",
    "seven conv 3x3 and four pools, 3 million parameters (Self-FL on wake words)",
    ((1, 40, 50), 2),
    "WakewordCNNOptions",
    trained=2_958_818,
)
_add(
    "resnet18",
    "resnet:resnet18",
    "18 layers for images from 8x8 (He et al. 2016)",
    _CIFAR,
    "ResNetOptions",
    trained=11_173_962,
    family="resnet",
)
_add(
    "mobilenet",
    "mobilenet:mobilenet",
    "MobileNetV2 for images from 8x8 (2018)",
    _CIFAR,
    "MobileNetOptions",
    trained=2_236_682,
)
_add(
    "lstm",
    "classics:lstm",
    "two LSTM layers of 256 for sequences of vectors (Self-FL on Sent140)",
    ((25, 300), 2),
    "LSTMOptions",
    path="rows/fused",
    trained=1_098_242,
)
_add(
    "transformer",
    "transformer:transformer",
    "a small encoder from scratch, for tokens or for images in patches",
    _TEXT,
    "TransformerOptions",
    trained=4_180_482,
)
_add(
    "minilm",
    "bert:minilm",
    "pretrained all-MiniLM-L6-v2, frozen, with LoRA adapters and a head, for texts",
    _TEXT,
    "MiniLMOptions",
    path="rows/batched",
    outline="kinfed.engine.zoo.bert:minilm_outline",
    trained=74_498,
    frozen=22_565_376,
)


def build_model(name: str, shape: tuple[int, ...], classes: int, options: Mapping[str, Any] | None = None) -> nn.Module:
    """The registered model for examples of this shape."""
    entry = MODELS[name]
    values = {**entry.preset, **(options or {})}
    return entry.target(shape, classes, **asdict(make_options(entry.options, values, f"model {name}")))


def own_model(build: Builder, shape: tuple[int, ...], classes: int) -> Callable[[], nn.Module]:
    """A user's function as one without arguments: as it is, or, where it requires two, as a model of the registry is
    called, with the shape of an example and the number of classes."""
    return (lambda: build(shape, classes)) if _required_arguments(build) == 2 else build


def _required_arguments(build: Builder) -> int:
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):  # of builtins
        return 0
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)
