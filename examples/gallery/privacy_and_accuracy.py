"""Privacy budget against accuracy.

Each client protects each of its training examples: whatever leaves it, over all rounds, tells little about any one of
them. The smaller epsilon, the stronger the promise and the larger the noise. Training alone needs no promise. Needs
the extra `dp`.
"""

import matplotlib.pyplot as plt

import kinfed


def main(
    picture: str = "privacy_and_accuracy.svg",
    rounds: int = 40,
    seeds: tuple[int, ...] = (0, 1, 2),
    epsilons: tuple[float, ...] = (1, 2, 4, 8, 16, 32),
) -> None:
    settings = {"clients": 5, "partition": "dirichlet", "model": "mlr", "rounds": rounds, "seeds": seeds, "lr": 0.2,
                "participation": 1.0, "steps": 5, "batch": 40}  # fmt: skip
    accuracy: dict[str, list[float]] = {"fedavg": [], "ditto": []}
    for epsilon in epsilons:
        result = kinfed.run(algorithms="fedavg,ditto", dp_epsilon=epsilon, **settings)
        means = 100 * result.to_frame().groupby("algorithm")["personal_accuracy"].mean()
        print(f"epsilon {epsilon:g}: {means.round(1).to_dict()}")
        for name, values in accuracy.items():
            values.append(means[name])
    without = kinfed.run(algorithms="local,fedavg", **settings).to_frame().groupby("algorithm")["personal_accuracy"]

    figure, axes = plt.subplots(figsize=(6, 4))
    for name, values in accuracy.items():
        axes.plot(epsilons, values, "o-", label=name)
    for name, mean in (100 * without.mean()).items():
        axes.axhline(mean, linestyle=":", color="gray")
        axes.annotate(f"{name} without noise", (epsilons[0], mean), xytext=(0, 3), textcoords="offset points")
    axes.set(xscale="log", xlabel="epsilon of a client (delta 1e-5)", ylabel="accuracy of personal models, %")
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.minorticks_off()
    axes.legend(loc="lower right")
    figure.savefig(picture)


if __name__ == "__main__":
    main()
