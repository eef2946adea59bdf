"""Models that a stranger brings: the same bits for any threads and interruptions; exported, predicted, adopted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import kinfed
from kinfed.config.config_reading import make_config
from kinfed.data.federations.federation import Federation
from kinfed.errors import KinfedError, ModelError
from kinfed.newcomers.adoption import adopt
from kinfed.runs.method_run import Interrupted
from kinfed.serving.export import export_model
from kinfed.serving.pipeline import ModelPipeline
from kinfed.serving.predict import predict
from kinfed.tuning.tuner import tune

CLASSES = 3
SETTINGS: dict[str, Any] = {"rounds": 2, "seeds": [0], "steps": 2, "batch": 4, "eval_every": 0}
KEPT = {"optimizer": "adamw", "optimizer_state": "kept", "lr": 0.01, "weight_decay": 0.01}


def clients(sizes: tuple[int, ...] = (9, 4, 6, 2), *, tokens: bool = False) -> Federation:
    numbers, owner = np.random.default_rng(3), np.repeat(np.arange(len(sizes)), sizes)
    y = numbers.integers(0, CLASSES, len(owner))
    x: Any = numbers.normal(size=(len(owner), 1, 6, 6)) + y[:, None, None, None]
    if tokens:
        x = numbers.integers(0, 9, (len(owner), 5))
    return Federation.from_arrays(x, y, owner, test_fraction=0.3, num_classes=CLASSES, tokens=tokens)


class Block(nn.Module):
    """As in torchvision's ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn1(self.conv1(x))
        out += self.downsample(x)
        return self.relu(out)


def resnet() -> nn.Module:
    return nn.Sequential(Block(1, 4, 1), Block(4, 6, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.register_buffer("places", torch.linspace(-1, 1, 36).view(6, 6), persistent=False)
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.encoder(x.squeeze(1) + self.places).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(6, 4, 2, dropout=0.3, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x.squeeze(1))[0][:, -1])


class TwoInputs(nn.Module):
    """Packed in one tensor; draws by a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.norm = nn.Linear(16, 4), nn.Linear(20, 4), nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.flatten(1).split([16, 20], 1)
        h = torch.relu(self.norm(torch.cat([self.left(left), self.right(right)], 1)))
        return self.fc(nn.functional.dropout(h, 0.3, self.training))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.fc = nn.Embedding(9, 4, padding_idx=0), nn.LayerNorm(4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        there = (x != 0).float()[..., None]
        return self.fc(self.norm((self.embedding(x) * there).sum(1) / there.sum(1).clamp(min=1)))


class HalfBody(nn.Module):
    """A pretrained body of 16 bits under a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU()).bfloat16().requires_grad_(False)
        with torch.no_grad():
            self.body[1].weight.copy_(torch.linspace(-0.3, 0.3, 288).view(8, 36))
            self.body[1].bias.zero_()
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.bfloat16()).float())


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)  # pretrained: the same at every build
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def adapted() -> nn.Module:
    return kinfed.lora(Deep(), targets="body.*", rank=2, train="head")


def parametrized(shape: tuple[int, ...], classes: int) -> nn.Module:
    normed = parametrizations.spectral_norm(nn.Linear(36, 6)), parametrizations.weight_norm(nn.Linear(6, 4))
    return nn.Sequential(nn.Flatten(), normed[0], nn.ReLU(), normed[1], nn.ReLU(), nn.Linear(4, classes))


def instance_norm() -> nn.Module:
    norm = nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Conv2d(1, 3, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(48, CLASSES))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "resnet": resnet, "encoder": Encoder, "lstm": Recurrent, "two inputs": TwoInputs, "tokens": Tokens,
    "half body": HalfBody, "adapted": adapted, "parametrized": parametrized, "instance norm": instance_norm,
}  # fmt: skip


def rows(result: kinfed.RunResult) -> list[Tensor]:
    models = [one.evaluation.models for one in result.results]
    assert all(one is not None and bool(torch.isfinite(one).all()) for one in models)
    return [one for one in models if one is not None]


