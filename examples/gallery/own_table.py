"""A CSV file of your own.

569 tumours in a table with a column of hospitals; measurements of some hospitals are missing. One command or one call
goes from the file to a model for each hospital, and says what each gains over learning alone.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_breast_cancer

import kinfed


def write_table(path: str) -> None:
    """Tumours of five hospitals of different size, two of which do not measure everything."""
    table = load_breast_cancer(as_frame=True).frame.rename(columns={"target": "benign"}).iloc[:, [*range(8), -1]]
    numbers = np.random.default_rng(0)
    table["hospital"] = numbers.choice(["A", "B", "C", "D", "E"], len(table), p=[0.4, 0.3, 0.15, 0.1, 0.05])
    table.loc[table["hospital"].isin(["D", "E"]), "mean texture"] = np.nan
    table.to_csv(path, index=False)


def main(picture: str = "own_table.svg", rounds: int = 30, seeds: tuple[int, ...] = (0, 1, 2)) -> None:
    write_table("tumours.csv")
    result = kinfed.run(  # kinfed run --dataset tumours.csv --client-column hospital --label-column benign ...
        dataset="tumours.csv", client_column="hospital", label_column="benign", stratify=True,
        algorithms="local,fedavg,kin", rounds=rounds, seeds=seeds, participation=1.0, metric="auroc",
    )  # fmt: skip
    table = result.clients().pivot_table(index="client", columns="algorithm", values="personal_auroc", sort=False)
    print(table.round(3))

    figure, axes = plt.subplots(figsize=(6, 4))
    (100 * table[["local", "fedavg", "kin"]]).plot.bar(ax=axes, rot=0)
    axes.set(xlabel="hospital", ylabel="AUROC on its own test rows, %", ylim=(80, 100.5))
    axes.legend(loc="lower left")
    figure.savefig(picture)


if __name__ == "__main__":
    main()
