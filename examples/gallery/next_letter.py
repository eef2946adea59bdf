"""The next letter of a role.

A small language model (a causal transformer on letters) has read half of the largest roles of Shakespeare's plays; each
client is another role, which it has not. The model stays frozen: clients train low-rank adapters of its attention and
the last layer, alone, as one for all, or partly their own (fedsa_lora keeps one factor of each adapter). Padding
counts nowhere. Needs the data set `shakespeare_roles` in the folder that KINFED_DATA names.
"""

import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

import kinfed

LETTERS = " abcdefghijklmnopqrstuvwxyz'.,;:!?-\n"  # numbered from 1 on; 0 is padding
LENGTH, WIDTH = 32, 32
NOTHING = -100  # the class of positions that count nowhere


class LanguageModel(nn.Module):
    """Letters [B, LENGTH] to the logits of each next one, [B, LENGTH, letters]."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS) + 1, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(LETTERS) + 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.letters(tokens) + self.places.weight
        h = self.before(x)
        q, k, v = (layer(h).unflatten(-1, (4, -1)).transpose(-2, -3) for layer in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(-2, -3).flatten(-2)
        return self.head(x + self.narrow(torch.relu(self.wide(self.after(x)))))


def windows(text: str) -> np.ndarray:
    """[N, LENGTH + 1] numbers of letters; what is left of the last window is padding."""
    numbers = np.array([LETTERS.find(letter) + 1 for letter in text.lower()])
    numbers = numbers[numbers > 0]
    padded = np.concatenate([numbers, np.zeros(-len(numbers) % (LENGTH + 1), np.int64)])
    return padded.reshape(-1, LENGTH + 1)


def following(examples: np.ndarray) -> np.ndarray:
    return np.where(examples[:, 1:] == 0, NOTHING, examples[:, 1:])


def read_roles(count: int) -> dict[str, np.ndarray]:
    """The roles with the most letters."""
    file = Path(os.environ["KINFED_DATA"]) / "shakespeare_roles" / "train-00000-of-00001.parquet"
    table = pq.read_table(file, columns=["client", "text"]).to_pandas()
    texts = table.groupby("client")["text"].apply("\n".join)
    largest = texts.str.len().nlargest(count).index
    return {role: windows(texts[role]) for role in largest}


def pretrained(examples: np.ndarray, epochs: int) -> LanguageModel:
    torch.manual_seed(0)
    model, x, y = LanguageModel(), torch.from_numpy(examples[:, :-1]), torch.from_numpy(following(examples))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]).flatten(0, 1), y[batch].flatten()).backward()
            optimizer.step()
    return model


def main(picture: str = "next_letter.svg", rounds: int = 8, epochs: int = 2, roles: int = 12) -> None:
    texts = read_roles(roles)
    names = list(texts)
    weights = pretrained(np.concatenate([texts[name] for name in names[::2]]), epochs).state_dict()

    def adapted() -> nn.Module:
        model = LanguageModel()
        model.load_state_dict(weights)
        return kinfed.lora(model, targets="query,value", rank=4, train="head")

    clients = names[1::2]
    examples = np.concatenate([texts[name] for name in clients])
    federation = kinfed.Federation.from_arrays(
        examples[:, :-1], following(examples), np.repeat(clients, [len(texts[name]) for name in clients]),
        task="dense", num_classes=len(LETTERS) + 1, tokens=True, name="shakespeare_roles",
    )  # fmt: skip
    result = kinfed.run(
        federation=federation, model=adapted, algorithms="local,fedavg,fedsa_lora,ditto", metric="perplexity",
        rounds=rounds, eval_every=1, seeds=(0,), participation=1.0, lr=0.3, steps=10, batch=16,
    )  # fmt: skip
    table = result.to_frame().set_index("algorithm")
    print(table[["personal_perplexity", "personal_position_accuracy"]].round(3))

    figure, axes = plt.subplots(figsize=(6, 4))
    rows = result.clients().set_index(["client", "algorithm"])["personal_perplexity"].unstack()[list(table.index)]
    axes.plot(rows.T, color="#c3c8cf", lw=1)
    axes.plot(rows.mean(), "o-", color="#1f6feb", lw=2)
    axes.set(ylabel="perplexity of the next letter; grey: a role each")
    figure.savefig(picture)


if __name__ == "__main__":
    main()
