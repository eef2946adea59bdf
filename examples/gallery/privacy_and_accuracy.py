"""Privacy budget against accuracy.

Each client protects each of its training examples: whatever leaves it, over all rounds, tells little about any one of
them. The smaller epsilon, the stronger the promise and the larger the noise. Training alone needs no promise. Needs
the extra `dp`.
"""

import matplotlib.pyplot as plt

import kinfed


def main(
    picture: str = "privacy_and_accuracy.svg",
    rounds: int = 20,
    seeds: tuple[int, ...] = (0, 1),
    noises: tuple[float, ...] = (0.7, 1, 2, 4, 8, 16),
) -> None:
    settings = {"clients": 5, "partition": "dirichlet", "model": "mlr", "rounds": rounds, "seeds": seeds, "lr": 0.2,
                "participation": 1.0, "steps": 5, "batch": 40, "eval_every": 0}  # fmt: skip
    points: dict[str, list[tuple[float, float]]] = {"fedavg": [], "ditto": []}
    for noise in noises:
        result = kinfed.run(algorithms="fedavg,ditto", dp_noise=noise, **settings)
        means = 100 * result.to_frame().groupby("algorithm")["personal_accuracy"].mean()
        for name, pairs in points.items():
            pairs.append((max(result.result(name).privacy["epsilon"]), means[name]))
            print(f"{name}, noise {noise:g}: epsilon {pairs[-1][0]:.2f}, accuracy {pairs[-1][1]:.1f} %")
    without = kinfed.run(algorithms="local,fedavg", **settings).to_frame().groupby("algorithm")["personal_accuracy"]

    figure, axes = plt.subplots(figsize=(6, 4))
    for name, pairs in points.items():
        axes.plot(*zip(*pairs, strict=True), "o-", label=name)
    for name, mean in (100 * without.mean()).items():
        axes.axhline(mean, linestyle=":", color="gray")
        axes.annotate(
            f"{name} without noise", (points["ditto"][-1][0], mean), xytext=(0, 3), textcoords="offset points"
        )
    axes.set(xscale="log", xlabel="epsilon of a client (delta 1e-5)", ylabel="accuracy of personal models, %")
    axes.legend(loc="lower right")
    figure.savefig(picture)


if __name__ == "__main__":
    main()
