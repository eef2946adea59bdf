"""Adapters: what they compute, what they train, many clients at once, and files that PEFT reads and writes."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.func import functional_call

import kinfed
from kinfed.engine.contract.linear import ClientLinear, runs_batched
from kinfed.engine.task_factory import make_task
from kinfed.engine.zoo.adapter_files import load_adapter, save_adapter
from kinfed.engine.zoo.lora import LoRALinear, adapted_layers
from kinfed.errors import ModelError, StorageError


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(6, 5)
        self.value = nn.Linear(5, 4, bias=False)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.value(torch.tanh(self.query(x))))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def shaken(model: nn.Module, seed: int = 1) -> nn.Module:
    """The model with other values of all that is trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


X = torch.randn(8, 7, 6, generator=torch.Generator().manual_seed(3))


def test_at_first_an_adapted_model_is_the_model() -> None:
    assert torch.equal(kinfed.lora(net(), "query,value")(X), net()(X))


def test_adapters_and_head_are_trained_and_nothing_else() -> None:
    model = kinfed.lora(net(), "query,value", rank=2)
    assert {name: tuple(p.shape) for name, p in trained(model).items()} == {
        "body.query.lora_A": (2, 6), "body.query.lora_B": (5, 2),
        "body.value.lora_A": (2, 5), "body.value.lora_B": (4, 2),
        "head.weight": (3, 4), "head.bias": (3,),
    }  # fmt: skip
    assert trained(kinfed.lora(net(), ["body.value"], train="")).keys() == {"body.value.lora_A", "body.value.lora_B"}
    assert "body.norm.weight" in trained(kinfed.lora(net(), "b*.query", train="head,*.norm"))


@pytest.mark.parametrize("pair", [False, True])
def test_output_and_gradient_are_those_of_the_merged_weights(pair: bool) -> None:
    model = shaken(kinfed.lora(net(), "query,value", rank=2, alpha=3, pair=pair))
    merged = {}
    for name, layer in adapted_layers(model).items():
        merged[f"{name}.weight"] = layer.weight + 3 / 2 * layer.lora_B @ layer.lora_A
        if pair:
            merged[f"{name}.weight"] += 3 / 2 * layer.personal_B @ layer.personal_A
    plain = {name: p for name, p in model.named_parameters() if name in dict(net().named_parameters())} | merged
    parameters = list(trained(model).values())
    for by_hand, ours in zip(
        torch.autograd.grad(functional_call(net(), plain, (X,)).square().sum(), parameters),
        torch.autograd.grad(model(X).square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(ours, by_hand, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"pair": True}, {"freeze_a": True}])
def test_many_clients_at_once_are_the_clients_one_by_one(options: dict[str, bool]) -> None:
    clients = [shaken(kinfed.lora(net(), "query,value", rank=2, **options), seed) for seed in range(4)]
    model = clients[0]
    assert runs_batched(model)
    stacked = {
        name: torch.stack([trained(client)[name] for client in clients]).detach().requires_grad_()
        for name in trained(model)
    }
    y = functional_call(model, stacked, (X,))  # two examples of each client
    grads = torch.autograd.grad(y.square().sum(), list(stacked.values()))
    for i, client in enumerate(clients):
        mine = client(X[2 * i : 2 * i + 2])
        torch.testing.assert_close(y[2 * i : 2 * i + 2], mine, rtol=1e-5, atol=1e-5)
        by_hand = torch.autograd.grad(mine.square().sum(), list(trained(client).values()))
        for ours, wanted in zip(grads, by_hand, strict=True):
            torch.testing.assert_close(ours[i], wanted, rtol=1e-4, atol=1e-4)


def test_a_batch_that_clients_cannot_share_evenly_is_refused() -> None:
    model = kinfed.lora(net(), "query", rank=2, train="")
    stacked = {name: torch.stack([p, p, p]) for name, p in trained(model).items()}
    with pytest.raises(ModelError, match="batch of 8 examples cannot be 3 batches"):
        functional_call(model, stacked, (X,))


def test_what_cannot_run_batched_says_so() -> None:
    assert not runs_batched(net()), "plain linear layers do not know stacked weights"
    assert not runs_batched(kinfed.lora(net(), "query", train="head,*.norm")), "nor does a trained LayerNorm"
    assert not runs_batched(nn.Sequential(ClientLinear(3, 3), nn.BatchNorm1d(3, affine=False))), "it mixes examples"
    assert not runs_batched(nn.Sequential(ClientLinear(3, 3), nn.Dropout(0.5)))
    assert runs_batched(nn.Sequential(ClientLinear(3, 3), nn.Dropout(0.0)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frozen_weights_of_16_bits_are_widened_in_use(dtype: torch.dtype) -> None:
    model, narrow = (shaken(kinfed.lora(net(), "query,value", rank=2)) for _ in range(2))
    for layer in adapted_layers(narrow).values():
        layer.weight.data = layer.weight.data.to(dtype)
    for layer in adapted_layers(model).values():
        layer.weight.data = layer.weight.data.to(dtype).float()
    assert narrow(X).dtype == torch.float32
    assert torch.equal(narrow(X), model(X))


def test_a_frozen_a_is_the_same_constant_at_every_build() -> None:
    first, second = (kinfed.lora(net(seed), "query", rank=2, freeze_a=True) for seed in (0, 1))
    assert trained(first).keys() == {"body.query.lora_B", "head.weight", "head.bias"}
    assert isinstance(first.body, Body)
    assert torch.equal(adapted_layers(first)["body.query"].lora_A, adapted_layers(second)["body.query"].lora_A)
    assert 0 < float(adapted_layers(first)["body.query"].lora_A.abs().max()) <= 6**-0.5


def test_a_layer_under_two_names_has_one_adapter() -> None:
    shared = nn.Linear(4, 4)
    model = kinfed.lora(nn.Sequential(shared, nn.ReLU(), shared), "0,2", rank=1, train="")
    assert isinstance(model, nn.Sequential)
    assert model[0] is model[2]
    assert len(trained(model)) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"targets": "qerry"},
            "no linear layer matches the target 'qerry'; the model has body.query, body.value, head",
        ),
        ({"targets": ""}, "adapters need targets"),
        ({"train": "classifier"}, "no layer of the model matches 'classifier'; it has body, head"),
        ({"rank": 0}, "rank of at least 1; got 0"),
        ({"alpha": 0.0}, "above 0"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        kinfed.lora(net(), **{"targets": "query", **change})


def test_layers_whose_adapter_would_be_ignored_are_refused() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 16)
    with pytest.raises(ModelError, match=r"self_attn.out_proj cannot have an adapter: its MultiheadAttention"):
        kinfed.lora(encoder, "out_proj", train="")
    with pytest.raises(ModelError, match="linear1 cannot have an adapter"):
        kinfed.lora(encoder, "linear1", train="")
    with pytest.raises(ModelError, match="has an adapter already"):
        kinfed.lora(kinfed.lora(net(), "query"), "query")
    odd = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    with pytest.raises(ModelError, match=r"not a plain nn.Linear"):
        kinfed.lora(odd, "0", train="")


