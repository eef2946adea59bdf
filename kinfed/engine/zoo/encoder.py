"""Transformer encoders in plain torch, as a chain of stages: embeddings, layers, pooling, head; and the model
`transformer`, a small one trained from scratch.

    h = x                      int64 [B, T] tokens, or [B, C, H, W] images
    for stage in net.stages:   the composition of the stages is the forward pass
        h = stage(h)

Between stages goes one tensor [B, T, D + 1]: D numbers per position, and in the last channel 1 for a real position, 0
for padding. So a stage needs nothing but its input, and frozen first stages can be computed once per example.

A layer computes what nn.TransformerEncoderLayer(batch_first=True, activation="gelu") does (normalization after each
half, as in BERT). It is built from linear layers that are called, so that they can have adapters. Its attention is
written out: at the lengths one trains on a processor that costs the same as torch's fused attention, for which vmap has
no rule. Names of parameters are those of BertModel in Hugging Face's transformers: its weights and adapters fit.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from kinfed.core import option
from kinfed.engine.contract.linear import ClientLinear
from kinfed.engine.zoo.lora import lora
from kinfed.errors import ModelError

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
    """[B, T, D + 1] -> [B, D]: the mean over real positions; zero if there is none."""

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
    lora_residual: bool = option(False, "a correction of every adapted layer that servers change (FedEx-LoRA, FLoRA)")


def transformer(shape: tuple[int, ...], classes: int, **values: Any) -> nn.Module:
    """An encoder whose mean over positions a linear head reads. Token 0 is padding and is not attended to. Adapters on
    its random weights are for trying methods and as a control of pretrained ones."""
    options = TransformerOptions(**values)
    width, heads, patch, dropout = options.width, options.heads, options.patch, options.dropout
    if (options.lora_freeze_a or options.lora_pair or options.lora_residual) and not options.lora_rank:
        raise ModelError(
            "model transformer: lora_freeze_a, lora_pair and lora_residual are of adapters; set lora_rank above 0"
        )
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
    return lora(
        net, "query,value", rank=options.lora_rank, train="head", freeze_a=options.lora_freeze_a,
        pair=options.lora_pair, residual=options.lora_residual,
    )  # fmt: skip
