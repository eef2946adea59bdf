"""Models that do not work, and what their owner reads before anything is trained: the table of docs/models.md."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from kinfed.engine.task_factory import make_task
from kinfed.errors import ModelError

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
Build = Callable[[], nn.Module]
NUMBERS = torch.linspace(-1.0, 1.0, 12).view(2, 6)
TOKENS = torch.tensor([[1, 2, 3, 0, 0, 0], [4, 8, 1, 5, 0, 0]])
CLASSES = 3


class Model(nn.Module):
    """A linear layer `fc` inside any forward."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], outputs: int = CLASSES, **layers: nn.Module) -> None:
        super().__init__()
        self.fc = nn.Linear(6, outputs)
        self.pass_on = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.pass_on(self, x)


def model(forward: Callable[[Any, Tensor], Any], outputs: int = CLASSES) -> Build:
    return lambda: Model(forward, outputs)


def encoder() -> nn.Module:
    return Model(
        lambda m, x: m.fc(m.encoder(x[:, :, None].expand(-1, -1, 4))[:, :, 0]),
        encoder=nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False),
    )


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(6, CLASSES))


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: nn.Module = torch.jit.script(nn.Linear(6, CLASSES))
    return module


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(6, 6)]
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layers[0](x))


class OneWay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tensor:  # type: ignore[override]
        raise ValueError("no way back")


BROKEN: dict[str, Build] = {
    "other inputs than the data have": lambda: nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, CLASSES)),
    "other outputs than classes": lambda: nn.Linear(6, 5),
    "one output for two classes, `[B, 1]`": lambda: nn.Linear(6, 1),
    "one number per example, `[B]`": model(lambda m, x: m.fc(x).squeeze(1), 1),
    "an axis too many, `[B, 1, C]`": model(lambda m, x: m.fc(x)[:, None]),
    "a tuple or a dict": model(lambda m, x: {"logits": m.fc(x)}),
    "a size that depends on the batch": model(lambda m, x: m.fc(x)[:1]),
    "NaN from the start": model(lambda m, x: torch.log(-m.fc(x).abs() - 1)),
    "a forward that raises": model(lambda m, x: m.fc2(x)),
    "16 or 64 bits out": model(lambda m, x: m.fc(x).bfloat16()),
    "64-bit parameters": lambda: nn.Linear(6, CLASSES).double(),
    "nothing to train": lambda: nn.Flatten(),
    "all frozen": lambda: nn.Linear(6, CLASSES).requires_grad_(False),
    "an output without gradient": model(lambda m, x: m.fc(x).detach()),
    "`nn.LazyLinear`": lambda: nn.LazyLinear(CLASSES),
    "`nn.SyncBatchNorm`": lambda: nn.Sequential(nn.Linear(6, CLASSES), nn.SyncBatchNorm(CLASSES)),
    "changes of the input in place": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, CLASSES)),
    "layers without `batch_first`": encoder,
    "examples that see each other": model(lambda m, x: m.fc(x) - m.fc(x).mean(0)),
    "`dropout(x)` in evaluation too": model(lambda m, x: m.fc(dropout(x))),
    "draws of `random` or numpy": model(lambda m, x: m.fc(x) * random.random()),
    "a count of calls, or a list that grows": model(
        lambda m, x: m.fc(x) * (1.0 if setattr(m, "calls", getattr(m, "calls", 0) + 1) is None else 0.0)
    ),
    "dropout under `checkpoint`": model(
        lambda m, x: m.fc(checkpoint(dropout, x + m.fc.bias[0], 0.5, m.training, use_reentrant=False))
    ),
    "a backward of your own that raises": model(lambda m, x: OneWay.apply(m.fc(x))),
    "softmax at the end": lambda: nn.Sequential(nn.Linear(6, CLASSES), nn.Softmax(1)),
    "a function that needs other arguments": lambda hidden: nn.Linear(6, hidden),  # type: ignore[misc,dict-item]
    "`torch.jit.script` or `torch.compile`": scripted,
    "layers in a list": Listed,
    "the old `weight_norm`": old_weight_norm,
    "a module, not a function": nn.Linear(6, CLASSES),
    "the device meta": lambda: nn.Linear(6, CLASSES, device="meta"),
    "float examples for an embedding": lambda: nn.Sequential(
        nn.Embedding(9, 4), nn.Flatten(), nn.Linear(24, CLASSES), nn.GELU()
    ),
    "tokens for a linear layer": lambda: nn.Sequential(nn.Linear(6, CLASSES), nn.GELU()),
    "more tokens than the embedding knows": lambda: nn.Sequential(
        nn.Embedding(5, 4), nn.Flatten(), nn.Linear(24, CLASSES), nn.GELU()
    ),
}
ON_TOKENS = {"tokens for a linear layer", "more tokens than the embedding knows"}


def documented() -> dict[str, str]:
    """What the page says one reads, by what one brings."""
    rows = re.findall(r"^\| (.+?) \| `(.+?)` \| .+ \|$", PAGE.read_text().partition("| you bring |")[2], re.M)
    return dict(rows)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("path", ["auto", "rows"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_refused_in_the_words_of_the_page(name: str, path: str) -> None:
    example = TOKENS if name in ON_TOKENS else NUMBERS
    with pytest.raises(ModelError) as caught:
        make_task(BROKEN[name], example=example, backend=path, outputs=CLASSES)
    assert documented()[name] in str(caught.value)


def test_the_page_lists_these_models_and_no_others() -> None:
    assert documented().keys() == BROKEN.keys()


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, CLASSES)),
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), nn.Linear(4, CLASSES)),
        model(lambda m, x: m.fc(dropout(x, 0.5, m.training))),
        model(lambda m, x: m.fc(x).masked_fill(torch.arange(CLASSES) == 1, -torch.inf)),
        model(lambda m, x: m.fc(x.bfloat16().float())),
    ],
    ids=["statistics and dropout", "power iterations", "draws of its own", "a class left out", "16 bits inside"],
)
def test_a_sound_model_passes_and_is_left_as_it_was(build: Build) -> None:
    task = make_task(build, example=NUMBERS, outputs=CLASSES)
    fresh = make_task(build)
    for (name, ours), theirs in zip(task.module.state_dict().items(), fresh.module.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_single_example_is_enough_for_a_trial() -> None:
    make_task(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), example=NUMBERS[:1])
    with pytest.raises(ModelError, match=r"\[1, 3\]; in training it gives \[1, 4\]"):
        make_task(lambda: nn.Linear(6, 4), example=NUMBERS[:1], outputs=3)
