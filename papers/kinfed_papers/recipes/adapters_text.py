"""Adapters of a pretrained encoder, one domain of reviews per client: what to share, what to keep, what it costs."""

from __future__ import annotations

import os
from typing import Any

from kinfed_papers import Question, Recipe, ResultColumn, ResultTable, RunPart, Untestable
from kinfed_papers.recipe import FEDSA_LORA, Scale

PART = "reviews"
WEIGHTS = "KINFED_MINILM"  # environment variable: the folder of the encoder's weights and tokenizer
CLIENTS = 16
FULL_FINE_TUNING = CLIENTS * 2 * 4 * 22.6e6  # bytes of a round: all parameters of all-MiniLM-L6-v2, to clients and back

METHODS = {
    "head_local": "Head only, local",
    "head_fedavg_server": "Head only, shared (FedAvg)",
    "head_fedavg": "Head only, FedAvg, fine-tuned",
    "local": "Local adapters",
    "fedavg_server": "One shared adapter (FedAvg)",
    "fedavg": "Shared adapter, fine-tuned",
    "ffa_lora_server": "FFA-LoRA: A constant, B shared",
    "ffa_lora": "FFA-LoRA, fine-tuned",
    "fedsa_lora": "FedSA-LoRA: A shared, B own",
    "feddpa": "FedDPA: one shared, one own",
    "ditto": "Ditto on adapters",
}
ALIASES = {f"{name}_server": (name, "server") for name in ("head_fedavg", "fedavg", "ffa_lora")}
PERSONAL = ("fedsa_lora", "feddpa", "ditto")


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


RECIPE = Recipe(
    name="adapters-text",
    paper=FEDSA_LORA,
    reproduces="its question on other data; no table",
    title="Personal adapters of a pretrained encoder on reviews of 16 domains",
    about="Sentiment of FDU-MTL's reviews, one product domain per client, all clients in every round; "
    "all-MiniLM-L6-v2, frozen, with LoRA of rank 8 (query and value) and a head. FedSA-LoRA shares A and keeps B, "
    "FFA-LoRA freezes A and shares B, FedDPA has two adapters and shares one. Controls: every client alone, "
    "one adapter for all, the same fine-tuned, Ditto, and the head alone on the frozen encoder.",
    parts=parts,
    tables=[
        ResultTable(
            "Accuracy (%) and what travels",
            METHODS,
            [
                ResultColumn("Accuracy", PART),
                ResultColumn("Mean of domains", PART, "personal.accuracy_mean"),
                ResultColumn("Worst tenth of domains", PART, "personal.worst10"),
                ResultColumn("MB per round", PART, "bytes", factor=1e-6, digits=2, lower_is_better=True),
                ResultColumn(
                    "Bytes, % of full fine-tuning",
                    PART,
                    "bytes",
                    factor=100 / FULL_FINE_TUNING,
                    digits=3,
                    lower_is_better=True,
                ),
            ],
            caption="Bytes are of all 16 clients, both ways. Full fine-tuning is computed, not run: 4 bytes for each "
            "of 22.6 million parameters, to and from every client, 2,893 MB per round.",
        ),
    ],
    claims=[
        *(Question.above(f"{METHODS[row]}, above local adapters", PART, row, ["local"]) for row in PERSONAL),
        *(
            Question.above(f"{METHODS[row]}, above the shared adapter", PART, row, ["fedavg_server"])
            for row in PERSONAL
        ),
        *(
            Question.above(f"{METHODS[row]}, above the shared adapter fine-tuned", PART, row, ["fedavg"])
            for row in PERSONAL
        ),
        Question.above("One shared adapter above local adapters", PART, "fedavg_server", ["local"]),
        Question.above("One shared adapter above one shared head", PART, "fedavg_server", ["head_fedavg_server"]),
        Untestable(
            "FedSA-LoRA above FFA-LoRA and LoRA on GLUE (the paper's tables)",
            "neither its data nor its models are here",
            "its tables on GLUE",
        ),
    ],
    notes=[
        f"The folder of the encoder's weights and tokenizer is that of the environment variable {WEIGHTS}, or minilm; "
        "docs/models.md says where to get it.",
        "A head is trained with the adapters and shared by all methods but local ones.",
        "Fine-tuned models are those of clients after their last local training, as in all recipes.",
        "FedDPA's two adapters are trained together (turns = false), with one gradient per step as the other methods "
        "take; the paper trains them in turns. The second one counts fully for every input; the paper weighs it by the "
        "input. It has twice the adapters, and sends half of them.",
        "All methods share one learning rate. At the scale small it is the better of 0.003 and 0.01 for FedAvg with a "
        "seed not reported, by the same test reviews; no other method has its own.",
    ],
    stand_ins={
        "smoke": "digits and a random encoder in place of reviews and MiniLM.",
        "small": "2,400 of 29,862 reviews (about 30 for testing in a domain), their first 24 tokens, adapters in the "
        "last two of six layers, so that what the other four give is computed once, and 8 rounds of 4 steps with "
        "8 reviews: nothing has converged. Differences between seeds are those of start and batches; reviews are "
        "the same.",
    },
    other_data=(PART,),
    aliases=ALIASES,
)
