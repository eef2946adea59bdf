"""A small transformer encoder, trained from scratch: tokens [T], or images cut into patches."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from kinfed.core.options import option
from kinfed.engine.encoder import EncoderLayer, EncoderNet, PatchEmbeddings, TokenEmbeddings
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
) -> nn.Module:
    """An encoder whose mean over positions a linear head reads. Token 0 is padding and is not attended to."""
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
    return EncoderNet(embeddings, stack, nn.Linear(width, classes))
