"""Who are my kin?

FedFomo's server remembers how useful the model of every client proved to every other. Clients are sorted by the group
that they really belong to, which the method is never told: the blocks on the diagonal are what it found out.
"""

import matplotlib.pyplot as plt
import numpy as np

import kinfed


def main(picture: str = "who_are_my_kin.svg", rounds: int = 40) -> None:
    result = kinfed.run(partition="hidden_groups", algorithms="fedfomo", rounds=rounds, seeds=(0,))
    recorded = [entry.method["affinity"] for entry in result.run.trials[0].rounds if "affinity" in entry.method]
    affinity = np.array(recorded[-1])
    groups = np.arange(len(affinity)) % 4  # as the partition deals them; the method is never told
    order = np.argsort(groups, kind="stable")
    affinity = affinity[np.ix_(order, order)]
    np.fill_diagonal(affinity, np.nan)

    same = groups[order][:, None] == groups[order]
    print(f"mean affinity within groups {np.nanmean(affinity[same]):.2f}, between {np.nanmean(affinity[~same]):.2f}")
    figure, axes = plt.subplots(figsize=(6, 5))
    image = axes.imshow(affinity, cmap="Blues", vmin=0)
    for border in np.flatnonzero(np.diff(groups[order])) + 0.5:
        axes.axhline(border, color="black", linewidth=0.6)
        axes.axvline(border, color="black", linewidth=0.6)
    axes.set(xlabel="whose model", ylabel="helps whom", xticks=[], yticks=[])
    figure.colorbar(image, label="affinity")
    figure.savefig(picture)


if __name__ == "__main__":
    main()
