"""Modules of users work unchanged, or are refused with the reason; named models fit their inputs."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import kinfed
from conftest import MakeBatch
from kinfed.core.options import option
from kinfed.data import Federation
from kinfed.data.examples.batches import Batch
from kinfed.engine.contract.objective import make_objective
from kinfed.engine.task_factory import make_task
from kinfed.engine.zoo.models import MODELS, build_model
from kinfed.errors import ConfigError, ModelError


class Residual(nn.Module):
    """Functional operations, a residual connection, and a layer that is used twice on two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 5)
        self.again = nn.Linear(5, 5)
        self.leave = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.enter(x))
        first = h + self.again(h)
        second = nn.functional.gelu(self.again(first))
        return self.leave(torch.cat([first, second], -1))


class Tied(nn.Module):
    """One weight matrix under two names, a scalar parameter, and buffers that are saved and not saved."""

    scale: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 6)
        self.decode = nn.Linear(6, 6)
        self.decode.weight = self.encode.weight
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))
        self.register_buffer("shift", torch.linspace(-1, 1, 6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.encode(x)) * self.scale
        return (self.decode(h) + self.shift)[:, :3] * self.temperature


class Tutorial(nn.Module):
    """Convolutions followed by view(), as in most tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.fc = nn.Linear(4 * 3 * 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.max_pool2d(torch.relu(self.conv(x)), 2)
        return self.fc(h.view(h.size(0), -1))


class Unused(nn.Module):
    """A layer that the loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3)
        self.idle = nn.Linear(4, 4)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x[:, None]).flatten(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.fc = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc(self.lstm(self.embed(tokens))[0][:, -1])


class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.fc = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc(self.embed(tokens).mean(1))


class Doubled(nn.Sequential):
    """Looks like a chain of dense layers, and is not."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Clipped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-0.2, 0.2)


def with_shared_layer() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Tanh(), nn.Linear(6, 3))


def with_tied_layers() -> nn.Module:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second)


def with_weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4)), nn.ReLU(), nn.Linear(4, 3))


def with_hook() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    module[0].register_forward_hook(lambda _, __, output: output * 3)
    return module


def normalized() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.InstanceNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 3)
    )


VECTOR, IMAGE, TOKENS = (6,), (2, 8, 8), (5,)
USERS = {
    "residual": (Residual, VECTOR, "vmap"),
    "tied": (Tied, VECTOR, "rows"),
    "tutorial": (Tutorial, IMAGE, "rows"),
    "unused": (Unused, VECTOR, "rows"),
    "recurrent": (Recurrent, TOKENS, "stacked"),
    "bag of words": (BagOfWords, TOKENS, "vmap"),
    "subclass of Sequential": (lambda: Doubled(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), VECTOR, "vmap"),
    "subclass of Linear": (lambda: nn.Sequential(Clipped(6, 4), nn.ReLU(), nn.Linear(4, 3)), VECTOR, "vmap"),
    "shared layer": (with_shared_layer, VECTOR, "vmap"),
    "tied layers": (with_tied_layers, VECTOR, "vmap"),
    "weight norm": (with_weight_norm, VECTOR, "vmap"),
    "hook": (with_hook, VECTOR, "vmap"),
    "normalized": (normalized, IMAGE, "rows"),
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3)), VECTOR, "vmap"),
    "no dropout": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.0), nn.Linear(4, 3)), VECTOR, "vmap"),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no fast vmap rule for weight norm
@pytest.mark.parametrize("forced", ["auto", "rows", "vmap"])
@pytest.mark.parametrize("name", USERS)
def test_modules_of_users_train_unchanged(make_batch: MakeBatch, name: str, forced: str) -> None:
    build, shape, path = USERS[name]
    if forced == "vmap" and name in ("recurrent", "tied"):
        pytest.skip("torch has no vmap rule for its fused LSTM, and no path but rows takes buffers")
    task = make_task(build, backend=forced)
    assert task.backend == (path if forced == "auto" else forced)
    classes = 6 if name == "tied layers" else 3
    theta = torch.stack([task.init(0), task.init(1)])
    batch = make_batch(2, 4, shape, classes, ragged=True)
    if shape == TOKENS:
        batch.x = batch.x.abs().mul(4).to(torch.int64)
    before = theta.clone()
    got = task.grad(theta, batch)
    z = task.logits(theta, batch.x)
    for i in range(2):
        module = task.module_of(theta[i])
        torch.testing.assert_close(z[i], module(batch.x[i]).detach(), rtol=1e-5, atol=1e-5)
        losses = nn.functional.cross_entropy(module(batch.x[i]), batch.y[i], reduction="none")
        (losses * batch.weight[i]).sum().backward()
        wanted = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
        wanted |= {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        torch.testing.assert_close(got[i], task.flatten(wanted), rtol=1e-5, atol=1e-5)
    task.descend_(theta, batch, 0.1, (0.5, torch.zeros_like(theta)))
    wanted = before - 0.1 * (got + 0.5 * before)
    wanted[:, task.trainable.stop :] = before[:, task.trainable.stop :]  # buffers are not pulled
    torch.testing.assert_close(theta, wanted, rtol=1e-5, atol=1e-5)


def test_module_of_fills_in_every_name_of_a_tied_parameter() -> None:
    task = make_task(Tied)
    names = ["temperature", "encode.weight", "encode.bias", "decode.bias", "scale"]
    assert [slot.name for slot in task.slots] == names
    row = torch.arange(task.num_params, dtype=torch.float32)
    saved = task.state_dict(row)
    assert torch.equal(saved["encode.weight"], saved["decode.weight"])
    assert "shift" not in saved  # not saved by the module either
    fresh = Tied()
    fresh.load_state_dict(saved)
    module = task.module_of(row)
    for built in (fresh, module):
        assert built.decode.weight is built.encode.weight
        assert built.temperature.item() == 0.0
        assert torch.equal(built.encode.weight.detach().flatten(), row[1:37])
        assert torch.equal(built.scale, row[-6:])
    assert torch.equal(module.shift, Tied().shift)


def test_a_trained_module_of_leaves_the_task_alone(make_batch: MakeBatch) -> None:
    task = make_task(Residual)
    row = task.init(0)
    batch = make_batch(1, 4, VECTOR, 3)
    before = task.grad(row[None], batch)
    with torch.no_grad():
        for parameter in task.module_of(row).parameters():
            parameter.fill_(float("nan"))
    assert torch.equal(task.grad(row[None], batch), before)


# --- refusals


REFUSED = {
    "batch norm without statistics": (
        lambda: nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2, track_running_stats=False)),
        "layer '1' is BatchNorm1d without running statistics.*GroupNorm",
    ),
    "batch norm without momentum": (
        lambda: nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2, momentum=None)),
        "BatchNorm1d with momentum=None.*such as 0.1",
    ),
    "batch norm over processes": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.SyncBatchNorm(2)),
        "SyncBatchNorm: it normalizes over processes.*use nn.BatchNorm2d",
    ),
    "all frozen": (lambda: nn.Linear(6, 3).requires_grad_(False), r"no parameters to train \(all are frozen"),
    "half precision": (lambda: nn.Linear(6, 3).half(), r"torch.float16; kinfed trains float32 parameters.*freeze"),
    "double precision": (lambda: nn.Linear(6, 3).double(), r"torch.float64; kinfed trains float32 parameters"),
    "lazy": (lambda: nn.LazyLinear(3), "lazy layer"),
    "no parameters": (lambda: nn.Sequential(nn.Flatten()), "no parameters to train"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("path", ["auto", "rows", "vmap"])
@pytest.mark.parametrize("name", REFUSED)
def test_modules_that_cannot_train_are_refused_with_the_reason(name: str, path: str) -> None:
    build, reason = REFUSED[name]
    with pytest.raises(ModelError, match=reason):
        make_task(build, backend=path)


class Branching(nn.Module):
    """Looks at its data before it decides, which only works for one client at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if x.sum() > 0 else -self.fc(x)


class FunctionalDropout(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(nn.functional.dropout(x, training=self.training))


def test_a_model_that_needs_one_client_at_a_time_is_told_so(make_batch: MakeBatch) -> None:
    task = make_task(Branching)
    theta, batch = task.init(0).repeat(2, 1), make_batch(2, 4, VECTOR, 3)
    for call in (lambda: task.grad(theta, batch), lambda: task.logits(theta, batch.x)):
        with pytest.raises(ModelError, match=r'vmap: .*choose backend="rows"'):
            call()
    alone = make_task(Branching, backend="rows")
    z = alone.logits(theta, batch.x)
    signs = [1 if float(x.sum()) > 0 else -1 for x in batch.x]
    plain = make_task(lambda: nn.Linear(6, 3)).logits(theta, batch.x)
    torch.testing.assert_close(z, plain * torch.tensor(signs)[:, None, None])


@pytest.mark.parametrize("build", [Branching, FunctionalDropout, with_weight_norm])
def test_a_model_that_gains_nothing_from_many_clients_at_once_trains_row_by_row(build: Callable[[], nn.Module]) -> None:
    assert make_task(build, example=torch.ones(2, 6)).backend == "rows"
    assert make_task(Residual, example=torch.ones(2, 6)).backend == "vmap"


def test_random_operations_are_refused_where_clients_share_them(make_batch: MakeBatch) -> None:
    task = make_task(FunctionalDropout, backend="vmap")
    with pytest.raises(ModelError, match=r"random operation.*choose backend"):
        task.grad(task.init(0).expand(2, -1), make_batch(2, 4, VECTOR, 3))
    with pytest.raises(ModelError, match=r"vmap path takes no models with running statistics, other float buffers"):
        make_task(lambda: nn.Sequential(nn.Linear(6, 3), nn.Dropout()), backend="vmap")


def test_a_model_that_does_not_fit_the_data_is_refused_at_once() -> None:
    with pytest.raises(ModelError, match=r"fails on examples of shape \[2, 9, 12\]: "):
        make_task(Tutorial, example=torch.zeros(2, 2, 9, 12))


class NoiseOfItsOwn(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x + torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))


class Attention(Branching):
    """Its operation may draw, but does not: nothing is dropped."""

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        return self.fc(nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.0)[:, 0])


