"""Compare methods.

Digits of twenty clients in four hidden groups: images of some are turned. Five methods on the same clients,
batches and starting model, three seeds. Lines are the mean accuracy of personal models, bands the spread over seeds.
"""

import matplotlib.pyplot as plt

import kinfed


def main(picture: str = "compare_methods.svg", rounds: int = 40, seeds: tuple[int, ...] = (0, 1, 2)) -> None:
    result = kinfed.run(
        partition="hidden_groups", algorithms="local,fedavg,ditto,fedfomo,kin", rounds=rounds, seeds=seeds
    )
    print(result.to_frame().groupby("algorithm")["personal_accuracy"].mean())
    history = result.history().dropna(subset="personal_accuracy")

    figure, axes = plt.subplots(figsize=(6, 4))
    for name, rows in history.groupby("algorithm", sort=False):
        by_round = 100 * rows.groupby("round")["personal_accuracy"].agg(["mean", "min", "max"])
        axes.plot(by_round.index, by_round["mean"], label=name)
        axes.fill_between(by_round.index, by_round["min"], by_round["max"], alpha=0.15)
    axes.set(xlabel="round", ylabel="accuracy of personal models, %")
    axes.legend(loc="lower right")
    figure.savefig(picture)


if __name__ == "__main__":
    main()
