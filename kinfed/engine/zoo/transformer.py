"""A small transformer encoder, trained from scratch: tokens [T], or images cut into patches."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from kinfed.core import option
from kinfed.engine.zoo.encoder import EncoderLayer, EncoderNet, PatchEmbeddings, TokenEmbeddings
from kinfed.engine.zoo.lora import lora
from kinfed.errors import ModelError


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


def transformer(
    shape: tuple[int, ...],
    classes: int,
    vocabulary: int = 30522,
    patch: int = 4,
    width: int = 128,
    layers: int = 2,
    heads: int = 4,
    hidden: int = 256,
    dropout: float = 0.1,
    lora_rank: int = 0,
    lora_freeze_a: bool = False,
    lora_pair: bool = False,
) -> nn.Module:
    """An encoder whose mean over positions a linear head reads. Token 0 is padding and is not attended to. Adapters on
    its random weights are for trying methods and as a control of pretrained ones."""
    if (lora_freeze_a or lora_pair) and not lora_rank:
        raise ModelError("model transformer: lora_freeze_a and lora_pair are of adapters; set lora_rank above 0")
    if width % heads:
        raise ModelError(f"model transformer: {heads} heads cannot share a width of {width} evenly")
    embeddings: nn.Module
    if len(shape) == 1:
        embeddings = TokenEmbeddings(vocabulary, width, shape[0], dropout=dropout)
    elif len(shape) == 3 and shape[1] % patch == 0 and shape[2] % patch == 0:
        embeddings = PatchEmbeddings((shape[0], shape[1], shape[2]), patch, width, dropout)
    else:
        raise ModelError(
            f"model transformer reads tokens, [length], or images whose sides are multiples of patch = {patch}, "
            f"[channels, height, width]; got examples of shape {list(shape)}"
        )
    stack = [EncoderLayer(width, heads, hidden, dropout=dropout) for _ in range(layers)]
    for table in embeddings.modules():
        if isinstance(table, nn.Embedding):
            nn.init.normal_(table.weight, std=0.02)  # as BERT starts; from torch's 1 plain SGD would hardly move it
    net = EncoderNet(embeddings, stack, nn.Linear(width, classes))
    if not lora_rank:
        return net
    return lora(net, "query,value", rank=lora_rank, train="head", freeze_a=lora_freeze_a, pair=lora_pair)