@pytest.mark.parametrize("build", [NoiseOfItsOwn, Attention])
def test_operations_that_leave_the_global_generator_alone_are_fine(
    make_batch: MakeBatch, build: Callable[[], nn.Module]
) -> None:
    task = make_task(build, backend="rows")
    theta, batch = task.init(0).expand(2, -1), make_batch(2, 4, VECTOR, 3)
    assert torch.equal(task.grad(theta, batch), task.grad(theta, batch))


class DrawnBeside(Branching):
    """While it runs, another thread of the user draws from torch's global generator."""

    def forward(self, x: Tensor) -> Tensor:
        user = threading.Thread(target=torch.rand, args=(3,))
        user.start()
        user.join()
        return self.fc(x)


def test_draws_of_another_thread_are_not_those_of_the_model(make_batch: MakeBatch) -> None:
    task = make_task(DrawnBeside, backend="rows")
    assert task.grad(task.init(0).expand(2, -1), make_batch(2, 4, VECTOR, 3)).isfinite().all()


@pytest.mark.parametrize("path", ["rows", "vmap"])
def test_examples_that_do_not_fit_are_named(make_batch: MakeBatch, path: str) -> None:
    task = make_task(Tutorial, backend=path)
    batch = make_batch(2, 4, (2, 9, 12), 3)
    with pytest.raises(ModelError, match=r"fails on examples of shape \[2, 9, 12\]: "):
        task.grad(task.init(0).expand(2, -1), batch)