def equal(ours: kinfed.RunResult, theirs: kinfed.RunResult) -> bool:
    return all(torch.equal(*pair) for pair in zip(rows(ours), rows(theirs), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_a_stranger_from_training_to_a_newcomer(name: str, tmp_path: Path) -> None:
    build, data, out = MODELS[name], clients(tokens=name == "tokens"), tmp_path / "run"
    settings = SETTINGS | KEPT | {"algorithms": ["ditto", "fedem"], "checkpoint_every": 1, "state": "disk"}
    whole = kinfed.run(federation=data, model=build, workers=2, **SETTINGS, **KEPT, algorithms=["ditto", "fedem"])
    calls = iter(range(100))
    with pytest.raises(Interrupted):
        kinfed.run(federation=data, model=build, out=out, should_stop=lambda: next(calls) >= 2, workers=1, **settings)
    result = kinfed.run(federation=data, model=build, out=out, resume=True, workers=1, **settings)
    assert equal(result, whole)

    x = data.features.gather(torch.arange(3))
    np.savez(tmp_path / "new.npz", x=x.numpy())
    for method in ("ditto", "fedem"):
        file = export_model(out, "2", method, 0, tmp_path / f"{method}.safetensors").path
        wanted = torch.softmax(result.personal_model("2", method).module(x), 1)
        torch.testing.assert_close(predict(ModelPipeline.read(file, build), tmp_path / "new.npz").probabilities, wanted)
        with pytest.raises(ModelError, match=r"none of kinfed.s models; .*function that builds it"):
            ModelPipeline.read(file)
    adopted = adopt(out, clients((8,), tokens=name == "tokens"), "ditto", model=build)
    assert bool(torch.isfinite(adopted.model).all())


@pytest.mark.parametrize("method", ["cgpfl", "fedfomo", "selffl", "fedper"])
def test_methods_train_adapters_of_a_users_model(method: str) -> None:
    options = {"method": method} | ({"head": "*.lora_B"} if method == "fedper" else {})
    settings = SETTINGS | {"algorithms": {"one": options}}
    one, two = (kinfed.run(federation=clients(), model=adapted, workers=n, **settings) for n in (1, 2))
    assert equal(one, two)
    assert rows(one)[0].shape[1] == 2 * (36 + 8) + 2 * (8 + 8) + 8 * CLASSES + CLASSES
    assert not torch.equal(rows(one)[0], one.task.init(0).expand_as(rows(one)[0]))


def test_a_users_model_is_tuned(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    config = make_config(None, SETTINGS | {"algorithms": ["fedavg"]})
    assert len(tune(config, 2, tmp_path / "tune", federation=clients(), model=TwoInputs).methods[0].trials) == 2


def test_a_run_is_not_resumed_with_another_rate_of_dropout(tmp_path: Path) -> None:
    def build(rate: float) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(nn.Flatten(), nn.Dropout(rate), nn.Linear(36, CLASSES))

    settings = SETTINGS | {"algorithms": ["fedavg"], "out": tmp_path / "run", "federation": clients()}
    kinfed.run(model=build(0.1), **settings)
    kinfed.run(model=build(0.1), resume=True, **settings)
    with pytest.raises(KinfedError, match="model"):
        kinfed.run(model=build(0.5), resume=True, **settings)


def test_a_refused_model_leaves_no_folder_behind(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="5 outputs, and the data have 3 classes"):
        kinfed.run(
            federation=clients(), model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 5)), out=tmp_path / "r"
        )
    assert not (tmp_path / "r").exists()


def test_a_round_loop_tries_its_model_too() -> None:
    with pytest.raises(ModelError, match="5 outputs, and the data have 3 classes"):
        kinfed.simulate(clients(), lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 5)), "fedavg")


def test_the_largest_token_of_all_data_is_tried() -> None:
    numbers = np.arange(40).reshape(20, 2)  # the largest at the end
    data = Federation.from_arrays(numbers, np.arange(20) % 2, np.arange(20) // 10, tokens=True)
    small = lambda: nn.Sequential(nn.Embedding(39, 4), nn.Flatten(), nn.Linear(8, 2))  # noqa: E731
    with pytest.raises(ModelError, match="largest token is 39"):
        kinfed.run(federation=data, model=small, algorithms=["fedavg"], **SETTINGS)
