"""A method of your own.

Every client deploys a point on the line from the server's model to its own: `share` says how far. The method is a
subclass of FedAvg with one option and one step that differs; as an object it joins any comparison, here with itself
at six shares.
"""

from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch

import kinfed
from kinfed.algorithms.fedavg import FedAvg
from kinfed.author import option


@dataclass(frozen=True)
class PartOfTheWay(FedAvg):
    share: float = option(0.5, "how far from the server's model to the client's own", ge=0, le=1)

    def personalize(self, task, client, down, data):
        own = super().personalize(task, client, down, data)  # the client's model after its last local steps
        return torch.lerp(down.w, own, self.share)


def main(picture: str = "own_method.svg", rounds: int = 40, seeds: tuple[int, ...] = (0, 1, 2)) -> None:
    shares = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    methods = {f"share-{share:g}": PartOfTheWay(share=share) for share in shares}
    result = kinfed.run(
        algorithms={**methods, "local": "local"}, partition="dirichlet", rounds=rounds, seeds=seeds, steps=40
    )
    accuracy = 100 * result.to_frame().groupby("algorithm")["personal_accuracy"].mean()
    print(accuracy.round(1))

    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(shares, accuracy[list(methods)], "o-", label="part of the way")
    axes.axhline(accuracy["local"], linestyle=":", color="gray", label="every client alone")
    axes.set(xlabel="share of the own model", ylabel="accuracy of personal models, %")
    axes.legend()
    figure.savefig(picture)


if __name__ == "__main__":
    main()