# --- named models

SMALLEST = {"lenet5": 12, "cnn_tutorial": 16, "cnn_fomo": 18, "cnn": 16, "cnn_small": 8}


@pytest.mark.parametrize(
    "name", ["mlr", "mlp", "lenet5", "cnn_tutorial", "cnn_fomo", "cnn", "cnn_small", "wakeword_cnn"]
)
@pytest.mark.parametrize("side", [(18, 18), (18, 23), (28, 28)])
def test_named_models_fit_their_inputs(make_batch: MakeBatch, name: str, side: tuple[int, int]) -> None:
    task = make_task(lambda: build_model(name, (2, *side), 7))
    assert task.logits(task.init(0)[None], make_batch(1, 2, (2, *side), 7).x).shape == (1, 2, 7)


def test_models_of_others_join_by_name() -> None:
    @dataclass(frozen=True)
    class Options:
        hidden: int = option(4, "units", ge=1)

    @MODELS.register("test_deep", summary="for a test", options=Options, preset={"hidden": 5})
    def deep(shape: tuple[int, ...], classes: int, hidden: int) -> nn.Module:
        return nn.Sequential(nn.Linear(*shape, hidden), nn.Linear(hidden, classes))

    try:
        assert build_model("test_deep", (6,), 3)[0].out_features == 5
        assert build_model("test_deep", (6,), 3, {"hidden": "2"})[0].out_features == 2
        with pytest.raises(ConfigError, match="model test_deep: hidden must be at least 1; got 0"):
            build_model("test_deep", (6,), 3, {"hidden": 0})
    finally:
        MODELS.unregister("test_deep")
    with pytest.raises(ConfigError, match="unknown model 'test_deep'"):
        build_model("test_deep", (6,), 3)