def test_an_adapter_goes_to_files_and_back(tmp_path: Path) -> None:
    model = shaken(kinfed.lora(net(), "query,value", rank=2, alpha=3))
    save_adapter(model, tmp_path / "adapter")
    assert torch.equal(load_adapter(net(), tmp_path / "adapter")(X), model(X))
    again = load_adapter(kinfed.lora(net(), "query,value", rank=2, alpha=3), tmp_path / "adapter")
    assert torch.equal(again(X), model(X))
    assert trained(again).keys() == trained(model).keys()


def test_files_have_the_names_and_shapes_of_peft(tmp_path: Path) -> None:
    """As PEFT 0.21 writes them for this model with r=2, target_modules=[query], modules_to_save=[head]."""
    save_adapter(shaken(kinfed.lora(net(), "query", rank=2, alpha=3)), tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    assert {name: tuple(value.shape) for name, value in tensors.items()} == {
        "base_model.model.body.query.lora_A.weight": (2, 6),
        "base_model.model.body.query.lora_B.weight": (5, 2),
        "base_model.model.head.weight": (3, 4),
        "base_model.model.head.bias": (3,),
    }
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "bias": "none", "fan_in_fan_out": False}
    assert {name: config[name] for name in expected} == expected
    assert config["target_modules"] == ["body.query"]
    assert config["modules_to_save"] == ["head"]


def test_both_adapters_of_a_pair_are_saved_by_name(tmp_path: Path) -> None:
    model = shaken(kinfed.lora(net(), "query", rank=2, pair=True))
    save_adapter(model, tmp_path, "personal")
    layer = adapted_layers(load_adapter(net(), tmp_path))["body.query"]
    assert torch.equal(layer.lora_B, adapted_layers(model)["body.query"].personal_B)
    with pytest.raises(ModelError, match="no adapter 'personal'"):
        save_adapter(kinfed.lora(net(), "query"), tmp_path, "personal")


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = kinfed.lora(net(), "query", rank=2)
    save_adapter(model, tmp_path)
    with pytest.raises(ModelError, match=r"adapters in different layers: body.value"):
        load_adapter(kinfed.lora(net(), "value,query", rank=2), tmp_path)
    with pytest.raises(ModelError, match=r"rank 2 and alpha 16; layer body.query of the model has rank 4"):
        load_adapter(kinfed.lora(net(), "query", rank=4), tmp_path)
    with pytest.raises(ModelError, match=r"adapter for body.query, which is no linear layer"):
        load_adapter(nn.Sequential(nn.Linear(6, 5)), tmp_path)
    wider = net()
    wider.head = nn.Linear(4, 5)
    before = copy.deepcopy(wider.state_dict())
    with pytest.raises(ModelError, match=r"holds head.\w+ of shape"):
        load_adapter(wider, tmp_path)
    assert torch.equal(wider.head.weight, before["head.weight"])
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ModelError, match="use_dora = True"):
        load_adapter(net(), tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "IA3"}))
    with pytest.raises(ModelError, match="'IA3'"):
        load_adapter(net(), tmp_path)
    with pytest.raises(StorageError, match="does not exist"):
        load_adapter(net(), tmp_path / "nowhere")


def test_layers_keep_their_mode_and_describe_themselves() -> None:
    model = kinfed.lora(net().eval(), "query", rank=2)
    layer = adapted_layers(model)["body.query"]
    assert isinstance(layer, LoRALinear)
    assert not layer.training
    assert "rank=2, alpha=16, adapters=lora" in repr(layer)


class Crossed(nn.Module):
    """Puts another axis first between its layers, where clients' examples could not be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x.transpose(0, 1)).transpose(0, 1).mean(1))


def test_the_batched_path_is_chosen_where_it_gives_the_same_gradient() -> None:
    def build() -> nn.Module:
        return kinfed.lora(Crossed(), targets="inner", rank=2, train="head")

    example = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    assert make_task(build, example=example, batch=4).backend != "batched"
    with pytest.raises(ModelError, match="batched path gives other gradients"):
        make_task(build, example=example, backend="batched")
