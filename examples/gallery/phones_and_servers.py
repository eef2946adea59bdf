"""Phones and servers.

Twenty clients with digits of different proportions: ten phones with a logistic regression, ten servers with a network.
No model fits both kinds, so that none is averaged with the other. What crosses are predictions on public examples
(FedMD), mean predictions for each class (FD), or a common model, here that of the phones, which teaches every client's
own and is taught by it (FML, FedKD).
"""

import matplotlib.pyplot as plt
import numpy as np

import kinfed


def main(picture: str = "phones_and_servers.svg", rounds: int = 40, seeds: tuple[int, ...] = (0, 1, 2)) -> None:
    result = kinfed.run(
        models={"phone": "mlr", "server": "mlp"}, partition={"name": "dirichlet", "alpha": 0.5}, clients=20,
        algorithms="local,fd,fedmd,fml,fedkd", public=0.1, rounds=rounds, seeds=seeds,
        participation=1.0, steps=10,
    )  # fmt: skip
    clients = result.clients()
    clients["kind"] = np.where(clients["client"].str[-2:].astype(int) % 2, "server", "phone")
    accuracy = 100 * clients.groupby(["kind", "algorithm", "seed"])["personal_accuracy"].mean()
    table = accuracy.unstack("seed").loc[:, list(seeds)]
    methods = list(result.algorithms)
    print(table.agg(["mean", "min", "max"], axis=1).round(1))
    print((result.to_frame().groupby("algorithm")[["bytes_down", "bytes_up"]].mean() / 1e6).round(2), "MB")

    figure, axes = plt.subplots(figsize=(6, 4))
    for place, kind in enumerate(("phone", "server")):
        rows = table.loc[kind].loc[methods]
        at = np.arange(len(methods)) + 0.25 * (2 * place - 1)
        axes.bar(at, rows.mean(axis=1), width=0.45, label=f"{kind}s", alpha=0.85)
        axes.plot(at, rows, ".", color="#24292f", ms=4)
    axes.set_xticks(range(len(methods)), methods)
    axes.set(ylabel="accuracy of personal models, %", ylim=(60, 100))
    axes.legend(loc="lower right")
    figure.savefig(picture)


if __name__ == "__main__":
    main()