@pytest.mark.parametrize("name", SMALLEST)
def test_the_smallest_image_of_a_model_and_one_below(make_batch: MakeBatch, name: str) -> None:
    side = SMALLEST[name]
    task = make_task(lambda: build_model(name, (1, side, side), 3))
    batch: Batch = make_batch(1, 1, (1, side, side), 3)
    assert bool(torch.isfinite(task.grad(task.init(0)[None], batch)).all())
    for shape in ((1, side - 1, side), (1, side, side - 1), (side, side), (784,)):
        with pytest.raises(ModelError, match=rf"{name} needs images .* at least {side}x{side}; got .* use mlr or mlp"):
            build_model(name, shape, 3)


def test_papers_parameter_counts() -> None:
    """784-10 and 784-128-10; the convolutional networks on 3x32x32 with ten classes, counted by hand."""

    def size(name: str, shape: tuple[int, ...]) -> int:
        return sum(p.numel() for p in build_model(name, shape, 10).parameters())

    assert size("mlr", (784,)) == size("mlr", (1, 28, 28)) == 7850
    assert size("mlp", (784,)) == 784 * 128 + 128 + 1290
    assert size("cnn_tutorial", (3, 32, 32)) == 456 + 2416 + 400 * 120 + 120 + 120 * 84 + 84 + 850
    assert size("cnn_fomo", (3, 32, 32)) == 896 + 18496 + 36928 + 1024 * 64 + 64 + 650
    assert size("cnn", (3, 32, 32)) == 2432 + 51264 + 1600 * 512 + 512 + 5130
    assert size("cnn_small", (1, 8, 8)) == 160 + 4640 + 128 * 64 + 64 + 650


def test_pooling_before_the_relu_is_the_same_function() -> None:
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    model = build_model("cnn_tutorial", (3, 16, 16), 3)
    assert [type(layer) for layer in model[:3]] == [nn.Conv2d, nn.MaxPool2d, nn.ReLU]
    conv, pool, relu = model[:3]
    assert torch.equal(relu(pool(conv(x))), pool(relu(conv(x))))


def test_unknown_models_name_the_near_ones() -> None:
    with pytest.raises(ConfigError, match="unknown model 'cnn_smal'; did you mean cnn_small"):
        build_model("cnn_smal", (1, 8, 8), 3)


