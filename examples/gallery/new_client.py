"""A new client joins.

A federation has finished its run when another client comes with a few examples of its own. It takes over what the
others have learned, fitted to its data, without a new run. How much does that help, by how much it brings?
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import kinfed
from kinfed.newcomers import adopt


def main(picture: str = "new_client.svg", rounds: int = 40, sizes: tuple[int, ...] = (5, 10, 20, 40, 80, 160)) -> None:
    x, y = load_digits(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(x))
    members, newcomer = rows[:1200], rows[1200:]
    federation = kinfed.Federation.from_arrays(x[members] / 16, y[members], members % 10, num_classes=10)
    kinfed.run(federation=federation, algorithms="ditto", model="mlp", rounds=rounds, seeds=(0,), out="finished")
    slanted = x.reshape(-1, 8, 8).copy()
    slanted[:, :4] = np.roll(slanted[:, :4], 1, axis=2)  # the newcomer writes otherwise than all others
    slanted = slanted.reshape(-1, 64) / 16

    figures: dict[str, list[float]] = {"alone": [], "server": [], "adopted": []}
    for size in sizes:
        own = np.concatenate([newcomer[:size], newcomer[200:]])  # so many to train with; the same rows to be judged by
        is_test = np.arange(len(own)) >= size
        data = kinfed.Federation.from_arrays(
            slanted[own], y[own], np.zeros(len(own)), test_rows=is_test, num_classes=10
        )
        adoption = adopt("finished", data, "ditto")
        for name, values in figures.items():
            values.append(100 * getattr(adoption, name).accuracy)
        print(f"{size} examples: " + ", ".join(f"{name} {values[-1]:.1f} %" for name, values in figures.items()))

    figure, axes = plt.subplots(figsize=(6, 4))
    for name, label in (("alone", "alone"), ("server", "the server's model as it is"), ("adopted", "adopted by Ditto")):
        axes.plot(sizes, figures[name], "o-", label=label)
    axes.set(xscale="log", xlabel="examples that the newcomer brings", ylabel="accuracy, %")
    axes.set_xticks(sizes, map(str, sizes))
    axes.minorticks_off()
    axes.legend(loc="lower right")
    figure.savefig(picture)


if __name__ == "__main__":
    main()
