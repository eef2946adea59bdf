"""A BERT so small that tests can write it to a folder, with the tokenizer that belongs to it."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
import torch

CONFIG = {
    "model_type": "bert", "hidden_act": "gelu", "vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 3,
    "num_attention_heads": 2, "intermediate_size": 12, "max_position_embeddings": 9, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, "pad_token_id": 0,
}  # fmt: skip
PIECES = "[PAD] [UNK] [CLS] [SEP] good bad fine poor film book was is very not the a plot it we they"


def write_bert(folder: Path, seed: int = 0) -> Path:
    """Random weights under the names that Hugging Face's BertModel gives them, and a vocabulary."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (20, 8), "embeddings.position_embeddings.weight": (9, 8),
        "embeddings.token_type_embeddings.weight": (2, 8), "pooler.dense.weight": (8, 8),
    }  # fmt: skip
    linear = {"attention.self.query": (8, 8), "attention.self.key": (8, 8), "attention.self.value": (8, 8),
              "attention.output.dense": (8, 8), "intermediate.dense": (12, 8), "output.dense": (8, 12)}  # fmt: skip
    for layer in range(3):
        for name, shape in linear.items():
            shapes[f"encoder.layer.{layer}.{name}.weight"] = shape
            shapes[f"encoder.layer.{layer}.{name}.bias"] = shape[:1]
    norms = ["embeddings", *(f"encoder.layer.{i}.{part}" for i in range(3) for part in ("attention.output", "output"))]
    shapes |= {f"{norm}.LayerNorm.{part}": (8,) for norm in norms for part in ("weight", "bias")}
    tensors = {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "vocab.txt").write_text(PIECES.replace(" ", "\n") + "\n")
    return folder