class SpeaksAsTransformers(nn.Module):
    """What models of Hugging Face's transformers take and give, in a few lines."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.config = SimpleNamespace(pad_token_id=0)
        self.words, self.classifier = nn.Embedding(10, 4), nn.Linear(4, classes)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool = True,
    ) -> dict[str, Tensor]:
        assert not use_cache
        assert labels is None  # the loss is kinfed's, a value per example
        assert attention_mask is not None
        there = attention_mask[..., None].float()
        mean = (self.words(input_ids) * there).sum(-2) / there.sum(-2).clamp_min(1)
        return {"logits": self.classifier(mean), "hidden_states": mean}


def test_a_model_of_transformers_trains_as_it_comes() -> None:
    """With the mask of its padding and the logits among its outputs; the same numbers as by hand, in the run, in what
    it exports and at another process."""
    words = torch.randint(1, 10, (40, 6), generator=torch.Generator().manual_seed(0))
    words[::2, 4:] = 0
    labels = words[:, 0] % 3
    data = Federation.from_arrays(words.numpy(), labels.numpy(), [0] * 40, tokens=True, test_fraction=0.25)
    result = kinfed.run(
        federation=data,
        model=SpeaksAsTransformers,
        algorithms="local",
        rounds=1,
        steps=3,
        batch=100,
        lr=0.5,
        seeds=(0,),
    )
    task = make_task(SpeaksAsTransformers, objective=make_objective(data.problem))
    plain = SpeaksAsTransformers()
    plain.load_state_dict(task.state_dict(task.init(0)))
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    rows = data.train.rows
    for _ in range(3):
        optimizer.zero_grad()
        mask = (words[rows] != 0).long()
        z = plain(words[rows], mask, use_cache=False)["logits"]
        nn.functional.cross_entropy(z, labels[rows]).backward()
        optimizer.step()
    trained = result.personal_model(0, "local").module
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    travelled = pickle.loads(pickle.dumps(task))
    theta = task.init(0)[None]
    assert torch.equal(travelled.logits(theta, words[None]), task.logits(theta, words[None]))
    on_its_own = SpeaksAsTransformers()
    on_its_own.load_state_dict(trained.state_dict())  # names are the model's own


def test_models_of_transformers_train_as_they_come() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    small = {"vocab_size": 12, "bos_token_id": 1, "eos_token_id": 1}
    words = torch.randint(1, 12, (24, 6), generator=torch.Generator().manual_seed(0))
    words[::2, 4:] = 0

    def bert() -> nn.Module:
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        return transformers.BertForSequenceClassification(transformers.BertConfig(**small, **sizes, num_labels=3))

    def gpt2() -> nn.Module:
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, n_embd=8, n_layer=1, n_head=2))

    following = torch.where(words[:, 1:] == 0, -100, words[:, 1:])
    cases = (
        (bert, Federation.from_arrays(words.numpy(), (words[:, 0] % 3).numpy(), [0, 1] * 12, tokens=True)),
        (gpt2, Federation.from_arrays(words[:, :-1].numpy(), following.numpy(), [0, 1] * 12, tokens=True, task="dense",
                                      num_classes=12)),
    )  # fmt: skip
    for model, data in cases:
        result = kinfed.run(federation=data, model=model, algorithms="fedavg", rounds=1, steps=2, seeds=(0,))
        own = result.personal_model("0", "fedavg").module.eval()
        mask = {"attention_mask": (words[:2, :5] != 0).long()} if model is bert else {}
        task = make_task(model, objective=make_objective(data.problem), outputs=data.problem.output_shapes)
        ours = task.logits(task.flatten(own.state_dict())[None], words[None, :2, :5])[0]
        own._forward_pre_hooks.clear()
        own._forward_hooks.clear()
        torch.testing.assert_close(ours, own(words[:2, :5], **mask).logits)
