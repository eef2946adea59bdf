"""Adapters for text.

A small transformer was trained on reviews of eight domains. Each client has reviews of another domain: the
transformer stays frozen, and clients train low-rank adapters and a head, shared or their own. Only those travel.
Needs the data set `reviews` (fdu_mtl_reviews in the folder that KINFED_DATA names; docs/data.md says where it comes
from).
"""

import hashlib
import os
import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

import kinfed

WORDS, LENGTH, WIDTH = 4096, 40, 48


class Encoder(nn.Module):
    """Tokens [B, LENGTH] to two logits: an attention over the words, its mean, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Embedding(LENGTH, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight
        there = (tokens != 0)[..., None].float()
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / WIDTH**0.5
        scores = scores.masked_fill((tokens == 0)[..., None, :], -1e4)
        x = x + torch.relu(self.mix(scores.softmax(-1) @ self.value(x)))
        return self.head((x * there).sum(-2) / there.sum(-2).clamp_min(1))


def tokens(text: str) -> list[int]:
    words = re.findall(r"[a-z']+", text.lower())[:LENGTH]
    ids = [int.from_bytes(hashlib.md5(word.encode()).digest()[:4]) % (WORDS - 1) + 1 for word in words]
    return ids + [0] * (LENGTH - len(ids))


def read_reviews(per_domain: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    file = Path(os.environ["KINFED_DATA"]) / "fdu_mtl_reviews" / "train-00000-of-00001.parquet"
    table = pq.read_table(file, columns=["client", "text", "label"]).to_pandas().drop_duplicates("text")
    table = table.groupby("client").sample(per_domain, random_state=0)
    examples = np.array([tokens(text) for text in table["text"]])
    return examples, table["label"].to_numpy("int64"), table["client"].to_numpy()


def pretrained(x: np.ndarray, y: np.ndarray, epochs: int) -> Encoder:
    torch.manual_seed(0)
    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    examples, labels = torch.from_numpy(x), torch.from_numpy(y)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(examples[batch]), labels[batch]).backward()
            optimizer.step()
    return model


def main(picture: str = "adapters_for_text.svg", rounds: int = 10, epochs: int = 2, per_domain: int = 300) -> None:
    x, y, domain = read_reviews(per_domain)
    names = np.unique(domain)
    public = np.isin(domain, names[::2])
    weights = pretrained(x[public], y[public], epochs).state_dict()

    def adapted() -> nn.Module:
        model = Encoder()
        model.load_state_dict(weights)
        return kinfed.lora(model, targets="query,value,mix", rank=4, train="head")

    reviews = kinfed.Federation.from_arrays(x[~public], y[~public], domain[~public], tokens=True, name="reviews")
    result = kinfed.run(
        federation=reviews, model=adapted, algorithms="local,fedavg,fedsa_lora,ditto", rounds=rounds,
        seeds=(0,), participation=1.0, lr=0.1, steps=10, batch=16,
    )  # fmt: skip
    table = result.to_frame().set_index("algorithm")
    kilobytes = table[["bytes_down", "bytes_up"]].sum(axis=1) / rounds / len(reviews) / 1000
    print(table[["personal_accuracy", "server_accuracy"]].assign(kilobytes=kilobytes).round(3))

    figure, axes = plt.subplots(figsize=(6, 4))
    for name in table.index:
        axes.plot(kilobytes[name], 100 * table["personal_accuracy"][name], "o")
        axes.annotate(name, (kilobytes[name], 100 * table["personal_accuracy"][name]), xytext=(5, 4),
                      textcoords="offset points")  # fmt: skip
    axes.set(xlabel="kilobytes per client and round", ylabel="accuracy of personal models, %")
    axes.margins(0.2)
    figure.savefig(picture)


if __name__ == "__main__":
    main()
