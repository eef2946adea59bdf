"""A network of your own.

Any torch module from examples to logits is a model: here a small CNN with BatchNorm and dropout, on clients whose
images have contrast and brightness of their own. FedBN keeps normalization layers, and their statistics, at the
clients.
"""

import matplotlib.pyplot as plt
from torch import nn

import kinfed


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8 * 4 * 4, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10),
    )  # fmt: skip


def main(picture: str = "own_model.svg", rounds: int = 40, seeds: tuple[int, ...] = (0, 1)) -> None:
    result = kinfed.run(
        model=network, partition="feature_shift", algorithms="local,fedavg,ditto,fedbn", rounds=rounds, seeds=seeds,
        steps=10,
    )  # fmt: skip
    accuracy = 100 * result.clients().set_index("algorithm")["personal_accuracy"]
    methods = list(result.algorithms)
    print(accuracy.groupby("algorithm").describe().loc[methods].round(1))

    figure, axes = plt.subplots(figsize=(6, 4))
    axes.boxplot([accuracy.loc[name].dropna() for name in methods], tick_labels=methods, showmeans=True)
    axes.set(ylabel="accuracy of a client's model, %")
    figure.savefig(picture)


if __name__ == "__main__":
    main()
