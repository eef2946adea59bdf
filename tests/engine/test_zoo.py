"""Larger models that come with kinfed: sizes, shapes, what they compute, and that they learn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kinfed
from conftest import MakeBatch
from kinfed.cli.inspect_command import gradient_path, model_sizes
from kinfed.engine.task_factory import make_task
from kinfed.engine.zoo.classics import Shortcut
from kinfed.engine.zoo.models import MODELS, ModelOutline, build_model, model_outline
from kinfed.errors import ConfigError, ModelError

SMALL: dict[str, dict[str, Any]] = {
    "resnet18": {"width": 4}, "mobilenet": {"width": 0.1},
    "transformer": {"vocabulary": 12, "width": 16, "hidden": 16, "dropout": 0.0},
}  # fmt: skip


def size(name: str, shape: tuple[int, ...], **options: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(name, shape, 10, options).parameters())


def images(count: int, side: tuple[int, int] = (16, 16), seed: int = 0) -> Tensor:
    return torch.randn(count, 3, *side, generator=torch.Generator().manual_seed(seed))


def test_sizes_are_those_that_are_known() -> None:
    """As published for ten classes: LeNet-5 on 28x28, ResNet-18 with a 3x3 stem on 32x32; and MobileNetV2, which has
    3,504,872 parameters for 1000 classes."""
    assert size("lenet5", (1, 28, 28)) == 61_706
    assert size("resnet18", (3, 32, 32)) == size("resnet18", (3, 32, 32), norm="group") == 11_173_962
    assert size("mobilenet", (3, 32, 32)) == 3_504_872 - 1281 * 990
    layer = 4 * (16 * 16 + 16) + 2 * 16 * 8 + 16 + 8 + 4 * 16
    options = {"vocabulary": 12, "width": 16, "hidden": 8, "layers": 3}
    assert size("transformer", (6,), **options) == (12 + 6 + 2) * 16 + 3 * layer + 170
    assert size("transformer", (3, 8, 12), **options) == (48 + 1) * 16 + (6 + 2) * 16 + 3 * layer + 170


@pytest.mark.parametrize("name", ["resnet18", "mobilenet"])
@pytest.mark.parametrize("side", [(8, 8), (9, 14), (28, 28)])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_images_of_any_size_fit(name: str, side: tuple[int, int], norm: str) -> None:
    model = build_model(name, (3, *side), 7, {**SMALL[name], "norm": norm})
    assert model(images(2, side)).shape == (2, 7)
    kinds = {type(layer) for layer in model.modules() if isinstance(layer, nn.BatchNorm2d | nn.GroupNorm)}
    assert kinds == {nn.BatchNorm2d if norm == "batch" else nn.GroupNorm}


@pytest.mark.parametrize("name", ["resnet18", "mobilenet"])
def test_group_normalization_looks_at_each_example_alone(name: str) -> None:
    model = build_model(name, (3, 16, 16), 5, {**SMALL[name], "norm": "group"})
    x = images(3)
    torch.testing.assert_close(model(x)[1:2], model(x[1:2]), rtol=1e-4, atol=1e-5)


def test_a_shortcut_is_a_convolution_that_skips_pixels() -> None:
    shortcut = Shortcut(3, 5, 2, nn.Identity())
    for side in ((8, 8), (7, 10)):
        strided = nn.functional.conv2d(images(2, side), shortcut.conv.weight, stride=2)
        torch.testing.assert_close(shortcut(images(2, side)), strided)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_models_learn_a_small_batch_by_heart(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, (3, 16, 16), 2, SMALL[name])
    x, y = images(8), torch.tensor([0, 1] * 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_a_transformer_reads_tokens_and_not_their_padding() -> None:
    model = build_model("transformer", (6,), 3, SMALL["transformer"])
    tokens = torch.tensor([[2, 7, 5, 0, 0, 0], [1, 2, 3, 4, 5, 6]])
    z = model(tokens)
    torch.testing.assert_close(model(tokens[:1, :3])[0], z[0], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(model(tokens[:, [1, 0, 2, 3, 4, 5]]), z), "the order of words must count"


def test_dropout_of_a_transformer_is_off_in_evaluation() -> None:
    model = build_model("transformer", (6,), 3, SMALL["transformer"] | {"dropout": 0.5})
    tokens = torch.tensor([[2, 7, 5, 1, 4, 3]])
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_a_transformer_takes_adapters() -> None:
    model = build_model("transformer", (6,), 3, SMALL["transformer"])
    tokens = torch.tensor([[2, 7, 5, 1, 0, 0]])
    before = model(tokens)
    adapted = kinfed.lora(model, "query,value,intermediate.dense", rank=2)
    assert torch.equal(adapted(tokens), before)


@pytest.mark.parametrize(
    ("name", "shape", "options", "words"),
    [
        ("resnet18", (3, 7, 8), {}, r"resnet18 needs images .* at least 8x8; got .* \[3, 7, 8\]; use mlr or mlp"),
        ("mobilenet", (784,), {}, "mobilenet needs images"),
        ("resnet18", (3, 8, 8), {"norm": "group", "groups": 3}, "64 channels cannot be 3 groups of equal size"),
        ("transformer", (25, 300), {}, r"reads tokens, \[length\], or images .*; got examples of shape \[25, 300\]"),
        ("transformer", (3, 30, 32), {}, "multiples of patch = 4"),
        ("transformer", (64,), {"heads": 3}, "3 heads cannot share a width of 128 evenly"),
    ],
)
def test_examples_and_options_that_do_not_fit_are_refused(
    name: str, shape: tuple[int, ...], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        build_model(name, shape, 3, options)


def test_unknown_norms_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model resnet18: norm must be batch \| group; got 'layer'"):
        build_model("resnet18", (3, 32, 32), 3, {"norm": "layer"})


def test_sizes_and_paths_are_known_without_building_a_model() -> None:
    outlines = {name: model_outline(name) for name in MODELS}
    assert None not in outlines.values(), "every model of ours has an example"
    for name, outline in outlines.items():
        facts = MODELS[name].facts
        assert outline is not None
        assert (facts["trained"], facts.get("frozen", 0)) == (outline.trained, outline.frozen), name
        assert outline.backend == gradient_path(name).partition("/")[0], name
    resnet, bert, mlp = outlines["resnet18"], outlines["minilm"], outlines["mlp"]
    assert resnet == ModelOutline((3, 32, 32), 10, 11_173_962, 2 * 4800, 0, "rows")
    assert mlp == ModelOutline((1, 28, 28), 10, 101_770, 0, 0, "stacked")
    assert bert is not None
    assert (bert.trained, bert.frozen) == (74_498, 22_565_376)
    MODELS.register("test_bare", lambda shape, classes: nn.Linear(3, 2), summary="of a test")
    try:
        assert model_outline("test_bare") is None
        assert model_sizes("test_bare") == ("", "")
    finally:
        MODELS.unregister("test_bare")
    assert model_sizes("minilm") == ("74k + 22.6M frozen", "64 -> 2")
    assert model_sizes("mlr") == ("7,850", "1x28x28 -> 10")


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_federation_trains_them_as_torch_does(make_batch: MakeBatch, name: str) -> None:
    """Five steps of two clients, against the module and torch.optim.SGD."""
    task = make_task(lambda: build_model(name, (3, 16, 16), 3, SMALL[name]))
    theta = torch.stack([task.init(0), task.init(1)])
    alone = [task.module_of(row).train() for row in theta]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05) for module in alone]
    for step in range(5):
        batch = make_batch(2, 6, (3, 16, 16), 3, seed=step)
        task.descend_(theta, batch, 0.05)
        for i, (module, optimizer) in enumerate(zip(alone, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(module(batch.x[i]), batch.y[i], reduction="none") * batch.weight[i]
            loss.sum().backward()
            optimizer.step()
    for i, module in enumerate(alone):
        torch.testing.assert_close(theta[i], task.flatten(module.state_dict()), rtol=1e-4, atol=1e-5)


def test_adapters_of_a_transformer_are_what_is_trained() -> None:
    def trained(**options: Any) -> set[str]:
        net = build_model("transformer", (1, 8, 8), 3, {"width": 8, "heads": 2, "hidden": 8, "layers": 1} | options)
        return {name.rpartition(".")[2] for name, p in net.named_parameters() if p.requires_grad}

    assert trained(lora_rank=2) == {"lora_A", "lora_B", "weight", "bias"}
    assert trained(lora_rank=2, lora_freeze_a=True) == {"lora_B", "weight", "bias"}
    assert {"personal_A", "personal_B"} < trained(lora_rank=2, lora_pair=True)
    with pytest.raises(ModelError, match="set lora_rank above 0"):
        trained(lora_pair=True)
