"""What adapters-text runs: one run for each kind of model, with weights of the reader's own."""

from __future__ import annotations

import os
from typing import Any

from kinfed_papers import RunPart
from kinfed_papers.recipe import Scale

PART = "reviews"
WEIGHTS = "KINFED_MINILM"  # environment variable: the folder of the encoder's weights and tokenizer
CLIENTS = 16


def parts(scale: Scale) -> list[RunPart]:
    """One run for each kind of model: adapters, those with a constant A, two of them, none. Clients, batches and
    sampling are the same in all."""
    common, model, none = _setting(scale)
    methods: dict[str, dict[str, Any]] = {name: {"method": name} for name in ("local", "fedavg", "fedsa_lora", "ditto")}
    pair = {"feddpa": {"turns": False}}  # one gradient per step, as the other methods take
    heads = {"head_local": {"method": "local"}, "head_fedavg": {"method": "fedavg"}}
    return [
        RunPart(PART, {**common, "model": model, "algorithms": methods}),
        RunPart(
            "constant",
            {**common, "model": model | {"lora_freeze_a": True}, "algorithms": "ffa_lora"},
            merge_into=PART,
        ),
        RunPart("pair", {**common, "model": model | {"lora_pair": True}, "algorithms": pair}, merge_into=PART),
        RunPart("head", {**common, **none, "algorithms": heads}, merge_into=PART),
    ]


def _setting(scale: Scale) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Data, local work and budget; the model with adapters; and what makes it one without."""
    common: dict[str, Any] = {"participation": 1.0, "optimizer": "adam", "batch": 8}
    if scale == "smoke":
        common |= {"dataset": "digits", "clients": CLIENTS, "lr": 0.01, "steps": 2, "rounds": 2, "seeds": [0, 1]}
        small = {"name": "transformer", "width": 16, "hidden": 32, "heads": 2, "dropout": 0.0}
        return common, small | {"lora_rank": 2}, {"model": small, "frozen": "embeddings,encoder"}
    folder = os.environ.get(WEIGHTS, "minilm")
    reviews: dict[str, Any] = {"name": "reviews", "tokenizer": folder}
    model: dict[str, Any] = {"name": "minilm", "weights": folder}
    if scale == "paper":
        common |= {"lr": 0.001, "batch": 32, "steps": 10, "rounds": 100, "seeds": [0, 1, 2]}
        return common | {"dataset": reviews | {"length": 128}}, model, {"model": model | {"lora_rank": 0}}
    common |= {"lr": 0.01, "steps": 4, "rounds": 8, "seeds": [0, 1], "eval_every": 0}
    common |= {"dataset": reviews | {"length": 24, "examples": 2400}}
    return common, model | {"lora_layers": 2}, {"model": model | {"lora_rank": 0}}
