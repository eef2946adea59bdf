"""Three nodes on one machine.

A whole deployment in one command: certificates, a server with TLS, three nodes with keys, data files and vaults of
their own, a run, and no process left at the end. The same settings simulated give the same curve. Needs the extra
`flower`.
"""

import subprocess
import sys

import matplotlib.pyplot as plt

import kinfed


def main(picture: str = "three_nodes.svg", rounds: int = 6) -> None:
    options = ["--algorithms", "ditto", "--rounds", str(rounds), "--eval-every", "1", "--out", "trial"]
    subprocess.run([sys.executable, "-m", "kinfed", "deploy", "up", "--local", "3", *options], check=True)
    deployed = kinfed.load("trial/run")
    simulated = kinfed.run(clients=3, algorithms="ditto", rounds=rounds, eval_every=1, seeds=(0,), participation=1.0)

    figure, axes = plt.subplots(figsize=(6, 4))
    for result, style, label in ((simulated, "-", "simulation"), (deployed, "o", "three Flower nodes")):
        history = result.history().dropna(subset="personal_accuracy")
        axes.plot(history["round"], 100 * history["personal_accuracy"], style, label=label)
        print(label, history["personal_accuracy"].round(4).tolist())
    axes.set(xlabel="round", ylabel="accuracy of personal models, %", xticks=range(1, rounds + 1))
    axes.legend(loc="lower right")
    figure.savefig(picture)


if __name__ == "__main__":
    main()
